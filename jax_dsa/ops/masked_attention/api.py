"""Attention under dynamic masks and biases, also of packed sequences."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp
from jax.core import min_dim

from jax_dsa.core.arguments import (
    CausalAlignment,
    SegmentIds,
    Window,
    check_heads,
    scale_or_default,
    segments,
    window_ranges,
    window_reach,
)
from jax_dsa.core.checks import BOOL, FLOATS, INT32, Args
from jax_dsa.core.ffi import Kernel
from jax_dsa.core.op import Pass, differentiable
from jax_dsa.core.typing import Array, Bool, Float, Implementation, Int
from jax_dsa.ops.block_mask.spec import BlockMask
from jax_dsa.ops.masked_attention import cuda, xla
from jax_dsa.ops.masked_attention.spec import LSE, Operands, Options

if TYPE_CHECKING:
    from collections.abc import Sequence

_LIMITS = f"bfloat16 or float16; D and E multiples of {cuda.DIM_MULTIPLE} up to {cuda.MAX_DIM}"
FWD = Pass(
    "masked_attention_fwd",
    xla.masked_attention_fwd,
    kernel=Kernel(
        cuda.masked_attention_fwd,
        cuda.supports,
        limits=_LIMITS,
        takes=cuda.TAKES,
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
    ),
)
PROBS = Pass("masked_attention_probs", xla.masked_attention_probs)

# The operator without its checks.
masked_attention_op = differentiable("masked_attention", FWD, BWD)


class _SharedKeywords(TypedDict, total=False):
    """Those of both functions, for the overloads."""

    scale: float | None
    is_causal: bool
    causal_alignment: CausalAlignment
    local_window_size: Window | None
    softcap: float | None
    block_mask: BlockMask | None
    kv_indices: Int[Array, "B G W"] | None
    deterministic: bool
    implementation: Implementation | None


class _Keywords(_SharedKeywords, total=False):
    segment_ids: SegmentIds | None
    key_value_seq_lengths: Int[Array, "B"] | None


class _VarlenKeywords(_SharedKeywords, total=False):
    bias: Float[Array, "1|G|N 1|T S"] | None
    mask: Bool[Array, "1|G|N 1|T S"] | None


@overload
def masked_attention(
    q: Float[Array, "B T N D"],
    k: Float[Array, "B S G D"],
    v: Float[Array, "B S G E"],
    bias: Float[Array, "1|B 1|G|N 1|T S"] | None = None,
    mask: Bool[Array, "1|B 1|G|N 1|T S"] | None = None,
    *,
    return_lse: Literal[False] = False,
    return_attn_probs: Literal[False] = False,
    **keywords: Unpack[_Keywords],
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
    return_attn_probs: Literal[False] = False,
    **keywords: Unpack[_Keywords],
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
    return_attn_probs: Literal[True],
    **keywords: Unpack[_Keywords],
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
    return_attn_probs: Literal[True],
    **keywords: Unpack[_Keywords],
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
    deterministic: bool = False,
    return_lse: bool = False,
    return_attn_probs: bool = False,
    implementation: Implementation | None = None,
) -> Array | tuple[Array, Array] | tuple[Array, Array, Array]:
    """Softmax attention with any mask and a trainable bias, without storing any [T, S] array.

    logits = scale * q.k + bias in float32, then softcap * tanh(logits / softcap), then all masks: a
    key is visible where each of `mask`, `block_mask`, `kv_indices`, causality, window, segments and
    lengths lets it be. A query that sees no key has output 0, lse -inf and zero gradients. NaN and
    Inf in keys, values and biases that no query sees reach nothing.

    Bias and mask stay in the broadcast shape in which they come, and the bias's gradient has it
    too. Differentiable in q, k, v and bias, through out and lse. The batch axis may be absent from
    all arrays; the first axis of a `block_mask` stays, as 1.

    A query's position is t, or with `causal_alignment="bottom_right"` t + S - T (with
    `key_value_seq_lengths`, t + length - T): the last query sits at the last key.

    Args:
        q: queries in bfloat16, float16, float32 or float64.
        k, v: keys and values in q's dtype; query head n reads key head n // (N // G). The values'
            E may differ from the keys' D.
        bias: added to the scaled logits; in q's dtype.
        mask: True keeps.
        scale: by default D**-0.5.
        is_causal: hides the keys after the query's position.
        causal_alignment: "top_left" or "bottom_right"; for `is_causal` and `local_window_size`.
        local_window_size: (left, right), the numbers of keys before and after its own position that
            a query may see, or an int for both. Causality makes right 0.
        segment_ids: int32; queries see the keys of their own segment. One array for both sides if
            T == S, else a pair (of queries, of keys).
        key_value_seq_lengths: int32; keys from here on are hidden. They are clipped to 0..S.
        softcap: in 1e-30..1e30, or None.
        block_mask: from `make_block_mask`; lets a kernel skip empty tiles.
        kv_indices: int32; the keys that each key head keeps for all queries, in any order; the
            others are hidden, and not read. Entries outside 0..S-1 are no keys; a key listed twice
            counts twice. For masks that keep few, scattered keys, as `topk_indices` finds them.
            Cannot be combined with `block_mask`.
        deterministic: gradients that are bit-identical from run to run.
        return_lse: also return the log-sum-exp of each query's logits.
        return_attn_probs: also return the probabilities, in float32 and without gradient. For
            inspection: they take the memory that this operator avoids.
        implementation: None for the best one available, or "cuda" or "xla".

    Returns:
        out [B, T, N, E] in q's dtype; with `return_lse` then lse [B, T, N] float32; with
        `return_attn_probs` then the probabilities [B, N, T, S]. (float64 if q is.)

    Raises:
        ValueError, TypeError: for wrong shapes, dtypes or options.
        NotImplementedError: for what implementation="cuda" does not cover.

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
    q, k, v = _arrays(args, q, k, v)
    starts, ends = window_ranges(
        args, is_causal, causal_alignment, local_window_size, key_value_seq_lengths
    )
    return _attend(
        args,
        (q, k, v, bias, mask, starts, ends, *segments(args, segment_ids)),
        kv_indices,
        block_mask,
        scale=scale,
        softcap=softcap,
        deterministic=deterministic,
        return_lse=return_lse,
        return_attn_probs=return_attn_probs,
        implementation=implementation,
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
    return_attn_probs: Literal[False] = False,
    **keywords: Unpack[_VarlenKeywords],
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
    return_attn_probs: Literal[False] = False,
    **keywords: Unpack[_VarlenKeywords],
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
    return_attn_probs: Literal[True],
    **keywords: Unpack[_VarlenKeywords],
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
    return_attn_probs: Literal[True],
    **keywords: Unpack[_VarlenKeywords],
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
    deterministic: bool = False,
    return_lse: bool = False,
    return_attn_probs: bool = False,
    implementation: Implementation | None = None,
) -> Array | tuple[Array, Array] | tuple[Array, Array, Array]:
    """`masked_attention` of R sequences packed one after the other: T and S are the sums.

    Sequence r has the queries cu_seqlens_q[r] : cu_seqlens_q[r+1] and the keys cu_seqlens_k[r] :
    cu_seqlens_k[r+1], and sees no others. Rows before the first and past the last of them are
    padding: a query there has output 0 and lse -inf, and no query sees a key there. Causality, its
    alignment and windows count within each sequence; bias, mask, `block_mask` and `kv_indices`
    count packed rows: bias[h, t, s] is for packed query t and packed key s. Where these belong to
    different sequences it has no effect.

    Args:
        q, k, v, bias, mask: as in `masked_attention`, without a batch axis (there is `jax.vmap`).
        cu_seqlens_q, cu_seqlens_k: int32, ascending; sequences may be empty.

    The other arguments, results and errors are those of `masked_attention`.

    Examples:
        >>> import jax, jax.numpy as jnp, jax_dsa
        >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 10, 4, 32))
        >>> lengths = jnp.array([0, 3, 10])  # two sequences, of 3 and 7 tokens
        >>> jax_dsa.masked_attention_varlen(q, k, v, lengths, lengths, is_causal=True).shape
        (10, 4, 32)
    """
    args = Args("masked_attention_varlen", "q", q, "B T N D")
    args.shape("q", q, not args.batched, "[T, N, D], without a batch axis")
    q, k, v = _arrays(args, q, k, v)
    cu_q = args.array("cu_seqlens_q", cu_seqlens_q, "R+1", INT32)
    cu_k = args.array("cu_seqlens_k", cu_seqlens_k, "R+1", INT32)
    fits = isinstance(cu_q.size, int) and cu_q.size > 1
    args.shape("cu_seqlens_q", cu_q, fits, "[R+1] with a number R >= 1, no symbol")
    left, right = window_reach(args, is_causal, causal_alignment, local_window_size)
    starts, ends = _packed_ranges(
        q.shape[1], k.shape[1], cu_q, cu_k, causal_alignment == "bottom_right", left, right
    )
    return _attend(
        args,
        (q, k, v, bias, mask, starts[None], ends[None], None, None),
        kv_indices,
        block_mask,
        scale=scale,
        softcap=softcap,
        deterministic=deterministic,
        return_lse=return_lse,
        return_attn_probs=return_attn_probs,
        implementation=implementation,
    )


def _arrays(args: Args, q: Any, k: Any, v: Any) -> tuple[Array, Array, Array]:
    q = args.array("q", q, "B T N D", FLOATS)
    k = args.array("k", k, "B S G D", (q.dtype,))
    check_heads(args, "q", "k")
    v = args.array("v", v, "B S G E", (q.dtype,))
    args.shape("q", q, q.shape[3] > 0, "[B, T, N, D] with D >= 1")
    return q, k, v


def _packed_ranges(
    queries: int,
    keys: int,
    cu_q: Int[Array, "R+1"],
    cu_k: Int[Array, "R+1"],
    bottom_right: bool,
    left: int | None,
    right: int | None,
) -> tuple[Int[Array, "T"], Int[Array, "T"]]:
    """The half-open range of packed keys that each packed query may see."""
    row = jnp.arange(queries, dtype=jnp.int32)
    sequence = jnp.searchsorted(cu_q, row, side="right", method="sort") - 1
    inside = (sequence >= 0) & (sequence < cu_q.size - 1)
    sequence = jnp.clip(sequence, 0, cu_q.size - 2)
    q_first, q_stop = cu_q[sequence], cu_q[sequence + 1]
    first, stop = cu_k[sequence], cu_k[sequence + 1]
    position = first + row - q_first
    if bottom_right:
        position += (stop - first) - (q_stop - q_first)
    starts = first if left is None else jnp.maximum(first, position - min_dim(left, keys + queries))
    if right is not None:
        stop = jnp.minimum(stop, position + min_dim(right, keys + queries) + 1)
    return jnp.clip(starts, 0, keys), jnp.where(inside, jnp.clip(stop, 0, keys), 0)


def _attend(
    args: Args,
    arrays: tuple[Any, Any, Any, Any, Any, Any, Any, Any, Any],
    kv_indices: Any,
    block_mask: BlockMask | None,
    *,
    scale: float | None,
    softcap: float | None,
    deterministic: bool,
    return_lse: bool,
    return_attn_probs: bool,
    implementation: Implementation | None,
) -> Any:
    """What the two public functions share. `arrays` are the operands up to the segments."""
    q, k, v, bias, mask, starts, ends, q_segments, kv_segments = arrays
    bias, bias_heads = _per_score(args, "bias", bias, (q.dtype,), q, k)
    mask, mask_heads = _per_score(args, "mask", mask, BOOL, q, k)
    if kv_indices is not None:
        kv_indices = args.array("kv_indices", kv_indices, "B G W", INT32)
        given = type(block_mask).__name__
        args.option("block_mask", given, block_mask is None, "None beside 'kv_indices'")
    rows, tiles, bits, tile_heads = _blocks(args, block_mask, q, k)
    if softcap is not None:
        # Logits divided by a larger one, or a smaller one's inverse, are beyond float32's range.
        softcap = args.real("softcap", softcap)
        fits = 1e-30 <= softcap <= 1e30
        args.option("softcap", softcap, fits, "None or a float in 1e-30..1e30")
    options = Options(
        scale=scale_or_default(args, scale),
        softcap=softcap,
        bias_heads=bias_heads,
        mask_heads=mask_heads,
        tile_heads=tile_heads,
        deterministic=args.flag("deterministic", deterministic),
    )
    return_lse = args.flag("return_lse", return_lse)
    return_attn_probs = args.flag("return_attn_probs", return_attn_probs)
    call = args.call(implementation)
    if return_attn_probs and call.implementation == "cuda":
        raise NotImplementedError(
            f"{args.op}: return_attn_probs=True is not available with implementation='cuda'; "
            f"implementation='xla' covers it"
        )
    limits = starts, ends, q_segments, kv_segments
    operands = Operands(q, k, v, bias, mask, *limits, kv_indices, rows, tiles, bits)
    out, lse = masked_attention_op(call, options, operands)
    results = [out]
    if return_lse:
        results.append(lse)
    if return_attn_probs:
        constants = jax.lax.stop_gradient((operands, LSE(lse)))
        results += PROBS(call, options, *constants)
    results = args.restore(results)
    return results[0] if len(results) == 1 else tuple(results)


def _per_score(
    args: Args, name: str, x: Any, dtypes: Sequence[Any], q: Array, k: Array
) -> tuple[Array | None, str]:
    """`x` as [1|B, 1|G|N, 1|T, S], or None, and the factors of its head axis."""
    if x is None:
        return None, "x"
    x = args.typed(name, x, dtypes)
    own = x if args.batched else x[None]
    (batch, queries, heads, _), (_, keys, groups, _) = q.shape, k.shape
    allowed = ((1, batch), (1, groups, heads), (1, queries), (keys,))
    fits = own.ndim == 4 and all(n in sizes for n, sizes in zip(own.shape, allowed))
    want = ["|".join(map(str, dict.fromkeys(sizes))) for sizes in allowed]
    letters = "[1|B, 1|G|N, 1|T, S]" if args.batched else "[1|G|N, 1|T, S]"
    numbers = ", ".join(want[not args.batched :])
    args.shape(name, x, fits, f"{letters} = [{numbers}]")
    return own, _head_factors(own.shape[1], groups, heads)


def _head_factors(size: int, groups: int, heads: int) -> str:
    return "x" if size == 1 else "(g m)" if size == heads else "g"


def _blocks(args: Args, mask: BlockMask | None, q: Array, k: Array) -> tuple[Any, Any, Any, str]:
    """The operands of a block mask, and the factors of its head axis."""
    if mask is None:
        return None, None, None, "x"
    if not isinstance(mask, BlockMask):
        raise TypeError(
            f"{args.op}: argument 'block_mask' is {type(mask).__name__}, want a BlockMask"
        )
    (batch, queries, heads, _), (_, keys, groups, _) = q.shape, k.shape
    tiles = args.array("block_mask.tiles", mask.tiles, "b h i j", INT32)
    bits = args.array("block_mask.bits", mask.bits, "b h p r c", (jnp.uint8,))
    lists = {"num_kv_tiles": "i", "kv_tiles": "i j", "num_q_tiles": "j", "q_tiles": "j i"}
    for name, dims in lists.items():
        args.array(f"block_mask.{name}", getattr(mask, name), f"b h {dims}", INT32)
    got = (*tiles.shape[:2], mask.query_length, mask.key_length)
    fits = got[0] in (1, batch) and got[1] in (1, groups, heads) and got[2:] == (queries, keys)
    want = f"one of shape [1|{batch}, 1|{groups}|{heads}, {queries}, {keys}]"
    args.option("block_mask", got, fits, want)
    rows = jnp.arange(queries, dtype=jnp.int32)[None]
    return rows, tiles, bits, _head_factors(got[1], groups, heads)
