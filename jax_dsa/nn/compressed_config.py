"""Sizes and switches of an attention layer with compressed keys."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_dsa.core.checks import FLOATS, Args
from jax_dsa.core.typing import Array, Float, Int
from jax_dsa.nn.arguments import check_flags
from jax_dsa.nn.config import check_index_dim
from jax_dsa.nn.rotary import rope


@dataclasses.dataclass(frozen=True)
class CompressedConfig:
    """One layer that attends to a window of keys and, with a `ratio`, to compressed keys.

    Attributes:
        model_dim: M, width of the hidden states.
        num_heads: N, number of attention heads, a multiple of `out_groups`. 64 or 128 in
            DeepSeek-V4.
        q_rank: Width of the latent that the queries of attention and indexer are both projected
            from.
        head_dim: D, width of queries, keys and values alike; all heads share one key, which is
            their value. 512 in DeepSeek-V4.
        rope_dim: Number of rotary elements, the last ones of queries and keys; even.
        out_groups: Number of head groups whose outputs are projected to `out_rank` numbers each.
        out_rank: Width of each group's projected output.
        window: Number of latest keys that each query attends to, its own among them. 128 in
            DeepSeek-V4.
        ratio: Tokens per compressed key; 4 or 128 in DeepSeek-V4. With None the layer has no
            compressed keys. Default: None.
        overlap: Whether a compressed key pools the tokens of its own block and of the block before
            it, as with ratio 4 in DeepSeek-V4. Default: False.
        top_k: Number of compressed keys that the indexer selects for a query; 512 or 1024 with
            ratio 4 in DeepSeek-V4. None attends to all, as with ratio 128. Default: None.
        index_heads: J, number of the indexer's heads. 64 in DeepSeek-V4. Default: 1.
        index_dim: C, width of the indexer's queries and keys. Default: 128.
        index_hadamard: Whether to apply the Hadamard transform to the indexer's queries and keys,
            which spreads outliers before rounding and changes no score. Default: False.
        index_fp4: Whether to round the indexer's queries and keys to FP4 values with
            `fake_quantize_fp4`, as DeepSeek-V4 is served. Default: False.
        rope_base: Base of the rotary frequencies of attention and indexer. In DeepSeek-V4, layers
            without compressed keys have another base than the others. Default: 10000.0.
        rope_frequencies: Radians per position of each rotary pair, in attention and indexer, which
            replace those of `rope_base`. Default: None.
        rope_factor: Multiplies the rotary elements of queries and keys (YaRN's attention factor).
            Default: 1.0.
        norm_eps: Epsilon of the layer's norms. Default: 1e-06.
        dtype: Dtype of activations, caches and results, whatever the dtype of the layer's input; a
            float32 layer returns float32 for bfloat16 hidden states. Parameters are float32.
            Default: float32.

    Raises:
        TypeError: If a field has the wrong type.
        ValueError: If no layer has such sizes.
    """

    model_dim: int
    num_heads: int
    q_rank: int
    head_dim: int
    rope_dim: int
    out_groups: int
    out_rank: int
    window: int
    ratio: int | None = None
    overlap: bool = False
    top_k: int | None = None
    index_heads: int = 1
    index_dim: int = 128
    index_hadamard: bool = False
    index_fp4: bool = False
    rope_base: float = 10000.0
    rope_frequencies: tuple[float, ...] | None = None
    rope_factor: float = 1.0
    norm_eps: float = 1e-6
    dtype: Any = jnp.float32

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
        check_flags(args, self)
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
