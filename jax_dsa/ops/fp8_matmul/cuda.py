"""Calls of the CUDA kernels of the FP8 matmul."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_dsa.core import ffi
from jax_dsa.core.typing import Array, Float
from jax_dsa.ops.fp8_matmul.spec import Operands, Options, Product

# The kernels' limits; tests/test_ffi.py compares them with those of the extension.
MAX_SIZE = 2**31 - 4097  # of an axis
ROW_BYTES = 16  # The size of a row is a multiple of this, because TMA copies it.


def supports(options: Options, x: Operands) -> str | None:
    """Returns None, or the reason why the kernels cannot run this call."""
    rows = 1
    for size in x.a.shape[1:-1]:
        rows *= size
    largest = max(rows, x.a.shape[0], *x.b.shape[1:])
    if largest > MAX_SIZE:
        return f"it takes sizes up to {MAX_SIZE}, got {largest}"
    return None


def pad_rows(codes: Float[Array, "... K"]) -> Float[Array, "... k"]:
    """Pads rows of codes with zeros to a multiple of 16 bytes, because TMA copies them."""
    padding = -codes.shape[-1] % ROW_BYTES
    if padding == 0:
        return codes
    widths = [(0, 0, 0)] * (codes.ndim - 1) + [(0, padding, 0)]
    return jax.lax.pad(codes, jnp.zeros((), codes.dtype), widths)


def fp8_matmul_fwd(options: Options, avals: Product, x: Operands) -> Product:
    """Computes `xla.fp8_matmul_fwd`."""
    padded = x._replace(a=pad_rows(x.a), b=pad_rows(x.b))
    return Product(*ffi.call("jax_dsa.fp8_matmul.v1", padded, avals))
