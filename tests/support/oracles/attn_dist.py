"""Computes attention probabilities summed over groups of heads, slot by slot, in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
from support.oracles.sparse_mla import gate, selections, slot_scores


def attn_dist(
    q: np.ndarray,
    kv: np.ndarray,
    indices: np.ndarray,
    lse: np.ndarray,
    *,
    scale: float,
    head_group: int | None,
    block_size: int = 1,
    sinks: np.ndarray | None = None,
    topk_length: np.ndarray | None = None,
    **which: Any,
) -> np.ndarray:
    """Returns the sums [B, N / head_group, T, K], or [B, T, K] if head_group is None."""
    B, T, N, _ = q.shape
    size = min(block_size, max(1, kv.shape[1]))  # A larger block has no more keys.
    if topk_length is not None:
        topk_length = np.clip(topk_length.astype(np.int64), 0, indices.shape[3]) * size

    heads, sums = (N, 1) if head_group is None else (head_group, N // head_group)
    q, kv = q.astype(np.float64), kv.astype(np.float64)
    dist = np.zeros((B, sums, T, indices.shape[3]))
    tokens = indices.astype(np.int64)[..., None] * size + np.arange(size)
    shape = *indices.shape[:3], indices.shape[3] * size
    tokens = np.where(indices[..., None] < 0, -1, tokens).reshape(shape)
    for (b, t, n), g, slots in selections(q, kv, tokens, topk_length=topk_length, **which):
        if lse[b, t, n] == -np.inf:
            continue
        weight = 1.0 if sinks is None else gate(sinks[n], lse[b, t, n])
        scores = slot_scores(q[b, t, n], kv[b, :, g], slots, scale)
        for (i, _), s in zip(slots, scores, strict=True):
            dist[b, n // heads, t, i // size] += weight * np.exp(s - lse[b, t, n])
    return dist[:, 0] if head_group is None else dist
