"""Pooling on its CUDA kernels."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_dsa.core import ffi
from jax_dsa.ops.gated_pool.spec import Gradients, Operands, Options, Results

# The kernels' limits; tests/test_ffi.py compares them with those of the extension.
MAX_POOLED = 128
MAX_DIM = 2**22
DIM_MULTIPLE = 4
MAX_TOKENS = 2**31 - 1 - 512
_DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)


def supports(options: Options, x: Operands, *_: Any) -> str | None:
    """Returns None, or the reason why the kernels do not cover this call, in either pass."""
    wide = [a.dtype for a in (x.bias, x.scale) if a is not None]
    if x.values.dtype not in _DTYPES or any(dtype != jnp.float32 for dtype in wide):
        got = ", ".join(map(str, (x.values.dtype, *wide)))
        return f"it takes bfloat16, float16 and float32, got {got}"
    pooled = options.ratio * x.values.shape[2]
    if pooled > MAX_POOLED:
        return f"it takes R H up to {MAX_POOLED}, got R H={pooled}"
    if x.values.shape[3] % DIM_MULTIPLE or x.values.shape[3] > MAX_DIM:
        return (
            f"it takes D in multiples of {DIM_MULTIPLE} up to {MAX_DIM}, got D={x.values.shape[3]}"
        )
    if x.values.shape[1] > MAX_TOKENS:
        return f"it takes S up to {MAX_TOKENS}, got S={x.values.shape[1]}"
    return None


def gated_pool_fwd(options: Options, avals: Results, x: Operands) -> Results:
    """Runs the forward kernel, and adds up the sums of squares of each key's channel tiles."""
    if x.gates is None:
        return Results(
            _mean("jax_dsa.mean_pool_fwd.v1", options, avals.keys, x.values, x.starts), None
        )
    halves, dim = x.values.shape[2:]
    partial_squares = None
    if avals.squares is not None:
        tiles = int(ffi.extension().gated_pool_tiles(ratio=options.ratio, halves=halves, dim=dim))
        batch, slots = avals.squares.shape
        partial_squares = jax.ShapeDtypeStruct((batch, tiles, slots), jnp.float32)
    keys, squares = ffi.call("jax_dsa.gated_pool_fwd.v1", x, (avals.keys, partial_squares))
    return Results(keys, None if squares is None else jnp.sum(squares, axis=1))


def gated_pool_bwd(options: Options, avals: Gradients, x: Operands, dy: Results) -> Gradients:
    """Runs the backward kernel, and adds up its partial sums.

    Each split of the keys has its own sums, which make the gradient of the bias and, in the last
    row, that of the scale.
    """
    if x.gates is None:
        dvalues = _mean("jax_dsa.mean_pool_bwd.v1", options, avals.values, x.starts, dy.keys)
        return Gradients(dvalues, None, None, None)
    assert avals.bias is not None
    batch, length, halves, dim = x.values.shape
    splits = int(
        ffi.extension().gated_pool_bwd_splits(
            batch=batch, tokens=length, ratio=options.ratio, halves=halves, dim=dim
        )
    )
    pooled = options.ratio * halves
    rows = pooled + (x.scale is not None)
    partial_sums = jax.ShapeDtypeStruct((batch, splits, rows, dim), jnp.float32)
    dvalues, dgates, sums = ffi.call(
        "jax_dsa.gated_pool_bwd.v1", (*x, *dy), (avals.values, avals.gates, partial_sums)
    )
    dbias = jnp.sum(sums[:, :, :pooled], axis=1).reshape(avals.bias.shape)
    dscale = None if x.scale is None else jnp.sum(sums[:, :, pooled], axis=1)
    return Gradients(dvalues, dgates, dbias, dscale)


def _mean(target: str, options: Options, aval: Any, *operands: Any) -> Any:
    """Runs a kernel of mean pooling and returns its only result."""
    return ffi.call(target, operands, (aval,), ratio=np.int64(options.ratio))[0]
