"""What top-k takes and gives."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from jax_dsa.core.typing import Array, Float, Int


@dataclasses.dataclass(frozen=True)
class Options:
    """Static options; `size` is S, which the gradient's operands do not show."""

    top_k: int
    size: int
    return_values: bool


class Operands(NamedTuple):
    """Rows, and the half-open range of candidates in each."""

    x: Float[Array, "b t s"]
    starts: Int[Array, "b t"]
    ends: Int[Array, "b t"]


class Results(NamedTuple):
    """Where the largest values are, and, if they are wanted, the values."""

    indices: Int[Array, "b t k"]
    values: Float[Array, "b t k"] | None


class Selected(NamedTuple):
    """What the backward pass reads."""

    indices: Int[Array, "b t k"]


class Gradients(NamedTuple):
    """Of the rows. Their axis S is in none of the operands, so its dims stand here."""

    x: Float[Array, "b t s"]
