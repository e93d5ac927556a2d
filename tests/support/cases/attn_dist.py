"""Cases of `attn_dist` with sums over all heads and over groups of heads."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jax_dsa import attn_dist
from support.cases import TransformCase
from support.cases.sparse_mla import B, D, K, N, S, T, floats, picks


def make_args(rng: np.random.Generator) -> tuple:
    lse = jnp.asarray(rng.uniform(1, 2, size=(B, T, N)), jnp.float32)
    return floats(rng, B, T, N, D), floats(rng, B, S, 1, D), picks(rng, B, T, 1, K), lse


def make_sink_args(rng: np.random.Generator) -> tuple:
    lengths = jnp.asarray(rng.integers(0, K + 1, size=(B, T)), jnp.int32)
    return *make_args(rng), lengths, floats(rng, 1, N)


def all_heads(q, kv, indices, lse):
    return attn_dist(q, kv, indices, lse, head_group=None)


def one_group(q, kv, indices, lse):
    return attn_dist(q, kv, indices, lse, head_group=8)


def each_head(q, kv, indices, lse, topk_length, sinks):
    return attn_dist(
        q,
        kv,
        indices,
        lse,
        head_group=1,
        is_causal=True,
        query_start=2,
        topk_length=topk_length,
        sinks=sinks[0],
        deterministic=True,
    )


def make_grouped_args(rng: np.random.Generator) -> tuple:
    q, _, _, lse = make_args(rng)
    return q, floats(rng, B, S, 2, D), picks(rng, B, T, 2, K), lse


def pairs(q, kv, indices, lse):
    return attn_dist(q, kv, indices, lse, head_group=2)


def block_pairs(q, kv, indices, lse):
    return attn_dist(q, kv, indices, lse, head_group=2, block_size=3, is_causal=True)


ROUTES = {
    "batch": (P("x"), P("x"), P("x"), P("x")),
    "query": (P(None, "x"), P(), P(None, "x"), P(None, "x")),
    "head": (P(None, None, "x"), P(), P(), P(None, None, "x")),
}

CASES = [
    TransformCase(
        "attn_dist-all-heads",
        all_heads,
        make_args,
        (0, 1, 3),
        {**ROUTES, "keys": (P(None, "x"),) * 4},
        {"keys": {(B, S, 1, D)}},
    ),
    TransformCase("attn_dist-one-group", one_group, make_args, (0, 1, 3), ROUTES),
    TransformCase(
        "attn_dist-each-head-sinks",
        each_head,
        make_sink_args,
        (0, 1, 3, 5),
        {
            "batch": (*ROUTES["batch"], P("x"), P()),
            "query": (*ROUTES["query"], P(None, "x"), P()),
            "head": (*ROUTES["head"], P(), P(None, "x")),
        },
    ),
    TransformCase(
        "attn_dist-groups",
        pairs,
        make_grouped_args,
        (0, 1, 3),
        {"batch": ROUTES["batch"], "head": ROUTES["head"]},
    ),
    TransformCase(
        "attn_dist-blocks",
        block_pairs,
        make_grouped_args,
        (0, 1, 3),
        {"batch": ROUTES["batch"], "query": ROUTES["query"], "head": ROUTES["head"]},
    ),
]
