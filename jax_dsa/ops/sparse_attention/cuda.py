"""Calls of the CUDA kernels of `sparse_attention`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_dsa.core import ffi
from jax_dsa.ops.masked_attention.sinks import without_sinks
from jax_dsa.ops.masked_attention.spec import Results
from jax_dsa.ops.sparse_attention.blocks import num_slots
from jax_dsa.ops.sparse_attention.spec import Gradients, Operands, Options

# The operands of the FFI handlers, in their order. The backward handler takes no sinks.
TAKES = ("q", "k", "v", "indices", "topk_length", "positions", "starts", "lengths", "sinks")

_DTYPES = (jnp.bfloat16, jnp.float16)

# The kernels' limits; tests/test_ffi.py compares them with those of the extension.
MAX_DIM = 256
DIM_MULTIPLE = 8
MAX_GROUP_HEADS = 32
MAX_LENGTH = 2**31 - 1 - 4096
MAX_SLOTS = 16384  # of a query, including those of forced blocks
# Those of the kernel for caches (cached_cuda.py): D and E, keys of a request or a list, and queries
# times heads.
DECODE_DIMS = (64, 128, 256)
MAX_DECODE_KEYS = 2**31 - 1 - 256
MAX_DECODE_ROWS = (2**31 - 1) // 16


def supports(options: Options, x: Operands, *_: Results) -> str | None:
    """Returns None, or the reason why the kernels do not cover this call."""
    (B, T, N, D), (S, G), E = x.q.shape, x.k.shape[1:3], x.v.shape[3]
    if x.q.dtype not in _DTYPES:
        return f"it takes bfloat16 or float16, got {x.q.dtype}"
    if not all(0 < dim <= MAX_DIM and dim % DIM_MULTIPLE == 0 for dim in (D, E)):
        return f"it takes multiples of {DIM_MULTIPLE} up to {MAX_DIM} for D and E, got D={D}, E={E}"
    if max(B * T, S) > MAX_LENGTH:
        return f"it takes B * T and S up to {MAX_LENGTH}, got B={B}, T={T}, S={S}"
    if N // G > MAX_GROUP_HEADS:
        return f"it takes N // G up to {MAX_GROUP_HEADS}, got N={N}, G={G}"
    slots = num_slots(options, x.indices.shape[3], S)
    if slots > MAX_SLOTS:
        return f"it takes up to {MAX_SLOTS} slots, including forced blocks, got {slots}"
    if options.scale <= 0:
        return f"it takes scale > 0, got {options.scale}"
    return None


def sparse_attention_fwd(options: Options, avals: Results, x: Operands) -> Results:
    """Computes `xla.sparse_attention_fwd` on the kernels."""
    space, _ = _workspaces(options, x)
    sinks = None if x.sinks is None else x.sinks.astype(jnp.float32)
    *results, _ = ffi.call(
        "jax_dsa.sparse_attention_fwd.v1",
        [*_operands(x), sinks],
        [*avals, space],
        **_attributes(options),
    )
    return Results(*results)


def sparse_attention_bwd(
    options: Options, avals: Gradients, x: Operands, y: Results, dy: Results
) -> Gradients:
    """Computes `xla.sparse_attention_bwd` on the kernels, which know no sinks."""
    y, dy, dsinks = without_sinks(x, y, dy)
    _, space = _workspaces(options, x)
    dq, dk, dv, _ = ffi.call(
        "jax_dsa.sparse_attention_bwd.v1",
        [*_operands(x), *y, dy.out, dy.log_sum],
        [avals.q, avals.k, avals.v, space],
        **_attributes(options),
    )
    return Gradients(dq, dk, dv, dsinks)


def _operands(x: Operands) -> list[Any]:
    """Returns the operands of both handlers."""
    return [getattr(x, name) for name in TAKES if name != "sinks"]


def _blocks(options: Options) -> dict[str, int]:
    """Returns the options that say which blocks a query sees."""
    names = "block_size", "sink_blocks", "local_blocks", "tail_block"
    return {name: getattr(options, name) for name in names}


def _attributes(options: Options) -> dict[str, Any]:
    attributes = {
        name: np.bool_(value) if isinstance(value, bool) else np.int32(value)
        for name, value in _blocks(options).items()
    }
    return {"scale": np.float32(options.scale), **attributes}


def _workspaces(options: Options, x: Operands) -> list[jax.ShapeDtypeStruct]:
    """Returns the workspaces of the forward and of the backward kernels."""
    (B, T, N, D), (S, G), E = x.q.shape, x.k.shape[1:3], x.v.shape[3]
    sizes = ffi.extension().sparse_attention_workspaces(
        batch=B,
        queries=T,
        keys=S,
        heads=N,
        groups=G,
        dim=D,
        value_dim=E,
        slots=x.indices.shape[3],
        causal=x.positions is not None,
        packed=x.starts is not None,
        **_blocks(options),
    )
    return [jax.ShapeDtypeStruct((size,), jnp.uint8) for size in sizes]
