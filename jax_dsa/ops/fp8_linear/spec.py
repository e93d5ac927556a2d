"""Options, operands, results and gradients of the FP8 linear layer."""

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
"""The minimum for operands of gradients, in place of `MIN_AMAX`. The gradients of a mean over
thousands of tokens are below 1e-4 and would be rounded to a few codes or to zero."""


@dataclasses.dataclass(frozen=True)
class Options:
    """Static options. Dims do not include the batch axis.

    Attributes:
        dtype: Dtype of the product.
        w_dtype: Dtype of the weights and of their gradient.
        x, w: Options of the quantisation of each operand in the forward pass.
        rows: Dims of the leading axes of x.
        k, n: Dims of the axes of w.
        k_blocks, n_blocks: Dims of the axes of w's scales.
        block: Elements of a block along each axis.
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
        """Whether scales of all operands are rounded up to powers of two."""
        return self.x.power_of_two_scale

    def result_sizes(self, known: Mapping[str, int]) -> dict[str, int]:
        """Returns the sizes of the weights' blocks."""
        return self.w.result_sizes(known)


class Operands(NamedTuple):
    """The input and the weights, not quantised."""

    x: Float[Array, "b {o.rows} {o.k}"]
    w: Float[Array, "b {o.k} {o.n}"]


class Inputs(NamedTuple):
    """The input for the backward pass, not quantised."""

    x: Float[Array, "b {o.rows} {o.k}"]


class Codes(NamedTuple):
    """The input, quantised in blocks of 1x128."""

    x: Float[Array, "b {o.rows} {o.k}"]
    x_scale: Float[Array, "b {o.rows} {o.k_blocks}"]


class WeightValues(NamedTuple):
    """The weights, not quantised."""

    w: Float[Array, "b {o.k} {o.n}"]


class WeightCodes(NamedTuple):
    """The weights, quantised in tiles of 128x128, with the codes in the layouts of both passes."""

    w: Float[Array, "b {o.k} {o.n}", jnp.float8_e4m3fn]
    w_transposed: Float[Array, "b {o.n} {o.k}", jnp.float8_e4m3fn]
    w_scale: Float[Array, "b {o.k_blocks} {o.n_blocks}", jnp.float32]


class TransposedWeights(NamedTuple):
    """The quantised weights for the forward pass. Only the codes are transposed."""

    w_transposed: Float[Array, "b {o.n} {o.k}"]
    w_scale: Float[Array, "b {o.k_blocks} {o.n_blocks}"]


class Weights(NamedTuple):
    """The quantised weights for the backward pass."""

    w: Float[Array, "b {o.k} {o.n}"]
    w_scale: Float[Array, "b {o.k_blocks} {o.n_blocks}"]


class Product(NamedTuple):
    """The product x @ w."""

    out: Float[Array, "b {o.rows} {o.n}", Dtype(lambda options, _: options.dtype)]


class Results(NamedTuple):
    """The product, and the quantised weights for the backward pass."""

    out: Float[Array, "b {o.rows} {o.n}"]
    w: Float[Array, "b {o.k} {o.n}", CONSTANT]
    w_scale: Float[Array, "b {o.k_blocks} {o.n_blocks}", CONSTANT]


class Gradients(NamedTuple):
    """The gradients of the operands."""

    x: Float[Array, "b {o.rows} {o.k}", like("x")]
    w: Float[Array, "b {o.k} {o.n}", Dtype(lambda options, _: options.w_dtype)]


def flat_rows(x: Float[Array, "b ... C"]) -> Float[Array, "b R C"]:
    """Returns `x` with all rows of a batch entry along one axis."""
    return x.reshape(x.shape[0], math.prod(x.shape[1:-1]), x.shape[-1])
