"""Sparse attention, one query head at a time, in float64."""

from __future__ import annotations

from typing import Any

import numpy as np


def valid_keys(row: np.ndarray, keys: int, end: int, length: int) -> list[tuple[int, int]]:
    """(slot, key) of the slots of one row of indices that count."""
    return [(i, int(j)) for i, j in enumerate(row[:length]) if 0 <= j < keys and j < end]


def visible_end(t: int, keys: int, is_causal: bool, query_start: int, key_stride: int) -> int:
    """One past the last key that query t sees."""
    return (query_start + t + 1) // key_stride if is_causal else keys


def selections(
    q: np.ndarray,
    kv: np.ndarray,
    indices: np.ndarray,
    *,
    is_causal: bool = False,
    query_start: Any = 0,
    key_stride: int = 1,
    topk_length: np.ndarray | None = None,
) -> Any:
    """For every (b, t, n): its KV group, and the (slot, key) pairs that count."""
    B, T, N, _ = q.shape
    S, G = kv.shape[1:3]
    first = np.broadcast_to(query_start, B)
    for b, t, n in np.ndindex(B, T, N):
        g = n // (N // G)
        end = visible_end(t, S, is_causal, int(first[b]), key_stride)
        length = indices.shape[3] if topk_length is None else max(0, int(topk_length[b, t]))
        yield (b, t, n), g, valid_keys(indices[b, t, g], S, end, length)


def slot_scores(
    q: np.ndarray, kv: np.ndarray, slots: list[tuple[int, int]], scale: float
) -> np.ndarray:
    """Of one query and one head; the same to the last bit wherever they are needed, since a huge
    scale makes much of a bit.
    """
    return np.array([scale * float(q @ kv[j]) for _, j in slots])


def gate(sink: float, lse: float) -> float:
    """1 / (1 + exp(sink - lse)) with its limits."""
    if sink == np.inf or lse == -np.inf:
        return 0.0
    return 1.0 if sink == -np.inf else 1 / (1 + np.exp(sink - lse))


def sparse_mla(
    q: np.ndarray,
    kv: np.ndarray,
    indices: np.ndarray,
    *,
    value_dim: int,
    scale: float,
    sinks: np.ndarray | None = None,
    **which: Any,
) -> tuple[np.ndarray, np.ndarray]:
    """out [B, T, N, E] and lse [B, T, N]."""
    q, kv = q.astype(np.float64), kv.astype(np.float64)
    out = np.zeros((*q.shape[:3], value_dim))
    lse = np.full(q.shape[:3], -np.inf)
    for (b, t, n), g, slots in selections(q, kv, indices, **which):
        if not slots:
            continue
        rows = np.stack([kv[b, j, g] for _, j in slots])
        s = slot_scores(q[b, t, n], kv[b, :, g], slots, scale)
        top = s.max()
        lse[b, t, n] = top + np.log(np.exp(s - top).sum())
        out[b, t, n] = np.exp(s - lse[b, t, n]) @ rows[:, :value_dim]
        if sinks is not None:
            out[b, t, n] *= gate(sinks[n], lse[b, t, n])
    return out, lse


def sparse_mla_grads(
    q: np.ndarray,
    kv: np.ndarray,
    indices: np.ndarray,
    dout: np.ndarray,
    dlse: np.ndarray,
    *,
    value_dim: int,
    scale: float,
    sinks: np.ndarray | None = None,
    **which: Any,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """dq, dkv and dsinks, through the softmax's Jacobian."""
    q, kv, dout = (x.astype(np.float64) for x in (q, kv, dout))
    dq, dkv, dsinks = np.zeros(q.shape), np.zeros(kv.shape), np.zeros(q.shape[2])
    for (b, t, n), g, slots in selections(q, kv, indices, **which):
        if not slots:
            continue
        rows = np.stack([kv[b, j, g] for _, j in slots])
        s = scale * rows @ q[b, t, n]
        p = np.exp(s - s.max())
        lse = s.max() + np.log(p.sum())
        p /= p.sum()
        share = 1.0 if sinks is None else gate(sinks[n], lse)
        plain = p @ rows[:, :value_dim]
        dshare = dout[b, t, n] @ plain
        dsinks[n] -= dshare * share * (1 - share)
        dp = rows[:, :value_dim] @ dout[b, t, n] * share
        ds = (np.diag(p) - np.outer(p, p)) @ dp
        ds += p * (dlse[b, t, n] + dshare * share * (1 - share))
        dq[b, t, n] = scale * ds @ rows
        for i, (_, j) in enumerate(slots):
            dkv[b, j, g] += scale * ds[i] * q[b, t, n]
            dkv[b, j, g, :value_dim] += p[i] * share * dout[b, t, n]
    return dq, dkv, dsinks
