"""Grouped-query attention to blocks of keys that an indexer selects.

MiniMax-M3 selects blocks of 128 keys by their best key, for each KV head on its own. Qwen3.8
selects blocks of 4 keys by the mean of their keys, and adds the tokens after the last complete
block.

Sources: MiniMax-M3 and its kernels (2026); Qwen3.8-Flash-Next (2026); their configurations and
names in `transformers`.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jax_dsa.core.checks import INT32
from jax_dsa.core.export import exportable
from jax_dsa.core.typing import Array, Float, Int
from jax_dsa.nn.arguments import check_module, hidden_states, token_counts
from jax_dsa.nn.blocks import select, selectable, selected_loss, warmup_loss
from jax_dsa.nn.grouped_cache import GroupedCache, check_grouped_cache, empty_grouped
from jax_dsa.nn.grouped_config import GroupedConfig
from jax_dsa.nn.grouped_indexer import GroupedIndexer
from jax_dsa.nn.head_norm import RotaryHeadNorm
from jax_dsa.nn.linear import projection
from jax_dsa.nn.positions import token_positions
from jax_dsa.nn.scopes import Module, scoped
from jax_dsa.ops.cache import PagedCache
from jax_dsa.ops.cache.lengths import extended
from jax_dsa.ops.masked_attention import masked_attention
from jax_dsa.ops.mqa_decode import mqa_decode
from jax_dsa.ops.sparse_attention import sparse_attention, sparse_attention_decode

if TYPE_CHECKING:
    from jax_dsa.core.checks import Args
    from jax_dsa.nn.blocks import Blocks
    from jax_dsa.nn.config import IndexerType


@exportable
class GroupedAux(NamedTuple):
    """What a layer returns beside its output.

    Under `jax.jit`, results that nothing reads cost nothing.

    Attributes:
        kl: The indexer's loss, in nats, the mean over queries and, with "max", over the indexer's
            heads. In sparse attention it compares the selected blocks, in dense attention
            everything that a query sees. None without an indexer.
        lse: Log of the sum of exponentials of each head's scores, float32.
        indices: The blocks that each query selected, int32, -1 in empty slots: a list for each KV
            head with "max", one list with "mean". Blocks are numbered within the query's document.
            None in dense attention.
        q: Queries, rotated.
        k: Keys, rotated.
        indexer: The indexer's queries, and its keys, of tokens with "max" and of blocks with
            "mean"; None without an indexer.
    """

    kl: Float[Array, ""] | None
    lse: Float[Array, "B T N"]
    indices: Int[Array, "B T G K"] | Int[Array, "B T K"] | None
    q: Float[Array, "B T N D"]
    k: Float[Array, "B T G D"]
    indexer: tuple[Float[Array, "B T J C"], Float[Array, "B S C"]] | None


class GroupedAttention(Module):
    """Grouped-query attention to the blocks that an indexer selects; see `GroupedConfig`.

    The attribute `indexer` holds the indexer. Its own loss, `aux.kl`, trains its parameters and no
    others; any other loss has exactly zero gradient for them.

    Args:
        config: Sizes and switches of the layer.
        indexer_type: "full" gives the layer the indexer that `config.indexer` describes. A layer of
            type "shared" has none and takes another layer's selection.
        rngs: Random streams that initialise the parameters.

    Raises:
        TypeError: If `config` or `rngs` has the wrong type.
        ValueError: If `indexer_type` is neither "full" nor "shared", or is "shared" without
            `config.indexer`.

    Examples:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from jax_dsa import nn
        >>> config = nn.GroupedConfig(
        ...     model_dim=16, num_heads=4, kv_heads=2, head_dim=8, rope_dim=4, indexer="max",
        ...     block_size=4, top_k=2, index_heads=2, index_dim=8,
        ... )
        >>> layer = nn.GroupedAttention(config, rngs=nnx.Rngs(0))
        >>> y, aux = layer(jnp.ones((1, 9, 16)))
        >>> y.shape, aux.indices.shape
        ((1, 9, 16), (1, 9, 2, 2))
    """

    def __init__(
        self, config: GroupedConfig, indexer_type: IndexerType = "full", *, rngs: nnx.Rngs
    ) -> None:
        check_module("GroupedAttention", config, GroupedConfig, rngs)
        c = config
        types = ("full",) if c.indexer is None else ("full", "shared")
        if indexer_type not in types:
            raise ValueError(
                f"GroupedAttention: argument 'indexer_type' is {indexer_type!r}, expected one of "
                f"{types} with indexer={c.indexer!r}"
            )
        self.config = config
        queries, keys = c.num_heads * c.head_dim, c.kv_heads * c.head_dim
        self.wq = projection(c, c.model_dim, queries, rngs, bias=c.bias)
        self.wk = projection(c, c.model_dim, keys, rngs, bias=c.bias)
        self.wv = projection(c, c.model_dim, keys, rngs, bias=c.bias)
        self.wg = projection(c, c.model_dim, queries, rngs, bias=c.bias) if c.gate else None
        self.wo = projection(c, queries, c.model_dim, rngs, bias=c.bias)
        self.q_norm = RotaryHeadNorm(c, c.head_dim)
        self.k_norm = RotaryHeadNorm(c, c.head_dim)
        has_indexer = c.indexer is not None and indexer_type == "full"
        self.indexer = GroupedIndexer(c, rngs=rngs) if has_indexer else None

    @scoped
    def __call__(
        self,
        x: Float[Array, "B T M"],
        *,
        indices: Int[Array, "B T G K"] | Int[Array, "B T K"] | None = None,
        positions: Int[Array, "B T"] | Int[Array, "3 B T"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
        stripes: int = 1,
        sparse: bool = True,
    ) -> tuple[Float[Array, "B T M"], GroupedAux]:
        """Computes causal attention among the tokens of `x`.

        Args:
            x: Hidden states.
            indices: Blocks to attend to, int32, such as an earlier run's `aux.indices`. Blocks that
                a query may not select are treated as empty slots. By default the indexer selects
                the blocks. A layer with `indexer_type="shared"` needs them.
            positions: Positions of the tokens, int32, which only RoPE reads. With
                `config.mrope_sections` they may be [3, B, T]. By default each document counts from
                0.
            segment_ids: Document numbers, int32, for several documents in one sequence, as in
                `DSAttention`. The blocks of a document begin with its first token.
            stripes: Must be 1: the layer takes no sequence that is stored in stripes.
            sparse: True attends to the selected blocks. False attends to all keys, and `aux.kl` is
                then the indexer's warm-up loss over all of them.

        Returns:
            The hidden states, in `config.dtype` whatever the dtype of `x`, and what else the layer
            computed.

        Raises:
            TypeError: If an argument has the wrong type.
            ValueError: If an argument has the wrong shape, or if a selection is missing, or given
                where the layer takes none.
        """
        c = self.config
        args, x = hidden_states("GroupedAttention", self, x, c.model_dim)
        sparse = args.flag("sparse", sparse)
        args.option("stripes", stripes, args.integer("stripes", stripes, 1) == 1, "1")
        indices = self._checked_selection(args, indices, sparse)
        rotary, starts = self._positions(args, x, positions, segment_ids)
        q, k, v = self._project(x, rotary)
        index = None
        if self.indexer is not None:
            index_q = self.indexer.queries(x, rotary)
            index = index_q, self.indexer.keys(self.indexer.raw_keys(x), rotary, starts)
        if not sparse or c.indexer is None:
            # A document's start identifies it.
            own = None if starts is None else (starts, starts)
            out, lse = masked_attention(
                q, k, v, scale=c.scale, is_causal=True, segment_ids=own, return_lse=True
            )
            kl = None if index is None else warmup_loss(c, *index, q, k, starts)
            return self._result(x, out, GroupedAux(kl, lse, None, q, k, index))
        ends = jnp.broadcast_to(jnp.arange(1, x.shape[1] + 1, dtype=jnp.int32), x.shape[:2])
        first, logits = jnp.zeros_like(ends) if starts is None else starts, None
        if indices is not None:
            indices = selectable(c, indices, first, ends)
        else:
            assert index is not None
            indices, logits = select(c, *index, starts, ends)
        out, lse = sparse_attention(
            *(q, k, v, indices),
            block_size=c.block_size,
            scale=c.scale,
            is_causal=True,
            segment_ids=starts,
            tail_block=c.indexer == "mean",
            return_lse=True,
        )
        kl = None
        if index is not None:
            kl = selected_loss(c, *index, indices, q, k, lse, first, ends, logits)
        return self._result(x, out, GroupedAux(kl, lse, indices, q, k, index))

    def init_cache(
        self,
        batch: int,
        capacity: int,
        *,
        page_size: int | None = None,
        num_pages: int | None = None,
        max_rollback: int = 16,
    ) -> GroupedCache:
        """Returns an empty cache.

        Args:
            batch: B, number of requests.
            capacity: S, number of tokens that each request may have.
            page_size: L, tokens per page, with "mean" a multiple of `config.block_size`; None: the
                cache is flat.
            num_pages: P, number of pages in the pool, as in `LayerCache.empty`. No page is mapped
                before `GroupedCache.with_page_table`. By default each request owns the pages for
                its capacity.
            max_rollback: Number of tokens by which `lengths` may be set back from the largest that
                a request has had, such as the number of draft tokens per step in speculative
                decoding. Only "mean" limits it. Every multiple of `block_size` is possible, too.

        Raises:
            TypeError, ValueError: If an argument has the wrong type or is out of range.
        """
        return empty_grouped(
            *("GroupedAttention.init_cache", self.config, self.indexer is not None),
            *(batch, capacity),
            page_size=page_size,
            num_pages=num_pages,
            max_rollback=max_rollback,
        )

    @scoped
    def decode(
        self,
        x: Float[Array, "B T M"],
        cache: GroupedCache,
        *,
        counts: Int[Array, "B"] | None = None,
        indices: Int[Array, "B T G K"] | Int[Array, "B T K"] | None = None,
        positions: Int[Array, "B T"] | Int[Array, "3 B T"] | None = None,
    ) -> tuple[Float[Array, "B T M"], GroupedCache, Blocks | None]:
        """Computes `__call__` for each request's next T tokens, or only the first `counts` of them.

        T = 1 is a decode step, T = the length of the prompt a prefill, and anything between is a
        chunk of a prefill. Prompts of different lengths are padded on the right to a common T.
        Positions count from 0 in every request.

        Args:
            x: Hidden states of the next tokens.
            cache: The layer's cache, as `init_cache` makes it.
            counts: How many of the T tokens each request has, int32, clipped to 0..T; the others
                are padding, which no token sees. Default: all.
            indices: Blocks to attend to, int32. By default the indexer selects them.
            positions: Positions of the tokens, int32, which only RoPE reads, as in `__call__`. By
                default each request counts from 0.

        Returns:
            The hidden states; the cache with the new tokens in it; the blocks attended to, int32,
            -1 in empty slots, or None in a layer that attends to all keys. Padding gets hidden
            states of 0 and empty slots. Tokens that do not fit into the cache get no valid results;
            compare `cache.free_tokens` before. With "mean", a request whose length was set to a
            number that the cache does not support gets NaN; see `GroupedCache`.

        Raises:
            TypeError: If an argument has the wrong type.
            ValueError: If an argument has the wrong shape or is the cache of another layer; if a
                selection is missing, or given where the layer takes none.
        """
        c = self.config
        args, x = hidden_states("GroupedAttention.decode", self, x, c.model_dim)
        length = x.shape[1]
        indices = self._checked_selection(args, indices, True)
        lengths = check_grouped_cache(args, "cache", cache, c, self.indexer is not None)
        counts = token_counts(args, counts, length)
        step = jnp.arange(length, dtype=jnp.int32)
        places = lengths[:, None] + step
        ends = places + 1
        if counts is not None:
            ends = jnp.where(step < counts[:, None], ends, 0)
        rotary = places if positions is None else self._positions(args, x, positions, None)[0]
        q, k, v = self._project(x, rotary)
        cache = cache.append(k, v, counts)
        # The operators place query t at `lengths - T + t`, with padding, too.
        ends_of_call = extended(lengths, length)
        keys, values = (
            dataclasses.replace(rows, lengths=ends_of_call) for rows in (cache.k, cache.v)
        )
        if c.indexer is None:
            of_pages = values.pages if isinstance(values, PagedCache) else values.data
            out = mqa_decode(q, keys, of_pages, scale=c.scale)
            return self._decoded(x, out, counts, None), cache, None
        is_valid = None
        if self.indexer is not None and cache.open_block is not None:
            # Tokens that lack a page do not count. They come again.
            held = cache.lengths.astype(jnp.int32) - lengths
            index_k, numbers, state, is_valid = self.indexer.extend(
                cache.open_block, x, rotary, lengths, held
            )
            cache = cache.with_index_keys(index_k, numbers)._replace(open_block=state)
        elif self.indexer is not None:
            index_k = self.indexer.keys(self.indexer.raw_keys(x), rotary, None)
            cache = cache.with_index_keys(index_k, jnp.where(ends > 0, places, -1))
        if indices is not None:
            indices = selectable(c, indices, jnp.zeros_like(ends), ends)
        else:
            assert self.indexer is not None
            index_q = self.indexer.queries(x, rotary)
            indices, _ = select(c, index_q, cache.index_keys, None, ends)
        out = sparse_attention_decode(
            *(q, keys, values, indices),
            block_size=c.block_size,
            scale=c.scale,
            is_causal=True,
            tail_block=c.indexer == "mean",
        )
        return self._decoded(x, out, counts, is_valid), cache, indices

    def _decoded(
        self, x: Array, out: Array, counts: Array | None, is_valid: Array | None
    ) -> Float[Array, "B T M"]:
        """Returns hidden states: 0 for padding, NaN for requests that are not valid."""
        y = self._output(x, out)
        if counts is not None:
            is_token = jnp.arange(x.shape[1], dtype=jnp.int32) < counts[:, None]
            y = jnp.where(is_token[..., None], y, 0)
        return y if is_valid is None else jnp.where(is_valid[:, None, None], y, jnp.nan)

    def _positions(
        self, args: Args, x: Array, positions: Any, segment_ids: Any
    ) -> tuple[Array, Int[Array, "B T"] | None]:
        """Returns the rotary positions, and the first token of each token's document."""
        in_space = None
        if self.config.mrope_sections is not None and getattr(positions, "ndim", 2) == 3:
            in_space = args.array("positions", positions, "3 B T", INT32)
            positions = None
        rotary, starts, _ = token_positions(args.op, x, positions, segment_ids)
        return rotary if in_space is None else in_space, starts

    def _project(
        self, x: Float[Array, "B T M"], positions: Array
    ) -> tuple[Float[Array, "B T N D"], Float[Array, "B T G D"], Float[Array, "B T G D"]]:
        """Returns queries, keys and values."""
        c, tokens = self.config, x.shape[:2]
        q = self.wq(x).reshape(*tokens, c.num_heads, c.head_dim)
        k, v = (w(x).reshape(*tokens, c.kv_heads, c.head_dim) for w in (self.wk, self.wv))
        return self.q_norm(q, positions), self.k_norm(k, positions), v

    def _output(
        self, x: Float[Array, "B T M"], out: Float[Array, "B T N D"]
    ) -> Float[Array, "B T M"]:
        """Returns hidden states for the heads' outputs at the tokens `x`."""
        out = out.reshape(*out.shape[:2], out.shape[2] * out.shape[3])
        if self.wg is not None:
            out = out * jax.nn.sigmoid(self.wg(x))
        return self.wo(out)

    def _result(
        self, x: Array, out: Array, aux: GroupedAux
    ) -> tuple[Float[Array, "B T M"], GroupedAux]:
        if aux.kl is not None:
            # The barrier keeps XLA from postponing the losses of all layers, as in `dsa_attention`.
            out, kl = jax.lax.optimization_barrier((out, aux.kl))
            aux = aux._replace(kl=kl)
        return self._output(x, out), aux

    def _checked_selection(self, args: Args, indices: Any, sparse: bool) -> Blocks | None:
        """Returns the checked argument 'indices'."""
        c = self.config
        if indices is None:
            if sparse and c.indexer is not None and self.indexer is None:
                raise ValueError(
                    f"{args.op}: argument 'indices' is None, expected a selection because the "
                    f"layer has no indexer (indexer_type='shared')"
                )
            return None
        if not sparse or c.indexer is None:
            why = "sparse=False" if not sparse else "indexer=None"
            raise ValueError(f"{args.op}: argument 'indices' is given, expected None with {why}")
        args.bind("G", c.kv_heads, "'config.kv_heads'")
        return args.array("indices", indices, "B T G K" if c.indexer == "max" else "B T K", INT32)
