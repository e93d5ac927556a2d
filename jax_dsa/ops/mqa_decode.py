"""`mqa_decode`, attention of a few new queries over a whole cache, and `merge_attention`."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from jax_dsa.core.checks import FLOAT32, FLOATS, INT32, Args
from jax_dsa.core.op import Pass, differentiable
from jax_dsa.ops.sparse_mla import check_heads, check_row, default_scale, shared_sinks
from jax_dsa.reference import mqa_decode as reference

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jaxtyping import Array, Float, Int

    from jax_dsa.core.checks import Implementation


@dataclasses.dataclass(frozen=True)
class Options:
    """Static options of the passes; `page_size` counts only if there is a page table."""

    scale: float
    value_dim: int
    num_splits: int | None
    normalize: bool
    page_size: int = 1


# "r" is k's row: its D values, or the bytes of an FP8 record. Pages are one batch row that all
# requests share.
_OPERANDS = "b t (g m) d, b s g r, b s g e, b t, b t, b (g m), b p"
_FWD = Pass(
    "mqa_decode_fwd",
    f"{_OPERANDS} -> b t (g m) e, b t (g m), b t (g m)",
    reference.mqa_decode_fwd,
    shared=(1, 2),
)
_BWD = Pass(
    "mqa_decode_bwd",
    f"{_OPERANDS}, b t (g m) e, b t (g m), b t (g m) e, b t (g m) "
    "-> b t (g m) d, b s g r, b s g e, b (g m)",
    reference.mqa_decode_bwd,
    shared=(1, 2),
)


def _fwd(options: Options, implementation: Any, *operands: Any) -> tuple[Any, Any]:
    out, lse, top = _FWD(options, *operands, implementation=implementation)
    out, lse = checkpoint_name(out, "dsa_out"), checkpoint_name(lse, "dsa_lse")
    return (out, lse, top), (*operands, out, lse)


def _bwd(options: Options, implementation: Any, residuals: Any, cotangents: Any) -> tuple[Any, ...]:
    dout, dlse, _ = cotangents  # the largest score only sets the unit of an un-normalised result
    dq, dk, dv, dsinks = _BWD(options, *residuals, dout, dlse, implementation=implementation)
    return dq, dk, dv, None, None, dsinks, None


_mqa_decode = differentiable("mqa_decode", _fwd, _bwd)


def _visible(
    args: Args, q: jax.Array, keys: int, lengths: Any, starts: Any, window: Any
) -> tuple[jax.Array, jax.Array]:
    """The half-open range of keys that each query sees, two int32 [B, T]."""
    batch, queries = q.shape[:2]
    if lengths is None:
        lengths = jnp.full(batch, keys, jnp.int32)
    else:
        lengths = args.array("lengths", lengths, "B", INT32)
    ends = lengths[:, None] - queries + 1 + jnp.arange(queries, dtype=jnp.int32)
    first = jnp.zeros_like(ends)
    if starts is not None:
        first = jnp.maximum(first, args.array("starts", starts, "B", INT32)[:, None])
    if window is not None:
        if isinstance(window, jax.Array | np.ndarray):
            window = args.array("window", window, "B", INT32)[:, None]
        else:
            window = args.integer("window", window, 1, 2**31 - 1)
        first = jnp.maximum(first, ends - window)
    return first, jnp.minimum(ends, keys)


def mqa_decode(
    q: Float[Array, "B T N D"],
    k: Float[Array, "B S G D"],
    v: Float[Array, "B S G E"] | None = None,
    *,
    value_dim: int = 512,
    lengths: Int[Array, "B"] | None = None,
    starts: Int[Array, "B"] | None = None,
    window: int | Int[Array, "B"] | None = None,
    sinks: Float[Array, "N"] | None = None,
    page_table: Int[Array, "B R"] | None = None,
    scale: float | None = None,
    num_splits: int | None = None,
    normalize: bool = True,
    return_lse: bool = True,
    implementation: Implementation | None = None,
) -> Any:
    """Softmax attention of the newest T tokens of each request over the request's visible keys.

    Query t is the token at position `p = lengths[b] - T + t` and sees the keys
    `max(starts[b], p - window + 1) <= j <= p`. Over these, with `v_j = k[j, :value_dim]` if there
    is no `v`:

        s_j = scale * q . k_j        lse = log sum_j exp(s_j)
        out = sum_j exp(s_j - lse) v_j / (1 + exp(sink - lse))

    A query that sees no key (a request shorter than T, or of length 0) has out = 0, lse = -inf and
    zero gradients.

    Args:
        q: queries, bfloat16, float16 or float32. N is a multiple of G; G = 1 is multi-query
            attention.
        k: keys in the dtype of `q`, or uint8 FP8 records (656 bytes, D = 576, see
            `jax_dsa.serving`). With a page table [P, L, G, D]: P pages of L tokens.
        v: values, laid out as `k`, any E; None takes them from the keys (which FP8 records
            require).
        value_dim: E if `v` is None, in 1..D.
        lengths: int32, tokens that each request holds, these T included. Default S, or all that the
            page table has room for.
        starts: int32, first key that a request may see. Default 0.
        window: how many keys a query sees at most, itself included: an int, or int32 [B].
        sinks: float32, logits that take part in the softmax's sum but have no value; +-inf are
            legal. `lse` excludes them.
        page_table: int32; entry r is the page of a request's tokens r*L to r*L + L-1. Tokens on a
            page outside 0..P-1 are not seen.
        scale: of the scores, default D^-1/2.
        num_splits: into how many parts, at least, the keys are cut and then combined; None chooses.
            Changes only rounding.
        normalize: False returns `(o, m, l)`, all float32, in place of `(out, lse)`: with m the
            largest score, `o = sum_j exp(s_j - m) v_j` and `l = sum_j exp(s_j - m)` (l = 0 and
            m = -inf without a key). Gradients take m for a constant, which is right for everything
            made of o/l and m + log l. Excludes `sinks`.
        return_lse: False returns `out` alone; only with `normalize`.
        implementation: None chooses, "cuda" and "xla" insist.

    Returns:
        `out` [B, T, N, E] in the dtype of `q` and `lse` [B, T, N], float32, natural logarithm. They
        have gradients for `q`, `k` (not FP8 records), `v` and `sinks`. Without a batch axis in the
        arguments there is none in the results.

    Raises:
        ValueError, TypeError: wrong shapes, dtypes or ranges.
        NotImplementedError: forward mode, gradients of gradients, or `implementation="cuda"` for
            what it does not cover.

    Source: Shazeer, "Fast Transformer Decoding: One Write-Head is All You Need" (2019); the
    combination of splits is that of online softmax, Milakov and Gimelshein (2018).
    """
    args = Args("mqa_decode", "q", q, "B T N D")
    implementation = args.implementation(implementation)
    q = args.array("q", q, "B T N D", FLOATS)
    heads, dim = q.shape[2:]
    layout = "B S G" if page_table is None else "P L G"
    k = args.array("k", k, f"{layout} R", (q.dtype, jnp.uint8))
    check_row(args, "k", k, dim)
    check_heads(args, "k", heads, k.shape[2])
    if v is not None:
        if k.dtype == jnp.uint8:
            raise ValueError(
                f"{args.op}: argument 'v' is an array, want None with FP8 records for keys"
            )
        v = args.array("v", v, f"{layout} E", (q.dtype,))
    value_dim = args.integer("value_dim", value_dim, 1, dim) if v is None else v.shape[3]
    page_size, keys = 1, k.shape[1]
    if page_table is not None:
        page_table = args.array("page_table", page_table, "B M", INT32)
        page_size, keys = k.shape[1], page_table.shape[1] * k.shape[1]
        pool = 1, k.shape[0] * page_size, k.shape[2]
        k = k.reshape(*pool, k.shape[3])
        v = v if v is None else v.reshape(*pool, v.shape[3])
    starts, ends = _visible(args, q, keys, lengths, starts, window)
    if not args.flag("normalize", normalize) and sinks is not None:
        raise ValueError(f"{args.op}: argument 'sinks' is an array, want None with normalize=False")
    args.flag("return_lse", return_lse)
    args.option("return_lse", return_lse, normalize or return_lse, "True with normalize=False")
    options = Options(
        scale=default_scale(args, scale, dim),
        value_dim=value_dim,
        num_splits=None if num_splits is None else args.integer("num_splits", num_splits, 1),
        normalize=normalize,
        page_size=page_size,
    )
    sinks = shared_sinks(args, sinks)
    operands = q, k, v, starts, ends, sinks, page_table
    out, lse, top = _mqa_decode(options, implementation, *operands)
    if normalize:
        return args.restore(out, lse) if return_lse else args.restore(out)
    top = jax.lax.stop_gradient(top)
    total = jnp.where(top == -jnp.inf, 0, jnp.exp(lse - jnp.where(top == -jnp.inf, 0, top)))
    return args.restore(out * total[..., None], top, total)


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
    """
    outs = _stacked("outs", outs)
    axes = ["P", *(f"A{i}" for i in range(1, outs.ndim - 1)), "E"]
    args = Args("merge_attention", "outs", outs, " ".join(axes))
    outs = args.array("outs", outs, " ".join(axes), FLOATS)
    lses = args.array("lses", _stacked("lses", lses), " ".join(axes[:-1]), FLOAT32)
    if args.implementation(implementation) == "cuda":
        raise NotImplementedError(
            "merge_attention: implementation='cuda' is not available: it has no CUDA kernel; "
            "implementation='xla' covers this call"
        )
    return reference.merge(outs, lses)


def _stacked(name: str, parts: Any) -> jax.Array:
    """The parts along a new first axis, unless they are stacked already."""
    op = "merge_attention"
    if isinstance(parts, list | tuple):
        if any(not isinstance(x, jax.Array | np.ndarray) for x in parts):
            raise TypeError(f"{op}: argument '{name}' is a sequence, want arrays for its items")
        kinds = {(x.shape, x.dtype.name) for x in parts}
        if len(kinds) != 1:
            got = ", ".join(f"{dtype}{list(shape)}" for shape, dtype in sorted(kinds)) or "nothing"
            raise ValueError(
                f"{op}: argument '{name}' holds {got}, want arrays of one shape and dtype"
            )
        return jnp.stack(parts)
    if not isinstance(parts, jax.Array | np.ndarray):
        raise TypeError(
            f"{op}: argument '{name}' is {type(parts).__name__}, want an array or a list of arrays"
        )
    if parts.shape[:1] in ((), (0,)):
        raise ValueError(
            f"{op}: argument '{name}' has shape {parts.shape}, want parts along the first axis"
        )
    return jnp.asarray(parts)
