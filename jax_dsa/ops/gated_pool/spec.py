"""What the pooling of blocks of tokens takes and gives."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

from jax_dsa.core.spec import accumulated, like
from jax_dsa.core.typing import Array, Float, Int


@dataclasses.dataclass(frozen=True)
class Options:
    """Static options."""

    ratio: int
    """Tokens of a block."""

    def result_sizes(self, known: Mapping[str, int]) -> dict[str, int]:
        """Returns the number of keys."""
        return {"w": known["s"] // self.ratio}


class Operands(NamedTuple):
    """What both passes read.

    Attributes:
        values, gates: contributions of the tokens to their block's key; with two halves the first
            to the next block's.
        bias: of the gates, by the token's place in its block.
        starts: the first row of each token's document; None: all have one, from row 0 on.
        scale: of the keys, where a norm follows.
    """

    values: Float[Array, "b s h d"]
    gates: Float[Array, "b s h d"]
    bias: Float[Array, "b r h d"]
    starts: Int[Array, "b s"] | None
    scale: Float[Array, "b d"] | None


class Results(NamedTuple):
    """What comes of the blocks.

    Attributes:
        keys: of the values' dtype, zeros where there is no block.
        squares: with a scale, the sums of the squares of a key's elements before it.
    """

    keys: Float[Array, "b w d", like("values")]
    squares: Float[Array, "b w", accumulated("scale")] | None


class Gradients(NamedTuple):
    """Of the operands in their dtypes."""

    values: Array
    gates: Array
    bias: Array
    scale: Array | None
