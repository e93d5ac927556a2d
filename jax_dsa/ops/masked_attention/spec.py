"""What masked attention takes and gives."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

from jax_dsa.core.spec import SHARED, Remat, accumulated, like
from jax_dsa.core.typing import Array, Bool, Float, Int, UInt8


@dataclasses.dataclass(frozen=True)
class Options:
    """What is static in a call.

    Attributes:
        bias_heads, mask_heads, tile_heads: the factors of the operand's head axis: "(g m)" for one
            entry a query head, "g" for one a key head, "x" for one that all heads share.
        deterministic: gradients are bit-identical from run to run. The XLA implementation's are.
    """

    scale: float
    softcap: float | None
    bias_heads: str
    mask_heads: str
    tile_heads: str
    deterministic: bool

    def result_sizes(self, known: Mapping[str, int]) -> dict[str, int]:
        """Returns the number of keys that `Probabilities` has."""
        return {"z": known["s"]}


class Operands(NamedTuple):
    """What every pass starts with. A key is visible unless one of those that are given hides it.

    Attributes:
        starts, ends: the half-open range of keys that a query may see.
        kv_indices: the keys that a head keeps; an entry outside 0..S-1 is no key.
        rows: each query's row in the block mask.
        tiles: EMPTY, FULL or a slot in `bits`, for each tile of the block mask.
        bits: a bit for each key of a partial tile, the lowest bit first.
    """

    q: Float[Array, "b t (g m) d"]
    k: Float[Array, "b s g d"]
    v: Float[Array, "b s g e"]
    bias: Float[Array, "b {o.bias_heads} t s", SHARED] | None
    mask: Bool[Array, "b {o.mask_heads} t s", SHARED] | None
    starts: Int[Array, "b t", SHARED] | None
    ends: Int[Array, "b t", SHARED] | None
    q_segments: Int[Array, "b t"] | None
    kv_segments: Int[Array, "b s"] | None
    kv_indices: Int[Array, "b g w"] | None
    rows: Int[Array, "b t", SHARED] | None
    tiles: Int[Array, "b {o.tile_heads} i j", SHARED] | None
    bits: UInt8[Array, "b {o.tile_heads} p r c", SHARED] | None


class Results(NamedTuple):
    """Output in q's dtype and log-sum-exp."""

    out: Float[Array, "b t (g m) e", like("q"), Remat("dsa_out")]
    lse: Float[Array, "b t (g m)", accumulated("q"), Remat("dsa_lse")]


class Gradients(NamedTuple):
    """Of the arrays, in their dtypes; that of the bias in its broadcast shape."""

    q: Array
    k: Array
    v: Array
    bias: Array | None


class LSE(NamedTuple):
    """What the probabilities need of the forward pass."""

    lse: Float[Array, "b t (g m)", accumulated("q")]


class Probabilities(NamedTuple):
    """Over all keys; z is S, a letter of its own as this is no gradient."""

    probs: Float[Array, "b (g m) t z", accumulated("q")]
