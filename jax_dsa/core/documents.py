"""Packed documents: a sequence whose tokens belong to several documents, one after the other.

Documents are described by numbers [B, T]. Each run of consecutive equal numbers is a document. A
number may therefore occur again later, as that of padding often does, and means another document
there. All functions work on Explicit mesh axes too.
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


def block_range(
    size: int, starts: Int[Array, "B T"], ends: Int[Array, "B T"]
) -> tuple[Int[Array, "B T"], Int[Array, "B T"]]:
    """Returns the half-open range of the whole blocks of tokens before each `ends`.

    Blocks begin with the first token of a document. Block i of a document that begins at token s
    has the number s // size + i, which is its slot in the result of `gated_pool` and `mean_pool`.

    Args:
        size: Number of tokens in a block.
        starts: First token of each query's document, int32.
        ends: One past the last token that each query sees, int32.
    """
    begin = starts // size
    return begin, begin + (ends - starts) // size


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
