"""Rows of attention whose scores are huge and equal, and their float64 results.

In float32, -1e9 + log(100) is -1e9. The last dimension of the query alone makes the scores, and
keys hold them there exactly, so that every implementation has the same scores.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np

LEVELS = (-1e9, -3e38, float(np.finfo(np.float32).min))
COUNTS = (1, 2, 100)
ORDINARY = (0.25, -0.5, 0.25)  # further scores in every second row


class Rows(NamedTuple):
    """One row of attention per batch entry, all with one KV head.

    Attributes:
        q: [B, 1, N, D], which is 1 in its last dimension and 0 in the others.
        k: [B, S, 1, D], with the scores in the last dimension.
        lengths: The number of keys of each row, [B].
        sinks: [N], among them the level of the scores, an ordinary number and -inf.
        dout, dlse: Cotangents, [B, 1, N, E] and [B, 1, N].
    """

    q: np.ndarray
    k: np.ndarray
    lengths: np.ndarray
    sinks: np.ndarray
    dout: np.ndarray
    dlse: np.ndarray


def rows(
    rng: np.random.Generator, level: float, dtype: Any, N: int = 4, D: int = 8, E: int = 6
) -> Rows:
    level = max(level, float(np.asarray(jax.numpy.finfo(dtype).min, np.float64)))
    scores = [[level] * n for n in COUNTS]
    scores += [[*ORDINARY, *row] for row in scores] + [[level, *ORDINARY, level]]
    B, S = len(scores), max(map(len, scores))
    k = rng.normal(size=(B, S, 1, D))
    for b, row in enumerate(scores):
        k[b, : len(row), 0, -1] = row
    q = np.zeros((B, 1, N, D))
    q[..., -1] = 1
    sinks = np.resize([level, 0.5, -np.inf, 2 * level if level > -1e30 else level], N)
    dout, dlse = rng.normal(size=(B, 1, N, E)), rng.normal(size=(B, 1, N))
    low = [np.asarray(jax.numpy.asarray(x, dtype)) for x in (q, k, dout)]
    lengths = np.array([len(row) for row in scores], np.int32)
    wide = [x.astype(np.float32) for x in (sinks, dlse)]
    return Rows(low[0], low[1], lengths, wide[0], low[2], wide[1])


class Expected(NamedTuple):
    """The results and gradients of `Rows`. `dq` lacks the last dimension, a sum of huge numbers."""

    out: np.ndarray
    max_logit: np.ndarray
    log_sum: np.ndarray
    p: np.ndarray
    dq: np.ndarray
    dk: np.ndarray
    dsinks: np.ndarray


def expected(x: Rows, *, scale: float = 1.0, with_sinks: bool = True) -> Expected:
    q, k, dout = (np.asarray(a, np.float64) for a in (x.q, x.k, x.dout))
    B, _, N, D = q.shape
    E = dout.shape[3]
    out, dq, dk = np.zeros((B, 1, N, E)), np.zeros((B, 1, N, D - 1)), np.zeros(k.shape)
    top, log_sum, dsinks = np.zeros((B, 1, N)), np.zeros((B, 1, N)), np.zeros(N)
    p = np.zeros((B, N, k.shape[1]))
    for b, n in np.ndindex(B, N):
        keys = k[b, : x.lengths[b], 0]
        s = scale * keys @ q[b, 0, n]
        weights = np.exp(s - s.max())
        total, own = weights.sum(), weights / weights.sum()
        top[b, 0, n], log_sum[b, 0, n], p[b, n, : len(s)] = s.max(), np.log(total), own
        gate = 1.0
        if with_sinks:
            with np.errstate(over="ignore"):
                gate = 1 / (1 + np.exp(float(x.sinks[n]) - s.max()) / total)
        out[b, 0, n] = gate * own @ keys[:, :E]
        dots = dout[b, 0, n] @ out[b, 0, n]
        ds = own * (gate * (keys[:, :E] @ dout[b, 0, n]) - gate * dots + x.dlse[b, 0, n])
        dq[b, 0, n] = scale * (ds @ keys)[:-1]
        dk[b, : len(s), 0] += scale * ds[:, None] * q[b, 0, n]
        dk[b, : len(s), 0, :E] += gate * own[:, None] * dout[b, 0, n]
        dsinks[n] -= (1 - gate) * dots
    return Expected(out, top, log_sum, p, dq, dk, dsinks)
