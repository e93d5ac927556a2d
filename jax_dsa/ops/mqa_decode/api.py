"""`mqa_decode`, attention of a few new queries over a whole cache, and `merge_attention`."""

from __future__ import annotations

import functools
from collections.abc import Sequence
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
from jax_dsa.core.checks import FLOATS, INT32, WIDE_FLOATS, Args, as_array
from jax_dsa.core.ffi import Kernel, either
from jax_dsa.core.op import Pass, differentiable
from jax_dsa.core.typing import Array, Float, Implementation, Int
from jax_dsa.ops.cache.api import CachedKeys, FlatCache, PagedCache, cached_keys, check_row
from jax_dsa.ops.mqa_decode import cuda, xla
from jax_dsa.ops.mqa_decode.spec import Operands, Options

FWD = Pass(
    "mqa_decode_fwd",
    xla.mqa_decode_fwd,
    kernel=Kernel(
        cuda.mqa_decode_fwd,
        cuda.supports,
        limits=f"bfloat16, keys in FP8 records, too; D {either(cuda.LATENT_DIMS)} with value_dim "
        f"{cuda.VALUE_DIM} and no v, D=E {either(cuda.DIMS)} with v",
    ),
)
BWD = Pass("mqa_decode_bwd", xla.mqa_decode_bwd)

# The operator without its checks.
mqa_decode_op = differentiable("mqa_decode", FWD, BWD)


class _Keywords(TypedDict, total=False):
    """For the overloads."""

    value_dim: int | None
    key_value_seq_lengths: Int[Array, "B"] | None
    starts: Int[Array, "B"] | Int[Array, "B T"] | None
    local_window_size: int | tuple[int, int] | Int[Array, "B"] | None
    sinks: Float[Array, "N"] | None
    scale: float | None
    num_splits: int | None
    batch_invariant: bool
    implementation: Implementation | None


OutLSE = tuple[Float[Array, "B T N E"], Float[Array, "B T N"]]
Unnormalized = tuple[Float[Array, "B T N E"], Float[Array, "B T N"], Float[Array, "B T N"]]


@overload
def mqa_decode(
    q: Float[Array, "B T N D"],
    k: Float[Array, "B S G D"] | FlatCache | PagedCache,
    v: Float[Array, "B S G E"] | None = None,
    *,
    normalize: Literal[True] = True,
    return_lse: Literal[False] = False,
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
    **keywords: Unpack[_Keywords],
) -> OutLSE: ...
@overload
def mqa_decode(
    q: Float[Array, "B T N D"],
    k: Float[Array, "B S G D"] | FlatCache | PagedCache,
    v: Float[Array, "B S G E"] | None = None,
    *,
    normalize: Literal[False],
    return_lse: bool = False,
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
    batch_invariant: bool = False,
    normalize: bool = True,
    return_lse: bool = False,
    implementation: Implementation | None = None,
) -> Float[Array, "B T N E"] | OutLSE | Unnormalized:
    """Softmax attention of the newest T tokens of each request over the request's visible keys.

    Query t is the token at position `p = key_value_seq_lengths[b] - T + t` and sees the keys
    `max(starts[b], p - left) <= j <= p`. Over these, with `v_j = k[j, :value_dim]` if there is no
    `v`:

        s_j = scale * q . k_j        lse = log sum_j exp(s_j)
        out = sum_j exp(s_j - lse) v_j / (1 + exp(sink - lse))

    A query that sees no key (a request shorter than T, or of length 0) has out = 0, lse = -inf and
    zero gradients.

    Args:
        q: queries, bfloat16, float16 or float32. N is a multiple of G; G = 1 is multi-query
            attention.
        k: keys in the dtype of `q`; or a cache of such keys or of FP8 records (D = 576, or 512 in
            pages), with this step's tokens already appended.
        v: values of any E; [B, S, G, E], or with a `PagedCache` a pool [P, L, G, E] of the same
            pages. None takes them from the keys, which FP8 records require.
        value_dim: E if `v` is None, in 1..D. Default 512, or D where that is less.
        key_value_seq_lengths: tokens that each request holds, these T included. Default S; a cache
            has its own. More than S where `k` is only the first part of them.
        starts: first key that a request, or a query, may see. Default 0.
        local_window_size: how many keys before its own position a query sees: an int, (left, 0), or
            one for each request.
        sinks: float32, logits that take part in the softmax's sum but have no value; +-inf are
            legal. `lse` excludes them.
        scale: of the scores, default D^-1/2.
        num_splits: into how many parts, at least, XLA cuts the keys, which are then combined; None
            chooses, and so do the kernels. Changes only rounding.
        batch_invariant: a request's results are the same, bit for bit, whatever requests are
            computed with it, and how many. Without it how its keys are cut, and so the last bits,
            may depend on the others. Gradients are not covered. It costs time: one request is
            computed after the other.
        normalize: False returns `(o, m, l)`, all float32, in place of `out`: with m the
            largest score, `o = sum_j exp(s_j - m) v_j` and `l = sum_j exp(s_j - m)` (l = 0 and
            m = -inf without a key). Gradients take m for a constant, which is right for everything
            made of o/l and m + log l. Excludes `sinks`.
        return_lse: also return `lse`; without effect where `normalize` is False.
        implementation: None chooses, "cuda" and "xla" insist.

    Returns:
        `out` [B, T, N, E] in the dtype of `q`; with `return_lse` also `lse` [B, T, N], float32,
        natural logarithm. They have gradients for `q`, `k` (not FP8 records), `v` and `sinks`.
        Without a batch axis in the arguments there is none in the results.

    Raises:
        ValueError, TypeError: wrong shapes, dtypes or ranges.
        NotImplementedError: forward mode, gradients of gradients, or `implementation="cuda"` for
            what it does not cover.

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
    if not normalize and sinks is not None:
        raise ValueError(f"{args.op}: argument 'sinks' is an array, want None with normalize=False")
    q = args.array("q", q, "B T N D", FLOATS)
    keys = _keys(args, k, key_value_seq_lengths, q.dtype)
    check_heads(args, "q", "k")
    if v is None:
        value_dim = value_dim_or_default(args, value_dim)
    else:
        v = _values(args, v, keys, q.dtype)
        given, value_dim = value_dim, v.shape[-1]
        if given is not None:
            fits = args.integer("value_dim", given, 0) == value_dim
            args.option("value_dim", given, fits, f"None or E={value_dim} of 'v'")
    starts, ends = _visible(args, keys.lengths, starts, local_window_size)
    options = Options(
        scale=scale_or_default(args, scale),
        value_dim=value_dim,
        num_splits=None if num_splits is None else args.integer("num_splits", num_splits, 1),
        normalize=normalize,
        page_size=keys.page_size,
        batch_invariant=args.flag("batch_invariant", batch_invariant),
    )
    sinks = shared_sinks(args, sinks)
    operands = Operands(q, keys.rows, v, starts, ends, sinks, keys.page_table)
    out, lse, top = mqa_decode_op(call, options, operands)
    if top is None:
        out, lse = args.restore((out, lse))
        return (out, lse) if return_lse else out
    top = jax.lax.stop_gradient(top)
    total = jnp.where(top == -jnp.inf, 0, jnp.exp(lse - jnp.where(top == -jnp.inf, 0, top)))
    return args.restore((out * total[..., None], top, total))


def _keys(args: Args, k: Any, lengths: Any, dtype: Any) -> CachedKeys:
    """The argument `k`, an array or a cache."""
    if isinstance(k, FlatCache | PagedCache):
        none = lengths is None
        args.option("key_value_seq_lengths", lengths, none, "None with a cache, which has its own")
        keys = cached_keys(args, "k", k, "G R", (dtype, jnp.uint8))
        check_row(args, "k", keys)
        return keys
    rows = args.array("k", k, "B S G D", (dtype,))
    if lengths is None:
        lengths = jnp.full(args.batch, rows.shape[1], jnp.int32)
    else:
        lengths = args.array("key_value_seq_lengths", lengths, "B", INT32)
    return CachedKeys(rows, lengths, None, 1)


def _values(args: Args, v: Any, keys: CachedKeys, dtype: Any) -> Array:
    """The argument `v`, as the keys lie."""
    if keys.rows.dtype == jnp.uint8:
        raise ValueError(
            f"{args.op}: argument 'v' is an array, want None with FP8 records for keys"
        )
    layout = "B S" if keys.page_table is None else "P L"
    v = args.array("v", v, f"{layout} G E", (dtype,))
    if keys.page_table is None:
        return v
    return v.reshape(v.shape[0] * v.shape[1], *v.shape[2:])[None]


def _visible(
    args: Args, lengths: Array, starts: Any, local_window_size: Any
) -> tuple[Int[Array, "B T"], Int[Array, "B T"]]:
    """The half-open range of keys that each query sees."""
    if starts is not None:
        each = np.ndim(as_array(starts)) == 1 + args.batched  # type: ignore[arg-type]
        starts = args.array("starts", starts, "B T" if each else "B", INT32)
    left = local_window_size
    array = as_array(left)
    if array is not None and array.ndim == args.batched:
        left = args.array("local_window_size", array, "B", INT32)
    elif left is not None:
        want = "an int or (left, 0)"
        pair = left if isinstance(left, tuple | list) else (left, 0)
        args.option("local_window_size", local_window_size, len(pair) == 2, want)
        left, right = (args.integer("local_window_size", n, 0) for n in pair)
        args.option("local_window_size", local_window_size, right == 0, want)
        left = np.int32(left)
    return _visible_ranges(lengths, starts, left, args.sizes["T"])


@functools.partial(jax.jit, static_argnums=3)
def _visible_ranges(
    lengths: Array, starts: Array | None, left: Array | None, queries: int
) -> tuple[Array, Array]:
    # In this order no position overflows. Lengths past the keys stay, since they say where the
    # queries are: these keys may be the first part of all.
    last = jnp.maximum(lengths, 0)[:, None] - queries
    ends = jnp.maximum(last + jnp.arange(1, queries + 1, dtype=jnp.int32)[None], 0)
    first = jnp.zeros_like(ends)
    if starts is not None:
        first = jnp.maximum(first, starts if starts.ndim == 2 else starts[:, None])
    if left is not None:  # a negative window sees nothing
        first = jnp.maximum(first, ends - 1 - jnp.maximum(left, -1).reshape(-1, 1))
    return first, ends


def merge_attention(
    outs: Float[Array, "P B T N E"] | Sequence[Float[Array, "B T N E"]],
    lses: Float[Array, "P B T N"] | Sequence[Float[Array, "B T N"]],
    *,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "B T N E"], Float[Array, "B T N"]]:
    """Attention over P disjoint sets of keys together, from the attention over each.

        lse = log sum_p exp(lses[p])        out = sum_p exp(lses[p] - lse) outs[p]

    A part with lse = -inf contributes nothing, whatever its out is; where all are, out = 0 and
    lse = -inf.

    Args:
        outs: normalised partial outputs, stacked or in a sequence. Any number of axes, of which the
            last is E.
        lses: float32, their natural-log sums without sinks: one axis less than `outs`.
        implementation: "cuda" has no kernel for it yet.

    Returns:
        `out` in the dtype of `outs` and `lse`, both differentiable in both arguments, to any order.

    Raises:
        ValueError, TypeError: wrong shapes or dtypes, or no parts.
        NotImplementedError: `implementation="cuda"`.

    Examples:
        >>> import jax.numpy as jnp, jax_dsa
        >>> outs = jnp.array([[[[1.0]]], [[[3.0]]]])  # [P=2, T=1, N=1, E=1]
        >>> out, lse = jax_dsa.merge_attention(outs, jnp.log(jnp.array([[[3.0]], [[1.0]]])))
        >>> out.round(5)
        Array([[[1.5]]], dtype=float32)
    """
    outs = _stacked("outs", outs)
    axes = ["P", *(f"A{i}" for i in range(1, outs.ndim - 1)), "E"]
    args = Args("merge_attention", "outs", outs, " ".join(axes))
    outs = args.array("outs", outs, " ".join(axes), FLOATS)
    lses = args.array("lses", _stacked("lses", lses), " ".join(axes[:-1]), WIDE_FLOATS)
    if args.call(implementation).implementation == "cuda":
        raise NotImplementedError(
            "merge_attention: implementation='cuda' is not available: it has no CUDA kernel; "
            "implementation='xla' covers this call"
        )
    return xla.merge(outs, lses)


def _stacked(name: str, parts: Any) -> jax.Array:
    """The parts along a new first axis, unless they are stacked already."""
    op = "merge_attention"
    if isinstance(parts, list | tuple):
        if any(as_array(x) is None for x in parts):
            raise TypeError(f"{op}: argument '{name}' is a sequence, want arrays for its items")
        kinds = {(x.shape, x.dtype.name) for x in parts}
        if len(kinds) != 1:
            got = ", ".join(f"{dtype}{list(shape)}" for shape, dtype in sorted(kinds)) or "nothing"
            raise ValueError(
                f"{op}: argument '{name}' holds {got}, want arrays of one shape and dtype"
            )
        return _of_jax(name, jnp.stack, parts, kinds.pop()[1])
    if as_array(parts) is None:
        raise TypeError(
            f"{op}: argument '{name}' is {type(parts).__name__}, want an array or a list of arrays"
        )
    if parts.shape[:1] in ((), (0,)):
        raise ValueError(
            f"{op}: argument '{name}' has shape {parts.shape}, want parts along the first axis"
        )
    return _of_jax(name, jnp.asarray, parts, parts.dtype)


def _of_jax(name: str, make: Any, parts: Any, dtype: Any) -> jax.Array:
    """`make(parts)`, whose dtype JAX may not have."""
    try:
        return make(parts)
    except TypeError:
        raise TypeError(
            f"merge_attention: argument '{name}' has dtype {dtype}, want floats"
        ) from None
