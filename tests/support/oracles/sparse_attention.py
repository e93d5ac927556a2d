"""Block-sparse attention in float64, one query head at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
from support.oracles import documents
from support.oracles.sparse_mla import gate


def listed(row: np.ndarray, length: int) -> list[int]:
    """Returns the block numbers of the slots that count."""
    return [int(j) for j in row[: max(0, length)]]


def forced(
    p: int, b: int, count: int, blocks: list[int], sinks: int, local: int, tail: bool
) -> list[int]:
    """Returns the forced blocks, of `count`, that `blocks` lacks for the query at position p."""
    own = range(max(0, p // b - local + 1), min(p // b + 1, count)) if local else ()
    numbers = {*range(min(sinks, count)), *own}
    if tail and (p + 1) % b:
        numbers.add((p + 1) // b)
    return sorted(numbers - set(blocks))


def selections(
    q: np.ndarray,
    k: np.ndarray,
    indices: np.ndarray,
    *,
    block_size: int,
    is_causal: bool = False,
    query_start: Any = 0,
    key_value_seq_lengths: np.ndarray | None = None,
    sink_blocks: int = 0,
    local_blocks: int = 0,
    tail_block: bool = False,
    topk_length: np.ndarray | None = None,
    exists: np.ndarray | None = None,
    segment_ids: np.ndarray | None = None,
    **_: Any,
) -> Any:
    """Yields every (b, t, n) with its KV head and the keys that it sees, in order.

    `exists` [B, S] says which keys there are, by default all.
    """
    B, T, N, _ = q.shape
    S, G = k.shape[1:3]
    start = np.broadcast_to(query_start, B)
    bounds = None if segment_ids is None else documents.bounds(segment_ids)
    for b, t, n in np.ndindex(B, T, N):
        g = n // (N // G)
        first, last = (0, S) if bounds is None else (int(x[b, t]) for x in bounds)
        p = int(start[b]) + t - first
        row = indices[b, t] if indices.ndim == 3 else indices[b, t, g]
        blocks = listed(row, len(row) if topk_length is None else int(topk_length[b, t]))
        if is_causal:
            count = -(-(last - first) // block_size)
            blocks += forced(p, block_size, count, blocks, sink_blocks, local_blocks, tail_block)
        end = last if key_value_seq_lengths is None else min(last, int(key_value_seq_lengths[b]))
        end = min(end, first + p + 1) if is_causal else end
        keys = [
            s
            for j in blocks
            if 0 <= j <= S // block_size
            for s in range(first + j * block_size, min(first + (j + 1) * block_size, end))
            if exists is None or exists[b, s]
        ]
        yield (b, t, n), g, keys


def sparse_attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    indices: np.ndarray,
    *,
    scale: float | None = None,
    sinks: np.ndarray | None = None,
    **which: Any,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns out [B, T, N, E], lse [B, T, N] and max_logit [B, T, N]."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    scale = q.shape[3] ** -0.5 if scale is None else scale
    out = np.zeros((*q.shape[:3], v.shape[3]))
    lse, top = (np.full(q.shape[:3], -np.inf) for _ in range(2))
    for at, g, keys in selections(q, k, indices, **which):
        if not keys:
            continue
        s = np.array([scale * float(q[at] @ k[at[0], j, g]) for j in keys])
        top[at] = s.max()
        p = np.exp(s - top[at])
        lse[at] = top[at] + np.log(p.sum())
        p /= p.sum()
        out[at] = sum(x * v[at[0], j, g] for x, j in zip(p, keys, strict=True))
        if sinks is not None:
            out[at] *= gate(sinks[at[2]], lse[at])
    return out, lse, top


def sparse_attention_grads(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    indices: np.ndarray,
    dout: np.ndarray,
    dlse: np.ndarray,
    *,
    scale: float | None = None,
    sinks: np.ndarray | None = None,
    **which: Any,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Returns dq, dk, dv and dsinks, computed with the Jacobian of the softmax with its sink."""
    q, k, v, dout, dlse = (x.astype(np.float64) for x in (q, k, v, dout, dlse))
    scale = q.shape[3] ** -0.5 if scale is None else scale
    dq, dk, dv, dsinks = (np.zeros(x) for x in (q.shape, k.shape, v.shape, q.shape[2]))
    for at, g, keys in selections(q, k, indices, **which):
        if not keys:
            continue
        b, _, n = at
        rows, values = k[b, keys, g], v[b, keys, g]
        s = scale * rows @ q[at]
        # The sink is one more key, whose value is 0.
        z = np.append(s, -np.inf if sinks is None else sinks[n])
        p = np.exp(z - z.max()) if z.max() < np.inf else (z == np.inf) * 1.0
        p /= p.sum()
        dz = p * (np.append(values @ dout[at], 0) - p[:-1] @ values @ dout[at])
        dsinks[n] += dz[-1]
        own = np.exp(s - s.max())
        ds = dz[:-1] + dlse[at] * own / own.sum()
        dq[at] = scale * ds @ rows
        for i, j in enumerate(keys):
            dk[b, j, g] += scale * ds[i] * q[at]
            dv[b, j, g] += p[i] * dout[at]
    return dq, dk, dv, dsinks
