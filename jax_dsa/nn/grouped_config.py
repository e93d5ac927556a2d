"""Sizes and switches of an attention layer with grouped heads and an indexer of blocks."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, get_args

import jax.numpy as jnp
import numpy as np

from jax_dsa.core.checks import FLOATS, Args
from jax_dsa.core.typing import Array, Float, Int
from jax_dsa.nn.arguments import check_flags, check_rotation
from jax_dsa.nn.rotary import are_sections, rope
from jax_dsa.ops.sparse_attention.spec import BLOCK_SIZES

BlockIndexerKind = Literal["max", "mean"]
"""How an indexer scores a block: by its best key, or by the mean of its keys."""

_SIZES = (
    *("model_dim", "num_heads", "kv_heads", "head_dim"),
    *("block_size", "top_k", "index_heads", "index_dim"),
)


@dataclasses.dataclass(frozen=True)
class GroupedConfig:
    """One layer of grouped-query attention to the blocks of keys that an indexer selects.

    Queries and keys of each head have an RMS norm, whose factor is 1 + its parameter, and rotary
    position in their first `rope_dim` elements (layout "half"). Those of the indexer, too.

    Attributes:
        model_dim: M, width of the hidden states. 6144 in MiniMax-M3, 2560 in Qwen3.8-Flash-Next.
        num_heads: N, number of query heads, a multiple of `kv_heads`. 64 in MiniMax-M3, 24 in
            Qwen3.8.
        kv_heads: G, number of heads of keys and values. 4 in MiniMax-M3, 2 in Qwen3.8.
        head_dim: D, width of queries, keys and values. 128 in MiniMax-M3, 256 in Qwen3.8.
        rope_dim: Number of rotary elements of queries and keys, of attention and indexer; even. 64
            in both models.
        indexer: How the indexer scores a block of keys. "max", as in MiniMax-M3: by the key with
            the largest score, in each KV head on its own. "mean", as in Qwen3.8: by the mean of the
            block's keys before their norm, with one selection for all heads; only complete blocks
            are selected, and a query also attends to the tokens after them. None gives the layer no
            indexer; it attends to all keys. Default: None.
        block_size: Number of keys in a block: 1, 4, 16, 32, 64 or 128. 128 in MiniMax-M3, 4 in
            Qwen3.8. Default: 128.
        top_k: K, number of blocks that the indexer selects for a query. 16 in MiniMax-M3, 512 in
            Qwen3.8. Default: 16.
        index_heads: J, number of the indexer's heads; `kv_heads` with "max". 4 in both models.
            Default: 1.
        index_dim: C, width of the indexer's queries and keys. 128 in both models. Default: 128.
        local_blocks: Number of newest blocks, within `top_k`, that are always selected. Only with
            "max". Default: 1.
        sink_blocks: Number of first blocks, within `top_k`, that are always selected. Only with
            "max". Default: 0.
        gate: Whether the heads' outputs are multiplied by the sigmoid of a projection of the hidden
            states, as in Qwen3.8. Default: False.
        bias: Whether the projections of queries, keys, values and outputs have a bias. Default:
            False.
        rope_base: Base of the rotary frequencies of attention and indexer. Default: 10000.0.
        rope_frequencies: Radians per position of each rotary pair, which replace those of
            `rope_base`. Default: None.
        rope_factor: Multiplies the rotary elements of queries and keys (YaRN's attention factor).
            Default: 1.0.
        mrope_sections: Numbers of rotary pairs for the positions of a token in time, height and
            width, as in `rope`; (11, 11, 10) in Qwen3.8. Positions may then be [3, B, T]. Default:
            None.
        norm_eps: Epsilon of the layer's norms. Default: 1e-06.
        fp8: Whether projections multiply in FP8 in both passes, as `Fp8Linear`. Default: False.
        query_chunk: Number of queries that the indexer's loss over selected blocks processes at a
            time; None means all. The backward pass recomputes each chunk. With "max", the loss of a
            query has kv_heads top_k block_size numbers, 8192 in MiniMax-M3, in each of several
            arrays. T must be a multiple of the chunk, or at most as large. Default: None.
        dtype: Dtype of activations, caches and results, whatever the dtype of the layer's input.
            Parameters are float32. Default: float32.

    Raises:
        TypeError: If a field has the wrong type.
        ValueError: If no layer has such sizes.
    """

    model_dim: int
    num_heads: int
    kv_heads: int
    head_dim: int
    rope_dim: int
    indexer: BlockIndexerKind | None = None
    block_size: int = 128
    top_k: int = 16
    index_heads: int = 1
    index_dim: int = 128
    local_blocks: int = 1
    sink_blocks: int = 0
    gate: bool = False
    bias: bool = False
    rope_base: float = 10000.0
    rope_frequencies: tuple[float, ...] | None = None
    rope_factor: float = 1.0
    mrope_sections: tuple[int, int, int] | None = None
    norm_eps: float = 1e-6
    fp8: bool = False
    query_chunk: int | None = None
    dtype: Any = jnp.float32

    def __post_init__(self) -> None:
        """Rejects sizes that no layer can have."""
        args = Args("GroupedConfig", "", np.empty(0), "K")
        for name in _SIZES:
            args.integer(name, getattr(self, name), 1)
        if self.query_chunk is not None:
            args.integer("query_chunk", self.query_chunk, 1)
        for name in ("rope_dim", "local_blocks", "sink_blocks"):
            args.integer(name, getattr(self, name), 0)
        args.option("rope_base", self.rope_base, args.real("rope_base", self.rope_base) > 0, "> 0")
        args.option("norm_eps", self.norm_eps, args.real("norm_eps", self.norm_eps) >= 0, ">= 0")
        args.dtype("dtype", self.dtype, FLOATS)
        check_flags(args, self)
        kinds = (*get_args(BlockIndexerKind), None)
        args.option("indexer", self.indexer, self.indexer in kinds, f"one of {kinds}")
        size = self.block_size
        args.option("block_size", size, size in BLOCK_SIZES, f"one of {BLOCK_SIZES}")
        most = self.head_dim if self.indexer is None else min(self.head_dim, self.index_dim)
        fits = self.rope_dim % 2 == 0 and self.rope_dim <= most
        args.option("rope_dim", self.rope_dim, fits, f"an even number of at most {most}")
        groups, heads = self.kv_heads, self.num_heads
        args.option("num_heads", heads, heads % groups == 0, f"a multiple of kv_heads = {groups}")
        if self.indexer != "max":
            for name, default in (("local_blocks", 1), ("sink_blocks", 0)):
                forced, want = getattr(self, name), f"{default} without indexer='max'"
                args.option(name, forced, forced == default, want)
        if self.indexer == "max":
            own, want = self.index_heads, f"kv_heads = {groups} with indexer='max'"
            args.option("index_heads", own, own == groups, want)
        pairs = self.rope_dim // 2
        check_rotation(args, self)
        if (frequencies := self.rope_frequencies) is not None:
            want = f"rope_dim / 2 = {pairs} numbers"
            args.option("rope_frequencies", frequencies, len(frequencies) == pairs, want)
        if (sections := self.mrope_sections) is not None:
            want = f"three numbers of pairs whose sum is rope_dim / 2 = {pairs}, as in nn.rope"
            known = isinstance(sections, tuple) and are_sections(sections, pairs)
            args.option("mrope_sections", sections, known, want)

    @property
    def selected(self) -> int:
        """The number of blocks that the indexer selects for a query."""
        return self.top_k

    @property
    def attended(self) -> int:
        """The largest number of keys that a query attends to in sparse attention."""
        return self.top_k * self.block_size + (self.block_size - 1 if self.indexer == "mean" else 0)

    @property
    def scale(self) -> float:
        """The softmax scale, D^-1/2."""
        return float(self.head_dim**-0.5)

    @property
    def index_scale(self) -> float:
        """The scale of the indexer's logits, C^-1/2."""
        return float(self.index_dim**-0.5)

    def rotate(
        self, x: Float[Array, "B T *H D"], positions: Int[Array, "B T"] | Int[Array, "3 B T"]
    ) -> Float[Array, "B T *H D"]:
        """Returns `x` with its first `rope_dim` elements rotated by their positions."""
        head, tail = jnp.split(x, [self.rope_dim], axis=-1)
        head = rope(
            head,
            positions,
            base=self.rope_base,
            frequencies=self.rope_frequencies,
            factor=self.rope_factor,
            sections=self.mrope_sections if positions.ndim == 3 else None,
        )
        return jnp.concatenate([head, tail], axis=-1)
