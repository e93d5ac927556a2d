"""The FP8 matmul in plain JAX."""

from __future__ import annotations

import jax.numpy as jnp

from jax_dsa.core.typing import Array, Float
from jax_dsa.ops.fp8_matmul.spec import (
    A,
    AGradient,
    B,
    BGradient,
    Operands,
    Options,
    Product,
    RowProduct,
)
from jax_dsa.ops.quantize_fp8.xla import dequantized


def fp8_matmul_fwd(options: Options, x: Operands) -> Product:
    """Returns a @ b^T of the dequantised operands."""
    assert x.a_scale is not None and x.b_scale is not None
    a = dequantized(x.a, x.a_scale, (1, options.block), jnp.float32)
    b = dequantized(x.b, x.b_scale, (options.block, options.block), jnp.float32)
    return Product(matmul(a, b).astype(options.dtype))


def matmul(a: Float[Array, "b ... K"], b: Float[Array, "b N K"]) -> Float[Array, "b ... N"]:
    """Returns a @ b^T, accumulated in float32."""
    return jnp.einsum("b...k,bnk->b...n", a, b, preferred_element_type=jnp.float32)


def fp8_matmul_bwd_a(options: Options, dy: Product, x: B) -> AGradient:
    """Returns the cotangent of the dequantised a, from a matmul in the output's dtype."""
    b = dequantized(*x, (options.block, options.block), dy.out.dtype)
    return AGradient(matmul(dy.out, b.swapaxes(-1, -2)))


def fp8_matmul_bwd_b(options: Options, dy: RowProduct, x: A) -> BGradient:
    """Returns the cotangent of the dequantised b, from a matmul in the output's dtype."""
    a = dequantized(*x, (1, options.block), dy.out.dtype)
    return BGradient(jnp.einsum("b...n,b...k->bnk", dy.out, a, preferred_element_type=jnp.float32))
