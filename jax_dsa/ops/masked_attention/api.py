"""Attention under dynamic masks and biases, also of packed sequences."""

from __future__ import annotations

import warnings
from typing import Any, Literal, Unpack, overload

from jax_dsa.core.arguments import CausalAlignment, SegmentIds, Window
from jax_dsa.core.checks import Args
from jax_dsa.core.ffi import Kernel
from jax_dsa.core.op import Pass, differentiable
from jax_dsa.core.softmax import requested
from jax_dsa.core.typing import Array, Bool, Float, Implementation, Int
from jax_dsa.ops.block_mask.spec import BlockMask
from jax_dsa.ops.block_mask.visible import Visible
from jax_dsa.ops.masked_attention import cuda, xla
from jax_dsa.ops.masked_attention.arguments import (
    Keywords,
    VarlenKeywords,
    options_and_masks,
    queries_and_keys,
    require_no_batch_axis,
)
from jax_dsa.ops.masked_attention.spec import Operands

_LIMITS = f"bfloat16 or float16; D and E multiples of {cuda.DIM_MULTIPLE} up to {cuda.MAX_DIM}"
FWD = Pass(
    "masked_attention_fwd",
    xla.masked_attention_fwd,
    kernel=Kernel(
        cuda.masked_attention_fwd,
        cuda.supports,
        limits=_LIMITS,
        takes=cuda.TAKES,
        portable=cuda.supports,
    ),
)
BWD = Pass(
    "masked_attention_bwd",
    xla.masked_attention_bwd,
    kernel=Kernel(
        cuda.masked_attention_bwd,
        cuda.bwd_supports,
        limits=_LIMITS,
        takes=cuda.TAKES,
        portable=cuda.bwd_supports,
    ),
)

# The differentiable operator without checks of its arguments.
masked_attention_op = differentiable("masked_attention", FWD, BWD)


@overload
def masked_attention(
    q: Float[Array, "B T N D"],
    k: Float[Array, "B S G D"],
    v: Float[Array, "B S G E"],
    bias: Float[Array, "1|B 1|G|N 1|T S"] | None = None,
    mask: Bool[Array, "1|B 1|G|N 1|T S"] | None = None,
    *,
    return_lse: Literal[False] = False,
    return_max_logit: Literal[False] = False,
    **keywords: Unpack[Keywords],
) -> Array: ...
@overload
def masked_attention(
    q: Float[Array, "B T N D"],
    k: Float[Array, "B S G D"],
    v: Float[Array, "B S G E"],
    bias: Float[Array, "1|B 1|G|N 1|T S"] | None = None,
    mask: Bool[Array, "1|B 1|G|N 1|T S"] | None = None,
    *,
    return_lse: Literal[True],
    return_max_logit: Literal[False] = False,
    **keywords: Unpack[Keywords],
) -> tuple[Array, Array]: ...
@overload
def masked_attention(
    q: Float[Array, "B T N D"],
    k: Float[Array, "B S G D"],
    v: Float[Array, "B S G E"],
    bias: Float[Array, "1|B 1|G|N 1|T S"] | None = None,
    mask: Bool[Array, "1|B 1|G|N 1|T S"] | None = None,
    *,
    return_lse: Literal[False] = False,
    return_max_logit: Literal[True],
    **keywords: Unpack[Keywords],
) -> tuple[Array, Array]: ...
@overload
def masked_attention(
    q: Float[Array, "B T N D"],
    k: Float[Array, "B S G D"],
    v: Float[Array, "B S G E"],
    bias: Float[Array, "1|B 1|G|N 1|T S"] | None = None,
    mask: Bool[Array, "1|B 1|G|N 1|T S"] | None = None,
    *,
    return_lse: Literal[True],
    return_max_logit: Literal[True],
    **keywords: Unpack[Keywords],
) -> tuple[Array, Array, Array]: ...
def masked_attention(
    q: Float[Array, "B T N D"],
    k: Float[Array, "B S G D"],
    v: Float[Array, "B S G E"],
    bias: Float[Array, "1|B 1|G|N 1|T S"] | None = None,
    mask: Bool[Array, "1|B 1|G|N 1|T S"] | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    causal_alignment: CausalAlignment = "top_left",
    local_window_size: Window | None = None,
    segment_ids: SegmentIds | None = None,
    key_value_seq_lengths: Int[Array, "B"] | None = None,
    softcap: float | None = None,
    block_mask: BlockMask | None = None,
    kv_indices: Int[Array, "B G W"] | None = None,
    sinks: Float[Array, "N"] | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
    return_max_logit: bool = False,
    return_attn_probs: bool = False,
    implementation: Implementation | None = None,
) -> Array | tuple[Array, ...]:
    """Returns softmax attention under any mask and a trainable bias.

    No array of shape [T, S] is stored. The logits are scale * q.k + bias in float32, then
    softcap * tanh(logits / softcap). A key is visible where each of `mask`, `block_mask`,
    `kv_indices`, causality, window, segments and lengths allows it. A query that sees no key has
    output 0, lse -inf and zero gradients. NaN and Inf in keys, values and biases that no query sees
    do not affect any result.

    The operator is differentiable in q, k, v, bias and sinks, through the output and the
    log-sum-exp. Bias and mask stay in their broadcast shapes, and the gradient of the bias has the
    same shape. A bias of -1e9 or the lowest float masks a key only beside larger logits: if all
    visible keys of a query have it, they share the softmax evenly.

    The batch axis may be absent from all arrays. The first axis of a `block_mask` is then 1.

    The position of query t is t. With `causal_alignment="bottom_right"` it is t + S - T (t + length
    - T with `key_value_seq_lengths`), so that the last query is at the last key.

    Args:
        q: Queries; bfloat16, float16, float32 or float64.
        k, v: Keys and values in q's dtype. Query head n reads KV head n // (N // G). The values'
            dimension E may differ from the keys' dimension D.
        bias: Bias that is added to the scaled logits, in q's dtype.
        mask: Mask; True keeps a key.
        scale: Factor of q.k. Default: D**-0.5.
        is_causal: Whether keys after the query's position are masked.
        causal_alignment: "top_left" or "bottom_right"; for `is_causal` and `local_window_size`.
        local_window_size: (left, right), the numbers of keys before and after its own position that
            a query may see, or an int for both. With `is_causal`, right is 0.
        segment_ids: Numbers of packed documents, int32 [B, T], if queries and keys are the same
            tokens (T == S). Each run of equal numbers is a document, and a query sees only its own
            document. Or a pair (numbers of queries, numbers of keys): a query sees all keys that
            have its own number.
        key_value_seq_lengths: Number of keys of each batch entry, int32. Later keys are masked.
            Values are clipped to 0..S.
        softcap: Softcap in 1e-30..1e30, or None.
        block_mask: Block mask from `make_block_mask`. The kernels skip its empty tiles.
        kv_indices: The keys that each KV head keeps for all queries, int32, in any order. Other
            keys are masked and not read. Entries outside 0..S-1 are no keys; a key that is listed
            twice counts twice. Use it for masks that keep few, scattered keys, such as those that
            `topk_indices` returns. Cannot be combined with `block_mask`.
        sinks: One logit per query head that takes part in the softmax denominator but has no value,
            float32. It is not scaled, not softcapped and has no bias. +-inf are legal.
        deterministic: Whether gradients must be bit-identical from run to run.
        return_lse: Whether to return the log-sum-exp of each query's logits too, without the sink.
        return_max_logit: Whether to return the largest logit of each query too, after softcap and
            masks, without the sink. It has no gradient. QK-clip needs it.
        return_attn_probs: Deprecated: use `attention_probs`. Whether to return its result too.
        implementation: "cuda", "xla", or None for the best one that is available.

    Returns:
        The output of shape [B, T, N, E] in q's dtype. With `return_lse` or `return_max_logit`, a
        tuple of the output, the log-sum-exp and the largest logit, as requested. These have the
        shape [B, T, N] and are float32 (float64 if q is). Both are -inf for a query without a key.

    Raises:
        ValueError, TypeError: If a shape, dtype or option is wrong.
        NotImplementedError: If implementation="cuda" does not cover the call.

    Examples:
        >>> import jax, jax_dsa
        >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 64, 4, 32))
        >>> out, lse = jax_dsa.masked_attention(q, k, v, is_causal=True, return_lse=True)
        >>> reference = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        >>> out.shape, bool(abs(out - reference).max() < 1e-3)
        ((2, 64, 4, 32), True)

    Source: memory-bounded softmax attention, Dao et al., FlashAttention (arXiv:2205.14135); masks
    from trainable biases, Shi et al., Trainable Dynamic Mask Sparse Attention (arXiv:2508.02124).
    """
    args = Args("masked_attention", "q", q, "B T N D")
    q, k = queries_and_keys(args, q, k)
    v = args.array("v", v, "B S G E", (q.dtype,))
    visible = Visible.from_arguments(
        args, is_causal, causal_alignment, local_window_size, key_value_seq_lengths, segment_ids
    )
    return _attend(
        args,
        (q, k, v),
        visible,
        return_lse=return_lse,
        return_max_logit=return_max_logit,
        return_attn_probs=return_attn_probs,
        implementation=implementation,
        bias=bias,
        mask=mask,
        block_mask=block_mask,
        kv_indices=kv_indices,
        sinks=sinks,
        scale=scale,
        softcap=softcap,
        deterministic=deterministic,
    )


@overload
def masked_attention_varlen(
    q: Float[Array, "T N D"],
    k: Float[Array, "S G D"],
    v: Float[Array, "S G E"],
    cu_seqlens_q: Int[Array, "R+1"],
    cu_seqlens_k: Int[Array, "R+1"],
    *,
    return_lse: Literal[False] = False,
    return_max_logit: Literal[False] = False,
    **keywords: Unpack[VarlenKeywords],
) -> Array: ...
@overload
def masked_attention_varlen(
    q: Float[Array, "T N D"],
    k: Float[Array, "S G D"],
    v: Float[Array, "S G E"],
    cu_seqlens_q: Int[Array, "R+1"],
    cu_seqlens_k: Int[Array, "R+1"],
    *,
    return_lse: Literal[True],
    return_max_logit: Literal[False] = False,
    **keywords: Unpack[VarlenKeywords],
) -> tuple[Array, Array]: ...
@overload
def masked_attention_varlen(
    q: Float[Array, "T N D"],
    k: Float[Array, "S G D"],
    v: Float[Array, "S G E"],
    cu_seqlens_q: Int[Array, "R+1"],
    cu_seqlens_k: Int[Array, "R+1"],
    *,
    return_lse: Literal[False] = False,
    return_max_logit: Literal[True],
    **keywords: Unpack[VarlenKeywords],
) -> tuple[Array, Array]: ...
@overload
def masked_attention_varlen(
    q: Float[Array, "T N D"],
    k: Float[Array, "S G D"],
    v: Float[Array, "S G E"],
    cu_seqlens_q: Int[Array, "R+1"],
    cu_seqlens_k: Int[Array, "R+1"],
    *,
    return_lse: Literal[True],
    return_max_logit: Literal[True],
    **keywords: Unpack[VarlenKeywords],
) -> tuple[Array, Array, Array]: ...
def masked_attention_varlen(
    q: Float[Array, "T N D"],
    k: Float[Array, "S G D"],
    v: Float[Array, "S G E"],
    cu_seqlens_q: Int[Array, "R+1"],
    cu_seqlens_k: Int[Array, "R+1"],
    *,
    bias: Float[Array, "1|G|N 1|T S"] | None = None,
    mask: Bool[Array, "1|G|N 1|T S"] | None = None,
    scale: float | None = None,
    is_causal: bool = False,
    causal_alignment: CausalAlignment = "top_left",
    local_window_size: Window | None = None,
    softcap: float | None = None,
    block_mask: BlockMask | None = None,
    kv_indices: Int[Array, "G W"] | None = None,
    sinks: Float[Array, "N"] | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
    return_max_logit: bool = False,
    return_attn_probs: bool = False,
    implementation: Implementation | None = None,
) -> Array | tuple[Array, ...]:
    """Returns `masked_attention` of R sequences that are packed one after the other.

    Sequence r has the queries cu_seqlens_q[r] : cu_seqlens_q[r+1] and the keys cu_seqlens_k[r] :
    cu_seqlens_k[r+1], and sees no others. T and S are the total lengths. Rows before the first and
    after the last sequence are padding: a query there has output 0, lse and largest logit -inf, and
    no query sees a key there.

    Causality, its alignment and windows apply within each sequence. `bias`, `mask`, `block_mask`
    and `kv_indices` refer to packed rows: bias[h, t, s] is for packed query t and packed key s. It
    has no effect where these belong to different sequences.

    Args:
        q, k, v: As in `masked_attention`, without a batch axis. Use `jax.vmap` for batches.
        cu_seqlens_q, cu_seqlens_k: Bounds of the sequences, int32, ascending. Sequences may be
            empty.
        bias, mask: As in `masked_attention`, of shape [1|G|N, 1|T, S] and by keyword only.
        scale, is_causal, causal_alignment, local_window_size, softcap, block_mask, kv_indices,
            sinks, deterministic, return_lse, return_max_logit, return_attn_probs, implementation:
            As in `masked_attention`.

    Returns:
        The output of shape [T, N, E] in q's dtype. With `return_lse` or `return_max_logit`, a tuple
        of the output, the log-sum-exp and the largest logit, as requested. These have the shape
        [T, N] and are float32 (float64 if q is).

    Raises:
        ValueError, TypeError: If a shape, dtype or option is wrong.
        NotImplementedError: If implementation="cuda" does not cover the call.

    Examples:
        >>> import jax, jax.numpy as jnp, jax_dsa
        >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 10, 4, 32))
        >>> lengths = jnp.array([0, 3, 10])  # two sequences, of 3 and 7 tokens
        >>> bias = jnp.zeros((4, 1, 10))  # one number per head and packed key
        >>> jax_dsa.masked_attention_varlen(
        ...     q, k, v, lengths, lengths, bias=bias, is_causal=True
        ... ).shape
        (10, 4, 32)
    """
    args = Args("masked_attention_varlen", "q", q, "B T N D")
    require_no_batch_axis(args, q)
    q, k = queries_and_keys(args, q, k)
    v = args.array("v", v, "B S G E", (q.dtype,))
    visible = Visible.from_packed(
        args, cu_seqlens_q, cu_seqlens_k, is_causal, causal_alignment, local_window_size
    )
    return _attend(
        args,
        (q, k, v),
        visible,
        return_lse=return_lse,
        return_max_logit=return_max_logit,
        return_attn_probs=return_attn_probs,
        implementation=implementation,
        bias=bias,
        mask=mask,
        block_mask=block_mask,
        kv_indices=kv_indices,
        sinks=sinks,
        scale=scale,
        softcap=softcap,
        deterministic=deterministic,
    )


def _attend(
    args: Args,
    qkv: tuple[Array, Array, Array],
    visible: Visible,
    *,
    return_lse: bool,
    return_max_logit: bool,
    return_attn_probs: bool,
    implementation: Implementation | None,
    **arguments: Any,
) -> Any:
    """Runs the operator for both public functions; `arguments` are those of `options_and_masks`."""
    q, k, v = qkv
    options, masks = options_and_masks(args, q, k, visible, **arguments)
    return_lse = args.flag("return_lse", return_lse)
    return_max_logit = args.flag("return_max_logit", return_max_logit)
    return_attn_probs = args.flag("return_attn_probs", return_attn_probs)
    call = args.call(implementation)
    y = args.restore(masked_attention_op(call, options, Operands(q=q, k=k, v=v, **masks)))
    returned = requested(y, return_lse, return_max_logit)
    if return_attn_probs:
        from jax_dsa.ops.attention_probs.api import probabilities  # It imports this package.

        warnings.warn(
            "return_attn_probs is deprecated, use jax_dsa.attention_probs",
            DeprecationWarning,
            stacklevel=3,
        )
        first = returned if isinstance(returned, tuple) else (returned,)
        returned = (*first, probabilities(args, options, q, k, masks))
    return returned
