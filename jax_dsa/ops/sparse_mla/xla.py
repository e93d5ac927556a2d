"""XLA implementation of sparse MLA: dense attention to the gathered rows of a chunk of queries.

Per query and head, over the valid slots i of its indices, with v_i the first E values of row i:

    s_i = scale * q . kv[idx_i]      m = max s_i                   l = sum_i exp(s_i - m)
    p_i = exp(s_i - m - log l)       out = gate * sum_i p_i v_i    gate = l / (l + exp(sink - m))

    ds_i = p_i * (gate * (dout . v_i - dout . out) + dlse)
    dsink = -dout . out * (1 - gate)

where `dlse` is the cotangent of m + log l, and `out` is the gated output, so neither the gate nor
its inverse has to be kept. The row of an invalid slot is read as zeros and its score as -inf. This
keeps the contents of unselected keys, NaN included, out of every sum.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from jax_dsa.core import compat
from jax_dsa.core.layout import physical_rows
from jax_dsa.core.rows import gather_rows, query_bytes, scatter_rows, scores, valid_slots
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
from jax_dsa.core.typing import Array, Bool, Float
from jax_dsa.ops.sparse_mla.spec import Gradients, Operands, Options, Results


def sparse_mla_fwd(options: Options, x: Operands) -> Results:
    """Returns the output, the largest score and the logarithm of the sum."""
    x = _without_page_table(options, x)
    if options.batch_invariant:
        per_entry = dataclasses.replace(options, batch_invariant=False)
        return entry_by_entry(functools.partial(sparse_mla_fwd, per_entry), x)
    kv, sinks = x.kv, x.sinks
    G, S = x.indices.shape[2], kv.shape[1]

    def chunk(carry: tuple[()], x: Operands) -> Any:
        q, valid = x.q, _valid(x, S)
        rows = gather_rows(kv, x.indices, valid, q.dtype, options.page_size)
        s = scores(options.scale, grouped(q, G), rows, valid)
        top = jax.lax.stop_gradient(jnp.max(s, axis=-1, initial=-jnp.inf))
        p = jnp.exp(s - jnp.where(top == -jnp.inf, 0, top)[..., None])
        total = p.sum(-1)
        log_sum = log_of_sum(total)
        out = jnp.einsum(
            "btgmk,btgke->btgme",
            p.astype(rows.dtype),
            rows[..., : options.value_dim],
            preferred_element_type=p.dtype,
        )
        out = out / jnp.where(total == 0, 1, total)[..., None]
        gate = sink_gate(sinks, top, log_sum)
        out = out if gate is None else out * gate[..., None]
        heads = q.shape[:3]
        out = out.reshape(*heads, options.value_dim).astype(q.dtype)
        return carry, (out, top.reshape(heads), log_sum.reshape(heads))

    per_query = query_bytes(x.q, x.indices, 2 * x.q.dtype.itemsize, 12)
    size = chunk_length(x.q.shape[1], per_query)
    return Results(*scan_chunks(chunk, (), (_per_query_operands(x),), chunk=size)[1])


def sparse_mla_bwd(options: Options, x: Operands, y: Results, dy: Results) -> Gradients:
    """Returns the gradients of q, kv and the sinks."""
    x = _without_page_table(options, x)
    kv, sinks = x.kv, x.sinks
    B, _, N, D = x.q.shape
    S, G = kv.shape[1], x.indices.shape[2]
    acc = compat.accum_dtype(x.q.dtype)
    first, last = split_scale(options.scale, x.q.dtype)
    has_dkv = kv.dtype != jnp.uint8
    carry = (
        jnp.zeros((kv.shape[0], S, G, D), acc) if has_dkv else None,
        None if sinks is None else jnp.zeros((B, N), acc),
    )

    def chunk(carry: Any, x: Operands, y: Results, dy: Results) -> Any:
        dkv, dsinks = carry
        q, out, top, log_sum, dout, dlse = (grouped(a, G) for a in (x.q, *y, dy.out, dy.log_sum))
        dout, dlse = of_rows_with_keys(top, dout, dlse)
        valid = _valid(x, S)
        rows = gather_rows(kv, x.indices, valid, q.dtype, options.page_size)
        p = probabilities(scores(options.scale, q, rows, valid), top, log_sum)
        dp = jnp.einsum(
            "btgme,btgke->btgmk",
            first * dout,
            rows[..., : options.value_dim],
            preferred_element_type=acc,
        )
        dout_dot_out = row_products(first * dout, out)
        gate = sink_gate(sinks, top, log_sum)
        dp -= dout_dot_out[..., None]
        weighted = p if gate is None else p * gate[..., None]
        ds = ((weighted * dp + p * (first * dlse)[..., None]) * last).astype(q.dtype)
        dq = jnp.einsum("btgmk,btgkd->btgmd", ds, rows, preferred_element_type=acc)
        if dkv is not None:
            # One product computes ds^T q + p^T dout: the operands are stacked along the head axis.
            left = jnp.concatenate([ds, weighted.astype(q.dtype)], axis=3)
            right = jnp.concatenate([q, _padded(dout, D)], axis=3)
            drows = jnp.einsum("btgmk,btgmd->btgkd", left, right, preferred_element_type=acc)
            dkv = scatter_rows(dkv, x.indices, valid, drows, deterministic=options.deterministic)
        if sinks is not None:
            dsinks += sink_gradient(sinks, top, log_sum, dout_dot_out) / first
        return (dkv, dsinks), (dq.reshape(*dq.shape[:2], N, D).astype(q.dtype),)

    row_copies = 6 if options.deterministic else 2
    per_query = query_bytes(x.q, x.indices, 2 * x.q.dtype.itemsize + 4 * row_copies, 24)
    carry = compat.match_vary(carry, *x, *y, *dy)
    size = chunk_length(x.q.shape[1], per_query)
    (dkv, dsinks), (dq,) = scan_chunks(chunk, carry, (_per_query_operands(x), y, dy), chunk=size)
    return Gradients(q=dq, kv=dkv, sinks=dsinks)


def _per_query_operands(x: Operands) -> Any:
    """Returns the operands that have a query axis, which is processed in chunks."""
    return x._replace(kv=None, sinks=None)  # type: ignore[arg-type]


def _valid(x: Operands, keys: int) -> Bool[Array, "B T G K"]:
    """Returns which slots are valid."""
    return valid_slots(x.indices, x.ends, x.topk_length, keys)


def _without_page_table(options: Options, x: Operands) -> Operands:
    """Returns `x` with indices within the page pool instead of indices within each request."""
    if x.page_table is None:
        return x
    visible = x.indices
    if x.ends is not None:
        visible = jnp.where(visible < x.ends[:, :, None, None], visible, -1)
    size = options.page_size
    assert size is not None
    indices = physical_rows(x.kv.shape[1] // size, size, x.page_table, visible)
    return x._replace(indices=indices, ends=None, page_table=None)


def _padded(x: Float[Array, "B T G m E"], dim: int) -> Float[Array, "B T G m D"]:
    return jnp.pad(x, [(0, 0)] * 4 + [(0, dim - x.shape[-1])])
