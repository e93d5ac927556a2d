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
    block_size: int = 1,
) -> tuple[float, np.ndarray]:
    """Returns the warm-up loss over keys [starts, ends) and its gradient for the logits."""
    mass = attention_mass(q, kv, scale, starts, ends)
    if block_size > 1:
        mass = by_block(mass, starts, ends, block_size)
        starts, ends = block_ranges(starts, ends, kv.shape[1], block_size)
    logits = indexer_logits(
        index_q, index_k, weights, index_k_scale=index_k_scale, starts=starts, ends=ends, relu=relu
    )
    return kl_rows(logits, mass, logits > -np.inf)


def block_ranges(
    starts: np.ndarray, ends: np.ndarray, size: int, block_size: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the half-open range of the whole blocks between tokens `starts` and `ends`."""
    starts, ends = (np.clip(x, 0, size).astype(int) for x in (starts, ends))
    first = starts // block_size
    return first, first + np.maximum(ends - starts, 0) // block_size


def by_block(mass: np.ndarray, starts: np.ndarray, ends: np.ndarray, block_size: int) -> np.ndarray:
    """Returns the mass of each whole block: [B, T, S // block_size]."""
    size = mass.shape[2]
    first, last = block_ranges(starts, ends, size, block_size)
    total = np.zeros((*mass.shape[:2], size // block_size))
    for b, t in np.ndindex(*mass.shape[:2]):
        start = min(max(0, int(starts[b, t])), size)
        for i in range(last[b, t] - first[b, t]):
            for u in range(block_size):
                total[b, t, first[b, t] + i] += mass[b, t, start + i * block_size + u]
    return total
