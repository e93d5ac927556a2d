"""The lightning indexer on CUDA kernels."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_dsa.core import ffi
from jax_dsa.core.checks import FP8
from jax_dsa.ops.indexer.spec import (
    BlockOperands,
    BlockOptions,
    BlockSelected,
    BlockSelection,
    Gradients,
    Logits,
    Operands,
    Options,
    Selected,
    Selection,
    folded,
    weights_of_groups,
)
from jax_dsa.ops.topk.cuda import selects
from jax_dsa.ops.topk.spec import clipped_block

# The limits of the kernels. tests/test_ffi.py compares them with those of the extension.
CHANNELS = (32, 64, 128)
MAX_CANDIDATE_BLOCKS = 2**20
MAX_HEADS = 64
MAX_KEYS = 2**31 - 1 - 4096
MAX_SLOTS = 8192
PAGE_MULTIPLE = 64
MAX_BLOCKS = 16384
MAX_LISTS = 2**31 - 1 - 4096

# The kernel for heads that select for themselves takes smaller blocks, too, but multiplies each of
# them with a tile of 128 keys.
MIN_BLOCK_SIZE = 64

# Bytes of logits that the kernels of `indexer_topk` hold in memory at a time. Tuned for an H100 or
# H200 with 132 SMs: each SM selects from two rows at once, which takes 138 MB of float32 logits at
# 131072 keys. With a smaller workspace, some SMs would be idle at this length. GPUs with more SMs
# would gain from a larger one. Results do not depend on the size.
LOGITS_BUDGET = 144 * 10**6

# The same inside candidate blocks, for logits and lists of blocks. The rows are shorter: with 16384
# candidate keys, 64 MiB hold about 900 queries, seven for each SM.
CANDIDATES_BUDGET = 64 * 2**20

# Bytes of scores and logits that the kernels of `indexer_block_topk` hold in memory at a time. A
# chunk of queries occupies all SMs at any length, because the SMs divide its keys.
BLOCKS_BUDGET = 60 * 2**20


def logits_fwd_supports(options: Options, x: Operands | Selected) -> str | None:
    """Returns why the kernel of `indexer_logits` does not support a call, or None if it does."""
    if x.q.dtype not in (jnp.bfloat16, FP8):
        return f"it takes bfloat16 or float8_e4m3fn, got {x.q.dtype}"
    return _shapes_supported(x.q, x.k)


def topk_fwd_supports(options: Options, x: Operands) -> str | None:
    """Returns why the kernels of `indexer_topk` do not support a call, or None if they do."""
    if (options.page_size or 0) % PAGE_MULTIPLE != 0:
        return f"it takes pages of a multiple of {PAGE_MULTIPLE} keys, got {options.page_size}"
    if x.page_table is not None and not 0 < x.k.shape[1] <= MAX_KEYS:
        return f"it takes pools of 1 to {MAX_KEYS} keys, got {x.k.shape[1]}"
    keys = _keys(options, x)
    if x.candidates is not None:
        block = _candidate_block(options, keys)
        if -(-keys // block) > MAX_CANDIDATE_BLOCKS:
            return f"it takes up to {MAX_CANDIDATE_BLOCKS} blocks of keys, got {-(-keys // block)}"
        keys = min(keys, x.candidates.shape[2] * block)
    return logits_fwd_supports(options, x) or selects(options.top_k, keys)


def selected_fwd_supports(options: Options, x: Selected) -> str | None:
    """Returns why the kernel does not support the logits of a selection, or None if it does."""
    if x.indices.shape[2] > MAX_KEYS:
        return f"it takes K up to {MAX_KEYS}, got K={x.indices.shape[2]}"
    return logits_fwd_supports(options, x)


def topk_bwd_supports(options: Options, x: Selected, dy: Selection) -> str | None:
    """Returns why the kernels of the backward pass do not support a call, or None if they do."""
    if options.deterministic:
        return "its sums over a key's slots have no fixed order (deterministic=True)"
    if x.q.dtype != jnp.bfloat16:
        return f"it takes bfloat16, got {x.q.dtype}"
    if x.indices.shape[2] > MAX_SLOTS:
        return f"it takes K up to {MAX_SLOTS}, got K={x.indices.shape[2]}"
    return _shapes_supported(x.q, x.k)


def block_topk_fwd_supports(options: BlockOptions, x: BlockOperands) -> str | None:
    """Returns why the kernels of `indexer_block_topk` do not support a call, or None if they do."""
    batch, queries, groups, heads, channels = x.q.shape
    size, block_size = _keys(options, x), options.blocks.block_size
    if options.mean:
        return "it takes pooling='max'"
    if x.q.dtype not in (jnp.bfloat16, FP8):
        return f"it takes bfloat16 or float8_e4m3fn, got {x.q.dtype}"
    if (options.page_size or 0) % PAGE_MULTIPLE != 0:
        return f"it takes pages of a multiple of {PAGE_MULTIPLE} keys, got {options.page_size}"
    if x.page_table is not None and not 0 < x.k.shape[1] <= MAX_KEYS:
        return f"it takes pools of 1 to {MAX_KEYS} keys, got {x.k.shape[1]}"
    if _selects_per_head(x):
        heads = groups
        if block_size < MIN_BLOCK_SIZE:
            return f"it takes blocks of {MIN_BLOCK_SIZE} keys or more with per_head=True"
        if x.page_table is not None and (x.starts is not None or block_size % PAGE_MULTIPLE != 0):
            return (
                f"with pages and per_head=True it takes blocks of a multiple of {PAGE_MULTIPLE} "
                f"keys and no 'starts'"
            )
    elif groups != 1:
        return f"it takes one group of heads, or groups of one head without weights, got {groups}"
    if batch * queries * groups > MAX_LISTS:
        return f"it takes at most {MAX_LISTS} lists, got {batch * queries * groups}"
    if -(-size // clipped_block(block_size, size)) > MAX_BLOCKS:
        return f"it takes at most {MAX_BLOCKS} blocks, got {-(-size // block_size)}"
    return _sizes_supported(heads, channels, size)


def block_topk_bwd_supports(
    options: BlockOptions, x: BlockSelected, dy: BlockSelection
) -> str | None:
    """Returns why the kernels of the backward pass do not support a call, or None if they do."""
    if options.mean:
        return "it takes pooling='max'"
    return topk_bwd_supports(options, _selected(x), Selection(folded(x.keys), folded(dy.logits)))


def _selects_per_head(x: BlockOperands) -> bool:
    return x.weights is None and x.q.shape[3] == 1


def _shapes_supported(q: Any, k: Any) -> str | None:
    return _sizes_supported(q.shape[2], q.shape[3], k.shape[1])


def _sizes_supported(heads: int, channels: int, size: int) -> str | None:
    if channels not in CHANNELS:
        return f"it has C in {CHANNELS}, got C={channels}"
    if not 1 <= heads <= MAX_HEADS:
        return f"it has J in 1..{MAX_HEADS}, got J={heads}"
    if size > MAX_KEYS:
        return f"it takes S up to {MAX_KEYS}, got S={size}"
    return None


def _keys(options: Options, x: Operands | BlockOperands) -> int:
    """Returns S, the number of keys that a request may have."""
    if x.page_table is None:
        return x.k.shape[1]
    assert options.page_size is not None
    return x.page_table.shape[1] * options.page_size


def indexer_logits_fwd(options: Options, avals: Logits, x: Operands) -> Logits:
    """Runs the kernel of `xla.indexer_logits_fwd`."""
    operands = x.q, x.k, x.weights, x.k_scale, x.starts, x.ends
    relu = np.bool_(options.relu)
    return Logits(*ffi.call("jax_dsa.indexer_logits_fwd.v1", operands, avals, relu=relu))


def indexer_topk_fwd(options: Options, avals: Selection, x: Operands) -> Selection:
    """Runs the kernels of `xla.indexer_topk_fwd`.

    The workspace holds the logits of some queries. The kernels process these queries at a time.
    """
    if x.candidates is not None:
        return _candidates_fwd(options, avals, x)
    keys = max(1, _keys(options, x))
    queries = min(x.q.shape[0] * x.q.shape[1], LOGITS_BUDGET // (4 * keys))
    workspace = jax.ShapeDtypeStruct((max(1, queries) * keys,), jnp.float32)
    indices, logits, _ = ffi.call(
        "jax_dsa.indexer_topk_fwd.v1",
        x[: Operands._fields.index("candidates")],
        [*avals, workspace],
        relu=np.bool_(options.relu),
        page_size=np.int64(options.page_size or 0),
    )
    return Selection(indices, logits)


def _candidates_fwd(options: Options, avals: Selection, x: Operands) -> Selection:
    """Runs the kernels that score candidate blocks only.

    The workspace holds, for some queries at a time, the logits of a query's candidate keys, the
    list of its blocks, and their number.
    """
    assert x.candidates is not None
    keys, (batch, queries, slots) = _keys(options, x), x.candidates.shape
    block = _candidate_block(options, keys)
    row = -(-min(keys, slots * block) // 4) * 4 + min(slots, -(-keys // block)) + 1
    count = max(1, min(batch * queries, CANDIDATES_BUDGET // (4 * row)))
    workspace = jax.ShapeDtypeStruct((count * row,), jnp.float32)
    indices, logits, _ = ffi.call(
        "jax_dsa.indexer_candidates_fwd.v1",
        x,
        [*avals, workspace],
        relu=np.bool_(options.relu),
        page_size=np.int64(options.page_size or 0),
        block_size=np.int64(block),
    )
    return Selection(indices, logits)


def _candidate_block(options: Options, keys: int) -> int:
    """Returns the number of keys in a candidate block, at most that of all keys."""
    assert options.candidate_block_size is not None
    return clipped_block(options.candidate_block_size, keys)


def indexer_selected_fwd(options: Options, avals: Selection, x: Selected) -> Selection:
    """Runs the kernel of `xla.indexer_selected_fwd`."""
    relu = np.bool_(options.relu)
    (logits,) = ffi.call("jax_dsa.indexer_selected_fwd.v1", x, [avals.logits], relu=relu)
    return Selection(x.indices, logits)


def indexer_topk_bwd(options: Options, avals: Gradients, x: Selected, dy: Selection) -> Gradients:
    """Runs the kernels of `xla.indexer_topk_bwd`.

    The workspace `relu_mask` holds one bit per slot and head: whether the score is positive.
    """
    batch, queries, slots = x.indices.shape
    relu_mask = jax.ShapeDtypeStruct((batch, queries, -(-slots // 64) * 64, 2), jnp.uint32)
    *grads, _ = ffi.call(
        "jax_dsa.indexer_topk_bwd.v1",
        [x.q, x.k, x.weights, x.k_scale, x.indices, dy.logits],
        [*avals, relu_mask],
        relu=np.bool_(options.relu),
    )
    return Gradients(*grads)


def indexer_block_topk_fwd(
    options: BlockOptions, avals: BlockSelection, x: BlockOperands
) -> BlockSelection:
    """Runs the kernels of `blocks.indexer_block_topk_fwd`.

    The workspaces hold the scores of all blocks for some queries and, if the heads of a query
    select together, its logits. The kernels process these queries at a time.
    """
    batch, queries, groups = x.q.shape[:3]
    size = max(1, _keys(options, x))
    block_size = clipped_block(options.blocks.block_size, size)
    per_head = _selects_per_head(x)
    scores = groups * -(-size // block_size)
    logits = 0 if per_head else size
    at_once = max(1, min(batch * queries, BLOCKS_BUDGET // (8 * scores + 4 * logits)))
    if not per_head:
        starts = jnp.zeros_like(x.ends) if x.starts is None else x.starts
        x = x._replace(weights=weights_of_groups(x), starts=starts)
    *results, _, _ = ffi.call(
        "jax_dsa.indexer_block_topk_fwd.v1",
        x,
        [
            *avals,
            jax.ShapeDtypeStruct((at_once * scores, 2), jnp.float32),
            None if per_head else jax.ShapeDtypeStruct((at_once * logits,), jnp.float32),
        ],
        relu=np.bool_(options.relu),
        page_size=np.int64(options.page_size or 0),
        block_size=np.int64(block_size),
        sink_blocks=np.int64(options.blocks.sink_blocks),
        local_blocks=np.int64(options.blocks.local_blocks),
    )
    return BlockSelection(*results)


def indexer_block_topk_bwd(
    options: BlockOptions, avals: Gradients, x: BlockSelected, dy: BlockSelection
) -> Gradients:
    """Runs the kernels of `indexer_topk`'s backward pass, with groups in the axis of queries."""
    selected = _selected(x)
    dq: Any = jax.ShapeDtypeStruct(selected.q.shape, avals.q.dtype)
    dweights: Any = jax.ShapeDtypeStruct(selected.weights.shape, jnp.float32)
    given = Selection(selected.indices, folded(dy.logits))
    grads = indexer_topk_bwd(options, avals._replace(q=dq, weights=dweights), selected, given)
    assert grads.weights is not None
    return grads._replace(
        q=grads.q.reshape(x.q.shape),
        weights=None if x.weights is None else grads.weights.reshape(x.weights.shape),
    )


def _selected(x: BlockSelected) -> Selected:
    weights = folded(weights_of_groups(x))
    return Selected(folded(x.q), x.k, weights, x.k_scale, folded(x.keys))
