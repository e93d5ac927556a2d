"""What the FP8 linear layer takes and gives."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp

from jax_dsa.core.spec import CONSTANT, Dtype, like
from jax_dsa.core.typing import Array, Float
from jax_dsa.ops.quantize_fp8 import spec as quantize

BACKWARD_MIN_AMAX = 1e-20
"""Where `quantize_fp8` has 1e-4: the gradients of a mean over thousands of tokens lie below that,
and would have a few codes or none."""


@dataclasses.dataclass(frozen=True)
class Options:
    """Static options. The dims leave out the batch axis.

    Attributes:
        dtype: of the product.
        w_dtype: of the weights, and of their gradient.
        x, w: of the operands' quantisation in the forward pass.
        rows: dims of the rows of x.
        k, k_blocks, n, n_blocks: dims of the axes of w, and of their axes of blocks.
    """

    dtype: Any
    w_dtype: Any
    x: quantize.Options
    w: quantize.Options
    rows: str
    k: str
    k_blocks: str
    n: str
    n_blocks: str
    block: int = quantize.BLOCK

    @property
    def power_of_two_scale(self) -> bool:
        """Of every quantisation."""
        return self.x.power_of_two_scale

    def result_sizes(self, known: Mapping[str, int]) -> dict[str, int]:
        """Returns the sizes of the weights' blocks."""
        return self.w.result_sizes(known)


class Operands(NamedTuple):
    """Values."""

    x: Float[Array, "b {o.rows} {o.k}"]
    w: Float[Array, "b {o.k} {o.n}"]


class Inputs(NamedTuple):
    """The input as the backward pass reads it."""

    x: Float[Array, "b {o.rows} {o.k}"]


class Codes(NamedTuple):
    """The input, quantised along K."""

    x: Float[Array, "b {o.rows} {o.k}"]
    x_scale: Float[Array, "b {o.rows} {o.k_blocks}"]


class WeightValues(NamedTuple):
    """The weights."""

    w: Float[Array, "b {o.k} {o.n}"]


class WeightCodes(NamedTuple):
    """The weights, quantised by tiles, in the layouts of both directions."""

    w: Float[Array, "b {o.k} {o.n}", jnp.float8_e4m3fn]
    w_transposed: Float[Array, "b {o.n} {o.k}", jnp.float8_e4m3fn]
    w_scale: Float[Array, "b {o.k_blocks} {o.n_blocks}", jnp.float32]


class TransposedWeights(NamedTuple):
    """As the forward pass reads them; the scales are not transposed."""

    w_transposed: Float[Array, "b {o.n} {o.k}"]
    w_scale: Float[Array, "b {o.k_blocks} {o.n_blocks}"]


class Weights(NamedTuple):
    """As the backward pass reads them."""

    w: Float[Array, "b {o.k} {o.n}"]
    w_scale: Float[Array, "b {o.k_blocks} {o.n_blocks}"]


class Product(NamedTuple):
    """x @ w."""

    out: Float[Array, "b {o.rows} {o.n}", Dtype(lambda options, _: options.dtype)]


class Results(NamedTuple):
    """The product, and for the backward pass the weights as they were multiplied."""

    out: Float[Array, "b {o.rows} {o.n}"]
    w: Float[Array, "b {o.k} {o.n}", CONSTANT]
    w_scale: Float[Array, "b {o.k_blocks} {o.n_blocks}", CONSTANT]


class Gradients(NamedTuple):
    """Of the operands."""

    x: Float[Array, "b {o.rows} {o.k}", like("x")]
    w: Float[Array, "b {o.k} {o.n}", Dtype(lambda options, _: options.w_dtype)]


def flat_rows(x: Float[Array, "b ... C"]) -> Float[Array, "b R C"]:
    """All rows of a batch entry along one axis."""
    return x.reshape(x.shape[0], math.prod(x.shape[1:-1]), x.shape[-1])
