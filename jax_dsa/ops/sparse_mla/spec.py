"""What sparse MLA takes and gives: `sparse_mla`, and `sparse_mla_decode` over a cache."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

from jax_dsa.core.spec import SHARED, Remat, accumulated, like
from jax_dsa.core.typing import Array, Float, Int


@dataclasses.dataclass(frozen=True)
class Options:
    """Static options; `page_size` counts only if there is a page table, `batch_invariant` only in
    the forward pass of decoding.
    """

    scale: float
    value_dim: int
    deterministic: bool = False
    page_size: int = 1
    batch_invariant: bool = False

    def result_sizes(self, _: Mapping[str, int]) -> dict[str, int]:
        """Returns the size of a value, which is a part of its key."""
        return {"e": self.value_dim}


class Operands(NamedTuple):
    """What both passes read.

    Attributes:
        q: queries.
        kv: keys; r is a row's D values, or the bytes of an FP8 record. Pages are one batch row
            that all requests share.
        indices: the keys that each query selects.
        ends: one past the last key that a query sees.
        topk_length: how many of the first slots of a row count.
        sinks: logits without a value.
        page_table: the pages of each request, where `kv` is a pool of pages.
    """

    q: Float[Array, "b t (g m) d"]
    kv: Float[Array, "b s g r", SHARED]
    indices: Int[Array, "b t g k"]
    ends: Int[Array, "b t"] | None = None
    topk_length: Int[Array, "b t"] | None = None
    sinks: Float[Array, "b (g m)"] | None = None
    page_table: Int[Array, "b p"] | None = None


class Results(NamedTuple):
    """The output in q's dtype, and the log-sum-exp without the sink."""

    out: Float[Array, "b t (g m) e", like("q"), Remat("dsa_out")]
    lse: Float[Array, "b t (g m)", accumulated("q"), Remat("dsa_lse")]


class Gradients(NamedTuple):
    """Of q in its dtype; of kv (none for FP8 records) and the sinks in float32.

    Those are sums that shards contribute to; they are rounded after the shards have been added.
    """

    q: Array
    kv: Float[Array, "", accumulated("kv")] | None
    sinks: Float[Array, "", accumulated("q")] | None
