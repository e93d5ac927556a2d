"""Masks for `masked_attention`: block masks, and masks that keep the keys of largest bias."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from jax_dsa.core.arguments import (
    CausalAlignment,
    SegmentIds,
    Window,
    segments,
    window_ranges,
)
from jax_dsa.core.checks import BOOL, FLOATS, Args
from jax_dsa.core.ffi import Kernel
from jax_dsa.core.op import Pass
from jax_dsa.core.typing import Array, Bool, Float, Int
from jax_dsa.ops.block_mask import cuda, xla
from jax_dsa.ops.block_mask.spec import (
    EMPTY,
    FULL,
    Bits,
    BlockMask,
    IndexOptions,
    Indices,
    Kinds,
    Mask,
    MaskFunction,
    Operands,
    Options,
    Tiles,
)
from jax_dsa.ops.topk.api import topk_of

if TYPE_CHECKING:
    from collections.abc import Callable

_LIMITS = "arrays, ranges and segments; no mask function"
CLASSIFY = Pass(
    "block_mask_classify",
    xla.block_mask_classify,
    kernel=Kernel(cuda.block_mask_classify, cuda.supports, limits=_LIMITS),
    shardable="b h",
)
PACK = Pass(
    "block_mask_pack",
    xla.block_mask_pack,
    kernel=Kernel(cuda.block_mask_pack, cuda.supports, limits=_LIMITS),
    shardable="b h",
)
INDEX_MASK = Pass("topk_mask", xla.index_mask, shardable="b t")


def make_block_mask(
    mask: Bool[Array, "1|B 1|H 1|T S"] | MaskFunction | None = None,
    *,
    shape: tuple[int, int, int, int] | None = None,
    is_causal: bool = False,
    causal_alignment: CausalAlignment = "top_left",
    local_window_size: Window | None = None,
    segment_ids: SegmentIds | None = None,
    key_value_seq_lengths: Int[Array, "B"] | None = None,
    block_q: int = 128,
    block_k: int = 128,
) -> BlockMask:
    """Sorts a mask into empty, full and partial tiles, once for many calls of `masked_attention`.

    The mask is never held as a whole: one row of tiles, [B, H, block_q, S], is evaluated at a time.
    Outside of `jit` the result has room for just the partial tiles (rounded up to a power of two,
    since each size compiles the attention anew); where it is traced, room for all tiles, which is
    B*H*T*S/8 bytes.

    Args:
        mask: True keeps. An array, a function, or None if the other arguments say it all. The
            function takes batch, head, query and key numbers, int32 arrays that broadcast against
            each other, and returns bools that broadcast with them. An array has a kernel, a
            function has none.
        shape: (B, H, T, S) of the attention, by default the shape of the array `mask`, which must
            broadcast to it.
        is_causal, causal_alignment, local_window_size, segment_ids, key_value_seq_lengths: as in
            `masked_attention`, and combined with `mask`. What is in the block mask need not be said
            again there.
        block_q: queries a tile, up to T (or 128).
        block_k: keys a tile, a multiple of 8, up to S (or 128).

    Returns:
        The block mask, with a B or H of 1 if the mask is an array or None and nothing depends on
        it. Masks have no gradient. Sharded over batch and heads as the arrays are; what a mask
        function closes over must not be sharded on an Explicit mesh.

    Raises:
        ValueError, TypeError: for wrong shapes, dtypes or options.

    Examples:
        >>> import jax_dsa
        >>> mask = jax_dsa.make_block_mask(shape=(1, 1, 512, 512), is_causal=True)
        >>> mask.num_kv_tiles  # tiles of keys that each tile of queries sees
        Array([[[1, 2, 3, 4]]], dtype=int32)
    """
    args = Args("make_block_mask", "shape", np.empty((0,) * 4), "B H T S")
    array = None if mask is None or callable(mask) else args.typed("mask", mask, BOOL)
    if array is not None and shape is None:
        shape = array.shape  # type: ignore[assignment]
    known = isinstance(shape, tuple | list) and len(shape) == 4
    args.option("shape", shape, known, "(B, H, T, S), or an array [1|B, 1|H, T, S] as the mask")
    sizes = tuple(args.integer("shape", n, 0) for n in shape or ())
    if array is not None:
        fits = array.ndim == 4 and array.shape[3] == sizes[3]
        fits = fits and all(n in (1, want) for n, want in zip(array.shape, sizes))
        args.shape("mask", array, fits, f"[1|B, 1|H, 1|T, S] with (B, H, T, S) = {sizes}")
    args.array("shape", np.empty((*sizes, 0), bool), "B H T S 0", BOOL)
    batch, heads, queries, keys = sizes
    options = Options(
        queries=queries,
        keys=keys,
        block_q=args.integer("block_q", block_q, 1, max(128, queries)),
        block_k=args.integer("block_k", block_k, 8, max(128, keys + 7)),
    )
    args.option("block_k", block_k, block_k % 8 == 0, "a multiple of 8")
    starts, ends = window_ranges(
        args, is_causal, causal_alignment, local_window_size, key_value_seq_lengths
    )
    if ends is None:
        ends = jnp.full((1, queries), keys, jnp.int32)
    operands = Operands(array, starts, ends, *segments(args, segment_ids))
    call = args.call(None)
    classify: Callable[[Options, Operands], Kinds] = functools.partial(CLASSIFY, call)
    pack: Callable[[Options, Operands, Tiles], Bits] = functools.partial(PACK, call)
    if callable(mask):
        options = dataclasses.replace(
            options, batch=batch, heads=heads, function=_checked(args, mask)
        )
        # What the function closes over cannot pass through the rules of a Pass.
        classify, pack = CLASSIFY.xla, PACK.xla

    if 0 in sizes:
        empty = jnp.zeros((batch, heads, options.rows, options.columns), bool)
        tiles, room = _slots(empty, empty)
        bits = jnp.zeros((batch, heads, room, block_q, block_k // 8), jnp.uint8)
        return _block_mask(tiles, bits, options)
    tiles, room = _slots(*classify(options, operands))
    options = dataclasses.replace(options, room=room)
    (bits,) = pack(options, operands, Tiles(tiles))
    return _block_mask(tiles, bits, options)


def _slots(occupied: Bool[Array, "B H I J"], full: Bool[Array, "B H I J"]) -> tuple[Array, int]:
    """`BlockMask.tiles`, and for how many partial tiles there has to be room."""
    room = full.shape[2] * full.shape[3]
    partial = (occupied & ~full).reshape(*full.shape[:2], room)
    slots = jnp.cumsum(partial, axis=-1, dtype=jnp.int32) - 1
    tiles = jnp.where(occupied, slots.reshape(full.shape), EMPTY)
    if not isinstance(partial, jax.core.Tracer):
        most = int(partial.sum(-1).max(initial=1))
        room = min(room, 1 << (most - 1).bit_length())
    return jnp.where(full, FULL, tiles), max(room, 1)


def _block_mask(tiles: Array, bits: Array, options: Options) -> BlockMask:
    occupied = tiles != EMPTY
    across, down = _ascending(occupied), _ascending(jnp.swapaxes(occupied, 2, 3))
    return BlockMask(tiles, bits, *across, *down, options.queries, options.keys)


def _checked(args: Args, function: MaskFunction) -> MaskFunction:
    """`function`, whose results have to be bools."""
    return lambda *numbers: args.typed("mask", function(*numbers), BOOL)


def _ascending(occupied: Bool[Array, "... J"]) -> tuple[Array, Array]:
    """How many are set along the last axis, and which, in ascending order and then -1."""
    size = occupied.shape[-1]
    which = jnp.sort(jnp.where(occupied, jnp.arange(size, dtype=jnp.int32), size), axis=-1)
    return occupied.sum(-1, dtype=jnp.int32), jnp.where(which < size, which, -1)


def relu_mask(bias: Float[Array, "..."]) -> Bool[Array, "..."]:
    """The mask that keeps the keys of positive bias. It has no gradient.

    Raises:
        TypeError: for a bias that is not a float array.

    Examples:
        >>> import jax.numpy as jnp, jax_dsa
        >>> jax_dsa.relu_mask(jnp.array([0.5, -0.5]))
        Array([ True, False], dtype=bool)
    """
    return _rows_of("relu_mask", bias) > 0


def topk_mask(
    bias: Float[Array, "... S"], top_k: int, *, mask: Bool[Array, "... S"] | None = None
) -> Bool[Array, "... S"]:
    """The mask that keeps the `top_k` keys of largest bias in each row. It has no gradient.

    Ties go to the lower position. -inf and NaN are never kept, so a row may keep fewer.

    Args:
        bias: rows of any float dtype.
        top_k: how many keys to keep.
        mask: True where a key may be kept (a causal mask, say); it broadcasts against `bias`, and
            the result has their common shape.

    Raises:
        ValueError, TypeError: for wrong shapes or dtypes, or a top_k < 1.

    Examples:
        >>> import jax.numpy as jnp, jax_dsa
        >>> jax_dsa.topk_mask(jnp.array([1.0, 3.0, 2.0]), 2)
        Array([False,  True,  True], dtype=bool)
    """
    x = _rows_of("topk_mask", bias)
    args = _checks("topk_mask")
    top_k = args.integer("top_k", top_k, 1)
    if mask is not None:
        mask = args.typed("mask", mask, BOOL)
        try:
            x = jnp.where(mask, x, -jnp.inf)
        except ValueError:
            args.shape("mask", mask, False, f"one that broadcasts against bias {x.shape}")
    kept = topk_of("topk_mask", "bias", x, top_k)
    rows = (*x.shape[:-1], *[1] * (3 - x.ndim))
    mark: Callable[[Indices], Mask] = functools.partial(
        INDEX_MASK, args.call("xla"), IndexOptions(x.shape[-1])
    )
    for _ in range(len(rows) - 2):  # not one reshape, as in `topk`
        mark = jax.vmap(mark)
    return mark(Indices(kept.reshape(*rows, top_k))).mask.reshape(x.shape)


def topk_indices(bias: Float[Array, "... S"], top_k: int) -> Int[Array, "... W"]:
    """Positions of the `top_k` largest entries of each row, ascending, then -1. No gradient.

    Ties go to the lower position; -inf and NaN are never selected. Of a bias [B, G, S] they are the
    `kv_indices` of `masked_attention`.

    Args:
        bias: rows of any float dtype.
        top_k: W, how many entries to take.

    Raises:
        ValueError, TypeError: for a bias that is not a float array, or a top_k < 1.

    Examples:
        >>> import jax.numpy as jnp, jax_dsa
        >>> jax_dsa.topk_indices(jnp.array([1.0, 3.0, 2.0]), 2)
        Array([1, 2], dtype=int32)
    """
    x = _rows_of("topk_indices", bias)
    top_k = _checks("topk_indices").integer("top_k", top_k, 1)
    return topk_of("topk_indices", "bias", x, top_k)


def _checks(name: str) -> Args:
    """Checks for a function of rows, which has no batch axis of its own."""
    return Args(name, "bias", np.empty(0), "S")


def _rows_of(name: str, bias: Float[Array, "... S"]) -> Float[Array, "... S"]:
    args = _checks(name)
    bias = args.typed("bias", bias, FLOATS)
    args.shape("bias", bias, bias.ndim > 0, "[..., S]")
    return jax.lax.stop_gradient(bias)
