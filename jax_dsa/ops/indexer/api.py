"""The lightning indexer, which selects the keys that each query attends to."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from jax_dsa.core.arguments import key_ranges
from jax_dsa.core.call import Call
from jax_dsa.core.checks import FLOATS, FP8, INT32, WIDE_FLOATS, Args
from jax_dsa.core.deferred import Deferred
from jax_dsa.core.ffi import Kernel, either
from jax_dsa.core.op import Pass, differentiable
from jax_dsa.core.typing import Array, Float, Implementation, Int
from jax_dsa.ops.cache.api import FlatCache, PagedCache
from jax_dsa.ops.cache.keys import Keys, read_keys
from jax_dsa.ops.indexer import cuda, xla
from jax_dsa.ops.indexer.spec import (
    Gradients,
    IndexerOperands,
    Operands,
    Options,
    Selected,
    Selection,
)
from jax_dsa.ops.topk.cuda import MAX_SELECTED

# How the operators take FP8 keys, for messages.
FP8_FORM = "'index_q' and the cache in float8_e4m3fn, with 'index_k_scale'"

_LIMITS = f"J <= {cuda.MAX_HEADS}; C {either(cuda.CHANNELS)}"

LOGITS_FWD = Pass(
    "indexer_logits_fwd",
    xla.indexer_logits_fwd,
    shardable="b t",
    kernel=Kernel(
        cuda.indexer_logits_fwd,
        cuda.logits_fwd_supports,
        limits=f"bfloat16 or float8_e4m3fn; {_LIMITS}",
        portable=cuda.logits_fwd_supports,
    ),
)
LOGITS_BWD = Pass("indexer_logits_bwd", xla.indexer_logits_bwd, shardable="b t")
TOPK_FWD = Pass(
    "indexer_topk_fwd",
    xla.indexer_topk_fwd,
    shardable="b t",
    shard_queries_on_idle_axes=True,
    kernel=Kernel(
        cuda.indexer_topk_fwd,
        cuda.topk_fwd_supports,
        limits=f"bfloat16 or float8_e4m3fn; {_LIMITS}; top_k <= {MAX_SELECTED}; candidates: up to "
        f"{cuda.MAX_CANDIDATE_BLOCKS} blocks of keys",
        portable=cuda.topk_fwd_supports,
    ),
)
TOPK_BWD = Pass(
    "indexer_topk_bwd",
    xla.indexer_topk_bwd,
    shardable="b t",
    shard_queries_on_idle_axes=True,
    kernel=Kernel(
        cuda.indexer_topk_bwd,
        cuda.topk_bwd_supports,
        limits=f"bfloat16; {_LIMITS}; K <= {cuda.MAX_SLOTS}",
        portable=cuda.topk_bwd_supports,
    ),
)
SELECTED_FWD = Pass(
    "indexer_selected_fwd",
    xla.indexer_selected_fwd,
    shardable="b t",
    shard_queries_on_idle_axes=True,
    kernel=Kernel(
        cuda.indexer_selected_fwd,
        cuda.selected_fwd_supports,
        limits=f"bfloat16 or float8_e4m3fn; {_LIMITS}",
        portable=cuda.selected_fwd_supports,
    ),
)


def refuse_pages(call: Call, options: Options) -> None:
    """Raises if the keys of a backward pass are in pages."""
    if options.page_size is not None:
        raise NotImplementedError(
            f"{call.op}: gradients through a page table are not supported; gather the keys"
        )


def _topk_bwd(call: Call, options: Options, x: Selected, dy: Selection) -> Gradients:
    refuse_pages(call, options)
    return TOPK_BWD(call, options, x, dy)


def selected(x: Operands | IndexerOperands, indices: Int[Array, "B T K"]) -> Selected:
    """Returns the inputs of the indexer together with a selection of keys."""
    return Selected(q=x.q, k=x.k, weights=x.weights, k_scale=x.k_scale, indices=indices)


# The operators without checks of their arguments.
indexer_logits_op = differentiable(
    "indexer_logits", LOGITS_FWD, LOGITS_BWD, residuals=lambda x, y: (x,)
)
indexer_topk_op = differentiable(
    "indexer_topk", TOPK_FWD, _topk_bwd, residuals=lambda x, y: (selected(x, y.indices),)
)
indexer_selected_op = differentiable(
    "indexer_selected", SELECTED_FWD, TOPK_BWD, residuals=lambda x, y: (x,)
)


def _weights(args: Args, index_weights: Any) -> Any:
    """Returns the checked argument 'index_weights' in float32 or wider; ones if it is None."""
    if index_weights is None:
        return Deferred(jnp.ones, (), ((args.batch, args.sizes["T"], args.sizes["J"]), jnp.float32))
    weights = args.array("index_weights", index_weights, "B T J", FLOATS)
    return weights if weights.dtype in WIDE_FLOATS else weights.astype(jnp.float32)


def indexer_inputs(
    args: Args,
    index_q: Any,
    index_k: Any,
    index_weights: Any,
    index_k_scale: Any,
    letter: str = "S",
) -> IndexerOperands:
    """Returns the checked arguments of these names, where `index_k` is an array, not a cache.

    `letter` is that of the axis of the keys.
    """
    q = args.array("index_q", index_q, "B T J C", (*FLOATS, FP8))
    rows = args.array("index_k", index_k, f"B {letter} C", (q.dtype,))
    keys = Keys(rows, None, None, None, letter)
    return inputs_of(args, q, keys, index_weights, index_k_scale)


def inputs_of(
    args: Args, q: Array, keys: Keys, index_weights: Any, index_k_scale: Any
) -> IndexerOperands:
    """Returns the checked inputs of the indexer, where `q` and `keys` are checked already."""
    weights = _weights(args, index_weights)
    if index_k_scale is not None:
        index_k_scale = keys.alongside(args, "index_k_scale", index_k_scale, "", WIDE_FLOATS)
    return IndexerOperands(q=q, k=keys.rows, weights=weights, k_scale=index_k_scale)


def _operands(inputs: IndexerOperands, ranges: tuple[Any, Any]) -> Operands:
    starts, ends = ranges
    return Operands(
        q=inputs.q,
        k=inputs.k,
        weights=inputs.weights,
        k_scale=inputs.k_scale,
        starts=starts,
        ends=ends,
    )


def indexer_logits(
    index_q: Float[Array, "B T J C"],
    index_k: Float[Array, "B S C"],
    index_weights: Float[Array, "B T J"] | None,
    *,
    index_k_scale: Float[Array, "B S"] | None = None,
    is_causal: bool = False,
    query_start: int | Int[Array, "*B"] = 0,
    starts: Int[Array, "B T"] | None = None,
    ends: Int[Array, "B T"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    key_stride: int = 1,
    relu: bool = True,
    implementation: Implementation | None = None,
) -> Float[Array, "B T S"]:
    """Returns the lightning indexer's logit of every key for every query.

    `I[t,s] = index_k_scale[s] * sum_j index_weights[t,j] * relu(index_q[t,j] . index_k[s])`. Keys
    that a query does not see get -inf. The logits are differentiable in index_q, index_k,
    index_weights and index_k_scale; the derivative of the ReLU at 0 is 0. The batch axis may be
    absent from all arguments.

    Args:
        index_q: Queries of J heads; bfloat16, float16, float32 or float8_e4m3fn. The scales of FP8
            queries must be multiplied into `index_weights`.
        index_k: Keys, shared by all heads, in the dtype of index_q.
        index_weights: Weight of each head for each query, in float32, or in bfloat16 or float16,
            which become float32. They include the scale of the logits, which is J^-1/2 C^-1/2 in
            DeepSeek's models and in `jax_dsa.nn`. The operators apply no scale of their own. None
            means 1.
        index_k_scale: Scale of each key, float32, for FP8 keys. Default: 1.
        is_causal: Whether query t sees only keys up to its own position `query_start + t`.
        query_start: Position of the first query among the keys: an int, a scalar, or one position
            per batch entry.
        starts: First key of each query, clipped to 0..S. Default: 0.
        ends: Exclusive end of the keys of each query, clipped to 0..S. Default: S. A causal query
            sees keys up to the smaller of both ends.
        segment_ids: Numbers of packed documents, int32, if queries and keys are the same tokens
            (T == S, and `query_start` is 0). Each run of equal numbers is a document, and a query
            sees only its own document.
        key_stride: Tokens per key, for compressed keys. A causal query at position p sees key i if
            i < (p + 1) // key_stride; without `is_causal` it has no effect. Must be 1 with
            `segment_ids`.
        relu: Whether to apply the ReLU.
        implementation: None (the CUDA kernel if it supports the call, else XLA), "cuda" or "xla".

    Returns:
        Logits of shape [B, T, S], float32. NaN or Inf in a key affects only the logits of this key
        for queries that see it.

    Raises:
        TypeError, ValueError: If an argument has the wrong type, shape or range.
        NotImplementedError: For forward mode, for gradients of gradients, and if
            `implementation="cuda"` and the kernel does not support the call.

    Examples:
        >>> import jax, jax.numpy as jnp, jax_dsa
        >>> index_q = jax.random.normal(jax.random.key(0), (1, 6, 4, 32))  # 6 queries, 4 heads
        >>> index_k = jax.random.normal(jax.random.key(1), (1, 6, 32))
        >>> logits = jax_dsa.indexer_logits(index_q, index_k, jnp.ones((1, 6, 4)), is_causal=True)
        >>> (logits[0] > -jnp.inf).sum(-1)  # keys that each query sees
        Array([1, 2, 3, 4, 5, 6], dtype=int32)

    Source: DeepSeek-V3.2 (2025), section 2, "lightning indexer".
    """
    args = Args("indexer_logits", "index_q", index_q, "B T J C")
    call = args.call(implementation)
    inputs = indexer_inputs(args, index_q, index_k, index_weights, index_k_scale)
    ranges = key_ranges(
        args, starts, ends, is_causal, query_start, segment_ids, key_stride=key_stride
    )
    options = Options(relu=args.flag("relu", relu))
    return args.restore(indexer_logits_op(call, options, _operands(inputs, ranges))).logits


def indexer_topk(
    index_q: Float[Array, "B T J C"],
    index_k: Float[Array, "B S C"] | FlatCache | PagedCache,
    index_weights: Float[Array, "B T J"] | None,
    top_k: int,
    *,
    index_k_scale: Float[Array, "B S"] | None = None,
    is_causal: bool = False,
    query_start: int | Int[Array, "*B"] = 0,
    starts: Int[Array, "B T"] | None = None,
    ends: Int[Array, "B T"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    key_stride: int = 1,
    candidates: Int[Array, "B T M"] | None = None,
    candidate_block_size: int | None = None,
    relu: bool = True,
    deterministic: bool = False,
    implementation: Implementation | None = None,
) -> tuple[Int[Array, "B T K"], Float[Array, "B T K"]]:
    """Returns the `top_k` keys with the largest `indexer_logits` for every query.

    The selection equals `topk(indexer_logits(...), top_k)`, but neither the forward nor the
    backward pass stores a [T, S] array. The indices are named "dsa_topk_indices" for remat
    policies.

    Args:
        index_q: As in `indexer_logits`.
        index_k: Keys as in `indexer_logits`, or, for decoding, a cache of rows [..., 1, C]. The
            queries are then the last T tokens of each request, and `cache.lengths` bounds the keys
            that they see. Keys on an unmapped page are not seen.
        index_weights: As in `indexer_logits`. Their scale J^-1/2 C^-1/2 changes the logits, but not
            the selection.
        top_k: Number of keys K to select per query, >= 0; may exceed S.
        index_k_scale: As in `indexer_logits`; with a `PagedCache` the shape is [P, L].
        is_causal: As in `indexer_logits`.
        query_start: As in `indexer_logits`. With a cache it must be 0, and query t has position
            `lengths[b] - T + t`.
        starts: As in `indexer_logits`.
        ends: As in `indexer_logits`.
        segment_ids: As in `indexer_logits`; None with a cache.
        key_stride: As in `indexer_logits`. Must also be 1 with a cache (pass `ends`).
        candidates: Numbers of the blocks of keys that each query may select from, int32, as
            `indexer_block_topk` and `block_topk` return them. Blocks count from `starts`. Entries
            that are negative or past the last block are empty. The selection equals `topk` of the
            logits with -inf outside of these blocks, bit for bit. Default: all keys. The kernel
            scores these blocks only, XLA all keys.
        candidate_block_size: Number of keys per candidate block; required with `candidates`.
        relu: As in `indexer_logits`.
        deterministic: Whether gradients are bit-identical on every run, which only XLA supports.
            The selection always is.
        implementation: None (the CUDA kernel if it supports the call, else XLA), "cuda" or "xla".

    Returns:
        A tuple (indices, logits). Indices have shape [B, T, K], int32; valid ones come first, in
        ascending order, then -1. Logits have shape [B, T, K], float32, and are -inf where the index
        is -1. They are differentiable through the selected keys, but not with a `PagedCache`.

    Raises:
        TypeError, ValueError: If an argument has the wrong type, shape or range.
        NotImplementedError: As in `indexer_logits`, and for gradients through a page table.

    Examples:
        >>> import jax, jax.numpy as jnp, jax_dsa
        >>> index_q = jax.random.normal(jax.random.key(0), (1, 3, 4, 32))
        >>> index_k = jax.random.normal(jax.random.key(1), (1, 3, 32))
        >>> weights = jnp.ones((1, 3, 4))
        >>> indices, logits = jax_dsa.indexer_topk(index_q, index_k, weights, 2, is_causal=True)
        >>> indices[0, :2]
        Array([[ 0, -1],
               [ 0,  1]], dtype=int32)
    """
    args = Args("indexer_topk", "index_q", index_q, "B T J C")
    call = args.call(implementation)
    q = args.array("index_q", index_q, "B T J C", (*FLOATS, FP8))
    keys = read_keys(args, "index_k", index_k, "C", "1 C", (q.dtype,), fp8=FP8_FORM)
    inputs = inputs_of(args, q, keys, index_weights, index_k_scale)
    ranges = key_ranges(
        args, starts, ends, is_causal, query_start, segment_ids, keys.lengths, key_stride
    )
    block, want = candidate_block_size, "an int if 'candidates' is given, else None"
    args.option("candidate_block_size", block, (block is None) == (candidates is None), want)
    if candidates is not None:
        candidates = args.array("candidates", candidates, "B T M", INT32)
        block = args.integer("candidate_block_size", block, 1)
    options = Options(
        relu=args.flag("relu", relu),
        top_k=args.integer("top_k", top_k, 0),
        deterministic=args.flag("deterministic", deterministic),
        page_size=keys.page_size,
        candidate_block_size=block,
    )
    operands = _operands(inputs, ranges)._replace(page_table=keys.page_table, candidates=candidates)
    selection = args.restore(indexer_topk_op(call, options, operands))
    return selection.indices, selection.logits


def indexer_selected_logits(
    index_q: Float[Array, "B T J C"],
    index_k: Float[Array, "B S C"],
    index_weights: Float[Array, "B T J"] | None,
    indices: Int[Array, "B T K"],
    *,
    index_k_scale: Float[Array, "B S"] | None = None,
    relu: bool = True,
    implementation: Implementation | None = None,
) -> Float[Array, "B T K"]:
    """Returns the `indexer_logits` of keys that are selected already.

    It replays a recorded selection without scoring all keys: the logits are those that
    `indexer_topk` would return for the same keys, and they have the same gradients. If kernels
    compute both, they are equal bit for bit. The batch axis may be absent from all arguments.

    Args:
        index_q: As in `indexer_logits`.
        index_k: As in `indexer_logits`.
        index_weights: As in `indexer_logits`, with the scale of the logits.
        indices: Selected keys of each query, int32. Negative entries, and entries from S on, are
            empty slots.
        index_k_scale: As in `indexer_logits`.
        relu: As in `indexer_logits`.
        implementation: As in `indexer_logits`.

    Returns:
        Logits of shape [B, T, K], float32, -inf in empty slots. They are differentiable in index_q,
        index_k, index_weights and index_k_scale.

    Raises:
        TypeError, ValueError: If an argument has the wrong type or shape.
        NotImplementedError: As in `indexer_logits`.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> from jax_dsa.ops.indexer import indexer_selected_logits, indexer_topk
        >>> index_q = jax.random.normal(jax.random.key(0), (1, 3, 4, 32))
        >>> index_k = jax.random.normal(jax.random.key(1), (1, 3, 32))
        >>> inputs = index_q, index_k, jnp.ones((1, 3, 4))
        >>> indices, logits = indexer_topk(*inputs, 2, is_causal=True)
        >>> bool(jnp.allclose(indexer_selected_logits(*inputs, indices), logits))
        True
    """
    args = Args("indexer_selected_logits", "index_q", index_q, "B T J C")
    call = args.call(implementation)
    inputs = indexer_inputs(args, index_q, index_k, index_weights, index_k_scale)
    indices = args.array("indices", indices, "B T K", INT32)
    options = Options(relu=args.flag("relu", relu), top_k=indices.shape[2])
    return args.restore(indexer_selected_op(call, options, selected(inputs, indices))).logits
