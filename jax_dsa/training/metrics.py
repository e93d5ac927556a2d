"""Measures how good a selection is: the fraction of dense attention's mass that it holds.

In all functions of this module, a query sees the keys in [starts, ends). By default, starts is 0
and ends is the query's own position plus one.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jax_dsa.core.checks import FLOATS, INT32, WIDE_FLOATS, Args
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
    """Returns the probabilities of dense causal attention, averaged over the heads.

    The result has one number for each pair of a query and a key, so this function is meant for
    inspection at moderate sizes.

    Args:
        q: Queries.
        kv: Latent keys, shared by all heads.
        lse: Log-sum-exp of each query and head, from the attention's forward pass.
        scale: Factor of the scores.
        starts: First visible key of each query, int32. Default: 0.
        ends: Exclusive end of the visible keys, int32. Default: the query's position plus one.

    Returns:
        The attention mass, float32 [B, T, S]. Each row sums to one.

    Raises:
        TypeError, ValueError: If an argument has the wrong type or shape.
    """
    args = Args("attention_mass", "q", q, "B T N D")
    q = args.array("q", q, "B T N D", FLOATS)
    keys = args.array("kv", kv, "B S 1 D", FLOATS)[:, :, 0]
    lse = args.array("lse", lse, "B T N", WIDE_FLOATS)
    scale = args.real("scale", scale)
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
    ranges = _checked_ranges(args, starts, ends)
    _, (mass,) = scan_chunks(body, (), (q, lse, *ranges), chunk=chunk)
    return args.restore(mass)


def mass_recall(
    mass: Float[Array, "B T S"],
    indices: Int[Array, "B T K"],
    starts: Int[Array, "B T"] | None = None,
    ends: Int[Array, "B T"] | None = None,
) -> Float[Array, ""]:
    """Returns the fraction of the attention mass that the selected keys hold.

    The mean is taken over the queries that see more than K keys, because only these have to leave
    keys out. Without such a query the result is 0.

    Args:
        mass: Attention mass of each query and key; see `attention_mass`.
        indices: The selected keys, -1 in empty slots.
        starts: First visible key of each query, int32. Default: 0.
        ends: Exclusive end of the visible keys, int32. Default: the query's position plus one.

    Returns:
        A scalar in 0..1, float32.

    Raises:
        TypeError, ValueError: If an argument has the wrong type or shape.
    """
    args = Args("mass_recall", "mass", mass, "B T S")
    mass = args.array("mass", mass, "B T S", WIDE_FLOATS)
    indices = args.array("indices", indices, "B T K", INT32)
    top_k = indices.shape[-1]
    held = jnp.take_along_axis(mass, jnp.maximum(indices, 0), axis=-1)
    held = jnp.where(indices >= 0, held, 0.0).sum(-1)
    first, stop = _checked_ranges(args, starts, ends)
    counted = (stop - first > top_k).astype(held.dtype)
    return (held * counted).sum() / jnp.maximum(counted.sum(), 1.0)


def recency_indices(
    batch: int,
    queries: int,
    top_k: int,
    starts: Int[Array, "B T"] | None = None,
    ends: Int[Array, "B T"] | None = None,
) -> Int[Array, "B T K"]:
    """Returns the selection of a sliding window: the latest keys of each query, with its own.

    Args:
        batch: Batch size.
        queries: Queries per sequence.
        top_k: Number of keys, at least 1.
        starts: First visible key of each query, int32. Default: 0.
        ends: Exclusive end of the visible keys, int32. Default: the query's position plus one.

    Returns:
        Ascending indices, int32, with -1 in front where fewer keys are visible.

    Raises:
        ValueError: If `top_k` < 1.
    """
    _check_top_k("recency_indices", top_k)
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
    """Returns random keys for each query, drawn uniformly and without repetition.

    Args:
        key: Random key.
        batch: Batch size.
        keys: Keys per sequence. Without `ends` there are as many queries.
        top_k: Number of keys, at least 1.
        starts: First visible key of each query, int32. Default: 0.
        ends: Exclusive end of the visible keys, int32. Default: the query's position plus one.

    Returns:
        Ascending indices, int32, with -1 at the end where fewer keys are visible.

    Raises:
        ValueError: If `top_k` < 1.
    """
    _check_top_k("random_indices", top_k)
    queries = keys if ends is None else ends.shape[1]
    scores = jax.random.uniform(key, (batch, queries, keys))
    starts, ends = _ranges(batch, queries, starts, ends)
    return topk(scores, top_k, starts=starts, ends=ends)


def _check_top_k(function: str, top_k: int) -> None:
    if top_k < 1:
        raise ValueError(f"{function}: argument 'top_k' is {top_k}, expected at least 1")


def _checked_ranges(args: Args, starts: Any, ends: Any) -> tuple[jax.Array, jax.Array]:
    """Returns the checked arguments 'starts' and 'ends' with their defaults filled in."""
    starts, ends = (
        None if x is None else args.array(name, x, "B T", INT32)
        for name, x in (("starts", starts), ("ends", ends))
    )
    return _ranges(args.batch, args.sizes["T"], starts, ends)


def _ranges(batch: int, queries: int, starts: Any, ends: Any) -> tuple[jax.Array, jax.Array]:
    """Returns starts and ends with their defaults filled in."""
    rows = jnp.broadcast_to(jnp.arange(1, queries + 1, dtype=jnp.int32), (batch, queries))
    return jnp.zeros_like(rows) if starts is None else starts, rows if ends is None else ends
