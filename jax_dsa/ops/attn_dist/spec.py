"""What attn_dist takes and gives."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

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

    dist: Float[Array, "{o.sums} k"]


class Gradients(NamedTuple):
    """Of q in its dtype, of the others in float32."""

    q: Array
    kv: Array
    lse: Array
    sinks: Array | None
