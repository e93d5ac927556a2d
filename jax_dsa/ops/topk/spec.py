"""What top-k takes and gives."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp

from jax_dsa.core.spec import Dtype, like
from jax_dsa.core.typing import Array, Float, Int


@dataclasses.dataclass(frozen=True)
class Options:
    """Static options; `size` is S, which the gradient's operands do not show."""

    top_k: int
    size: int
    return_values: bool

    def result_sizes(self, _: Mapping[str, int]) -> dict[str, int]:
        """Returns the lengths of a row and of its selection."""
        return {"k": self.top_k, "s": self.size}


class Operands(NamedTuple):
    """Rows, and the half-open range of candidates in each."""

    x: Float[Array, "b t s"]
    starts: Int[Array, "b t"]
    ends: Int[Array, "b t"]


def _values_dtype(options: Options, x: Operands) -> Any:
    return x.x.dtype if options.return_values else None


class Results(NamedTuple):
    """Where the largest values are, and, if they are wanted, the values."""

    indices: Int[Array, "b t k", jnp.int32]
    values: Float[Array, "b t k", Dtype(_values_dtype)] | None


class Selected(NamedTuple):
    """What the backward pass reads."""

    indices: Int[Array, "b t k"]


class Gradients(NamedTuple):
    """Of the rows. Their axis S is in none of the operands, so its dims stand here."""

    x: Float[Array, "b t s", like("values")]
