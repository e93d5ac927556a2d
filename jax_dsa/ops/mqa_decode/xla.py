"""XLA implementation of decode attention to a whole cache: online softmax over chunks of keys.

The mathematics is that of sparse MLA (ops/sparse_mla/xla.py), with the keys `starts <= j < ends` of
each query instead of its indices. A chunk of keys is read once, from pages if there is a page
table, and serves all heads. A value that is not finite would become NaN for every query, since the
probability 0 of a masked score times infinity is NaN. Such values are therefore kept out of the
products, and the queries that see them get NaN.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.core import max_dim, min_dim

from jax_dsa.core import compat
from jax_dsa.core.layout import (
    PAGE_RECORD_BYTES,
    PAGE_RECORD_DIM,
    unpack_page_records,
    unpack_records,
)
from jax_dsa.core.softmax import (
    grouped,
    log_of_sum,
    of_rows_with_keys,
    probabilities,
    row_products,
    sink_gate,
    sink_gradient,
    split_scale,
)
from jax_dsa.core.streaming import chunk_length, entry_by_entry, scan_chunks
from jax_dsa.core.typing import Array, Bool, Float, Int
from jax_dsa.ops.mqa_decode.spec import (
    PLAN_FIELDS,
    PLAN_RANGES,
    Gradients,
    Operands,
    Options,
    PlanOperands,
    PlanOptions,
    PlanResults,
    Results,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    # A chunk's keys [B, L, G, D], values [B, L, G, E] and visibility [B, T, L].
    Reader = Callable[[Int[Array, "1 n"]], tuple[Array, Array, Array]]


def _reader(options: Options, x: Operands) -> tuple[Reader, int, int]:
    """Returns a reader of consecutive units, the number of units, and the keys per unit.

    A unit is a page if there is a page table, and a single key otherwise.
    """
    q, k, v, starts, ends, _, page_table, _ = x
    page = options.page_size or 1
    pages = k.shape[1] // page

    def rows(x: Array, units: Int[Array, "1 n"], table: Array | None) -> Array:
        if table is None:
            return jax.lax.dynamic_slice_in_dim(x, units[0, 0], units.shape[1], axis=1)
        x = x.reshape(x.shape[0], pages, page, *x.shape[2:])
        if x.shape[0] == 1:
            x = jnp.take(x[0], table, axis=0, mode="clip")
        else:
            x = jax.vmap(lambda x, table: jnp.take(x, table, axis=0, mode="clip"))(x, table)
        return x.reshape(x.shape[0], units.shape[1] * page, *x.shape[3:])

    def read(units: Int[Array, "1 n"]) -> tuple[Array, Array, Array]:
        first = units[0, 0]
        key = first * page + jnp.arange(units.shape[1] * page, dtype=jnp.int32)[None, None]
        visible = (key >= starts[..., None]) & (key < ends[..., None])
        table = None
        if page_table is not None:
            table = jax.lax.dynamic_slice_in_dim(page_table, first, units.shape[1], axis=1)
            mapped = (table >= 0) & (table < pages)
            visible &= jnp.repeat(mapped, page, axis=1)[:, None]
        keys = rows(k, units, table)
        if keys.dtype == jnp.uint8:
            keys = _unpacked(keys, page, q.dtype)
        values = keys[..., : options.value_dim] if v is None else rows(v, units, table)
        return keys, values, visible

    units = k.shape[1] if page_table is None else page_table.shape[1] if pages else 0
    return read, units, page


def _unpacked(keys: Array, page: int, dtype: jnp.dtype) -> Float[Array, "B L G D"]:
    """Returns the keys of FP8 records of either kind."""
    if keys.shape[-1] != PAGE_RECORD_BYTES:
        return unpack_records(keys, dtype)
    B, rows, G, width = keys.shape
    pages = keys.reshape(B, rows // page, page * G, width)
    return unpack_page_records(pages, dtype).reshape(B, rows, G, PAGE_RECORD_DIM)


def _split_finite(x: Array) -> tuple[Array, Bool[Array, "B L G"]]:
    """Returns `x` with zeros for values that are not finite, and which rows had such values."""
    ok = jnp.isfinite(x)
    return jnp.where(ok, x, 0), ~ok.all(-1)


def _scores(
    scale: float,
    q: Float[Array, "B T G m D"],
    keys: Float[Array, "B L G D"],
    visible: Bool[Array, "B T L"],
) -> Float[Array, "B T G m L"]:
    s = jnp.einsum("btgmd,blgd->btgml", q, keys, preferred_element_type=compat.accum_dtype(q.dtype))
    return jnp.where(visible[:, :, None, None], s * scale, -jnp.inf)


def _chunk(options: Options, q: Array, k: Array, units: int, page: int, score_bytes: int) -> int:
    """Returns the units per chunk: as many as fit the budget, at most 1/num_splits of all."""
    B, T, N, D = q.shape
    G = k.shape[2]
    per_key = B * (G * D * 4 * q.dtype.itemsize + T * N * score_bytes)
    fits = chunk_length(units, page * per_key)
    return max_dim(1, min_dim(fits, -(-units // (options.num_splits or 1))))


def mqa_decode_fwd(options: Options, x: Operands) -> Results:
    """Returns the output, the largest score and the logarithm of the sum."""
    if options.batch_invariant:
        per_entry = dataclasses.replace(options, batch_invariant=False)
        return entry_by_entry(functools.partial(mqa_decode_fwd, per_entry), x)
    q, k, v, _, _, sinks, _, _ = x
    B, T, N, _ = q.shape
    G = k.shape[2]
    acc = compat.accum_dtype(q.dtype)
    E = options.value_dim if v is None else v.shape[3]
    read, units, page = _reader(options, x)
    size = _chunk(options, q, k, units, page, 12)
    q = grouped(q, G)

    def chunk(carry: Any, units: Array) -> Any:
        out, total, top, poisoned = carry
        keys, values, visible = read(units)
        s = _scores(options.scale, q, keys, visible)
        new = jax.lax.stop_gradient(jnp.maximum(top, s.max(-1)))
        base = jnp.where(new == -jnp.inf, 0, new)
        shrink = jnp.exp(top - base)
        p = jnp.exp(s - base[..., None])
        values, bad = _split_finite(values)
        weighted = jnp.einsum(
            "btgml,blge->btgme", p.astype(values.dtype), values, preferred_element_type=acc
        )
        seen = jnp.einsum("btl,blg->btg", visible.astype(jnp.float32), bad.astype(jnp.float32))
        out = out * shrink[..., None] + weighted
        return (out, total * shrink + p.sum(-1), new, poisoned | (seen > 0)), ()

    shape = (B, T, G, N // G)
    carry = (
        jnp.zeros((*shape, E), acc),
        jnp.zeros(shape, acc),
        jnp.full(shape, -jnp.inf, acc),
        jnp.zeros((B, T, G), bool),
    )
    carry = compat.match_vary(carry, *x)
    if units:
        ids = jnp.arange(units, dtype=jnp.int32)[None]
        carry, _ = scan_chunks(chunk, carry, (ids,), chunk=size)
    out, total, top, poisoned = carry
    log_sum = log_of_sum(total)
    total = jnp.where(total == 0, 1, total)
    out = jnp.where(poisoned[..., None, None], jnp.nan, out / total[..., None])
    gate = sink_gate(sinks, top, log_sum)
    out = out if gate is None else out * gate[..., None]
    out = out.reshape(B, T, N, E)
    out = out.astype(q.dtype) if options.normalize else out
    return Results(out, top.reshape(B, T, N), log_sum.reshape(B, T, N))


def mqa_decode_bwd(options: Options, x: Operands, y: Results, dy: Results) -> Gradients:
    """Returns the gradients of q, k, v and the sinks."""
    q, k, v, _, _, sinks, page_table, _ = x
    out, top, log_sum = y
    dout, _, dlse = dy
    B, T, N, D = q.shape
    G = k.shape[2]
    acc = compat.accum_dtype(q.dtype)
    read, units, page = _reader(options, x)
    ids = jnp.arange(units, dtype=jnp.int32)[None]
    size = _chunk(options, q, k, units, page, 24)
    q, dout, top, log_sum, dlse = (grouped(x, G) for x in (q, dout, top, log_sum, dlse))
    E = dout.shape[-1]
    q, dout, dlse = of_rows_with_keys(top, q, dout.astype(q.dtype), dlse)
    first, last = split_scale(options.scale, q.dtype)
    dout_dot_out = row_products(first * dout, grouped(out, G))
    gate = sink_gate(sinks, top, log_sum)
    has_dk = k.dtype != jnp.uint8

    def put(total: Array, units: Array, rows: Array) -> Array:
        if page_table is None:
            return jax.lax.dynamic_update_slice_in_dim(total, rows, units[0, 0], axis=1)
        pages = total.shape[1] // page
        table = jax.lax.dynamic_slice_in_dim(page_table, units[0, 0], units.shape[1], axis=1)
        table = jnp.where(table < 0, pages, table)
        paged = total.reshape(total.shape[0], pages, page, *total.shape[2:])
        rows = rows.reshape(B, units.shape[1], page, *rows.shape[2:])
        b = jnp.arange(B, dtype=jnp.int32)[:, None] if total.shape[0] == B else 0
        return paged.at[b, table].add(rows, mode="drop").reshape(total.shape)

    def chunk(carry: Any, units: Array) -> Any:
        dq, dk, dv = carry
        keys, values, visible = read(units)
        p = probabilities(_scores(options.scale, q, keys, visible), top, log_sum)
        dp = jnp.einsum("btgme,blge->btgml", first * dout, values, preferred_element_type=acc)
        dp = jnp.where(visible[:, :, None, None], dp - dout_dot_out[..., None], 0)
        weighted = p if gate is None else p * gate[..., None]
        ds = ((weighted * dp + p * (first * dlse)[..., None]) * last).astype(q.dtype)
        dq += jnp.einsum(
            "btgml,blgd->btgmd", ds, _split_finite(keys)[0], preferred_element_type=acc
        )
        if has_dk:
            dkeys = jnp.einsum("btgml,btgmd->blgd", ds, q, preferred_element_type=acc)
            weighted = weighted.astype(q.dtype)
            dvalues = jnp.einsum("btgml,btgme->blge", weighted, dout, preferred_element_type=acc)
            if v is None:
                dkeys += jnp.pad(dvalues, [(0, 0)] * 3 + [(0, D - E)])
            else:
                dv = put(dv, units, dvalues)
            dk = put(dk, units, dkeys)
        return (dq, dk, dv), ()

    carry = (
        jnp.zeros(q.shape, acc),
        jnp.zeros(k.shape, acc) if has_dk else None,
        None if v is None else jnp.zeros(v.shape, acc),
    )
    carry = compat.match_vary(carry, *x, dout, dlse)
    if units:
        carry, _ = scan_chunks(chunk, carry, (ids,), chunk=size)
    dq, dk, dv = carry
    dsinks = None
    if sinks is not None:
        dsinks = sink_gradient(sinks, top, log_sum, dout_dot_out) / first
    return Gradients(q=dq.reshape(B, T, N, D).astype(q.dtype), k=dk, v=dv, sinks=dsinks)


def mqa_decode_plan(options: PlanOptions, x: PlanOperands) -> PlanResults:
    """Returns plans that the kernels ignore. Here, nothing is divided by lengths."""
    return PlanResults(jnp.zeros((x.starts.shape[0], PLAN_RANGES, PLAN_FIELDS), jnp.int32))


def merge(
    outs: Float[Array, "sets ... E"], lses: Float[Array, "sets ..."]
) -> tuple[Float[Array, "... E"], Float[Array, "..."]]:
    """Combines the attention results of disjoint sets of keys; see `merge_attention`."""
    # A normalized result has a sum of 1 relative to its log-sum-exp.
    out, top, total = merge_sums(outs, lses, jnp.ones_like(lses))
    lse = jnp.where(total == 0, -jnp.inf, top + log_of_sum(total))
    return (out / jnp.where(total == 0, 1, total)[..., None]).astype(outs.dtype), lse


def merge_sums(
    outs: Float[Array, "sets ... E"],
    max_logits: Float[Array, "sets ..."],
    sums: Float[Array, "sets ..."],
) -> tuple[Float[Array, "... E"], Float[Array, "..."], Float[Array, "..."]]:
    """Combines results that are not normalized; see `merge_attention`."""
    acc = compat.accum_dtype(outs.dtype)
    max_logits = max_logits.astype(acc)
    top = jax.lax.stop_gradient(max_logits.max(0))
    empty = max_logits == -jnp.inf
    weights = jnp.where(empty, 0, jnp.exp(max_logits - jnp.where(top == -jnp.inf, 0, top)))
    outs, sums = (
        jnp.where(empty[..., None], 0, outs.astype(acc)),
        jnp.where(empty, 0, sums.astype(acc)),
    )
    return (weights[..., None] * outs).sum(0), top, (weights * sums).sum(0)
