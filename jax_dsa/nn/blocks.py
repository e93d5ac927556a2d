"""Selection of blocks of keys, and the loss of the indexer that selects them.

Blocks are numbered within a query's document, as in `sparse_attention`: block j of a document that
begins at token s has the tokens s + j block_size to s + (j + 1) block_size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jax_dsa.core.documents import block_range
from jax_dsa.core.rows import block_tokens
from jax_dsa.core.typing import Array, Float, Int
from jax_dsa.nn.query_chunks import QueryInputs, map_query_chunks
from jax_dsa.ops.attn_dist import attn_dist
from jax_dsa.ops.indexer import indexer_block_topk, indexer_selected_logits, indexer_topk
from jax_dsa.ops.losses import dense_indexer_kl_loss, indexer_kl_loss

if TYPE_CHECKING:
    from jax_dsa.nn.grouped_config import GroupedConfig
    from jax_dsa.ops.cache import FlatCache, PagedCache

Blocks = Int[Array, "B T G K"] | Int[Array, "B T K"]
"""The blocks of each query: a list for each KV head with "max", one list with "mean"."""


def block_count(
    c: GroupedConfig, starts: Int[Array, "B T"], ends: Int[Array, "B T"]
) -> Int[Array, "B T"]:
    """Returns the number of blocks that each query may select from.

    Args:
        c: Configuration of the layer.
        starts: First token of each query's document, int32.
        ends: One past each query's own token, int32.
    """
    # A block that is not complete can only be selected by its best key.
    missing = 0 if c.indexer == "mean" else c.block_size - 1
    return (ends - starts + missing) // c.block_size


def selectable(
    c: GroupedConfig, blocks: Blocks, starts: Int[Array, "B T"], ends: Int[Array, "B T"]
) -> Blocks:
    """Returns the selected blocks, with -1 for those that the query may not select.

    Args:
        c: Configuration of the layer.
        blocks: Numbers of the selected blocks, int32.
        starts: As in `block_count`.
        ends: As in `block_count`.
    """
    count = block_count(c, starts, ends).reshape(*ends.shape, *(1,) * (blocks.ndim - 2))
    return jnp.where((blocks >= 0) & (blocks < count), blocks, -1)


def select(
    c: GroupedConfig,
    index_q: Float[Array, "B T J C"],
    index_k: Float[Array, "B S C"] | FlatCache | PagedCache,
    starts: Int[Array, "B T"] | None,
    ends: Int[Array, "B T"],
) -> tuple[Blocks, Float[Array, "B T K"] | None]:
    """Returns the blocks that the indexer selects, and with "mean" their logits.

    Args:
        c: Configuration of the layer.
        index_q: Queries.
        index_k: Keys of tokens with "max", of blocks with "mean".
        starts: First token of each query's document, int32; None: each sequence is one document.
        ends: One past each query's own token, int32.
    """
    if c.indexer == "max":
        blocks, _ = indexer_block_topk(
            *(index_q, index_k, None, c.top_k),
            block_size=c.block_size,
            per_head=True,
            sink_blocks=c.sink_blocks,
            local_blocks=c.local_blocks,
            starts=starts,
            ends=ends,
            relu=False,
        )
        return blocks, None
    keys = index_q, index_k, _weights(c, index_q), c.top_k
    if starts is None:
        return indexer_topk(*keys, ends=ends // c.block_size)
    begin, end = block_range(c.block_size, starts, ends)
    slots, logits = indexer_topk(*keys, starts=begin, ends=end)
    return jnp.where(slots < 0, -1, slots - begin[..., None]), logits


def slots_of_blocks(
    c: GroupedConfig, blocks: Int[Array, "B T K"], starts: Int[Array, "B T"]
) -> Int[Array, "B T K"]:
    """Returns the slots of blocks in the result of `mean_pool`; the arguments as `selectable`."""
    return jnp.where(blocks < 0, -1, blocks + (starts // c.block_size)[..., None])


def tokens_of_blocks(
    c: GroupedConfig, blocks: Blocks, starts: Int[Array, "B T"], ends: Int[Array, "B T"]
) -> Int[Array, "B T *G S"]:
    """Returns the tokens of the selected blocks that each query sees, -1 in other slots.

    The arguments are those of `selectable`. A block has `block_size` slots.
    """
    shape = *ends.shape, *(1,) * (blocks.ndim - 2)
    positions = block_tokens(blocks, c.block_size)
    tokens = starts.reshape(shape) + positions
    return jnp.where((positions >= 0) & (tokens < ends.reshape(shape)), tokens, -1)


def selected_loss(
    c: GroupedConfig,
    index_q: Float[Array, "B T J C"],
    index_k: Float[Array, "B S C"],
    blocks: Blocks,
    q: Float[Array, "B T N D"],
    k: Float[Array, "B T G D"],
    lse: Float[Array, "B T N"],
    starts: Int[Array, "B T"],
    ends: Int[Array, "B T"],
    logits: Float[Array, "B T K"] | None,
) -> Float[Array, ""]:
    """Returns the indexer's loss over the selected blocks.

    With "max", each of the indexer's heads is compared with the heads of its group by token, over
    the tokens of the selected blocks. With "mean", the indexer is compared with all heads by block,
    over the selected blocks, whose probabilities are the sums of their tokens'.

    Args:
        c: Configuration of the layer.
        index_q: Queries of the indexer.
        index_k: Its keys.
        blocks: The selected blocks.
        q: Queries of the attention, which count as constants.
        k: Keys of the attention, which count as constants.
        lse: Log of the sum of exponentials of the attention's scores.
        starts: As in `selectable`.
        ends: As in `selectable`.
        logits: With "mean", the logits of the blocks, if the indexer selected them.
    """
    q, k, lse = jax.lax.stop_gradient((q, k, lse))
    loss = _loss_by_token if c.indexer == "max" else _loss_by_block

    def loss_of_some(some: QueryInputs) -> tuple[Any, ...]:
        assert some.indices is not None and some.starts is not None and some.ends is not None
        tokens = tokens_of_blocks(c, some.indices, some.starts, some.ends)
        p = some.projections
        group = c.num_heads // c.kv_heads
        teacher = attn_dist(p["q"], k, tokens, p["lse"], scale=c.scale, head_group=group)
        kl = loss(c, index_k, some, tokens, teacher)
        # With "mean", the first queries of a document select nothing and do not count.
        selects = jnp.any(some.indices >= 0, axis=tuple(range(2, blocks.ndim)))
        return ((kl, jnp.sum(selects, dtype=jnp.float32)),)

    projections = {"q": q, "lse": lse, "index_q": index_q, "logits": logits}
    queries = QueryInputs(projections, {}, starts, ends, blocks)
    shape = *q.shape[:2], c.model_dim
    (kl,) = map_query_chunks(loss_of_some, queries, shape, c.query_chunk, op="GroupedAttention")
    return kl


def _loss_by_token(
    c: GroupedConfig,
    index_k: Float[Array, "B S C"],
    some: QueryInputs,
    tokens: Int[Array, "B T G S"],
    teacher: Float[Array, "B G T S"],
) -> Float[Array, ""]:
    """Returns the loss of some queries, the mean over queries and the indexer's heads.

    Args:
        c: Configuration of the layer.
        index_k: Keys of the indexer.
        some: The queries.
        tokens: The tokens of their blocks.
        teacher: The attention's probabilities of these tokens.
    """

    def of_head(index_q: Array, tokens: Array, teacher: Array) -> Array:
        index_q = index_q[:, :, None]
        weights = _weights(c, index_q)
        logits = indexer_selected_logits(index_q, index_k, weights, tokens, relu=False)
        return indexer_kl_loss(logits, teacher, tokens >= 0)

    heads = some.projections["index_q"], tokens, teacher
    return jax.vmap(of_head, in_axes=(2, 2, 1))(*heads).mean()


def _loss_by_block(
    c: GroupedConfig,
    index_k: Float[Array, "B S C"],
    some: QueryInputs,
    tokens: Int[Array, "B T S"],
    teacher: Float[Array, "B G T S"],
) -> Float[Array, ""]:
    """Returns the loss of some queries; the arguments are those of `_loss_by_token`."""
    blocks, logits = some.indices, some.projections["logits"]
    assert blocks is not None and some.starts is not None
    if logits is None:
        index_q = some.projections["index_q"]
        slots = slots_of_blocks(c, blocks, some.starts)
        logits = indexer_selected_logits(index_q, index_k, _weights(c, index_q), slots)
    mass = teacher.sum(1).reshape(*blocks.shape, c.block_size).sum(-1)
    return indexer_kl_loss(logits, mass, blocks >= 0)


def warmup_loss(
    c: GroupedConfig,
    index_q: Float[Array, "B T J C"],
    index_k: Float[Array, "B S C"],
    q: Float[Array, "B T N D"],
    k: Float[Array, "B T G D"],
    starts: Int[Array, "B T"] | None,
) -> Float[Array, ""]:
    """Returns the indexer's loss over everything that a query sees, as tokens or as blocks.

    The arguments are those of `selected_loss`; `starts` is None if each sequence is one document.
    """
    q, k = jax.lax.stop_gradient((q, k))
    batch, length, _, dim = q.shape

    if c.indexer == "mean":
        return dense_indexer_kl_loss(
            *(index_q, index_k, _weights(c, index_q), q, k),
            block_size=c.block_size,
            scale=c.scale,
            segment_ids=starts,
        )

    def of_head(index_q: Array, q: Array, k: Array) -> Array:
        index_q = index_q[:, :, None]
        return dense_indexer_kl_loss(
            *(index_q, index_k, _weights(c, index_q), q, k[:, :, None]),
            scale=c.scale,
            segment_ids=starts,
            relu=False,
        )

    q = q.reshape(batch, length, c.kv_heads, c.num_heads // c.kv_heads, dim)
    return jax.vmap(of_head, in_axes=2)(index_q, q, k).mean()


def _weights(c: GroupedConfig, index_q: Float[Array, "B T J C"]) -> Float[Array, "B T J"]:
    """Returns head weights that give the logits the scale of the loss."""
    return jnp.full(index_q.shape[:3], c.index_scale, jnp.float32)
