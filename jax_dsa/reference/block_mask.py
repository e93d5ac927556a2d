"""Block masks in plain JAX, one row of tiles at a time: the mask is never held as a whole."""

from __future__ import annotations

import functools
import operator
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from jax_dsa.core import compat

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from jaxtyping import Array, Bool, Int, UInt8

    from jax_dsa.ops.block_mask import BlockOptions


def block_mask_classify(
    options: BlockOptions,
    mask: Bool[Array, "1|B 1|H 1|T S"] | None,
    starts: Int[Array, "1|B T"] | None,
    ends: Int[Array, "1|B T"],
    q_segments: Int[Array, "1|B T"] | None,
    kv_segments: Int[Array, "1|B S"] | None,
) -> tuple[Bool[Array, "B H I J"], Bool[Array, "B H I J"]]:
    """Which tiles hold any visible key, and which hold no hidden one."""
    row = _row_of_tiles(options, mask, starts, ends, q_segments, kv_segments)

    def classify(i: Array) -> tuple[Array, Array]:
        visible, exists = row(i)
        return visible.any((2, 4)), (visible == exists).all((2, 4))

    occupied, full = jax.lax.map(classify, jnp.arange(options.rows, dtype=jnp.int32))
    return jnp.moveaxis(occupied, 0, 2), jnp.moveaxis(full, 0, 2)


def block_mask_pack(
    options: BlockOptions,
    mask: Bool[Array, "1|B 1|H 1|T S"] | None,
    starts: Int[Array, "1|B T"] | None,
    ends: Int[Array, "1|B T"],
    q_segments: Int[Array, "1|B T"] | None,
    kv_segments: Int[Array, "1|B S"] | None,
    tiles: Int[Array, "B H I J"],
) -> tuple[UInt8[Array, "B H P block_q block_k/8"]]:
    """The masks of the partial tiles, each in the slot that `tiles` has for it."""
    row = _row_of_tiles(options, mask, starts, ends, q_segments, kv_segments)
    batch, heads = tiles.shape[:2]
    b, h = jnp.ogrid[:batch, :heads]

    def pack(bits: Array, i: Array) -> tuple[Array, None]:
        visible, _ = row(i)
        packed = jnp.packbits(jnp.swapaxes(visible, 2, 3), axis=-1, bitorder="little")
        slot = tiles[:, :, i]
        slot = jnp.where(slot < 0, options.room, slot)
        return bits.at[b[..., None], h[..., None], slot].set(packed, mode="drop"), None

    shape = (batch, heads, options.room, options.block_q, options.block_k // 8)
    bits = compat.match_vary(jnp.zeros(shape, jnp.uint8), tiles)
    return (jax.lax.scan(pack, bits, jnp.arange(options.rows, dtype=jnp.int32))[0],)


def _row_of_tiles(
    options: BlockOptions,
    mask: Array | None,
    starts: Array | None,
    ends: Array,
    q_segments: Array | None,
    kv_segments: Array | None,
) -> Callable[[Array], tuple[Array, Array]]:
    """Of row i: which keys are visible, and which exist, [B, H, block_q, J, block_k]."""
    operands = (mask, starts, ends, q_segments, kv_segments)
    batch = jnp.broadcast_shapes(
        (options.batch,), *(x.shape[:1] for x in operands if x is not None)
    )
    heads = options.heads if mask is None else mask.shape[1]
    shape = (*batch, heads, options.block_q, options.columns, options.block_k)
    wide = jnp.arange(options.columns * options.block_k, dtype=jnp.int32)
    # The last tiles overhang: what is beyond reads the last query or key, and is not there.
    key = jnp.minimum(wide, options.keys - 1)

    def row(i: Array) -> tuple[Array, Array]:
        tall = i * options.block_q + jnp.arange(options.block_q, dtype=jnp.int32)
        query = jnp.minimum(tall, options.queries - 1)
        exists = (tall < options.queries)[:, None] & (wide < options.keys)
        conditions: list[Any] = [exists, key < ends[:, None, query, None]]
        if starts is not None:
            conditions.append(key >= starts[:, None, query, None])
        if q_segments is not None and kv_segments is not None:
            conditions.append(q_segments[:, None, query, None] == kv_segments[:, None, None, key])
        if mask is not None:
            conditions.append((mask if mask.shape[2] == 1 else mask[:, :, query])[..., key])
        if options.function is not None:
            b, h = (jnp.arange(n, dtype=jnp.int32) for n in (options.batch, heads))
            conditions.append(options.function(*jnp.ix_(b, h, query, key)))
        visible = functools.reduce(operator.and_, conditions)
        flat = (*shape[:3], wide.size)
        both = (jnp.broadcast_to(x, flat).reshape(shape) for x in (visible, exists))
        return next(both), next(both)

    return row


def index_mask(size: int, indices: Int[Array, "B T K"]) -> tuple[Bool[Array, "B T S"]]:
    """True at `indices`, which are no positions where they are negative, out of `size`."""
    empty = jnp.zeros((*indices.shape[:2], size), bool)
    indices = jnp.where(indices < 0, size, indices)  # -1 would be the last position
    return (jnp.put_along_axis(empty, indices, True, axis=-1, inplace=False, mode="drop"),)
