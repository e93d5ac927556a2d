"""How good a selection is: the share of the dense attention mass that it holds.

Everywhere the queries see the keys from `starts` (by default 0) to `ends` (by default one past
their own number).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jax_dsa.core.streaming import chunk_length, scan_chunks
from jax_dsa.core.typing import Array, Float, Int
from jax_dsa.ops.topk import topk


def attention_mass(
    q: Float[Array, "B T N D"],
    kv: Float[Array, "B S 1 D"],
    lse: Float[Array, "B T N"],
    *,
    scale: float,
    starts: Int[Array, "B T"] | None = None,
    ends: Int[Array, "B T"] | None = None,
) -> Float[Array, "B T S"]:
    """Mean over the heads of dense causal attention's probabilities; the rows sum to one.

    For inspection: the result holds a number for every query and key.
    """
    keys = kv[:, :, 0]
    batch, queries, heads, _ = q.shape
    key = jnp.arange(keys.shape[1])

    def body(
        _: tuple[()], q: jax.Array, lse: jax.Array, starts: jax.Array, ends: jax.Array
    ) -> tuple[tuple[()], tuple[jax.Array]]:
        scores = jnp.einsum("btnd,bsd->btns", q, keys, preferred_element_type=jnp.float32) * scale
        visible = (key >= starts[:, :, None]) & (key < ends[:, :, None])
        mass = jnp.exp(scores - lse[..., None]).mean(2)
        return (), (jnp.where(visible, mass, 0.0),)

    chunk = chunk_length(queries, batch * heads * keys.shape[1] * 4)
    ranges = _ranges(batch, queries, starts, ends)
    _, (mass,) = scan_chunks(body, (), (q, lse, *ranges), chunk=chunk)
    return mass


def mass_recall(
    mass: Float[Array, "B T S"],
    indices: Int[Array, "B T K"],
    starts: Int[Array, "B T"] | None = None,
    ends: Int[Array, "B T"] | None = None,
) -> Float[Array, ""]:
    """Share of the attention mass that the selected keys hold.

    Averaged over the queries that had to leave keys out: those that see more than K.
    """
    batch, queries, top_k = indices.shape
    held = jnp.take_along_axis(mass, jnp.maximum(indices, 0), axis=-1)
    held = jnp.where(indices >= 0, held, 0.0).sum(-1)
    first, stop = _ranges(batch, queries, starts, ends)
    chose = (stop - first > top_k).astype(held.dtype)
    return (held * chose).sum() / jnp.maximum(chose.sum(), 1.0)


def recency_indices(
    batch: int,
    queries: int,
    top_k: int,
    starts: Int[Array, "B T"] | None = None,
    ends: Int[Array, "B T"] | None = None,
) -> Int[Array, "B T K"]:
    """The selection of a sliding window: each query's `top_k` latest keys, its own included."""
    first, stop = _ranges(batch, queries, starts, ends)
    window = stop[..., None] + jnp.arange(-top_k, 0, dtype=jnp.int32)
    return jnp.where(window >= first[..., None], window, -1)


def random_indices(
    key: jax.Array,
    batch: int,
    keys: int,
    top_k: int,
    starts: Int[Array, "B T"] | None = None,
    ends: Int[Array, "B T"] | None = None,
) -> Int[Array, "B T K"]:
    """For each query `top_k` of the keys it sees, uniformly and without repetition; by default for
    as many queries as keys.
    """
    queries = keys if ends is None else ends.shape[1]
    scores = jax.random.uniform(key, (batch, queries, keys))
    starts, ends = _ranges(batch, queries, starts, ends)
    return topk(scores, top_k, starts=starts, ends=ends)


def _ranges(batch: int, queries: int, starts: Any, ends: Any) -> tuple[jax.Array, jax.Array]:
    rows = jnp.broadcast_to(jnp.arange(1, queries + 1, dtype=jnp.int32), (batch, queries))
    return jnp.zeros_like(rows) if starts is None else starts, rows if ends is None else ends
