"""Inputs and the oracle of `dsa_attention`, for its tests."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from support.compare import assert_matches
from support.oracles.attn_dist import attn_dist
from support.oracles.indexer import indexer_logits
from support.oracles.losses import kl_rows
from support.oracles.sparse_mla import sparse_mla
from support.oracles.topk import topk, values

B, T, S, N, D, E, J, C, K = 2, 5, 9, 4, 6, 4, 2, 3, 4
NAMES = ("q", "kv", "index_q", "index_k", "index_weights")


def inputs(rng, B=B, T=T, S=S, N=N, G=1):
    shapes = (B, T, N, D), (B, S, G, D), (B, T, J, C), (B, S, C), (B, T, J)
    return tuple(rng.normal(size=s).astype(np.float32) for s in shapes)


def oracle(
    q,
    kv,
    index_q,
    index_k,
    index_weights,
    starts,
    ends,
    top_k=K,
    sinks=None,
    k_scale=None,
    scale=D**-0.5,
):
    """Returns out, indices, kl and lse."""
    index = indexer_logits(
        index_q, index_k, index_weights, starts=starts, ends=ends, index_k_scale=k_scale
    )
    indices = topk(index, top_k)
    groups = kv.shape[2]
    shared = np.repeat(indices[:, :, None], groups, axis=2)
    out, lse = sparse_mla(q, kv, shared, value_dim=E, scale=scale, sinks=sinks)
    teacher = attn_dist(q, kv, shared, lse, scale=scale, head_group=1).sum(1)
    kl, _ = kl_rows(values(index, indices), teacher, indices >= 0)
    return out, indices, kl, lse


def limits(query_start=0, B=B, T=T, S=S):
    """Returns the starts and ends of causal queries."""
    start = np.broadcast_to(np.reshape(query_start, (-1, 1)), (B, 1))
    return np.zeros((B, T), np.int32), np.clip(start + np.arange(T) + 1, 0, S).astype(np.int32)


def assert_same(got, want, tol=1e-4):
    (out, (indices, kl, lse, *_)), (want_out, want_indices, want_kl, want_lse) = got, want
    np.testing.assert_array_equal(indices, want_indices)
    assert indices.dtype == jnp.int32 and kl.shape == () and kl.dtype == lse.dtype == jnp.float32
    assert_matches(out, want_out.astype(np.float32), tol, "out")
    assert_matches(lse, want_lse.astype(np.float32), tol, "lse")
    np.testing.assert_allclose(kl, want_kl, rtol=tol, atol=1e-6)


def oracle_of_selection(q, kv, index_q, index_k, index_weights, given, starts, ends, k_scale):
    """Returns the oracle's results for given indices, without those a query does not see."""
    seen = (given >= np.maximum(starts, 0)[..., None]) & (given < np.minimum(ends, S)[..., None])
    indices = np.where(seen, given, -1)
    shared = np.repeat(indices[:, :, None], kv.shape[2], axis=2)
    out, lse = sparse_mla(q, kv, shared, value_dim=E, scale=D**-0.5)
    teacher = attn_dist(q, kv, shared, lse, scale=D**-0.5, head_group=1).sum(1)
    logits = indexer_logits(index_q, index_k, index_weights, index_k_scale=k_scale)
    kl, _ = kl_rows(values(logits, indices), teacher, indices >= 0)
    return out, indices, kl, lse
