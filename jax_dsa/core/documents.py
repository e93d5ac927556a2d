"""Packed documents: a sequence whose tokens belong to several documents, one after the other.

Documents are described by numbers [B, T]. Each run of consecutive equal numbers is a document. A
number may therefore occur again later, as that of padding often does, and means another document
there. Both functions work on Explicit mesh axes too.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_dsa.core import compat
from jax_dsa.core.typing import Array, Int


def document_starts(ids: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """Returns the index of the first token of each token's document.

    The index also identifies the document within its sequence.
    """
    return compat.left_to_compiler(_starts, ids)(ids)


def document_ends(ids: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """Returns one past the index of the last token of each token's document."""
    return compat.left_to_compiler(_ends, ids)(ids)


@jax.jit
def _starts(ids: Array) -> Array:
    begins = ids != jnp.roll(ids, 1, axis=1)
    return jax.lax.cummax(jnp.where(begins, _order(ids), 0), axis=1)


@jax.jit
def _ends(ids: Array) -> Array:
    is_last = ids != jnp.roll(ids, -1, axis=1)
    stops = jnp.where(is_last, _order(ids) + 1, ids.shape[1])
    return jax.lax.cummin(stops, axis=1, reverse=True)


def _order(ids: Array) -> Array:
    return jnp.broadcast_to(jnp.arange(ids.shape[1], dtype=jnp.int32), ids.shape)
