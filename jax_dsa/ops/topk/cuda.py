"""Top-k on its CUDA kernel."""

from __future__ import annotations

import jax.numpy as jnp

from jax_dsa.core import ffi
from jax_dsa.ops.topk.spec import Operands, Options, Results

# The kernel's limits; tests/test_ffi.py compares them with those of the extension.
MAX_SELECTED = 4096
MAX_SIZE = 2**31 - 1 - 2**16
MAX_ROWS = (2**31 - 1) // 8


def supports(options: Options, x: Operands) -> str | None:
    """None, or why the kernel does not run this call."""
    if x.x.dtype != jnp.float32:
        return f"it takes float32, got {x.x.dtype}"
    B, T, _ = x.x.shape
    if B * T > MAX_ROWS:
        return f"it takes at most {MAX_ROWS} rows, got {B * T}"
    return selects(options.top_k, options.size)


def selects(top_k: int, size: int) -> str | None:
    """None, or why the kernel does not select so many of rows of so many float32 values."""
    if min(top_k, size) > MAX_SELECTED:
        return f"it selects at most {MAX_SELECTED} values of a row, want {min(top_k, size)}"
    if size > MAX_SIZE:
        return f"it takes rows of at most {MAX_SIZE} values, got {size}"
    return None


def topk_fwd(options: Options, avals: Results, x: Operands) -> Results:
    """`xla.topk_fwd`."""
    return Results(*ffi.call("jax_dsa.topk_fwd.v2", x, avals))
