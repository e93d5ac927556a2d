"""The CUDA implementation of hierarchical tree attention."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_dsa.core import ffi
from jax_dsa.ops.htree.spec import Gradients, Operands, Options, Results

# The kernels' limits; tests/test_ffi.py compares them with those of the extension.
DIMS = (64, 128)
COMPRESSIONS = (8, 16, 32)
MAX_TOP_K = 1024
MAX_GROUP_HEADS = 192
MAX_BWD_GROUP_HEADS = 128
MAX_DECODE_GROUP_HEADS = 128
MAX_DECODE_QUERIES = 16  # every query reads its keys by itself, so more are slow
PORTABLE_SHARED_BYTES = 99 * 1024  # of a CTA, on the GPUs that have the least

# Bytes of the workspace for importances and lists. The forward kernels process as many queries at a
# time as fit: with compression 16 and top_k 512, these are three waves of CTAs of 12 queries on the
# 132 SMs of an H100. A smaller workspace leaves SMs idle between waves; the launcher adapts the
# chunks to the actual number of SMs, so other GPUs only get a different number of waves.
WORKSPACE_BUDGET = 224 * 10**6


def supports(options: Options, x: Operands) -> str | None:
    """Returns None if the kernels can run this call, or the reason why they cannot."""
    if x.q.dtype != jnp.bfloat16:
        return f"it takes bfloat16, got {x.q.dtype}"
    dim, value_dim, heads, groups = x.q.shape[3], x.v.shape[3], x.q.shape[2], x.k.shape[2]
    if dim not in DIMS or value_dim != dim:
        return f"it has D in {DIMS} and E=D, got D={dim}, E={value_dim}"
    if options.compression not in COMPRESSIONS:
        return f"it has compression in {COMPRESSIONS}, got {options.compression}"
    if options.top_k > MAX_TOP_K:
        return f"it takes top_k up to {MAX_TOP_K}, got {options.top_k}"
    cache = options.capacity is not None
    limit = MAX_DECODE_GROUP_HEADS if cache else MAX_GROUP_HEADS
    if not 1 <= heads // max(groups, 1) <= limit:
        return f"it takes 1..{limit} heads per KV head, got N={heads}, G={groups}"
    if cache and x.q.shape[1] > MAX_DECODE_QUERIES:
        return f"over a cache it takes up to {MAX_DECODE_QUERIES} queries, got T={x.q.shape[1]}"
    return None


def portable_supports(options: Options, x: Operands) -> str | None:
    """Returns None if the portable kernels can run this call, or the reason why they cannot."""
    if (why := supports(options, x)) or options.capacity is None:
        return why
    needed = ffi.extension().htree_decode_shared_bytes(
        group_heads=x.q.shape[2] // x.k.shape[2],
        dim=x.q.shape[3],
        compression=options.compression,
        top_k=options.top_k,
    )
    if needed > PORTABLE_SHARED_BYTES:
        return (
            f"on GPUs other than Hopper it has no space for compression={options.compression} "
            f"and top_k={options.top_k}"
        )
    return None


def bwd_supports(options: Options, x: Operands, *_: Results) -> str | None:
    """Returns None if the backward kernels can run this call, or the reason why they cannot."""
    if options.capacity is not None:
        return "its backward pass does not support a cache"
    heads, groups = x.q.shape[2], x.k.shape[2]
    if heads // max(groups, 1) > MAX_BWD_GROUP_HEADS:
        return f"it takes up to {MAX_BWD_GROUP_HEADS} heads per KV head, got N={heads}, G={groups}"
    return supports(options, x)


def htree_fwd(options: Options, avals: Results, x: Operands) -> Results:
    """Computes the same as `xla.htree_fwd`."""
    if options.capacity is not None:
        return _decode(options, avals, x)
    w = _workspaces(options, x)
    results = ffi.call(
        "jax_dsa.htree_fwd.v2",
        x,
        [*avals, w.tree, w.rotations, w.build, w.fwd],
        **_attributes(options),
    )
    return Results(*results[: len(avals)])


def _decode(options: Options, avals: Results, x: Operands) -> Results:
    """Computes `htree_fwd` over a cache."""
    assert options.capacity is not None
    batch, queries, heads, dim = x.q.shape
    size = ffi.extension().htree_decode_workspace(
        batch=batch,
        capacity=options.capacity,
        queries=queries,
        heads=heads,
        groups=x.k.shape[2],
        dim=dim,
        compression=options.compression,
        top_k=options.top_k,
    )
    results = ffi.call(
        "jax_dsa.htree_decode.v2",
        x,
        [*avals, jax.ShapeDtypeStruct((size,), jnp.uint8)],
        capacity=np.int64(options.capacity),
        **_attributes(options),
    )
    return Results(*results[: len(avals)])


def htree_bwd(
    options: Options, avals: Gradients, x: Operands, y: Results, dy: Results
) -> Gradients:
    """Computes the same as `xla.htree_bwd`.

    The tree is built again: building it is cheap, and keeping it would cost memory.
    """
    w = _workspaces(options, x)
    dq, dk, dv, *_ = ffi.call(
        "jax_dsa.htree_bwd.v2",
        [*x, *y, dy.out, dy.log_sum],
        [*avals, w.tree, w.rotations, w.build, w.bwd],
        **_attributes(options),
    )
    return Gradients(q=dq, k=dk, v=dv)


class _Workspaces(NamedTuple):
    """Shapes of the scratch arrays of the kernels, uint8.

    Attributes:
        tree: Rotated keys and values of all nodes.
        rotations: cos and sin by ordinal.
        build: Workspace of the kernels that build the tree.
        fwd: Workspace of the forward pass.
        bwd: Workspace of the backward pass.
    """

    tree: jax.ShapeDtypeStruct
    rotations: jax.ShapeDtypeStruct
    build: jax.ShapeDtypeStruct
    fwd: jax.ShapeDtypeStruct
    bwd: jax.ShapeDtypeStruct


def _workspaces(options: Options, x: Operands) -> _Workspaces:
    batch, queries, heads, dim = x.q.shape
    sizes = ffi.extension().htree_workspaces(
        batch=batch,
        tokens=x.k.shape[1],
        queries=queries,
        heads=heads,
        groups=x.k.shape[2],
        dim=dim,
        compression=options.compression,
        top_k=options.top_k,
        budget=WORKSPACE_BUDGET,
    )
    return _Workspaces(*(jax.ShapeDtypeStruct((size,), jnp.uint8) for size in sizes))


def _attributes(options: Options) -> dict[str, Any]:
    """Returns the attributes that all handlers take."""
    return {
        "compression": np.int64(options.compression),
        "top_k": np.int64(options.top_k),
        "scale": np.float32(options.scale),
        "rope_base": np.float64(options.rope_base),
    }
