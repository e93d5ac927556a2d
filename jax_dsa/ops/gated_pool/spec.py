"""What the pooling of blocks of tokens takes and gives."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from jax_dsa.core.typing import Array, Float, Int


@dataclasses.dataclass(frozen=True)
class Options:
    """Static options."""

    ratio: int
    """Tokens of a block."""


class Operands(NamedTuple):
    """What both passes read.

    Attributes:
        values, gates: contributions of the tokens to their block's key; with two halves the first
            to the next block's.
        bias: of the gates, by the token's place in its block.
        starts: the first row of each token's document; None: all have one, from row 0 on.
    """

    values: Float[Array, "b s h d"]
    gates: Float[Array, "b s h d"]
    bias: Float[Array, "b r h d"]
    starts: Int[Array, "b s"] | None


class Results(NamedTuple):
    """Keys of the values' dtype, zeros where there is no block."""

    keys: Float[Array, "b w d"]


class Gradients(NamedTuple):
    """Of the operands in their dtypes."""

    values: Array
    gates: Array
    bias: Array
