"""Operands, results and static options of top-k."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp

from jax_dsa.core.spec import Dtype, like
from jax_dsa.core.typing import Array, Float, Int


@dataclasses.dataclass(frozen=True)
class Options:
    """Static options.

    Attributes:
        top_k: Number of selected values per row.
        size: Length S of a row, which the operands of the backward pass do not show.
        return_values: Whether the selected values are returned, too.
    """

    top_k: int
    size: int
    return_values: bool

    def result_sizes(self, _: Mapping[str, int]) -> dict[str, int]:
        """Returns the lengths of a row and of its selection."""
        return {"k": self.top_k, "s": self.size}


@dataclasses.dataclass(frozen=True)
class Blocks:
    """How blocks of keys are selected; the static options of `block_topk`.

    Attributes:
        top_k: Number of selected blocks per row, forced blocks included.
        block_size: Number of keys per block.
        sink_blocks: Number of first blocks that are forced.
        local_blocks: Number of newest blocks that are forced.
    """

    top_k: int
    block_size: int
    sink_blocks: int
    local_blocks: int

    def result_sizes(self, _: Mapping[str, int]) -> dict[str, int]:
        """Returns the number of selected blocks."""
        return {"k": self.top_k}


def clipped_block(block_size: int, size: int) -> int:
    """Returns the size of a block, at most that of all keys, so that padding stays small."""
    return min(block_size, max(1, size)) if isinstance(size, int) else block_size


class Operands(NamedTuple):
    """Rows, and the half-open range of candidates of each row."""

    x: Float[Array, "b t s"]
    starts: Int[Array, "b t"]
    ends: Int[Array, "b t"]


def _values_dtype(options: Options, x: Operands) -> Any:
    return x.x.dtype if options.return_values else None


class Results(NamedTuple):
    """Indices of the largest values, and optionally the values."""

    indices: Int[Array, "b t k", jnp.int32]
    values: Float[Array, "b t k", Dtype(_values_dtype)] | None


class Selected(NamedTuple):
    """Operands of the backward pass."""

    indices: Int[Array, "b t k"]


class BlockOperands(NamedTuple):
    """Logits of keys, and the half-open range of keys of each row.

    Blocks count from `starts`. If that is None, they count from key 0.
    """

    logits: Float[Array, "b t s"]
    starts: Int[Array, "b t"] | None
    ends: Int[Array, "b t"]


class BlockResults(NamedTuple):
    """Numbers of the selected blocks."""

    indices: Int[Array, "b t k", jnp.int32]


class Gradients(NamedTuple):
    """Gradient of the rows. No operand has the axis S, so the dimensions are declared here."""

    x: Float[Array, "b t s", like("values")]
