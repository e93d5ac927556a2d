"""FP8 quantisation and its inverse on their CUDA kernels."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_dsa.core import ffi
from jax_dsa.core.typing import Array, Float
from jax_dsa.ops.quantize_fp8.spec import BLOCK, Codes, Operands, Options, Values

_ROWS, _TILES = (1, BLOCK), (BLOCK, BLOCK)


def supports(options: Options, x: Operands | Codes) -> str | None:
    """None, or why the kernels do not run this call: either direction."""
    if options.block not in (_ROWS, _TILES):
        rows, columns = options.block
        return f"it has blocks of 1x{BLOCK} and {BLOCK}x{BLOCK}, got {rows}x{columns}"
    return None


def quantize_fp8(options: Options, avals: Codes, x: Operands) -> Codes:
    """`xla.quantize_fp8`."""
    tiles = "_tiles" if options.block == _TILES else ""
    power = np.bool_(options.power_of_two_scale)
    return Codes(*ffi.call(f"jax_dsa.quantize_fp8{tiles}.v1", x, avals, power_of_two_scale=power))


def dequantize_fp8_fwd(options: Options, avals: Values, x: Codes) -> Values:
    """`xla.dequantize_fp8_fwd`."""
    tiles = np.bool_(options.block == _TILES)
    return Values(*ffi.call("jax_dsa.dequantize_fp8.v1", x, avals, tiles=tiles))


class BothLayouts(NamedTuple):
    """Codes and scales of an array, and of its transpose, with blocks of 1x128 each."""

    codes: Float[Array, "b R C"]
    scale: Float[Array, "b R J"]
    codes_transposed: Float[Array, "b C R"]
    scale_transposed: Float[Array, "b C I"]


def quantize_fp8_transpose(x: Float[Array, "b R C"], power_of_two_scale: bool) -> BothLayouts:
    """Quantises along rows and along columns, reading once."""
    batch, rows, cols = x.shape
    shapes = [
        ((batch, rows, cols), (batch, rows, -(-cols // BLOCK))),
        ((batch, cols, rows), (batch, cols, -(-rows // BLOCK))),
    ]
    avals = [
        jax.ShapeDtypeStruct(shape, dtype)
        for pair in shapes
        for shape, dtype in zip(pair, (jnp.float8_e4m3fn, jnp.float32), strict=True)
    ]
    power = np.bool_(power_of_two_scale)
    target = "jax_dsa.quantize_fp8_transpose.v1"
    return BothLayouts(*ffi.call(target, [x], avals, power_of_two_scale=power))
