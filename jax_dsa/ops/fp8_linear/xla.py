"""The FP8 linear layer in plain JAX."""

from __future__ import annotations

import functools

import jax.numpy as jnp

from jax_dsa.core.typing import Array, Float
from jax_dsa.ops.fp8_linear.spec import (
    BACKWARD_MIN_AMAX,
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
from jax_dsa.ops.quantize_fp8 import spec as quantize
from jax_dsa.ops.quantize_fp8.xla import dequantized, quantize_fp8


def fp8_linear_weights(options: Options, x: WeightValues) -> WeightCodes:
    """Quantises the weights in tiles of 128x128."""
    codes, scale = quantize_fp8(options.w, quantize.Operands(x.w))
    return WeightCodes(codes, codes.swapaxes(1, 2), scale)


def fp8_linear_fwd(options: Options, x: Codes, w: TransposedWeights) -> Product:
    """Returns x @ w of the dequantised operands."""
    values = dequantized(*x, (1, options.block), jnp.float32)
    weights = _values(options, Weights(w.w_transposed.swapaxes(1, 2), w.w_scale))
    return Product(matmul(values, weights).astype(options.dtype))


def fp8_linear_bwd(options: Options, x: Inputs, w: Weights, dy: Product) -> Gradients:
    """Returns the gradients. Blocks lie along the contracted axis; those of the second operand of
    each product also have 128 elements of the other axis.
    """
    row, column, tile = (1, options.block), (options.block, 1), (options.block, options.block)
    dx = matmul(rounded_back(options, dy.out, row), _values(options, w).swapaxes(1, 2))
    rows_x = rounded_back(options, flat_rows(x.x), column)
    dw = matmul(rows_x.swapaxes(1, 2), rounded_back(options, flat_rows(dy.out), tile))
    return Gradients(dx.astype(x.x.dtype), dw.astype(options.w_dtype))


def matmul(a: Float[Array, "b ... K"], b: Float[Array, "b K N"]) -> Float[Array, "b ... N"]:
    """Returns a @ b, accumulated in float32."""
    return jnp.einsum("b...k,bkn->b...n", a, b, preferred_element_type=jnp.float32)


def rounded(
    options: Options,
    x: Float[Array, "... R C"],
    block: tuple[int, int],
    min_amax: float = quantize.MIN_AMAX,
) -> Float[Array, "... R C"]:
    """Returns `x`, quantised and dequantised to float32."""
    quantization = quantize.Options(block, "", "", options.power_of_two_scale, min_amax=min_amax)
    return dequantized(*quantize_fp8(quantization, quantize.Operands(x)), block, jnp.float32)


# Quantises and dequantises an operand of a gradient.
rounded_back = functools.partial(rounded, min_amax=BACKWARD_MIN_AMAX)


def _values(options: Options, w: Weights) -> Float[Array, "b K N"]:
    """Returns the dequantised weights."""
    return dequantized(*w, (options.block, options.block), jnp.float32)
