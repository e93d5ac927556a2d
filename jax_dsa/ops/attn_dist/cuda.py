"""Calls of the CUDA kernel of `attn_dist`."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from jax_dsa.core import ffi
from jax_dsa.ops.attn_dist.spec import Operands, Options, Results

# The dims of the portable kernel; tests/test_ffi.py compares them with those of the extension.
DIMS = (576, 512, 256, 192, 128, 64)
LATENT_DIMS = (576, 512)  # of the Hopper kernel


def portable_supports(options: Options, x: Operands) -> str | None:
    """Returns why the portable kernel cannot run this call, or None if it can."""
    if x.q.dtype != jnp.bfloat16 or x.kv.dtype != jnp.bfloat16:
        return f"it takes bfloat16, got q of {x.q.dtype} and kv of {x.kv.dtype}"
    if x.q.shape[2] == 0:
        return "it takes at least one head"
    if x.q.shape[3] not in DIMS:
        return f"it takes D in {DIMS}, got D={x.q.shape[3]}"
    return None


def supports(options: Options, x: Operands) -> str | None:
    """Returns why the Hopper kernel cannot run this call, or None if it can."""
    if x.q.shape[3] not in LATENT_DIMS:
        return f"it takes D in {LATENT_DIMS}, got D={x.q.shape[3]}"
    return portable_supports(options, x)


def attn_dist_fwd(options: Options, avals: Results, x: Operands) -> Results:
    """Does what `xla.attn_dist_fwd` does."""
    scale = np.float32(options.scale)
    return Results(*ffi.call("jax_dsa.attn_dist_fwd.v2", x, avals, scale=scale))
