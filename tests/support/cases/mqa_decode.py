"""Transform cases of `mqa_decode` with flat and paged keys, and of `merge_attention`."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jax_dsa import PagedCache, merge_attention, mqa_decode, mqa_decode_plan
from support.cases import TransformCase
from support.cases.sparse_mla import B, D, E, N, S, T, floats


def lengths(rng: np.random.Generator, most: int = S) -> jnp.ndarray:
    return jnp.asarray(rng.integers(0, most + 1, size=B), jnp.int32)


def make_args(rng: np.random.Generator) -> tuple:
    return floats(rng, B, T, N, D), floats(rng, B, S, 1, D), lengths(rng), floats(rng, 1, N)


LATENT = {"value_dim": E, "num_splits": 3, "return_lse": True}


def latent(q, k, lengths, sinks):
    return mqa_decode(q, k, **LATENT, key_value_seq_lengths=lengths, sinks=sinks[0])


def planned(q, k, lengths):
    plan = mqa_decode_plan(lengths, num_heads=q.shape[-2], queries=q.shape[-3], dim=D)
    return mqa_decode(q, k, value_dim=E, key_value_seq_lengths=lengths, plan=plan)


def make_grouped_args(rng: np.random.Generator) -> tuple:
    return floats(rng, B, T, N, D), floats(rng, B, S, 2, D), floats(rng, B, S, 2, E)


def unnormalized(q, k, v):
    return mqa_decode(q, k, v, local_window_size=4, normalize=False)


def make_paged_args(rng: np.random.Generator) -> tuple:
    table = jnp.asarray(rng.integers(-1, 10, size=(B, 4)), jnp.int32)
    pages = floats(rng, 10, 3, 1, D), floats(rng, 10, 3, 1, E)
    return floats(rng, B, T, N, D), *pages, table, lengths(rng)


def paged(q, k, v, table, lengths):
    cache = PagedCache(k, table, lengths)
    return mqa_decode(q, cache, v, num_splits=2, return_lse=True)


def make_merge_args(rng: np.random.Generator) -> tuple:
    outs = [floats(rng, B, T, N, E) for _ in range(2)]
    return *outs, *(floats(rng, B, T, N) for _ in range(2))


def merged(out_a, out_b, lse_a, lse_b):
    return merge_attention((out_a, out_b), (lse_a, lse_b))


CASES = [
    TransformCase(
        "mqa_decode",
        latent,
        make_args,
        (0, 1, 3),
        {
            "batch": (P("x"), P("x"), P("x"), P()),
            "query": (P(None, "x"), P(), P(), P()),
            "head": (P(None, None, "x"), P(), P(), P(None, "x")),
        },
    ),
    TransformCase(
        "mqa_decode-planned",
        planned,
        lambda rng: make_args(rng)[:3],
        (0, 1),
        {
            "batch": (P("x"), P("x"), P("x")),
            "query": (P(None, "x"), P(), P()),
            "head": (P(None, None, "x"), P(), P()),
        },
    ),
    TransformCase(
        "mqa_decode-unnormalized-groups",
        unnormalized,
        make_grouped_args,
        (0, 1, 2),
        {"batch": (P("x"), P("x"), P("x")), "head": (P(None, None, "x"), P(), P())},
    ),
    TransformCase(
        "mqa_decode-paged",
        paged,
        make_paged_args,
        (0, 1, 2),
        {
            "batch": (P("x"), P(), P(), P("x"), P("x")),
            "head": (P(None, None, "x"), P(), P(), P(), P()),
        },
    ),
]
