"""The lightning indexer: which keys a query should attend to."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from jax_dsa.core.checks import FLOAT32, FLOATS, INT32, Args
from jax_dsa.core.ffi import Kernel
from jax_dsa.core.op import Pass, differentiable
from jax_dsa.ops.topk import TopkOptions, key_ranges
from jax_dsa.ops.topk import kernel_supports as selects
from jax_dsa.reference import indexer as reference

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int

    from jax_dsa.core.checks import Implementation

FP8 = jnp.float8_e4m3fn


@dataclasses.dataclass(frozen=True)
class IndexerOptions:
    """Static options of `indexer_logits` and, with the others, of `indexer_topk`."""

    relu: bool
    top_k: int = 0
    deterministic: bool = False
    page_size: int = 0
    """Of a key pool's pages; 0 without a page table."""


# What the kernels cover, as in cuda/indexer/indexer.h.
_KERNEL_CHANNELS = (32, 64, 128)
_KERNEL_HEADS = 64
_KERNEL_KEYS = 2**31 - 1 - 4096
_KERNEL_SLOTS = 8192
_KERNEL_PAGE = 64

# Bytes of logits that `indexer_topk`'s kernels have in memory at a time: at 131072 keys, the two
# rows that each of 132 multiprocessors selects from at once.
LOGITS_BUDGET = 144 * 10**6


def _shapes_supported(q: Any, k: Any) -> str | None:
    if q.shape[3] not in _KERNEL_CHANNELS:
        return f"it has C in {_KERNEL_CHANNELS}, got C={q.shape[3]}"
    if not 1 <= q.shape[2] <= _KERNEL_HEADS:
        return f"it has J in 1..{_KERNEL_HEADS}, got J={q.shape[2]}"
    if k.shape[1] > _KERNEL_KEYS:
        return f"it takes S up to {_KERNEL_KEYS}, got S={k.shape[1]}"
    return None


def _fwd_supported(options: IndexerOptions, q: Any, k: Any, *_: Any) -> str | None:
    if q.dtype not in (jnp.bfloat16, FP8):
        return f"it takes bfloat16 or float8_e4m3fn, got {q.dtype}"
    return _shapes_supported(q, k)


def _keys(options: IndexerOptions, k: Any, page_table: Any) -> int:
    """S: how many keys a request may have."""
    return k.shape[1] if page_table is None else page_table.shape[1] * options.page_size


def _topk_fwd_supported(options: IndexerOptions, q: Any, k: Any, *rest: Any) -> str | None:
    *_, page_table = rest
    size = _keys(options, k, page_table)
    if options.page_size % _KERNEL_PAGE != 0:
        return f"it takes pages of a multiple of {_KERNEL_PAGE} keys, got {options.page_size}"
    if page_table is not None and not 0 < k.shape[1] <= _KERNEL_KEYS:
        return f"it takes pools of 1 to {_KERNEL_KEYS} keys, got {k.shape[1]}"
    selected = TopkOptions(k=options.top_k, size=size, return_values=True)
    row = jax.ShapeDtypeStruct((size,), jnp.float32)
    return _fwd_supported(options, q, k, *rest) or selects(selected, row)


def _some_logits(
    options: IndexerOptions, q: Any, k: Any, *rest: Any
) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Those of as many queries as fit, which the kernels select from in turn."""
    keys = max(1, _keys(options, k, rest[-1]))
    queries = min(q.shape[0] * q.shape[1], LOGITS_BUDGET // (4 * keys))
    return (jax.ShapeDtypeStruct((max(1, queries) * keys,), jnp.float32),)


def _topk_bwd_supported(
    options: IndexerOptions, q: Any, k: Any, weights: Any, k_scale: Any, indices: Any, *_: Any
) -> str | None:
    if options.deterministic:
        return "its sums over a key's slots have no fixed order (deterministic=True)"
    if q.dtype != jnp.bfloat16:
        return f"it takes bfloat16, got {q.dtype}"
    if indices.shape[2] > _KERNEL_SLOTS:
        return f"it takes K up to {_KERNEL_SLOTS}, got K={indices.shape[2]}"
    return _shapes_supported(q, k)


def _gates(
    options: IndexerOptions, q: Any, k: Any, weights: Any, k_scale: Any, indices: Any, *_: Any
) -> tuple[jax.ShapeDtypeStruct, ...]:
    """One bit per slot and head: where the score is positive."""
    batch, queries, slots = indices.shape
    return (jax.ShapeDtypeStruct((batch, queries, -(-slots // 64) * 64, 2), jnp.uint32),)


# q, k, weights, k_scale; then starts and ends; results dq, dk, dweights, dk_scale.
_INPUTS = "b t j c, b s c, b t j, b s"
LOGITS_FWD = Pass(
    "indexer_logits_fwd",
    f"{_INPUTS}, b t, b t -> b t s",
    reference.indexer_logits_fwd,
    shardable="b t",
    kernel=Kernel(
        target="jax_dsa.indexer_logits_fwd.v1",
        limits="bfloat16 or float8_e4m3fn; J <= 64; C 32, 64 or 128",
        supported=_fwd_supported,
        attrs=lambda o, *_: {"relu": np.bool_(o.relu)},
    ),
)
LOGITS_BWD = Pass(
    "indexer_logits_bwd",
    f"{_INPUTS}, b t, b t, b t s -> {_INPUTS}",
    reference.indexer_logits_bwd,
    shardable="b t",
)
TOPK_FWD = Pass(
    "indexer_topk_fwd",
    f"{_INPUTS}, b t, b t, b r -> b t k, b t k",
    reference.indexer_topk_fwd,
    shardable="b t",
    shared=(1, 3),
    kernel=Kernel(
        target="jax_dsa.indexer_topk_fwd.v1",
        limits="bfloat16 or float8_e4m3fn; J <= 64; C 32, 64 or 128; top_k <= 4096",
        supported=_topk_fwd_supported,
        attrs=lambda o, *_: {"relu": np.bool_(o.relu), "page_size": np.int64(o.page_size)},
        workspace=_some_logits,
    ),
)
TOPK_BWD = Pass(
    "indexer_topk_bwd",
    f"{_INPUTS}, b t k, b t k -> {_INPUTS}",
    reference.indexer_topk_bwd,
    shardable="b t",
    kernel=Kernel(
        target="jax_dsa.indexer_topk_bwd.v1",
        limits="bfloat16; J <= 64; C 32, 64 or 128; K <= 8192",
        supported=_topk_bwd_supported,
        attrs=lambda o, *_: {"relu": np.bool_(o.relu)},
        workspace=_gates,
    ),
)


def _logits_fwd(options: IndexerOptions, implementation: Any, *operands: Any) -> Any:
    return LOGITS_FWD(options, *operands, implementation=implementation), operands


def _logits_bwd(
    options: IndexerOptions, implementation: Any, operands: Any, cotangents: Any
) -> Any:
    grads = LOGITS_BWD(options, *operands, *cotangents, implementation=implementation)
    return *in_dtypes(grads, operands), None, None


def _topk_fwd(options: IndexerOptions, implementation: Any, *operands: Any) -> Any:
    indices, logits = TOPK_FWD(options, *operands, implementation=implementation)
    indices = checkpoint_name(indices, "dsa_topk_indices")
    return (indices, logits), (*operands[:4], indices)


def _topk_bwd(options: IndexerOptions, implementation: Any, residuals: Any, cotangents: Any) -> Any:
    if options.page_size:
        raise NotImplementedError(
            "indexer_topk: gradients through a page table are not supported; gather the keys"
        )
    grads = TOPK_BWD(options, *residuals, cotangents[1], implementation=implementation)
    return *in_dtypes(grads, residuals), None, None, None


def in_dtypes(grads: Any, inputs: Any) -> list[Array | None]:
    """The gradients in their inputs' dtypes, now that those of keys are summed over the devices."""
    pairs = zip(grads, inputs, strict=False)
    return [None if g is None else reference.rounded(g, x.dtype) for g, x in pairs]


_indexer_logits = differentiable("indexer_logits", _logits_fwd, _logits_bwd)
_indexer_topk = differentiable("indexer_topk", _topk_fwd, _topk_bwd)


def indexer_logits(
    q: Float[Array, "B T J C"],
    k: Float[Array, "B S C"],
    weights: Float[Array, "B T J"],
    *,
    k_scale: Float[Array, "B S"] | None = None,
    starts: Int[Array, "B T"] | None = None,
    ends: Int[Array, "B T"] | None = None,
    relu: bool = True,
    implementation: Implementation | None = None,
) -> Float[Array, "B T S"]:
    """How much every query wants every key, by the lightning indexer.

    `I[t,s] = k_scale[s] * sum_j weights[t,j] * relu(q[t,j] . k[s])`, from DeepSeek-V3.2
    (DeepSeek-AI, 2025). Keys outside a query's range get
    -inf. All of q, k, weights and k_scale are differentiable; relu's derivative at 0 is 0. The
    batch axis may be absent from all arguments.

    Args:
        q: queries of J heads; bfloat16, float16, float32 or float8_e4m3fn, whose scale belongs into
            `weights`.
        k: keys, one head, of q's dtype.
        weights: float32 weight of each head for each query.
        k_scale: float32 scale of each key, for FP8 keys.
        starts: int32, each query's first key; default 0. Clipped to 0..S.
        ends: int32, one past each query's last key; default S, that is, not causal. Clipped to
            0..S. Causal is `query_start + t + 1`.
        relu: False leaves the relu out.
        implementation: None (the kernel where there is one, else XLA), "cuda" or "xla".

    Returns:
        float32 logits. NaN or Inf in a key reaches no logit but its own, and none if it is in no
        range.

    Raises:
        TypeError, ValueError: an argument has the wrong type, shape or range.
        NotImplementedError: `implementation="cuda"` cannot run this call here.
    """
    args = Args("indexer_logits", "q", q, "B T J C")
    inputs = index_arrays(args, ("q", q), ("k", k), weights, k_scale)
    operands = *inputs, *key_ranges(args, starts, ends)
    options = IndexerOptions(relu=args.flag("relu", relu))
    return args.restore(*_indexer_logits(options, args.implementation(implementation), *operands))


def indexer_topk(
    q: Float[Array, "B T J C"],
    k: Float[Array, "B S C"],
    weights: Float[Array, "B T J"],
    top_k: int,
    *,
    k_scale: Float[Array, "B S"] | None = None,
    starts: Int[Array, "B T"] | None = None,
    ends: Int[Array, "B T"] | None = None,
    relu: bool = True,
    page_table: Int[Array, "B R"] | None = None,
    deterministic: bool = False,
    implementation: Implementation | None = None,
) -> tuple[Int[Array, "B T K"], Float[Array, "B T K"]]:
    """The `top_k` keys of the largest `indexer_logits` for every query, without a [T, S] array.

    The same set as `topk(indexer_logits(...), top_k)`, in bounded memory, forward and backward. The
    indices are named "dsa_topk_indices" for remat policies.

    Args:
        q, k, weights, k_scale, starts, ends, relu: as in `indexer_logits`.
        top_k: how many keys to select, >= 0; may exceed S.
        page_table: int32, for decoding: entry r is the page of a request's keys r*L to r*L + L-1,
            out of `k` [P, L, C] and `k_scale` [P, L], P pages of L keys; S is R * L. Keys on a page
            outside 0..P-1 are not seen. There is no gradient with it.
        deterministic: gradients that are bit-identical from run to run; on XLA only. The selection
            always is.
        implementation: None (the kernel where there is one, else XLA), "cuda" or "xla".

    Returns:
        indices: int32, ascending, valid ones first, then -1.
        logits: float32, -inf where the index is -1; differentiable, through the selected keys only.

    Raises:
        TypeError, ValueError: an argument has the wrong type, shape or range.
        NotImplementedError: `implementation="cuda"` cannot run this call here.
    """
    args = Args("indexer_topk", "q", q, "B T J C")
    layout = "B S" if page_table is None else "P L"
    q, k, weights, k_scale = index_arrays(args, ("q", q), ("k", k), weights, k_scale, layout)
    page_size = 0
    if page_table is not None:
        pages, page_size, channels = k.shape
        args.option("k", page_size, page_size > 0, "pages of at least one key")
        page_table = args.array("page_table", page_table, "B M", INT32)
        size = args.sizes["S"] = page_table.shape[1] * page_size
        args.option("page_table", size, size < 2**31, "R with R * L below 2**31")
        # The pool is one batch entry, which all requests share.
        k = k.reshape(1, pages * page_size, channels)
        k_scale = None if k_scale is None else k_scale.reshape(1, pages * page_size)
    operands = q, k, weights, k_scale, *key_ranges(args, starts, ends), page_table
    options = IndexerOptions(
        relu=args.flag("relu", relu),
        top_k=args.integer("top_k", top_k, 0),
        deterministic=args.flag("deterministic", deterministic),
        page_size=page_size,
    )
    return args.restore(*_indexer_topk(options, args.implementation(implementation), *operands))


def index_arrays(
    args: Args,
    q: tuple[str, Any],
    k: tuple[str, Any],
    weights: Any,
    k_scale: Any,
    layout: str = "B S",
) -> tuple[Array, Array, Array, Array | None]:
    """The indexer's checked inputs; q and k come with their arguments' names, k with its axes
    before C.
    """
    queries = args.array(*q, "B T J C", (*FLOATS, FP8))
    keys = args.array(*k, f"{layout} C", (queries.dtype,))
    weights = args.array("weights", weights, "B T J", FLOAT32)
    if k_scale is not None:
        k_scale = args.array("k_scale", k_scale, layout, FLOAT32)
    return queries, keys, weights, k_scale
