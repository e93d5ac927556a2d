"""Transform cases of `htree_attention`, `htree_build` and `htree_decode`.

The trees have two layers, so that queries select.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jax_dsa import HTreeCache, htree_attention, htree_build, htree_decode
from support.cases import TransformCase

B, T, D, E = 8, 8, 4, 3
TREE = {"compression": 2, "top_k": 2}  # two layers


def floats(rng: np.random.Generator, *shape: int) -> jnp.ndarray:
    return jnp.asarray(rng.normal(size=shape), jnp.float32)


def make_args(rng: np.random.Generator) -> tuple:
    """Returns arguments with groups of two heads, which select together and must not be split."""
    return floats(rng, B, T, 16, D), floats(rng, B, T, 8, D), floats(rng, B, T, 8, E)


def make_grouped_args(rng: np.random.Generator) -> tuple:
    return floats(rng, B, T, 16, D), floats(rng, B, T, 2, D), floats(rng, B, T, 2, E)


def attend(q, k, v):
    return htree_attention(q, k, v, **TREE, return_lse=True)


def make_tokens(rng: np.random.Generator) -> tuple:
    return floats(rng, B, T, 1, D), floats(rng, B, T, 1, E)


def build(k, v):
    # The squares make the second derivative nonzero, so that it must be rejected.
    return jax.tree.map(jnp.square, htree_build(k, v, **TREE))


def empty() -> HTreeCache:
    return HTreeCache.empty(B, T, D, E, dtype=jnp.float32, **TREE)


def make_decode_args(rng: np.random.Generator) -> tuple:
    nodes = jax.eval_shape(empty).k.shape[1]
    lengths = jnp.asarray(rng.integers(0, T + 1, size=B), jnp.int32)
    kv = floats(rng, B, nodes, 1, D), floats(rng, B, nodes, 1, E)
    return floats(rng, B, 2, 2, D), *kv, lengths


def decode(q, k, v, lengths):
    cache = dataclasses.replace(empty(), k=k, v=v, lengths=lengths)
    return htree_decode(q, cache, return_lse=True)


batch, query, head = P("x"), P(None, "x"), P(None, None, "x")
CASES = [
    TransformCase(
        "htree_attention",
        attend,
        make_args,
        (0, 1, 2),
        {
            "batch": (batch, batch, batch),
            "query": (query, P(), P()),
            "head": (head, head, head),
            "keys": (query, query, query),
        },
        {"keys": {(B, T, 8, D), (B, T, 8, E)}},
    ),
    TransformCase(
        "htree_attention-groups",
        attend,
        make_grouped_args,
        (0, 1, 2),
        # The heads of a group select together, so the mesh axis splits the queries instead.
        {"shared": (head, P(), P())},
        {"shared": {(B, T, 2, 1, 2)}},
    ),
    TransformCase("htree_build", build, make_tokens, (0, 1), {"batch": (batch, batch)}),
    TransformCase(
        "htree_decode", decode, make_decode_args, (0, 1, 2), {"batch": (batch, batch, batch, batch)}
    ),
]
