"""Sparse attention in float64, one query head at a time."""

from __future__ import annotations

from typing import Any

import numpy as np


def valid_keys(row: np.ndarray, keys: int, end: int, length: int) -> list[tuple[int, int]]:
    """Returns the (slot, key) pairs of the valid slots of one row of indices."""
    return [(i, int(j)) for i, j in enumerate(row[:length]) if 0 <= j < keys and j < end]


def visible_end(t: int, keys: int, is_causal: bool, query_start: int, key_stride: int) -> int:
    """Returns the exclusive end of the keys that query t sees."""
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
    """Yields every (b, t, n) with its KV head group and the valid (slot, key) pairs."""
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
    """Returns the scores of one query head.

    All oracles use this function so that their scores are bit-identical. With a huge scale a single
    bit matters.
    """
    return np.array([scale * float(q @ kv[j]) for _, j in slots])


def gate(sink: float, lse: float) -> float:
    """Returns 1 / (1 + exp(sink - lse)), also for infinite arguments."""
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
    """Returns out [B, T, N, E] and lse [B, T, N]."""
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
    """Returns dq, dkv and dsinks, computed with the Jacobian of the softmax."""
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
        gate_n = 1.0 if sinks is None else gate(sinks[n], lse)
        ungated = p @ rows[:, :value_dim]
        dgate = dout[b, t, n] @ ungated
        dsinks[n] -= dgate * gate_n * (1 - gate_n)
        dp = rows[:, :value_dim] @ dout[b, t, n] * gate_n
        ds = (np.diag(p) - np.outer(p, p)) @ dp
        ds += p * (dlse[b, t, n] + dgate * gate_n * (1 - gate_n))
        dq[b, t, n] = scale * ds @ rows
        for i, (_, j) in enumerate(slots):
            dkv[b, j, g] += scale * ds[i] * q[b, t, n]
            dkv[b, j, g, :value_dim] += p[i] * gate_n * dout[b, t, n]
    return dq, dkv, dsinks
