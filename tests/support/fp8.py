"""Inputs and comparisons that the tests of FP8 quantisation and matmuls share."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

DTYPES = pytest.mark.parametrize(
    "dtype", [ml_dtypes.bfloat16, np.float16, np.float32], ids=["bf16", "f16", "f32"]
)
EXACT_DTYPES = pytest.mark.parametrize(
    "dtype", [ml_dtypes.bfloat16, np.float16], ids=["bf16", "f16"]
)
SCALES = pytest.mark.parametrize("power_of_two_scale", [False, True], ids=["any", "pow2"])


def random(rng: np.random.Generator, *shape: int, dtype: Any = np.float32) -> np.ndarray:
    """Returns rows of very different magnitudes."""
    size = np.exp(2 * rng.normal(size=(*shape[:-1], 1)))
    return (rng.normal(size=shape) * size).clip(-6e4, 6e4).astype(dtype)


def bits(codes: Any) -> np.ndarray:
    """Returns codes as integers, with one integer for all NaNs."""
    raw = np.asarray(codes).view(np.uint8)
    return np.where(raw & 0x7F == 0x7F, 0x7F, raw)


def assert_same(got: tuple, want: tuple) -> None:
    """Asserts that codes and scales are equal, bit for bit up to the sign of NaN."""
    np.testing.assert_array_equal(np.asarray(got[1]), np.asarray(want[1]))
    np.testing.assert_array_equal(bits(got[0]), bits(want[0]))


def every_quotient(dtype: Any) -> np.ndarray:
    """Returns blocks that cover all quotients of a 16-bit dtype, up to powers of two.

    A block starts with its amax, and up to 127 other values follow. For each significand of the
    amax, the blocks contain all significands of other values.
    """
    count = 128 if dtype == ml_dtypes.bfloat16 else 1024
    significands = 1 + np.arange(count) / count
    rows = np.resize(significands / 2, (-(-count // 127), 127))
    blocks = np.stack([np.insert(rows, 0, amax, axis=1) for amax in significands])
    return blocks.reshape(-1, 128).astype(dtype)
