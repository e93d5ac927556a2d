"""`sparse_mla`, `sparse_mla_decode`: latent attention over each query's own selection of keys."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from jax_dsa.core import ffi
from jax_dsa.core.checks import FLOAT32, FLOATS, INT32, Args
from jax_dsa.core.ffi import Kernel
from jax_dsa.core.op import Pass, differentiable
from jax_dsa.ops.sparse_mla_bwd import sparse_mla_bwd
from jax_dsa.reference import sparse_mla as reference
from jax_dsa.serving.caches import FlatCache, PagedCache

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int

    from jax_dsa.core.checks import Implementation


@dataclasses.dataclass(frozen=True)
class Options:
    """Static options of the passes; `page_size` counts only if there is a page table."""

    scale: float
    value_dim: int
    deterministic: bool = False
    page_size: int = 1


# What the kernel covers, as in cuda/sparse_mla/sparse_mla.h.
_KERNEL_DIMS = (576, 512)
_KERNEL_VALUE_DIM = 512


def _kernel_supports(options: Options, q: Any, kv: Any, *_: Any) -> str | None:
    if q.dtype != jnp.bfloat16 or kv.dtype != jnp.bfloat16:
        return f"it takes bfloat16, got q of {q.dtype} and kv of {kv.dtype}"
    if q.shape[3] not in _KERNEL_DIMS:
        return f"it has D=576 and D=512, got D={q.shape[3]}"
    if options.value_dim != _KERNEL_VALUE_DIM:
        return f"it has value_dim={_KERNEL_VALUE_DIM}, got {options.value_dim}"
    if options.scale <= 0:
        return f"it takes scale > 0, got {options.scale}"
    return None


def _decode_kernel_supports(options: Options, q: Any, kv: Any, *_: Any) -> str | None:
    if kv.dtype != jnp.uint8:
        return _kernel_supports(options, q, kv)
    rows = jax.ShapeDtypeStruct((1, 1, 1, q.shape[3]), q.dtype)
    return _kernel_supports(options, q, rows)  # the shape of records is checked already


def _splits(q: Any, kv: Any, indices: Any) -> tuple[int, int]:
    """How many (query, group, 64 heads) there are, and into how many parts each is split."""
    B, T, N, _ = q.shape
    G = kv.shape[2]
    items = B * T * G * -(-(N // G) // 64)
    return items, ffi.extension().sparse_mla_decode_splits(items, indices.shape[3])


def _decode_attrs(options: Options, q: Any, kv: Any, indices: Any, *_: Any) -> dict[str, Any]:
    return {
        "scale": np.float32(options.scale),
        "page_size": np.int32(options.page_size),
        "splits": np.int32(_splits(q, kv, indices)[1]),
    }


def _decode_workspace(options: Options, q: Any, kv: Any, indices: Any, *_: Any) -> tuple[Any, ...]:
    items, splits = _splits(q, kv, indices)
    if splits == 1:
        return ()
    rows = (items, splits, 64)
    return (
        jax.ShapeDtypeStruct((*rows, _KERNEL_VALUE_DIM), jnp.float32),
        jax.ShapeDtypeStruct(rows, jnp.float32),
    )


# "r" is kv's row: its D values, or the bytes of an FP8 record.
_FWD = Pass(
    "sparse_mla_fwd",
    "b t (g m) d, b s g r, b t g k, b t, b t, b (g m) -> b t (g m) e, b t (g m)",
    reference.sparse_mla_fwd,
    kernel=Kernel(
        target="jax_dsa.sparse_mla_fwd.v1",
        limits="bfloat16; D 576 or 512, value_dim 512; scale > 0",
        supported=_kernel_supports,
        attrs=lambda o, *_: {"scale": np.float32(o.scale)},
    ),
)
_BWD = Pass(
    "sparse_mla_bwd",
    "b t (g m) d, b s g r, b t g k, b t, b t, b (g m), "
    "b t (g m) e, b t (g m), b t (g m) e, b t (g m) "
    "-> b t (g m) d, b s g r, b (g m)",
    reference.sparse_mla_bwd,
    kernel=Kernel(
        target="jax_dsa.sparse_mla_bwd.v2",
        limits="bfloat16; D 576 or 512, value_dim 512; scale > 0",
        supported=_kernel_supports,
        composed=sparse_mla_bwd,
    ),
)


# Pages are one batch row that all requests share.
_DECODE_OPERANDS = "b t (g m) d, b s g r, b t g k, b t, b t, b (g m), b p"
_DECODE_FWD = Pass(
    "sparse_mla_decode_fwd",
    f"{_DECODE_OPERANDS} -> b t (g m) e, b t (g m)",
    reference.sparse_mla_decode_fwd,
    shared=(1,),
    kernel=Kernel(
        target="jax_dsa.sparse_mla_decode.v1",
        limits="bfloat16, or FP8 records; D 576 (512 in bfloat16), value_dim 512; scale > 0",
        supported=_decode_kernel_supports,
        attrs=_decode_attrs,
        workspace=_decode_workspace,
    ),
)
_DECODE_BWD = Pass(
    "sparse_mla_decode_bwd",
    f"{_DECODE_OPERANDS}, b t (g m) e, b t (g m), b t (g m) e, b t (g m) "
    "-> b t (g m) d, b s g r, b (g m)",
    reference.sparse_mla_decode_bwd,
    shared=(1,),
)


def _attention(name: str, forward: Pass, backward: Pass) -> Any:
    """The two passes joined; their operands start with q, kv, indices, ends, topk_length, sinks."""

    def fwd(options: Options, implementation: Any, *operands: Any) -> tuple[Any, Any]:
        out, lse = forward(options, *operands, implementation=implementation)
        out, lse = checkpoint_name(out, "dsa_out"), checkpoint_name(lse, "dsa_lse")
        return (out, lse), (*operands, out, lse)

    def bwd(
        options: Options, implementation: Any, residuals: Any, cotangents: Any
    ) -> tuple[Any, ...]:
        grads = backward(options, *residuals, *cotangents, implementation=implementation)
        dq, dkv, dsinks = grads
        no_more = (None,) * (len(residuals) - 2 - 6)  # but out, lse and the six
        return dq, dkv, None, None, None, dsinks, *no_more

    return differentiable(name, fwd, bwd)


_sparse_mla = _attention("sparse_mla", _FWD, _BWD)
_sparse_mla_decode = _attention("sparse_mla_decode", _DECODE_FWD, _DECODE_BWD)


def check_heads(args: Args, keys: str, heads: int, groups: int) -> None:
    """Raises unless the query heads divide evenly among the key heads of the argument `keys`."""
    if groups == 0 or heads % groups:
        raise ValueError(
            f"{args.op}: argument 'q' has N={heads} heads and '{keys}' has G={groups}, "
            f"want N to be a multiple of G"
        )


def check_row(args: Args, name: str, kv: jax.Array, dim: int) -> None:
    """Raises unless the rows of `kv` have q's D values, or are FP8 records of that many."""
    records = kv.dtype == jnp.uint8
    want = reference.RECORD_BYTES if records else dim
    if kv.shape[-1] != want or (records and dim != reference.RECORD_DIM):
        rule = (
            f"FP8 records of {want} bytes with D={reference.RECORD_DIM}" if records else f"D={dim}"
        )
        raise ValueError(
            f"{args.op}: argument '{name}' has shape {kv.shape} for queries of D={dim}, want {rule}"
        )


def default_scale(args: Args, scale: float | None, dim: int) -> float:
    """`scale`, or dim^-1/2."""
    return dim**-0.5 if scale is None else args.real("scale", scale)


def shared_sinks(args: Args, sinks: Array | None) -> jax.Array | None:
    """The public [N] sinks as [1, N]: a pass broadcasts a batch axis of one."""
    return None if sinks is None else args.array("sinks", sinks, "N", FLOAT32)[None]


def selection(
    args: Args, indices: Array, topk_length: Array | None
) -> tuple[jax.Array, jax.Array | None]:
    """Checked `indices` [B, T, G, K] and `topk_length` [B, T]."""
    indices = args.array("indices", indices, "B T G K", INT32)
    if topk_length is not None:
        topk_length = args.array("topk_length", topk_length, "B T", INT32)
    return indices, topk_length


def causal_ends(
    args: Args, is_causal: bool, query_start: Any, key_stride: int, batch: int, queries: int
) -> jax.Array | None:
    """One past the last key that each query sees, [B, T], or None if it sees all."""
    stride = args.integer("key_stride", key_stride, 1)
    positions = args.query_positions("query_start", query_start, batch, queries)
    return (positions + 1) // stride if args.flag("is_causal", is_causal) else None


def sparse_mla(
    q: Float[Array, "B T N D"],
    kv: Float[Array, "B S G D"],
    indices: Int[Array, "B T G K"],
    *,
    value_dim: int = 512,
    scale: float | None = None,
    is_causal: bool = False,
    query_start: int | Int[Array, "*B"] = 0,
    key_stride: int = 1,
    topk_length: Int[Array, "B T"] | None = None,
    sinks: Float[Array, "N"] | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
    implementation: Implementation | None = None,
) -> Any:
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
        indices: int32 positions along S, in any order; anything outside 0..S-1 is an empty slot.
        value_dim: E, in 1..D.
        scale: of the scores, default D^-1/2.
        is_causal: key j is visible to query t iff `j <= (query_start + t + 1) // key_stride - 1`.
        query_start: position of the first query among the tokens: an int, an int32 scalar, or int32
            [B].
        key_stride: tokens per key, for compressed keys.
        topk_length: int32, how many of the first slots of a row count; the others are never read.
            Default K.
        sinks: float32, logits that take part in the softmax's sum but have no value; +-inf are
            legal. `lse` excludes them.
        deterministic: bit-identical gradients on every run.
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

    Source: DeepSeek-V2 (2024) for latent attention, DeepSeek-V3.2 (2025) for its sparse form.
    """
    args = Args("sparse_mla", "q", q, "B T N D")
    implementation = args.implementation(implementation)
    q = args.array("q", q, "B T N D", FLOATS)
    kv = args.array("kv", kv, "B S G D", (q.dtype,))
    check_heads(args, "kv", q.shape[2], kv.shape[2])
    indices, topk_length = selection(args, indices, topk_length)
    ends = causal_ends(args, is_causal, query_start, key_stride, *q.shape[:2])
    options = Options(
        scale=default_scale(args, scale, q.shape[3]),
        value_dim=args.integer("value_dim", value_dim, 1, q.shape[3]),
        deterministic=args.flag("deterministic", deterministic),
    )
    sinks = shared_sinks(args, sinks)
    out, lse = _sparse_mla(options, implementation, q, kv, indices, ends, topk_length, sinks)
    return args.restore(out, lse) if args.flag("return_lse", return_lse) else args.restore(out)


def sparse_mla_decode(
    q: Float[Array, "B T N D"],
    cache: FlatCache | PagedCache,
    indices: Int[Array, "B T G K"],
    *,
    value_dim: int = 512,
    scale: float | None = None,
    is_causal: bool = False,
    topk_length: Int[Array, "B T"] | None = None,
    sinks: Float[Array, "N"] | None = None,
    return_lse: bool = False,
    implementation: Implementation | None = None,
) -> Any:
    """`sparse_mla` of a few new queries over a flat or paged cache of keys or of FP8 records.

    A slot counts if `0 <= idx < lengths[b]`, and on a paged cache if its page is mapped. Only the
    selected rows are read: through the page table, and unpacked as they are.

    Args:
        q: absorbed queries of the last T tokens of each request, bfloat16, float16 or float32.
        cache: keys in the dtype of `q`, or FP8 records (D = 576), with this step's tokens already
            appended. See `jax_dsa.serving`.
        indices: int32 positions within each request, not within the pages.
        value_dim: E, in 1..D.
        scale: of the scores, default D^-1/2.
        is_causal: query t, at position `lengths[b] - T + t`, sees only keys up to its own. Needed
            where the indices do not see to it.
        topk_length: as for `sparse_mla`.
        sinks: as for `sparse_mla`.
        return_lse: also return `lse`.
        implementation: None chooses, "cuda" and "xla" insist.

    Returns:
        As `sparse_mla`. There are gradients for `q`, `sinks`, and a cache that holds keys; none for
        FP8 records.

    Raises:
        ValueError, TypeError: wrong shapes, dtypes or ranges.
        NotImplementedError: as for `sparse_mla`.
    """
    args = Args("sparse_mla_decode", "q", q, "B T N D")
    implementation = args.implementation(implementation)
    q = args.array("q", q, "B T N D", FLOATS)
    if not isinstance(cache, FlatCache | PagedCache):
        raise TypeError(
            f"{args.op}: argument 'cache' is {type(cache).__name__}, "
            f"want a FlatCache or a PagedCache"
        )
    batch, queries, heads, dim = q.shape
    table, page_size = None, 1
    if isinstance(cache, PagedCache):
        kv = args.array("cache.pages", cache.pages, "P L G R", (q.dtype, jnp.uint8))
        table = args.array("cache.page_table", cache.page_table, "B M", INT32)
        page_size = kv.shape[1]
        kv = kv.reshape(1, kv.shape[0] * page_size, *kv.shape[2:])
    else:
        kv = args.array("cache.data", cache.data, "B S G R", (q.dtype, jnp.uint8))
    check_row(args, "cache", kv, dim)
    check_heads(args, "cache", heads, kv.shape[2])
    lengths = args.array("cache.lengths", cache.lengths, "B", INT32)
    indices, topk_length = selection(args, indices, topk_length)
    ends = jnp.broadcast_to(lengths[:, None], (batch, queries))
    if args.flag("is_causal", is_causal):
        ends = ends - queries + 1 + jnp.arange(queries, dtype=jnp.int32)
    options = Options(
        scale=default_scale(args, scale, dim),
        value_dim=args.integer("value_dim", value_dim, 1, dim),
        page_size=page_size,
    )
    sinks = shared_sinks(args, sinks)
    operands = q, kv, indices, ends, topk_length, sinks, table
    out, lse = _sparse_mla_decode(options, implementation, *operands)
    return args.restore(out, lse) if args.flag("return_lse", return_lse) else args.restore(out)
