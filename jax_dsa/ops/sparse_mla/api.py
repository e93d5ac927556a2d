"""`sparse_mla` and `sparse_mla_decode`: latent attention of each query to its selected keys."""

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
from jax_dsa.core.op import Pass, differentiable
from jax_dsa.core.softmax import requested
from jax_dsa.core.typing import Array, Float, Implementation, Int
from jax_dsa.ops.cache.api import FlatCache, PagedCache
from jax_dsa.ops.cache.keys import check_record, read_cache
from jax_dsa.ops.sparse_mla import cuda, xla
from jax_dsa.ops.sparse_mla.extra import Extra
from jax_dsa.ops.sparse_mla.spec import Operands, Options

_LIMITS = f"bfloat16; D {either(cuda.DIMS)}, value_dim {cuda.VALUE_DIM}; scale > 0"

FWD = Pass(
    "sparse_mla_fwd",
    xla.sparse_mla_fwd,
    kernel=Kernel(
        cuda.sparse_mla_fwd,
        cuda.supports,
        limits=_LIMITS,
        portable=cuda.supports,
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
        portable=cuda.supports,
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
        limits=f"{_LIMITS}; or FP8 records",
        portable=cuda.decode_supports,
    ),
)
DECODE_BWD = Pass("sparse_mla_decode_bwd", xla.sparse_mla_bwd)

# The operators without their checks.
sparse_mla_op = differentiable("sparse_mla", FWD, BWD)
sparse_mla_decode_op = differentiable("sparse_mla_decode", DECODE_FWD, DECODE_BWD)


class _Keywords(TypedDict, total=False):
    """The keyword arguments of both functions, for the overloads."""

    value_dim: int | None
    scale: float | None
    is_causal: bool
    topk_length: Int[Array, "B T"] | None
    sinks: Float[Array, "N"] | None
    batch_invariant: bool
    implementation: Implementation | None


class _DecodeKeywords(_Keywords, total=False):
    extra_cache: FlatCache | PagedCache | None
    extra_indices: ExtraIndices | None
    extra_topk_length: Int[Array, "B T"] | None
    extra_key_stride: int


class _SparseMLAKeywords(_Keywords, total=False):
    query_start: int | Int[Array, "*B"]
    key_stride: int
    deterministic: bool


Indices = Int[Array, "B T G K"] | Int[Array, "B T K"]
ExtraIndices = Int[Array, "B T G K2"] | Int[Array, "B T K2"]
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
    batch_invariant: bool = False,
    return_lse: bool = False,
    implementation: Implementation | None = None,
) -> Float[Array, "B T N E"] | OutLSE:
    """Computes the softmax attention of every query to the keys that its indices select.

    A slot of `indices` is valid if it holds a key `0 <= j < S`, the key is visible (see
    `is_causal`), and the slot lies within `topk_length`. With `v_j = kv[j, :value_dim]`, and sums
    over the valid slots (a key that is selected twice counts twice):

        s_i = scale * q . kv[idx_i]        lse = log sum_i exp(s_i)
        out = sum_i exp(s_i - lse) v_i / (1 + exp(sink - lse))

    A query without a valid slot has out = 0, lse = -inf and zero gradients. Keys that no slot
    selects are never read.

    Args:
        q: Absorbed queries [B, T, N, D]; bfloat16, float16 or float32. N is a multiple of G.
        kv: Latent keys [B, S, G, D] in the dtype of `q`. Query head n attends to KV head
            n // (N/G).
        indices: Positions along S [B, T, G, K] or [B, T, K], int32, in any order. Any value outside
            0..S-1 is an empty slot. Without the axis G all KV heads share the indices, as
            `indexer_topk` returns them.
        value_dim: E, the number of a key's first elements that are its value; 1 <= E <= D.
            Default: min(512, D).
        scale: Factor of the scores. Default: D^-1/2.
        is_causal: Whether query t sees only the keys
            `j <= (query_start + t + 1) // key_stride - 1`. Default: all keys are visible.
        query_start: Position of the first query in the sequence: an int, a scalar, or int32 [B].
        key_stride: Tokens per key, for compressed keys.
        topk_length: Number of slots that are used, from the first one, int32 [B, T]. The others are
            never read. Default: K.
        sinks: Logits [N], float32, that take part in the softmax denominator but have no value.
            +-inf are legal. `lse` excludes them.
        deterministic: Whether gradients are bit-identical on every run. Otherwise the gradients of
            keys are summed in the way that is faster for the shapes.
        batch_invariant: Whether the result of a query is bit-identical whatever other requests are
            in the call, and with the CUDA kernels, whatever other queries are. The kernels then
            return the bits that `sparse_mla_decode(batch_invariant=True)` returns for the same
            query, list and rows, so that a trainer sees the probabilities of its rollouts. K has to
            be the same in both. Gradients are not covered.
        return_lse: Whether to return `lse` as well.
        implementation: "cuda" or "xla". Default: the CUDA kernels where they support the call.

    Returns:
        `out` [B, T, N, E] in the dtype of `q`. With `return_lse` a tuple of `out` and `lse`
        [B, T, N], float32, the natural logarithm. Both are differentiable with respect to `q`, `kv`
        and `sinks`. If the arguments have no batch axis, the results have none.

    Raises:
        ValueError: If a shape or a value is out of range.
        TypeError: If a dtype or the type of an argument is wrong.
        NotImplementedError: If forward-mode or second derivatives are taken, or if
            `implementation="cuda"` does not support the call.

    Examples:
        >>> import jax, jax.numpy as jnp, jax_dsa
        >>> q = jax.random.normal(jax.random.key(0), (1, 4, 8, 96))  # 4 queries, 8 heads
        >>> kv = jax.random.normal(jax.random.key(1), (1, 32, 1, 96))  # 32 keys, 1 KV head
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
        batch_invariant=args.flag("batch_invariant", batch_invariant),
    )
    ends = causal_ends(args, is_causal, query_start, key_stride)
    operands = Operands(q, kv, indices, ends, topk_length, shared_sinks(args, sinks))
    y = args.restore(sparse_mla_op(call, options, operands))
    return requested(y, return_lse)


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
    extra_cache: FlatCache | PagedCache | None = None,
    extra_indices: ExtraIndices | None = None,
    value_dim: int | None = None,
    scale: float | None = None,
    is_causal: bool = False,
    topk_length: Int[Array, "B T"] | None = None,
    extra_topk_length: Int[Array, "B T"] | None = None,
    extra_key_stride: int = 1,
    sinks: Float[Array, "N"] | None = None,
    batch_invariant: bool = False,
    return_lse: bool = False,
    implementation: Implementation | None = None,
) -> Float[Array, "B T N E"] | OutLSE:
    """Computes `sparse_mla` of a few new queries over a flat or paged cache.

    A slot is valid if `0 <= idx < lengths[b]` and, in a paged cache, if its page is mapped. Only
    the selected rows are read.

    With `extra_cache`, the keys that `extra_indices` selects take part in the same softmax, with
    one sink and one lse: the result is that of `sparse_mla` over both caches' keys, concatenated.
    DeepSeek-V4 decodes this way, over a window of recent keys and over compressed keys.

    Args:
        q: Absorbed queries [B, T, N, D] of the last T tokens of each request; bfloat16, float16 or
            float32.
        cache: Keys in the dtype of `q`, or FP8 records, with this step's tokens already appended.
            Records have 656 bytes (D = 576) or, only in paged caches, 584 bytes (D = 512 and
            value_dim <= 512). The CUDA kernel reads a copy of the selected rows in the dtype of `q`
            if only one of two caches has records, or if a page of 584-byte records has an odd L*G.
        indices: Positions within each request (not within the page pool) [B, T, G, K] or [B, T, K],
            int32. Without the axis G all KV heads share the indices.
        extra_cache: A second cache of the same B, G and D, flat or paged, of keys or records,
            whatever `cache` is. It has its own pages, page table and lengths.
        extra_indices: Positions within each request of `extra_cache`, [B, T, G, K2] or [B, T, K2].
        value_dim: E, the number of a key's first elements that are its value; 1 <= E <= D.
            Default: min(512, D).
        scale: Factor of the scores. Default: D^-1/2.
        is_causal: Whether query t, at position `p = cache.lengths[b] - T + t`, sees only keys up to
            its own position, and entries `j <= (p + 1) // extra_key_stride - 1` of `extra_cache`.
            Not needed if the indices select no later keys.
        topk_length: As for `sparse_mla`.
        extra_topk_length: The same for `extra_indices`.
        extra_key_stride: Tokens per entry of `extra_cache`, for compressed keys. Used only with
            `is_causal`.
        sinks: As for `sparse_mla`.
        batch_invariant: Whether a request's result is bit-identical whatever other requests are in
            the batch, and with the CUDA kernels the same as that of
            `sparse_mla(batch_invariant=True)`. Otherwise the number of KV splits, and so the last
            bits, may depend on the batch size. Gradients are not covered. This costs time: the
            kernel always uses splits of 512 slots, and XLA computes one request after the other.
        return_lse: Whether to return `lse` as well.
        implementation: "cuda" or "xla". Default: the CUDA kernels where they support the call.

    Returns:
        As `sparse_mla`. The results are differentiable with respect to `q`, `sinks` and a cache
        that holds keys, but not FP8 records.

    Raises:
        ValueError: If a shape or a value is out of range.
        TypeError: If a dtype or the type of an argument is wrong.
        NotImplementedError: As for `sparse_mla`.

    Examples:
        >>> import jax, jax.numpy as jnp, jax_dsa
        >>> rows = jax.random.normal(jax.random.key(0), (2, 5, 1, 96))
        >>> cache = jax_dsa.FlatCache.empty(2, 16, 96, dtype=jnp.float32).append(rows)
        >>> q = jax.random.normal(jax.random.key(1), (2, 1, 8, 96))  # the fifth token's query
        >>> jax_dsa.sparse_mla_decode(q, cache, jnp.array([[[0, 2]], [[1, 4]]])).shape
        (2, 1, 8, 96)

        The same query also sees the first of the keys in another cache:

        >>> other = jax_dsa.FlatCache.empty(2, 8, 96, dtype=jnp.float32).append(rows[:, :2])
        >>> jax_dsa.sparse_mla_decode(
        ...     q, cache, jnp.array([[[0, 2]], [[1, 4]]]),
        ...     extra_cache=other, extra_indices=jnp.array([[[0]], [[0]]]),
        ... ).shape
        (2, 1, 8, 96)
    """
    args = Args("sparse_mla_decode", "q", q, "B T N D")
    call = args.call(implementation)
    return_lse = args.flag("return_lse", return_lse)
    q = args.array("q", q, "B T N D", FLOATS)
    keys = read_cache(args, "cache", cache, "G D", (q.dtype, jnp.uint8))
    check_record(args, "cache", keys)
    check_heads(args, "q", "cache")
    indices, topk_length = selection(args, indices, topk_length)
    _, ends = key_ranges(args, None, None, is_causal, lengths=keys.lengths)
    extra = Extra(extra_cache, extra_indices, extra_topk_length, extra_key_stride)
    extra_page_size, extra_operands = extra.checked(args, q.dtype, is_causal, keys.lengths)
    options = Options(
        scale=scale_or_default(args, scale),
        value_dim=value_dim_or_default(args, value_dim),
        page_size=keys.page_size,
        extra_page_size=extra_page_size,
        batch_invariant=args.flag("batch_invariant", batch_invariant),
    )
    operands = Operands(
        q,
        *(keys.rows, indices, ends, topk_length, shared_sinks(args, sinks), keys.page_table),
        **extra_operands,
    )
    y = args.restore(sparse_mla_decode_op(call, options, operands))
    return requested(y, return_lse)
