"""Operands and results of `attention_probs`."""

from __future__ import annotations

from typing import NamedTuple

from jax_dsa.core.spec import SHARED, accumulated
from jax_dsa.core.typing import Array, Bool, Float, Int, UInt8


class Operands(NamedTuple):
    """The operands of `masked_attention` without the values; see its `Operands`."""

    q: Float[Array, "b t (g m) d"]
    k: Float[Array, "b s g d"]
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
    sinks: Float[Array, "b (g m)"] | None


class Probabilities(NamedTuple):
    """Probabilities over all keys.

    The key axis is called z, not s: a result with the axis s of a sharded operand would be taken
    for a partial sum.
    """

    probs: Float[Array, "b (g m) t z", accumulated("q")]
