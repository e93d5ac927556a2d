"""Decode attention to a range of keys in float64, one query head at a time."""

from __future__ import annotations

import numpy as np
from support.oracles.sparse_mla import gate


def unpaged(pages: np.ndarray, page_table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the rows [B, R * L, G, D] that a page table [B, R] selects, and which are mapped."""
    num_pages, size = pages.shape[:2]
    B, R = page_table.shape
    rows = np.zeros((B, R * size, *pages.shape[2:]), pages.dtype)
    mapped = np.zeros((B, R * size), bool)
    for b, r in np.ndindex(B, R):
        page = page_table[b, r]
        if 0 <= page < num_pages:
            rows[b, r * size : (r + 1) * size] = pages[page]
            mapped[b, r * size : (r + 1) * size] = True
    return rows, mapped


def mqa_decode(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    scale: float,
    key_value_seq_lengths: np.ndarray | None = None,
    starts: np.ndarray | None = None,
    local_window_size: np.ndarray | int | None = None,
    sinks: np.ndarray | None = None,
    mapped: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns out [B, T, N, E], and lse and the largest score [B, T, N]."""
    B, T, N, _ = q.shape
    S, G = k.shape[1:3]
    q, k, v = q.astype(np.float64), k.astype(np.float64), v.astype(np.float64)
    out = np.zeros((B, T, N, v.shape[3]))
    lse, top = np.full((B, T, N), -np.inf), np.full((B, T, N), -np.inf)
    for b, t, n in np.ndindex(B, T, N):
        g = n // (N // G)
        last = (S if key_value_seq_lengths is None else int(key_value_seq_lengths[b])) - T + t
        first = 0
        if starts is not None:
            first = max(0, int(starts[b, t] if starts.ndim == 2 else starts[b]))
        if local_window_size is not None:
            first = max(first, last - int(np.broadcast_to(local_window_size, B)[b]))
        seen = [j for j in range(first, min(last + 1, S)) if mapped is None or mapped[b, j]]
        if not seen:
            continue
        s = scale * k[b, seen, g] @ q[b, t, n]
        top[b, t, n] = s.max()
        lse[b, t, n] = top[b, t, n] + np.log(np.exp(s - s.max()).sum())
        out[b, t, n] = np.exp(s - lse[b, t, n]) @ v[b, seen, g]
        if sinks is not None:
            out[b, t, n] *= gate(sinks[n], lse[b, t, n])
    return out, lse, top


def merge_attention(outs: np.ndarray, lses: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Combines the results [sets, ..., E] and [sets, ...] of disjoint sets of keys."""
    out, lse = np.zeros(outs.shape[1:]), np.full(lses.shape[1:], -np.inf)
    for i in np.ndindex(*lse.shape):
        sets = [p for p in range(len(outs)) if lses[(p, *i)] > -np.inf]
        if not sets:
            continue
        top = max(lses[(p, *i)] for p in sets)
        weights = np.array([np.exp(lses[(p, *i)] - top) for p in sets])
        lse[i] = top + np.log(weights.sum())
        out[i] = sum(w * outs[(p, *i)] for w, p in zip(weights, sets, strict=True)) / weights.sum()
    return out, lse
