"""Options, operands, results and gradients of pooling."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

from jax_dsa.core.spec import accumulated, like
from jax_dsa.core.typing import Array, Float, Int


@dataclasses.dataclass(frozen=True)
class Options:
    """Static options of pooling.

    Attributes:
        ratio: Number of tokens in a block.
    """

    ratio: int

    def result_sizes(self, known: Mapping[str, int]) -> dict[str, int]:
        """Returns the number of keys."""
        return {"w": known["s"] // self.ratio}


class Operands(NamedTuple):
    """The operands of both passes.

    Attributes:
        values: Values that the tokens contribute to the key of their block. With two halves, the
            first half contributes to the key of the next block.
        gates: Gates of the values. None: the values of a block have equal weights, and there is one
            half.
        bias: Bias of the gates, by the token's position in its block; None without gates.
        starts: First row of each token's document; None: one document, from row 0 on.
        scale: Factor of each channel of the keys, if a norm follows.
    """

    values: Float[Array, "b s h d"]
    gates: Float[Array, "b s h d"] | None
    bias: Float[Array, "b r h d"] | None
    starts: Int[Array, "b s"] | None
    scale: Float[Array, "b d"] | None


class Results(NamedTuple):
    """The results of the forward pass.

    Attributes:
        keys: Pooled keys, in the dtype of the values; zeros in slots without a block.
        squares: With a scale, the sum of squares of each key before it is multiplied by the scale.
    """

    keys: Float[Array, "b w d", like("values")]
    squares: Float[Array, "b w", accumulated("scale")] | None


class Gradients(NamedTuple):
    """The gradients of the operands, in the operands' dtypes."""

    values: Array
    gates: Array | None
    bias: Array | None
    scale: Array | None
