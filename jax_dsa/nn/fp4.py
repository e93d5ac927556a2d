"""FP4 for quantisation-aware training."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_dsa.core.typing import Array, Float

BLOCK = 32
"""Elements that share a scale."""

_DTYPES = jnp.bfloat16, jnp.float16, jnp.float32
# Of float32, whose bits order as magnitudes do.
_INFINITY, _EXPONENT_ONE = 0x7F800000, 1 << 23
# 2^-124: half of it, the smallest number, is normal. Devices differ in what they make of others.
_LEAST_SCALE = 3 * _EXPONENT_ONE


@jax.custom_jvp
def fake_quantize_fp4(x: Float[Array, "... C"]) -> Float[Array, "... C"]:
    """`x` rounded to what its FP4 quantisation holds, in x's dtype, with the gradient of `x`.

    Every 32 elements of the last axis share a scale, the least power of two from 2^-124 on with
    `max|x| <= 6 scale`, and each is rounded to the nearest of 0, 0.5, 1, 1.5, 2, 3, 4 and 6 times
    that (e2m1), ties to the even code, with its sign: the same bits on every device. Where 4 times
    the scale is more than the dtype holds, the largest is 3 times it. A block that holds a NaN or
    an infinity becomes NaN.

    Args:
        x: bfloat16, float16 or float32; C is a multiple of 32.

    Source: OCP Microscaling Formats 1.0 (2023), MXFP4, but for its scale, which is rounded down and
    clips the largest values.

    Example:
        >>> import jax.numpy as jnp
        >>> from jax_dsa import nn
        >>> nn.fake_quantize_fp4(jnp.linspace(0.0, 6.0, 32))[::5]
        Array([0., 1., 2., 3., 4., 4., 6.], dtype=float32)
    """
    if x.dtype not in _DTYPES or x.ndim < 1 or x.shape[-1] % BLOCK:
        raise ValueError(
            f"fake_quantize_fp4: argument 'x' is {x.dtype}{list(x.shape)}, want bfloat16, float16 "
            f"or float32 with a multiple of {BLOCK} last"
        )
    blocks = x.reshape(*x.shape[:-1], x.shape[-1] // BLOCK, BLOCK).astype(jnp.float32)
    bits = jax.lax.bitcast_convert_type(jnp.abs(blocks), jnp.uint32)
    most = jnp.max(bits, axis=-1, keepdims=True)
    # Up to 1.5 times a power of two that power counts, above the next one; 6 is 1.5 times 2^2.
    power = (most + (_EXPONENT_ONE // 2 - 1)) & _INFINITY
    exponent = jnp.maximum(power, _LEAST_SCALE + 2 * _EXPONENT_ONE) - 2 * _EXPONENT_ONE
    finite = most < _INFINITY
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
