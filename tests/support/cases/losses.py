"""Cases of `indexer_kl_loss` and `dense_indexer_kl_loss`.

The route that shards the batch is named "rows" and not "batch". Otherwise the general tests inside
shard_map would take it, although each device returns the mean of its own rows there.
`test_losses.py` tests the losses inside shard_map.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jax_dsa import dense_indexer_kl_loss, indexer_kl_loss
from support.cases import TransformCase

B, T, K, S, J, C, N, G, D = 8, 8, 6, 12, 2, 4, 8, 2, 5


def floats(rng: np.random.Generator, *shape: int) -> jnp.ndarray:
    return jnp.asarray(rng.normal(size=shape), jnp.float32)


def make_sparse_args(rng: np.random.Generator) -> tuple:
    """Makes arguments with some invalid slots and some invalid rows."""
    filled = np.arange(K) < rng.integers(0, K + 1, size=(B, T, 1))
    logits = jnp.where(filled, floats(rng, B, T, K), -jnp.inf)
    return logits, jnp.exp(floats(rng, B, T, K)), jnp.asarray(rng.random((B, T, K)) < 0.8)


def sparse(logits, teacher, valid):
    return indexer_kl_loss(logits, teacher, valid & (logits > -jnp.inf))


def make_dense_args(rng: np.random.Generator) -> tuple:
    starts = jnp.asarray(rng.integers(0, S, size=(B, T)), jnp.int32)
    return (
        floats(rng, B, T, J, C),
        floats(rng, B, S, C),
        floats(rng, B, T, J),
        floats(rng, B, T, N, D),
        floats(rng, B, S, G, D),
        starts,
    )


def dense(index_q, index_k, weights, q, kv, starts):
    return dense_indexer_kl_loss(index_q, index_k, weights, q, kv, starts=starts, query_start=S - T)


def make_block_args(rng: np.random.Generator) -> tuple:
    """Makes arguments with keys of blocks of three tokens, and documents that begin anywhere."""
    index_q, index_k, *others, _ = make_dense_args(rng)
    starts = jnp.asarray(rng.integers(0, S // 2, size=(B, T)), jnp.int32)
    return index_q, index_k[:, : S // 3], *others, starts


def dense_blocks(index_q, index_k, weights, q, kv, starts):
    return dense_indexer_kl_loss(
        index_q, index_k, weights, q, kv, starts=starts, query_start=S - T, block_size=3
    )


CASES = [
    TransformCase(
        "indexer_kl_loss",
        sparse,
        make_sparse_args,
        (0,),
        {"rows": (P("x"),) * 3, "query": (P(None, "x"),) * 3},
    ),
    TransformCase(
        "dense_indexer_kl_loss",
        dense,
        make_dense_args,
        (0, 1, 2),
        {
            "rows": (P("x"),) * 6,
            "query": (P(None, "x"), P(), P(None, "x"), P(None, "x"), P(), P(None, "x")),
            "keys": (P(None, "x"),) * 6,
            "shared": (P(), P(), P(), P(None, None, "x"), P(), P()),
        },
        {
            "keys": {(B, S, C), (B, S, G, D)},
            "shared": {(B, T, J, C), (B, T, J)},
        },
    ),
    TransformCase(
        "dense_indexer_kl_loss-blocks",
        dense_blocks,
        make_block_args,
        (0, 1, 2),
        {
            "rows": (P("x"),) * 6,
            "query": (P(None, "x"), P(), P(None, "x"), P(None, "x"), P(), P(None, "x")),
            "keys": (P(None, "x"),) * 6,
        },
        {"keys": {(B, S // 3, C), (B, S, G, D)}},
    ),
]
