"""Top-k by a stable sort of one row at a time."""

from __future__ import annotations

import numpy as np


def topk_row(row: np.ndarray, k: int, start: int = 0, end: int | None = None) -> np.ndarray:
    """Returns the indices of the k largest values of row[start:end], ascending, then -1."""
    size = len(row)
    start = min(max(start, 0), size)
    end = size if end is None else min(max(end, 0), size)
    values = row.astype(np.float64)
    candidates = [s for s in range(start, end) if values[s] > -np.inf]  # NaN > -inf is False.
    best = sorted(candidates, key=lambda s: (-values[s], s))[:k]
    return np.array(sorted(best) + [-1] * (k - len(best)), np.int32)


def topk(
    x: np.ndarray, k: int, starts: np.ndarray | None = None, ends: np.ndarray | None = None
) -> np.ndarray:
    """Returns `topk_row` of every row of x [..., S]; starts and ends have shape [...]."""
    out = np.empty((*x.shape[:-1], k), np.int32)
    for i in np.ndindex(*x.shape[:-1]):
        start = 0 if starts is None else int(starts[i])
        end = None if ends is None else int(ends[i])
        out[i] = topk_row(x[i], k, start, end)
    return out


def values(x: np.ndarray, indices: np.ndarray) -> np.ndarray:
    """Returns the values at the indices, -inf where an index is -1."""
    out = np.full(indices.shape, -np.inf)
    for i in np.ndindex(*indices.shape):
        if indices[i] >= 0:
            out[i] = x[(*i[:-1], indices[i])]
    return out
