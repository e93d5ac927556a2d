"""The transform case of `dsa_attention`.

Its route over the batch is called "rows", not "batch". That name keeps the KL, which inside
shard_map would be the mean over local rows only, out of the tests inside shard_map.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jax_dsa import dsa_attention
from support.cases import TransformCase

B, T, N, G, D, E, S, J, C, K = 8, 8, 8, 1, 6, 4, 12, 2, 4, 5


def make_args(rng: np.random.Generator) -> tuple:
    shapes = (B, T, N, D), (B, S, G, D), (B, T, J, C), (B, S, C), (B, T, J)
    return tuple(jnp.asarray(rng.normal(size=s), jnp.float32) for s in shapes)


def attend(q, kv, index_q, index_k, index_weights):
    return dsa_attention(
        q, kv, index_q, index_k, index_weights, top_k=K, value_dim=E, query_start=S - T
    )


def make_documents(rng: np.random.Generator) -> tuple:
    """Returns inputs for as many keys as queries, and numbers of documents."""
    shapes = (B, T, N, D), (B, T, G, D), (B, T, J, C), (B, T, C), (B, T, J)
    ids = jnp.asarray(rng.integers(0, 2, (B, T)), jnp.int32)
    return *(jnp.asarray(rng.normal(size=s), jnp.float32) for s in shapes), ids


def attend_documents(q, kv, index_q, index_k, index_weights, ids):
    options = {"top_k": K, "value_dim": E, "is_causal": False}
    return dsa_attention(q, kv, index_q, index_k, index_weights, segment_ids=ids, **options)


QUERY, WHOLE = P(None, "x"), P()
CASES = [
    TransformCase(
        "dsa_attention",
        attend,
        make_args,
        (0, 1, 2, 3, 4),
        {
            "rows": (P("x"),) * 5,
            "query": (QUERY, WHOLE, QUERY, WHOLE, QUERY),
            "shared": (P(None, None, "x"), WHOLE, WHOLE, WHOLE, WHOLE),
            "keys": (QUERY, QUERY, QUERY, QUERY, QUERY),
        },
        {
            # The heads share one selection. Each device computes it for some of the queries.
            "shared": {(B, T, K), (B, T, J, C), (B, T, J)},
            "keys": {(B, S, G, D), (B, S, C)},
        },
    ),
    TransformCase(
        "dsa_attention-documents",
        attend_documents,
        make_documents,
        (0, 1, 2, 3, 4),
        {
            "rows": (P("x"),) * 6,
            "query": (QUERY, WHOLE, QUERY, WHOLE, QUERY, QUERY),
        },
        {"query": {(B, T)}},
    ),
]
