"""XLA implementation of the attention distribution, summed over heads: what the indexer is taught.

Per query and slot i of its row of indices, over the heads of a group, with p_i = exp(s_i - lse) and
the sink's gate as in sparse MLA:

    a_i = sum_heads gate * p_i
    ds_i = da_i * gate * p_i
    dlse = -sum_i da_i * gate^2 * p_i
    dsink = -sum_i da_i * gate * (1 - gate) * p_i

`lse` is an input, and its gradient is taken with the scores held fixed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp

from jax_dsa.core import compat
from jax_dsa.core.streaming import chunk_length, scan_chunks
from jax_dsa.reference.sparse_mla import (
    gather_rows,
    grouped,
    probabilities,
    query_bytes,
    scatter_rows,
    scores,
    sink_gate,
    valid_slots,
)

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int

    from jax_dsa.ops.attn_dist import Options


def _heads_summed(head_group: int | None, heads: int) -> int:
    """How many of the `heads` local heads of one KV group make one sum.

    A shard that holds less than a head group holds part of one: the machinery adds the parts up.
    """
    return heads if head_group is None else min(head_group, heads)


def attn_dist_fwd(
    options: Options,
    q: Float[Array, "B T N D"],
    kv: Float[Array, "B S G D"],
    indices: Int[Array, "B T G K"],
    lse: Float[Array, "B T N"],
    ends: Int[Array, "B T"] | None,
    topk_length: Int[Array, "B T"] | None,
    sinks: Float[Array, "B N"] | None,
) -> tuple[Float[Array, "B H T K"]]:
    """The sums in f32; [B, T, K] if options.head_group is None."""
    G, S = indices.shape[2], kv.shape[1]

    def chunk(carry, q, indices, lse, ends, topk_length):  # type: ignore[no-untyped-def]
        valid = valid_slots(indices, ends, topk_length, S)
        rows = gather_rows(kv, indices, valid, q.dtype)
        lse = grouped(lse, G)
        p = probabilities(scores(options.scale, grouped(q, G), rows, valid), lse)
        gate = sink_gate(sinks, lse)
        p = p if gate is None else p * gate[..., None]
        B, T, _, m, K = p.shape
        summed = _heads_summed(options.head_group, m)
        p = p.reshape(B, T, q.shape[2] // summed, summed, K).sum(3)
        return carry, (p,)

    size = chunk_length(q.shape[1], query_bytes(q, indices, 2 * q.dtype.itemsize, 8))
    _, (dist,) = scan_chunks(chunk, (), (q, indices, lse, ends, topk_length), chunk=size)
    return (dist[:, :, 0] if options.head_group is None else dist.swapaxes(1, 2),)


def attn_dist_bwd(
    options: Options,
    q: Float[Array, "B T N D"],
    kv: Float[Array, "B S G D"],
    indices: Int[Array, "B T G K"],
    lse: Float[Array, "B T N"],
    ends: Int[Array, "B T"] | None,
    topk_length: Int[Array, "B T"] | None,
    sinks: Float[Array, "B N"] | None,
    ddist: Float[Array, "B H T K"],
) -> tuple[
    Float[Array, "B T N D"],
    Float[Array, "B S G D"],
    Float[Array, "B T N"],
    Float[Array, "B N"] | None,
]:
    """Gradients of q (its dtype), kv, lse and the sinks (all three f32)."""
    B, _, N, D = q.shape
    S, G = kv.shape[1], indices.shape[2]
    acc = compat.accum_dtype(q.dtype)
    carry = (jnp.zeros((B, S, G, D), acc), None if sinks is None else jnp.zeros((B, N), acc))
    ddist = ddist[:, :, None] if options.head_group is None else ddist.swapaxes(1, 2)

    def chunk(carry, q, indices, lse, ends, topk_length, ddist):  # type: ignore[no-untyped-def]
        dkv, dsinks = carry
        q, lse = grouped(q, G), grouped(lse, G)
        valid = valid_slots(indices, ends, topk_length, S)
        rows = gather_rows(kv, indices, valid, q.dtype)
        p = probabilities(scores(options.scale, q, rows, valid), lse)
        gate = sink_gate(sinks, lse)
        p = p if gate is None else p * gate[..., None]
        heads = q.shape[3] // (ddist.shape[2] // G)
        dp = jnp.repeat(ddist, heads, axis=2).reshape(p.shape)
        ds = jnp.where(valid[:, :, :, None], p * dp, 0)
        dlse = -ds.sum(-1)
        if gate is not None:
            dsinks += jnp.sum(dlse * (1 - gate), axis=1).reshape(B, N)
            dlse *= gate
        ds = (ds * options.scale).astype(q.dtype)
        dq = jnp.einsum("btgmk,btgkd->btgmd", ds, rows, preferred_element_type=acc)
        drows = jnp.einsum("btgmk,btgmd->btgkd", ds, q, preferred_element_type=acc)
        dkv = scatter_rows(dkv, indices, valid, drows, deterministic=options.deterministic)
        flat = (*q.shape[:2], N)
        return (dkv, dsinks), (dq.reshape(*flat, D).astype(q.dtype), dlse.reshape(flat))

    moved = 6 if options.deterministic else 2
    xs = (q, indices, lse, ends, topk_length, ddist)
    carry = compat.match_vary(carry, kv, sinks, *xs)
    size = chunk_length(q.shape[1], query_bytes(q, indices, 2 * q.dtype.itemsize + 4 * moved, 16))
    (dkv, dsinks), (dq, dlse) = scan_chunks(chunk, carry, xs, chunk=size)
    return dq, dkv, dlse, dsinks
