"""Top-k on a CUDA kernel."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_dsa.core import ffi
from jax_dsa.ops.topk.spec import Operands, Options, Results

# The limits of the kernel. tests/test_ffi.py compares them with those of the extension.
MAX_SELECTED = 4096
MAX_SIZE = 2**31 - 1 - 2**16
MAX_ROWS = (2**31 - 1) // 8


def supports(options: Options, x: Operands) -> str | None:
    """Returns why the kernel does not support a call, or None if it does."""
    if x.x.dtype != jnp.float32:
        return f"it takes float32, got {x.x.dtype}"
    B, T, _ = x.x.shape
    if B * T > MAX_ROWS:
        return f"it takes at most {MAX_ROWS} rows, got {B * T}"
    return selects(options.top_k, options.size)


def selects(top_k: int, size: int) -> str | None:
    """Returns why the kernel cannot select `top_k` of `size` values, or None if it can."""
    if min(top_k, size) > MAX_SELECTED:
        return f"it selects at most {MAX_SELECTED} values of a row, got {min(top_k, size)}"
    if size > MAX_SIZE:
        return f"it takes rows of at most {MAX_SIZE} values, got {size}"
    return None


def topk_fwd(options: Options, avals: Results, x: Operands) -> Results:
    """Runs the kernel of `xla.topk_fwd`.

    The workspace is for a few long rows, which several blocks of threads share.
    """
    batch, queries, size = x.x.shape
    rows, k = batch * queries, options.top_k
    lists = int(ffi.extension().topk_workspace_bytes(rows=rows, size=size, k=k))
    workspace = jax.ShapeDtypeStruct((lists // 4,), jnp.float32)
    *results, _ = ffi.call("jax_dsa.topk_fwd.v3", x, (*avals, workspace))
    return Results(*results)
