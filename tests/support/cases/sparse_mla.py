"""Transform cases of `sparse_mla` and `sparse_mla_decode`."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jax_dsa import FlatCache, PagedCache, sparse_mla, sparse_mla_decode
from support.cases import TransformCase

B, T, N, D, E, S, K = 8, 8, 8, 6, 4, 12, 5


def floats(rng: np.random.Generator, *shape: int) -> jnp.ndarray:
    return jnp.asarray(rng.normal(size=shape), jnp.float32)


def picks(rng: np.random.Generator, *shape: int, below: int = S) -> jnp.ndarray:
    """Returns indices that contain duplicates and empty slots."""
    return jnp.asarray(rng.integers(-1, below + 1, size=shape), jnp.int32)


def make_args(rng: np.random.Generator) -> tuple:
    return floats(rng, B, T, N, D), floats(rng, B, S, 1, D), picks(rng, B, T, 1, K)


def attend(q, kv, indices):
    return sparse_mla(q, kv, indices, value_dim=E, return_lse=True)


def make_masked_args(rng: np.random.Generator) -> tuple:
    lengths = jnp.asarray(rng.integers(0, K + 1, size=(B, T)), jnp.int32)
    return *make_args(rng), lengths, floats(rng, 1, N)


def attend_masked(q, kv, indices, topk_length, sinks):
    return sparse_mla(
        q,
        kv,
        indices,
        value_dim=E,
        is_causal=True,
        query_start=3,
        topk_length=topk_length,
        sinks=sinks[0],
        deterministic=True,
        return_lse=True,
    )


def make_grouped_args(rng: np.random.Generator) -> tuple:
    return floats(rng, B, T, N, D), floats(rng, B, S, 2, D), picks(rng, B, T, 2, K)


def make_flat_args(rng: np.random.Generator) -> tuple:
    lengths = jnp.asarray(rng.integers(0, S + 1, size=B), jnp.int32)
    return *make_args(rng), lengths


def decode_flat(q, data, indices, lengths):
    cache = FlatCache(data, lengths)
    return sparse_mla_decode(q, cache, indices, value_dim=E, is_causal=True, return_lse=True)


def make_paged_args(rng: np.random.Generator) -> tuple:
    q, _, indices, lengths = make_flat_args(rng)
    table = jnp.asarray(rng.integers(-1, 10, size=(B, 4)), jnp.int32)
    return q, floats(rng, 10, 3, 1, D), indices, table, lengths


def decode_paged(q, pages, indices, table, lengths):
    return sparse_mla_decode(q, PagedCache(pages, table, lengths), indices, value_dim=E)


def decode_invariant(q, pages, indices, table, lengths):
    cache = PagedCache(pages, table, lengths)
    return sparse_mla_decode(q, cache, indices, value_dim=E, batch_invariant=True)


def make_two_cache_args(rng: np.random.Generator) -> tuple:
    q, pages, indices, table, lengths = make_paged_args(rng)
    entries = jnp.asarray(rng.integers(0, S + 1, size=B), jnp.int32)
    extra = floats(rng, B, S, 1, D), picks(rng, B, T, 1, K + 2), entries
    return q, pages, indices, table, lengths, *extra


def decode_two_caches(q, pages, indices, table, lengths, data, extra_indices, entries):
    return sparse_mla_decode(
        q,
        PagedCache(pages, table, lengths),
        indices,
        extra_cache=FlatCache(data, entries),
        extra_indices=extra_indices,
        is_causal=True,
        extra_key_stride=2,
        value_dim=E,
        return_lse=True,
    )


CASES = [
    TransformCase(
        "sparse_mla",
        attend,
        make_args,
        (0, 1),
        {
            "batch": (P("x"), P("x"), P("x")),
            "query": (P(None, "x"), P(), P(None, "x")),
            "head": (P(None, None, "x"), P(), P()),
            "keys": (P(None, "x"), P(None, "x"), P(None, "x")),
        },
        {"keys": {(B, S, 1, D)}},
    ),
    TransformCase(
        "sparse_mla-masked-sinks",
        attend_masked,
        make_masked_args,
        (0, 1, 4),
        {
            "batch": (P("x"), P("x"), P("x"), P("x"), P()),
            "query": (P(None, "x"), P(), P(None, "x"), P(None, "x"), P()),
            "head": (P(None, None, "x"), P(), P(), P(), P(None, "x")),
        },
    ),
    TransformCase(
        "sparse_mla-groups",
        attend,
        make_grouped_args,
        (0, 1),
        {"batch": (P("x"), P("x"), P("x")), "head": (P(None, None, "x"), P(), P())},
    ),
    TransformCase(
        "sparse_mla_decode-flat",
        decode_flat,
        make_flat_args,
        (0, 1),
        {
            "batch": (P("x"), P("x"), P("x"), P("x")),
            "head": (P(None, None, "x"), P(), P(), P()),
        },
    ),
    TransformCase(
        "sparse_mla_decode-paged",
        decode_paged,
        make_paged_args,
        (0, 1),
        {
            "batch": (P("x"), P(), P("x"), P("x"), P("x")),
            "head": (P(None, None, "x"), P(), P(), P(), P()),
        },
    ),
    TransformCase(
        "sparse_mla_decode-batch-invariant",
        decode_invariant,
        make_paged_args,
        (0, 1),
        {"batch": (P("x"), P(), P("x"), P("x"), P("x"))},
    ),
    TransformCase(
        "sparse_mla_decode-two-caches",
        decode_two_caches,
        make_two_cache_args,
        (0, 1, 5),
        {
            "batch": (P("x"), P(), *[P("x")] * 6),
            "head": (P(None, None, "x"), *[P()] * 7),
        },
    ),
]
