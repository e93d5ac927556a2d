"""Calls of the CUDA kernels of the FP8 linear layer."""

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
from jax_dsa.ops.fp8_matmul.cuda import MAX_SIZE, pad_rows
from jax_dsa.ops.quantize_fp8.cuda import (
    quantize_fp8_columns,
    quantize_fp8_tiles_transpose,
    quantize_fp8_transpose,
)


def supports(options: Options, *groups: tuple[Array, ...]) -> str | None:
    """Returns None, or the reason why the kernels cannot run this call, in any pass."""
    shapes = [x.shape for group in groups for x in group]
    largest = max((max(math.prod(rows), cols) for _, *rows, cols in shapes), default=0)
    if largest > MAX_SIZE:
        return f"it takes sizes up to {MAX_SIZE}, got {largest}"
    return None


def fp8_linear_weights(options: Options, avals: WeightCodes, x: WeightValues) -> WeightCodes:
    """Computes `xla.fp8_linear_weights`."""
    return WeightCodes(*quantize_fp8_tiles_transpose(x.w, options.power_of_two_scale))


def fp8_linear_fwd(options: Options, avals: Product, x: Codes, w: TransposedWeights) -> Product:
    """Computes `xla.fp8_linear_fwd`."""
    return Product(_product(*x, w.w_transposed, w.w_scale.swapaxes(1, 2), avals.out))


def fp8_linear_bwd(
    options: Options, avals: Gradients, x: Inputs, w: Weights, dy: Product
) -> Gradients:
    """Computes `xla.fp8_linear_bwd`."""
    power = options.power_of_two_scale
    x_codes = quantize_fp8_columns(flat_rows(x.x), power)
    dy_codes = quantize_fp8_transpose(flat_rows(dy.out), power)
    flat_dx = jax.eval_shape(flat_rows, avals.x)
    dx = _product(dy_codes.codes, dy_codes.scale, *w, flat_dx).reshape(avals.x.shape)
    dw = _product(
        *x_codes,
        dy_codes.codes_transposed,
        dy_codes.scale_transposed,
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
    """Returns a @ b^T. Blocks of a are 1x128 and those of b 128x128."""
    operands = (pad_rows(a), a_scale, pad_rows(b), b_scale)
    (out,) = ffi.call("jax_dsa.fp8_matmul.v1", operands, [aval])
    return out
