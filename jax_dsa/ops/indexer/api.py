"""The lightning indexer: which keys a query should attend to."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from jax_dsa.core.arguments import key_ranges
from jax_dsa.core.call import Call
from jax_dsa.core.checks import FLOATS, FP8, INT32, WIDE_FLOATS, Args
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

_LIMITS = f"J <= {cuda.MAX_HEADS}; C {either(cuda.CHANNELS)}"

LOGITS_FWD = Pass(
    "indexer_logits_fwd",
    xla.indexer_logits_fwd,
    shardable="b t",
    kernel=Kernel(
        cuda.indexer_logits_fwd,
        cuda.logits_fwd_supports,
        limits=f"bfloat16 or float8_e4m3fn; {_LIMITS}",
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
        limits=f"bfloat16 or float8_e4m3fn; {_LIMITS}; top_k <= {MAX_SELECTED}",
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
    ),
)
SELECTED_FWD = Pass(
    "indexer_selected_fwd",
    xla.indexer_selected_fwd,
    shardable="b t",
    shard_queries_on_idle_axes=True,
)


def _topk_bwd(call: Call, options: Options, x: Selected, dy: Selection) -> Gradients:
    if options.page_size is not None:
        raise NotImplementedError(
            f"{call.op}: gradients through a page table are not supported; gather the keys"
        )
    return TOPK_BWD(call, options, x, dy)


def selected(x: Operands | IndexerOperands, indices: Int[Array, "B T K"]) -> Selected:
    """Returns the indexer's inputs with a selection of keys."""
    return Selected(q=x.q, k=x.k, weights=x.weights, k_scale=x.k_scale, indices=indices)


# The operators without their checks.
indexer_logits_op = differentiable(
    "indexer_logits", LOGITS_FWD, LOGITS_BWD, residuals=lambda x, y: (x,)
)
indexer_topk_op = differentiable(
    "indexer_topk", TOPK_FWD, _topk_bwd, residuals=lambda x, y: (selected(x, y.indices),)
)
indexer_selected_op = differentiable(
    "indexer_selected", SELECTED_FWD, TOPK_BWD, residuals=lambda x, y: (x,)
)


def _weights(args: Args, index_weights: Any) -> Float[Array, "B T J"]:
    """The argument of this name, in float32 at least."""
    weights = args.array("index_weights", index_weights, "B T J", FLOATS)
    return weights if weights.dtype in WIDE_FLOATS else weights.astype(jnp.float32)


def indexer_inputs(
    args: Args, index_q: Any, index_k: Any, index_weights: Any, index_k_scale: Any
) -> IndexerOperands:
    """Returns the checked arguments of these names, all of which are arrays."""
    q = args.array("index_q", index_q, "B T J C", (*FLOATS, FP8))
    keys = Keys(args.array("index_k", index_k, "B S C", (q.dtype,)), None, None, None)
    return _inputs(args, q, keys, index_weights, index_k_scale)


def _inputs(
    args: Args, q: Array, keys: Keys, index_weights: Any, index_k_scale: Any
) -> IndexerOperands:
    weights = _weights(args, index_weights)
    if index_k_scale is not None:
        index_k_scale = keys.alongside(args, "index_k_scale", index_k_scale, "", WIDE_FLOATS)
    return IndexerOperands(q=q, k=keys.rows, weights=weights, k_scale=index_k_scale)


def _operands(
    inputs: IndexerOperands, ranges: tuple[Any, Any], page_table: Array | None = None
) -> Operands:
    starts, ends = ranges
    return Operands(
        q=inputs.q,
        k=inputs.k,
        weights=inputs.weights,
        k_scale=inputs.k_scale,
        starts=starts,
        ends=ends,
        page_table=page_table,
    )


def indexer_logits(
    index_q: Float[Array, "B T J C"],
    index_k: Float[Array, "B S C"],
    index_weights: Float[Array, "B T J"],
    *,
    index_k_scale: Float[Array, "B S"] | None = None,
    is_causal: bool = False,
    query_start: int | Int[Array, "*B"] = 0,
    starts: Int[Array, "B T"] | None = None,
    ends: Int[Array, "B T"] | None = None,
    relu: bool = True,
    implementation: Implementation | None = None,
) -> Float[Array, "B T S"]:
    """How much every query wants every key, by the lightning indexer.

    `I[t,s] = index_k_scale[s] * sum_j index_weights[t,j] * relu(index_q[t,j] . index_k[s])`. Keys
    that a query does not see get -inf. All of index_q, index_k, index_weights and index_k_scale are
    differentiable; relu's derivative at 0 is 0. The batch axis may be absent from all arguments.

    Args:
        index_q: queries of J heads; bfloat16, float16, float32 or float8_e4m3fn, whose scale
            belongs in `index_weights`.
        index_k: keys, one head, of index_q's dtype.
        index_weights: weight of each head for each query, float32 (or bfloat16 or float16, which
            become float32), with every constant factor (J^-1/2 C^-1/2, say) already multiplied in.
        index_k_scale: float32 scale of each key, for FP8 keys.
        is_causal: query t sees only keys up to its own position `query_start + t`.
        query_start: position of the first query among the keys: an int, a scalar, or one for each
            batch entry.
        starts: each query's first key; default 0. Clipped to 0..S.
        ends: one past each query's last key; default S. Clipped to 0..S. A causal query sees up to
            the lesser of both ends.
        relu: False leaves the relu out.
        implementation: None (the kernel where there is one, else XLA), "cuda" or "xla".

    Returns:
        float32 logits. NaN or Inf in a key reaches no logit but its own, and none if no query sees
        it.

    Raises:
        TypeError, ValueError: an argument has the wrong type, shape or range.
        NotImplementedError: forward mode, gradients of gradients, or `implementation="cuda"` for
            what it does not cover.

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
    ranges = key_ranges(args, starts, ends, is_causal, query_start)
    options = Options(relu=args.flag("relu", relu))
    return args.restore(indexer_logits_op(call, options, _operands(inputs, ranges))).logits


def indexer_topk(
    index_q: Float[Array, "B T J C"],
    index_k: Float[Array, "B S C"] | FlatCache | PagedCache,
    index_weights: Float[Array, "B T J"],
    top_k: int,
    *,
    index_k_scale: Float[Array, "B S"] | None = None,
    is_causal: bool = False,
    query_start: int | Int[Array, "*B"] = 0,
    starts: Int[Array, "B T"] | None = None,
    ends: Int[Array, "B T"] | None = None,
    relu: bool = True,
    deterministic: bool = False,
    implementation: Implementation | None = None,
) -> tuple[Int[Array, "B T K"], Float[Array, "B T K"]]:
    """The `top_k` keys of the largest `indexer_logits` for every query, without a [T, S] array.

    The same set as `topk(indexer_logits(...), top_k)`, in bounded memory, forward and backward. The
    indices are named "dsa_topk_indices" for remat policies.

    Args:
        index_q, index_weights, index_k_scale, starts, ends, relu: as in `indexer_logits`.
        index_k: keys, as in `indexer_logits`; or, for decoding, a cache of rows [..., 1, C], whose
            lengths then bound what the last T tokens of each request see. Keys on an unmapped page
            are not seen. With a `PagedCache` index_k_scale is [P, L], and there is no gradient.
        top_k: K, how many keys to select, >= 0; may exceed S.
        is_causal, query_start: as in `indexer_logits`. With a cache, query t stands at position
            `lengths[b] - T + t`, and query_start stays 0.
        deterministic: gradients that are bit-identical from run to run; on XLA only. The selection
            always is.
        implementation: None (the kernel where there is one, else XLA), "cuda" or "xla".

    Returns:
        indices: int32, ascending, valid ones first, then -1.
        logits: float32, -inf where the index is -1; differentiable, through the selected keys only.

    Raises:
        TypeError, ValueError: an argument has the wrong type, shape or range.
        NotImplementedError: as for `indexer_logits`, or gradients through a page table.

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
    keys = read_keys(args, "index_k", index_k, "C", "1 C", (q.dtype,))
    inputs = _inputs(args, q, keys, index_weights, index_k_scale)
    ranges = key_ranges(args, starts, ends, is_causal, query_start, keys.lengths)
    options = Options(
        relu=args.flag("relu", relu),
        top_k=args.integer("top_k", top_k, 0),
        deterministic=args.flag("deterministic", deterministic),
        page_size=keys.page_size,
    )
    operands = _operands(inputs, ranges, keys.page_table)
    selection = args.restore(indexer_topk_op(call, options, operands))
    return selection.indices, selection.logits


def indexer_selected_logits(
    index_q: Float[Array, "B T J C"],
    index_k: Float[Array, "B S C"],
    index_weights: Float[Array, "B T J"],
    indices: Int[Array, "B T K"],
    *,
    index_k_scale: Float[Array, "B S"] | None = None,
    relu: bool = True,
    implementation: Implementation | None = None,
) -> Float[Array, "B T K"]:
    """Returns the `indexer_logits` of keys that are selected already.

    It replays a recorded selection: the logits are those that `indexer_topk` would return for the
    same keys, and they have the same gradients. The batch axis may be absent from all arguments.

    Args:
        index_q: As in `indexer_logits`.
        index_k: As in `indexer_logits`.
        index_weights: As in `indexer_logits`.
        indices: Selected keys of each query, int32. Negative entries, and entries from S on, are
            empty slots.
        index_k_scale: As in `indexer_logits`.
        relu: As in `indexer_logits`.
        implementation: None or "xla"; the forward pass has no kernel.

    Returns:
        Logits of shape [B, T, K], float32, -inf in empty slots. They are differentiable in index_q,
        index_k, index_weights and index_k_scale.

    Raises:
        TypeError, ValueError: If an argument has the wrong type or shape.
        NotImplementedError: For forward mode, gradients of gradients, or `implementation="cuda"`.

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
