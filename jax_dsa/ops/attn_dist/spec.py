"""Options, operands, results and gradients of `attn_dist`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

from jax_dsa.core.spec import accumulated
from jax_dsa.core.typing import Array, Float, Int


@dataclasses.dataclass(frozen=True)
class Options:
    """Static options.

    Attributes:
        scale: Factor of the scores.
        head_group: Number of consecutive heads per sum. None: all heads.
        deterministic: Whether gradients are bit-identical on every run.
    """

    scale: float
    head_group: int | None
    deterministic: bool = False

    @property
    def heads(self) -> str:
        """Returns the factors of the head axis: g KV heads x h head groups x m heads."""
        return "(g m)" if self.head_group is None else "(g h m)"

    @property
    def sums(self) -> str:
        """Returns the axes of the distribution before K."""
        return "b t" if self.head_group is None else "b (g h) t"

    def result_sizes(self, known: Mapping[str, int]) -> dict[str, int]:
        """Returns the sizes of h and m.

        A device that holds only half of a head group has h = 1 and half of m.
        """
        if self.head_group is None:
            return {}
        heads = known["g h m"] // max(1, known["g"])
        summed = max(1, min(self.head_group, heads))
        return {"h": heads // summed, "m": summed}


class Operands(NamedTuple):
    """The arrays that both passes read.

    Attributes:
        q: Queries.
        kv: Keys.
        indices: The keys that each query selects.
        lse: Log-sum-exp of the scores, without the sinks. With `log_sum` it is the largest score of
            a row, as in the results of sparse MLA.
        log_sum: None, or log(sum(exp(score - lse))), which counts as a constant. The pair also
            gives the probabilities of huge scores.
        ends: Exclusive end of the keys that a query sees. None: all keys.
        topk_length: Number of slots of a row that are used, from the first one. None: all slots.
        sinks: Logits that take part in the softmax denominator but have no value.
    """

    q: Float[Array, "b t {o.heads} d"]
    kv: Float[Array, "b s g d"]
    indices: Int[Array, "b t g k"]
    lse: Float[Array, "b t {o.heads}"]
    ends: Int[Array, "b t"] | None
    topk_length: Int[Array, "b t"] | None
    sinks: Float[Array, "b {o.heads}"] | None
    log_sum: Float[Array, "b t {o.heads}"] | None = None


class Results(NamedTuple):
    """The sums over head groups, in float32."""

    dist: Float[Array, "{o.sums} k", accumulated("q")]


class Gradients(NamedTuple):
    """The gradients of q in its dtype, and of kv, lse and sinks in float32."""

    q: Array
    kv: Float[Array, "", accumulated("q")]
    lse: Float[Array, "", accumulated("q")]
    sinks: Float[Array, "", accumulated("q")] | None
