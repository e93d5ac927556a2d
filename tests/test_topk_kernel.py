"""The top-k kernels against a stable sort, and repeated runs against each other."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_dsa import topk

pytestmark = pytest.mark.gpu


def by_sorting(x: np.ndarray, k: int) -> np.ndarray:
    """Returns the indices of the k largest values of each row, ascending, then -1."""
    order = np.argsort(-x.astype(np.float64) + 0.0, axis=-1, kind="stable")[:, :k]
    chosen = np.take_along_axis(x, order, axis=-1)
    last = x.shape[-1]
    best = np.sort(np.where(chosen > -np.inf, order, last), axis=-1).astype(np.int32)
    best = np.where(best == last, -1, best)
    return np.pad(best, ((0, 0), (0, k - best.shape[-1])), constant_values=-1)


def rows(kind: str, count: int, size: int, k: int, rng: np.random.Generator) -> np.ndarray:
    if kind == "edge":
        return at_an_edge(count, size, k, rng)
    x = rng.standard_normal((count, size), np.float32)
    if kind == "plateau":
        return np.maximum(x - 2, 0)
    if kind == "equal":
        return np.full_like(x, 1.25)
    if kind == "one coarse bin":
        return 1 + np.abs(np.modf(x)[0]) / 4
    if kind == "few values":
        return np.round(x, 1)
    if kind == "ascending":
        return np.sort(x, axis=-1)
    if kind == "mostly masked":
        return np.where(rng.random(x.shape) < 0.99, -np.inf, x).astype(np.float32)
    return x


def at_an_edge(count: int, size: int, k: int, rng: np.random.Generator) -> np.ndarray:
    """Returns rows that are hard for the bracket of the kernel for short rows.

    The k-th largest value is just above 1, which is an edge of the histogram's bins, and many
    values are just below 1. The sampled positions hold too many large values, so the bracket begins
    at 1.
    """
    i = np.arange(size)
    more = (6 * np.sqrt(k / 8) + 8) / (size / 8)
    sampled = (i % 4 == 0) & (i // 128 % 2 == 0)
    large = np.where(sampled, k / size + more, k / size - more / 7 - 14 / size)
    u, v = rng.random((2, count, size))
    below = np.where(u < large + 0.1, 1 - 1e-5 * (v + 0.01), v / 2)
    near = np.where(u < large + 20 / size, 1 + 1e-6 * v, below)
    return np.where(u < large, 1.1 + 0.3 * v, near).astype(np.float32)


KINDS = [
    "edge",
    "normal",
    "plateau",
    "equal",
    "one coarse bin",
    "few values",
    "ascending",
    "mostly masked",
]
# Rows that are held in registers, streamed by one CTA, and streamed by a cluster; aligned or not.
SHAPES = [
    (300, 4096, 2048),
    (213, 8191, 512),
    (300, 20011, 2048),
    (3, 131072, 2048),
    (1, 999999, 4096),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernel_is_exact(kind: str, shape: tuple[int, int, int], rng: np.random.Generator) -> None:
    count, size, k = shape
    x = rows(kind, count, size, k, rng)
    indices, values = topk(jnp.asarray(x), k, return_values=True, implementation="cuda")
    expected = by_sorting(x, k)
    np.testing.assert_array_equal(np.asarray(indices), expected)
    picked = np.take_along_axis(x, np.maximum(expected, 0), axis=-1)
    np.testing.assert_array_equal(np.asarray(values), np.where(expected >= 0, picked, -np.inf))


def test_kernel_repeats_itself(rng: np.random.Generator) -> None:
    x = jnp.asarray(rows("few values", 500, 32768, 2048, rng))
    first = np.asarray(topk(x, 2048, implementation="cuda"))
    for _ in range(20):
        np.testing.assert_array_equal(np.asarray(topk(x, 2048, implementation="cuda")), first)


def test_kernel_in_a_replayed_program(rng: np.random.Generator) -> None:
    """XLA may replay a program as a CUDA graph, where new inputs must give new results."""
    program = jax.jit(lambda x, e: topk(x * 2, 64, ends=e, implementation="cuda") + 0)
    for _ in range(8):
        x = rng.standard_normal((40, 3000), np.float32)
        ends = rng.integers(0, 3001, 40).astype(np.int32)
        got = program(jnp.asarray(x), jnp.asarray(ends))
        masked = np.where(np.arange(3000) < ends[:, None], x * 2, -np.inf)
        np.testing.assert_array_equal(np.asarray(got), by_sorting(masked, 64))


def test_kernel_with_more_than_2_31_values() -> None:
    x = jax.random.normal(jax.random.key(0), (16500, 131072), jnp.float32)
    got = topk(x, 512, implementation="cuda")
    last = np.asarray(x[-3:])
    np.testing.assert_array_equal(np.asarray(got[-3:]), by_sorting(last, 512))


@pytest.mark.parametrize("shape", [(0, 9), (3, 0)], ids=str)
def test_kernel_on_empty_axes(shape: tuple[int, int]) -> None:
    got = topk(jnp.zeros(shape), 4, implementation="cuda")
    assert got.shape == (shape[0], 4)
    assert (np.asarray(got) == -1).all()
