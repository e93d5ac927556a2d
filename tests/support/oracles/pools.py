"""An attention layer whose indexer selects pools of tokens, in float64 and with plain loops."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from support.oracles.nn import rms_norm, softmax


class PooledLayer(NamedTuple):
    """The results of a layer for one document."""

    out: np.ndarray
    pools: list[list[int]]
    """The pools that each query selects, ascending."""
    kl: list[float]
    """The loss of each query that sees a complete pool."""


def pooled_keys(p: Any, c: Any, x: np.ndarray) -> np.ndarray:
    """Returns the indexer's key of each complete pool of a document [T, M]."""
    k = x @ p["wk"]["kernel"]
    k = rms_norm(k - k.mean(-1, keepdims=True), p["k_norm"], c.index_norm_eps or c.norm_eps)
    k = k + p["k_norm"]["bias"]
    gates = x @ p["wg"]["kernel"]
    keys = []
    for i in range(len(x) // c.index_pool):
        tokens = slice(i * c.index_pool, (i + 1) * c.index_pool)
        weights = softmax((gates[tokens] + p["position_bias"]).T).T
        keys.append((weights * k[tokens]).sum(0))
    return np.reshape(keys, (-1, c.index_dim))


def attention(p: Any, c: Any, x: np.ndarray) -> PooledLayer:
    """Computes the layer for one document [T, M]."""
    mla, index, size = p["mla"], p["indexer"], c.index_pool
    latent = rms_norm(x @ mla["wq_a"]["kernel"], mla["q_norm"], c.norm_eps)
    q = (latent @ mla["wq_b"]["kernel"]).reshape(len(x), c.num_heads, c.nope_dim)
    kv = rms_norm(x @ mla["wkv_a"]["kernel"], mla["kv_norm"], c.norm_eps)
    k = np.einsum("se,nep->snp", kv, mla["w_uk"])
    v = np.einsum("se,nev->snv", kv, mla["w_uv"])
    index_q = (latent @ index["wq"]["kernel"]).reshape(len(x), c.index_heads, c.index_dim)
    weights = x @ index["weights"]["kernel"] * c.index_heads**-0.5
    keys = pooled_keys(index, c, x)
    out, selected, losses = [], [], []
    for t in range(len(x)):
        complete = (t + 1) // size
        logits = [
            sum(
                weights[t, j] * max(c.index_dim**-0.5 * index_q[t, j] @ keys[i], 0)
                for j in range(c.index_heads)
            )
            for i in range(complete)
        ]
        pools = sorted(sorted(range(complete), key=lambda i: -logits[i])[: c.top_k // size])
        tokens = [s for i in pools for s in range(i * size, (i + 1) * size)]
        tail = list(range(complete * size, t + 1)) if c.index_tail else []
        heads, mass = [], np.zeros(len(pools))
        for n in range(c.num_heads):
            scores = k[tokens + tail, n] @ q[t, n] * c.nope_dim**-0.5
            attended = softmax(scores) if len(scores) else scores
            heads.append(attended @ v[tokens + tail, n])
            mass += attended[: len(tokens)].reshape(-1, size).sum(1)
        out.append(np.concatenate(heads) @ mla["wo"]["kernel"])
        selected.append(pools)
        if pools:
            teacher, student = mass / mass.sum(), softmax(np.array(logits)[pools])
            losses.append(float((teacher * np.log(teacher / student)).sum()))
    return PooledLayer(np.array(out), selected, losses)
