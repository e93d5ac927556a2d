"""Inputs and gradients for the tests of masked attention."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

B, T, S, N, G, D, E = 2, 5, 7, 4, 2, 8, 6
EXTREMES = (-(2**31), -1, S, 2**31 - 1)  # entries of kv_indices that are no keys


def normal(rng: np.random.Generator, *shape: int, dtype: Any = np.float32) -> jax.Array:
    return jnp.asarray(rng.normal(size=shape), dtype)


def qkv(
    rng: np.random.Generator, dtype: Any = np.float32, groups: int = G, value_dim: int = E
) -> tuple:
    shapes = (B, T, N, D), (B, S, groups, D), (B, S, groups, value_dim)
    return tuple(normal(rng, *shape, dtype=dtype) for shape in shapes)


@functools.lru_cache(maxsize=4)
def outputs_and_gradients(fn: Any) -> Any:
    """Returns a function from (arrays, douts) to the outputs of `fn` and the gradients of arrays.

    `douts` are the cotangents of the outputs. Infinite outputs have no cotangent.
    """

    def loss(arrays: tuple, douts: tuple) -> tuple[jax.Array, tuple]:
        outs = fn(*arrays)
        terms = [
            jnp.sum(jnp.where(jnp.isfinite(y), y, 0) * d) for y, d in zip(outs, douts, strict=True)
        ]
        return sum(terms), outs

    grads = jax.jit(jax.grad(loss, has_aux=True))
    return lambda *args: grads(*args)[::-1]


def all_of(fn: Any, arrays: tuple, douts: tuple) -> tuple[tuple, tuple]:
    """Returns the outputs of `fn` and the gradients of `arrays` for the cotangents `douts`."""
    return outputs_and_gradients(fn)(arrays, douts)
