"""What attn_dist takes and gives."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

from jax_dsa.core.spec import accumulated
from jax_dsa.core.typing import Array, Float, Int


@dataclasses.dataclass(frozen=True)
class Options:
    """Static options."""

    scale: float
    head_group: int | None
    deterministic: bool = False

    @property
    def heads(self) -> str:
        """The factors of the heads' axis: h head groups of m heads in each of g KV groups."""
        return "(g m)" if self.head_group is None else "(g h m)"

    @property
    def sums(self) -> str:
        """The axes of the distribution before K."""
        return "b t" if self.head_group is None else "b (g h) t"

    def result_sizes(self, known: Mapping[str, int]) -> dict[str, int]:
        """Returns h and m, of which a device that holds half a head group has one and a half m."""
        if self.head_group is None:
            return {}
        heads = known["g h m"] // max(1, known["g"])
        summed = max(1, min(self.head_group, heads))
        return {"h": heads // summed, "m": summed}


class Operands(NamedTuple):
    """What both passes read.

    Attributes:
        q, kv, indices: queries, keys, and the keys that each query selects.
        lse: of the scores, without the sinks.
        ends: one past the last key that a query sees.
        topk_length: how many of the first slots of a row count.
        sinks: logits without a value.
    """

    q: Float[Array, "b t {o.heads} d"]
    kv: Float[Array, "b s g d"]
    indices: Int[Array, "b t g k"]
    lse: Float[Array, "b t {o.heads}"]
    ends: Int[Array, "b t"] | None
    topk_length: Int[Array, "b t"] | None
    sinks: Float[Array, "b {o.heads}"] | None


class Results(NamedTuple):
    """The sums in float32."""

    dist: Float[Array, "{o.sums} k", accumulated("q")]


class Gradients(NamedTuple):
    """Of q in its dtype, of the others in float32."""

    q: Array
    kv: Float[Array, "", accumulated("q")]
    lse: Float[Array, "", accumulated("q")]
    sinks: Float[Array, "", accumulated("q")] | None
