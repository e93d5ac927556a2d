"""`sparse_mla`, `sparse_mla_decode`: latent attention over each query's own selection of keys."""

from __future__ import annotations

from typing import Literal, TypedDict, Unpack, overload

import jax.numpy as jnp

from jax_dsa.core.arguments import (
    causal_ends,
    check_heads,
    key_ranges,
    scale_or_default,
    selection,
    shared_sinks,
    value_dim_or_default,
)
from jax_dsa.core.checks import FLOATS, Args
from jax_dsa.core.ffi import Kernel, either
from jax_dsa.core.layout import RECORD_DIM
from jax_dsa.core.op import Pass, differentiable
from jax_dsa.core.typing import Array, Float, Implementation, Int
from jax_dsa.ops.cache.api import FlatCache, PagedCache, cached_keys, check_row
from jax_dsa.ops.sparse_mla import cuda, xla
from jax_dsa.ops.sparse_mla.spec import Operands, Options

_LIMITS = f"bfloat16; D {either(cuda.DIMS)}, value_dim {cuda.VALUE_DIM}; scale > 0"

FWD = Pass(
    "sparse_mla_fwd",
    xla.sparse_mla_fwd,
    kernel=Kernel(
        cuda.sparse_mla_fwd,
        cuda.supports,
        limits=_LIMITS,
        takes=cuda.TAKES,
    ),
)
BWD = Pass(
    "sparse_mla_bwd",
    xla.sparse_mla_bwd,
    kernel=Kernel(
        cuda.sparse_mla_bwd,
        cuda.supports,
        limits=_LIMITS,
        takes=cuda.TAKES,
        prefer_query_sharding=cuda.sums_by_rows,
    ),
)
DECODE_FWD = Pass(
    "sparse_mla_decode_fwd",
    xla.sparse_mla_fwd,
    kernel=Kernel(
        cuda.sparse_mla_decode_fwd,
        cuda.decode_supports,
        limits=f"{_LIMITS}; or FP8 records with D {RECORD_DIM}",
        takes=cuda.DECODE_TAKES,
    ),
)
DECODE_BWD = Pass("sparse_mla_decode_bwd", xla.sparse_mla_bwd)

# The operators without their checks.
sparse_mla_op = differentiable("sparse_mla", FWD, BWD)
sparse_mla_decode_op = differentiable("sparse_mla_decode", DECODE_FWD, DECODE_BWD)


class _Keywords(TypedDict, total=False):
    """Those of both functions, for the overloads."""

    value_dim: int | None
    scale: float | None
    is_causal: bool
    topk_length: Int[Array, "B T"] | None
    sinks: Float[Array, "N"] | None
    implementation: Implementation | None


class _DecodeKeywords(_Keywords, total=False):
    batch_invariant: bool


class _SparseMLAKeywords(_Keywords, total=False):
    query_start: int | Int[Array, "*B"]
    key_stride: int
    deterministic: bool


Indices = Int[Array, "B T G K"] | Int[Array, "B T K"]
OutLSE = tuple[Float[Array, "B T N E"], Float[Array, "B T N"]]


@overload
def sparse_mla(
    q: Float[Array, "B T N D"],
    kv: Float[Array, "B S G D"],
    indices: Indices,
    *,
    return_lse: Literal[False] = False,
    **keywords: Unpack[_SparseMLAKeywords],
) -> Float[Array, "B T N E"]: ...
@overload
def sparse_mla(
    q: Float[Array, "B T N D"],
    kv: Float[Array, "B S G D"],
    indices: Indices,
    *,
    return_lse: Literal[True],
    **keywords: Unpack[_SparseMLAKeywords],
) -> OutLSE: ...
def sparse_mla(
    q: Float[Array, "B T N D"],
    kv: Float[Array, "B S G D"],
    indices: Indices,
    *,
    value_dim: int | None = None,
    scale: float | None = None,
    is_causal: bool = False,
    query_start: int | Int[Array, "*B"] = 0,
    key_stride: int = 1,
    topk_length: Int[Array, "B T"] | None = None,
    sinks: Float[Array, "N"] | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
    implementation: Implementation | None = None,
) -> Float[Array, "B T N E"] | OutLSE:
    """Softmax attention of every query over the keys that its indices select.

    A slot of `indices` counts if it holds a key `0 <= j < S`, visible if `is_causal`, and lies
    within `topk_length`. With `v_j = kv[j, :value_dim]` and the sum over the slots that count (a
    key twice selected counts twice):

        s_i = scale * q . kv[idx_i]        lse = log sum_i exp(s_i)
        out = sum_i exp(s_i - lse) v_i / (1 + exp(sink - lse))

    A query without such a slot has out = 0, lse = -inf and zero gradients. Keys that no slot
    selects are never read.

    Args:
        q: absorbed queries, bfloat16, float16 or float32. N is a multiple of G.
        kv: latent keys, dtype of `q`; head n attends within group n // (N/G).
        indices: positions along S, in any order; anything outside 0..S-1 is an empty slot. Without
            the axis G all key heads share them, as they come from `indexer_topk`.
        value_dim: E, in 1..D. Default 512, or D where that is less.
        scale: of the scores, default D^-1/2.
        is_causal: key j is visible to query t iff `j <= (query_start + t + 1) // key_stride - 1`.
        query_start: position of the first query among the tokens: an int, a scalar, or one for each
            batch entry.
        key_stride: tokens per key, for compressed keys.
        topk_length: how many of the first slots of a row count; the others are never read.
            Default K.
        sinks: float32, logits that take part in the softmax's sum but have no value; +-inf are
            legal. `lse` excludes them.
        deterministic: bit-identical gradients on every run. Without it the sum over the queries
            that select a key is made in the way that is faster for the shapes.
        return_lse: also return `lse`.
        implementation: None chooses, "cuda" and "xla" insist.

    Returns:
        `out` [B, T, N, E] in the dtype of `q`; with `return_lse` also `lse` [B, T, N], float32,
        natural logarithm. Both have gradients for `q`, `kv` and `sinks`. Without a batch axis in
        the arguments there is none in the results.

    Raises:
        ValueError, TypeError: wrong shapes, dtypes or ranges.
        NotImplementedError: forward mode, gradients of gradients, or `implementation="cuda"` for
            what it does not cover.

    Examples:
        >>> import jax, jax.numpy as jnp, jax_dsa
        >>> q = jax.random.normal(jax.random.key(0), (1, 4, 8, 96))  # 4 queries of 8 heads
        >>> kv = jax.random.normal(jax.random.key(1), (1, 32, 1, 96))  # 32 keys, which all share
        >>> indices = jnp.array([[[3, 1, 7], [0, 9, -1], [5, 5, 2], [31, 30, 29]]])
        >>> out, lse = jax_dsa.sparse_mla(q, kv, indices, value_dim=64, return_lse=True)
        >>> out.shape, lse.shape
        ((1, 4, 8, 64), (1, 4, 8))

    Source: DeepSeek-V2 (2024) for latent attention, DeepSeek-V3.2 (2025) for its sparse form.
    """
    args = Args("sparse_mla", "q", q, "B T N D")
    call = args.call(implementation)
    return_lse = args.flag("return_lse", return_lse)
    q = args.array("q", q, "B T N D", FLOATS)
    kv = args.array("kv", kv, "B S G D", (q.dtype,))
    check_heads(args, "q", "kv")
    indices, topk_length = selection(args, indices, topk_length)
    options = Options(
        scale=scale_or_default(args, scale),
        value_dim=value_dim_or_default(args, value_dim),
        deterministic=args.flag("deterministic", deterministic),
    )
    ends = causal_ends(args, is_causal, query_start, key_stride)
    operands = Operands(q, kv, indices, ends, topk_length, shared_sinks(args, sinks))
    out, lse = args.restore(sparse_mla_op(call, options, operands))
    return (out, lse) if return_lse else out


@overload
def sparse_mla_decode(
    q: Float[Array, "B T N D"],
    cache: FlatCache | PagedCache,
    indices: Indices,
    *,
    return_lse: Literal[False] = False,
    **keywords: Unpack[_DecodeKeywords],
) -> Float[Array, "B T N E"]: ...
@overload
def sparse_mla_decode(
    q: Float[Array, "B T N D"],
    cache: FlatCache | PagedCache,
    indices: Indices,
    *,
    return_lse: Literal[True],
    **keywords: Unpack[_DecodeKeywords],
) -> OutLSE: ...
def sparse_mla_decode(
    q: Float[Array, "B T N D"],
    cache: FlatCache | PagedCache,
    indices: Indices,
    *,
    value_dim: int | None = None,
    scale: float | None = None,
    is_causal: bool = False,
    topk_length: Int[Array, "B T"] | None = None,
    sinks: Float[Array, "N"] | None = None,
    batch_invariant: bool = False,
    return_lse: bool = False,
    implementation: Implementation | None = None,
) -> Float[Array, "B T N E"] | OutLSE:
    """`sparse_mla` of a few new queries over a flat or paged cache of keys or of FP8 records.

    A slot counts if `0 <= idx < lengths[b]`, and on a paged cache if its page is mapped. Only the
    selected rows are read: through the page table, and unpacked as they are.

    Args:
        q: absorbed queries of the last T tokens of each request, bfloat16, float16 or float32.
        cache: keys in the dtype of `q`, or FP8 records, with this step's tokens already appended.
            The kernel reads records of 656 bytes (D = 576). Those of 584 bytes, in pages (D = 512,
            and `value_dim` up to that), run in XLA, which unpacks the selected rows to q's dtype.
        indices: positions within each request, not within the pages; without the axis G all key
            heads share them.
        value_dim: E, in 1..D. Default 512, or D where that is less.
        scale: of the scores, default D^-1/2.
        is_causal: query t, at position `lengths[b] - T + t`, sees only keys up to its own. Needed
            where the indices do not see to it.
        topk_length: as for `sparse_mla`.
        sinks: as for `sparse_mla`.
        batch_invariant: a request's results are the same, bit for bit, whatever requests are
            computed with it, and how many. Without it how a query's slots are split, and so the
            last bits, may depend on the batch size. Gradients are not covered. It costs time: the
            kernel makes parts of 512 slots whatever the batch, and XLA computes one request after
            the other.
        return_lse: also return `lse`.
        implementation: None chooses, "cuda" and "xla" insist.

    Returns:
        As `sparse_mla`. There are gradients for `q`, `sinks`, and a cache that holds keys; none for
        FP8 records.

    Raises:
        ValueError, TypeError: wrong shapes, dtypes or ranges.
        NotImplementedError: as for `sparse_mla`.

    Examples:
        >>> import jax, jax.numpy as jnp, jax_dsa
        >>> rows = jax.random.normal(jax.random.key(0), (2, 5, 1, 96))
        >>> cache = jax_dsa.FlatCache.empty(2, 16, 96, dtype=jnp.float32).append(rows)
        >>> q = jax.random.normal(jax.random.key(1), (2, 1, 8, 96))  # the fifth token's query
        >>> jax_dsa.sparse_mla_decode(q, cache, jnp.array([[[0, 2]], [[1, 4]]])).shape
        (2, 1, 8, 96)
    """
    args = Args("sparse_mla_decode", "q", q, "B T N D")
    call = args.call(implementation)
    return_lse = args.flag("return_lse", return_lse)
    q = args.array("q", q, "B T N D", FLOATS)
    keys = cached_keys(args, "cache", cache, "G R", (q.dtype, jnp.uint8))
    check_row(args, "cache", keys)
    check_heads(args, "q", "cache")
    indices, topk_length = selection(args, indices, topk_length)
    _, ends = key_ranges(args, None, None, is_causal, lengths=keys.lengths)
    options = Options(
        scale=scale_or_default(args, scale),
        value_dim=value_dim_or_default(args, value_dim),
        page_size=keys.page_size,
        batch_invariant=args.flag("batch_invariant", batch_invariant),
    )
    operands = Operands(
        q, keys.rows, indices, ends, topk_length, shared_sinks(args, sinks), keys.page_table
    )
    out, lse = args.restore(sparse_mla_decode_op(call, options, operands))
    return (out, lse) if return_lse else out
