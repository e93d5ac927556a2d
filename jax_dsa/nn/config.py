"""Sizes and switches of the attention modules and of the decoder built of them."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

from jax_dsa.core.checks import FLOATS, Args
from jax_dsa.nn.fp4 import BLOCK as FP4_BLOCK
from jax_dsa.nn.rotary import ROPE_LAYOUTS, RopeLayout

IndexerType = Literal["full", "shared"]
"""What a layer selects by: its own indexer, or the one of the last layer that has one."""

_SIZES = (
    *("model_dim", "num_heads", "kv_rank", "nope_dim", "v_dim"),
    *("index_heads", "index_dim", "top_k"),
)


@dataclasses.dataclass(frozen=True)
class AttentionConfig:
    """One DeepSeek-style attention layer: multi-head latent attention (MLA) with a lightning
    indexer.

    A token's cache entry is its latent vector and its rotary key, D = kv_rank + rope_dim numbers,
    and the indexer's key.
    """

    model_dim: int
    num_heads: int
    q_rank: int | None
    """Width of the latent that the queries of attention and indexer are both projected from. None
    projects them from the hidden states, the indexer's after a layer norm."""
    kv_rank: int
    """E, width of the latent that keys and values are projected from."""
    nope_dim: int
    """Part of each head's query and key without position."""
    rope_dim: int
    """Part with rotary position, one key shared by all heads."""
    v_dim: int
    index_heads: int
    index_dim: int
    index_rope_dim: int
    top_k: int
    rope_base: float = 10000.0
    rope_layout: RopeLayout = "interleaved"
    index_rope_layout: RopeLayout = "half"
    index_hadamard: bool = False
    index_fp8: bool = False
    """Quantises the indexer's queries and keys to float8_e4m3fn. It stops their gradient:
    for inference."""
    index_fp4: bool = False
    """Rounds the indexer's queries and keys to what FP4 holds, gradients straight through:
    `fake_quantize_fp4`, for quantisation-aware training."""
    fp8: bool = False
    """Projections, and the feed-forward layers of a decoder, multiply in FP8, forward and backward:
    `Fp8Linear`. Not the indexer's head weights, nor what the heads' latents are multiplied with."""
    norm_eps: float = 1e-6
    dtype: Any = jnp.float32
    """Of activations and caches; parameters are float32."""
    rope_frequencies: tuple[float, ...] | None = None
    """Radians per position of each rotary pair, of attention and indexer, in place of those that
    `rope_base` gives: `yarn_frequencies` makes some."""
    rope_factor: float = 1.0
    """Multiplies rotated queries and keys (YaRN's attention factor)."""
    scale_factor: float = 1.0
    """Multiplies the attention scores (YaRN's correction of their scale)."""
    bias: bool = False
    """Of the projections to the latents and of the output."""
    sinks: bool = False
    """A learnt logit of each head without a value, in the softmax's sum."""
    gate: bool = False
    """Multiplies the heads' values by the sigmoid of a projection of the hidden states."""
    log_scaling: bool = False
    """Multiplies the queries of each head, and of each indexer head, by
    `scale log(position + 1) + bias`, both learnt."""
    index_rope_last: bool = False
    """The indexer's rotary elements are its last, not its first."""
    index_norm_eps: float | None = None
    """Of the indexer's layer norms; None is `norm_eps`."""
    shares_keys: bool = False
    """The layer has no keys of its own and attends to another layer's."""
    query_chunk: int | None = None
    """Sparse attention to a sequence takes this many queries at a time (of each stripe, if it is
    stored in stripes), and computes them again in the backward pass: against latent keys a query
    has num_heads (kv_rank + rope_dim) numbers, which for long sequences are most of a step's
    memory. T is a multiple of it, or less. None takes all at once."""

    def __post_init__(self) -> None:
        """Rejects sizes that no layer can be built of."""
        args = Args("AttentionConfig", "", np.empty(0), "K")
        if self.q_rank is not None:
            args.integer("q_rank", self.q_rank, 1)
        if self.query_chunk is not None:
            args.integer("query_chunk", self.query_chunk, 1)
        for name in _SIZES:
            args.integer(name, getattr(self, name), 1)
        for name in ("rope_dim", "index_rope_dim"):
            args.integer(name, getattr(self, name), 0)
            if getattr(self, name) % 2:
                raise ValueError(f"AttentionConfig: {name} is {getattr(self, name)}, want even")
        for name in ("rope_layout", "index_rope_layout"):
            layout = getattr(self, name)
            args.option(name, layout, layout in ROPE_LAYOUTS, f"one of {ROPE_LAYOUTS}")
        args.option("rope_base", self.rope_base, args.real("rope_base", self.rope_base) > 0, "> 0")
        args.option("norm_eps", self.norm_eps, args.real("norm_eps", self.norm_eps) >= 0, ">= 0")
        args.dtype("dtype", self.dtype, FLOATS)
        if self.index_rope_dim > self.index_dim:
            raise ValueError(
                f"AttentionConfig: index_rope_dim is {self.index_rope_dim}, want at most "
                f"index_dim = {self.index_dim}"
            )
        if self.rope_frequencies is not None:
            pairs = len(self.rope_frequencies)
            if (self.rope_dim, self.index_rope_dim) != (2 * pairs, 2 * pairs):
                raise ValueError(
                    f"AttentionConfig: rope_frequencies has {pairs} numbers, want rope_dim / 2 = "
                    f"{self.rope_dim // 2} and index_rope_dim / 2 = {self.index_rope_dim // 2}"
                )
        if self.index_fp8 and self.index_fp4:
            raise ValueError("AttentionConfig: index_fp8 and index_fp4 are True, want one of them")
        check_quantised("AttentionConfig", self)

    @property
    def scale(self) -> float:
        """Of the attention scores: (nope_dim + rope_dim)^-1/2 times `scale_factor`, whichever form
        computes them."""
        return float((self.nope_dim + self.rope_dim) ** -0.5 * self.scale_factor)

    @property
    def rotation(self) -> dict[str, Any]:
        """What `rope` takes beside the layout."""
        return {
            "base": self.rope_base,
            "frequencies": self.rope_frequencies,
            "factor": self.rope_factor,
        }


def check_quantised(name: str, config: Any) -> None:
    """Rejects an `index_dim` that cannot be turned or quantised as `config` says."""
    width = config.index_dim
    if config.index_hadamard and width & (width - 1):
        raise ValueError(f"{name}: index_dim is {width}, want a power of two for index_hadamard")
    if config.index_fp4 and width % FP4_BLOCK:
        raise ValueError(
            f"{name}: index_dim is {width}, want a multiple of {FP4_BLOCK} for index_fp4"
        )


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """A decoder-only language model of pre-norm blocks: attention, then a SwiGLU layer."""

    attention: AttentionConfig
    vocab: int
    num_layers: int
    mlp_dim: int
    indexer_types: tuple[IndexerType, ...] = ("full",)
    """Of the layers, from the first one on, and over again: "full" selects with an indexer of its
    own, "shared" has none and attends to what the last "full" layer before it selected."""

    def __post_init__(self) -> None:
        """Rejects sizes below 1, and a pattern that leaves a layer without a selection."""
        args = Args("DecoderConfig", "", np.empty(0), "K")
        for name in ("vocab", "num_layers", "mlp_dim"):
            args.integer(name, getattr(self, name), 1)
        types = self.indexer_types
        known = isinstance(types, tuple) and set(types) <= {"full", "shared"}
        if not known or types[:1] != ("full",):
            raise ValueError(
                f"DecoderConfig: indexer_types is {types!r}, want a tuple of 'full' and 'shared' "
                f"that begins with 'full'"
            )

    @property
    def layers(self) -> tuple[IndexerType, ...]:
        """The indexer type of each layer."""
        types = self.indexer_types
        return tuple(types[i % len(types)] for i in range(self.num_layers))
