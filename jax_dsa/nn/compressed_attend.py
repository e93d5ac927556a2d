"""Attention to the keys of a window and to compressed keys, given the lists of selected keys."""

from __future__ import annotations

import jax.numpy as jnp

from jax_dsa.core.typing import Array, Float, Int
from jax_dsa.ops.cache import FlatCache
from jax_dsa.ops.sparse_mla import sparse_mla, sparse_mla_decode

FEW_QUERIES = 16
"""Up to so many queries of each request, a call of `decode` is a decode step, not a prefill."""


def attend(
    q: Float[Array, "B T N D"],
    kv: Float[Array, "B S D"],
    indices: Int[Array, "B T K"],
    sinks: Float[Array, "N"],
) -> tuple[Float[Array, "B T N D"], Float[Array, "B T N"]]:
    """Returns the heads' outputs over the keys at `indices`, and their lse."""
    dim = q.shape[3]
    return sparse_mla(
        *(q, kv[:, :, None], indices),
        value_dim=dim,
        scale=dim**-0.5,
        sinks=sinks,
        return_lse=True,
    )


def attend_to_caches(
    q: Float[Array, "B T N D"],
    recent: Float[Array, "B R D"],
    slots: Int[Array, "B T V"],
    compressed: Float[Array, "B W D"] | None,
    indices: Int[Array, "B T K"] | None,
    sinks: Float[Array, "N"],
) -> Float[Array, "B T N D"]:
    """Returns the heads' outputs over rows of `recent` and over compressed keys, if there are any.

    A decode step reads only the keys that it selects. A prefill copies all compressed keys behind
    the recent ones, because the CUDA kernels take one array of keys.
    """
    if compressed is None or indices is None:
        return attend(q, recent, slots, sinks)[0]
    queries, dim = q.shape[1], q.shape[3]
    if not isinstance(queries, int) or queries > FEW_QUERIES:
        selected = jnp.where(indices >= 0, indices + recent.shape[1], -1)
        joined = jnp.concatenate([recent, compressed], axis=1)
        return attend(q, joined, jnp.concatenate([slots, selected], axis=-1), sinks)[0]
    window, entries = (
        FlatCache(x[:, :, None], jnp.full(x.shape[0], x.shape[1], jnp.int32))
        for x in (recent, compressed)
    )
    return sparse_mla_decode(
        *(q, window, slots),
        extra_cache=entries,
        extra_indices=indices,
        value_dim=dim,
        scale=dim**-0.5,
        sinks=sinks,
    )
