"""What block masks are, and what making one takes and gives."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_dsa.core.spec import SHARED
from jax_dsa.core.typing import Array, Bool, Int, UInt8

MaskFunction = Callable[[Array, Array, Array, Array], Array]

# What a block mask has for a tile that is not partial; a partial one has its slot in the bits.
EMPTY, FULL = -2, -1


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
class Options:
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

    def result_sizes(self, known: Mapping[str, int]) -> dict[str, int]:
        """Returns the sizes of a mask. A mask function may have more batch entries than arrays."""
        return {
            "b": self.batch if known["b"] == 1 else known["b"],
            "h": known.get("h", self.heads),
            "i": self.rows,
            "j": self.columns,
            "p": self.room,
            "r": self.block_q,
            "c": self.block_k // 8,
        }


class Operands(NamedTuple):
    """What decides which keys are visible, besides a mask function in the options."""

    mask: Bool[Array, "b h t s", SHARED] | None
    starts: Int[Array, "b t", SHARED] | None
    ends: Int[Array, "b t", SHARED]
    q_segments: Int[Array, "b t", SHARED] | None
    kv_segments: Int[Array, "b s", SHARED] | None


class Kinds(NamedTuple):
    """Which tiles hold any visible key, and which hold no hidden one."""

    occupied: Bool[Array, "b h i j", jnp.bool_]
    full: Bool[Array, "b h i j", jnp.bool_]


class Tiles(NamedTuple):
    """Where the partial tiles go."""

    tiles: Int[Array, "b h i j"]


class Bits(NamedTuple):
    """The masks of the partial tiles."""

    bits: UInt8[Array, "b h p r c", jnp.uint8]


class Map(NamedTuple):
    """A block mask as the kernels of attention read it.

    Attributes:
        rows: each query's row in it.
        tiles: EMPTY, FULL or a slot in `bits`.
        bits: of the tiles that have a slot.
    """

    rows: Int[Array, "b t"]
    tiles: Int[Array, "b h i j"]
    bits: UInt8[Array, "b h p r c"]


@dataclasses.dataclass(frozen=True)
class IndexOptions:
    """Static options of a mask from indices: how many keys there are."""

    size: int

    def result_sizes(self, _: Mapping[str, int]) -> dict[str, int]:
        """Returns the number of keys."""
        return {"s": self.size}


class Indices(NamedTuple):
    """Positions, negative for none."""

    indices: Int[Array, "b t k"]


class Mask(NamedTuple):
    """True at the positions."""

    mask: Bool[Array, "b t s", jnp.bool_]
