"""Positions of a layer's tokens and the documents that they belong to."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp

from jax_dsa.core.checks import FLOATS, INT32, Args
from jax_dsa.core.documents import document_starts
from jax_dsa.core.typing import Array, Float, Int
from jax_dsa.nn.stripes import striped, unstriped


class TokenPositions(NamedTuple):
    """The rotary position of each token and the range of keys that it may attend to.

    Attributes:
        starts: First key of each token's document; None if each sequence is one document.
        ends: One past each token's index in the sequence; None if tokens are stored in this order.
    """

    positions: Int[Array, "B T"]
    starts: Int[Array, "B T"] | None
    ends: Int[Array, "B T"] | None


def token_positions(
    op: str,
    x: Float[Array, "B T M"],
    positions: Int[Array, "B T"] | None,
    segment_ids: Int[Array, "B T"] | None,
    stripes: int = 1,
) -> TokenPositions:
    """Checks a layer's arguments of these names and returns the positions of its tokens.

    Args:
        op: Name of the layer, for error messages.
        x: Hidden states, floating point.
        positions: Rotary positions, int32. By default each document counts from 0.
        segment_ids: Document numbers, int32; a run of equal numbers is a document. By default each
            sequence is one document.
        stripes: Number of stripes that the sequence is stored in.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument has the wrong shape, or `stripes` does not divide T.
    """
    args = Args(op, "x", x, "B T M")
    args.array("x", x, "B T M", FLOATS)
    stripes = args.integer("stripes", stripes, 1)
    args.option("stripes", stripes, x.shape[1] % stripes == 0, f"a divisor of T = {x.shape[1]}")
    order = jnp.broadcast_to(jnp.arange(x.shape[1], dtype=jnp.int32), x.shape[:2])
    order = striped(order, stripes)
    ends = None if stripes == 1 else order + 1
    starts = None
    if segment_ids is not None:
        ids = unstriped(args.array("segment_ids", segment_ids, "B T", INT32), stripes)
        starts = striped(document_starts(ids), stripes)
    if positions is not None:
        positions = args.array("positions", positions, "B T", INT32)
    else:
        positions = order if starts is None else order - starts
    return TokenPositions(positions, starts, ends)
