"""Blocks of keys: the forced blocks of a query, and the keys of the blocks that it sees."""

from __future__ import annotations

import jax.numpy as jnp
from jax.core import min_dim

from jax_dsa.core.rows import block_tokens
from jax_dsa.core.typing import Array, Bool, Int
from jax_dsa.ops.sparse_attention.spec import Operands, Options


def num_slots(options: Options, slots: int, keys: int) -> int:
    """Returns the number of slots of a row, with those of forced blocks."""
    sinks, local, tail = _forced_counts(options, keys)
    return slots + sinks + local + tail


def selected_keys(
    options: Options, x: Operands, keys: int
) -> tuple[Int[Array, "B T G K*b"], Bool[Array, "B T G K*b"]]:
    """Returns the rows of `k` that each query's blocks consist of, and which of them it sees.

    Args:
        options: the options.
        x: the operands of some queries.
        keys: number of rows of `k`.
    """
    position = block_tokens(listed_blocks(options, x, keys), options.block_size)
    seen = (position >= 0) & (position < keys)
    if x.lengths is not None:
        seen &= position < x.lengths[:, :, None, None]
    if x.positions is not None:
        seen &= position <= x.positions[:, :, None, None]
    if x.starts is None:
        return position, seen
    rows = position + x.starts[:, :, None, None]
    return rows, seen & (rows >= 0) & (rows < keys)


def _forced_counts(options: Options, keys: int) -> tuple[int, int, int]:
    """Returns the number of slots for sink blocks, local blocks and the tail block."""
    blocks = -(-keys // options.block_size)
    # The newest local block is the query's own block, and so is the tail block.
    tail = options.tail_block and options.local_blocks == 0
    return min_dim(options.sink_blocks, blocks), min_dim(options.local_blocks, blocks), int(tail)


def listed_blocks(options: Options, x: Operands, keys: int) -> Int[Array, "B T G K"]:
    """Returns the numbers of the blocks of each query, the forced ones last; -1 for none."""
    blocks = x.indices
    if x.topk_length is not None:
        slot = jnp.arange(blocks.shape[3], dtype=jnp.int32)[None, None, None]
        blocks = jnp.where(slot < x.topk_length[:, :, None, None], blocks, -1)
    if x.positions is None:
        return blocks
    sinks, local, tail = _forced_counts(options, keys)
    size = options.block_size
    shape = x.positions.shape
    position = jnp.maximum(x.positions, -1)[..., None]
    own = position // size
    forced = [jnp.broadcast_to(jnp.arange(sinks, dtype=jnp.int32), (*shape, sinks))]
    if options.local_blocks:
        first = jnp.maximum(own - (options.local_blocks - 1), options.sink_blocks)
        number = first + jnp.arange(local, dtype=jnp.int32)[None, None]
        forced.append(jnp.where((number >= first) & (number <= own), number, -1))
    if tail:
        is_tail = ((position + 1) % size != 0) & (own >= options.sink_blocks)
        forced.append(jnp.where(is_tail, own, -1))
    for number in forced:
        if number.shape[2] == 0:
            continue
        number = number[:, :, None]
        named = (number[..., None] == blocks[..., None, :]).any(-1)
        blocks = jnp.concatenate([blocks, jnp.where(named, -1, number)], axis=3)
    return blocks
