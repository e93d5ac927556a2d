"""`sparse_attention`: attention to blocks of keys that each query and group of heads lists."""

from __future__ import annotations

from typing import Any, Literal, TypedDict, Unpack, overload

from jax_dsa.core.arguments import CausalAlignment
from jax_dsa.core.checks import Args
from jax_dsa.core.ffi import Kernel
from jax_dsa.core.op import Pass, differentiable
from jax_dsa.core.softmax import requested
from jax_dsa.core.typing import Array, Float, Implementation, Int
from jax_dsa.ops.masked_attention.arguments import queries_and_keys, require_no_batch_axis
from jax_dsa.ops.sparse_attention import cuda, xla
from jax_dsa.ops.sparse_attention.arguments import (
    options_and_slots,
    packed_positions,
    positions_and_lengths,
)
from jax_dsa.ops.sparse_attention.spec import Operands

_LIMITS = (
    f"bfloat16 or float16; D and E multiples of {cuda.DIM_MULTIPLE} up to {cuda.MAX_DIM}; N/G up "
    f"to {cuda.MAX_GROUP_HEADS}"
)
FWD = Pass(
    "sparse_attention_fwd",
    xla.sparse_attention_fwd,
    kernel=Kernel(
        cuda.sparse_attention_fwd,
        cuda.supports,
        limits=_LIMITS,
        portable=cuda.supports,
        takes=cuda.TAKES,
    ),
)
BWD = Pass(
    "sparse_attention_bwd",
    xla.sparse_attention_bwd,
    kernel=Kernel(
        cuda.sparse_attention_bwd,
        cuda.supports,
        limits=_LIMITS,
        portable=cuda.supports,
        takes=cuda.TAKES,
    ),
)

# The differentiable operator without checks of its arguments.
sparse_attention_op = differentiable("sparse_attention", FWD, BWD)


class _SharedKeywords(TypedDict, total=False):
    """Keyword arguments of both functions, for the overloads."""

    scale: float | None
    is_causal: bool
    sink_blocks: int
    local_blocks: int
    tail_block: bool
    sinks: Float[Array, "N"] | None
    deterministic: bool
    implementation: Implementation | None


class _Keywords(_SharedKeywords, total=False):
    query_start: int | Int[Array, "*B"]
    key_value_seq_lengths: Int[Array, "B"] | None
    segment_ids: Int[Array, "B T"] | None
    topk_length: Int[Array, "B T"] | None


class _VarlenKeywords(_SharedKeywords, total=False):
    causal_alignment: CausalAlignment
    topk_length: Int[Array, "T"] | None


Indices = Int[Array, "B T G K"] | Int[Array, "B T K"]
PackedIndices = Int[Array, "T G K"] | Int[Array, "T K"]


@overload
def sparse_attention(
    q: Float[Array, "B T N D"],
    k: Float[Array, "B S G D"],
    v: Float[Array, "B S G E"],
    indices: Indices,
    *,
    block_size: int,
    return_lse: Literal[False] = False,
    return_max_logit: Literal[False] = False,
    **keywords: Unpack[_Keywords],
) -> Array: ...
@overload
def sparse_attention(
    q: Float[Array, "B T N D"],
    k: Float[Array, "B S G D"],
    v: Float[Array, "B S G E"],
    indices: Indices,
    *,
    block_size: int,
    return_lse: Literal[True],
    return_max_logit: Literal[False] = False,
    **keywords: Unpack[_Keywords],
) -> tuple[Array, Array]: ...
@overload
def sparse_attention(
    q: Float[Array, "B T N D"],
    k: Float[Array, "B S G D"],
    v: Float[Array, "B S G E"],
    indices: Indices,
    *,
    block_size: int,
    return_lse: Literal[False] = False,
    return_max_logit: Literal[True],
    **keywords: Unpack[_Keywords],
) -> tuple[Array, Array]: ...
@overload
def sparse_attention(
    q: Float[Array, "B T N D"],
    k: Float[Array, "B S G D"],
    v: Float[Array, "B S G E"],
    indices: Indices,
    *,
    block_size: int,
    return_lse: Literal[True],
    return_max_logit: Literal[True],
    **keywords: Unpack[_Keywords],
) -> tuple[Array, Array, Array]: ...
def sparse_attention(
    q: Float[Array, "B T N D"],
    k: Float[Array, "B S G D"],
    v: Float[Array, "B S G E"],
    indices: Indices,
    *,
    block_size: int,
    scale: float | None = None,
    is_causal: bool = False,
    query_start: int | Int[Array, "*B"] = 0,
    key_value_seq_lengths: Int[Array, "B"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    sink_blocks: int = 0,
    local_blocks: int = 0,
    tail_block: bool = False,
    topk_length: Int[Array, "B T"] | None = None,
    sinks: Float[Array, "N"] | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
    return_max_logit: bool = False,
    implementation: Implementation | None = None,
) -> Array | tuple[Array, ...]:
    """Returns the softmax attention of every query to the blocks of keys that its indices list.

    Block j consists of the keys `j * block_size <= s < (j + 1) * block_size` that exist. A query
    sees those keys of its blocks that causality and `key_value_seq_lengths` allow. With sums over
    the keys that it sees (those of a block that is listed twice count twice):

        s_i = scale * q . k_i        max_logit = max s_i        lse = log sum_i exp(s_i)
        out = sum_i exp(s_i - lse) v_i / (1 + exp(sink - lse))

    A query that sees no key has out = 0, lse and max_logit -inf, and zero gradients. NaN and Inf in
    keys and values that no query sees do not affect any result.

    The position of query t is `query_start + t`. Forced blocks depend on it. They are seen beside
    the K slots and need `is_causal`. A forced block that is listed, too, counts as often as it is
    listed.

    Args:
        q: Queries; bfloat16, float16, float32 or float64. N is a multiple of G.
        k, v: Keys and values in q's dtype. Query head n reads KV head n // (N // G). The values'
            dimension E may differ from the keys' dimension D.
        indices: Numbers of blocks [B, T, G, K], or [B, T, K] if all KV heads share them; int32, in
            any order. A slot without a block contains -1, or any other number that is no block.
        block_size: Number of keys in a block: 1, 4, 16, 32, 64 or 128.
        scale: Factor of q.k. Default: D**-0.5.
        is_causal: Whether keys after the query's position are masked, also within a block.
        query_start: Position of the first query: an int, a scalar, or int32 [B].
        key_value_seq_lengths: Number of keys of each batch entry, int32. Later keys are masked.
        segment_ids: Document numbers [B, T], int32, if queries and keys are the tokens of several
            documents, one after the other. A run of equal numbers is a document. A query sees no
            other document. Block numbers and positions count within the document, and
            `query_start` must be 0. Default: each sequence is one document.
        sink_blocks: Number of first blocks that every query sees.
        local_blocks: Number of newest blocks that every query sees. The last of them has the
            query's position.
        tail_block: Whether a query sees the block that has its position while the block is
            incomplete, that is, while keys of it come after the query.
        topk_length: Number of slots that are used, from the first one, int32 [B, T]. Default: K.
        sinks: One logit per query head that takes part in the softmax denominator but has no value,
            float32. It is not scaled. +-inf are legal.
        deterministic: Whether gradients must be bit-identical from run to run.
        return_lse: Whether to return the log-sum-exp of each query's scores too, without the sink.
        return_max_logit: Whether to return the largest score of each query too, without the sink.
            It has no gradient. QK-clip needs it.
        implementation: "cuda" or "xla". The CUDA kernels take bfloat16 or float16, D and E that are
            multiples of 8 up to 256, and N // G up to 32. Their gradients are always deterministic.

    Returns:
        The output of shape [B, T, N, E] in q's dtype. With `return_lse` or `return_max_logit`, a
        tuple of the output, the log-sum-exp and the largest score, as requested. These have the
        shape [B, T, N] and are float32 (float64 if q is). The output and the log-sum-exp are
        differentiable in q, k, v and sinks. If the arguments have no batch axis, the results have
        none.

    Raises:
        ValueError: If a shape or a value is out of range, or if blocks are forced without
            `is_causal`.
        TypeError: If a dtype or the type of an argument is wrong.
        NotImplementedError: If forward-mode or second derivatives are taken, or if
            implementation="cuda" and the kernels do not cover the call.

    Examples:
        >>> import jax, jax.numpy as jnp, jax_dsa
        >>> q = jax.random.normal(jax.random.key(0), (1, 64, 8, 32))  # 64 queries, 8 heads
        >>> k, v = jax.random.normal(jax.random.key(1), (2, 1, 64, 2, 32))  # 64 keys, 2 KV heads
        >>> indices = jnp.zeros((1, 64, 2, 1), int)  # every query lists block 0
        >>> jax_dsa.sparse_attention(
        ...     q, k, v, indices, block_size=16, is_causal=True, local_blocks=2
        ... ).shape
        (1, 64, 8, 32)

    Source: Yuan et al., Native Sparse Attention (arXiv:2502.11089); Lu et al., MoBA
    (arXiv:2502.13189).
    """
    args = Args("sparse_attention", "q", q, "B T N D")
    q, k = queries_and_keys(args, q, k)
    v = args.array("v", v, "B S G E", (q.dtype,))
    where = positions_and_lengths(args, is_causal, query_start, key_value_seq_lengths, segment_ids)
    return _attend(
        args,
        (q, k, v),
        where,
        return_lse=return_lse,
        return_max_logit=return_max_logit,
        implementation=implementation,
        indices=indices,
        block_size=block_size,
        scale=scale,
        is_causal=is_causal,
        sink_blocks=sink_blocks,
        local_blocks=local_blocks,
        tail_block=tail_block,
        topk_length=topk_length,
        sinks=sinks,
        deterministic=deterministic,
    )


@overload
def sparse_attention_varlen(
    q: Float[Array, "T N D"],
    k: Float[Array, "S G D"],
    v: Float[Array, "S G E"],
    indices: PackedIndices,
    cu_seqlens_q: Int[Array, "R+1"],
    cu_seqlens_k: Int[Array, "R+1"],
    *,
    block_size: int,
    return_lse: Literal[False] = False,
    return_max_logit: Literal[False] = False,
    **keywords: Unpack[_VarlenKeywords],
) -> Array: ...
@overload
def sparse_attention_varlen(
    q: Float[Array, "T N D"],
    k: Float[Array, "S G D"],
    v: Float[Array, "S G E"],
    indices: PackedIndices,
    cu_seqlens_q: Int[Array, "R+1"],
    cu_seqlens_k: Int[Array, "R+1"],
    *,
    block_size: int,
    return_lse: Literal[True],
    return_max_logit: Literal[False] = False,
    **keywords: Unpack[_VarlenKeywords],
) -> tuple[Array, Array]: ...
@overload
def sparse_attention_varlen(
    q: Float[Array, "T N D"],
    k: Float[Array, "S G D"],
    v: Float[Array, "S G E"],
    indices: PackedIndices,
    cu_seqlens_q: Int[Array, "R+1"],
    cu_seqlens_k: Int[Array, "R+1"],
    *,
    block_size: int,
    return_lse: Literal[False] = False,
    return_max_logit: Literal[True],
    **keywords: Unpack[_VarlenKeywords],
) -> tuple[Array, Array]: ...
@overload
def sparse_attention_varlen(
    q: Float[Array, "T N D"],
    k: Float[Array, "S G D"],
    v: Float[Array, "S G E"],
    indices: PackedIndices,
    cu_seqlens_q: Int[Array, "R+1"],
    cu_seqlens_k: Int[Array, "R+1"],
    *,
    block_size: int,
    return_lse: Literal[True],
    return_max_logit: Literal[True],
    **keywords: Unpack[_VarlenKeywords],
) -> tuple[Array, Array, Array]: ...
def sparse_attention_varlen(
    q: Float[Array, "T N D"],
    k: Float[Array, "S G D"],
    v: Float[Array, "S G E"],
    indices: PackedIndices,
    cu_seqlens_q: Int[Array, "R+1"],
    cu_seqlens_k: Int[Array, "R+1"],
    *,
    block_size: int,
    scale: float | None = None,
    is_causal: bool = False,
    causal_alignment: CausalAlignment = "top_left",
    sink_blocks: int = 0,
    local_blocks: int = 0,
    tail_block: bool = False,
    topk_length: Int[Array, "T"] | None = None,
    sinks: Float[Array, "N"] | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
    return_max_logit: bool = False,
    implementation: Implementation | None = None,
) -> Array | tuple[Array, ...]:
    """Returns `sparse_attention` of R sequences that are packed one after the other.

    Sequence r has the queries cu_seqlens_q[r] : cu_seqlens_q[r+1] and the keys cu_seqlens_k[r] :
    cu_seqlens_k[r+1], and sees no others. T and S are the total lengths. Block numbers and
    positions count within the sequence, so no block contains keys of two sequences. Rows before the
    first and after the last sequence are padding: a query there has output 0, lse and largest score
    -inf, and no query sees a key there.

    Args:
        q, k, v, indices: As in `sparse_attention`, without a batch axis. Use `jax.vmap` for
            batches.
        cu_seqlens_q, cu_seqlens_k: Bounds of the sequences, int32, ascending. Sequences may be
            empty.
        causal_alignment: Position of a sequence's queries among its keys. "top_left": the first
            query is at the first key. "bottom_right": the last query is at the last key, as in
            chunked prefill.
        block_size, scale, is_causal, sink_blocks, local_blocks, tail_block, topk_length, sinks,
            deterministic, return_lse, return_max_logit, implementation: As in `sparse_attention`.

    Returns:
        As `sparse_attention`, without a batch axis.

    Raises:
        ValueError, TypeError, NotImplementedError: As in `sparse_attention`.

    Examples:
        >>> import jax, jax.numpy as jnp, jax_dsa
        >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 40, 4, 32))
        >>> lengths = jnp.array([0, 15, 40])  # two sequences, of 15 and 25 tokens
        >>> indices = jnp.zeros((40, 1), int)  # every query lists its sequence's block 0
        >>> jax_dsa.sparse_attention_varlen(
        ...     q, k, v, indices, lengths, lengths, block_size=4, is_causal=True, local_blocks=2
        ... ).shape
        (40, 4, 32)
    """
    args = Args("sparse_attention_varlen", "q", q, "B T N D")
    require_no_batch_axis(args, q)
    q, k = queries_and_keys(args, q, k)
    v = args.array("v", v, "B S G E", (q.dtype,))
    where = packed_positions(args, cu_seqlens_q, cu_seqlens_k, is_causal, causal_alignment)
    return _attend(
        args,
        (q, k, v),
        where,
        return_lse=return_lse,
        return_max_logit=return_max_logit,
        implementation=implementation,
        indices=indices,
        block_size=block_size,
        scale=scale,
        is_causal=is_causal,
        sink_blocks=sink_blocks,
        local_blocks=local_blocks,
        tail_block=tail_block,
        topk_length=topk_length,
        sinks=sinks,
        deterministic=deterministic,
    )


def _attend(
    args: Args,
    qkv: tuple[Array, Array, Array],
    where: dict[str, Any],
    *,
    return_lse: bool,
    return_max_logit: bool,
    implementation: Implementation | None,
    **arguments: Any,
) -> Any:
    """Runs the operator for both public functions; `arguments` are those of `options_and_slots`.

    `where` has the operands `positions`, `starts` and `lengths` by name.
    """
    q, k, v = qkv
    options, slots = options_and_slots(args, **arguments)
    return_lse = args.flag("return_lse", return_lse)
    return_max_logit = args.flag("return_max_logit", return_max_logit)
    call = args.call(implementation)
    operands = Operands(q=q, k=k, v=v, **slots, **where)
    y = args.restore(sparse_attention_op(call, options, operands))
    return requested(y, return_lse, return_max_logit)
