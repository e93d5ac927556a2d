"""Masks for `masked_attention`: block masks, and masks that keep the keys of largest bias."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_dsa.core.arguments import (
    CausalAlignment,
    SegmentIds,
    Window,
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
from jax_dsa.ops.block_mask.visible import Visible
from jax_dsa.ops.topk.api import topk_of

if TYPE_CHECKING:
    from collections.abc import Callable

# A tile may have this many queries and keys even if T and S are smaller, so that one setting serves
# sequences of all lengths. The limit keeps the bits of a tile small.
LARGEST_TILE = 1024

_LIMITS = "arrays, ranges and segments; no mask function"
CLASSIFY = Pass(
    "block_mask_classify",
    xla.block_mask_classify,
    kernel=Kernel(cuda.block_mask_classify, cuda.supports, limits=_LIMITS, portable=cuda.supports),
    shardable="b h",
)
PACK = Pass(
    "block_mask_pack",
    xla.block_mask_pack,
    kernel=Kernel(cuda.block_mask_pack, cuda.supports, limits=_LIMITS, portable=cuda.supports),
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
    """Returns a mask as a block mask: a mask divided into empty, full and partial tiles.

    Make a block mask once for all calls of `masked_attention` that share it.

    The mask is never stored as a whole. One row of tiles, [B, H, block_q, S], is evaluated at a
    time. Outside of `jit`, the result stores bits for the partial tiles only. Their number is
    rounded up to a power of two, since the attention is compiled once per size. Under `jit`, the
    result stores bits for all tiles, B*H*T*S/8 bytes.

    Args:
        mask: Mask; True keeps a key. An array, a function, or None if the other arguments describe
            the mask. A function takes the indices of batch entries, heads, queries and keys as
            int32 arrays that broadcast against each other, and returns bools that broadcast with
            them. Arrays are converted by a CUDA kernel, functions are not.
        shape: (B, H, T, S) of the attention. `mask` must broadcast to it. Default: the shape of the
            array `mask`.
        is_causal, causal_alignment, local_window_size, segment_ids, key_value_seq_lengths: As in
            `masked_attention`, and combined with `mask`. Do not repeat them in the call of
            `masked_attention`.
        block_q: Number of queries per tile, up to T or 1024.
        block_k: Number of keys per tile, a multiple of 8, up to S or 1024.

    Returns:
        The block mask. Its B or H is 1 if the mask is an array or None and does not depend on the
        batch entry or the head. It has no gradient. It is sharded over batch and heads like the
        arrays. Arrays that a mask function closes over must not be sharded on an Explicit mesh.

    Raises:
        ValueError, TypeError: If a shape, dtype or option is wrong.

    Examples:
        >>> import jax_dsa
        >>> mask = jax_dsa.make_block_mask(shape=(1, 1, 512, 512), is_causal=True)
        >>> mask.num_kv_tiles  # number of key tiles that each query tile sees
        Array([[[1, 2, 3, 4]]], dtype=int32)
    """
    args = Args("make_block_mask", "shape", np.empty((0,) * 4), "B H T S")
    array = None if mask is None or callable(mask) else args.typed("mask", mask, BOOL)
    if array is not None and shape is None:
        hint = "; did you mean mask[None, None]?" if array.ndim == 2 else ""
        args.shape("mask", array, array.ndim == 4, f"[B, H, T, S]{hint}")
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
        block_q=args.integer("block_q", block_q, 1, max(LARGEST_TILE, queries)),
        block_k=args.integer("block_k", block_k, 8, max(LARGEST_TILE, keys + 7)),
    )
    args.option("block_k", block_k, block_k % 8 == 0, "a multiple of 8")
    visible = Visible.from_arguments(
        args, is_causal, causal_alignment, local_window_size, key_value_seq_lengths, segment_ids
    )
    if visible.ends is None:
        visible = visible._replace(ends=jnp.full((1, queries), keys, jnp.int32))
    operands = Operands(mask=array, **visible._asdict())
    call = args.call(None)
    classify: Callable[[Options, Operands], Kinds] = functools.partial(CLASSIFY, call)
    pack: Callable[[Options, Operands, Tiles], Bits] = functools.partial(PACK, call)
    if callable(mask):
        options = dataclasses.replace(
            options, batch=batch, heads=heads, function=_check_results(args, mask)
        )
        # A Pass cannot handle the arrays that the function closes over.
        classify, pack = CLASSIFY.xla, PACK.xla

    if 0 in sizes:
        empty = jnp.zeros((batch, heads, options.rows, options.columns), bool)
        tiles, slots = _assign_slots(empty, empty)
        bits = jnp.zeros((batch, heads, slots, block_q, block_k // 8), jnp.uint8)
        return _block_mask(tiles, bits, options)
    tiles, slots = _assign_slots(*classify(options, operands))
    options = dataclasses.replace(options, slots=slots)
    (bits,) = pack(options, operands, Tiles(tiles))
    return _block_mask(tiles, bits, options)


def _assign_slots(
    occupied: Bool[Array, "B H I J"], full: Bool[Array, "B H I J"]
) -> tuple[Array, int]:
    """Returns `BlockMask.tiles`, and the number of slots for partial tiles."""
    slots = full.shape[2] * full.shape[3]
    partial = (occupied & ~full).reshape(*full.shape[:2], slots)
    slot = jnp.cumsum(partial, axis=-1, dtype=jnp.int32) - 1
    tiles = jnp.where(occupied, slot.reshape(full.shape), EMPTY)
    if not isinstance(partial, jax.core.Tracer):
        most = int(partial.sum(-1).max(initial=1))
        slots = min(slots, 1 << (most - 1).bit_length())
    return jnp.where(full, FULL, tiles), max(slots, 1)


def _block_mask(tiles: Array, bits: Array, options: Options) -> BlockMask:
    occupied = tiles != EMPTY
    num_kv_tiles, kv_tiles = _indices_of_set(occupied)
    num_q_tiles, q_tiles = _indices_of_set(jnp.swapaxes(occupied, 2, 3))
    return BlockMask(
        tiles=tiles,
        bits=bits,
        num_kv_tiles=num_kv_tiles,
        kv_tiles=kv_tiles,
        num_q_tiles=num_q_tiles,
        q_tiles=q_tiles,
        query_length=options.queries,
        key_length=options.keys,
    )


def _check_results(args: Args, function: MaskFunction) -> MaskFunction:
    """Returns `function` with a check that its results are bools."""
    return lambda *indices: args.typed("mask", function(*indices), BOOL)


def _indices_of_set(occupied: Bool[Array, "... J"]) -> tuple[Array, Array]:
    """Returns how many entries of the last axis are True, and their indices, followed by -1."""
    size = occupied.shape[-1]
    which = jnp.sort(jnp.where(occupied, jnp.arange(size, dtype=jnp.int32), size), axis=-1)
    return occupied.sum(-1, dtype=jnp.int32), jnp.where(which < size, which, -1)


def relu_mask(bias: Float[Array, "..."]) -> Bool[Array, "..."]:
    """Returns the mask that keeps the keys of positive bias. It has no gradient.

    Args:
        bias: Bias of any shape and float dtype.

    Returns:
        A mask in the shape of `bias`, bool.

    Raises:
        TypeError: If `bias` is not a float array.

    Examples:
        >>> import jax.numpy as jnp, jax_dsa
        >>> jax_dsa.relu_mask(jnp.array([0.5, -0.5]))
        Array([ True, False], dtype=bool)
    """
    return _rows_of("relu_mask", bias)[1] > 0


def topk_mask(
    bias: Float[Array, "... S"], top_k: int, *, mask: Bool[Array, "... S"] | None = None
) -> Bool[Array, "... S"]:
    """Returns the mask that keeps the `top_k` keys of largest bias in each row.

    Among equal values, lower positions come first. -inf and NaN are never kept, so a row may keep
    fewer keys. The mask has no gradient.

    Args:
        bias: Rows of biases of any float dtype.
        top_k: Number of keys to keep per row.
        mask: True where a key may be kept, for example a causal mask. It broadcasts against `bias`.

    Returns:
        A mask in the common shape of `bias` and `mask`, bool.

    Raises:
        ValueError, TypeError: If a shape or dtype is wrong, or top_k < 1.

    Examples:
        >>> import jax.numpy as jnp, jax_dsa
        >>> jax_dsa.topk_mask(jnp.array([1.0, 3.0, 2.0]), 2)
        Array([False,  True,  True], dtype=bool)
    """
    args, x = _rows_of("topk_mask", bias)
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
    for _ in range(len(rows) - 2):  # a single reshape would gather sharded axes
        mark = jax.vmap(mark)
    return mark(Indices(kept.reshape(*rows, top_k))).mask.reshape(x.shape)


def topk_indices(bias: Float[Array, "... S"], top_k: int) -> Int[Array, "... W"]:
    """Returns the positions of the `top_k` largest entries of each row in ascending order.

    Among equal values, lower positions come first. -inf and NaN are never selected. If a row has
    fewer than `top_k` candidates, the remaining entries are -1. The result has no gradient. For a
    bias [B, G, S] it is the argument `kv_indices` of `masked_attention`.

    Args:
        bias: Rows of biases of any float dtype.
        top_k: W, the number of entries to select per row.

    Returns:
        Positions of shape [..., W], int32.

    Raises:
        ValueError, TypeError: If `bias` is not a float array, or top_k < 1.

    Examples:
        >>> import jax.numpy as jnp, jax_dsa
        >>> jax_dsa.topk_indices(jnp.array([1.0, 3.0, 2.0]), 2)
        Array([1, 2], dtype=int32)
    """
    args, x = _rows_of("topk_indices", bias)
    top_k = args.integer("top_k", top_k, 1)
    return topk_of("topk_indices", "bias", x, top_k)


def _rows_of(name: str, bias: Any) -> tuple[Args, Float[Array, "... S"]]:
    """Returns the checks of a function of rows, which has no batch axis, and its checked rows."""
    args = Args(name, "bias", np.empty(0), "S")
    bias = args.typed("bias", bias, FLOATS)
    args.shape("bias", bias, bias.ndim > 0, "[..., S]")
    return args, jax.lax.stop_gradient(bias)
