"""What decode attention takes and gives."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

from jax_dsa.core.compat import accum_dtype
from jax_dsa.core.spec import CONSTANT, SHARED, Dtype, Remat, accumulated
from jax_dsa.core.typing import Array, Float, Int


@dataclasses.dataclass(frozen=True)
class Options:
    """Static options; `page_size` counts only if there is a page table, `batch_invariant` only in
    the forward pass.
    """

    scale: float
    value_dim: int
    num_splits: int | None
    normalize: bool
    page_size: int = 1
    batch_invariant: bool = False

    def result_sizes(self, known: Mapping[str, int]) -> dict[str, int]:
        """Returns the size of a value, which is part of its key where there are no values."""
        return {} if "e" in known else {"e": self.value_dim}


class Operands(NamedTuple):
    """What both passes read.

    Attributes:
        k: keys; r is a row's D values, or the bytes of an FP8 record. Pages are one batch row that
            all requests share.
        v: values, None where they are the first ones of a key.
        starts, ends: the half-open range of keys that each query sees.
        sinks: logits without a value.
        page_table: the pages of each request, where `k` is a pool of pages.
    """

    q: Float[Array, "b t (g m) d"]
    k: Float[Array, "b s g r", SHARED]
    v: Float[Array, "b s g e", SHARED] | None
    starts: Int[Array, "b t"]
    ends: Int[Array, "b t"]
    sinks: Float[Array, "b (g m)"] | None
    page_table: Int[Array, "b p"] | None


def _out_dtype(options: Options, x: Operands) -> Any:
    return x.q.dtype if options.normalize else accum_dtype(x.q.dtype)


def _top_dtype(options: Options, x: Operands) -> Any:
    return None if options.normalize else accum_dtype(x.q.dtype)


class Results(NamedTuple):
    """Output, log-sum-exp without the sink, and, if options.normalize is False, the largest score,
    which only sets the unit of a result that is not normalised.

    The output is in q's dtype, or float32 if it is to be scaled further.
    """

    out: Float[Array, "b t (g m) e", Dtype(_out_dtype), Remat("dsa_out")]
    lse: Float[Array, "b t (g m)", accumulated("q"), Remat("dsa_lse")]
    top: Float[Array, "b t (g m)", Dtype(_top_dtype), CONSTANT] | None


class Gradients(NamedTuple):
    """Of q in its dtype; of k (none for FP8 records), v and the sinks in float32.

    Those are sums that shards contribute to; they are rounded after the shards have been added.
    """

    q: Array
    k: Float[Array, "", accumulated("k")] | None
    v: Float[Array, "", accumulated("v")] | None
    sinks: Float[Array, "", accumulated("q")] | None
