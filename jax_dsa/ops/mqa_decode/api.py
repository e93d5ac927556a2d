"""`mqa_decode`, attention of a few new queries to a whole cache."""

from __future__ import annotations

import functools
from typing import Any, Literal, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np

from jax_dsa.core.arguments import (
    check_heads,
    scale_or_default,
    shared_sinks,
    value_dim_or_default,
)
from jax_dsa.core.checks import FLOATS, INT32, LARGEST, Args, as_array, type_of
from jax_dsa.core.ffi import Kernel, either
from jax_dsa.core.op import Pass, differentiable
from jax_dsa.core.softmax import requested
from jax_dsa.core.typing import Array, Float, Implementation, Int
from jax_dsa.ops.cache.api import FlatCache, PagedCache
from jax_dsa.ops.cache.keys import Keys, check_record, read_keys
from jax_dsa.ops.mqa_decode import cuda, xla
from jax_dsa.ops.mqa_decode.spec import (
    PLAN_FIELDS,
    PLAN_RANGES,
    MqaDecodePlan,
    Operands,
    Options,
)

FWD = Pass(
    "mqa_decode_fwd",
    xla.mqa_decode_fwd,
    kernel=Kernel(
        cuda.mqa_decode_fwd,
        cuda.supports,
        limits=f"bfloat16, keys also as FP8 records; D {either(cuda.LATENT_DIMS)} with value_dim "
        f"{cuda.VALUE_DIM} and no v, D=E {either(cuda.DIMS)} with v",
        portable=cuda.supports,
    ),
)
BWD = Pass("mqa_decode_bwd", xla.mqa_decode_bwd)

# The operator without its checks.
mqa_decode_op = differentiable("mqa_decode", FWD, BWD)


class _Keywords(TypedDict, total=False):
    """The keyword arguments of `mqa_decode`, for the overloads."""

    value_dim: int | None
    key_value_seq_lengths: Int[Array, "B"] | None
    starts: Int[Array, "B"] | Int[Array, "B T"] | None
    local_window_size: int | tuple[int, int] | Int[Array, "B"] | None
    sinks: Float[Array, "N"] | None
    scale: float | None
    num_splits: int | None
    plan: MqaDecodePlan | None
    batch_invariant: bool
    implementation: Implementation | None


OutLSE = tuple[Float[Array, "B T N E"], Float[Array, "B T N"]]
OutLSEMax = tuple[Float[Array, "B T N E"], Float[Array, "B T N"], Float[Array, "B T N"]]
Unnormalized = tuple[Float[Array, "B T N E"], Float[Array, "B T N"], Float[Array, "B T N"]]


@overload
def mqa_decode(
    q: Float[Array, "B T N D"],
    k: Float[Array, "B S G D"] | FlatCache | PagedCache,
    v: Float[Array, "B S G E"] | None = None,
    *,
    normalize: Literal[True] = True,
    return_lse: Literal[False] = False,
    return_max_logit: Literal[False] = False,
    **keywords: Unpack[_Keywords],
) -> Float[Array, "B T N E"]: ...
@overload
def mqa_decode(
    q: Float[Array, "B T N D"],
    k: Float[Array, "B S G D"] | FlatCache | PagedCache,
    v: Float[Array, "B S G E"] | None = None,
    *,
    normalize: Literal[True] = True,
    return_lse: Literal[True],
    return_max_logit: Literal[False] = False,
    **keywords: Unpack[_Keywords],
) -> OutLSE: ...
@overload
def mqa_decode(
    q: Float[Array, "B T N D"],
    k: Float[Array, "B S G D"] | FlatCache | PagedCache,
    v: Float[Array, "B S G E"] | None = None,
    *,
    normalize: Literal[True] = True,
    return_lse: Literal[False] = False,
    return_max_logit: Literal[True],
    **keywords: Unpack[_Keywords],
) -> OutLSE: ...
@overload
def mqa_decode(
    q: Float[Array, "B T N D"],
    k: Float[Array, "B S G D"] | FlatCache | PagedCache,
    v: Float[Array, "B S G E"] | None = None,
    *,
    normalize: Literal[True] = True,
    return_lse: Literal[True],
    return_max_logit: Literal[True],
    **keywords: Unpack[_Keywords],
) -> OutLSEMax: ...
@overload
def mqa_decode(
    q: Float[Array, "B T N D"],
    k: Float[Array, "B S G D"] | FlatCache | PagedCache,
    v: Float[Array, "B S G E"] | None = None,
    *,
    normalize: Literal[False],
    return_lse: bool = False,
    return_max_logit: bool = False,
    **keywords: Unpack[_Keywords],
) -> Unnormalized: ...
def mqa_decode(
    q: Float[Array, "B T N D"],
    k: Float[Array, "B S G D"] | FlatCache | PagedCache,
    v: Float[Array, "B S G E"] | None = None,
    *,
    value_dim: int | None = None,
    key_value_seq_lengths: Int[Array, "B"] | None = None,
    starts: Int[Array, "B"] | Int[Array, "B T"] | None = None,
    local_window_size: int | tuple[int, int] | Int[Array, "B"] | None = None,
    sinks: Float[Array, "N"] | None = None,
    scale: float | None = None,
    num_splits: int | None = None,
    plan: MqaDecodePlan | None = None,
    batch_invariant: bool = False,
    normalize: bool = True,
    return_lse: bool = False,
    return_max_logit: bool = False,
    implementation: Implementation | None = None,
) -> Float[Array, "B T N E"] | OutLSE | OutLSEMax | Unnormalized:
    """Computes the softmax attention of the newest T tokens of each request to its visible keys.

    Query t is the token at position `p = key_value_seq_lengths[b] - T + t` and sees the keys
    `max(starts[b], p - left) <= j <= p`. Over these, with `v_j = k[j, :value_dim]` if there is no
    `v`:

        s_j = scale * q . k_j        lse = log sum_j exp(s_j)
        out = sum_j exp(s_j - lse) v_j / (1 + exp(sink - lse))

    A query that sees no key (in a request shorter than T, or of length 0) has out = 0, lse = -inf
    and zero gradients.

    Args:
        q: Queries [B, T, N, D]; bfloat16, float16 or float32. N is a multiple of G. G = 1 is
            multi-query attention.
        k: Keys [B, S, G, D] in the dtype of `q`, or a cache of such keys or of FP8 records (D =
            576, or 512 in a paged cache), with this step's tokens already appended.
        v: Values [B, S, G, E] of any E. With a `PagedCache`, a pool [P, L, G, E] of the same pages.
            Default: the first elements of the keys; FP8 records require this.
        value_dim: E without `v`; 1 <= E <= D. Default: min(512, D).
        key_value_seq_lengths: Number of tokens of each request, including the T new ones, int32
            [B]. It may exceed S if `k` holds only the first of these tokens. Default: S. Must be
            None with a cache, which has its own lengths.
        starts: First visible key of each request, int32 [B], or of each query, int32 [B, T].
            Default: 0.
        local_window_size: Number of keys before its own position that a query sees: an int,
            (left, 0), or int32 [B].
        sinks: Logits [N], float32, that take part in the softmax denominator but have no value.
            +-inf are legal. `lse` excludes them.
        scale: Factor of the scores. Default: D^-1/2.
        num_splits: Minimum number of chunks of keys that the XLA implementation computes one after
            the other and combines. It bounds memory and changes only rounding. The CUDA kernels
            ignore it and choose their own splits. Default: as many chunks as memory requires.
        plan: The result of `mqa_decode_plan`, which all layers of a decode step can share. It
            changes only the time and the rounding of the CUDA kernels for Hopper. Other
            implementations ignore it, and so does a kernel that plans differently from it: in
            small calls, under vmap, or where requests or heads are sharded. Default: each call
            divides its work by itself.
        batch_invariant: Whether a request's result is bit-identical whatever other requests are in
            the batch. Otherwise the KV splits of a request, and so the last bits, may depend on the
            other requests. Gradients are not covered. This costs time: requests are computed one
            after the other.
        normalize: Whether to return `out`. False returns `(o, m, l)` instead, all float32. m is the
            largest score, `o = sum_j exp(s_j - m) v_j` and `l = sum_j exp(s_j - m)`; l = 0 and
            m = -inf without a key. Gradients treat m as a constant, which is correct for every
            function of o/l and m + log l. False excludes `sinks`.
        return_lse: Whether to return `lse` as well. Ignored if `normalize` is False.
        return_max_logit: Whether to return `max_logit`, the largest `s_j` of a row, as well; for
            the clipping of queries and keys (QK-clip). It has no gradient. Ignored if `normalize`
            is False.
        implementation: "cuda" or "xla". Default: the CUDA kernels where they support the call.

    Returns:
        `out` [B, T, N, E] in the dtype of `q`. With `return_lse` or `return_max_logit` a tuple of
        `out` and then `lse`, `max_logit` or both, [B, T, N] in float32; `lse` is the natural
        logarithm, rounded to float32. The results except `max_logit` are differentiable with
        respect to `q`, `k` (except FP8 records), `v` and `sinks`. If the arguments have no batch
        axis, the results have none.

    Raises:
        ValueError: If a shape or a value is out of range.
        TypeError: If a dtype or the type of an argument is wrong.
        NotImplementedError: If forward-mode or second derivatives are taken, or if
            `implementation="cuda"` does not support the call.

    Examples:
        >>> import jax, jax.numpy as jnp, jax_dsa
        >>> q = jax.random.normal(jax.random.key(0), (2, 1, 8, 96))
        >>> k = jax.random.normal(jax.random.key(1), (2, 32, 1, 96))
        >>> lengths = jnp.array([32, 7])
        >>> jax_dsa.mqa_decode(q, k, value_dim=64, key_value_seq_lengths=lengths).shape
        (2, 1, 8, 64)

    Source: Shazeer, "Fast Transformer Decoding: One Write-Head is All You Need" (2019); the
    combination of splits is that of online softmax, Milakov and Gimelshein (2018).
    """
    args = Args("mqa_decode", "q", q, "B T N D")
    call = args.call(implementation)
    normalize = args.flag("normalize", normalize)
    return_lse = args.flag("return_lse", return_lse)
    return_max_logit = args.flag("return_max_logit", return_max_logit)
    args.option("sinks", sinks, normalize or sinks is None, "None with normalize=False")
    q = args.array("q", q, "B T N D", FLOATS)
    keys = read_keys(
        args, "k", k, "G D", "G D", (q.dtype,), (q.dtype, jnp.uint8), key_value_seq_lengths
    )
    check_record(args, "k", keys)
    lengths = keys.lengths
    if lengths is None:
        lengths = jnp.full(args.batch, keys.rows.shape[1], jnp.int32)
    check_heads(args, "q", "k")
    if v is None:
        value_dim = value_dim_or_default(args, value_dim)
    else:
        v = _values(args, v, keys, q.dtype)
        given, value_dim = value_dim, v.shape[-1]
        if given is not None:
            fits = args.integer("value_dim", given, 0) == value_dim
            args.option("value_dim", given, fits, f"None or E={value_dim} of 'v'")
    starts, ends = visible_keys(args, lengths, starts, local_window_size)
    options = Options(
        scale=scale_or_default(args, scale),
        value_dim=value_dim,
        num_splits=None if num_splits is None else args.integer("num_splits", num_splits, 1),
        normalize=normalize,
        page_size=keys.page_size,
        batch_invariant=args.flag("batch_invariant", batch_invariant),
        exact_max=return_max_logit or not normalize,
    )
    sinks = shared_sinks(args, sinks)
    fp8 = keys.rows.dtype == jnp.uint8
    operands = Operands(
        q, keys.rows, v, starts, ends, sinks, keys.page_table, _ranges(args, plan, fp8)
    )
    y = args.restore(mqa_decode_op(call, options, operands))
    y = y._replace(max_logit=jax.lax.stop_gradient(y.max_logit))
    if normalize:
        return requested(y, return_lse, return_max_logit)
    total = jnp.where(y.max_logit == -jnp.inf, 0, jnp.exp(y.log_sum))
    return y.out * total[..., None], y.max_logit, total


def _values(args: Args, v: Any, keys: Keys, dtype: Any) -> Array:
    """Returns the checked argument `v`, which has one value per key."""
    args.option("v", v, keys.rows.dtype != jnp.uint8, "None with FP8 records for keys")
    return keys.alongside(args, "v", v, "G E", (dtype,))


def _ranges(args: Args, plan: Any, fp8: bool) -> Array | None:
    """Returns the ranges of the checked argument `plan`, [1, ranges, fields]."""
    if plan is None:
        return None
    if not isinstance(plan, MqaDecodePlan):
        raise TypeError(
            f"{args.op}: argument 'plan' is {type_of(plan)}, want the result of mqa_decode_plan"
        )
    shape = f"{PLAN_RANGES} {PLAN_FIELDS}"
    ranges = args.array("plan.ranges", plan.ranges, shape, INT32)
    own = (args.batch, *(args.sizes[x] for x in "TNGD"), fp8)
    if plan.sizes != own:
        made, want = (
            "B={}, T={}, N={}, G={}, D={}, fp8={}".format(*sizes) for sizes in (plan.sizes, own)
        )
        raise ValueError(
            f"{args.op}: argument 'plan' was made for {made}, want one for {want}; make a plan "
            f"for each kind of call by mqa_decode_plan"
        )
    return ranges[None]


def visible_keys(
    args: Args, lengths: Array, starts: Any, local_window_size: Any
) -> tuple[Int[Array, "B T"], Int[Array, "B T"]]:
    """Returns the half-open range of keys that each query sees."""
    if starts is not None:
        starts = args.array("starts", starts, "B or B T", INT32)
    left = None if local_window_size is None else _window(args, local_window_size)
    return _visible_ranges(lengths, starts, left, args.sizes["T"])


def _window(args: Args, given: Any) -> Int[Array, "B"] | np.int32:
    """Returns how many keys before its own position a query sees, of each request or of all."""
    name = "local_window_size"
    static = f"a static int in 0..{LARGEST}, a pair (left, 0) of such ints"
    array = as_array(given)
    is_traced = isinstance(array, jax.core.Tracer)
    if array is not None and (array.ndim > 0 or is_traced or not args.batched):
        return args.array(name, array, "B", INT32, otherwise=static)
    pair = given if isinstance(given, tuple | list) else (given, 0)
    want = f"{static} or an array [B]"
    args.option(name, given, len(pair) == 2, want)
    left, right = (args.integer(name, n, 0, want=want) for n in pair)
    args.option(name, given, right == 0, want)
    return np.int32(left)


@functools.partial(jax.jit, static_argnums=3)
def _visible_ranges(
    lengths: Array, starts: Array | None, left: Array | None, queries: int
) -> tuple[Array, Array]:
    # No position overflows in this order of operations. Lengths beyond the keys are kept, because
    # they say where the queries are: the keys may be only the first ones of the request.
    last = jnp.maximum(lengths, 0)[:, None] - queries
    ends = jnp.maximum(last + jnp.arange(1, queries + 1, dtype=jnp.int32)[None], 0)
    first = jnp.zeros_like(ends)
    if starts is not None:
        first = jnp.maximum(first, starts if starts.ndim == 2 else starts[:, None])
    if left is not None:  # with a negative window a query sees nothing
        first = jnp.maximum(first, ends - 1 - jnp.maximum(left, -1).reshape(-1, 1))
    return first, ends
