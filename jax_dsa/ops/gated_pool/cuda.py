"""The pooling of blocks of tokens on its CUDA kernels."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jax_dsa.core import ffi
from jax_dsa.ops.gated_pool.spec import Gradients, Operands, Options, Results

# What the kernels cover, as in cuda/gated_pool/gated_pool.h.
_MOST_POOLED = 128
_MAX_DIM = 2**22
_DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)


def supports(options: Options, x: Operands, *_: Any) -> str | None:
    """None, or why the kernels do not run this call: either direction."""
    if x.values.dtype not in _DTYPES or x.bias.dtype != jnp.float32:
        return f"it takes bfloat16, float16 and float32, got {x.values.dtype}, {x.bias.dtype}"
    pooled = options.ratio * x.values.shape[2]
    if pooled > _MOST_POOLED:
        return f"it has R H up to {_MOST_POOLED}, got R H={pooled}"
    if x.values.shape[3] % 4 or x.values.shape[3] > _MAX_DIM:
        return f"it has D in multiples of 4 up to {_MAX_DIM}, got D={x.values.shape[3]}"
    return None


def gated_pool_fwd(options: Options, avals: Results, x: Operands) -> Results:
    """`xla.gated_pool_fwd`."""
    return Results(*ffi.call("jax_dsa.gated_pool_fwd.v1", x, avals))


def gated_pool_bwd(options: Options, avals: Gradients, x: Operands, dy: Results) -> Gradients:
    """`xla.gated_pool_bwd`; the kernel leaves parts of the sum that the bias's gradient is."""
    batch, length, halves, dim = x.values.shape
    parts = int(ffi.extension().gated_pool_parts(batch, length, options.ratio, halves, dim))
    sums = jax.ShapeDtypeStruct((batch, parts, *x.bias.shape[1:]), jnp.float32)
    dvalues, dgates, dbias = ffi.call(
        "jax_dsa.gated_pool_bwd.v1", (*x, dy.keys), (avals.values, avals.gates, sums)
    )
    return Gradients(dvalues, dgates, jnp.sum(dbias, axis=1))
