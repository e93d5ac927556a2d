"""Selection of blocks by the lightning indexer in XLA, streamed over queries.

The heads of a group select together. Groups are folded into the axis of queries, where every query
has one list.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jax_dsa.core import compat
from jax_dsa.core.typing import Array, Float, Int
from jax_dsa.ops.indexer.spec import (
    BlockOperands,
    BlockOptions,
    BlockSelected,
    BlockSelection,
    Gradients,
    Selected,
    Selection,
    folded,
    weights_of_groups,
)
from jax_dsa.ops.indexer.xla import indexer_topk_bwd, stream_selection
from jax_dsa.ops.topk.spec import clipped_block
from jax_dsa.ops.topk.xla import select_blocks, split_into_blocks, values_at


def indexer_block_topk_fwd(options: BlockOptions, x: BlockOperands) -> BlockSelection:
    """Returns the blocks with the largest logits, and these logits."""
    groups = x.q.shape[2]
    starts = jnp.zeros_like(x.ends) if x.starts is None else x.starts
    k, ranges = x.k, [starts, x.ends]
    if options.mean:
        k, ranges = _means(x.k, options), [starts, *_visible_means(options, x)]

    def selected(logits: Array, starts: Array, _: Array, *seen: Array) -> tuple[Array, ...]:
        rows = logits.reshape(logits.shape[0] * logits.shape[1], logits.shape[2])
        if options.mean:
            scores, keys = rows, jnp.arange(rows.shape[1], dtype=jnp.int32)[None]
            is_seen = keys < seen[0].reshape(-1, 1)
            keys = jnp.where(scores == -jnp.inf, -1, keys)
        else:
            first = None if x.starts is None else starts.reshape(-1)
            scores, keys = _best_keys(rows, first, options.blocks.block_size)
            is_seen = scores != -jnp.inf
        indices = select_blocks(options.blocks, scores, is_seen)
        results = indices, values_at(scores, indices), _keys_at(keys, indices)
        return tuple(y.reshape(*logits.shape[:2], options.top_k) for y in results)

    queries = (
        folded(x.q),
        folded(weights_of_groups(x)),
        *(jnp.repeat(r, groups, axis=1) for r in ranges),
    )
    results = stream_selection(options, queries, k, x.k_scale, x.page_table, selected)
    batch, count = x.q.shape[:2]
    return BlockSelection(*(y.reshape(batch, count, groups, y.shape[2]) for y in results))


def indexer_block_topk_bwd(
    options: BlockOptions, x: BlockSelected, dy: BlockSelection
) -> Gradients:
    """Returns the gradients of the inputs, given the gradient of the selected blocks' logits."""
    k = _means(x.k, options) if options.mean else x.k
    weights = folded(weights_of_groups(x))
    selected = Selected(folded(x.q), k, weights, x.k_scale, folded(x.keys))
    grads = indexer_topk_bwd(options, selected, Selection(selected.indices, folded(dy.logits)))
    assert grads.weights is not None
    dk = _spread(grads.k, x.k.shape[1], options) if options.mean else grads.k
    return Gradients(
        q=grads.q.reshape(x.q.shape),
        k=dk,
        weights=None if x.weights is None else grads.weights.reshape(x.weights.shape),
        k_scale=grads.k_scale,
    )


def _best_keys(
    logits: Float[Array, "R S"], starts: Int[Array, "R"] | None, block_size: int
) -> tuple[Float[Array, "R M"], Int[Array, "R M"]]:
    """Returns the largest logit of each block, and the first key that has it."""
    blocks = split_into_blocks(logits, starts, block_size)
    best = jax.lax.argmax(blocks, 2, jnp.int32)
    scores = jnp.take_along_axis(blocks, best[..., None], axis=2, mode="promise_in_bounds")
    keys = best + jnp.arange(best.shape[1], dtype=jnp.int32)[None] * blocks.shape[2]
    return scores[..., 0], keys if starts is None else keys + starts[:, None]


def _keys_at(keys: Int[Array, "R M"], indices: Int[Array, "R K"]) -> Int[Array, "R K"]:
    if keys.shape[1] == 0:
        return jnp.full(indices.shape, -1, jnp.int32)
    found = jnp.take_along_axis(keys, jnp.maximum(indices, 0), axis=1, mode="promise_in_bounds")
    return jnp.where(indices >= 0, found, -1)


def _counts(size: int, options: BlockOptions) -> tuple[int, int, Any]:
    """Returns the size of a block, the number of blocks, and the number of keys in each."""
    block = clipped_block(options.blocks.block_size, size)
    blocks = -(-size // block)
    first = jnp.arange(blocks, dtype=jnp.int32) * block
    return block, blocks, jnp.minimum(size - first, block)


def _means(k: Float[Array, "B S C"], options: BlockOptions) -> Float[Array, "B M C"]:
    """Returns the mean of each block's keys, computed in float32 and rounded once."""
    batch, size, channels = k.shape
    block, blocks, counts = _counts(size, options)
    wide = k.astype(compat.accum_dtype(k.dtype))
    wide = jnp.pad(wide, ((0, 0), (0, blocks * block - size), (0, 0)))
    total = jnp.sum(wide.reshape(batch, blocks, block, channels), axis=2)
    return (total / counts.astype(wide.dtype)[None, :, None]).astype(k.dtype)


def _spread(dk: Float[Array, "B M C"], size: int, options: BlockOptions) -> Float[Array, "B S C"]:
    """Returns the gradient of the keys, given that of the means of blocks."""
    block, blocks, counts = _counts(size, options)
    batch, _, channels = dk.shape
    dk = dk / counts.astype(dk.dtype)[None, :, None]
    dk = jnp.broadcast_to(dk[:, :, None], (batch, blocks, block, channels))
    return dk.reshape(batch, blocks * block, channels)[:, :size]


def _visible_means(
    options: BlockOptions, x: BlockOperands
) -> tuple[Int[Array, "B T"], Int[Array, "B T"]]:
    """Returns the numbers of blocks whose keys each query sees completely, and at all."""
    # A last block of fewer keys is not whole: keys that follow must not change a selection.
    block = options.blocks.block_size
    return x.ends // block, -(-x.ends // clipped_block(block, x.k.shape[1]))
