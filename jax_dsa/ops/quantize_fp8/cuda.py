"""FP8 quantisation on its CUDA kernel."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from jax_dsa.core import ffi
from jax_dsa.ops.quantize_fp8.spec import BLOCK, INPUTS, Codes, Operands, Options


def supports(options: Options, x: Operands) -> str | None:
    """None, or why the kernel does not run this call."""
    if options.block != (1, BLOCK):
        return f"it has blocks of 1x{BLOCK}, got {options.block[0]}x{options.block[1]}"
    if x.x.dtype not in [jnp.dtype(d) for d in INPUTS]:
        return f"it takes bfloat16, float16 and float32, got {x.x.dtype}"
    return None


def quantize_fp8(options: Options, avals: Codes, x: Operands) -> Codes:
    """`xla.quantize_fp8`."""
    power = np.bool_(options.power_of_two_scale)
    return Codes(*ffi.call("jax_dsa.quantize_fp8.v1", x, avals, power_of_two_scale=power))
