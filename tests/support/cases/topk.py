"""Cases of `topk` and `block_topk` for the tests of transformations."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jax_dsa import block_topk, topk
from support.cases import TransformCase

B, T, S, K = 8, 8, 37, 5


def make_args(rng: np.random.Generator) -> tuple:
    """Returns rows with ties, each with a range, some of them shorter than K."""
    x = np.round(rng.normal(size=(B, T, S)), 1)
    starts = rng.integers(0, S, size=(B, T))
    ends = starts + rng.integers(0, 2 * K, size=(B, T))
    return (
        jnp.asarray(x, jnp.float32),
        jnp.asarray(starts, jnp.int32),
        jnp.asarray(ends, jnp.int32),
    )


def select(x, starts, ends):
    return topk(x, K, starts=starts, ends=ends, return_values=True)


def make_matrix_args(rng: np.random.Generator) -> tuple:
    x, _, ends = make_args(rng)
    return x[:, 0], ends[:, 0]


def select_rows(x, ends):
    return topk(x, K, ends=ends)


def select_blocks(x, starts, ends):
    options = {"block_size": 4, "sink_blocks": 1, "starts": starts, "ends": ends}
    return block_topk(x, K, **options)


CASES = [
    TransformCase(
        "topk",
        select,
        make_args,
        (0,),
        {"batch": (P("x"),) * 3, "query": (P(None, "x"),) * 3},
    ),
    TransformCase("topk-matrix", select_rows, make_matrix_args, (), {"batch": (P("x"),) * 2}),
    TransformCase(
        "block_topk",
        select_blocks,
        make_args,
        (),
        {"batch": (P("x"),) * 3, "query": (P(None, "x"),) * 3},
    ),
]
