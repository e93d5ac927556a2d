"""`sparse_attention_decode`: `sparse_attention` of a few new queries over caches."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, TypedDict, Unpack, overload

from jax_dsa.core.arguments import check_heads
from jax_dsa.core.checks import FLOATS, FP8, WIDE_FLOATS, Args, type_of
from jax_dsa.core.ffi import Kernel, either
from jax_dsa.core.op import Pass, differentiable
from jax_dsa.core.softmax import requested
from jax_dsa.core.typing import Array, Float, Implementation, Int
from jax_dsa.ops.cache.api import FlatCache, PagedCache
from jax_dsa.ops.cache.keys import Keys, read_cache
from jax_dsa.ops.sparse_attention import cached, cached_cuda
from jax_dsa.ops.sparse_attention.arguments import cached_positions_and_lengths, options_and_slots
from jax_dsa.ops.sparse_attention.spec import Operands

DECODE_FWD = Pass(
    "sparse_attention_decode_fwd",
    cached.sparse_attention_decode_fwd,
    kernel=Kernel(
        cached_cuda.sparse_attention_decode_fwd,
        cached_cuda.supports,
        limits=f"bfloat16, caches also in float8_e4m3fn; D=E {either(cached_cuda.DECODE_DIMS)}",
        portable=cached_cuda.supports,
    ),
)
DECODE_BWD = Pass("sparse_attention_decode_bwd", cached.sparse_attention_decode_bwd)

# The differentiable operator without checks of its arguments.
sparse_attention_decode_op = differentiable("sparse_attention_decode", DECODE_FWD, DECODE_BWD)


class _Keywords(TypedDict, total=False):
    """Keyword arguments, for the overloads."""

    scale: float | None
    is_causal: bool
    sink_blocks: int
    local_blocks: int
    tail_block: bool
    topk_length: Int[Array, "B T"] | None
    sinks: Float[Array, "N"] | None
    k_scale: Float[Array, "B S G"] | None
    v_scale: Float[Array, "B S G"] | None
    batch_invariant: bool
    implementation: Implementation | None


# How this operator takes FP8 keys and values, for messages.
_FP8_FORM = "caches in float8_e4m3fn, with 'k_scale' and 'v_scale'"

Cache = FlatCache | PagedCache
Indices = Int[Array, "B T G K"] | Int[Array, "B T K"]


@overload
def sparse_attention_decode(
    q: Float[Array, "B T N D"],
    k_cache: Cache,
    v_cache: Cache,
    indices: Indices,
    *,
    block_size: int,
    return_lse: Literal[False] = False,
    return_max_logit: Literal[False] = False,
    **keywords: Unpack[_Keywords],
) -> Array: ...
@overload
def sparse_attention_decode(
    q: Float[Array, "B T N D"],
    k_cache: Cache,
    v_cache: Cache,
    indices: Indices,
    *,
    block_size: int,
    return_lse: Literal[True],
    return_max_logit: Literal[False] = False,
    **keywords: Unpack[_Keywords],
) -> tuple[Array, Array]: ...
@overload
def sparse_attention_decode(
    q: Float[Array, "B T N D"],
    k_cache: Cache,
    v_cache: Cache,
    indices: Indices,
    *,
    block_size: int,
    return_lse: Literal[False] = False,
    return_max_logit: Literal[True],
    **keywords: Unpack[_Keywords],
) -> tuple[Array, Array]: ...
@overload
def sparse_attention_decode(
    q: Float[Array, "B T N D"],
    k_cache: Cache,
    v_cache: Cache,
    indices: Indices,
    *,
    block_size: int,
    return_lse: Literal[True],
    return_max_logit: Literal[True],
    **keywords: Unpack[_Keywords],
) -> tuple[Array, Array, Array]: ...
def sparse_attention_decode(
    q: Float[Array, "B T N D"],
    k_cache: Cache,
    v_cache: Cache,
    indices: Indices,
    *,
    block_size: int,
    scale: float | None = None,
    is_causal: bool = False,
    sink_blocks: int = 0,
    local_blocks: int = 0,
    tail_block: bool = False,
    topk_length: Int[Array, "B T"] | None = None,
    sinks: Float[Array, "N"] | None = None,
    k_scale: Float[Array, "B S G"] | None = None,
    v_scale: Float[Array, "B S G"] | None = None,
    batch_invariant: bool = False,
    return_lse: bool = False,
    return_max_logit: bool = False,
    implementation: Implementation | None = None,
) -> Array | tuple[Array, ...]:
    """Computes `sparse_attention` of the newest tokens of each request over flat or paged caches.

    Query t is the token at position `p = k_cache.lengths[b] - T + t`. It sees those keys of its
    blocks that come before `k_cache.lengths[b]`, whose page is mapped, and, with `is_causal`, that
    do not come after p. Only the rows of such blocks are read. The size of a page and that of a
    block need not divide each other.

    Args:
        q: Queries [B, T, N, D] of the last T tokens of each request; bfloat16, float16 or float32.
            N is a multiple of G.
        k_cache: Keys, rows [G, D] in the dtype of `q` or in float8_e4m3fn, with this step's tokens
            already appended.
        v_cache: Values, rows [G, E] in the dtype of the keys, in a cache of the same kind and
            sizes. Its lengths and its page table must be those of `k_cache`, which are used for
            both. E may differ from D.
        indices: Numbers of blocks within each request [B, T, G, K], or [B, T, K] if all KV heads
            share them; int32, in any order. A slot without a block contains -1, or any other number
            that is no block.
        block_size: Number of keys in a block: 1, 4, 16, 32, 64 or 128.
        scale: Factor of q.k. Default: D**-0.5.
        is_causal: Whether keys after the query's position are masked. It makes no difference for a
            single new token, but forced blocks need it.
        sink_blocks, local_blocks, tail_block: Forced blocks, as in `sparse_attention`.
        topk_length: Number of slots that are used, from the first one, int32 [B, T]. Default: K.
        sinks: One logit per query head, as in `sparse_attention`.
        k_scale, v_scale: Factors of the rows of FP8 caches, float32 [B, S, G], or [P, L, G] with a
            `PagedCache`. Default: 1. A factor that all keys share belongs in `scale`.
        batch_invariant: Whether a request's result is bit-identical whatever other requests are in
            the batch. Gradients are not covered. The kernel then divides the keys of a list by its
            length only, which is slower for few requests. In XLA, queries are computed one after
            the other.
        return_lse: Whether to return the log-sum-exp of each query's scores too, without the sink.
        return_max_logit: Whether to return the largest score of each query too, without the sink.
            It has no gradient.
        implementation: "cuda" or "xla". Default: the CUDA kernels where they support the call.

    Returns:
        As `sparse_attention`. The output and the log-sum-exp are differentiable in q, sinks and
        caches of keys and values, but not in FP8 caches and their scales. If the arguments have no
        batch axis, the results have none.

    Raises:
        ValueError: If a shape or a value is out of range, or if blocks are forced without
            `is_causal`.
        TypeError: If a dtype or the type of an argument is wrong.
        NotImplementedError: If forward-mode or second derivatives are taken, or if
            `implementation="cuda"` does not support the call.

    Examples:
        >>> import jax, jax.numpy as jnp, jax_dsa
        >>> k, v = jax.random.normal(jax.random.key(0), (2, 1, 50, 2, 32))  # 50 tokens, 2 KV heads
        >>> empty = jax_dsa.FlatCache.empty(1, 64, 32, groups=2, dtype=jnp.float32)
        >>> q = jax.random.normal(jax.random.key(1), (1, 1, 8, 32))  # the last token's query
        >>> indices = jnp.array([[[0, 2]]])  # for both KV heads
        >>> jax_dsa.sparse_attention_decode(
        ...     q, empty.append(k), empty.append(v), indices, block_size=16
        ... ).shape
        (1, 1, 8, 32)
    """
    args = Args("sparse_attention_decode", "q", q, "B T N D")
    call = args.call(implementation)
    q = args.array("q", q, "B T N D", FLOATS)
    keys = read_cache(args, "k_cache", k_cache, "G D", (q.dtype, FP8), fp8=_FP8_FORM)
    if type(v_cache) is not type(k_cache):
        raise TypeError(
            f"{args.op}: argument 'v_cache' is {type_of(v_cache)}, want "
            f"{type(k_cache).__name__}, like 'k_cache'"
        )
    values = read_cache(args, "v_cache", v_cache, "G E", (keys.rows.dtype,), fp8=_FP8_FORM)
    check_heads(args, "q", "k_cache")
    options, slots = options_and_slots(
        args,
        indices=indices,
        block_size=block_size,
        scale=scale,
        is_causal=is_causal,
        sink_blocks=sink_blocks,
        local_blocks=local_blocks,
        tail_block=tail_block,
        topk_length=topk_length,
        sinks=sinks,
        deterministic=False,
    )
    options = dataclasses.replace(
        options,
        page_size=keys.page_size,
        batch_invariant=args.flag("batch_invariant", batch_invariant),
    )
    return_lse = args.flag("return_lse", return_lse)
    return_max_logit = args.flag("return_max_logit", return_max_logit)
    assert keys.lengths is not None
    operands = Operands(
        q=q,
        k=keys.rows,
        v=values.rows,
        **slots,
        **cached_positions_and_lengths(args, is_causal, keys.lengths),
        page_table=keys.page_table,
        k_scale=_factors(args, "k_scale", k_scale, keys),
        v_scale=_factors(args, "v_scale", v_scale, keys),
    )
    y = args.restore(sparse_attention_decode_op(call, options, operands))
    return requested(y, return_lse, return_max_logit)


def _factors(args: Args, name: str, x: Any, keys: Keys) -> Array | None:
    """Returns the checked factors of a cache's rows."""
    if x is None:
        return None
    is_fp8, dtype = keys.rows.dtype == FP8, keys.rows.dtype.name
    args.option(name, x, is_fp8, f"None with caches of {dtype}; FP8 caches have scales")
    return keys.alongside(args, name, x, "G", WIDE_FLOATS)
