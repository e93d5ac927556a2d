"""How good a selection is: the share of the dense attention mass that it holds."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_dsa.core.streaming import chunk_length, scan_chunks
from jax_dsa.core.typing import Array, Float, Int
from jax_dsa.ops.attn_dist import attn_dist
from jax_dsa.ops.topk import topk


def selected_mass(
    q: Float[Array, "B T N D"],
    kv: Float[Array, "B T 1 D"],
    lse: Float[Array, "B T N"],
    indices: Int[Array, "B T K"],
    *,
    scale: float,
) -> Float[Array, "B T"]:
    """Share of each query's dense attention mass that its selected keys hold, the mean over the
    heads; `lse` is dense attention's.
    """
    return attn_dist(q, kv, indices, lse, scale=scale).sum(-1) / q.shape[2]


def largest_mass(
    q: Float[Array, "B T N D"],
    kv: Float[Array, "B T 1 D"],
    lse: Float[Array, "B T N"],
    top_k: int,
    *,
    scale: float,
) -> Float[Array, "B T"]:
    """The most that `selected_mass` can be with `top_k` of the keys up to each query's own."""
    keys = kv[:, :, 0]
    batch, length, heads, _ = q.shape
    ends = jnp.broadcast_to(jnp.arange(1, length + 1, dtype=jnp.int32), (batch, length))

    def body(
        _: tuple[()], q: jax.Array, lse: jax.Array, ends: jax.Array
    ) -> tuple[tuple[()], tuple[jax.Array]]:
        scores = jnp.einsum("btnd,bsd->btns", q, keys, preferred_element_type=jnp.float32) * scale
        mass = jnp.exp(scores - lse[..., None]).mean(2)
        indices, largest = topk(mass, top_k, ends=ends, return_values=True)
        return (), (jnp.where(indices >= 0, largest, 0.0).sum(-1),)

    chunk = chunk_length(length, batch * heads * length * 4)
    _, (mass,) = scan_chunks(body, (), (q, lse, ends), chunk=chunk)
    return mass


def mass_recall(mass: Float[Array, "B T"], top_k: int) -> Float[Array, ""]:
    """Mean of `mass` over the queries that had to leave keys out (t >= K)."""
    chose = (jnp.arange(mass.shape[1]) >= top_k).astype(mass.dtype)
    return (mass.mean(0) * chose).sum() / jnp.maximum(chose.sum(), 1.0)


def recency_indices(batch: int, length: int, top_k: int) -> Int[Array, "B T K"]:
    """The selection of a sliding window: each query's `top_k` latest keys, its own included."""
    window = jnp.arange(length)[:, None] - jnp.arange(top_k - 1, -1, -1)
    return jnp.broadcast_to(jnp.maximum(window, -1).astype(jnp.int32), (batch, length, top_k))


def random_indices(key: jax.Array, batch: int, length: int, top_k: int) -> Int[Array, "B T K"]:
    """For each query `top_k` of the keys it sees, uniformly and without repetition."""
    ends = jnp.broadcast_to(jnp.arange(1, length + 1, dtype=jnp.int32), (batch, length))

    def body(_: tuple[()], keys: jax.Array, ends: jax.Array) -> tuple[tuple[()], tuple[jax.Array]]:
        scores = jax.vmap(lambda key: jax.random.uniform(key, (batch, length)), out_axes=1)(keys[0])
        return (), (topk(scores, top_k, ends=ends),)

    xs = jax.random.split(key, length)[None], ends
    chunk = chunk_length(length, batch * length * 4)
    _, (indices,) = scan_chunks(body, (), xs, chunk=chunk)
    return indices
