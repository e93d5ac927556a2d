"""Sizes and switches of an attention layer with compressed keys."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_dsa.core.checks import FLOATS, Args
from jax_dsa.core.typing import Array, Float, Int
from jax_dsa.nn.config import check_index_dim
from jax_dsa.nn.rotary import rope


@dataclasses.dataclass(frozen=True)
class CompressedConfig:
    """One layer that attends to a window of keys and, with a `ratio`, to compressed keys.

    Raises:
        TypeError: If a field has the wrong type.
        ValueError: If no layer has such sizes.
    """

    model_dim: int
    """M, width of the hidden states."""
    num_heads: int
    """N, number of attention heads, a multiple of `out_groups`."""
    q_rank: int
    """Width of the latent that the queries of attention and indexer are both projected from."""
    head_dim: int
    """D, width of queries, keys and values alike; all heads share one key, which is their value."""
    rope_dim: int
    """Number of rotary elements, the last ones of queries and keys; even."""
    out_groups: int
    """Number of head groups whose outputs are projected to `out_rank` numbers each."""
    out_rank: int
    """Width of each group's projected output."""
    window: int
    """Number of latest keys that each query attends to, its own among them."""
    ratio: int | None = None
    """Tokens per compressed key; None: the layer has no compressed keys."""
    overlap: bool = False
    """Whether a compressed key pools the tokens of its own block and of the block before it."""
    top_k: int | None = None
    """Number of compressed keys that the indexer selects for a query; None attends to all."""
    index_heads: int = 1
    """J, number of the indexer's heads."""
    index_dim: int = 128
    """C, width of the indexer's queries and keys."""
    index_hadamard: bool = False
    """As in `AttentionConfig`."""
    index_fp4: bool = False
    """As in `AttentionConfig`."""
    rope_base: float = 10000.0
    """As in `AttentionConfig`."""
    rope_frequencies: tuple[float, ...] | None = None
    """As in `AttentionConfig`."""
    rope_factor: float = 1.0
    """As in `AttentionConfig`."""
    norm_eps: float = 1e-6
    """Epsilon of the layer's norms."""
    dtype: Any = jnp.float32
    """Dtype of activations and caches; parameters are float32."""

    def __post_init__(self) -> None:
        """Rejects sizes that no layer can have."""
        args = Args("CompressedConfig", "", np.empty(0), "K")
        sizes = ("model_dim", "num_heads", "q_rank", "head_dim", "out_groups", "out_rank", "window")
        for name in (*sizes, "index_heads", "index_dim"):
            args.integer(name, getattr(self, name), 1)
        for name in ("ratio", "top_k"):
            if getattr(self, name) is not None:
                args.integer(name, getattr(self, name), 1)
        args.integer("rope_dim", self.rope_dim, 0)
        args.dtype("dtype", self.dtype, FLOATS)
        most = self.head_dim if self.top_k is None else min(self.head_dim, self.index_dim)
        if self.rope_dim % 2 or self.rope_dim > most:
            raise ValueError(
                f"CompressedConfig: rope_dim is {self.rope_dim}, expected an even number of at "
                f"most {most}"
            )
        if self.num_heads % self.out_groups:
            raise ValueError(
                f"CompressedConfig: num_heads is {self.num_heads}, expected a multiple of "
                f"out_groups = {self.out_groups}"
            )
        if self.ratio is None and (self.overlap or self.top_k is not None):
            raise ValueError(
                "CompressedConfig: ratio is None, expected an int because overlap or top_k is set"
            )
        check_index_dim("CompressedConfig", self)

    def rotate(
        self, x: Float[Array, "B T *H D"], positions: Int[Array, "B T"]
    ) -> Float[Array, "B T *H D"]:
        """Returns `x` with its last `rope_dim` elements rotated by their positions."""
        head, tail = jnp.split(x, [x.shape[-1] - self.rope_dim], axis=-1)
        tail = rope(
            tail,
            positions,
            base=self.rope_base,
            layout="interleaved",
            frequencies=self.rope_frequencies,
            factor=self.rope_factor,
        )
        return jnp.concatenate([head, tail], axis=-1)
