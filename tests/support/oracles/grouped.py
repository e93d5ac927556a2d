"""The losses of indexers of blocks in float64, with a mask of all queries and keys."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def seen_tokens(c: Any, blocks: Any, starts: np.ndarray) -> np.ndarray:
    """Returns which tokens each KV head of each query attends to, [B, T, G, T].

    Args:
        c: Configuration of the layer.
        blocks: The selected blocks; None: all keys up to the query's own.
        starts: First token of each query's document.
    """
    batch, length = starts.shape
    seen = np.zeros((batch, length, c.kv_heads, length), bool)
    for b, t, g in np.ndindex(batch, length, c.kv_heads):
        first = int(starts[b, t])
        if blocks is None:
            seen[b, t, g, first : t + 1] = True
            continue
        for j in blocks[b, t, g] if blocks.ndim == 4 else blocks[b, t]:
            begin = first + int(j) * c.block_size
            if j >= 0:
                seen[b, t, g, begin : min(begin + c.block_size, t + 1)] = True
        if c.indexer == "mean":  # The tokens after the last complete block.
            seen[b, t, g, t + 1 - (t + 1 - first) % c.block_size : t + 1] = True
    return seen


def members(c: Any, blocks: Any, starts: np.ndarray) -> np.ndarray:
    """Returns which tokens belong to each block that takes part in the loss, [B, T, W, T].

    W counts the slots of `mean_pool`. The arguments are those of `seen_tokens`; None means all
    complete blocks.
    """
    batch, length = starts.shape
    size = c.block_size
    found = np.zeros((batch, length, length // size, length), bool)
    for b, t in np.ndindex(batch, length):
        first = int(starts[b, t])
        complete = range((t + 1 - first) // size)
        for j in complete if blocks is None else blocks[b, t]:
            if j >= 0:
                begin = first + int(j) * size
                found[b, t, first // size + int(j), begin : begin + size] = True
    return found


def softmax(scores: Any, mask: np.ndarray) -> Any:
    """Returns the softmax over the last axis where `mask` is True, and 0 elsewhere."""
    scores = jnp.where(mask, scores, -jnp.inf)
    top = jnp.max(scores, axis=-1, keepdims=True)
    e = jnp.where(mask, jnp.exp(scores - jnp.where(mask.any(-1, keepdims=True), top, 0)), 0)
    return e / jnp.maximum(e.sum(-1, keepdims=True), 1e-300)


def divergence(p: Any, student: Any, mask: np.ndarray) -> Any:
    """Returns the mean of KL(p || student) over the rows that have an element."""
    ratio = jnp.where(mask & (p > 0), p, 1) / jnp.where(mask & (p > 0), student, 1)
    rows = jnp.sum(jnp.where(mask, p * jnp.log(ratio), 0), axis=-1)
    return jnp.sum(rows) / mask.any(-1).sum()


def loss(
    c: Any, index_q: Any, index_k: Any, q: Any, k: Any, blocks: Any, starts: np.ndarray
) -> tuple[float, np.ndarray, np.ndarray]:
    """Returns the loss and its gradients for `index_q` and `index_k`.

    `index_k` has a key per token with "max", and one per slot of `mean_pool` with "mean". `blocks`
    is None in the warm-up.
    """
    batch, length, heads, _ = q.shape
    groups = c.kv_heads
    with jax.enable_x64(True):
        index_q, index_k, q, k = (jnp.asarray(x, jnp.float64) for x in (index_q, index_k, q, k))
        seen = seen_tokens(c, blocks, starts)
        q = q.reshape(batch, length, groups, heads // groups, -1)
        scores = jnp.einsum("btgmd,bsgd->btgms", q, k) * c.head_dim**-0.5
        attended = softmax(scores, np.broadcast_to(seen[:, :, :, None], scores.shape))

        def of(index_q: Any, index_k: Any) -> Any:
            z = jnp.einsum("btjc,bsc->btjs", index_q, index_k) * c.index_dim**-0.5
            if c.indexer == "max":
                return divergence(attended.mean(3), softmax(z, seen), seen)
            pools = members(c, blocks, starts)
            mass = jnp.einsum("btgms,btws->btw", attended, pools)
            valid = pools.any(-1)
            p = mass / jnp.maximum(mass.sum(-1, keepdims=True), 1e-300)
            return divergence(p, softmax(jnp.maximum(z, 0).sum(2), valid), valid)

        value, grads = jax.value_and_grad(of, (0, 1))(index_q, index_k)
        return float(value), *(np.asarray(x) for x in grads)
