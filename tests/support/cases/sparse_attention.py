"""Transform cases of `sparse_attention` and its variants."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jax_dsa import (
    FlatCache,
    PagedCache,
    sparse_attention,
    sparse_attention_decode,
    sparse_attention_varlen,
)
from support.cases import TransformCase
from support.cases.sparse_mla import floats, picks

B, T, S, N, D, E, K = 8, 8, 20, 8, 6, 5, 3


def make_args(rng: np.random.Generator) -> tuple:
    q, k, v = floats(rng, B, T, N, D), floats(rng, B, S, 1, D), floats(rng, B, S, 1, E)
    return q, k, v, picks(rng, B, T, K, below=5)


def attend(q, k, v, indices):
    return sparse_attention(q, k, v, indices, block_size=4, return_lse=True, return_max_logit=True)


def make_forced_args(rng: np.random.Generator) -> tuple:
    topk_length = jnp.asarray(rng.integers(0, K + 1, size=(B, T)), jnp.int32)
    lengths = jnp.asarray(rng.integers(5, S + 1, size=B), jnp.int32)
    starts = jnp.asarray(rng.integers(-3, S, size=B), jnp.int32)
    return *make_args(rng), topk_length, lengths, starts, floats(rng, 1, N)


def attend_forced(q, k, v, indices, topk_length, lengths, starts, sinks):
    return sparse_attention(
        q,
        k,
        v,
        indices,
        block_size=4,
        is_causal=True,
        query_start=starts,
        key_value_seq_lengths=lengths,
        sink_blocks=1,
        local_blocks=2,
        topk_length=topk_length,
        sinks=sinks[0],
        deterministic=True,
        return_lse=True,
    )


def make_grouped_args(rng: np.random.Generator) -> tuple:
    q, k, v = floats(rng, B, T, N, D), floats(rng, B, S, 2, D), floats(rng, B, S, 2, E)
    return q, k, v, picks(rng, B, T, 2, K, below=5)


def attend_tail(q, k, v, indices):
    return sparse_attention(
        q, k, v, indices, block_size=4, is_causal=True, query_start=9, tail_block=True
    )


def make_document_args(rng: np.random.Generator) -> tuple:
    q, k, v, indices = make_grouped_args(rng)
    ids = np.sort(rng.integers(0, 3, (B, T)), axis=1)
    return q, k[:, :T], v[:, :T], indices % 2, jnp.asarray(ids, jnp.int32)


def attend_documents(q, k, v, indices, ids):
    options = {"is_causal": True, "tail_block": True, "return_lse": True}
    return sparse_attention(q, k, v, indices, block_size=4, segment_ids=ids, **options)


def make_packed_args(rng: np.random.Generator) -> tuple:
    q, k, v, indices = (x[0] for x in make_args(rng))
    cu_q = jnp.asarray([0, 3, 7], jnp.int32)
    cu_k = jnp.asarray([1, 12, 20], jnp.int32)
    return q, k, v, indices, cu_q, cu_k


def attend_packed(q, k, v, indices, cu_q, cu_k):
    return sparse_attention_varlen(
        q,
        k,
        v,
        indices,
        cu_q,
        cu_k,
        block_size=4,
        is_causal=True,
        causal_alignment="bottom_right",
        local_blocks=1,
        return_lse=True,
    )


def make_flat_args(rng: np.random.Generator) -> tuple:
    q, k, v, _ = make_grouped_args(rng)
    indices = picks(rng, B, T, 2, K, below=5)
    return q, k, v, indices, jnp.asarray(rng.integers(0, S + 3, size=B), jnp.int32)


def decode_flat(q, k, v, indices, lengths):
    caches = FlatCache(k, lengths), FlatCache(v, lengths)
    options = {"is_causal": True, "sink_blocks": 1, "local_blocks": 2, "return_lse": True}
    return sparse_attention_decode(q, *caches, indices, block_size=4, **options)


def make_paged_args(rng: np.random.Generator) -> tuple:
    pages = floats(rng, 9, 6, 1, D), floats(rng, 9, 6, 1, E)
    table = jnp.asarray(rng.integers(-1, 10, size=(B, 3)), jnp.int32)
    lengths = jnp.asarray(rng.integers(0, 19, size=B), jnp.int32)
    indices = picks(rng, B, T, K, below=5)
    return floats(rng, B, T, N, D), *pages, indices, table, lengths, floats(rng, 1, N)


def decode_paged(q, k, v, indices, table, lengths, sinks):
    caches = PagedCache(k, table, lengths), PagedCache(v, table, lengths)
    return sparse_attention_decode(
        q, *caches, indices, block_size=4, sinks=sinks[0], return_max_logit=True
    )


def decode_invariant(q, k, v, indices, table, lengths, sinks):
    caches = PagedCache(k, table, lengths), PagedCache(v, table, lengths)
    options = {"sinks": sinks[0], "batch_invariant": True}
    return sparse_attention_decode(q, *caches, indices, block_size=4, **options)


batch, query, head = P("x"), P(None, "x"), P(None, None, "x")
CASES = [
    TransformCase(
        "sparse_attention",
        attend,
        make_args,
        (0, 1, 2),
        {
            "batch": (batch,) * 4,
            "query": (query, P(), P(), query),
            "head": (head, P(), P(), P()),
            "keys": (query,) * 4,
        },
        {"keys": {(B, S, 1, D), (B, S, 1, E)}},
    ),
    TransformCase(
        "sparse_attention-forced-blocks",
        attend_forced,
        make_forced_args,
        (0, 1, 2, 7),
        {
            "batch": (batch,) * 7 + (P(),),
            "query": (query, P(), P(), query, query, P(), P(), P()),
            "head": (head, P(), P(), P(), P(), P(), P(), query),
        },
    ),
    TransformCase(
        "sparse_attention-groups",
        attend_tail,
        make_grouped_args,
        (0, 1, 2),
        {"batch": (batch,) * 4, "head": (head, P(), P(), P())},
    ),
    TransformCase(
        "sparse_attention-documents",
        attend_documents,
        make_document_args,
        (0, 1, 2),
        {
            "batch": (batch,) * 5,
            "head": (head, P(), P(), P(), P()),
            "query": (query, P(), P(), query, query),
            "keys": (query,) * 5,
        },
        {"query": {(B, T)}, "keys": {(B, T), (B, T, 2, D), (B, T, 2, E)}},
    ),
    TransformCase(
        "sparse_attention-packed",
        attend_packed,
        make_packed_args,
        (0, 1, 2),
        {"query": (P("x"), P(), P(), P("x"), P(), P())},
    ),
    TransformCase(
        "sparse_attention_decode-flat",
        decode_flat,
        make_flat_args,
        (0, 1, 2),
        {
            "batch": (batch,) * 5,
            "query": (query, P(), P(), query, P()),
            "head": (head, P(), P(), P(), P()),
        },
    ),
    TransformCase(
        "sparse_attention_decode-paged",
        decode_paged,
        make_paged_args,
        (0, 1, 2, 6),
        {
            "batch": (batch, P(), P(), batch, batch, batch, P()),
            "head": (head, P(), P(), P(), P(), P(), query),
        },
    ),
    TransformCase(
        "sparse_attention_decode-batch-invariant",
        decode_invariant,
        make_paged_args,
        (0, 1, 2),
        {"batch": (batch, P(), P(), batch, batch, batch, P())},
    ),
]
