"""XLA implementation of block-sparse attention: dense attention to gathered keys and values.

Per query and head, over the keys i of its blocks that it sees:

    s_i = scale * q . k_i            m = max s_i                   l = sum_i exp(s_i - m)
    p_i = exp(s_i - m - log l)       out = gate * sum_i p_i v_i    gate = l / (l + exp(sink - m))

    ds_i = p_i * (gate * (dout . v_i - dout . out) + dlse)
    dq = scale * sum_i ds_i k_i      dk_i = scale * ds_i q         dv_i = gate * p_i dout
    dsink = -dout . out * (1 - gate)

where `dlse` is the cotangent of m + log l, and `out` is the gated output. Queries are processed in
chunks, so the gathered rows of all queries never exist at once. A key that is not seen is read as
zeros and its score as -inf. This keeps its contents, NaN included, out of every sum.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jax_dsa.core import compat
from jax_dsa.core.rows import gather_rows, scatter_rows, scores
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
from jax_dsa.core.streaming import chunk_length, scan_chunks
from jax_dsa.ops.masked_attention.spec import Results
from jax_dsa.ops.sparse_attention.blocks import num_slots, selected_keys
from jax_dsa.ops.sparse_attention.spec import Gradients, Operands, Options


def sparse_attention_fwd(options: Options, x: Operands) -> Results:
    """Returns the output, the largest score and the logarithm of the sum."""
    k, v, sinks = x.k, x.v, x.sinks
    S, G, E = v.shape[1:]

    def chunk(carry: tuple[()], x: Operands) -> Any:
        keys, seen = selected_keys(options, x, S)
        s = scores(options.scale, grouped(x.q, G), gather_rows(k, keys, seen, x.q.dtype), seen)
        top = jax.lax.stop_gradient(jnp.max(s, axis=-1, initial=-jnp.inf))
        p = jnp.exp(s - jnp.where(top == -jnp.inf, 0, top)[..., None])
        total = p.sum(-1)
        log_sum = log_of_sum(total)
        values = gather_rows(v, keys, seen, x.q.dtype)
        out = jnp.einsum(
            "btgmk,btgke->btgme", p.astype(v.dtype), values, preferred_element_type=p.dtype
        )
        out = out / jnp.where(total == 0, 1, total)[..., None]
        gate = sink_gate(sinks, top, log_sum)
        out = out if gate is None else out * gate[..., None]
        heads = x.q.shape[:3]
        out = out.reshape(*heads, E).astype(x.q.dtype)
        return carry, (out, top.reshape(heads), log_sum.reshape(heads))

    size = _chunk_length(options, x, x.q.dtype.itemsize, 12)
    return Results(*scan_chunks(chunk, (), (_per_query_operands(x),), chunk=size)[1])


def sparse_attention_bwd(options: Options, x: Operands, y: Results, dy: Results) -> Gradients:
    """Returns the gradients of q, k, v and the sinks."""
    k, v, sinks = x.k, x.v, x.sinks
    B, _, N, _ = x.q.shape
    S, G = k.shape[1:3]
    acc = compat.accum_dtype(x.q.dtype)
    first, last = split_scale(options.scale, x.q.dtype)
    carry = (
        jnp.zeros(k.shape, acc),
        jnp.zeros(v.shape, acc),
        None if sinks is None else jnp.zeros((B, N), acc),
    )

    def chunk(carry: Any, x: Operands, y: Results, dy: Results) -> Any:
        dk, dv, dsinks = carry
        q, out, top, log_sum, dout, dlse = (grouped(a, G) for a in (x.q, *y, dy.out, dy.log_sum))
        dout, dlse = of_rows_with_keys(top, dout, dlse)
        keys, seen = selected_keys(options, x, S)
        rows, values = (gather_rows(a, keys, seen, x.q.dtype) for a in (k, v))
        s = scores(options.scale, q, rows, seen)
        p = probabilities(s, top, log_sum)
        dp = jnp.einsum("btgme,btgke->btgmk", first * dout, values, preferred_element_type=acc)
        dout_dot_out = row_products(first * dout, out)
        dp -= dout_dot_out[..., None]
        gate = sink_gate(sinks, top, log_sum)
        weighted = p if gate is None else p * gate[..., None]
        if sinks is not None:
            dsinks += sink_gradient(sinks, top, log_sum, dout_dot_out) / first
        ds = ((weighted * dp + p * (first * dlse)[..., None]) * last).astype(q.dtype)
        dq = jnp.einsum("btgmk,btgkd->btgmd", ds, rows, preferred_element_type=acc)
        drows = jnp.einsum("btgmk,btgmd->btgkd", ds, q, preferred_element_type=acc)
        dk = scatter_rows(dk, keys, seen, drows, deterministic=options.deterministic)
        dvalues = jnp.einsum(
            "btgmk,btgme->btgke", weighted.astype(q.dtype), dout, preferred_element_type=acc
        )
        dv = scatter_rows(dv, keys, seen, dvalues, deterministic=options.deterministic)
        return (dk, dv, dsinks), (dq.reshape(x.q.shape).astype(q.dtype),)

    row_copies = 6 if options.deterministic else 2
    size = _chunk_length(options, x, 2 * x.q.dtype.itemsize + 4 * row_copies, 24)
    carry = compat.match_vary(carry, *x, *y, *dy)
    xs = _per_query_operands(x), y, dy
    (dk, dv, dsinks), (dq,) = scan_chunks(chunk, carry, xs, chunk=size)
    return Gradients(q=dq, k=dk, v=dv, sinks=dsinks)


def _per_query_operands(x: Operands) -> Any:
    """Returns the operands that have a query axis, which is processed in chunks."""
    return x._replace(k=None, v=None, sinks=None)  # type: ignore[arg-type]


def _chunk_length(options: Options, x: Operands, element_bytes: int, score_bytes: int) -> int:
    """Returns the number of queries in a chunk.

    Args:
        options: the options.
        x: the operands.
        element_bytes: bytes of intermediates for one element of a gathered row.
        score_bytes: bytes of intermediates for one score.
    """
    B, T, G, K = x.indices.shape
    slots = num_slots(options, K, x.k.shape[1])
    rows = G * (x.k.shape[3] + x.v.shape[3]) * element_bytes + x.q.shape[2] * score_bytes
    # The numbers of forced blocks are compared with those of all slots.
    return chunk_length(T, B * slots * (options.block_size * rows + G * (slots - K)))
