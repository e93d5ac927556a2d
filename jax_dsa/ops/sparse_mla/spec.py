"""Options, operands, results and gradients of `sparse_mla` and `sparse_mla_decode`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

from jax_dsa.core.spec import CONSTANT, SHARED, Remat, accumulated, like
from jax_dsa.core.typing import Array, Float, Int


@dataclasses.dataclass(frozen=True)
class Options:
    """Static options.

    Attributes:
        scale: Factor of the scores.
        value_dim: Number of a key's first elements that are its value.
        deterministic: Whether gradients are bit-identical on every run.
        page_size: Tokens per page; used only with a page table.
        extra_page_size: The same for the second cache.
        batch_invariant: Whether a request's result is independent of the other requests; used only
            in the forward passes.
    """

    scale: float
    value_dim: int
    deterministic: bool = False
    page_size: int | None = None
    extra_page_size: int | None = None
    batch_invariant: bool = False

    def result_sizes(self, _: Mapping[str, int]) -> dict[str, int]:
        """Returns the sizes of dims that no operand has: a value is the beginning of its key."""
        return {"e": self.value_dim}


class Operands(NamedTuple):
    """The arrays that both passes read.

    Attributes:
        q: Queries.
        kv: Keys. r is D, or the number of bytes of an FP8 record. A pool of pages is one batch
            entry that all requests share.
        indices: The keys that each query selects.
        ends: Exclusive end of the keys that a query sees. None: all keys.
        topk_length: Number of slots of a row that are used, from the first one. None: all slots.
        sinks: Logits that take part in the softmax denominator but have no value.
        page_table: The pages of each request if `kv` is a pool of pages.
        extra_kv, extra_indices, extra_ends, extra_topk_length, extra_page_table: The same for a
            second cache, whose selected keys take part in the same softmax. None without one.
    """

    q: Float[Array, "b t (g m) d"]
    kv: Float[Array, "b s g r", SHARED]
    indices: Int[Array, "b t g k"]
    ends: Int[Array, "b t"] | None = None
    topk_length: Int[Array, "b t"] | None = None
    sinks: Float[Array, "b (g m)"] | None = None
    page_table: Int[Array, "b p"] | None = None
    extra_kv: Float[Array, "b u g v", SHARED] | None = None
    extra_indices: Int[Array, "b t g j"] | None = None
    extra_ends: Int[Array, "b t"] | None = None
    extra_topk_length: Int[Array, "b t"] | None = None
    extra_page_table: Int[Array, "b h"] | None = None


class Results(NamedTuple):
    """The output in the dtype of q, and the log-sum-exp of the scores without the sink, as a pair.

    `max_logit` is the largest score of a row, or one close to it; -inf without a key. `log_sum` is
    log(sum(exp(score - max_logit))); 0 without a key. The cotangent of `log_sum` is that of their
    sum, the log-sum-exp, because `max_logit` counts as a constant.
    """

    out: Float[Array, "b t (g m) e", like("q"), Remat("dsa_out")]
    max_logit: Float[Array, "b t (g m)", accumulated("q"), CONSTANT, Remat("dsa_lse")]
    log_sum: Float[Array, "b t (g m)", accumulated("q"), Remat("dsa_lse")]


class Gradients(NamedTuple):
    """The gradients of q in its dtype, and of keys (None for FP8 records) and sinks in float32.

    Gradients of keys and sinks are sums over shards. They are rounded after the shards are added.
    """

    q: Array
    kv: Float[Array, "", accumulated("kv")] | None
    sinks: Float[Array, "", accumulated("q")] | None
    extra_kv: Float[Array, "", accumulated("extra_kv")] | None = None
