"""Masked attention in NumPy float64, one score at a time."""

from __future__ import annotations

from typing import Any

import numpy as np


def counts(
    shape: tuple[int, int, int, int],
    groups: int,
    *,
    mask: Any = None,
    is_causal: bool = False,
    causal_alignment: str = "top_left",
    local_window_size: tuple[int, int] | int | None = None,
    q_segments: Any = None,
    kv_segments: Any = None,
    key_value_seq_lengths: Any = None,
    kv_indices: Any = None,
) -> np.ndarray:
    """Returns how often each key counts for each query, [B, N, T, S].

    A masked key counts 0 times. A key that `kv_indices` lists twice counts twice.
    """
    _, heads, queries, keys = shape
    out = np.zeros(shape, np.int64)
    # Indexing an array on a device would transfer each element separately.
    mask, q_segments, kv_segments, key_value_seq_lengths, kv_indices = (
        None if x is None else np.asarray(x)
        for x in (mask, q_segments, kv_segments, key_value_seq_lengths, kv_indices)
    )
    if local_window_size is not None:
        left, right = np.broadcast_to(local_window_size, 2).tolist()
    for b, n, t, s in np.ndindex(*shape):
        g = n // (heads // groups)
        length = keys
        if key_value_seq_lengths is not None:
            length = min(max(int(key_value_seq_lengths[b]), 0), keys)
        position = t + (length - queries if causal_alignment == "bottom_right" else 0)
        visible = s < length
        if is_causal and s > position:
            visible = False
        if local_window_size is not None and not position - left <= s <= position + right:
            visible = False
        if q_segments is not None and q_segments[b, t] != kv_segments[b, s]:
            visible = False
        if mask is not None and not at(mask, b, n, t, s, shape):
            visible = False
        times = 1 if kv_indices is None else int(np.sum(kv_indices[b, g] == s))
        out[b, n, t, s] = times if visible else 0
    return out


def at(x: Any, b: int, n: int, t: int, s: int, shape: tuple[int, int, int, int]) -> Any:
    """Returns the entry of a mask or bias [1|B, 1|G|N, 1|T, S] for one score."""
    h = n // (shape[1] // x.shape[1])
    return x[b if x.shape[0] > 1 else 0, h, t if x.shape[2] > 1 else 0, s]


def attention(
    q: Any, k: Any, v: Any, bias: Any, count: np.ndarray, scale: float,
    softcap: float | None = None, sinks: Any = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:  # fmt: skip
    """Returns out [B, T, N, E], lse [B, T, N] and probabilities [B, N, T, S].

    lse is without the sinks [N]. They take their share of the probabilities.
    """
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    batch, heads, queries, keys = count.shape
    out = np.zeros((*q.shape[:3], v.shape[3]))
    lse = np.full(q.shape[:3], -np.inf)
    probs = np.zeros(count.shape)
    for b, n, t in np.ndindex(batch, heads, queries):
        g = n // (heads // k.shape[2])
        seen = [s for s in range(keys) if count[b, n, t, s]]
        if not seen:
            continue
        logits = [logit(q, k, bias, b, n, g, t, s, count.shape, scale, softcap) for s in seen]
        peak = max(logits)
        weights = [count[b, n, t, s] * np.exp(x - peak) for s, x in zip(seen, logits)]
        lse[b, t, n] = peak + np.log(sum(weights))
        with np.errstate(over="ignore"):
            sink = 0 if sinks is None else np.exp(np.float64(sinks[n]) - peak)
        total = sum(weights) + sink
        for s, w in zip(seen, weights):
            probs[b, n, t, s] = w / total
            out[b, t, n] += probs[b, n, t, s] * v[b, s, g]
    return out, lse, probs


def logit(
    q: Any, k: Any, bias: Any, b: int, n: int, g: int, t: int, s: int, shape: Any,
    scale: float, softcap: float | None,
) -> float:  # fmt: skip
    x = scale * np.dot(q[b, t, n], k[b, s, g])
    if bias is not None:
        x += np.float64(at(bias, b, n, t, s, shape))
    return x if softcap is None else softcap * np.tanh(x / softcap)


def gradients(
    q: Any, k: Any, v: Any, bias: Any, count: np.ndarray, scale: float, softcap: float | None,
    dout: Any, dlse: Any, sinks: Any = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray | None, np.ndarray | None]:  # fmt: skip
    """Returns the gradients of q, k, v, bias and sinks by the chain rule, score by score."""
    q, k, v, dout, dlse = (np.asarray(x, np.float64) for x in (q, k, v, dout, dlse))
    out, _, probs = attention(q, k, v, bias, count, scale, softcap, sinks)
    _, _, without_sink = attention(q, k, v, bias, count, scale, softcap)
    dq, dk, dv = np.zeros(q.shape), np.zeros(k.shape), np.zeros(v.shape)
    dbias = None if bias is None else np.zeros(bias.shape)
    for b, n, t, s in np.ndindex(*count.shape):
        if not count[b, n, t, s]:
            continue
        g = n // (q.shape[2] // k.shape[2])
        p = probs[b, n, t, s]
        dx = p * np.dot(dout[b, t, n], v[b, s, g] - out[b, t, n])
        dx += without_sink[b, n, t, s] * dlse[b, t, n]
        if softcap is not None:
            x = logit(q, k, bias, b, n, g, t, s, count.shape, scale, softcap)
            dx *= 1 - (x / softcap) ** 2
        dv[b, s, g] += p * dout[b, t, n]
        dq[b, t, n] += scale * dx * k[b, s, g]
        dk[b, s, g] += scale * dx * q[b, t, n]
        if dbias is not None:
            h = n // (q.shape[2] // dbias.shape[1])
            own = (b if dbias.shape[0] > 1 else 0, h, t if dbias.shape[2] > 1 else 0, s)
            dbias[own] += dx
    dsinks = None
    if sinks is not None:
        share = np.where(count.any(-1), 1 - probs.sum(-1), 0)
        dsinks = -np.einsum("bnt,btne,btne->n", share, dout, out)
    return dq, dk, dv, dbias, dsinks
