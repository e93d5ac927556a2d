"""Cases of pooling.

Those of `gated_pool` have one half and two halves, packed documents, and a scale for a norm.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jax_dsa import gated_pool, mean_pool
from jax_dsa.ops.gated_pool import gated_pool_for_norm
from support.cases import TransformCase

if TYPE_CHECKING:
    from collections.abc import Callable

B, S, D = 8, 32, 16


def make_args(rng: np.random.Generator, ratio: int, halves: int) -> tuple:
    shape = (B, S, halves, D)
    bias = jnp.asarray(rng.normal(size=(ratio, halves, D)), jnp.float32)
    return *(jnp.asarray(rng.normal(size=shape), jnp.float32) for _ in range(2)), bias


def make_packed_args(rng: np.random.Generator) -> tuple:
    rows = np.arange(S)
    cuts = [np.where(rng.random(S) < 0.1, rows, 0) for _ in range(B)]
    starts = np.maximum.accumulate(np.stack(cuts), axis=1)
    return *make_args(rng, 3, 2), jnp.asarray(starts, jnp.int32)


ROUTES = {
    "batch": (P("x"), P("x"), P()),
    "head": (P(None, None, None, "x"), P(None, None, None, "x"), P(None, None, "x")),
    # Mesh axes that shard the tokens are moved to the channels: each device then has all tokens of
    # some channels.
    "keys": (P(None, "x"), P(None, "x"), P()),
}


def case(name: str, make: Callable, ratio: int, halves: int) -> TransformCase:
    packed = name.endswith("documents")
    specs = {
        route: (*given, P("x") if route == "batch" else P())[: 4 if packed else 3]
        for route, given in ROUTES.items()
    }
    gathered = {(B, S // ratio, D), (B, ratio, halves, D)}  # keys; gradient of the bias
    return TransformCase(name, gated_pool, make, (0, 1, 2), specs, {"keys": gathered})


def make_scaled_args(rng: np.random.Generator) -> tuple:
    return *make_args(rng, 4, 2), jnp.asarray(rng.normal(size=D), jnp.float32)


def scaled_case() -> TransformCase:
    scale = {"batch": P(), "head": P("x"), "keys": P()}
    specs = {route: (*given, scale[route]) for route, given in ROUTES.items()}
    # The sums of squares and the gradient of the scale are gathered as well.
    gathered = {(B, S // 4, D), (B, S // 4), (B, 4, 2, D), (B, D)}
    return TransformCase(
        "gated_pool-scaled",
        gated_pool_for_norm,
        make_scaled_args,
        (0, 1, 2, 3),
        specs,
        {"keys": gathered},
    )


def make_mean_args(rng: np.random.Generator) -> tuple:
    values, _, _, starts = make_packed_args(rng)
    return values[:, :, 0], starts


def mean(values, starts):
    return mean_pool(values, 3, starts)


CASES = [
    case("gated_pool", lambda rng: make_args(rng, 4, 1), 4, 1),
    case("gated_pool-halves", lambda rng: make_args(rng, 4, 2), 4, 2),
    case("gated_pool-documents", make_packed_args, 3, 2),
    scaled_case(),
    TransformCase(
        "mean_pool",
        mean,
        make_mean_args,
        (0,),
        {"batch": (P("x"), P("x")), "head": (P(None, None, "x"), P()), "keys": (P(None, "x"),) * 2},
        {"keys": {(B, S // 3, D)}},
    ),
]
