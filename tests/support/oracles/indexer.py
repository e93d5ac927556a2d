"""The lightning indexer, one query, head and key at a time."""

from __future__ import annotations

import numpy as np


def indexer_logits(
    q: np.ndarray,
    k: np.ndarray,
    weights: np.ndarray,
    *,
    index_k_scale: np.ndarray | None = None,
    starts: np.ndarray | None = None,
    ends: np.ndarray | None = None,
    relu: bool = True,
) -> np.ndarray:
    """Returns the logits [B, T, S] in float64, -inf outside [starts, ends)."""
    q, k, weights = (x.astype(np.float64) for x in (q, k, weights))
    batch, queries, heads, _ = q.shape
    size = k.shape[1]
    logits = np.full((batch, queries, size), -np.inf)
    for b in range(batch):
        for t in range(queries):
            start = 0 if starts is None else max(0, int(starts[b, t]))
            end = size if ends is None else min(size, int(ends[b, t]))
            for s in range(start, end):
                total = 0.0
                for j in range(heads):
                    x = float(q[b, t, j] @ k[b, s])
                    total += weights[b, t, j] * (max(x, 0.0) if relu else x)
                logits[b, t, s] = total * (
                    1.0 if index_k_scale is None else float(index_k_scale[b, s])
                )
    return logits


def indexer_gradients(
    q: np.ndarray,
    k: np.ndarray,
    weights: np.ndarray,
    g: np.ndarray,
    *,
    index_k_scale: np.ndarray | None = None,
    relu: bool = True,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Returns dq, dk, dweights and dk_scale for g = dL/dI, which must be 0 for masked logits."""
    q, k, weights = (x.astype(np.float64) for x in (q, k, weights))
    scale = np.ones(k.shape[:2])
    if index_k_scale is not None:
        scale = index_k_scale.astype(np.float64)
    dq, dk, dw, dscale = (np.zeros_like(x) for x in (q, k, weights, scale))
    for b, t, s in zip(*np.nonzero(g), strict=True):
        for j in range(q.shape[2]):
            x = float(q[b, t, j] @ k[b, s])
            if relu and not x > 0:
                continue
            dw[b, t, j] += g[b, t, s] * x * scale[b, s]
            dq[b, t, j] += g[b, t, s] * weights[b, t, j] * scale[b, s] * k[b, s]
            dk[b, s] += g[b, t, s] * weights[b, t, j] * scale[b, s] * q[b, t, j]
            dscale[b, s] += g[b, t, s] * weights[b, t, j] * x
    return dq, dk, dw, dscale
