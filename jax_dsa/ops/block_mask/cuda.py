"""Block masks on their CUDA kernel, and conversion of masks for the attention kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_dsa.core import ffi
from jax_dsa.core.typing import Array, Bool, Int
from jax_dsa.ops.block_mask.spec import Bits, Kinds, Map, Operands, Options, Tiles

if TYPE_CHECKING:
    from collections.abc import Sequence

# The kernels' limits; tests/test_ffi.py compares them with those of the extension.
MAX_LENGTH = 2**30
MAX_TILES = 2**31 - 1


def supports(options: Options, *_: Any) -> str | None:
    """Returns None, or the reason why the kernel does not cover this call."""
    longest = max(options.queries, options.keys)
    if options.function is not None:
        return "it takes arrays, got a mask function"
    if longest > MAX_LENGTH:
        return f"it takes T and S up to {MAX_LENGTH}, got {longest}"
    if options.rows * options.columns > MAX_TILES:
        return f"it takes up to {MAX_TILES} tiles, got {options.rows * options.columns}"
    return None


def block_mask_classify(options: Options, avals: Kinds, x: Operands) -> Kinds:
    """Computes `xla.block_mask_classify` on the kernel."""
    sizes: dict[str, Any] = {
        "block_q": np.int64(options.block_q),
        "block_k": np.int64(options.block_k),
    }
    operands = _operands(x, avals.occupied.shape[0])
    return Kinds(
        *ffi.call("jax_dsa.block_mask_classify.v1", operands, avals, **_lengths(options), **sizes)
    )


def block_mask_pack(options: Options, avals: Bits, x: Operands, y: Tiles) -> Bits:
    """Computes `xla.block_mask_pack` on the kernel."""
    operands = [*_operands(x, avals.bits.shape[0]), y.tiles]
    return Bits(*ffi.call("jax_dsa.block_mask_pack.v1", operands, avals, **_lengths(options)))


def compress(
    mask: Bool[Array, "1|B H 1|T S"],
    queries: int,
    *,
    starts: Int[Array, "1|B T"] | None = None,
    ends: Int[Array, "1|B T"] | None = None,
    other: Map | None = None,
    block_q: int = 128,
    block_k: int = 128,
) -> Map:
    """Returns a mask as a block mask that has bits for every tile.

    The kernel reads the mask once, and the attention kernels then read an eighth of its bytes. A
    mask that all queries share becomes a single row, which `Map.rows` assigns to all queries.

    Args:
        mask: Mask; True keeps a key. If `other` has a different number of heads, one number must
            divide the other.
        queries: T.
        starts, ends: Ranges of keys outside of which the mask is not read. Keys there may or may
            not be visible in the result.
        other: A block mask to combine with the mask.
        block_q, block_k: Numbers of queries and keys per tile.
    """
    batch, heads, mask_rows, keys = mask.shape
    rows = jnp.arange(queries, dtype=jnp.int32)[None]
    if other is not None:
        batch = max(batch, other.tiles.shape[0], other.rows.shape[0])
        heads = max(heads, other.tiles.shape[1])
    elif mask_rows == 1:
        rows = jnp.zeros_like(rows)
        queries = block_q = 1
        starts = ends = None
    # If the ranges differ by batch entry and the mask does not, do not use them: the block mask
    # would need one copy per batch entry.
    ranges = [None if x is None or x.shape[0] > batch else x for x in (starts, ends)]
    tiles = (batch, heads, -(-queries // block_q), -(-keys // block_k))
    bits = (batch, heads, tiles[2] * tiles[3], block_q, block_k // 8)
    made = ffi.call(
        "jax_dsa.block_mask_compress.v1",
        [mask, *_same_shape(*ranges), None, None, *(other or (None, None, None))],
        [jax.ShapeDtypeStruct(tiles, jnp.int32), jax.ShapeDtypeStruct(bits, jnp.uint8)],
        queries=np.int64(queries),
        keys=np.int64(keys),
    )
    return Map(rows, *made)


def _operands(x: Operands, batch: int) -> Sequence[Array | None]:
    """Returns the operands in the order of the FFI handlers, without another block mask."""
    pair = [
        None if y is None else jnp.broadcast_to(y, (batch, y.shape[1]))
        for y in (x.q_segments, x.kv_segments)
    ]
    return [x.mask, *_same_shape(x.starts, x.ends), *pair, None, None, None]


def _same_shape(*ranges: Array | None) -> Sequence[Array | None]:
    """Broadcasts starts and ends to the same shape, as the FFI handlers require."""
    shape = jnp.broadcast_shapes(*(x.shape for x in ranges if x is not None))
    return [None if x is None else jnp.broadcast_to(x, shape) for x in ranges]


def _lengths(options: Options) -> dict[str, Any]:
    return {"queries": np.int64(options.queries), "keys": np.int64(options.keys)}
