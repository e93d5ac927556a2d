"""The FP8 linear layer on its CUDA kernels."""

from __future__ import annotations

import math
from typing import Any

import jax

from jax_dsa.core import ffi
from jax_dsa.core.typing import Array, Float
from jax_dsa.ops.fp8_linear.spec import (
    Codes,
    Gradients,
    Inputs,
    Options,
    Product,
    TransposedWeights,
    WeightCodes,
    Weights,
    WeightValues,
    flat_rows,
)
from jax_dsa.ops.fp8_matmul.cuda import MAX_SIZE, whole_rows
from jax_dsa.ops.quantize_fp8.cuda import (
    quantize_fp8_columns,
    quantize_fp8_tiles_transpose,
    quantize_fp8_transpose,
)


def supports(options: Options, *groups: tuple[Array, ...]) -> str | None:
    """None, or why the kernels do not run this call: of any pass."""
    shapes = [x.shape for group in groups for x in group]
    if any(max(math.prod(rows), cols) > MAX_SIZE for _, *rows, cols in shapes):
        return f"it takes sizes up to {MAX_SIZE}"
    return None


def fp8_linear_weights(options: Options, avals: WeightCodes, x: WeightValues) -> WeightCodes:
    """`xla.fp8_linear_weights`."""
    return WeightCodes(*quantize_fp8_tiles_transpose(x.w, options.power_of_two_scale))


def fp8_linear_fwd(options: Options, avals: Product, x: Codes, w: TransposedWeights) -> Product:
    """`xla.fp8_linear_fwd`."""
    return Product(_product(*x, w.w_transposed, w.w_scale.swapaxes(1, 2), avals.out))


def fp8_linear_bwd(
    options: Options, avals: Gradients, x: Inputs, w: Weights, dy: Product
) -> Gradients:
    """`xla.fp8_linear_bwd`."""
    power = options.power_of_two_scale
    of_x = quantize_fp8_columns(flat_rows(x.x), power)
    of_dy = quantize_fp8_transpose(flat_rows(dy.out), power)
    flat = jax.eval_shape(flat_rows, avals.x)
    dx = _product(of_dy.codes, of_dy.scale, *w, flat).reshape(avals.x.shape)
    dw = _product(
        *of_x,
        of_dy.codes_transposed,
        of_dy.scale_transposed,
        avals.w,
    )
    return Gradients(dx, dw)


def _product(
    a: Float[Array, "b ... K"],
    a_scale: Float[Array, "b ... J"],
    b: Float[Array, "b N K"],
    b_scale: Float[Array, "b I J"],
    aval: Any,
) -> Float[Array, "b ... N"]:
    """a @ b^T; blocks of b are 1x128 or 128x128."""
    operands = (whole_rows(a), a_scale, whole_rows(b), b_scale)
    (out,) = ffi.call("jax_dsa.fp8_matmul.v1", operands, [aval])
    return out
