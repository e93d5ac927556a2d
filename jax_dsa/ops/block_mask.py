"""Masks for `masked_attention`: block masks, top-k masks, and what causality and windows hide."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from jax_dsa.core.checks import BOOL, FLOATS, INT32, Args
from jax_dsa.core.op import Pass
from jax_dsa.ops.topk import topk
from jax_dsa.reference import block_mask as reference
from jax_dsa.reference.masked_attention import EMPTY, FULL

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, Literal

    from jaxtyping import Array, Bool, Float, Int, UInt8

    CausalAlignment = Literal["top_left", "bottom_right"]
    Window = int | tuple[int, int]
    SegmentIds = Int[Array, "B T"] | tuple[Int[Array, "B T"], Int[Array, "B S"]]
    MaskFunction = Callable[[Array, Array, Array, Array], Array]


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["tiles", "bits", "num_kv_tiles", "kv_tiles", "num_q_tiles", "q_tiles"],
    meta_fields=["query_length", "key_length"],
)
@dataclasses.dataclass(frozen=True, eq=False)
class BlockMask:
    """A mask by tiles of `block_q` queries x `block_k` keys. A pytree; `make_block_mask` makes it.

    I and J count the tiles along queries and keys; the last ones may overhang. B and H are 1 where
    all batch entries or heads share the mask; H is G or N otherwise.

    Attributes:
        tiles: -2 for an empty tile, -1 for a full one, and for a partial one its slot in `bits`.
        bits: the masks of the partial tiles, 8 keys a byte, the lowest bit first.
        num_kv_tiles, kv_tiles: of each row of tiles the non-empty ones: how many, and which columns
            in ascending order, then -1.
        num_q_tiles, q_tiles: the same of each column of tiles.
        query_length, key_length: T and S.
    """

    tiles: Int[Array, "B H I J"]
    bits: UInt8[Array, "B H P block_q block_k/8"]
    num_kv_tiles: Int[Array, "B H I"]
    kv_tiles: Int[Array, "B H I J"]
    num_q_tiles: Int[Array, "B H J"]
    q_tiles: Int[Array, "B H J I"]
    query_length: int
    key_length: int

    @property
    def block_q(self) -> int:
        """Queries a tile."""
        return self.bits.shape[-2]

    @property
    def block_k(self) -> int:
        """Keys a tile."""
        return 8 * self.bits.shape[-1]


@dataclasses.dataclass(frozen=True)
class BlockOptions:
    """What is static in making a block mask.

    Attributes:
        batch, heads: B and H of what `function` depends on.
        function: the mask, if it is none.
        room: P, how many partial tiles there is room for.
    """

    queries: int
    keys: int
    block_q: int
    block_k: int
    batch: int = 1
    heads: int = 1
    function: MaskFunction | None = None
    room: int = 0

    @property
    def rows(self) -> int:
        """I, how many tiles the queries make."""
        return -(-self.queries // self.block_q)

    @property
    def columns(self) -> int:
        """J, how many tiles the keys make."""
        return -(-self.keys // self.block_k)


_MASK_DIMS = "b h t s, b t, b t, b t, b s"
CLASSIFY = Pass(
    "block_mask_classify",
    f"{_MASK_DIMS} -> b h i j, b h i j",
    reference.block_mask_classify,
    shardable="b h",
    shared=(0, 1, 2, 3, 4),
)
PACK = Pass(
    "block_mask_pack",
    f"{_MASK_DIMS}, b h i j -> b h p r c",
    reference.block_mask_pack,
    shardable="b h",
    shared=(0, 1, 2, 3, 4),
)
INDEX_MASK = Pass("topk_mask", "b t k -> b t s", reference.index_mask, shardable="b t")


def make_block_mask(
    mask: Bool[Array, "1|B 1|H 1|T S"] | MaskFunction | None = None,
    *,
    shape: tuple[int, int, int, int] | None = None,
    is_causal: bool = False,
    causal_alignment: CausalAlignment = "top_left",
    window: Window | None = None,
    segment_ids: SegmentIds | None = None,
    lengths: Int[Array, "B"] | None = None,
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
            each other, and returns bools that broadcast with them.
        shape: (B, H, T, S) of the attention, by default the shape of the array `mask`, which must
            broadcast to it.
        is_causal, causal_alignment, window, segment_ids, lengths: as in `masked_attention`, and
            combined with `mask`. What is in the block mask need not be said again there.
        block_q: queries a tile.
        block_k: keys a tile, a multiple of 8.

    Returns:
        The block mask, with a B or H of 1 if the mask is an array or None and nothing depends on
        it. Masks have no gradient. Sharded over batch and heads as the arrays are; what a mask
        function closes over must not be sharded on an Explicit mesh.

    Raises:
        ValueError, TypeError: for wrong shapes, dtypes or options.
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
        check_shape(args, "mask", array, fits, f"[1|B, 1|H, 1|T, S] with (B, H, T, S) = {sizes}")
    args.array("shape", np.empty((*sizes, 0), bool), "B H T S 0", BOOL)
    batch, heads, queries, keys = sizes
    options = BlockOptions(
        queries=queries,
        keys=keys,
        block_q=args.integer("block_q", block_q, 1),
        block_k=args.integer("block_k", block_k, 8),
    )
    args.option("block_k", block_k, block_k % 8 == 0, "a multiple of 8")
    starts, ends = key_ranges(args, is_causal, causal_alignment, window, lengths)
    if ends is None:
        ends = jnp.full((1, queries), keys, jnp.int32)
    operands = (array, starts, ends, *segments(args, segment_ids))
    classify: Any = CLASSIFY
    pack: Any = PACK
    if callable(mask):
        options = dataclasses.replace(
            options, batch=batch, heads=heads, function=_checked(args, mask)
        )
        # What the function closes over cannot pass through the rules of a Pass.
        classify, pack = CLASSIFY.reference, PACK.reference

    if 0 in sizes:
        empty = jnp.zeros((batch, heads, options.rows, options.columns), bool)
        tiles, room = _slots(empty, empty)
        bits = jnp.zeros((batch, heads, room, block_q, block_k // 8), jnp.uint8)
        return _block_mask(tiles, bits, options)
    tiles, room = _slots(*classify(options, *operands))
    options = dataclasses.replace(options, room=room)
    (bits,) = pack(options, *operands, tiles)
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


def _block_mask(tiles: Array, bits: Array, options: BlockOptions) -> BlockMask:
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


def key_ranges(
    args: Args,
    is_causal: bool,
    causal_alignment: CausalAlignment,
    window: Window | None,
    lengths: Int[Array, "B"] | None,
) -> tuple[Int[Array, "1|B T"] | None, Int[Array, "1|B T"] | None]:
    """The half-open range of keys that each query may see; None where nothing bounds it."""
    queries, keys = args.sizes["T"], args.sizes["S"]
    left, right = reach(args, is_causal, causal_alignment, window)
    stop: Any = np.int32(keys)
    if lengths is not None:
        stop = jnp.clip(args.array("lengths", lengths, "B", INT32), 0, keys)[:, None]
    position = jnp.arange(queries, dtype=jnp.int32)[None]
    if causal_alignment == "bottom_right":
        position = position + (stop - queries)
    starts = None if left is None else position - min(left, keys + queries)
    ends = None if lengths is None else jnp.broadcast_to(stop, (stop.shape[0], queries))
    if right is not None:
        ends = jnp.minimum(position + min(right, keys + queries) + 1, stop)
    return tuple(None if x is None else jnp.clip(x, 0, keys) for x in (starts, ends))  # type: ignore


def reach(
    args: Args, is_causal: bool, causal_alignment: CausalAlignment, window: Window | None
) -> tuple[int | None, int | None]:
    """How many keys before and after its own position a query may see; None for all."""
    causal = args.flag("is_causal", is_causal)
    alignments = ("top_left", "bottom_right")
    args.option(
        "causal_alignment", causal_alignment, causal_alignment in alignments, f"one of {alignments}"
    )
    if window is None:
        return None, 0 if causal else None
    pair = window if isinstance(window, tuple | list) else (window, window)
    args.option("window", window, len(pair) == 2, "an int or a pair (left, right)")
    left, right = (args.integer("window", n, 0) for n in pair)
    return left, 0 if causal else right


def segments(
    args: Args, segment_ids: SegmentIds | None
) -> tuple[Int[Array, "B T"] | None, Int[Array, "B S"] | None]:
    """The segments of queries and keys, from one array for both or a pair."""
    if segment_ids is None:
        return None, None
    pair = segment_ids if isinstance(segment_ids, tuple | list) else (segment_ids, segment_ids)
    given = f"a {type(segment_ids).__name__} of {len(pair)}"
    args.option("segment_ids", given, len(pair) == 2, "an array for both sides or a pair")
    ids = (args.array("segment_ids", x, f"B {d}", INT32) for x, d in zip(pair, "TS"))
    return next(ids), next(ids)


def check_shape(args: Args, name: str, x: Array, fits: bool, want: str) -> None:
    """Raises ValueError unless the shape of `x` `fits`."""
    if not fits:
        raise ValueError(f"{args.op}: argument '{name}' has shape {x.shape}, want {want}")


def relu_mask(bias: Float[Array, "..."]) -> Bool[Array, "..."]:
    """The mask that keeps the keys of positive bias. It has no gradient.

    Raises:
        TypeError: for a bias that is not a float array.
    """
    return _rows_of("relu_mask", bias) > 0


def topk_mask(
    bias: Float[Array, "... S"], window: int, *, mask: Bool[Array, "... S"] | None = None
) -> Bool[Array, "... S"]:
    """The mask that keeps the `window` keys of largest bias in each row. It has no gradient.

    Ties go to the lower position. -inf and NaN are never kept, so a row may keep fewer.

    Args:
        bias: rows of any float dtype.
        window: how many keys to keep.
        mask: True where a key may be kept (a causal mask, say); it broadcasts against `bias`, and
            the result has their common shape.

    Raises:
        ValueError, TypeError: for wrong shapes or dtypes, or a window < 1.
    """
    x = _rows_of("topk_mask", bias)
    args = _checks("topk_mask")
    window = args.integer("window", window, 1)
    if mask is not None:
        mask = args.typed("mask", mask, BOOL)
        try:
            x = jnp.where(mask, x, -jnp.inf)
        except ValueError:
            check_shape(args, "mask", mask, False, f"one that broadcasts against bias {x.shape}")
    kept: Any = topk(x, window)
    rows = (x.shape[0], math.prod(x.shape[1:-1])) if x.ndim > 1 else (1, 1)
    (chosen,) = INDEX_MASK(x.shape[-1], kept.reshape(*rows, window))
    return chosen.reshape(x.shape)


def topk_indices(bias: Float[Array, "... S"], window: int) -> Int[Array, "... W"]:
    """Positions of the `window` largest entries of each row, ascending, then -1. No gradient.

    Ties go to the lower position; -inf and NaN are never selected. Of a bias [B, G, S] they are the
    `kv_indices` of `masked_attention`.

    Args:
        bias: rows of any float dtype.
        window: W, how many entries to take.

    Raises:
        ValueError, TypeError: for a bias that is not a float array, or a window < 1.
    """
    x = _rows_of("topk_indices", bias)
    indices: Any = topk(x, _checks("topk_indices").integer("window", window, 1))
    return indices


def _checks(name: str) -> Args:
    """Checks for a function of rows, which has no batch axis of its own."""
    return Args(name, "bias", np.empty(0), "S")


def _rows_of(name: str, bias: Float[Array, "... S"]) -> Float[Array, "... S"]:
    args = _checks(name)
    bias = args.typed("bias", bias, FLOATS)
    check_shape(args, "bias", bias, bias.ndim > 0, "[..., S]")
    return jax.lax.stop_gradient(bias)
