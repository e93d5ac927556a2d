"""Cases of the lightning indexer for the tests of transformations."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jax_dsa import PagedCache, indexer_block_topk, indexer_logits, indexer_topk
from jax_dsa.ops.indexer import indexer_selected_logits
from support.cases import TransformCase

B, T, J, C, S, K = 8, 8, 3, 5, 12, 4


def floats(rng: np.random.Generator, *shape: int) -> jnp.ndarray:
    return jnp.asarray(rng.normal(size=shape), jnp.float32)


def make_args(rng: np.random.Generator) -> tuple:
    return floats(rng, B, T, J, C), floats(rng, B, S, C), floats(rng, B, T, J)


def make_ranged_args(rng: np.random.Generator) -> tuple:
    """Returns inputs with a scale for each key and a range for each query."""
    starts = rng.integers(0, S, size=(B, T))
    ends = starts + rng.integers(0, 2 * K, size=(B, T))
    ranges = (jnp.asarray(x, jnp.int32) for x in (starts, ends))
    return *make_args(rng), jnp.exp(floats(rng, B, S)), *ranges


def logits(q, k, weights, k_scale, starts, ends):
    return indexer_logits(q, k, weights, index_k_scale=k_scale, starts=starts, ends=ends)


def select(q, k, weights):
    return indexer_topk(q, k, weights, K)


def make_paged_args(rng: np.random.Generator) -> tuple:
    """Returns a pool of 7 pages of 4 keys, with three pages per request, some of them unmapped."""
    q, _, weights = make_args(rng)
    table = jnp.asarray(rng.integers(-1, 8, size=(B, 3)), jnp.int32)
    lengths = jnp.asarray(rng.integers(0, 13, size=B), jnp.int32)
    return q, floats(rng, 7, 4, 1, C), weights, jnp.exp(floats(rng, 7, 4)), table, lengths


def select_from_pages(q, pages, weights, k_scale, table, lengths):
    cache = PagedCache(pages, table, lengths)
    return indexer_topk(q, cache, weights, K, index_k_scale=k_scale, is_causal=True)


def make_candidate_args(rng: np.random.Generator) -> tuple:
    blocks = rng.integers(-1, S // 3 + 1, size=(B, T, 2))
    return *make_args(rng), jnp.asarray(blocks, jnp.int32)


def select_inside(q, k, weights, blocks):
    return indexer_topk(q, k, weights, K, candidates=blocks, candidate_block_size=3)


def make_selected_args(rng: np.random.Generator) -> tuple:
    return *make_args(rng), jnp.asarray(rng.integers(-1, S + 1, size=(B, T, K)), jnp.int32)


def logits_of_selected(q, k, weights, indices):
    return indexer_selected_logits(q, k, weights, indices)


def select_blocks(q, k, weights, k_scale, starts, ends):
    ranges = {"index_k_scale": k_scale, "starts": starts, "ends": ends}
    return indexer_block_topk(q, k, weights, 2, block_size=3, sink_blocks=1, **ranges)


def select_blocks_from_pages(q, pages, weights, k_scale, table, lengths):
    cache = PagedCache(pages, table, lengths)
    return indexer_block_topk(q, cache, weights, 2, block_size=3, index_k_scale=k_scale)


def make_head_args(rng: np.random.Generator) -> tuple:
    return floats(rng, B, T, 8, C), floats(rng, B, S, C)


def select_blocks_per_head(q, k):
    options = {"per_head": True, "relu": False, "is_causal": True, "query_start": 3}
    return indexer_block_topk(q, k, None, 2, block_size=3, **options)


def select_means(q, k, weights):
    return indexer_block_topk(q, k, weights, 2, block_size=3, pooling="mean", local_blocks=0)


# How the arguments of `make_args`, `make_ranged_args` and `make_paged_args` may be sharded.
PLAIN = {
    "batch": (P("x"),) * 3,
    "query": (P(None, "x"), P(), P(None, "x")),
    "keys": (P(None, "x"),) * 3,
}
RANGED = {
    "batch": (P("x"),) * 6,
    "query": (P(None, "x"), P(), P(None, "x"), P(), P(None, "x"), P(None, "x")),
}
PAGED = {
    "batch": (P("x"), P(), P("x"), P(), P("x"), P("x")),
    "query": (P(None, "x"), P(), P(None, "x"), P(), P(), P()),
}
CASES = [
    TransformCase(
        "indexer_logits",
        logits,
        make_ranged_args,
        (0, 1, 2, 3),
        RANGED,
    ),
    TransformCase(
        "indexer_topk",
        select,
        make_args,
        (0, 1, 2),
        PLAIN,
        {"keys": {(B, S, C)}},
    ),
    TransformCase(
        "indexer_topk-pages",
        select_from_pages,
        make_paged_args,
        (),
        PAGED,
    ),
    TransformCase(
        "indexer_topk-candidates",
        select_inside,
        make_candidate_args,
        (0, 1, 2),
        {"batch": (P("x"),) * 4, "query": (P(None, "x"), P(), P(None, "x"), P(None, "x"))},
    ),
    TransformCase(
        "indexer_selected_logits",
        logits_of_selected,
        make_selected_args,
        (0, 1, 2),
        {"batch": (P("x"),) * 4, "query": (P(None, "x"), P(), P(None, "x"), P(None, "x"))},
    ),
    TransformCase(
        "indexer_block_topk",
        select_blocks,
        make_ranged_args,
        (0, 1, 2, 3),
        RANGED,
    ),
    TransformCase(
        "indexer_block_topk-head",
        select_blocks_per_head,
        make_head_args,
        (0, 1),
        {
            "batch": (P("x"),) * 2,
            "query": (P(None, "x"), P()),
            "keys": (P(None, "x"),) * 2,
            "head": (P(None, None, "x"), P()),
        },
        {"keys": {(B, S, C)}},
    ),
    TransformCase(
        "indexer_block_topk-mean",
        select_means,
        make_args,
        (0, 1, 2),
        PLAIN,
        {"keys": {(B, S, C)}},
    ),
    TransformCase(
        "indexer_block_topk-pages",
        select_blocks_from_pages,
        make_paged_args,
        (),
        PAGED,
    ),
]
