"""Hierarchical tree attention on its CUDA kernels."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jax_dsa.core import ffi
from jax_dsa.ops.htree.spec import Operands, Options, Results

# What the kernels cover, as in cuda/htree/htree.h.
_DIMS = (64, 128)
_COMPRESSIONS = (8, 16, 32)
_MAX_TOP_K = 1024
_MAX_GROUP_HEADS = 192

# Bytes of importances and lists that are in memory at a time: with 16 children a node and 512
# selected, what 12 queries for each of 132 multiprocessors need, three times over.
WORKSPACE_BUDGET = 224 * 10**6


def supports(options: Options, x: Operands) -> str | None:
    """None, or why the kernels do not run this call."""
    if options.capacity is not None:
        return "it builds the tree that it reads, and has none for a cache"
    if x.q.dtype != jnp.bfloat16:
        return f"it takes bfloat16, got {x.q.dtype}"
    dim, value_dim, heads, groups = x.q.shape[3], x.v.shape[3], x.q.shape[2], x.k.shape[2]
    if dim not in _DIMS or value_dim != dim:
        return f"it has D in {_DIMS} and E=D, got D={dim}, E={value_dim}"
    if options.compression not in _COMPRESSIONS:
        return f"it has compression in {_COMPRESSIONS}, got {options.compression}"
    if options.top_k > _MAX_TOP_K:
        return f"it takes top_k up to {_MAX_TOP_K}, got {options.top_k}"
    if not 1 <= heads // max(groups, 1) <= _MAX_GROUP_HEADS:
        return f"it takes 1..{_MAX_GROUP_HEADS} heads a group, got N={heads}, G={groups}"
    return None


def htree_fwd(options: Options, avals: Results, x: Operands) -> Results:
    """`xla.htree_fwd`."""
    batch, queries, _, dim = x.q.shape
    sizes = ffi.extension().htree_workspace(
        batch,
        x.k.shape[1],
        queries,
        x.k.shape[2],
        dim,
        options.compression,
        options.top_k,
        WORKSPACE_BUDGET,
    )
    outs = ffi.call(
        "jax_dsa.htree_fwd.v1",
        x,
        [*avals, *(jax.ShapeDtypeStruct((size,), jnp.uint8) for size in sizes)],
        compression=np.int64(options.compression),
        top_k=np.int64(options.top_k),
        scale=np.float32(options.scale),
        rope_base=np.float64(options.rope_base),
    )
    return Results(*outs[:3])
