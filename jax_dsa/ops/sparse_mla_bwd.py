"""The backward pass of `sparse_mla` on its CUDA kernels: what surrounds them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_dsa.core import compat, ffi
from jax_dsa.core.streaming import chunk_length, scan_chunks
from jax_dsa.reference import sparse_mla as reference

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jaxtyping import Array, Bool, Float, Int

    from jax_dsa.ops.sparse_mla import Options

_TILE = 64  # slots of a tile, and heads, as in cuda/sparse_mla

# Of a deterministic sum: bytes of the rows that are stored at a time (512 queries of 2048 slots),
# and of what sorts the rows of one call of the kernel, 24 for each (8192 queries).
ROWS_BUDGET = 5 << 28
SORT_BUDGET = 3 << 27


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def _parts(q: Any, indices: Any) -> int:
    """Rows of a slot: the sums of 128 heads each of its group."""
    return max(1, _ceil_div(q.shape[2] // indices.shape[2], 2 * _TILE))


def _query_rows(q: Any, indices: Any) -> int:
    """Rows of a query, whose slots are padded to whole tiles."""
    G, K = indices.shape[2:]
    return G * _parts(q, indices) * _ceil_div(K, _TILE) * _TILE


def _workspace(
    q: Any, kv: Any, indices: Any, count: int, by_rows: bool
) -> tuple[jax.ShapeDtypeStruct, ...]:
    """The kernel's counters, images, and slots in an order of its own, for `count` queries at a
    time; and rows.
    """
    (B, T, N, D), (S, G), K = q.shape, kv.shape[1:3], indices.shape[3]
    counters, images, order = ffi.extension().sparse_mla_bwd_workspace(
        B, T, S, N, G, K, D, count, by_rows
    )
    return (
        jax.ShapeDtypeStruct((counters,), jnp.uint8),
        jax.ShapeDtypeStruct((images,), jnp.uint8),
        jax.ShapeDtypeStruct((order // 4,), jnp.int32),
        jax.ShapeDtypeStruct((count * _query_rows(q, indices) if by_rows else 0, D), q.dtype),
    )


def _kernel(
    options: Options,
    operands: Sequence[Any],
    gradient: jax.ShapeDtypeStruct,
    count: int,
    rows: tuple[Any, Any] = (None, None),
) -> tuple[Any, Any]:
    """dq and dkv; by rows if their order and keys are given, those of `count` queries at a time."""
    q, kv, indices = operands[:3]
    space = _workspace(q, kv, indices, count, by_rows=rows[0] is not None)
    dq, dkv, *_ = ffi.handler(
        "jax_dsa.sparse_mla_bwd.v2",
        [*operands, *rows],
        [jax.ShapeDtypeStruct(q.shape, q.dtype), gradient, *space],
        {"scale": np.float32(options.scale)},
    )
    return dq, dkv


def _in_order(dkv: Float[Array, "B S G D"]) -> Float[Array, "B S G D"]:
    """Undoes `sparse_mla_dkv_place`: the kernel keeps pairs of 16 columns as 0 4 1 5 2 6 3 7."""
    pairs = dkv.reshape(*dkv.shape[:-1], dkv.shape[-1] // 16, 4, 2, 2)
    return jnp.swapaxes(pairs, -3, -2).reshape(dkv.shape)


def _rows_by_key(
    indices: Int[Array, "B T G K"],
    valid: Bool[Array, "B T G K"],
    keys: int,
    parts: int,
    count: int,
) -> tuple[Int[Array, "B*T R"], Int[Array, "B*T R"]]:
    """Of every `count` queries, a stable order of their rows by key, and the keys in that order.

    A query has R rows: of each group `parts` (128 heads each) times the slots, up to a whole tile.
    Rows of no key come last, and the keys of the next queries follow.
    """
    B, T, G, K = indices.shape
    b = jnp.arange(B, dtype=jnp.int32)[:, None, None, None]
    g = jnp.arange(G, dtype=jnp.int32)[:, None]
    nowhere = B * keys * G
    key = jnp.where(valid, (b * keys + indices) * G + g, nowhere)
    key = jnp.pad(key, [(0, 0)] * 3 + [(0, -K % _TILE)], constant_values=nowhere)
    key = jnp.broadcast_to(key[:, :, :, None], (*key.shape[:3], parts, key.shape[3]))
    # Unsigned, which XLA sorts by radix on a GPU; in half as many passes if 16 bits hold all keys.
    R = G * parts * key.shape[-1]
    short = _ceil_div(B * T, count) * (nowhere + 1) <= 2**16
    query = jnp.arange(B * T, dtype=jnp.uint32)[:, None]
    key = key.reshape(B * T, R).astype(jnp.uint32) + query // count * (nowhere + 1)
    row = (query % count * R + jnp.arange(R, dtype=jnp.uint32)).astype(jnp.int32)
    flat = key.reshape(-1).astype(jnp.uint16 if short else jnp.uint32), row.reshape(-1)
    key, order = (x.reshape(B * T, R) for x in jax.lax.sort(flat, num_keys=1, is_stable=True))
    return order, key.astype(jnp.uint32)


def sparse_mla_bwd(
    options: Options,
    avals: Sequence[Any],
    q: Float[Array, "B T N D"],
    kv: Float[Array, "B S G D"],
    indices: Int[Array, "B T G K"],
    ends: Int[Array, "B T"] | None,
    topk_length: Int[Array, "B T"] | None,
    sinks: Float[Array, "B N"] | None,
    out: Float[Array, "B T N E"],
    lse: Float[Array, "B T N"],
    dout: Float[Array, "B T N E"],
    dlse: Float[Array, "B T N"],
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """`reference.sparse_mla_bwd` on the kernels, which know no sinks: their gate scales `dout`."""
    B, S, G, D = kv.shape
    gate = reference.sink_gate(sinks, reference.grouped(lse, G))
    dsinks = None
    if gate is not None:
        gate = gate.reshape(lse.shape)
        dsinks = -jnp.sum((1 - gate) * reference.row_products(dout, out), axis=1)
        dout = (dout * gate[..., None]).astype(dout.dtype)
    if not options.deterministic:
        operands = q, kv, indices, ends, topk_length, dout, lse, out, dlse
        dq, dkv = _kernel(options, operands, avals[1], B * q.shape[1])
        return dq, _in_order(dkv), dsinks

    query_rows = _query_rows(q, indices)

    def chunk(dkv: Any, q: Any, indices: Any, ends: Any, topk_length: Any, *rest: Any) -> Any:
        queries = B * q.shape[1]
        # As many as have room, or more if there are not enough numbers for their keys.
        count = max(
            1,
            min(queries, ROWS_BUDGET // max(1, query_rows * D * 2)),
            _ceil_div(queries * (B * S * G + 1), 2**31),
        )
        valid = reference.valid_slots(indices, ends, topk_length, S)
        rows = _rows_by_key(indices, valid, S, _parts(q, indices), count)
        operands = q, kv, indices, ends, topk_length, *rest
        dq, more = _kernel(options, operands, avals[1], count, rows)
        return more if dkv is None else dkv + more, (dq,)

    xs = q, indices, ends, topk_length, dout, lse, out, dlse
    size = chunk_length(q.shape[1], B * query_rows * 24, budget=SORT_BUDGET)
    zeros = None
    if size < q.shape[1]:
        zeros = compat.match_vary(jnp.zeros((B, S, G, D), jnp.float32), kv, *xs)
    dkv, (dq,) = scan_chunks(chunk, zeros, xs, chunk=size)
    return dq, dkv, dsinks
