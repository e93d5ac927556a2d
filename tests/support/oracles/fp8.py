"""FP8 quantisation block by block, and matmuls of the codes in float64, in NumPy."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np


def quantize_row(
    x: np.ndarray, block: int, power_of_two_scale: bool, min_amax: float = 1e-4
) -> tuple:
    """Returns the codes and scales of one row."""
    x = x.astype(np.float32)
    codes, scales = [], []
    for start in range(0, len(x), block):
        values = x[start : start + block]
        amax = np.maximum(np.abs(values).max(), np.float32(min_amax))
        scale = amax / np.float32(448)
        if power_of_two_scale:
            mantissa, exponent = math.frexp(scale)
            scale = np.float32(math.ldexp(1.0, exponent - 1 if mantissa == 0.5 else exponent))
        if not np.isfinite(values).all():
            scale = np.float32(np.nan)
        codes.append(np.clip(values / scale, -448, 448).astype(ml_dtypes.float8_e4m3fn))
        scales.append(scale)
    empty = np.zeros(0, ml_dtypes.float8_e4m3fn)
    return np.concatenate([empty, *codes]), np.array(scales, np.float32)


def quantize(
    x: np.ndarray, block: int = 128, power_of_two_scale: bool = False, min_amax: float = 1e-4
) -> tuple:
    """Returns the codes and scales of an array with blocks of 1 x `block`."""
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    blocks = math.ceil(x.shape[-1] / block)
    codes = np.zeros(rows.shape, ml_dtypes.float8_e4m3fn)
    scales = np.zeros((len(rows), blocks), np.float32)
    for i, row in enumerate(rows):
        codes[i], scales[i] = quantize_row(row, block, power_of_two_scale, min_amax)
    return codes.reshape(x.shape), scales.reshape(*x.shape[:-1], blocks)


def quantize_tiles(
    x: np.ndarray,
    rows: int,
    cols: int,
    power_of_two_scale: bool = False,
    min_amax: float = 1e-4,
) -> tuple:
    """Returns the codes and scales of a matrix with blocks of `rows` x `cols`."""
    shape = (math.ceil(x.shape[0] / rows), math.ceil(x.shape[1] / cols))
    codes = np.zeros(x.shape, ml_dtypes.float8_e4m3fn)
    scales = np.zeros(shape, np.float32)
    for i in range(shape[0]):
        for j in range(shape[1]):
            at = (slice(i * rows, (i + 1) * rows), slice(j * cols, (j + 1) * cols))
            tile = x[at]
            flat, scale = quantize_row(tile.reshape(-1), tile.size, power_of_two_scale, min_amax)
            codes[at], scales[i, j] = flat.reshape(tile.shape), scale[0]
    return codes, scales


def dequantize(codes: np.ndarray, scales: np.ndarray, rows: int, cols: int) -> np.ndarray:
    """Returns a matrix of codes times the scales of their blocks, in float64."""
    out = codes.astype(np.float64)
    for r in range(out.shape[0]):
        for c in range(out.shape[1]):
            out[r, c] *= float(scales[r // rows, c // cols])
    return out


def matmul(a: np.ndarray, a_scale: np.ndarray, b: np.ndarray, b_scale: np.ndarray) -> np.ndarray:
    """Returns a @ b.T as a sum over K blocks of 128, in float64."""
    out = np.zeros((a.shape[0], b.shape[0]))
    for m in range(a.shape[0]):
        for n in range(b.shape[0]):
            for j in range(a_scale.shape[1]):
                k = slice(128 * j, 128 * (j + 1))
                dot = a[m, k].astype(np.float64) @ b[n, k].astype(np.float64)
                out[m, n] += float(a_scale[m, j]) * float(b_scale[n // 128, j]) * dot
    return out


def linear_operands(
    x: np.ndarray, w: np.ndarray, dy: np.ndarray, power_of_two_scale: bool = False
) -> tuple:
    """Returns the operands of the three products of an FP8 linear layer: x @ w, dy @ w.T, x.T @ dy.

    They are quantised for their product and dequantised to float64. All leading axes are combined.
    """

    def round_rows(a: np.ndarray, min_amax: float = 1e-20) -> np.ndarray:
        return dequantize(*quantize(a, 128, power_of_two_scale, min_amax), 1, 128)

    def round_tiles(a: np.ndarray, min_amax: float = 1e-20) -> np.ndarray:
        return dequantize(*quantize_tiles(a, 128, 128, power_of_two_scale, min_amax), 128, 128)

    x, dy = (a.reshape(-1, a.shape[-1]) for a in (x, dy))
    weights = round_tiles(w, 1e-4)
    return (
        (round_rows(x, 1e-4), weights),
        (round_rows(dy), weights.T),
        (round_rows(x.T), round_tiles(dy)),
    )


def linear(x: np.ndarray, w: np.ndarray, dy: np.ndarray, power_of_two_scale: bool = False) -> tuple:
    """Returns x @ w and its two gradients, in float64."""
    y, dx, dw = (a @ b for a, b in linear_operands(x, w, dy, power_of_two_scale))
    return y.reshape(dy.shape), dx.reshape(x.shape), dw
