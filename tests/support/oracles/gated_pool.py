"""Pooling, computed one document after the other."""

from __future__ import annotations

from typing import Any

import numpy as np


def _blocks(starts: np.ndarray, ratio: int) -> Any:
    """Yields each block as (batch entry, number in its document, slot, rows)."""
    for b in range(len(starts)):
        for start in np.unique(starts[b]):
            for i in range(int(np.sum(starts[b] == start)) // ratio):
                yield b, i, start // ratio + i, start + i * ratio + np.arange(ratio)


def pooled(values: Any, gates: Any, bias: Any, starts: np.ndarray) -> np.ndarray:
    """Returns the keys in float64."""
    values, gates, bias = (np.asarray(x, np.float64) for x in (values, gates, bias))
    batch, length, halves, dim = values.shape
    ratio = len(bias)
    keys = np.zeros((batch, length // ratio, dim))
    for b, i, slot, rows in _blocks(starts, ratio):
        value, gate = values[b, rows, -1], gates[b, rows, -1] + bias[:, -1]
        if halves == 2 and i > 0:
            value = np.concatenate([value, values[b, rows - ratio, 0]])
            gate = np.concatenate([gate, gates[b, rows - ratio, 0] + bias[:, 0]])
        weights = np.exp(gate - gate.max(0))
        keys[b, slot] = (weights * value).sum(0) / weights.sum(0)
    return keys


def mean_pooled(values: Any, ratio: int, starts: np.ndarray, dtype: Any = np.float64) -> np.ndarray:
    """Returns the means, with sums in `dtype` in the order of the tokens."""
    values = np.asarray(values, dtype)
    batch, length, dim = values.shape
    keys = np.zeros((batch, length // ratio, dim), dtype)
    for b, _, slot, rows in _blocks(starts, ratio):
        total = values[b, rows[0]]
        for row in rows[1:]:
            total = total + values[b, row]
        keys[b, slot] = total * dtype(1 / ratio)
    return keys
