"""Block masks in plain JAX. One row of tiles is evaluated at a time."""

from __future__ import annotations

import functools
import operator
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jax_dsa.core import compat
from jax_dsa.core.typing import Array
from jax_dsa.ops.block_mask.spec import (
    Bits,
    IndexOptions,
    Indices,
    Kinds,
    Mask,
    Operands,
    Options,
    Tiles,
)

if TYPE_CHECKING:
    from collections.abc import Callable


def block_mask_classify(options: Options, x: Operands) -> Kinds:
    """Returns which tiles contain a visible key, and which contain no masked key."""
    row = _row_of_tiles(options, x)

    def classify(i: Array) -> tuple[Array, Array]:
        visible, exists = row(i)
        return visible.any((2, 4)), (visible == exists).all((2, 4))

    occupied, full = jax.lax.map(classify, jnp.arange(options.rows, dtype=jnp.int32))
    return Kinds(jnp.moveaxis(occupied, 0, 2), jnp.moveaxis(full, 0, 2))


def block_mask_pack(options: Options, x: Operands, y: Tiles) -> Bits:
    """Returns the bits of the partial tiles, each in its slot of `tiles`."""
    tiles = y.tiles
    row = _row_of_tiles(options, x)
    batch, heads = tiles.shape[:2]
    b, h = jnp.ogrid[:batch, :heads]

    def pack(bits: Array, i: Array) -> tuple[Array, None]:
        visible, _ = row(i)
        packed = jnp.packbits(jnp.swapaxes(visible, 2, 3), axis=-1, bitorder="little")
        slot = tiles[:, :, i]
        slot = jnp.where(slot < 0, options.slots, slot)
        return bits.at[b[..., None], h[..., None], slot].set(packed, mode="drop"), None

    shape = (batch, heads, options.slots, options.block_q, options.block_k // 8)
    bits = compat.match_vary(jnp.zeros(shape, jnp.uint8), tiles)
    return Bits(jax.lax.scan(pack, bits, jnp.arange(options.rows, dtype=jnp.int32))[0])


def _row_of_tiles(options: Options, x: Operands) -> Callable[[Array], tuple[Array, Array]]:
    """Returns a function from a row of tiles to which keys of it are visible, and which exist.

    Both are bools [B, H, block_q, J, block_k].
    """
    mask, starts, ends, q_segments, kv_segments = x
    batch = jnp.broadcast_shapes((options.batch,), *(y.shape[:1] for y in x if y is not None))
    heads = options.heads if mask is None else mask.shape[1]
    shape = (*batch, heads, options.block_q, options.columns, options.block_k)
    padded = jnp.arange(options.columns * options.block_k, dtype=jnp.int32)
    # The last tiles extend beyond the mask. Clamp their indices and mask these entries by `exists`.
    key = jnp.minimum(padded, options.keys - 1)

    def row(i: Array) -> tuple[Array, Array]:
        rows = i * options.block_q + jnp.arange(options.block_q, dtype=jnp.int32)
        query = jnp.minimum(rows, options.queries - 1)
        exists = (rows < options.queries)[:, None] & (padded < options.keys)[None]
        exists, column = exists[None, None], key[None, None, None]
        conditions: list[Any] = [exists, column < ends[:, None, query, None]]
        if starts is not None:
            conditions.append(column >= starts[:, None, query, None])
        if q_segments is not None and kv_segments is not None:
            conditions.append(q_segments[:, None, query, None] == kv_segments[:, None, None, key])
        if mask is not None:
            conditions.append((mask if mask.shape[2] == 1 else mask[:, :, query])[..., key])
        if options.function is not None:
            b, h = (jnp.arange(n, dtype=jnp.int32) for n in (options.batch, heads))
            conditions.append(options.function(*jnp.ix_(b, h, query, key)))
        visible = functools.reduce(operator.and_, conditions)
        flat = (*shape[:3], padded.size)
        both = (jnp.broadcast_to(y, flat).reshape(shape) for y in (visible, exists))
        return next(both), next(both)

    return row


def index_mask(options: IndexOptions, x: Indices) -> Mask:
    """Returns the mask that is True at `indices`."""

    def row(indices: Array) -> Array:
        indices = jnp.where(indices < 0, options.size, indices)  # -1 would index the last key
        return jnp.zeros(options.size, bool).at[indices].set(True, mode="drop")

    return Mask(jax.vmap(jax.vmap(row))(x.indices))
