"""Options, operands, results and gradients of the FP8 matmul."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp

from jax_dsa.core.spec import CONSTANT, Dtype
from jax_dsa.core.typing import Array, Float
from jax_dsa.ops.quantize_fp8 import spec as quantize


@dataclasses.dataclass(frozen=True)
class Options:
    """Static options. Dims do not include the batch axis. K is the contracted axis.

    Attributes:
        dtype: Dtype of the product.
        quantized: Whether the caller has quantised a and b. An operand has a gradient only if the
            caller has not.
        a, b: Options of the quantisation of each operand.
        rows: Dims of the leading axes of a.
        n, k: Dims of the axes of b.
        n_blocks, k_blocks: Dims of the axes of b's scales.
        block: Elements of a block along N and K.
    """

    dtype: Any
    quantized: tuple[bool, bool]
    a: quantize.Options
    b: quantize.Options
    rows: str
    n: str
    n_blocks: str
    k: str
    k_blocks: str
    block: int = quantize.BLOCK


class Operands(NamedTuple):
    """Each operand is either codes with scales, or values without."""

    a: Float[Array, "b {o.rows} {o.k}"]
    a_scale: Float[Array, "b {o.rows} {o.k_blocks}"] | None
    b: Float[Array, "b {o.n} {o.k}"]
    b_scale: Float[Array, "b {o.n_blocks} {o.k_blocks}"] | None


class Product(NamedTuple):
    """The product a @ b^T."""

    out: Float[Array, "b {o.rows} {o.n}", Dtype(lambda options, _: options.dtype)]


class Results(NamedTuple):
    """The product, and the quantised operands for the backward pass."""

    out: Float[Array, "b {o.rows} {o.n}"]
    a: Float[Array, "b {o.rows} {o.k}", CONSTANT]
    a_scale: Float[Array, "b {o.rows} {o.k_blocks}", CONSTANT]
    b: Float[Array, "b {o.n} {o.k}", CONSTANT]
    b_scale: Float[Array, "b {o.n_blocks} {o.k_blocks}", CONSTANT]


class A(NamedTuple):
    """The first operand, quantised."""

    a: Float[Array, "b {o.rows} {o.k}"]
    a_scale: Float[Array, "b {o.rows} {o.k_blocks}"]


class B(NamedTuple):
    """The second operand, quantised."""

    b: Float[Array, "b {o.n} {o.k}"]
    b_scale: Float[Array, "b {o.n_blocks} {o.k_blocks}"]


class AGradient(NamedTuple):
    """The gradient of the first operand."""

    a: Float[Array, "b {o.rows} {o.k}", jnp.float32]


class BGradient(NamedTuple):
    """The gradient of the second operand."""

    b: Float[Array, "b i {o.k}", jnp.float32]


class RowProduct(NamedTuple):
    """The cotangent of the product for the gradient of b.

    N is named `i`, so that it can be sharded at any row, not only between blocks.
    """

    out: Float[Array, "b {o.rows} i"]


class Gradients(NamedTuple):
    """The gradients of operands without a scale; None for the others."""

    a: Array | None
    b: Array | None
