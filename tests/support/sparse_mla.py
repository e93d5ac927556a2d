"""Inputs that the tests of `sparse_mla` share."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from jax_dsa import sparse_mla

INT_MIN, INT_MAX = -(2**31), 2**31 - 1
B, T, S, N, G, D, E, K = 2, 7, 11, 6, 2, 10, 6, 9


def inputs(
    rng: np.random.Generator,
    dtype: Any = np.float32,
    t: int = T,
    s: int = S,
    k: int = K,
    g: int = G,
) -> tuple:
    """Returns q, kv and indices.

    The indices contain duplicates, every kind of invalid index, and a row of only invalid ones.
    """
    q = rng.normal(size=(B, t, N, D)).astype(dtype)
    kv = rng.normal(size=(B, s, g, D)).astype(dtype)
    indices = rng.integers(0, max(s, 1), size=(B, t, g, k)).astype(np.int32)
    bad = np.array([INT_MIN, -1, s, INT_MAX], np.int32)
    wrong = rng.random(indices.shape) < 0.3
    indices = np.where(wrong, rng.choice(bad, size=indices.shape), indices)
    indices[0, t // 2] = rng.choice(bad, size=(g, k))
    return q, kv, indices


def both(q: Any, kv: Any, indices: Any, **options: Any) -> tuple[jax.Array, jax.Array]:
    return sparse_mla(q, kv, indices, value_dim=E, return_lse=True, **options)


def grads(args: tuple, dout: Any, dlse: Any, sinks: Any = None, **options: Any) -> tuple:
    """Returns the gradients of q, kv and the sinks for the given cotangents."""

    def fn(q: Any, kv: Any, sinks: Any) -> Any:
        return both(q, kv, args[2], sinks=sinks, **options)

    return jax.vjp(fn, args[0], args[1], sinks)[1]((dout, dlse))
