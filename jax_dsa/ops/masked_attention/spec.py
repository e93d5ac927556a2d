"""Operands, options and results of masked attention."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

from jax_dsa.core.spec import CONSTANT, SHARED, Remat, accumulated, like
from jax_dsa.core.typing import Array, Bool, Float, Int, UInt8


@dataclasses.dataclass(frozen=True)
class Options:
    """The static options of a call.

    Attributes:
        scale: Factor of q.k.
        softcap: The softcap, or None.
        bias_heads, mask_heads, tile_heads: The factors of the operand's head axis: "(g m)" for one
            entry per query head, "g" for one per KV head, "x" for one that all heads share.
        deterministic: Whether gradients must be bit-identical from run to run. Those of the XLA
            implementation always are.
    """

    scale: float
    softcap: float | None
    bias_heads: str
    mask_heads: str
    tile_heads: str
    deterministic: bool

    def result_sizes(self, known: Mapping[str, int]) -> dict[str, int]:
        """Returns the size of the key axis of `attention_probs`, which is named z there."""
        return {"z": known["s"]}


class Operands(NamedTuple):
    """The operands of every pass. A key is visible unless one of the given conditions masks it.

    Attributes:
        starts, ends: The half-open range of keys that each query may see.
        kv_indices: The keys that each KV head keeps. An entry outside 0..S-1 is no key.
        rows: The row of each query in the block mask.
        tiles: EMPTY, FULL or a slot in `bits`, for each tile of the block mask.
        bits: One bit per key of the partial tiles, the lowest bit first.
        sinks: Logits that take part in the softmax denominator but have no value.
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
    sinks: Float[Array, "b (g m)"] | None


class Results(NamedTuple):
    """The output in q's dtype, the largest score, and log(sum(exp(score - max_logit))).

    Both are without the sink. The log-sum-exp is `max_logit + log_sum`. The cotangent of `log_sum`
    is that of the log-sum-exp, because `max_logit` counts as a constant. A query that sees no key
    has a `max_logit` of -inf and a `log_sum` of 0.
    """

    out: Float[Array, "b t (g m) e", like("q"), Remat("dsa_out")]
    max_logit: Float[Array, "b t (g m)", accumulated("q"), CONSTANT, Remat("dsa_lse")]
    log_sum: Float[Array, "b t (g m)", accumulated("q"), Remat("dsa_lse")]


class Gradients(NamedTuple):
    """Gradients in the shapes and dtypes of the operands; the bias keeps its broadcast shape.

    The gradient of the sinks is a sum over shards. It is rounded after the shards are added.
    """

    q: Array
    k: Array
    v: Array
    bias: Array | None
    sinks: Float[Array, "", accumulated("q")] | None
