"""Comparisons of results with what is expected, and an array-like variable."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


class Variable:
    """Holds an array and provides `__jax_array__`, as Flax's variables do."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __jax_array__(self) -> jax.Array:
        return jnp.asarray(self.value)


def assert_matches(
    got: Any, want: Any, tol: float = 1e-4, what: str = "", least: float = 1e-2
) -> None:
    """Asserts that two trees have equal arrays up to rounding.

    Shapes, dtypes, infinities and NaNs have to be equal. Every other element may be off by `tol`
    times the sum of its array's largest magnitude and `least`.

    Args:
        got: The tree that is tested.
        want: The expected tree.
        tol: The relative tolerance.
        what: Shown when the assertion fails.
        least: The magnitude that an array is taken to have at least.
    """
    got_leaves, want_leaves = jax.tree.leaves(got), jax.tree.leaves(want)
    assert len(got_leaves) == len(want_leaves), what
    for i, (g, w) in enumerate(zip(got_leaves, want_leaves, strict=True)):
        name = f"{what} leaf {i}"
        assert g.shape == w.shape, f"{name}: shape {g.shape}, expected {w.shape}"
        assert g.dtype == w.dtype, f"{name}: dtype {g.dtype}, expected {w.dtype}"
        g64, w64 = np.asarray(g, np.float64), np.asarray(w, np.float64)
        finite = np.isfinite(w64)
        np.testing.assert_array_equal(g64[~finite], w64[~finite], err_msg=name)
        scale = np.abs(w64[finite]).max(initial=0.0)
        worst = np.abs(g64[finite] - w64[finite]).max(initial=0.0)
        assert worst <= tol * (scale + least), f"{name}: off by {worst}, largest value {scale}"


def assert_as_good_as(got: Any, low: Any, exact: Any, factor: float = 3.0, what: str = "") -> None:
    """Asserts that the error of `got` is at most `factor` times the error of `low`.

    This holds for the largest error, and for the angle to `exact` in arrays of 64 elements or more.

    Args:
        got: The array that is tested, in low precision.
        low: The plain formula, evaluated in the same low precision.
        exact: The same formula in float32 or better.
        factor: 3 for outputs, 4 for gradients.
        what: Shown when the assertion fails.
    """
    g, lo, ex = (np.asarray(x, np.float64) for x in (got, low, exact))
    np.testing.assert_array_equal(np.isfinite(g), np.isfinite(ex), err_msg=what)
    finite = np.isfinite(ex)
    g, lo, ex = g[finite], lo[finite], ex[finite]
    allowed = factor * np.abs(lo - ex).max(initial=0.0) + 1e-6
    worst = np.abs(g - ex).max(initial=0.0)
    assert worst <= allowed, f"{what}: off by {worst}, allowed {allowed}"

    # The angle between arrays of a few elements, such as the gradients of sinks, is down to chance.
    if ex.size < 64:
        return

    def cosine(x: np.ndarray) -> float:
        norm = (x * x + ex * ex).sum()
        return 1 - 2 * (x * ex).sum() / norm if norm > 0 else 0.0

    allowed = max(1e-5, factor * cosine(lo))
    assert cosine(g) < allowed, f"{what}: cosine difference {cosine(g)}, allowed {allowed}"


def assert_unmoved(got: Any, want: Any) -> None:
    """Asserts that gradients are equal bit for bit, or on a GPU up to rounding.

    A GPU adds scattered values in an undefined order, so that their sums round differently.
    """
    if jax.default_backend() == "cpu":
        jax.tree.map(np.testing.assert_array_equal, got, want)
    else:
        assert_matches(got, want, tol=1e-6)
