"""The memory layout of caches: FP8 records of tokens, and pages of a pool."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_dsa.core import compat
from jax_dsa.core.typing import Array, Bool, Float, Int, UInt8

# One token of an FP8 cache is 512 e4m3 values, their 4 float32 scales and 64 bfloat16 RoPE values.
RECORD_LATENT = 512
RECORD_BLOCK = 128
RECORD_ROPE = 64
RECORD_DIM = RECORD_LATENT + RECORD_ROPE
RECORD_BYTES = RECORD_LATENT + RECORD_LATENT // RECORD_BLOCK * 4 + RECORD_ROPE * 2

# In a page of DeepSeek-V4's FP8 cache, one token has 448 e4m3 values and 64 bfloat16 RoPE values.
# The scales of all tokens follow the values of the page's last token: for each token, the exponents
# of 7 powers of two and a zero byte.
PAGE_RECORD_LATENT = 448
PAGE_RECORD_BLOCK = 64
PAGE_RECORD_DIM = PAGE_RECORD_LATENT + RECORD_ROPE
PAGE_RECORD_VALUES = PAGE_RECORD_LATENT + RECORD_ROPE * 2
PAGE_RECORD_SCALES = 8
PAGE_RECORD_BYTES = PAGE_RECORD_VALUES + PAGE_RECORD_SCALES


def unpack_records(records: UInt8[Array, "... 656"], dtype: jnp.dtype) -> Float[Array, "... 576"]:
    """Returns the rows that FP8 records hold. They are exact in bfloat16."""
    blocks = RECORD_LATENT // RECORD_BLOCK
    latent, scale, rope = jnp.split(records, (RECORD_LATENT, RECORD_BYTES - 2 * RECORD_ROPE), -1)
    scale = jax.lax.bitcast_convert_type(scale.reshape(*scale.shape[:-1], blocks, 4), jnp.float32)
    return _unpacked(latent, scale, rope, dtype)


def _unpacked(
    latent: UInt8[Array, "... L"],
    scale: Float[Array, "... j"],
    rope: UInt8[Array, "... 128"],
    dtype: jnp.dtype,
) -> Float[Array, "... D"]:
    """Returns rows, given the e4m3 codes, the scale of each block of codes, and the RoPE bytes."""
    values = jax.lax.bitcast_convert_type(latent, jnp.float8_e4m3fn).astype(jnp.float32)
    block = latent.shape[-1] // scale.shape[-1]
    # A CPU replaces subnormal numbers by zero. A subnormal scale, m * 2^-149, is therefore split
    # into two normal factors.
    bits = jax.lax.bitcast_convert_type(scale, jnp.int32)
    is_subnormal = (bits >= 0) & (bits < 1 << 23)
    factors = (
        jnp.where(is_subnormal, bits.astype(jnp.float32) * 2.0**-23, scale),
        jnp.where(is_subnormal, jnp.float32(2.0**-126), jnp.float32(1)),
    )
    values = values.reshape(*scale.shape, block)
    for factor in factors:
        values = values * factor[..., None]
    rope = rope.reshape(*rope.shape[:-1], RECORD_ROPE, 2)
    rope = jax.lax.bitcast_convert_type(rope, jnp.bfloat16)
    return jnp.concatenate([values.reshape(latent.shape).astype(dtype), rope.astype(dtype)], -1)


def to_page_record(
    codes: Float[Array, "... 448"], scale: Float[Array, "... 7"], rope: Float[Array, "... 64"]
) -> UInt8[Array, "... 584"]:
    """Returns a token's bytes, values before scales. `to_record_pages` reorders them by page."""
    # The exponent of NaN is 255, which readers take for NaN.
    exponent = (jax.lax.bitcast_convert_type(scale, jnp.uint32) >> 23).astype(jnp.uint8)
    rope = jax.lax.bitcast_convert_type(rope.astype(jnp.bfloat16), jnp.uint8)
    pieces = [
        jax.lax.bitcast_convert_type(codes, jnp.uint8),
        rope.reshape(*rope.shape[:-2], 2 * RECORD_ROPE),
        exponent,
        jnp.zeros_like(exponent[..., :1]),
    ]
    return jnp.concatenate(pieces, axis=-1)


def from_page_record(
    values: UInt8[Array, "... 576"], scales: UInt8[Array, "... 8"], dtype: jnp.dtype
) -> Float[Array, "... 512"]:
    """Returns the row of a token; exact in bfloat16."""
    exponent = scales[..., :-1].astype(jnp.uint32)
    special = jnp.where(
        exponent == 0, jnp.uint32(1 << 22), jnp.uint32(0x7FC00000)
    )  # Exponents 0 and 255 mean 2^-127 and NaN.
    bits = jnp.where((exponent == 0) | (exponent == 255), special, exponent << 23)
    scale = jax.lax.bitcast_convert_type(bits, jnp.float32)
    latent, rope = jnp.split(values, [PAGE_RECORD_LATENT], axis=-1)
    return _unpacked(latent, scale, rope, dtype)


def to_record_pages(records: UInt8[Array, "... L 584"]) -> UInt8[Array, "... L 584"]:
    """Returns tokens' bytes in the order of a page: the values of all tokens, then all scales."""
    values, scales = jnp.split(records, [PAGE_RECORD_VALUES], axis=-1)
    flat = [x.reshape(*x.shape[:-2], x.shape[-2] * x.shape[-1]) for x in (values, scales)]
    return jnp.concatenate(flat, axis=-1).reshape(records.shape)


def unpack_page_records(
    pages: UInt8[Array, "... L 584"], dtype: jnp.dtype
) -> Float[Array, "... L 512"]:
    """Returns the rows of pages of L tokens."""
    *lead, size, width = pages.shape
    flat = pages.reshape(*lead, size * width)
    values, scales = jnp.split(flat, [size * PAGE_RECORD_VALUES], axis=-1)
    values = values.reshape(*lead, size, PAGE_RECORD_VALUES)
    return from_page_record(values, scales.reshape(*lead, size, PAGE_RECORD_SCALES), dtype)


def gather_page_records(
    pool: UInt8[Array, "1|B rows G 584"],
    size: int,
    indices: Int[Array, "B T G K"],
    valid: Bool[Array, "B T G K"],
    dtype: jnp.dtype,
) -> Float[Array, "B T G K 512"]:
    """Returns the selected rows of a pool of pages of `size` tokens; zeros for invalid slots."""
    batch, rows, groups, width = pool.shape
    if rows == 0:
        return jnp.zeros((*indices.shape, PAGE_RECORD_DIM), dtype)
    pages = pool.reshape(batch, rows // size, size * groups * width)
    entry = jnp.arange(batch, dtype=jnp.int32)[:, None, None, None]
    entry = jnp.broadcast_to(entry, indices.shape)
    group = jnp.arange(groups, dtype=jnp.int32)[:, None]
    page, place = indices // size, indices % size * groups + group

    def read(first: int, width: int) -> Array:
        def one(*where: jax.Array) -> jax.Array:
            return jax.lax.dynamic_slice(pages, where, (1, 1, width))[0, 0]

        where = (x.ravel() for x in (entry, page, first + place * width))
        return jax.vmap(one)(*where).reshape(*indices.shape, width)

    values = read(0, PAGE_RECORD_VALUES)
    scales = read(size * groups * PAGE_RECORD_VALUES, PAGE_RECORD_SCALES)
    found = from_page_record(values, scales, dtype)
    return jnp.where(valid[..., None], found, jnp.zeros((), dtype))


def physical_rows(
    num_pages: int, size: int, page_table: Int[Array, "B R"], positions: Int[Array, "B *n"]
) -> Int[Array, "B *n"]:
    """Returns the rows of tokens in a pool of pages; -1 where no page is mapped."""
    if page_table.shape[1] == 0:
        return jnp.full_like(positions, -1)

    def look_up(table: jax.Array, positions: jax.Array) -> jax.Array:
        page = table.at[positions // size].get(mode="fill", fill_value=-1)
        mapped = (positions >= 0) & (page >= 0) & (page < num_pages)
        return jnp.where(mapped, page * size + positions % size, -1)

    return jax.vmap(look_up)(page_table, positions)


def put_rows(
    rows: Float[Array, "B S *d"], positions: Int[Array, "B T"], new: Float[Array, "B T *d"]
) -> Float[Array, "B S *d"]:
    """Returns `rows` with new ones at their positions; those outside 0..S-1 are dropped.

    On an Explicit mesh the result has the sharding of `rows`, whatever that of the others.
    """
    if rows.shape[1] == 0:  # The gradient could not gather from an empty array.
        return rows
    where = jnp.where(positions < 0, rows.shape[1], positions)  # -1 would mean the last row.
    put = jax.vmap(lambda x, i, y: x.at[i].set(y, mode="drop"))
    return compat.left_to_compiler(put, rows)(rows, where, new)


def put_page_records(
    pages: UInt8[Array, "P L G 584"],
    page_table: Int[Array, "B R"],
    positions: Int[Array, "B T"],
    new: UInt8[Array, "B T G 584"],
) -> UInt8[Array, "P L G 584"]:
    """Returns `pages` with new records at their positions; see `put_in_pages`."""
    count, size, groups, width = pages.shape

    def put(pages: Array, page_table: Array, positions: Array, new: Array) -> Array:
        flat = pages.reshape(count, size * groups * width)
        row = physical_rows(count, size, page_table, positions)[..., None, None]
        page = jnp.where(row < 0, count, row // max(1, size))
        place = row % max(1, size) * groups + jnp.arange(groups, dtype=jnp.int32)[:, None]
        first = 0
        for piece in jnp.split(new, [PAGE_RECORD_VALUES], axis=-1):
            byte = first + place * piece.shape[-1] + jnp.arange(piece.shape[-1], dtype=jnp.int32)
            flat = flat.at[page, byte].set(piece, mode="drop")
            first = size * groups * piece.shape[-1]
        return flat.reshape(pages.shape)

    return compat.left_to_compiler(put, pages)(pages, page_table, positions, new)


def put_in_pages(
    pages: Float[Array, "P L *d"],
    page_table: Int[Array, "B R"],
    positions: Int[Array, "B T"],
    new: Float[Array, "B T *d"],
) -> Float[Array, "P L *d"]:
    """Returns `pages` with new rows at their positions; rows without a page are dropped.

    On an Explicit mesh the result has the sharding of `pages`. Requests may be sharded while the
    pool is not.
    """
    count, size = pages.shape[:2]
    if count == 0:  # The gradient could not gather from an empty array.
        return pages

    def put(pages: Array, page_table: Array, positions: Array, new: Array) -> Array:
        row = physical_rows(count, size, page_table, positions)
        page = jnp.where(row < 0, count, row // size)
        # Do not flatten the pool to one axis of rows. XLA may copy all of it for the gradient.
        return pages.at[page, row % size].set(new, mode="drop")

    return compat.left_to_compiler(put, pages)(pages, page_table, positions, new)
