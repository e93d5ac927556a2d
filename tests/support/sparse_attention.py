"""Inputs that the tests of `sparse_attention` share."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.extend.core import jaxprs_in_params

from jax_dsa import sparse_attention

INT_MIN, INT_MAX = -(2**31), 2**31 - 1
B, N, G, D, E, K = 2, 4, 2, 6, 5, 3


def inputs(
    rng: np.random.Generator, t: int, s: int, block_size: int, *shared: bool, k: int = K
) -> tuple[np.ndarray, ...]:
    """Returns q, k, v and indices, of one list for all groups if `shared` is given.

    The indices contain duplicates, every kind of invalid index, and a row of only invalid ones.
    """
    q = rng.normal(size=(B, t, N, D)).astype(np.float32)
    keys = rng.normal(size=(B, s, G, D)).astype(np.float32)
    values = rng.normal(size=(B, s, G, E)).astype(np.float32)
    blocks = -(-s // block_size)
    indices = rng.integers(0, blocks, size=(B, t, *([] if shared else [G]), k)).astype(np.int32)
    bad = np.array([INT_MIN, -1, blocks, INT_MAX], np.int32)
    indices = np.where(rng.random(indices.shape) < 0.3, rng.choice(bad, indices.shape), indices)
    indices[0, t // 2] = rng.choice(bad, size=indices.shape[2:])
    return q, keys, values, indices


def three(q: Any, k: Any, v: Any, indices: Any, **options: Any) -> tuple[jax.Array, ...]:
    """Returns out, lse and max_logit."""
    return sparse_attention(q, k, v, indices, return_lse=True, return_max_logit=True, **options)


def grads(args: tuple, dout: Any, dlse: Any, sinks: Any = None, **options: Any) -> tuple:
    """Returns the gradients of q, k, v and the sinks for the given cotangents."""

    def fn(q: Any, k: Any, v: Any, sinks: Any) -> Any:
        return sparse_attention(q, k, v, args[3], sinks=sinks, return_lse=True, **options)

    return jax.vjp(fn, *args[:3], sinks)[1]((dout, dlse))


def sizes_of_intermediates(fn: Any, *args: Any) -> list[int]:
    """Returns the bytes of every array that a program computes."""
    sizes = []

    def visit(jaxpr: Any) -> None:
        for eqn in jaxpr.eqns:
            sizes.extend(x.aval.size * x.aval.dtype.itemsize for x in eqn.outvars)
            for inner in jaxprs_in_params(eqn.params):
                visit(inner)

    visit(jax.make_jaxpr(fn)(*args).jaxpr)
    return sizes
