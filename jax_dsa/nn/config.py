"""Configurations of the attention layers and of the decoder."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Literal

import jax.numpy as jnp
import numpy as np

from jax_dsa.core.checks import FLOATS, Args
from jax_dsa.nn.arguments import check_flags, check_rotation
from jax_dsa.nn.fp4 import BLOCK as FP4_BLOCK
from jax_dsa.nn.rotary import ROPE_LAYOUTS, RopeLayout

if TYPE_CHECKING:
    from jax_dsa.nn.grouped_config import GroupedConfig

IndexerType = Literal["full", "shared"]
"""Whether a layer has an indexer ("full") or reuses an earlier layer's selection ("shared")."""

_SIZES = (
    *("model_dim", "num_heads", "kv_rank", "nope_dim", "v_dim"),
    *("index_heads", "index_dim", "top_k"),
)


@dataclasses.dataclass(frozen=True)
class AttentionConfig:
    """One layer of multi-head latent attention (MLA) with a lightning indexer.

    A cache stores, for each token, a row of D = kv_rank + rope_dim numbers (the latent and the
    rotary key) and the indexer's key.

    Attributes:
        model_dim: M, width of the hidden states. 7168 in DeepSeek-V3.2.
        num_heads: N, number of attention heads. 128 in DeepSeek-V3.2, 64 in GLM-5.
        q_rank: Width of the latent that the queries of attention and indexer are both projected
            from; 1536 in DeepSeek-V3.2. None, as in Mistral-Large-4, projects them from the hidden
            states; the indexer then applies a layer norm to these first.
        kv_rank: E, width of the latent that keys and values are projected from. 512 in all
            published models.
        nope_dim: P, number of elements without position in each head's query and key. 128 in
            DeepSeek-V3.2.
        rope_dim: R, number of rotary elements in each head's query and in the key that all heads
            share; even. 64 in all published models, and 0 in the layers of Mistral-Large-4 that
            have no position.
        v_dim: V, width of each head's value. 128 in DeepSeek-V3.2, 256 in GLM-5.
        index_heads: J, number of the indexer's heads. 64 in DeepSeek-V3.2, 32 in GLM-5.
        index_dim: C, width of the indexer's queries and keys. 128 in all published models.
        index_rope_dim: Number of rotary elements of the indexer's queries and keys; even. Published
            models have `rope_dim`.
        top_k: K, number of keys that the indexer selects for a query. 2048 in all published models.
            With `index_pool` it is the number of tokens in the selected pools.
        rope_base: Base of the rotary frequencies of attention and indexer. Default: 10000.0.
        rope_layout: Rotary layout of the attention's queries and keys, "interleaved" or "half"
            (Hy4); see `rope`. Default: 'interleaved'.
        index_rope_layout: Rotary layout of the indexer's queries and keys, "interleaved" (GLM-5 and
            Mistral-Large-4) or "half". Default: 'half'.
        index_hadamard: Whether to apply the Hadamard transform to the indexer's queries and keys,
            which spreads outliers before quantisation and changes no score. Default: False.
        index_fp8: Whether to quantise the indexer's queries and keys to float8_e4m3fn. This stops
            their gradient, so it is for inference. Default: False.
        index_fp4: Whether to round the indexer's queries and keys to FP4 values with
            `fake_quantize_fp4`, which passes gradients straight through, for quantisation-aware
            training. Default: False.
        fp8: Whether projections, and the feed-forward layers of a decoder, multiply in FP8 in both
            passes, as `Fp8Linear`. The indexer's head weights and the up-projections of the latent
            stay in `dtype`. Default: False.
        norm_eps: Epsilon of the layer's norms. Default: 1e-06.
        dtype: Dtype of activations, caches and results, whatever the dtype of the layer's input; a
            float32 layer returns float32 for bfloat16 hidden states. Parameters are float32.
            Default: float32.
        rope_frequencies: Radians per position of each rotary pair, in attention and indexer, which
            replace those of `rope_base`. `yarn_frequencies` computes those of DeepSeek-V3.2, and
            `from_hf` computes those of every model. Default: None.
        rope_factor: Multiplies the rotary elements of queries and keys (YaRN's attention factor).
            Default: 1.0.
        scale_factor: Multiplies the attention scores (YaRN's correction of the softmax scale, as in
            DeepSeek-V3.2). Default: 1.0.
        bias: Whether the projections to the latents and the output projection have a bias. Default:
            False.
        sinks: Whether each head has a sink, a learnt logit without a value in the softmax's
            denominator, as in Hy4. Default: False.
        gate: Whether the heads' values are multiplied by the sigmoid of a projection of the hidden
            states, as in Hy4. Default: False.
        log_scaling: Whether the queries of each head, and of each head of the indexer, are
            multiplied by `scale log(position + 1) + bias`, where both parameters are learnt, as in
            Mistral-Large-4. Default: False.
        index_rope_last: Whether the rotary elements of the indexer are its last ones, as in Hy4,
            instead of its first ones. Default: False.
        index_norm_eps: Epsilon of the indexer's layer norms, which Hy4 and Mistral-Large-4 choose
            separately. None means `norm_eps`. Default: None.
        shares_keys: Whether the layer attends to another layer's keys and has none of its own, like
            some layers of Mistral-Large-4. Default: False.
        index_pool: Number of tokens whose keys the indexer pools into one, a divisor of `top_k`; 4
            in GLM-5.3-Flash. The indexer then selects `top_k // index_pool` pools, and its loss
            compares pools. The pools' keys have no position, so `index_rope_dim` is 0. None: the
            indexer selects single keys. Default: None.
        index_tail: Whether a query also attends to the tokens after its last complete pool, up to
            itself, beside the selected ones. Without them, the first `index_pool - 1` queries
            attend to nothing. Only used with `index_pool`. Default: True.
        query_chunk: Number of queries, of each stripe, that sparse attention processes at a time;
            None means all. The backward pass recomputes each chunk. A query of the absorbed form
            has num_heads (kv_rank + rope_dim) numbers, which for long sequences are most of a
            step's memory. T must be a multiple of the chunk, or at most as large. Default: None.

    Raises:
        TypeError: If a field has the wrong type.
        ValueError: If no layer has such sizes.
    """

    model_dim: int
    num_heads: int
    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
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
    index_fp4: bool = False
    fp8: bool = False
    norm_eps: float = 1e-6
    dtype: Any = jnp.float32
    rope_frequencies: tuple[float, ...] | None = None
    rope_factor: float = 1.0
    scale_factor: float = 1.0
    bias: bool = False
    sinks: bool = False
    gate: bool = False
    log_scaling: bool = False
    index_rope_last: bool = False
    index_norm_eps: float | None = None
    shares_keys: bool = False
    index_pool: int | None = None
    index_tail: bool = True
    query_chunk: int | None = None

    def __post_init__(self) -> None:
        """Rejects sizes that no layer can have."""
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
                raise ValueError(f"AttentionConfig: {name} is {getattr(self, name)}, expected even")
        for name in ("rope_layout", "index_rope_layout"):
            layout = getattr(self, name)
            args.option(name, layout, layout in ROPE_LAYOUTS, f"one of {ROPE_LAYOUTS}")
        args.option("rope_base", self.rope_base, args.real("rope_base", self.rope_base) > 0, "> 0")
        args.option("norm_eps", self.norm_eps, args.real("norm_eps", self.norm_eps) >= 0, ">= 0")
        args.dtype("dtype", self.dtype, FLOATS)
        check_flags(args, self)
        check_rotation(args, self)
        if self.index_rope_dim > self.index_dim:
            raise ValueError(
                f"AttentionConfig: index_rope_dim is {self.index_rope_dim}, expected at most "
                f"index_dim = {self.index_dim}"
            )
        if self.rope_frequencies is not None:
            pairs = len(self.rope_frequencies)
            if (self.rope_dim, self.index_rope_dim) != (2 * pairs, 2 * pairs):
                raise ValueError(
                    f"AttentionConfig: rope_frequencies has {pairs} numbers, expected "
                    f"rope_dim / 2 = {self.rope_dim // 2} and "
                    f"index_rope_dim / 2 = {self.index_rope_dim // 2}"
                )
        if self.index_pool is not None:
            pool = args.integer("index_pool", self.index_pool, 1)
            if self.top_k % pool:
                raise ValueError(
                    f"AttentionConfig: index_pool is {pool}, expected a divisor of "
                    f"top_k = {self.top_k}"
                )
            if self.index_rope_dim:
                raise ValueError(
                    f"AttentionConfig: index_rope_dim is {self.index_rope_dim}, expected 0 with "
                    f"index_pool = {pool}, because the keys of pools have no position"
                )
        if self.index_fp8 and self.index_fp4:
            raise ValueError(
                "AttentionConfig: index_fp8 and index_fp4 are True, expected at most one of them"
            )
        check_index_dim("AttentionConfig", self)

    @property
    def selected(self) -> int:
        """The number of keys, or of pools, that the indexer selects for a query."""
        return self.top_k // (self.index_pool or 1)

    @property
    def attended(self) -> int:
        """The largest number of keys that a query attends to in sparse attention."""
        tail = (self.index_pool or 1) - 1 if self.index_tail else 0
        return self.top_k + tail

    @property
    def scale(self) -> float:
        """The softmax scale of both forms, (nope_dim + rope_dim)^-1/2 times `scale_factor`."""
        return float((self.nope_dim + self.rope_dim) ** -0.5 * self.scale_factor)

    @property
    def rotation(self) -> dict[str, Any]:
        """The keyword arguments of `rope`, except for the layout."""
        return {
            "base": self.rope_base,
            "frequencies": self.rope_frequencies,
            "factor": self.rope_factor,
        }


def check_index_dim(name: str, config: Any) -> None:
    """Rejects an `index_dim` that `index_hadamard` or `index_fp4` cannot handle.

    Args:
        name: Name of the configuration's class, for the error message.
        config: The configuration.

    Raises:
        ValueError: If `index_dim` does not fit.
    """
    width = config.index_dim
    if config.index_hadamard and width & (width - 1):
        raise ValueError(
            f"{name}: index_dim is {width}, expected a power of two for index_hadamard"
        )
    if config.index_fp4 and width % FP4_BLOCK:
        raise ValueError(
            f"{name}: index_dim is {width}, expected a multiple of {FP4_BLOCK} for index_fp4"
        )


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """A decoder-only language model of pre-norm blocks: attention, then a SwiGLU layer.

    Attributes:
        attention: Configuration of every attention layer; a `GroupedConfig` for grouped heads.
        vocab: Number of tokens in the vocabulary.
        num_layers: Number of blocks.
        mlp_dim: Width of the hidden layer of SwiGLU.
        indexer_types: Indexer types of the layers, from the first one on; the pattern repeats. A
            "full" layer selects with its own indexer. A "shared" layer has none and attends to the
            keys that the last "full" layer before it selected. In GLM-5.2 three of four layers are
            "shared". Default: ('full',).
        norm_eps: Epsilon of the residual stream's norms, which are those before attention, before
            SwiGLU and before the vocabulary projection; `rms_norm_eps` in a `config.json`. None
            means `attention.norm_eps`. Default: None.
        shared_teacher: Whether an indexer learns the mean attention of all layers that attend to
            its selection, in sparse attention. Each of them adds its own while it runs, and the
            "full" layer's `aux.kl` is the loss. Otherwise, and in dense attention, an indexer
            learns the attention of its own layer. Default: False.

    Raises:
        TypeError: If a field has the wrong type.
        ValueError: If a size is less than 1, if `norm_eps` is negative, or if `indexer_types`
            leaves a layer without a selection.
    """

    attention: AttentionConfig | GroupedConfig
    vocab: int
    num_layers: int
    mlp_dim: int
    indexer_types: tuple[IndexerType, ...] = ("full",)
    norm_eps: float | None = None
    shared_teacher: bool = False

    def __post_init__(self) -> None:
        """Rejects wrong sizes, and a pattern that leaves a layer without a selection."""
        args = Args("DecoderConfig", "", np.empty(0), "K")
        for name in ("vocab", "num_layers", "mlp_dim"):
            args.integer(name, getattr(self, name), 1)
        if (eps := self.norm_eps) is not None:
            args.option("norm_eps", eps, args.real("norm_eps", eps) >= 0, ">= 0")
        fits = isinstance(self.attention, AttentionConfig) or not self.shared_teacher
        shared = args.flag("shared_teacher", self.shared_teacher)
        args.option("shared_teacher", shared, fits, "False with grouped heads")
        types = self.indexer_types
        known = isinstance(types, tuple) and set(types) <= {"full", "shared"}
        if not known or types[:1] != ("full",):
            raise ValueError(
                f"DecoderConfig: indexer_types is {types!r}, expected a tuple of 'full' and "
                f"'shared' that begins with 'full'"
            )

    @property
    def layers(self) -> tuple[IndexerType, ...]:
        """The indexer type of each layer."""
        types = self.indexer_types
        return tuple(types[i % len(types)] for i in range(self.num_layers))

    @property
    def residual_norm(self) -> dict[str, Any]:
        """The keyword arguments of the residual stream's norms, except for the random streams."""
        a, eps = self.attention, self.norm_eps
        return {"epsilon": a.norm_eps if eps is None else eps, "dtype": a.dtype}
