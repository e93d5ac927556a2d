"""What the FP8 matmul takes and gives."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp

from jax_dsa.core.spec import CONSTANT, Dtype
from jax_dsa.core.typing import Array, Float
from jax_dsa.ops.quantize_fp8 import spec as quantize


@dataclasses.dataclass(frozen=True)
class Options:
    """Static options. The dims leave out the batch axis; K is the contracted axis.

    Attributes:
        dtype: of the product.
        quantized: whether a and b come quantised; else they have gradients.
        a, b: of the operands' quantisation.
        rows: dims of the rows of a.
        n, n_blocks, k, k_blocks: dims of the axes of b, and of their axes of blocks.
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
    """Codes with scales, or values without."""

    a: Float[Array, "b {o.rows} {o.k}"]
    a_scale: Float[Array, "b {o.rows} {o.k_blocks}"] | None
    b: Float[Array, "b {o.n} {o.k}"]
    b_scale: Float[Array, "b {o.n_blocks} {o.k_blocks}"] | None


class Product(NamedTuple):
    """a @ b^T."""

    out: Float[Array, "b {o.rows} {o.n}", Dtype(lambda options, _: options.dtype)]


class Results(NamedTuple):
    """The product, and for the backward pass the operands as they were multiplied."""

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


# Each is the gradient of the operand that the pass does not read; b's is by whole blocks of rows.
class AGradient(NamedTuple):
    """Of the first operand."""

    a: Float[Array, "b {o.rows} {o.k}", jnp.float32]


class BGradient(NamedTuple):
    """Of the second operand."""

    b: Float[Array, "b i {o.k}", jnp.float32]


class RowProduct(NamedTuple):
    """The product's cotangent as the gradient of b reads it: i need not be whole blocks."""

    out: Float[Array, "b {o.rows} i"]


class Gradients(NamedTuple):
    """Of operands that came without a scale."""

    a: Array | None
    b: Array | None
