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
    """Of an array and of its transpose, with blocks of 1x128 each."""

    codes: Float[Array, "b R C"]
    scale: Float[Array, "b R J"]
    codes_transposed: Float[Array, "b C R"]
    scale_transposed: Float[Array, "b C I"]


class Columns(NamedTuple):
    """Of an array's transpose, with blocks of 1x128."""

    codes: Float[Array, "b C R"]
    scale: Float[Array, "b C I"]


class BothTiles(NamedTuple):
    """Of an array, with tiles of 128x128, and the same codes transposed."""

    codes: Float[Array, "b R C"]
    codes_transposed: Float[Array, "b C R"]
    scale: Float[Array, "b I J"]


def quantize_fp8_tiles_transpose(x: Float[Array, "b R C"], power_of_two_scale: bool) -> BothTiles:
    """Quantises by tiles, reading once."""
    batch, rows, cols = x.shape
    avals = [
        jax.ShapeDtypeStruct((batch, rows, cols), jnp.float8_e4m3fn),
        jax.ShapeDtypeStruct((batch, cols, rows), jnp.float8_e4m3fn),
        jax.ShapeDtypeStruct((batch, -(-rows // BLOCK), -(-cols // BLOCK)), jnp.float32),
    ]
    power = np.bool_(power_of_two_scale)
    target = "jax_dsa.quantize_fp8_tiles_transpose.v1"
    return BothTiles(*ffi.call(target, [x], avals, power_of_two_scale=power))


def quantize_fp8_transpose(x: Float[Array, "b R C"], power_of_two_scale: bool) -> BothLayouts:
    """Quantises along rows and along columns, reading once."""
    batch, rows, cols = x.shape
    avals = _along_rows(batch, rows, cols) + _along_rows(batch, cols, rows)
    power = np.bool_(power_of_two_scale)
    target = "jax_dsa.quantize_fp8_transpose.v1"
    return BothLayouts(*ffi.call(target, [x], avals, power_of_two_scale=power))


def quantize_fp8_columns(x: Float[Array, "b R C"], power_of_two_scale: bool) -> Columns:
    """Quantises along columns."""
    batch, rows, cols = x.shape
    power = np.bool_(power_of_two_scale)
    avals = _along_rows(batch, cols, rows)
    target = "jax_dsa.quantize_fp8_columns.v1"
    return Columns(*ffi.call(target, [x], avals, power_of_two_scale=power))


def _along_rows(batch: int, rows: int, cols: int) -> list[jax.ShapeDtypeStruct]:
    return [
        jax.ShapeDtypeStruct((batch, rows, cols), jnp.float8_e4m3fn),
        jax.ShapeDtypeStruct((batch, rows, -(-cols // BLOCK)), jnp.float32),
    ]
