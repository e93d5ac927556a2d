"""Small flat and paged caches, for the tests of caches and of decoding over them."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_dsa import FlatCache, PagedCache

B, T, N, G, D, E, K, PAGE, ENTRIES = 3, 2, 4, 2, 10, 6, 7, 4, 5
S = PAGE * ENTRIES
INT_MIN, INT_MAX = -(2**31), 2**31 - 1

BOTH = pytest.mark.parametrize("kind", ["flat", "paged"])


def rows(rng: np.random.Generator, t: int, dim: int = D) -> jax.Array:
    return jnp.asarray(rng.normal(size=(B, t, G, dim)), jnp.float32)


def empty(kind: str, rng: np.random.Generator, dim: int = D, **options: Any) -> Any:
    """Returns an empty cache; a paged one maps pages in random order and has three spare pages."""
    if kind == "flat":
        return FlatCache.empty(B, S, dim, groups=G, **options)
    cache = PagedCache.empty(B * ENTRIES + 3, PAGE, B, ENTRIES, dim, groups=G, **options)
    pages = rng.permutation(B * ENTRIES + 3)[: B * ENTRIES].reshape(B, ENTRIES)
    return dataclasses.replace(cache, page_table=jnp.asarray(pages, jnp.int32))


def filled(kind: str, rng: np.random.Generator, dim: int = D, **options: Any) -> Any:
    """Returns a cache whose requests have the lengths 20, 9 and 1."""
    lengths = jnp.asarray([20, 9, 1], jnp.int32)
    return empty(kind, rng, dim, **options).append(rows(rng, S, dim), lengths)


def contents(cache: Any) -> np.ndarray:
    """Returns what a cache of either kind stores, [B, S, G, ...]."""
    if isinstance(cache, FlatCache):
        return np.asarray(cache.data)
    pages, table = np.asarray(cache.pages), np.asarray(cache.page_table)
    return pages[table].reshape(B, S, *pages.shape[2:])


def picks(rng: np.random.Generator) -> jax.Array:
    """Returns random indices, a fifth of which are out of range."""
    bad = np.array([INT_MIN, -1, S, INT_MAX], np.int32)
    chosen = rng.integers(0, S, size=(B, T, G, K))
    chosen = np.where(rng.random(chosen.shape) < 0.2, rng.choice(bad, size=chosen.shape), chosen)
    return jnp.asarray(chosen, jnp.int32)
