"""Block masks, and the options, operands and results of making one."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_dsa.core.export import exportable
from jax_dsa.core.spec import SHARED
from jax_dsa.core.typing import Array, Bool, Int, UInt8

MaskFunction = Callable[[Array, Array, Array, Array], Array]

# The entries of `BlockMask.tiles` for tiles that are not partial. A partial tile has its slot.
EMPTY, FULL = -2, -1


@exportable
@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["tiles", "bits", "num_kv_tiles", "kv_tiles", "num_q_tiles", "q_tiles"],
    meta_fields=["query_length", "key_length"],
)
@dataclasses.dataclass(frozen=True, eq=False)
class BlockMask:
    """A mask in tiles of `block_q` queries x `block_k` keys, as `make_block_mask` returns it.

    A block mask is a pytree. I and J are the numbers of tiles along queries and keys; the last
    tiles may extend beyond T and S. B and H are 1 if all batch entries or heads share the mask.
    Otherwise H is G or N.

    Attributes:
        tiles: -2 for an empty tile, -1 for a full one, and the slot in `bits` for a partial one.
        bits: The masks of the partial tiles, 8 keys per byte, the lowest bit first.
        num_kv_tiles: Number of non-empty tiles in each row of tiles.
        kv_tiles: Columns of these tiles in ascending order, followed by -1.
        num_q_tiles, q_tiles: The same for each column of tiles.
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
        """Number of queries per tile."""
        return self.bits.shape[-2]

    @property
    def block_k(self) -> int:
        """Number of keys per tile."""
        return 8 * self.bits.shape[-1]


@dataclasses.dataclass(frozen=True)
class Options:
    """The static options of making a block mask.

    Attributes:
        queries, keys: T and S.
        block_q, block_k: Numbers of queries and keys per tile.
        batch, heads: B and H for `function`.
        function: The mask function, if the mask is one.
        slots: P, the number of slots for partial tiles.
    """

    queries: int
    keys: int
    block_q: int
    block_k: int
    batch: int = 1
    heads: int = 1
    function: MaskFunction | None = None
    slots: int = 0

    @property
    def rows(self) -> int:
        """I, the number of rows of tiles."""
        return -(-self.queries // self.block_q)

    @property
    def columns(self) -> int:
        """J, the number of columns of tiles."""
        return -(-self.keys // self.block_k)

    def result_sizes(self, known: Mapping[str, int]) -> dict[str, int]:
        """Returns the sizes of a mask. A mask function may have more batch entries than arrays."""
        return {
            "b": self.batch if known["b"] == 1 else known["b"],
            "h": known.get("h", self.heads),
            "i": self.rows,
            "j": self.columns,
            "p": self.slots,
            "r": self.block_q,
            "c": self.block_k // 8,
        }


class Operands(NamedTuple):
    """The conditions on visible keys, besides a mask function in the options."""

    mask: Bool[Array, "b h t s", SHARED] | None
    starts: Int[Array, "b t", SHARED] | None
    ends: Int[Array, "b t", SHARED]
    q_segments: Int[Array, "b t", SHARED] | None
    kv_segments: Int[Array, "b s", SHARED] | None


class Kinds(NamedTuple):
    """The kinds of tiles: which contain a visible key, and which contain no masked key."""

    occupied: Bool[Array, "b h i j", jnp.bool_]
    full: Bool[Array, "b h i j", jnp.bool_]


class Tiles(NamedTuple):
    """The slots of the partial tiles; see `BlockMask.tiles`."""

    tiles: Int[Array, "b h i j"]


class Bits(NamedTuple):
    """The masks of the partial tiles."""

    bits: UInt8[Array, "b h p r c", jnp.uint8]


class Map(NamedTuple):
    """A block mask in the form that the attention kernels read.

    Attributes:
        rows: The row of each query in the block mask.
        tiles: EMPTY, FULL or a slot in `bits`.
        bits: The bits of the tiles that have a slot.
    """

    rows: Int[Array, "b t"]
    tiles: Int[Array, "b h i j"]
    bits: UInt8[Array, "b h p r c"]


@dataclasses.dataclass(frozen=True)
class IndexOptions:
    """The static options of a mask from indices: the number of keys."""

    size: int

    def result_sizes(self, _: Mapping[str, int]) -> dict[str, int]:
        """Returns the number of keys."""
        return {"s": self.size}


class Indices(NamedTuple):
    """Positions of keys; negative entries are no keys."""

    indices: Int[Array, "b t k"]


class Mask(NamedTuple):
    """A mask that is True at the positions."""

    mask: Bool[Array, "b t s", jnp.bool_]
