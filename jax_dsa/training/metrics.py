"""How good a selection is: the share of the dense attention mass that it holds."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_dsa.core.streaming import chunk_length, scan_chunks
from jax_dsa.core.typing import Array, Float, Int
from jax_dsa.ops.topk import topk


def attention_mass(
    q: Float[Array, "B T N D"],
    kv: Float[Array, "B T 1 D"],
    lse: Float[Array, "B T N"],
    *,
    scale: float,
) -> Float[Array, "B T T"]:
    """Mean over the heads of dense causal attention's probabilities; the rows sum to one.

    For inspection: the result holds a number for every pair of tokens.
    """
    keys = kv[:, :, 0]
    batch, length, heads, _ = q.shape
    rows = jnp.broadcast_to(jnp.arange(length), (batch, length))

    def body(
        _: tuple[()], q: jax.Array, lse: jax.Array, rows: jax.Array
    ) -> tuple[tuple[()], tuple[jax.Array]]:
        scores = jnp.einsum("btnd,bsd->btns", q, keys, preferred_element_type=jnp.float32) * scale
        visible = jnp.arange(length) <= rows[:, :, None]
        mass = jnp.exp(scores - lse[..., None]).mean(2)
        return (), (jnp.where(visible, mass, 0.0),)

    chunk = chunk_length(length, batch * heads * length * 4)
    _, (mass,) = scan_chunks(body, (), (q, lse, rows), chunk=chunk)
    return mass


def mass_recall(mass: Float[Array, "B T T"], indices: Int[Array, "B T K"]) -> Float[Array, ""]:
    """Share of the attention mass that the selected keys hold.

    Averaged over the queries that had to leave keys out (t >= K).
    """
    length, top_k = mass.shape[1], indices.shape[2]
    held = jnp.take_along_axis(mass, jnp.maximum(indices, 0), axis=-1)
    held = jnp.where(indices >= 0, held, 0.0).sum(-1)
    chose = (jnp.arange(length) >= top_k).astype(held.dtype)
    return (held.mean(0) * chose).sum() / jnp.maximum(chose.sum(), 1.0)


def recency_indices(batch: int, length: int, top_k: int) -> Int[Array, "B T K"]:
    """The selection of a sliding window: each query's `top_k` latest keys, its own included."""
    window = jnp.arange(length)[:, None] - jnp.arange(top_k - 1, -1, -1)
    return jnp.broadcast_to(jnp.maximum(window, -1).astype(jnp.int32), (batch, length, top_k))


def random_indices(key: jax.Array, batch: int, length: int, top_k: int) -> Int[Array, "B T K"]:
    """For each query `top_k` of the keys it sees, uniformly and without repetition."""
    scores = jax.random.uniform(key, (batch, length, length))
    ends = jnp.broadcast_to(jnp.arange(1, length + 1, dtype=jnp.int32), (batch, length))
    return topk(scores, top_k, ends=ends)
