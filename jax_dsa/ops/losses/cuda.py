"""The indexer's losses on their CUDA kernels."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_dsa.core import ffi
from jax_dsa.ops.losses.spec import (
    DenseOperands,
    DenseOptions,
    DenseResults,
    Gradients,
    Operands,
    Options,
    Results,
    Saved,
)

# The kernels' limits; tests/test_ffi.py compares them with those of the extension.
MAX_SLOTS = 2**31 - 1 - 16384
DIMS = (576, 512, 256, 192, 128, 64)
CHANNELS = (32, 64, 128)
MAX_INDEX_HEADS = 64

# Bytes of workspace for logits, teachers and partial gradients in the kernels of the dense loss.
# With 32768 keys, it holds those of some 1300 queries at a time.
DENSE_BUDGET = 512 * 2**20


def fwd_supports(options: Options, x: Operands) -> str | None:
    """Returns None, or the reason why the kernel of `indexer_kl_loss` does not cover this call."""
    if x.logits.dtype != jnp.float32 or x.teacher.dtype != jnp.float32:
        return f"it takes float32, got logits of {x.logits.dtype}, teacher of {x.teacher.dtype}"
    return _slots_supported(x.logits)


def bwd_supports(options: Options, x: Saved, dy: Results) -> str | None:
    """Returns None, or the reason why the kernel of the gradient does not cover this call."""
    if x.logits.dtype != jnp.float32:
        return f"it takes float32, got {x.logits.dtype}"
    return _slots_supported(x.logits)


def _slots_supported(x: Any) -> str | None:
    """Returns None, or the reason why the kernels do not cover this number of slots."""
    return None if x.shape[2] <= MAX_SLOTS else f"it takes K up to {MAX_SLOTS}, got {x.shape[2]}"


def dense_fwd_supports(options: DenseOptions, x: DenseOperands) -> str | None:
    """Returns None, or the reason why the kernels of the dense loss do not cover this call."""
    if options.block_size > 1:
        return f"it takes block_size 1, got {options.block_size}"
    if any(a.dtype != jnp.bfloat16 for a in (x.index_q, x.index_k, x.q, x.kv)):
        dtypes = ", ".join(str(a.dtype) for a in (x.index_q, x.index_k, x.q, x.kv))
        return f"it takes bfloat16, got index_q, index_k, q, kv of {dtypes}"
    heads, channels = x.index_q.shape[2:]
    if channels not in CHANNELS:
        return f"it takes C in {CHANNELS}, got C={channels}"
    if not 1 <= heads <= MAX_INDEX_HEADS:
        return f"it takes J in 1..{MAX_INDEX_HEADS}, got J={heads}"
    if x.q.shape[2] == 0:
        return "it takes at least one head"
    if x.q.shape[3] not in DIMS:
        return f"it takes D in {DIMS}, got D={x.q.shape[3]}"
    if max(x.q.shape[1], x.kv.shape[1]) > MAX_SLOTS:
        return f"it takes T and S up to {MAX_SLOTS}, got T={x.q.shape[1]}, S={x.kv.shape[1]}"
    return None


def indexer_kl_loss_fwd(options: Options, avals: Results, x: Operands) -> Results:
    """Computes `xla.indexer_kl_loss_fwd` on its kernel."""
    row_weight = np.float32(options.row_weight)
    return Results(*ffi.call("jax_dsa.indexer_kl_loss_fwd.v2", x, avals, share=row_weight))


def indexer_kl_loss_bwd(options: Options, avals: Gradients, x: Saved, dy: Results) -> Gradients:
    """Computes `xla.indexer_kl_loss_bwd` on its kernel, which overwrites the saved gradients."""
    args, row_weight = (x.logits, dy.kl), np.float32(options.row_weight)
    return Gradients(
        *ffi.call("jax_dsa.indexer_kl_loss_bwd.v2", args, avals, aliases={0: 0}, share=row_weight)
    )


def dense_indexer_kl_loss_fwd(
    options: DenseOptions, avals: DenseResults, x: DenseOperands
) -> DenseResults:
    """Runs the kernels of the dense loss, in as few chunks of queries as the budget allows."""
    batch, queries, heads, _ = x.q.shape
    keys, channels = x.index_k.shape[1:]

    def workspace_bytes(batch: int, queries: int) -> int:
        return int(
            ffi.extension().dense_loss_bytes(
                batch=batch, queries=queries, keys=keys, channels=channels, heads=heads
            )
        )

    size = max(workspace_bytes(1, 1), min(workspace_bytes(batch, queries), DENSE_BUDGET))
    *results, _ = ffi.call(
        "jax_dsa.dense_indexer_kl_loss_fwd.v1",
        x,
        [*avals, jax.ShapeDtypeStruct((size,), jnp.uint8)],
        relu=np.bool_(options.relu),
        scale=np.float32(options.scale),
    )
    return DenseResults(*results)
