"""Ring buffers that hold the last R rows of each request: position p is in row p mod R."""

from __future__ import annotations

import jax.numpy as jnp

from jax_dsa.core import compat
from jax_dsa.core.layout import put_rows
from jax_dsa.core.typing import Array, Float, Int


def rows_after_concatenation(
    size: int, positions: Int[Array, "B *n"], lengths: Int[Array, "B"]
) -> Int[Array, "B *n"]:
    """Returns the rows of positions in `jnp.concatenate([ring, new], axis=1)`.

    A position that neither the ring nor the new rows hold gets an arbitrary row.

    Args:
        size: R, the number of rows of the ring.
        positions: Positions in each request, int32.
        lengths: Position of each request's first new row, int32.
    """
    lengths = jnp.expand_dims(lengths, tuple(range(1, positions.ndim)))
    in_ring = positions % max(1, size)
    return jnp.where(positions < lengths, in_ring, size + positions - lengths)


def rows_of_ring_and_new(
    ring: Float[Array, "B R D"],
    new: Float[Array, "B T D"],
    positions: Int[Array, "B n"],
    lengths: Int[Array, "B"],
) -> Float[Array, "B n D"]:
    """Returns the rows at some positions, from the ring or from the new rows.

    The row of a position that is in neither of them is arbitrary.

    Args:
        ring: The last R rows before the new ones.
        new: The new rows.
        positions: Positions in each request, int32.
        lengths: Position of each request's first new row, int32.
    """

    def rows(ring: Array, new: Array, positions: Array, lengths: Array) -> Array:
        joined = jnp.concatenate([ring, new], axis=1)
        found = rows_after_concatenation(ring.shape[1], positions, lengths)
        return jnp.take_along_axis(joined, found[..., None], axis=1, mode="clip")

    return compat.left_to_compiler(rows, new)(ring, new, positions, lengths)


def put_in_ring(
    ring: Float[Array, "B R *d"],
    new: Float[Array, "B T *d"],
    lengths: Int[Array, "B"],
    counts: Int[Array, "B"],
) -> Float[Array, "B R *d"]:
    """Returns the ring with the first `counts` new rows of each request.

    Args:
        ring: The ring before.
        new: The new rows.
        lengths: Position of each request's first new row, int32.
        counts: Number of new rows that each request gets, int32, 0 to T.
    """
    size = ring.shape[1]
    step = jnp.arange(new.shape[1], dtype=jnp.int32)
    # Of several new rows for one row of the ring, only the last one is written.
    is_kept = (step < counts[:, None]) & (step >= counts[:, None] - size)
    rows = (lengths[:, None] + step) % max(1, size)
    return put_rows(ring, jnp.where(is_kept, rows, -1), new)
