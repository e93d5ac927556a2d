"""Top-k on CUDA kernels."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jax_dsa.core import ffi
from jax_dsa.ops.topk.spec import (
    BlockOperands,
    BlockResults,
    Blocks,
    Operands,
    Options,
    Results,
    clipped_block,
)

# The limits of the kernels. tests/test_ffi.py compares them with those of the extension.
MAX_BLOCKS = 16384
MAX_SELECTED = 4096
MAX_SIZE = 2**31 - 1 - 2**16
MAX_ROWS = (2**31 - 1) // 8

# Bytes of scores that the kernels of `block_topk` hold in memory at a time: 16384 rows of 256
# blocks, or two of the longest rows for each SM.
SCORES_BUDGET = 32 * 2**20


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


def block_supports(options: Blocks, x: BlockOperands) -> str | None:
    """Returns why the kernels of `block_topk` do not support a call, or None if they do."""
    batch, queries, size = x.logits.shape
    blocks = -(-size // clipped_block(options.block_size, size))
    if x.logits.dtype != jnp.float32:
        return f"it takes float32, got {x.logits.dtype}"
    if batch * queries > MAX_ROWS:
        return f"it takes at most {MAX_ROWS} rows, got {batch * queries}"
    if blocks > MAX_BLOCKS:
        return f"it takes at most {MAX_BLOCKS} blocks, got {blocks}"
    if size > MAX_SIZE:
        return f"it takes rows of at most {MAX_SIZE} values, got {size}"
    return None


def block_topk_fwd(options: Blocks, avals: BlockResults, x: BlockOperands) -> BlockResults:
    """Runs the kernels of `xla.block_topk_fwd`, over as many rows as the workspace holds."""
    batch, queries, size = x.logits.shape
    block_size = clipped_block(options.block_size, size)
    blocks = max(1, -(-size // block_size))
    rows = max(1, min(batch * queries, SCORES_BUDGET // (8 * blocks)))
    scores = jax.ShapeDtypeStruct((rows, blocks, 2), jnp.float32)
    indices, _ = ffi.call(
        "jax_dsa.block_topk_fwd.v1",
        x,
        (*avals, scores),
        block_size=np.int64(block_size),
        sink_blocks=np.int64(options.sink_blocks),
        local_blocks=np.int64(options.local_blocks),
    )
    return BlockResults(indices)
