"""FP4 (e2m1) rounding in float64, by a search over all codes."""

from __future__ import annotations

import numpy as np

GRID = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def fake_quantize(x: np.ndarray, largest: float) -> np.ndarray:
    """Returns blocks `x` [..., 32] rounded to FP4 values of at most `largest`, in float64."""
    x = np.asarray(x, np.float64)
    amax = np.abs(x).max(-1, keepdims=True)
    finite = np.isfinite(amax)
    exponents = np.arange(-124.0, 128)
    fits = np.where(finite, amax, 0) <= 6 * 2.0**exponents
    scale = 2.0 ** exponents[fits.argmax(-1)][..., None]
    values = GRID * scale[..., None]
    with np.errstate(invalid="ignore"):
        distances = np.abs(np.abs(x)[..., None] - values)
    distances = np.where(values <= largest, distances, np.inf)
    nearest = distances.min(-1, keepdims=True) == distances
    even = nearest & (np.arange(8) % 2 == 0)
    codes = np.where(even.any(-1), even.argmax(-1), nearest.argmax(-1))
    y = np.copysign(np.take_along_axis(values, codes[..., None], -1)[..., 0], x)
    return np.where(finite, y, np.nan)
