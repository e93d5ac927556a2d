"""Checks and defaults of the arguments that several operators share."""

from __future__ import annotations

import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import min_dim
from jax.errors import InconclusiveDimensionOperation

from jax_dsa.core.checks import INT32, LARGEST, WIDE_FLOATS, Args, as_array
from jax_dsa.core.deferred import Deferred
from jax_dsa.core.documents import document_ends, document_starts
from jax_dsa.core.typing import Array, ArrayLike, Float, Int

CausalAlignment = Literal["top_left", "bottom_right"]
Window = int | tuple[int, int]
SegmentIds = Int[Array, "B T"] | tuple[Int[Array, "B T"], Int[Array, "B S"]]

# The rule for a size that determines the program itself.
NO_SYMBOL = "numbers, no symbols: export once for each size"

CAUSAL_ALIGNMENTS = ("top_left", "bottom_right")


def check_heads(args: Args, q: str, kv: str) -> None:
    """Raises unless N query heads are a multiple of G KV heads, and D is not 0."""
    heads, groups, dim = args.sizes["N"], args.sizes["G"], args.sizes["D"]
    numbers = isinstance(heads, int) and isinstance(groups, int)
    args.option(q, f"N={heads} heads and G={groups} groups", numbers, NO_SYMBOL)
    if groups == 0 or heads % groups:
        raise args.disagreement(
            f"argument '{q}' has N={heads} heads and '{kv}' has G={groups}, want N to be a "
            f"multiple of G (heads are the axis before the last one)"
        )
    if isinstance(dim, int) and dim == 0:
        raise ValueError(f"{args.op}: argument '{q}' has D=0, want D >= 1 (D is the last axis)")


def scale_or_default(args: Args, scale: Any) -> float:
    """Returns the checked `scale`; the default is D^-1/2."""
    if scale is not None:
        return args.real("scale", scale)
    args.option("scale", scale, isinstance(args.sizes["D"], int), "a float where D is symbolic")
    return float(args.sizes["D"] ** -0.5)


def value_dim_or_default(args: Args, value_dim: Any) -> int:
    """Returns `value_dim`, or its default for MLA: 512, or D if that is smaller."""
    dim = args.sizes["D"]
    number = isinstance(dim, int)
    if value_dim is None:
        args.option("value_dim", value_dim, number, "an int where D is symbolic")
        return min(512, dim)
    value_dim = args.integer("value_dim", value_dim, 1, dim if number else LARGEST)
    if not number:
        try:
            fits = value_dim <= dim
        except InconclusiveDimensionOperation:
            fits = False
        want = f"at most D={dim}, which a constraint on D must say: '{dim} >= {value_dim}'"
        args.option("value_dim", value_dim, fits, want)
    return value_dim


def shared_sinks(args: Args, sinks: Any) -> Float[Array, "1 N"] | None:
    """Returns the public sinks [N] as [1, N]. A pass broadcasts a batch axis of 1."""
    return None if sinks is None else args.array("sinks", sinks, "N", WIDE_FLOATS)[None]


def selection(
    args: Args, indices: Any, topk_length: Any, prefix: str = "", slots: str = "K"
) -> tuple[Int[Array, "B T G K"], Int[Array, "B T"] | None]:
    """Returns the checked `indices`, one selection for each group, and `topk_length`.

    The arguments' names begin with the `prefix`, and `slots` is the letter of their last axis.
    """
    dims = f"B T G {slots} or B T {slots}"
    indices = args.array(f"{prefix}indices", indices, dims, INT32)
    if indices.ndim == 3:
        indices = for_all_groups(indices, args.sizes["G"])
    if topk_length is not None:
        topk_length = args.array(f"{prefix}topk_length", topk_length, "B T", INT32)
    return indices, topk_length


def for_all_groups(indices: Int[Array, "B T K"], groups: int) -> Int[Array, "B T G K"]:
    """Returns one selection per query as a selection for each group of heads."""
    batch, queries, slots = indices.shape
    return jnp.broadcast_to(indices[:, :, None], (batch, queries, groups, slots))


def first_position(args: Args, query_start: Any) -> ArrayLike:
    """Returns `query_start` as int32 [1] or [B], capped so that no position overflows."""
    last = LARGEST - args.sizes["T"]
    if as_array(query_start) is None:
        first = np.full(1, args.integer("query_start", query_start, -(2**31)), np.int32)
        return np.minimum(first, last) if isinstance(last, int) else jnp.minimum(first, last)
    start = args.typed("query_start", query_start, INT32)
    if start.shape not in ((), (args.batch,)):
        raise ValueError(
            f"{args.op}: argument 'query_start' has shape {start.shape}, want an int, () or "
            f"[B={args.batch}]"
        )
    return jnp.minimum(start.reshape(-1), last)


def causal_ends(args: Args, is_causal: Any, query_start: Any, key_stride: Any) -> Any:
    """Returns one past the last key that each query sees, int32 [B, T]; None for all keys."""
    stride = args.integer("key_stride", key_stride, 1)
    start = first_position(args, query_start)
    if not args.flag("is_causal", is_causal):
        return None
    return Deferred(_causal_ends, (start,), (args.batch, args.sizes["T"], stride))


def _causal_ends(start: Any, batch: int, queries: int, stride: int) -> Array:
    ends = (start[:, None] + jnp.arange(1, queries + 1, dtype=jnp.int32)[None]) // stride
    return jnp.broadcast_to(ends, (batch, queries))


def key_ranges(
    args: Args,
    starts: Any,
    ends: Any,
    is_causal: Any = False,
    query_start: Any = 0,
    segment_ids: Any = None,
    lengths: Int[Array, "B"] | None = None,
    key_stride: Any = 1,
) -> tuple[Any, Any]:
    """Returns the half-open range of keys that each query sees: two int32 [B, T] in 0..S.

    Args:
        args: the checks of the call.
        starts, ends, is_causal, query_start, segment_ids: the user's arguments.
        lengths: the number of tokens that each request of a cache has, the last T of which are the
            queries' own; None without a cache. A length beyond S still says where the queries are.
        key_stride: the user's argument, the number of positions per key; see `causal_ends`.
    """
    causal = args.flag("is_causal", is_causal)
    stride = args.integer("key_stride", key_stride, 1)
    for given, what in ((lengths, "with a cache"), (segment_ids, "beside 'segment_ids'")):
        free = given is None or stride == 1
        args.option("key_stride", stride, free, f"1 {what}; pass 'starts' and 'ends'")
    ids = None
    if segment_ids is not None:
        args.option("segment_ids", segment_ids, lengths is None, "None with a cache")
        ids = document_numbers(args, segment_ids)
        only_zero(args, query_start, "0 beside 'segment_ids', where query t is the token of key t")
    first: Any = lengths
    if lengths is None:
        first = first_position(args, query_start)
    else:
        only_zero(args, query_start, "0 with a cache, whose lengths say it")
    starts, ends = (
        None if x is None else args.array(name, x, "B T", INT32)
        for name, x in (("starts", starts), ("ends", ends))
    )
    sizes = (args.batch, args.sizes["T"]), args.sizes["S"]
    return (
        Deferred(_range_starts, (starts, ids), sizes),
        # A causal query sees nothing after itself, so the end of its document changes nothing.
        Deferred(_range_ends, (ends, first, None, lengths), (*sizes, stride))
        if causal
        else Deferred(_range_ends, (ends, None, ids, lengths), (*sizes, stride)),
    )


def only_zero(args: Args, query_start: Any, why: str) -> None:
    """Raises unless `query_start` is 0; `why` is what a message says is expected."""
    args.integer("query_start", query_start, 0, 0, want=why)


def _range_starts(
    starts: Array | None, ids: Array | None, shape: tuple[int, int], size: int
) -> Array:
    starts = jnp.zeros(shape, jnp.int32) if starts is None else jnp.clip(starts, 0, size)
    return starts if ids is None else jnp.maximum(starts, document_starts(ids))


def _range_ends(
    ends: Array | None,
    first: Any,
    ids: Array | None,
    lengths: Array | None,
    shape: tuple[int, int],
    size: int,
    stride: int,
) -> Array:
    ends = jnp.full(shape, size, jnp.int32) if ends is None else jnp.clip(ends, 0, size)
    if ids is not None:
        ends = jnp.minimum(ends, document_ends(ids))
    if lengths is not None:
        lengths = jnp.maximum(lengths, 0)
        ends = jnp.minimum(ends, lengths[:, None])
        first = None if first is None else lengths - shape[1]
    if first is not None:
        visible = first[:, None] + jnp.arange(1, shape[1] + 1, dtype=jnp.int32)[None]
        ends = jnp.clip(ends, 0, jnp.maximum(visible, 0) // stride)
    return ends


def window_reach(
    args: Args, is_causal: Any, causal_alignment: Any, local_window_size: Any
) -> tuple[int | None, int | None]:
    """Returns how many keys before and after its own position a query sees; None means all."""
    causal = args.flag("is_causal", is_causal)
    known = isinstance(causal_alignment, str) and causal_alignment in CAUSAL_ALIGNMENTS
    args.option("causal_alignment", causal_alignment, known, f"one of {CAUSAL_ALIGNMENTS}")
    if local_window_size is None:
        return None, 0 if causal else None
    pair, most = local_window_size, 2**63 - 1
    pair = pair if isinstance(pair, tuple | list) else (pair, pair)
    want = f"an int in 0..{most} or a pair (left, right) of such ints"
    args.option("local_window_size", local_window_size, len(pair) == 2, want)
    left, right = (args.integer("local_window_size", n, 0, most, want) for n in pair)
    return left, 0 if causal else right


def window_ranges(
    args: Args,
    is_causal: Any,
    causal_alignment: Any,
    local_window_size: Any,
    key_value_seq_lengths: Any,
) -> tuple[Int[Array, "1|B T"] | None, Int[Array, "1|B T"] | None]:
    """Returns the half-open range of keys that each query sees; None for a bound that is absent."""
    left, right = window_reach(args, is_causal, causal_alignment, local_window_size)
    lengths = key_value_seq_lengths
    if lengths is not None:
        lengths = args.array("key_value_seq_lengths", lengths, "B", INT32)
    if left is None and right is None and lengths is None:
        return None, None
    sizes = args.sizes["T"], args.sizes["S"]
    return _window_ranges(lengths, causal_alignment == "bottom_right", left, right, *sizes)


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4, 5))
def _window_ranges(
    lengths: Array | None,
    bottom_right: bool,
    left: int | None,
    right: int | None,
    queries: int,
    keys: int,
) -> tuple[Array | None, Array | None]:
    stop: Any = jnp.asarray(keys, jnp.int32)
    if lengths is not None:
        stop = jnp.clip(lengths, 0, keys)[:, None]
    position = jnp.arange(queries, dtype=jnp.int32)[None]
    if bottom_right:
        position = position + (stop - queries)
    starts = None if left is None else position - min_dim(left, keys + queries)
    ends = None if lengths is None else jnp.broadcast_to(stop, (stop.shape[0], queries))
    if right is not None:
        ends = jnp.minimum(position + min_dim(right, keys + queries) + 1, stop)
    starts, ends = (None if x is None else jnp.clip(x, 0, keys) for x in (starts, ends))
    return starts, ends


def document_numbers(args: Args, segment_ids: Any, otherwise: str = "") -> Int[Array, "B T"]:
    """Returns the checked `segment_ids`, one array for queries and keys.

    Args:
        args: the checks of the call.
        segment_ids: the user's argument.
        otherwise: what to pass where T and S differ, for the message.
    """
    ids = args.array("segment_ids", segment_ids, "B T", INT32)
    same = "[B, T] with T == S, because queries and keys are the same tokens, and not"
    want = f"{same} {args.size('T')} and {args.size('S')}{otherwise}"
    fits = args.sizes["T"] == args.sizes["S"]
    args.shape("segment_ids", as_array(segment_ids), fits, want, "B S")
    return ids


def segments(
    args: Args, segment_ids: Any
) -> tuple[Int[Array, "B T"] | None, Int[Array, "B S"] | None]:
    """Returns numbers of queries and keys, which see each other where the numbers are equal.

    They are a pair that the user gives, or the documents that one array describes.
    """
    if segment_ids is None:
        return None, None
    if not isinstance(segment_ids, tuple | list):
        pair = "; with different ones, pass a pair of arrays [B, T] and [B, S]"
        starts = document_starts(document_numbers(args, segment_ids, pair))
        return starts, starts
    want = "one array [B, T] or a pair of arrays [B, T] and [B, S]"
    args.option("segment_ids", segment_ids, len(segment_ids) == 2, want)
    q_ids, kv_ids = segment_ids
    q_ids = args.array("segment_ids[0]", q_ids, "B T", INT32)
    return q_ids, args.array("segment_ids[1]", kv_ids, "B S", INT32)
