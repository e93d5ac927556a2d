"""The lightning indexer, one query, head and key at a time."""

from __future__ import annotations

import numpy as np


def indexer_logits(
    q: np.ndarray,
    k: np.ndarray,
    weights: np.ndarray | None,
    *,
    index_k_scale: np.ndarray | None = None,
    starts: np.ndarray | None = None,
    ends: np.ndarray | None = None,
    relu: bool = True,
) -> np.ndarray:
    """Returns the logits [B, T, S] in float64, -inf outside [starts, ends)."""
    weights = np.ones(q.shape[:3]) if weights is None else weights
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


def inside(
    logits: np.ndarray, candidates: np.ndarray, block_size: int, starts: np.ndarray | None = None
) -> np.ndarray:
    """Returns the logits [B, T, S] with -inf outside of the candidate blocks [B, T, M]."""
    size = logits.shape[2]
    result = np.full_like(logits, -np.inf)
    for b, t in np.ndindex(*logits.shape[:2]):
        start = 0 if starts is None else min(max(int(starts[b, t]), 0), size)
        for j in candidates[b, t]:
            if j >= 0:
                own = slice(start + int(j) * block_size, start + (int(j) + 1) * block_size)
                result[b, t, own] = logits[b, t, own]
    return result


def block_topk_row(
    scores: list[float], seen: list[bool], k: int, sink_blocks: int, local_blocks: int
) -> list[int]:
    """Returns the k selected blocks of one query, ascending, then -1.

    Args:
        scores: the score of each block.
        seen: whether the query sees a key of the block.
        k, sink_blocks, local_blocks: as in `jax_dsa.block_topk`.
    """
    last = max((j for j, is_seen in enumerate(seen) if is_seen), default=-1)
    forced = [j for j, s in enumerate(seen) if s and (j < sink_blocks or j > last - local_blocks)]
    others = [j for j, x in enumerate(scores) if x > -np.inf and j not in forced]
    best = sorted(
        forced + others, key=lambda j: (j not in forced, 0 if j in forced else -scores[j], j)
    )[:k]
    return sorted(best) + [-1] * (k - len(best))


def block_topk(
    logits: np.ndarray,
    k: int,
    block_size: int,
    *,
    sink_blocks: int = 0,
    local_blocks: int = 1,
    starts: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the selected blocks [B, T, K], their largest logits, and the keys that have them.

    A logit of -inf means that a query does not see a key.
    """
    batch, queries, size = logits.shape
    indices = np.full((batch, queries, k), -1, np.int32)
    best, keys = np.full(indices.shape, -np.inf), np.full(indices.shape, -1)
    for b in range(batch):
        for t in range(queries):
            start = 0 if starts is None else min(max(int(starts[b, t]), 0), size)
            firsts = range(start, size, block_size)
            blocks = [logits[b, t, s : s + block_size] for s in firsts]
            scores = [float(np.max(x)) for x in blocks]  # NaN if one of them is.
            seen = [x != -np.inf for x in scores]
            indices[b, t] = block_topk_row(scores, seen, k, sink_blocks, local_blocks)
            for i, j in enumerate(indices[b, t]):
                if j >= 0:
                    at = int(np.argmax(blocks[j]))
                    best[b, t, i], keys[b, t, i] = blocks[j][at], firsts[j] + at
    return indices, best, keys


def block_means(k: np.ndarray, block_size: int) -> np.ndarray:
    """Returns the mean of each block's keys [B, M, C], rounded to their dtype."""
    firsts = range(0, k.shape[1], block_size)
    means = [k[:, s : s + block_size].astype(np.float64).mean(1) for s in firsts]
    wide = np.stack(means, 1) if means else k.astype(np.float64)
    return wide.astype(k.dtype)


def mean_block_topk(
    logits: np.ndarray,
    k: int,
    block_size: int,
    size: int,
    *,
    sink_blocks: int = 0,
    local_blocks: int = 1,
    ends: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the selected blocks [B, T, K], their logits, and the blocks that have a logit.

    Args:
        logits: the logits [B, T, M] of the means of all blocks.
        k, block_size, sink_blocks, local_blocks: as in `jax_dsa.indexer_block_topk`.
        size: the number of keys.
        ends: one past the last key that each query sees, in 0..size.
    """
    batch, queries, _ = logits.shape
    indices = np.full((batch, queries, k), -1, np.int32)
    values, keys = np.full(indices.shape, -np.inf), np.full(indices.shape, -1)
    for b in range(batch):
        for t in range(queries):
            firsts = range(0, size, block_size)
            whole = [s + block_size <= ends[b, t] for s in firsts]
            scores = [float(x) if w else -np.inf for x, w in zip(logits[b, t], whole, strict=True)]
            seen = [s < ends[b, t] for s in firsts]
            indices[b, t] = block_topk_row(scores, seen, k, sink_blocks, local_blocks)
            for i, j in enumerate(indices[b, t]):
                if j >= 0 and scores[j] != -np.inf:
                    values[b, t, i], keys[b, t, i] = scores[j], j
    return indices, values, keys
