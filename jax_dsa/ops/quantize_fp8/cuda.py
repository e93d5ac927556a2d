"""Calls of the CUDA kernels for FP8 quantisation and dequantisation."""

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
    """Returns None, or the reason why the kernels cannot quantise or dequantise in this call."""
    if options.block not in (_ROWS, _TILES):
        rows, columns = options.block
        return f"it takes blocks of 1x{BLOCK} and {BLOCK}x{BLOCK}, got {rows}x{columns}"
    return None


def quantize_fp8(options: Options, avals: Codes, x: Operands) -> Codes:
    """Computes `xla.quantize_fp8`."""
    tiles = "_tiles" if options.block == _TILES else ""
    power = np.bool_(options.power_of_two_scale)
    return Codes(*ffi.call(f"jax_dsa.quantize_fp8{tiles}.v1", x, avals, power_of_two_scale=power))


def dequantize_fp8_fwd(options: Options, avals: Values, x: Codes) -> Values:
    """Computes `xla.dequantize_fp8_fwd`."""
    tiles = np.bool_(options.block == _TILES)
    return Values(*ffi.call("jax_dsa.dequantize_fp8.v1", x, avals, tiles=tiles))


class BothLayouts(NamedTuple):
    """An array, quantised in blocks of 1x128, and its transpose, in tiles of 128x128."""

    codes: Float[Array, "b R C"]
    scale: Float[Array, "b R J"]
    codes_transposed: Float[Array, "b C R"]
    scale_transposed: Float[Array, "b J I"]


class TransposedCodes(NamedTuple):
    """The transpose of an array, quantised in blocks of 1x128."""

    codes: Float[Array, "b C R"]
    scale: Float[Array, "b C I"]


class TilesBothLayouts(NamedTuple):
    """An array quantised in tiles of 128x128, with its codes in both layouts."""

    codes: Float[Array, "b R C"]
    codes_transposed: Float[Array, "b C R"]
    scale: Float[Array, "b I J"]


def quantize_fp8_tiles_transpose(
    x: Float[Array, "b R C"], power_of_two_scale: bool
) -> TilesBothLayouts:
    """Quantises `x` in tiles of 128x128 and transposes the codes, in one kernel."""
    batch, rows, cols = x.shape
    avals = [
        jax.ShapeDtypeStruct((batch, rows, cols), jnp.float8_e4m3fn),
        jax.ShapeDtypeStruct((batch, cols, rows), jnp.float8_e4m3fn),
        jax.ShapeDtypeStruct((batch, -(-rows // BLOCK), -(-cols // BLOCK)), jnp.float32),
    ]
    power = np.bool_(power_of_two_scale)
    target = "jax_dsa.quantize_fp8_tiles_transpose.v1"
    return TilesBothLayouts(*ffi.call(target, [x], avals, power_of_two_scale=power))


def quantize_fp8_transpose(x: Float[Array, "b R C"], power_of_two_scale: bool) -> BothLayouts:
    """Quantises `x` in blocks of 1x128 and its transpose in tiles of 128x128, in one kernel.

    The smallest scale is 1e-20 / 448, because the results are operands of gradients.
    """
    batch, rows, cols = x.shape
    avals = [
        *_row_blocks(batch, rows, cols),
        jax.ShapeDtypeStruct((batch, cols, rows), jnp.float8_e4m3fn),
        jax.ShapeDtypeStruct((batch, -(-cols // BLOCK), -(-rows // BLOCK)), jnp.float32),
    ]
    power = np.bool_(power_of_two_scale)
    target = "jax_dsa.quantize_fp8_transpose.v2"
    return BothLayouts(*ffi.call(target, [x], avals, power_of_two_scale=power))


def quantize_fp8_columns(x: Float[Array, "b R C"], power_of_two_scale: bool) -> TransposedCodes:
    """Quantises the transpose of `x` in blocks of 1x128, with a smallest scale of 1e-20 / 448."""
    batch, rows, cols = x.shape
    power = np.bool_(power_of_two_scale)
    avals = _row_blocks(batch, cols, rows)
    target = "jax_dsa.quantize_fp8_columns.v1"
    return TransposedCodes(*ffi.call(target, [x], avals, power_of_two_scale=power))


def _row_blocks(batch: int, rows: int, cols: int) -> list[jax.ShapeDtypeStruct]:
    """Returns the shapes of codes [batch, rows, cols] and of their scales for blocks of 1x128."""
    return [
        jax.ShapeDtypeStruct((batch, rows, cols), jnp.float8_e4m3fn),
        jax.ShapeDtypeStruct((batch, rows, -(-cols // BLOCK)), jnp.float32),
    ]
