"""XLA implementation of sparse MLA: dense attention to the gathered rows of a chunk of queries.

Per query and head, over the valid slots i of its indices, with v_i the first E values of row i:

    s_i = scale * q . kv[idx_i]      m = max s_i                   l = sum_i exp(s_i - m)
    p_i = exp(s_i - m - log l)       out = gate * sum_i p_i v_i    gate = l / (l + exp(sink - m))

    ds_i = p_i * (gate * (dout . v_i - dout . out) + dlse)
    dsink = -dout . out * (1 - gate)

where `dlse` is the cotangent of m + log l, and `out` is the gated output, so neither the gate nor
its inverse has to be kept. The row of an invalid slot is read as zeros and its score as -inf. This
keeps the contents of unselected keys, NaN included, out of every sum. With a second cache, the
slots of its list follow those of the first one, and everything else stays the same.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_dsa.core import compat
from jax_dsa.core.rows import query_bytes, scatter_rows, scores
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
from jax_dsa.core.typing import Array, Float
from jax_dsa.ops.sparse_mla.selected import Slots, pools_and_lists, selected
from jax_dsa.ops.sparse_mla.spec import Gradients, Operands, Options, Results


def sparse_mla_fwd(options: Options, x: Operands) -> Results:
    """Returns the output, the largest score and the logarithm of the sum."""
    if options.batch_invariant:
        per_entry = dataclasses.replace(options, batch_invariant=False)
        return entry_by_entry(functools.partial(sparse_mla_fwd, per_entry), x)
    pools, lists = pools_and_lists(options, x)
    sinks, G = x.sinks, x.indices.shape[2]

    def chunk(carry: tuple[()], q: Array, lists: tuple[Slots, ...]) -> Any:
        rows, valid = selected(pools, lists, q.dtype)
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

    size = _queries_at_once(x.q, lists, 2 * x.q.dtype.itemsize, 12)
    return Results(*scan_chunks(chunk, (), (x.q, lists), chunk=size)[1])


def sparse_mla_bwd(options: Options, x: Operands, y: Results, dy: Results) -> Gradients:
    """Returns the gradients of q, the keys and the sinks."""
    pools, lists = pools_and_lists(options, x)
    sinks = x.sinks
    B, _, N, D = x.q.shape
    G = x.indices.shape[2]
    acc = compat.accum_dtype(x.q.dtype)
    first, last = split_scale(options.scale, x.q.dtype)
    carry = (
        tuple(
            None if pool.rows.dtype == jnp.uint8 else jnp.zeros((*pool.rows.shape[:2], G, D), acc)
            for pool in pools
        ),
        None if sinks is None else jnp.zeros((B, N), acc),
    )

    def chunk(carry: Any, q: Array, lists: tuple[Slots, ...], y: Results, dy: Results) -> Any:
        dkvs, dsinks = carry
        q, out, top, log_sum, dout, dlse = (grouped(a, G) for a in (q, *y, dy.out, dy.log_sum))
        dout, dlse = of_rows_with_keys(top, dout, dlse)
        rows, valid = selected(pools, lists, q.dtype)
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
        if any(dkv is not None for dkv in dkvs):
            # One product computes ds^T q + p^T dout: the operands are stacked along the head axis.
            left = jnp.concatenate([ds, weighted.astype(q.dtype)], axis=3)
            right = jnp.concatenate([q, _padded(dout, D)], axis=3)
            drows = jnp.einsum("btgmk,btgmd->btgkd", left, right, preferred_element_type=acc)
            parts = np.cumsum([slots.indices.shape[3] for slots in lists])[:-1]
            dkvs = tuple(
                dkv
                if dkv is None
                else scatter_rows(dkv, s.indices, ok, part, deterministic=options.deterministic)
                for dkv, s, ok, part in zip(
                    dkvs,
                    lists,
                    jnp.split(valid, parts, axis=3),
                    jnp.split(drows, parts, axis=3),
                    strict=True,
                )
            )
        if sinks is not None:
            dsinks += sink_gradient(sinks, top, log_sum, dout_dot_out) / first
        return (dkvs, dsinks), (dq.reshape(*dq.shape[:2], N, D).astype(q.dtype),)

    row_copies = 6 if options.deterministic else 2
    size = _queries_at_once(x.q, lists, 2 * x.q.dtype.itemsize + 4 * row_copies, 24)
    carry = compat.match_vary(carry, *x, *y, *dy)
    (dkvs, dsinks), (dq,) = scan_chunks(chunk, carry, (x.q, lists, y, dy), chunk=size)
    dkv, dextra = (*dkvs, None)[:2]
    return Gradients(q=dq, kv=dkv, sinks=dsinks, extra_kv=dextra)


def _queries_at_once(q: Array, lists: tuple[Slots, ...], row_bytes: int, score_bytes: int) -> int:
    """Returns how many queries of each request a chunk has."""
    each = 0
    for slots in lists:
        each += query_bytes(q, slots.indices, row_bytes, score_bytes)
    return chunk_length(q.shape[1], each)


def _padded(x: Float[Array, "B T G m E"], dim: int) -> Float[Array, "B T G m D"]:
    return jnp.pad(x, [(0, 0)] * 4 + [(0, dim - x.shape[-1])])
