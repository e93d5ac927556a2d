"""`indexer_block_topk`: the lightning indexer selects blocks of keys."""

from __future__ import annotations

from typing import Literal

import jax.numpy as jnp

from jax_dsa.core.arguments import key_ranges
from jax_dsa.core.call import Call
from jax_dsa.core.checks import FLOATS, FP8, Args
from jax_dsa.core.ffi import Kernel, either
from jax_dsa.core.op import Pass, differentiable
from jax_dsa.core.typing import Array, Float, Implementation, Int
from jax_dsa.ops.cache.api import FlatCache, PagedCache
from jax_dsa.ops.cache.keys import read_keys
from jax_dsa.ops.indexer import blocks, cuda
from jax_dsa.ops.indexer.api import FP8_FORM, inputs_of, refuse_pages
from jax_dsa.ops.indexer.spec import (
    BlockOperands,
    BlockOptions,
    BlockSelected,
    BlockSelection,
    Gradients,
)
from jax_dsa.ops.topk.api import blocks_of

_LIMITS = f"J <= {cuda.MAX_HEADS}; C {either(cuda.CHANNELS)}; pooling='max'"

BLOCK_FWD = Pass(
    "indexer_block_topk_fwd",
    blocks.indexer_block_topk_fwd,
    shardable="b t g",
    shard_queries_on_idle_axes=True,
    kernel=Kernel(
        cuda.indexer_block_topk_fwd,
        cuda.block_topk_fwd_supports,
        limits=(
            f"bfloat16 or float8_e4m3fn; {_LIMITS}; up to {cuda.MAX_BLOCKS} blocks, with per_head "
            f"of {cuda.MIN_BLOCK_SIZE} keys or more"
        ),
        portable=cuda.block_topk_fwd_supports,
    ),
)
BLOCK_BWD = Pass(
    "indexer_block_topk_bwd",
    blocks.indexer_block_topk_bwd,
    shardable="b t g",
    shard_queries_on_idle_axes=True,
    kernel=Kernel(
        cuda.indexer_block_topk_bwd,
        cuda.block_topk_bwd_supports,
        limits=f"bfloat16; {_LIMITS}; K <= {cuda.MAX_SLOTS}",
        portable=cuda.block_topk_bwd_supports,
    ),
)


def _bwd(call: Call, options: BlockOptions, x: BlockSelected, dy: BlockSelection) -> Gradients:
    refuse_pages(call, options)
    return BLOCK_BWD(call, options, x, dy)


def _selected(x: BlockOperands, y: BlockSelection) -> tuple[BlockSelected]:
    return (BlockSelected(q=x.q, k=x.k, weights=x.weights, k_scale=x.k_scale, keys=y.keys),)


# The operator without checks of its arguments.
indexer_block_topk_op = differentiable("indexer_block_topk", BLOCK_FWD, _bwd, residuals=_selected)

POOLINGS = ("max", "mean")


def indexer_block_topk(
    index_q: Float[Array, "B T J C"],
    index_k: Float[Array, "B S C"] | FlatCache | PagedCache,
    index_weights: Float[Array, "B T J"] | None,
    top_k: int,
    *,
    block_size: int,
    per_head: bool = False,
    pooling: Literal["max", "mean"] = "max",
    sink_blocks: int = 0,
    local_blocks: int = 1,
    index_k_scale: Float[Array, "B S"] | None = None,
    is_causal: bool = False,
    query_start: int | Int[Array, "*B"] = 0,
    starts: Int[Array, "B T"] | None = None,
    ends: Int[Array, "B T"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    key_stride: int = 1,
    relu: bool = True,
    deterministic: bool = False,
    implementation: Implementation | None = None,
) -> tuple[
    Int[Array, "B T K"] | Int[Array, "B T J K"], Float[Array, "B T K"] | Float[Array, "B T J K"]
]:
    """Returns the `top_k` blocks of keys with the largest `indexer_logits` for every query.

    A block's logit is the largest logit of its keys that the query sees. Blocks with larger logits
    come first, and among equal logits smaller numbers come first. Forced blocks come before all
    others, inside the budget of `top_k` blocks. (Those of `sparse_attention` come beside its
    lists.) Blocks count from the first key of the query's own document, so that no block crosses
    documents, as in `sparse_attention_varlen`. Neither the forward nor the backward pass stores a
    [T, S] array. The indices are named "dsa_topk_indices" for remat policies.

    A key with the logit -inf counts as not seen. NaN makes the logit of its block NaN, and such a
    block is selected only if it is forced.

    Args:
        index_q: As in `indexer_logits`.
        index_k: Keys or a cache of keys, as in `indexer_topk`.
        index_weights: As in `indexer_logits`. None means 1.
        top_k: Number of blocks K to select per query, forced blocks included, >= 0; may exceed the
            number of blocks.
        block_size: Number of keys per block. The last block of a query may have fewer.
        per_head: Whether every head selects for itself, by its own scores. `index_weights` must
            then be None. MiniMax-M3 does so, with `relu=False`.
        pooling: "max", or "mean" to score the mean of a block's keys (computed in float32, rounded
            to their dtype) in place of the keys, as HISA does. Only blocks of `block_size` visible
            keys, and forced blocks, are then selected. The mean needs an array or a `FlatCache`,
            and neither `index_k_scale`, `starts` nor `segment_ids`.
        sink_blocks: Number of first blocks that are forced.
        local_blocks: Number of newest blocks that are forced. The last of them has the last key
            that the query sees.
        index_k_scale: As in `indexer_topk`.
        is_causal: As in `indexer_logits`.
        query_start: As in `indexer_topk`.
        starts: As in `indexer_logits`. Block 0 of a query begins at its `starts`.
        ends: As in `indexer_logits`.
        segment_ids: As in `indexer_logits`; None with a cache.
        key_stride: As in `indexer_topk`.
        relu: As in `indexer_logits`.
        deterministic: Whether gradients are bit-identical on every run. The selection always is.
        implementation: As in `indexer_logits`. The kernels take up to 16384 blocks and
            pooling="max". With `per_head` they take blocks of 64 keys or more, and with a
            `PagedCache`, too, of a multiple of 64 keys and without `starts`.

    Returns:
        A tuple (indices, logits). Indices are numbers of blocks, [B, T, K], int32; valid ones come
        first, in ascending order, then -1. Logits have shape [B, T, K], float32, and are -inf where
        the index is -1. A forced block has its own logit; a block of fewer visible keys has
        no mean, so that its logit is -inf with "mean". With `per_head` the shapes are [B, T, J, K].
        The logits are differentiable, but not with a `PagedCache`. The gradient of a maximum goes
        to the first key that has it, that of a mean to all keys of the block.

    Raises:
        TypeError, ValueError: If an argument has the wrong type, shape or range.
        NotImplementedError: For forward mode, gradients of gradients, gradients through a page
            table, and if `implementation="cuda"` and the kernels do not support the call.

    Examples:
        >>> import jax, jax.numpy as jnp, jax_dsa
        >>> index_q = jax.random.normal(jax.random.key(0), (1, 8, 2, 32))
        >>> index_k = jax.random.normal(jax.random.key(1), (1, 8, 32))
        >>> indices, logits = jax_dsa.indexer_block_topk(
        ...     index_q, index_k, None, 2, block_size=2, per_head=True, relu=False, is_causal=True
        ... )
        >>> indices[0, :4, 0]
        Array([[ 0, -1],
               [ 0, -1],
               [ 0,  1],
               [ 0,  1]], dtype=int32)

    Sources: MiniMax-M3 (2026), block selection of its sparse attention; HISA, arXiv 2603.28458
    (2026), for the mean.
    """
    args = Args("indexer_block_topk", "index_q", index_q, "B T J C")
    call = args.call(implementation)
    q = args.array("index_q", index_q, "B T J C", (*FLOATS, FP8))
    each = args.flag("per_head", per_head)
    want = "None beside 'per_head', with which every head selects by its own scores"
    args.option("index_weights", index_weights, not (each and index_weights is not None), want)
    known = isinstance(pooling, str) and pooling in POOLINGS
    args.option("pooling", pooling, known, f"one of {POOLINGS}")
    if pooling == "mean":
        for name, x in (
            ("index_k_scale", index_k_scale),
            ("starts", starts),
            ("segment_ids", segment_ids),
        ):
            args.option(name, x, x is None, "None with pooling='mean'")
        paged, want = isinstance(index_k, PagedCache), "an array or a FlatCache with pooling='mean'"
        args.option("index_k", index_k, not paged, want)
    keys = read_keys(args, "index_k", index_k, "C", "1 C", (q.dtype,), fp8=FP8_FORM)
    inputs = inputs_of(args, q, keys, index_weights, index_k_scale)
    first, ends = key_ranges(
        args, starts, ends, is_causal, query_start, segment_ids, keys.lengths, key_stride
    )
    options = BlockOptions(
        relu=args.flag("relu", relu),
        top_k=args.integer("top_k", top_k, 0),
        deterministic=args.flag("deterministic", deterministic),
        page_size=keys.page_size,
        blocks=blocks_of(args, top_k, block_size, sink_blocks, local_blocks),
        mean=pooling == "mean",
    )
    # The heads form one group, or a group each.
    axis = 3 if each else 2
    weights = None if index_weights is None else jnp.expand_dims(inputs.weights, axis)
    operands = BlockOperands(
        q=jnp.expand_dims(q, axis),
        k=inputs.k,
        weights=weights,
        k_scale=inputs.k_scale,
        starts=None if starts is None and segment_ids is None else first,
        ends=ends,
        page_table=keys.page_table,
    )
    y = args.restore(indexer_block_topk_op(call, options, operands))
    indices, logits = (x if each else jnp.squeeze(x, -2) for x in (y.indices, y.logits))
    return indices, logits
