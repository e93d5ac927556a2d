"""Masked attention in plain JAX: the XLA implementation, and the reference of the CUDA kernels.

Queries are processed in chunks (see `scores`), so no [T, S] array is stored. The gradient of the
bias is summed to the bias's broadcast shape in place.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from jax_dsa.core import compat
from jax_dsa.core.softmax import split_scale
from jax_dsa.core.typing import Array
from jax_dsa.ops.masked_attention.scores import (
    Keys,
    Queries,
    dot,
    exponentials,
    merge_heads,
    put_rows,
    scan_query_chunks,
    scores,
    weights,
)
from jax_dsa.ops.masked_attention.sinks import gates, without_sinks
from jax_dsa.ops.masked_attention.spec import Gradients, Operands, Options, Results


def masked_attention_fwd(options: Options, x: Operands) -> Results:
    """Returns the output, the largest scores and the logarithms of the sums."""
    keys, queries = Keys.of(x), Queries.of(x)

    def body(
        _: tuple[()], rows: Array, q: Array, *per_query: Any
    ) -> tuple[tuple[()], tuple[Any, ...]]:
        chunk = queries.chunk(rows, per_query)
        visible = chunk.visible(keys)
        k, v = keys.zero_unseen(visible)
        s = scores(options, q, k, chunk.visible_bias(keys, visible))
        p, total, max_logit = exponentials(s, visible, keys)
        log_sum = jnp.log(total)
        out = dot("bgmts,bgsd->bgmtd", p.astype(v.dtype), v) / total
        if x.sinks is not None:
            out *= gates(x.sinks, max_logit, log_sum)
        return (), (out.astype(q.dtype), max_logit, log_sum)

    _, (out, *pair) = scan_query_chunks(body, (), (x.q,), queries, keys, copies=3)
    return Results(_by_token(out), *(_by_token(z)[..., 0] for z in pair))


def masked_attention_bwd(options: Options, x: Operands, y: Results, dy: Results) -> Gradients:
    """Returns the gradients of q, k, v, bias and the sinks.

    With x the scaled and biased scores, s = cap * tanh(x / cap) and
    P = exp(s - max_logit - log_sum):
    delta = sum(out * dout) - dlse, dS = P * (dout V^T - delta), dX = dS * (1 - (s / cap)^2),
    dV = P^T dout, dQ = scale * dX K, dK = scale * dX^T Q, dbias = dX summed to bias's shape.
    The code computes dX times the first factor of the scale (see `split_scale`). For sinks, see
    `without_sinks`.
    """
    y, dy, dsinks = without_sinks(x, y, dy)
    acc = compat.accum_dtype(x.q.dtype)
    keys, queries = Keys.of(x), Queries.of(x)
    first, last = split_scale(options.scale, x.q.dtype)
    delta = (y.out.astype(acc) * (first * dy.out).astype(acc)).sum(-1) - first * dy.log_sum

    def body(
        carry: Any,
        rows: Array,
        q: Array,
        dout: Array,
        max_logit: Array,
        log_sum: Array,
        delta: Array,
        *per_query: Any,
    ) -> tuple[Any, tuple[Array]]:
        chunk = queries.chunk(rows, per_query)
        sees_any = max_logit != -jnp.inf
        visible = chunk.visible(keys)
        k, v = keys.zero_unseen(visible)
        visible = sees_any if visible is None else sees_any & visible
        # NaN in a fully masked query must not reach a key, and 0 * NaN is NaN.
        q, dout = jnp.where(sees_any, q, 0), jnp.where(sees_any, dout, 0)
        s = scores(options, q, k, chunk.visible_bias(keys, visible))
        p = weights(s, jnp.where(sees_any, max_logit, 0), log_sum)
        p = keys.multiply_by_count(jnp.where(visible, p, 0))
        dx = p * (dot("bgmtd,bgsd->bgmts", first * dout, v) - delta)
        if options.softcap is not None:
            dx *= 1 - (s / options.softcap) ** 2
        dx = jnp.where(visible, dx, 0)
        dx_low = dx.astype(q.dtype)
        dq = last * dot("bgmts,bgsd->bgmtd", dx_low, k)
        dk, dv, dbias = carry
        dk += dot("bgmts,bgmtd->bgsd", dx_low, q)
        dv += dot("bgmts,bgmtd->bgsd", p.astype(v.dtype), dout)
        if chunk.bias is not None:
            chunk_dbias = keys.scatter_scores(dx / first, chunk.bias.shape)
            if dbias.shape[3] == 1:
                dbias = dbias + chunk_dbias
            else:
                dbias = put_rows(dbias, rows, chunk_dbias)
        return (dk, dv, dbias), (dq.astype(q.dtype),)

    bias, dbias = queries.bias, None
    if bias is not None:
        # The gradient of a bias that all queries share accumulates over chunks.
        dbias = jnp.zeros(bias.shape, acc if bias.shape[3] == 1 else bias.dtype)
    carry = jnp.zeros(keys.k.shape, acc), jnp.zeros(keys.v.shape, acc), dbias
    carry = compat.match_vary(carry, *x, *y, *dy)
    xs = (x.q, dy.out, *(z[..., None] for z in (y.max_logit, y.log_sum, delta)))
    (dk, dv, dbias), (dq,) = scan_query_chunks(body, carry, xs, queries, keys, copies=5)
    dk, dv = keys.scatter_rows(last * dk), keys.scatter_rows(dv)
    if x.bias is not None:
        dbias = dbias.reshape(x.bias.shape).astype(x.bias.dtype)
    dk, dv = dk.astype(x.k.dtype), dv.astype(x.v.dtype)
    return Gradients(_by_token(dq), dk, dv, dbias, dsinks)


def _by_token(x: Array) -> Array:
    """[b g m t d] -> [b t n d]"""
    return jnp.swapaxes(merge_heads(x), 1, 2)
