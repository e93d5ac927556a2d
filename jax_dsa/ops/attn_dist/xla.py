"""XLA implementation of the attention distribution, summed over heads.

Per query and valid slot i of its indices, with sums over the heads of a head group:

    p_i = exp(s_i - lse)      gate = 1 / (1 + exp(sink - lse))

    a_i = sum_heads gate * p_i
    ds_i = da_i * gate * p_i
    dlse = -sum_i da_i * gate^2 * p_i
    dsink = -sum_i da_i * gate * p_i / (1 + exp(lse - sink))

`lse` is an input of its own. Its gradient is taken with the scores held constant. It may be a pair,
see the operands.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from jax_dsa.core import compat
from jax_dsa.core.rows import gather_rows, query_bytes, scatter_rows, scores, valid_slots
from jax_dsa.core.softmax import (
    grouped,
    of_rows_with_keys,
    probabilities,
    sink_gate,
    sink_share,
)
from jax_dsa.core.streaming import chunk_length, scan_chunks
from jax_dsa.core.typing import Array
from jax_dsa.ops.attn_dist.spec import Gradients, Operands, Options, Results


def _heads_summed(head_group: int | None, heads: int) -> int:
    """Returns how many of the `heads` local heads of one KV head make one sum.

    A shard with fewer heads than a head group computes a partial sum. The partial sums of the
    shards are added outside.
    """
    return heads if head_group is None else max(1, min(head_group, heads))


def _pair(lse: Array, log_sum: Array | None, groups: int) -> tuple[Array, Array | float]:
    """Returns the largest scores and the logarithms of the sums; lse and 0 if there is no pair."""
    return grouped(lse, groups), 0.0 if log_sum is None else grouped(log_sum, groups)


def attn_dist_fwd(options: Options, x: Operands) -> Results:
    """Returns the sums, [B, T, K] if options.head_group is None, else [B, H, T, K]."""
    kv, sinks = x.kv, x.sinks
    G, S = x.indices.shape[2], kv.shape[1]

    def chunk(
        carry: tuple[()],
        q: Array,
        indices: Array,
        lse: Array,
        log_sum: Any,
        ends: Any,
        topk_length: Any,
    ) -> Any:
        valid = valid_slots(indices, ends, topk_length, S)
        rows = gather_rows(kv, indices, valid, q.dtype)
        pair = _pair(lse, log_sum, G)
        p = probabilities(scores(options.scale, grouped(q, G), rows, valid), *pair)
        gate = sink_gate(sinks, *pair)
        if gate is not None:  # A NaN gate must not reach invalid slots.
            p = jnp.where(valid[:, :, :, None], p * gate[..., None], 0)
        B, T, _, m, K = p.shape
        summed = _heads_summed(options.head_group, m)
        sums = 1 if options.head_group is None else q.shape[2] // summed
        p = p.reshape(B, T, sums, summed, K).sum(3)
        return carry, (p,)

    size = chunk_length(x.q.shape[1], query_bytes(x.q, x.indices, 2 * x.q.dtype.itemsize, 8))
    xs = (x.q, x.indices, x.lse, x.log_sum, x.ends, x.topk_length)
    _, (dist,) = scan_chunks(chunk, (), xs, chunk=size)
    return Results(dist[:, :, 0] if options.head_group is None else dist.swapaxes(1, 2))


def attn_dist_bwd(options: Options, x: Operands, dy: Results) -> Gradients:
    """Returns the gradients of q, kv, lse and the sinks."""
    kv, sinks = x.kv, x.sinks
    B, _, N, D = x.q.shape
    S, G = kv.shape[1], x.indices.shape[2]
    acc = compat.accum_dtype(x.q.dtype)
    carry = (jnp.zeros((B, S, G, D), acc), None if sinks is None else jnp.zeros((B, N), acc))
    ddist = dy.dist[:, :, None] if options.head_group is None else dy.dist.swapaxes(1, 2)

    def chunk(
        carry: Any,
        q: Array,
        indices: Array,
        lse: Array,
        log_sum: Any,
        ends: Any,
        topk_length: Any,
        ddist: Array,
    ) -> Any:
        dkv, dsinks = carry
        q, pair = grouped(q, G), _pair(lse, log_sum, G)
        valid = valid_slots(indices, ends, topk_length, S)
        rows = gather_rows(kv, indices, valid, q.dtype)
        p = probabilities(scores(options.scale, q, rows, valid), *pair)
        gate = sink_gate(sinks, *pair)
        p = p if gate is None else p * gate[..., None]
        summed = _heads_summed(options.head_group, q.shape[3])
        dp = jnp.repeat(ddist, summed, axis=2).reshape(p.shape)
        q, dp = of_rows_with_keys(pair[0], q, dp)
        ds = jnp.where(valid[:, :, :, None], p * dp, 0)
        dlse = -ds.sum(-1)
        if sinks is not None and gate is not None:
            dsinks += jnp.sum(dlse * sink_share(sinks, *pair), axis=1).reshape(B, N)
            dlse *= gate
        ds = (ds * options.scale).astype(q.dtype)
        dq = jnp.einsum("btgmk,btgkd->btgmd", ds, rows, preferred_element_type=acc)
        (dq,) = of_rows_with_keys(pair[0], dq)
        drows = jnp.einsum("btgmk,btgmd->btgkd", ds, q, preferred_element_type=acc)
        dkv = scatter_rows(dkv, indices, valid, drows, deterministic=options.deterministic)
        flat = (*q.shape[:2], N)
        return (dkv, dsinks), (dq.reshape(*flat, D).astype(q.dtype), dlse.reshape(flat))

    moved = 6 if options.deterministic else 2
    xs = (x.q, x.indices, x.lse, x.log_sum, x.ends, x.topk_length, ddist)
    carry = compat.match_vary(carry, kv, sinks, *xs)
    per_query = query_bytes(x.q, x.indices, 2 * x.q.dtype.itemsize + 4 * moved, 16)
    size = chunk_length(x.q.shape[1], per_query)
    (dkv, dsinks), (dq, dlse) = scan_chunks(chunk, carry, xs, chunk=size)
    return Gradients(q=dq, kv=dkv, lse=dlse, sinks=dsinks)
