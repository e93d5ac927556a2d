"""FP8 quantisation and dequantisation in plain JAX."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jax_dsa.core.typing import Array, Float
from jax_dsa.ops.quantize_fp8.spec import (
    Codes,
    OnlyCodes,
    Operands,
    Options,
    ScaleGradients,
    Values,
)

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_E4M3 = 448.0


def _split(x: Float[Array, "..."], low: int) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    """Splits float32 `x` into two terms: its leading bits, and its last `low` bits.

    Both terms are computed from the bits. If they were computed as `x - leading` and x were a
    product, the compiler could fuse the product, unrounded, into that subtraction.
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)

    def masked(mask: int) -> Array:
        return jax.lax.bitcast_convert_type(bits & jnp.uint32(mask), jnp.float32)

    last = (1 << low) - 1
    exponent = 0xFF800000
    return masked(0xFFFFFFFF - last), masked(exponent + last) - masked(exponent)


def divide(a: Float[Array, "..."], b: Float[Array, "..."]) -> Float[Array, "..."]:
    """Returns float32 a / b, correctly rounded.

    XLA's own division is not always correctly rounded. XLA turns a division by a constant, or by a
    broadcast value, into a multiplication by the rounded reciprocal, and its division on GPUs may
    be off by 2 ulp. e4m3 has so few bits that quotients are often exactly between two codes, where
    all implementations must round to the same side. So this function computes the excess of the
    quotient without rounding, and subtracts it.
    """
    quotient = a / b
    q_high, q_low = _split(quotient, 12)  # 12 bits each, so that products of them are exact
    b_high, b_low = _split(b, 12)
    excess = ((q_high * b_high - a) + q_high * b_low + q_low * b_high) + q_low * b_low
    leading, last = _split(quotient, 1)
    return leading - (excess / b - last)  # this order keeps the sign of -0


def _round_up_to_power_of_two(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Returns the least powers of two that are not less than positive x; NaN stays NaN."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32) + jnp.uint32(0x007FFFFF)
    up = jax.lax.bitcast_convert_type(bits & jnp.uint32(0xFF800000), jnp.float32)
    return jnp.where(jnp.isnan(x), x, up)


def _reduce_blocks(x: Array, block: tuple[int, int], reduce: Callable[..., Array]) -> Array:
    """Reduces each block to one element. Blocks at the ends of axes are padded with zeros."""
    for axis, size in ((x.ndim - 1, block[1]), (x.ndim - 2, block[0])):
        if size == 1:
            continue
        blocks = -(-x.shape[axis] // size)
        padding = [(0, 0)] * x.ndim
        padding[axis] = (0, blocks * size - x.shape[axis])
        x = jnp.pad(x, padding)
        x = reduce(x.reshape(*x.shape[:axis], blocks, size, *x.shape[axis + 1 :]), axis=axis + 1)
    return x


def _expand_blocks(scale: Array, shape: tuple[int, ...], block: tuple[int, int]) -> Array:
    """Returns an array of `shape` that holds, for each element, the scale of its block."""
    for axis, size in ((len(shape) - 1, block[1]), (len(shape) - 2, block[0])):
        if size != 1:
            scale = jnp.repeat(scale, size, axis)
            scale = jax.lax.slice_in_dim(scale, 0, shape[axis], axis=axis)
    return scale


def quantize_fp8(options: Options, x: Operands) -> Codes:
    """Returns the e4m3 codes and the scales of the blocks."""
    values = x.x
    # Compare the bits as integers. They have the order of the magnitudes, and NaN is the largest.
    # XLA's maximum of floats ignores NaN on some CPUs.
    bits = jnp.dtype(f"uint{jnp.finfo(values.dtype).bits}")
    magnitude = jax.lax.bitcast_convert_type(jnp.abs(values), bits)
    amax = _reduce_blocks(magnitude, options.block, jnp.max)
    amax = jax.lax.bitcast_convert_type(amax, values.dtype).astype(jnp.float32)
    scale = divide(jnp.maximum(amax, options.min_amax), jnp.full_like(amax, MAX_E4M3))
    if options.power_of_two_scale:
        scale = _round_up_to_power_of_two(scale)
    quotient = divide(
        values.astype(jnp.float32), _expand_blocks(scale, values.shape, options.block)
    )
    q = jnp.clip(quotient, -MAX_E4M3, MAX_E4M3).astype(jnp.float8_e4m3fn)
    # Without the barrier, XLA may remove the conversion together with a later conversion back, and
    # with them the quantisation.
    return Codes(jax.lax.optimization_barrier(q), scale)


def dequantized(
    codes: Float[Array, "... R C"],
    scale: Float[Array, "... I J"],
    block: tuple[int, int],
    dtype: Any,
) -> Float[Array, "... R C"]:
    """Returns the codes times the scales of their blocks."""
    x = jax.lax.stop_gradient(codes).astype(jnp.float32)
    return (x * _expand_blocks(scale, codes.shape, block)).astype(dtype)


def dequantize_fp8_fwd(options: Options, x: Codes) -> Values:
    """Returns the codes times the scales of their blocks."""
    return Values(dequantized(*x, options.block, options.dtype))


def dequantize_fp8_bwd(options: Options, x: OnlyCodes, dy: Values) -> ScaleGradients:
    """Returns the cotangent of the scales."""
    product = x.codes.astype(jnp.float32) * dy.x.astype(jnp.float32)
    return ScaleGradients(_reduce_blocks(product, options.block, jnp.sum))
