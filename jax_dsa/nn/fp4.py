"""FP4 rounding for quantisation-aware training."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_dsa.core.typing import Array, Float

BLOCK = 32
"""Number of elements that share a scale."""

_DTYPES = jnp.bfloat16, jnp.float16, jnp.float32
# Bits of float32: infinity, and one step of the exponent. Bits of positive float32 numbers have the
# same order as the numbers.
_INFINITY, _EXPONENT_ONE = 0x7F800000, 1 << 23
# 2^-124. Half of it, the smallest FP4 magnitude, is a normal float32 number. Devices differ in how
# they treat subnormal numbers.
_LEAST_SCALE = 3 * _EXPONENT_ONE


@jax.custom_jvp
def fake_quantize_fp4(x: Float[Array, "... C"]) -> Float[Array, "... C"]:
    """Rounds `x` to values that FP4 can represent, and passes gradients straight through.

    Every 32 elements of the last axis are a block with one scale, the smallest power of two of at
    least 2^-124 for which `max|x| <= 6 scale`. Each magnitude is rounded to the nearest of 0, 0.5,
    1, 1.5, 2, 3, 4 and 6 times the scale (e2m1), ties to the even code. The results have the same
    bits on every device. If 4 times the scale exceeds the dtype's largest number, magnitudes are at
    most 3 times the scale. A block with a NaN or an infinity becomes NaN.

    Args:
        x: bfloat16, float16 or float32; C is a multiple of 32.

    Returns:
        The rounded array, in the shape and dtype of `x`. Its gradient is that of `x`.

    Raises:
        ValueError: If `x` has another dtype, or C is not a multiple of 32.

    Source: OCP Microscaling Formats 1.0 (2023), MXFP4, except that MXFP4 rounds the scale down and
    clips the largest values.

    Examples:
        >>> import jax.numpy as jnp
        >>> from jax_dsa import nn
        >>> nn.fake_quantize_fp4(jnp.linspace(0.0, 6.0, 32))[::5]
        Array([0., 1., 2., 3., 4., 4., 6.], dtype=float32)
    """
    if x.dtype not in _DTYPES or x.ndim < 1 or x.shape[-1] % BLOCK:
        raise ValueError(
            f"fake_quantize_fp4: argument 'x' is {x.dtype}{list(x.shape)}, expected bfloat16, "
            f"float16 or float32 with a last axis that is a multiple of {BLOCK}"
        )
    blocks = x.reshape(*x.shape[:-1], x.shape[-1] // BLOCK, BLOCK).astype(jnp.float32)
    bits = jax.lax.bitcast_convert_type(jnp.abs(blocks), jnp.uint32)
    largest_bits = jnp.max(bits, axis=-1, keepdims=True)
    # 6 scale = 1.5 * 2^2 scale. So a maximum of up to 1.5 * 2^e has the scale 2^(e - 2), and a
    # greater one the next power of two.
    power = (largest_bits + (_EXPONENT_ONE // 2 - 1)) & _INFINITY
    exponent = jnp.maximum(power, _LEAST_SCALE + 2 * _EXPONENT_ONE) - 2 * _EXPONENT_ONE
    finite = largest_bits < _INFINITY
    scale, inverse = (
        jnp.where(finite, jax.lax.bitcast_convert_type(e.astype(jnp.uint32), jnp.float32), jnp.nan)
        for e in (exponent, 254 * _EXPONENT_ONE - exponent)
    )
    y = blocks * inverse
    size = jnp.abs(y)
    step = jnp.where(size < 2, 0.5, jnp.where(size < 4, 1.0, 2.0))
    largest = jnp.where(scale > float(jnp.finfo(x.dtype).max) / 4, 3.0, 6.0)
    codes = jnp.clip(jnp.round(y / step) * step, -largest, largest)
    return (codes * scale).astype(x.dtype).reshape(x.shape)


fake_quantize_fp4.defjvp(lambda x, dx: (fake_quantize_fp4(*x), *dx))
