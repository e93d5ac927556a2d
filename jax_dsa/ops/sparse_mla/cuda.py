"""Calls of the CUDA kernels of `sparse_mla` and `sparse_mla_decode`."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_dsa.core import compat, ffi
from jax_dsa.core.layout import PAGE_RECORD_BYTES, RECORD_BYTES
from jax_dsa.core.rows import valid_slots
from jax_dsa.core.softmax import (
    grouped,
    of_rows_with_keys,
    row_products,
    sink_gate,
    sink_gradient,
)
from jax_dsa.core.streaming import BUDGET, chunk_length, scan_chunks
from jax_dsa.core.typing import Array, Bool, Float, Int
from jax_dsa.ops.sparse_mla.selected import pools_and_lists, selected
from jax_dsa.ops.sparse_mla.spec import Gradients, Operands, Options, Results

if TYPE_CHECKING:
    from collections.abc import Sequence

# The operands of the FFI handlers, in their order.
TAKES = ("q", "kv", "indices", "ends", "topk_length", "sinks")
EXTRA_TAKES = ("kv", "indices", "ends", "topk_length", "page_table")
DECODE_TAKES = (*TAKES, "page_table", *(f"extra_{name}" for name in EXTRA_TAKES))

# The kernels' limits; tests/test_ffi.py compares them with those of the extension.
DIMS = (576, 512)
VALUE_DIM = 512
TILE = 64  # slots, and heads, per tile

# Memory for a deterministic sum, in bytes: for the rows that are stored at a time (enough for 512
# queries of 2048 slots), and for sorting the rows of one call of the kernel, which takes 24 bytes
# per row (enough for 8192 queries).
ROWS_BUDGET = 5 << 28
SORT_BUDGET = 3 << 27

# If the sums of the keys that a batch entry's queries select take at least this many bytes, rows
# are faster than atomic reductions. Reductions are fast as long as the sums fit in the L2 (50 MB on
# an H100, 60 MB on an H200). Rows are written to memory and read again, however many keys there
# are. `benchmarks/backward_routes.py` measures where the two cross.
ROWS_FROM = 64 << 20


def supports(options: Options, x: Operands, *_: Results) -> str | None:
    """Returns why the kernels of `sparse_mla` cannot run this call, or None if they can."""
    if x.kv.dtype != jnp.bfloat16:
        return f"it takes bfloat16, got q of {x.q.dtype} and kv of {x.kv.dtype}"
    return _queries_supported(options, x)


def decode_supports(options: Options, x: Operands) -> str | None:
    """Returns why the kernel of `sparse_mla_decode` cannot run this call, or None if it can."""
    if _reads_copies(options, x):
        return _queries_supported(options, x)
    if x.page_table is not None and 0 in x.page_table.shape[1:]:
        return "it takes at least one page for a request"
    if x.kv.dtype != jnp.uint8:
        return supports(options, x)
    if x.kv.shape[3] not in (RECORD_BYTES, PAGE_RECORD_BYTES):
        sizes = f"{RECORD_BYTES} or {PAGE_RECORD_BYTES} bytes"
        return f"it takes FP8 records of {sizes}, got {x.kv.shape[3]}"
    return _queries_supported(options, x)


def _reads_copies(options: Options, x: Operands) -> bool:
    """Returns whether the kernel cannot read the caches of this call itself.

    It takes two caches of the same kind of rows, with at least one page for a request. Pages of
    DeepSeek-V4's records must start at multiples of 16 bytes.
    """
    caches = [(x.kv, options.page_size, x.page_table)]
    if x.extra_kv is not None:
        if x.extra_kv.dtype != x.kv.dtype:
            return True
        caches.append((x.extra_kv, options.extra_page_size, x.extra_page_table))
    page_records = x.kv.shape[3] == PAGE_RECORD_BYTES
    if len(caches) == 1 and not page_records:
        return False
    for rows, size, table in caches:
        if table is not None and 0 in table.shape[1:]:
            return True
        if page_records and (size or 1) * rows.shape[2] * PAGE_RECORD_BYTES % 16:
            return True
    return False


def _queries_supported(options: Options, x: Operands) -> str | None:
    if x.q.dtype != jnp.bfloat16:
        return f"it takes bfloat16, got q of {x.q.dtype} and kv of {x.kv.dtype}"
    if x.q.shape[2] == 0:
        return "it takes at least one head"
    if x.q.shape[3] not in DIMS:
        return f"it takes D in {DIMS}, got D={x.q.shape[3]}"
    if options.value_dim != VALUE_DIM:
        return f"it has value_dim={VALUE_DIM}, got {options.value_dim}"
    if options.scale <= 0:
        return f"it takes scale > 0, got {options.scale}"
    return None


def sparse_mla_fwd(options: Options, avals: Results, x: Operands) -> Results:
    """Returns what `xla.sparse_mla_fwd` returns, for keys without a page table."""
    if options.batch_invariant:
        return _batch_invariant_fwd(options, avals, x)
    operands = [getattr(x, name) for name in TAKES]
    scale = np.float32(options.scale)
    return Results(*ffi.call("jax_dsa.sparse_mla_fwd.v2", operands, avals, scale=scale))


def _batch_invariant_fwd(options: Options, avals: Results, x: Operands) -> Results:
    """Returns the bits of `sparse_mla_decode_fwd`.

    It is called with as many queries at a time as have partial results of BUDGET bytes.
    """
    B, T = x.q.shape[:2]

    def chunk(carry: tuple[()], *queries: Any) -> tuple[tuple[()], Results]:
        part = x._replace(**dict(zip(by_query, queries, strict=True)))
        length = part.q.shape[1]
        shapes = [jax.ShapeDtypeStruct((B, length, *a.shape[2:]), a.dtype) for a in avals]
        return carry, sparse_mla_decode_fwd(options, Results(*shapes), part)  # type: ignore[arg-type]

    by_query = ("q", "indices", "ends", "topk_length")
    partial = _partial_results(options, x)
    each = sum(math.prod(a.shape) * a.dtype.itemsize for a in partial) // max(1, T)
    size = chunk_length(T, each, budget=BUDGET)
    xs = tuple(getattr(x, name) for name in by_query)
    return Results(*scan_chunks(chunk, (), xs, chunk=size)[1])


def sparse_mla_decode_fwd(options: Options, avals: Results, x: Operands) -> Results:
    """Returns what `xla.sparse_mla_fwd` returns. The slots of each query are split among CTAs."""
    if _reads_copies(options, x):
        return _decode_over_copies(options, avals, x)
    partial = _partial_results(options, x)
    splits = partial[0].shape[1]
    out, max_logit, log_sum, *_ = ffi.call(
        "jax_dsa.sparse_mla_decode.v5",
        [getattr(x, name) for name in DECODE_TAKES],
        [*avals, *(partial if splits > 1 else (None, None))],
        scale=np.float32(options.scale),
        page_size=np.int32(options.page_size or 1),
        extra_page_size=np.int32(options.extra_page_size or 1),
        splits=np.int32(splits),
        batch_invariant=np.bool_(options.batch_invariant),
    )
    return Results(out, max_logit, log_sum)


def _decode_over_copies(options: Options, avals: Results, x: Operands) -> Results:
    """Returns what `sparse_mla_decode_fwd` returns, which reads copies of the selected rows.

    Each query is a request of its own, whose keys are the rows of its lists. The first list is
    filled up to whole tiles of slots, so that its length does not change the tiles of the second.
    """
    pools, lists = pools_and_lists(options, x)
    B, T, N, D = x.q.shape
    G = x.kv.shape[2]
    full = [(0, 0)] * 3 + [(0, -lists[0].indices.shape[3] % TILE)]
    first = jnp.pad(lists[0].indices, full, constant_values=-1)
    lists = (lists[0]._replace(indices=first), *lists[1:])
    flat = dataclasses.replace(options, page_size=None, extra_page_size=None)

    def chunk(carry: tuple[()], q: Array, lists: Any) -> tuple[tuple[()], tuple[Any, ...]]:
        rows, valid = selected(pools, lists, q.dtype)
        (_, queries, _, K), requests = valid.shape, B * q.shape[1]
        part = Operands(
            q.reshape(requests, 1, N, D),
            jnp.swapaxes(rows, 2, 3).reshape(requests, K, G, D),
            jnp.where(valid, jnp.arange(K, dtype=jnp.int32), -1).reshape(requests, 1, G, K),
            sinks=None if x.sinks is None else jnp.repeat(x.sinks, queries, axis=0),
        )
        shapes = [jax.ShapeDtypeStruct((requests, 1, *a.shape[2:]), a.dtype) for a in avals]
        results = sparse_mla_decode_fwd(flat, Results(*shapes), part)  # type: ignore[arg-type]
        return carry, tuple(a.reshape(B, queries, *a.shape[2:]) for a in results)

    row_bytes = sum(a.indices.shape[3] for a in lists) * G * D * x.q.dtype.itemsize
    size = chunk_length(T, B * row_bytes, budget=BUDGET)
    return Results(*scan_chunks(chunk, (), (x.q, lists), chunk=size)[1])


def _partial_results(options: Options, x: Operands) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Returns the outputs, and the maxima and sums, of the splits of every work tile."""
    B, T, N, _ = x.q.shape
    G = x.kv.shape[2]
    work_tiles = B * T * G * _ceil_div(N // G, TILE)
    slots = x.indices.shape[3]
    if x.extra_indices is not None and x.extra_indices.shape[3] > 0:
        # The kernel begins the second list at a whole tile.
        slots = _ceil_div(slots, TILE) * TILE + x.extra_indices.shape[3]
    splits = ffi.extension().sparse_mla_decode_splits(
        items=work_tiles, slots=slots, batch_invariant=options.batch_invariant
    )
    rows = (work_tiles, splits, TILE)
    return (
        jax.ShapeDtypeStruct((*rows, VALUE_DIM), jnp.float32),
        jax.ShapeDtypeStruct((*rows, 2), jnp.float32),
    )


def sparse_mla_bwd(
    options: Options, avals: Gradients, x: Operands, y: Results, dy: Results
) -> Gradients:
    """Returns what `xla.sparse_mla_bwd` returns.

    The kernels do not know sinks. The gate of a sink is multiplied into `dout` here.
    """
    B, S, G, D = x.kv.shape
    pair = grouped(y.max_logit, G), grouped(y.log_sum, G)
    gate = sink_gate(x.sinks, *pair)
    dout, dsinks = dy.out, None
    if x.sinks is not None and gate is not None:
        gate = gate.reshape(y.log_sum.shape)
        (dout_dot_out,) = of_rows_with_keys(y.max_logit, row_products(dout, y.out))
        dsinks = sink_gradient(x.sinks, *pair, grouped(dout_dot_out, G))
        dout = (dout.astype(gate.dtype) * gate[..., None]).astype(dout.dtype)
    xs = x.q, x.indices, x.ends, x.topk_length, dout, *y[1:], y.out, dy.log_sum
    if not sums_by_rows(options, x):
        dq, dkv = _kernel(options, x.kv, xs, avals.kv, B * x.q.shape[1])
        return Gradients(q=dq, kv=_columns_in_order(dkv), sinks=dsinks)

    query_rows = _query_rows(x.q, x.indices)

    def chunk(dkv: Any, *xs: Any) -> Any:
        q, indices, ends, topk_length = xs[:4]
        queries = B * q.shape[1]
        # As many queries at a time as fit the budget. More are needed if the keys of all groups of
        # `count` queries could not be numbered in 31 bits.
        count = max(
            1,
            min(queries, ROWS_BUDGET // max(1, query_rows * D * 2)),
            _ceil_div(queries * (B * S * G + 1), 2**31),
        )
        valid = valid_slots(indices, ends, topk_length, S)
        rows = _rows_by_key(indices, valid, S, _rows_per_slot(q, indices), count)
        dq, more = _kernel(options, x.kv, xs, avals.kv, count, rows)
        return more if dkv is None else dkv + more, (dq,)

    size = _queries_per_call(x)
    zeros = None
    if size < x.q.shape[1]:
        zeros = compat.match_vary(jnp.zeros((B, S, G, D), jnp.float32), x.kv, *xs)
    dkv, (dq,) = scan_chunks(chunk, zeros, xs, chunk=size)
    return Gradients(q=dq, kv=dkv, sinks=dsinks)


def _queries_per_call(x: Operands) -> int:
    """Returns for how many queries of each batch entry one call of the kernel has rows."""
    B, T = x.q.shape[:2]
    return chunk_length(T, B * _query_rows(x.q, x.indices) * 24, budget=SORT_BUDGET)


def sums_by_rows(options: Options, x: Operands, *_: Results) -> bool:
    """Returns whether the gradients of keys are summed by rows instead of by atomic reductions.

    Rows give bit-identical results on every run, and are faster for some shapes. The choice depends
    on shapes alone because the device is not known while tracing.

    A row is the sum over all heads of a device. If heads are sharded, it is therefore cheaper to
    give each device all heads of some queries. That makes fewer rows, at the cost of two exchanges
    of all queries.

    Several calls of the kernel need a second dkv to accumulate their results. Rows are chosen only
    if it is no larger than the rows themselves.
    """
    B, S, G, D = x.kv.shape
    T = x.q.shape[1]
    if options.deterministic:
        return True
    if min(S, T * x.indices.shape[3]) * G * D * 4 < ROWS_FROM:
        return False
    return _queries_per_call(x) >= T or B * S * G * D * 4 <= ROWS_BUDGET


def _kernel(
    options: Options,
    kv: Array,
    xs: Sequence[Any],
    gradient: Any,
    count: int,
    rows: tuple[Any, Any] = (None, None),
) -> tuple[Any, Any]:
    """Returns dq and dkv.

    If `rows` (the order of rows and their keys) is given, dkv is summed by the rows of `count`
    queries at a time.
    """
    q, indices, *rest = xs
    space = _workspace(q, kv, indices, count, by_rows=rows[0] is not None)
    dq, dkv, *_ = ffi.call(
        "jax_dsa.sparse_mla_bwd.v3",
        [q, kv, indices, *rest, *rows],
        [jax.ShapeDtypeStruct(q.shape, q.dtype), gradient, *space],
        scale=np.float32(options.scale),
    )
    return dq, dkv


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def _rows_per_slot(q: Any, indices: Any) -> int:
    """Returns the rows of a slot, each of which is the sum over 128 heads of the group."""
    return max(1, _ceil_div(q.shape[2] // indices.shape[2], 2 * TILE))


def _query_rows(q: Any, indices: Any) -> int:
    """Returns the rows of a query, whose slots are padded to whole tiles."""
    G, K = indices.shape[2:]
    return G * _rows_per_slot(q, indices) * _ceil_div(K, TILE) * TILE


def _workspace(
    q: Any, kv: Any, indices: Any, count: int, by_rows: bool
) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Returns the kernel's workspace for `count` queries at a time.

    It consists of counters, P and dS tiles, reordered slots, and rows.
    """
    (B, T, N, D), (S, G), K = q.shape, kv.shape[1:3], indices.shape[3]
    counters, tiles, order = ffi.extension().sparse_mla_bwd_workspace(
        batch=B,
        queries=T,
        keys=S,
        heads=N,
        groups=G,
        slots=K,
        dim=D,
        queries_at_once=count,
        by_rows=by_rows,
    )
    return (
        jax.ShapeDtypeStruct((counters,), jnp.uint8),
        jax.ShapeDtypeStruct((tiles,), jnp.uint8),
        jax.ShapeDtypeStruct((order // 4,), jnp.int32),
        jax.ShapeDtypeStruct((count * _query_rows(q, indices) if by_rows else 0, D), q.dtype),
    )


def _columns_in_order(dkv: Float[Array, "B S G D"]) -> Float[Array, "B S G D"]:
    """Undoes `sparse_mla_dkv_place`: the kernel stores 16 columns as the pairs 0 4 1 5 2 6 3 7."""
    pairs = dkv.reshape(*dkv.shape[:-1], dkv.shape[-1] // 16, 4, 2, 2)
    return jnp.swapaxes(pairs, -3, -2).reshape(dkv.shape)


def _rows_by_key(
    indices: Int[Array, "B T G K"],
    valid: Bool[Array, "B T G K"],
    keys: int,
    rows_per_slot: int,
    count: int,
) -> tuple[Int[Array, "B*T R"], Int[Array, "B*T R"]]:
    """Returns a stable order of the rows of every `count` queries by key, and the keys in it.

    A query has R rows: `rows_per_slot` times the slots, padded to whole tiles, of each group. Rows
    without a key come last. The keys of every `count` queries are numbered after the keys of the
    queries before.
    """
    B, T, G, K = indices.shape
    b = jnp.arange(B, dtype=jnp.int32)[:, None, None, None]
    g = jnp.arange(G, dtype=jnp.int32)[None, None, :, None]
    no_key = B * keys * G
    key = jnp.where(valid, (b * keys + indices) * G + g, no_key)
    key = jnp.pad(key, [(0, 0)] * 3 + [(0, -K % TILE)], constant_values=no_key)
    key = jnp.broadcast_to(key[:, :, :, None], (*key.shape[:3], rows_per_slot, key.shape[3]))
    # On a GPU, XLA sorts unsigned integers by radix, with half as many passes for 16 bits.
    R = G * rows_per_slot * key.shape[-1]
    short = _ceil_div(B * T, count) * (no_key + 1) <= 2**16
    query = jnp.arange(B * T, dtype=jnp.uint32)[:, None]
    key = key.reshape(B * T, R).astype(jnp.uint32) + query // count * (no_key + 1)
    row = (query % count * R + jnp.arange(R, dtype=jnp.uint32)[None]).astype(jnp.int32)
    flat = key.reshape(-1).astype(jnp.uint16 if short else jnp.uint32), row.reshape(-1)
    key, order = (x.reshape(B * T, R) for x in jax.lax.sort(flat, num_keys=1, is_stable=True))
    return order, key.astype(jnp.uint32)
