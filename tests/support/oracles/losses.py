"""The indexer's losses in float64, computed one row at a time."""

from __future__ import annotations

import numpy as np
from support.oracles.indexer import indexer_logits


def kl_rows(logits: np.ndarray, teacher: np.ndarray, valid: np.ndarray) -> tuple[float, np.ndarray]:
    """Returns the mean over rows of KL(p || softmax(logits)) and its gradient for the logits."""
    gradient = np.zeros(logits.shape)
    losses, rows = [], []
    for i in np.ndindex(*logits.shape[:-1]):
        slots = np.flatnonzero(valid[i])
        mass = sum(float(teacher[i][s]) for s in slots)
        if mass <= 0:
            continue
        p = np.array([float(teacher[i][s]) / mass for s in slots])
        x = np.array([float(logits[i][s]) for s in slots])
        largest = np.max(x)  # NaN if a logit is NaN
        e = np.exp(x - largest) if largest != -np.inf else np.zeros(len(x))
        with np.errstate(divide="ignore"):
            log_q = x - largest - np.log(np.sum(e)) if largest != -np.inf else x
        terms = [(a, b) for a, b in zip(p, log_q, strict=True) if not a <= 0]
        losses.append(sum(a * (np.log(a) - b) for a, b in terms))
        gradient[i][slots] = np.exp(log_q) - p
        rows.append(i)
    return (sum(losses) / len(rows) if rows else 0.0), gradient / max(1, len(rows))


def attention_mass(
    q: np.ndarray, kv: np.ndarray, scale: float, starts: np.ndarray, ends: np.ndarray
) -> np.ndarray:
    """Returns softmax attention over keys [starts, ends), summed over heads: [B, T, S]."""
    q, kv = q.astype(np.float64), kv.astype(np.float64)
    batch, queries, heads, _ = q.shape
    per_group = heads // kv.shape[2]
    mass = np.zeros((batch, queries, kv.shape[1]))
    for b in range(batch):
        for t in range(queries):
            seen = range(max(0, int(starts[b, t])), min(kv.shape[1], int(ends[b, t])))
            for n in range(heads):
                s = np.array([scale * float(q[b, t, n] @ kv[b, i, n // per_group]) for i in seen])
                if len(s):
                    e = np.exp(s - max(s))
                    mass[b, t, list(seen)] += e / sum(e)
    return mass


def dense_kl(
    index_q: np.ndarray,
    index_k: np.ndarray,
    weights: np.ndarray,
    q: np.ndarray,
    kv: np.ndarray,
    *,
    scale: float,
    starts: np.ndarray,
    ends: np.ndarray,
    index_k_scale: np.ndarray | None = None,
    relu: bool = True,
) -> tuple[float, np.ndarray]:
    """Returns the warm-up loss over keys [starts, ends) and its gradient for the logits."""
    logits = indexer_logits(
        index_q, index_k, weights, index_k_scale=index_k_scale, starts=starts, ends=ends, relu=relu
    )
    return kl_rows(logits, attention_mass(q, kv, scale, starts, ends), logits > -np.inf)
