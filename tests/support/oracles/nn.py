"""The decoder in float64, with attention in its expanded form and a mask of visible keys."""

from __future__ import annotations

from typing import Any

import numpy as np


def rope(x: np.ndarray, positions: np.ndarray, base: float, layout: str) -> np.ndarray:
    """Rotates pairs of the last axis, as complex numbers.

    `positions` broadcast to all axes but the last.
    """
    half = x.shape[-1] // 2
    a, b = (x[..., :half], x[..., half:]) if layout == "half" else (x[..., ::2], x[..., 1::2])
    rotated = (a + 1j * b) * np.exp(1j * positions[..., None] * base ** (-np.arange(half) / half))
    if layout == "half":
        return np.concatenate([rotated.real, rotated.imag], axis=-1)
    return np.stack([rotated.real, rotated.imag], axis=-1).reshape(x.shape)


def rms_norm(x: np.ndarray, p: Any, eps: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * p["scale"]


def softmax(x: np.ndarray) -> np.ndarray:
    """Returns the softmax of the last axis; a row of -inf gives zeros."""
    e = np.exp(x - np.maximum(x.max(-1, keepdims=True), -1e300))
    return e / np.maximum(e.sum(-1, keepdims=True), 1e-300)


def hadamard(width: int) -> np.ndarray:
    i = np.arange(width)
    return np.array([[(-1.0) ** bin(a & b).count("1") for a in i] for b in i]) / np.sqrt(width)


def index_logits(p: Any, c: Any, x: np.ndarray, latent: np.ndarray) -> np.ndarray:
    """Returns the indexer's logits [B, T, T] of all pairs of queries and keys."""
    positions = np.arange(x.shape[1])
    q = (latent @ p["wq"]["kernel"]).reshape(*x.shape[:2], c.index_heads, c.index_dim)
    k = x @ p["wk"]["kernel"]
    k = k - k.mean(-1, keepdims=True)
    k = rms_norm(k, p["k_norm"], c.norm_eps) + p["k_norm"]["bias"]
    width, layout = c.index_rope_dim, c.index_rope_layout
    q[..., :width] = rope(q[..., :width], positions[:, None], c.rope_base, layout)
    k[..., :width] = rope(k[..., :width], positions, c.rope_base, layout)
    if c.index_hadamard:
        q, k = q @ hadamard(c.index_dim), k @ hadamard(c.index_dim)
    weights = x @ p["weights"]["kernel"] / np.sqrt(c.index_heads) / np.sqrt(c.index_dim)
    return np.einsum("btj,btjs->bts", weights, np.maximum(np.einsum("btjc,bsc->btjs", q, k), 0))


def attention(
    p: Any, c: Any, x: np.ndarray, selected: np.ndarray | None, *, sparse: bool
) -> tuple[np.ndarray, np.ndarray, float | None]:
    """Computes one attention layer.

    Args:
        p: The layer's parameters.
        c: Its `AttentionConfig`.
        x: Hidden states [B, T, M].
        selected: Mask [B, T, T] of an earlier layer's selection, for a layer without an indexer.
        sparse: Whether to attend to the selected keys only.

    Returns:
        The layer's output, the mask [B, T, T] of the selection, and the indexer's KL loss (None
        without an indexer).
    """
    mla, batch, length = p["mla"], *x.shape[:2]
    positions = np.arange(length)
    latent = rms_norm(x @ mla["wq_a"]["kernel"], mla["q_norm"], c.norm_eps)
    q = (latent @ mla["wq_b"]["kernel"]).reshape(batch, length, c.num_heads, -1)
    q_rope = rope(q[..., c.nope_dim :], positions[:, None], c.rope_base, c.rope_layout)
    down = x @ mla["wkv_a"]["kernel"]
    kv = rms_norm(down[..., : c.kv_rank], mla["kv_norm"], c.norm_eps)
    k_rope = rope(down[..., c.kv_rank :], positions, c.rope_base, c.rope_layout)
    k_nope = np.einsum("bse,nep->bsnp", kv, mla["w_uk"])
    v = np.einsum("bse,nev->bsnv", kv, mla["w_uv"])

    mask = np.broadcast_to(positions <= positions[:, None], (batch, length, length))
    scores = None
    if p.get("indexer") is not None:
        scores = np.where(mask, index_logits(p["indexer"], c, x, latent), -np.inf)
        rank = np.argsort(np.argsort(-scores, axis=-1, kind="stable"), axis=-1)
        selected = mask & (rank < c.top_k)
    if sparse:
        mask = selected
    s = np.einsum("btnp,bsnp->btns", q[..., : c.nope_dim], k_nope)
    s = (s + np.einsum("btnr,bsr->btns", q_rope, k_rope)) / np.sqrt(c.nope_dim + c.rope_dim)
    weights = softmax(np.where(mask[:, :, None], s, -np.inf))
    out = np.einsum("btns,bsnv->btnv", weights, v).reshape(batch, length, -1)
    kl = None
    if scores is not None:
        teacher, learner = weights.mean(2), softmax(np.where(mask, scores, -np.inf))
        logs = np.log(np.where(mask, teacher / np.where(mask, learner, 1), 1))
        kl = float((teacher * logs).sum(-1).mean())
    return out @ mla["wo"]["kernel"], selected, kl


def decoder(
    p: Any, config: Any, tokens: np.ndarray, *, sparse: bool
) -> tuple[np.ndarray, list[np.ndarray], list[float | None]]:
    """Returns the logits, and each layer's mask and KL loss as `attention` returns them."""
    c = config.attention
    eps = c.norm_eps if config.norm_eps is None else config.norm_eps
    x = p["embed"]["embedding"][tokens]
    selected, masks, losses = None, [], []
    for i in range(config.num_layers):
        block = p["blocks"][i]
        y = rms_norm(x, block["attention_norm"], eps)
        y, selected, kl = attention(block["attention"], c, y, selected, sparse=sparse)
        x = x + y
        h = rms_norm(x, block["mlp_norm"], eps) @ block["mlp"]["gate_up"]["kernel"]
        gate, up = np.split(h, 2, axis=-1)
        x = x + (gate / (1 + np.exp(-gate)) * up) @ block["mlp"]["down"]["kernel"]
        masks.append(selected)
        losses.append(kl)
    return rms_norm(x, p["norm"], eps) @ p["head"]["kernel"], masks, losses
