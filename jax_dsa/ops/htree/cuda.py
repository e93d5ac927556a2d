"""Hierarchical tree attention on its CUDA kernels."""

from __future__ import annotations

from typing import Any

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

# The decode kernel is for few queries: it processes each of them separately.
MAX_DECODE_QUERIES = 16

# Bytes of importances and lists that are in memory at a time: with 16 children a node and 512
# selected, what 12 queries for each of 132 SMs need, three times over.
WORKSPACE_BUDGET = 224 * 10**6


def supports(options: Options, x: Operands) -> str | None:
    """None, or why the kernels do not run this call."""
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
    most = MAX_DECODE_GROUP_HEADS if cache else MAX_GROUP_HEADS
    if not 1 <= heads // max(groups, 1) <= most:
        return f"it takes 1..{most} heads a group, got N={heads}, G={groups}"
    if cache and x.q.shape[1] > MAX_DECODE_QUERIES:
        return f"over a cache it takes up to {MAX_DECODE_QUERIES} queries, got T={x.q.shape[1]}"
    return None


def bwd_supports(options: Options, x: Operands, *_: Results) -> str | None:
    """None, or why the backward kernels do not run this call."""
    if options.capacity is not None:
        return "it builds the tree that it reads, and has none for a cache"
    heads, groups = x.q.shape[2], x.k.shape[2]
    if heads // max(groups, 1) > MAX_BWD_GROUP_HEADS:
        return f"it takes up to {MAX_BWD_GROUP_HEADS} heads a group, got N={heads}, G={groups}"
    return supports(options, x)


def htree_fwd(options: Options, avals: Results, x: Operands) -> Results:
    """`xla.htree_fwd`."""
    if options.capacity is not None:
        return _decode(options, avals, x)
    *tree, attending, _ = _workspaces(options, x)
    outs = ffi.call("jax_dsa.htree_fwd.v1", x, [*avals, *tree, attending], **_numbers(options))
    return Results(*outs[:3])


def _decode(options: Options, avals: Results, x: Operands) -> Results:
    """The same over a cache."""
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
    outs = ffi.call(
        "jax_dsa.htree_decode.v1",
        x,
        [*avals, jax.ShapeDtypeStruct((size,), jnp.uint8)],
        capacity=np.int64(options.capacity),
        **_numbers(options),
    )
    return Results(*outs[:3])


def htree_bwd(
    options: Options, avals: Gradients, x: Operands, y: Results, dy: Results
) -> Gradients:
    """`xla.htree_bwd`. The tree is built anew, which costs less than to keep it."""
    *tree, _, attending = _workspaces(options, x)
    outs = ffi.call(
        "jax_dsa.htree_bwd.v1",
        [*x, *y, dy.out, dy.lse],
        [*avals, *tree, attending],
        **_numbers(options),
    )
    return Gradients(*outs[:3])


def _workspaces(options: Options, x: Operands) -> list[jax.ShapeDtypeStruct]:
    """The tree, rotations, the build's, the forward's and the backward's."""
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
    return [jax.ShapeDtypeStruct((size,), jnp.uint8) for size in sizes]


def _numbers(options: Options) -> dict[str, Any]:
    return {
        "compression": np.int64(options.compression),
        "top_k": np.int64(options.top_k),
        "scale": np.float32(options.scale),
        "rope_base": np.float64(options.rope_base),
    }
