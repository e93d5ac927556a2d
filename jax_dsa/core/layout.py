"""How caches lie in memory: FP8 records of a token, and pages of a pool."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_dsa.core.typing import Array, Float, Int, UInt8

# One token of an FP8 cache: 512 e4m3 values, their 4 f32 scales, then 64 bf16 RoPE values.
RECORD_LATENT = 512
RECORD_BLOCK = 128
RECORD_ROPE = 64
RECORD_DIM = RECORD_LATENT + RECORD_ROPE
RECORD_BYTES = RECORD_LATENT + RECORD_LATENT // RECORD_BLOCK * 4 + RECORD_ROPE * 2


def unpack_records(records: UInt8[Array, "... 656"], dtype: jnp.dtype) -> Float[Array, "... 576"]:
    """The rows that FP8 cache records hold; exact in bfloat16, the scales being powers of two."""
    lead = records.shape[:-1]
    blocks = RECORD_LATENT // RECORD_BLOCK
    latent, scale, rope = jnp.split(records, (RECORD_LATENT, RECORD_BYTES - 2 * RECORD_ROPE), -1)
    latent = jax.lax.bitcast_convert_type(latent, jnp.float8_e4m3fn).astype(jnp.float32)
    scale = jax.lax.bitcast_convert_type(scale.reshape(*lead, blocks, 4), jnp.float32)
    rope = jax.lax.bitcast_convert_type(rope.reshape(*lead, RECORD_ROPE, 2), jnp.bfloat16)
    latent = latent.reshape(*lead, blocks, RECORD_BLOCK) * scale[..., None]
    latent = latent.reshape(*lead, RECORD_LATENT)
    return jnp.concatenate([latent.astype(dtype), rope.astype(dtype)], axis=-1)


def physical_rows(
    num_pages: int, size: int, page_table: Int[Array, "B R"], positions: Int[Array, "B *n"]
) -> Int[Array, "B *n"]:
    """Where tokens lie in a pool of pages, in rows; -1 where no page is mapped."""
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
    """`rows` with new ones at their positions; what lies outside 0..S-1 is dropped."""
    if rows.shape[1] == 0:  # no gradient could gather from it
        return rows
    where = jnp.where(positions < 0, rows.shape[1], positions)  # -1 would be the last one
    return jax.vmap(lambda x, i, y: x.at[i].set(y, mode="drop"))(rows, where, new)


def put_in_pages(
    pages: Float[Array, "P L *d"],
    page_table: Int[Array, "B R"],
    positions: Int[Array, "B T"],
    new: Float[Array, "B T *d"],
) -> Float[Array, "P L *d"]:
    """`pages` with new rows at their positions; what has no page is dropped."""
    if pages.shape[0] == 0:  # no gradient could gather from it
        return pages
    pool = pages.reshape(pages.shape[0] * pages.shape[1], *pages.shape[2:])
    where = physical_rows(pages.shape[0], pages.shape[1], page_table, positions)
    where = jnp.where(where < 0, pool.shape[0], where)
    # Requests may be sharded where the pool is not, and an Explicit mesh wants it said.
    sharding = jax.typeof(pool).sharding
    return pool.at[where].set(new, mode="drop", out_sharding=sharding).reshape(pages.shape)
