"""Options, operands, results and gradients of `mqa_decode`, and the same of its plans."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_dsa.core.compat import accum_dtype
from jax_dsa.core.export import exportable
from jax_dsa.core.spec import CONSTANT, SHARED, Dtype, Remat, accumulated
from jax_dsa.core.typing import Array, Float, Int

# The work ranges of a plan, and the numbers of each; see MqaDecodeRange in
# cuda/mqa_decode/mqa_decode.h.
PLAN_RANGES, PLAN_FIELDS = 264, 8


@exportable
@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["ranges"],
    meta_fields=["batch", "queries", "heads", "groups", "dim", "fp8"],
)
@dataclasses.dataclass(frozen=True, eq=False)  # Comparing arrays gives no bool.
class MqaDecodePlan:
    """How the kernels of `mqa_decode` divide the keys of all requests, from `mqa_decode_plan`.

    A plan is a pytree, so it may be an argument of a jitted function or be used inside
    `jax.lax.scan`.

    Attributes:
        ranges: What each group of CTAs computes; zeros where no kernel takes a plan.
        batch, queries, heads, groups, dim: B, T, N, G and D of the calls that it is for.
        fp8: Whether their keys are FP8 records.
    """

    ranges: Int[Array, "264 8"]
    batch: int
    queries: int
    heads: int
    groups: int
    dim: int
    fp8: bool

    @property
    def sizes(self) -> tuple[int, int, int, int, int, bool]:
        """The static fields."""
        return self.batch, self.queries, self.heads, self.groups, self.dim, self.fp8


@dataclasses.dataclass(frozen=True)
class Options:
    """Static options.

    Attributes:
        scale: Factor of the scores.
        value_dim: Number of a key's first elements that are its value; used only without `v`.
        num_splits: Minimum number of chunks of keys of the XLA implementation. None: as memory
            allows. The kernels ignore it.
        normalize: Whether the output is divided by the softmax denominator in q's dtype.
        page_size: Tokens per page; used only with a page table.
        batch_invariant: Whether a request's result is independent of the other requests; used only
            in the forward pass.
        exact_max: Whether `max_logit` must be the largest score. Otherwise it may be up to 5.6
            smaller, which saves the kernels rescaling.
    """

    scale: float
    value_dim: int
    num_splits: int | None
    normalize: bool
    page_size: int | None = None
    batch_invariant: bool = False
    exact_max: bool = True

    def result_sizes(self, known: Mapping[str, int]) -> dict[str, int]:
        """Returns the sizes of dims that no operand has: without v a value is part of its key."""
        return {} if "e" in known else {"e": self.value_dim}


class Operands(NamedTuple):
    """The arrays that both passes read.

    Attributes:
        q: Queries.
        k: Keys. r is D, or the number of bytes of an FP8 record. A pool of pages is one batch entry
            that all requests share.
        v: Values. None: the first elements of the keys.
        starts, ends: The half-open range of keys that each query sees.
        sinks: Logits that take part in the softmax denominator but have no value.
        page_table: The pages of each request if `k` is a pool of pages.
        plan: The ranges of a plan for all requests. The kernels ignore it if it was made for other
            sizes, as it is in a part of a call that is sharded.
    """

    q: Float[Array, "b t (g m) d"]
    k: Float[Array, "b s g r", SHARED]
    v: Float[Array, "b s g e", SHARED] | None
    starts: Int[Array, "b t"]
    ends: Int[Array, "b t"]
    sinks: Float[Array, "b (g m)"] | None
    page_table: Int[Array, "b p"] | None
    plan: Int[Array, "b w l", SHARED] | None = None


def _out_dtype(options: Options, x: Operands) -> Any:
    return x.q.dtype if options.normalize else accum_dtype(x.q.dtype)


class Results(NamedTuple):
    """The output, the largest score, and log(sum(exp(score - max_logit))) without the sink.

    The log-sum-exp is `max_logit + log_sum`. The cotangent of `log_sum` is that of the log-sum-exp,
    because `max_logit` counts as a constant. A row without a key has a `max_logit` of -inf and a
    `log_sum` of 0. The output is in the dtype of q, or in float32 if options.normalize is False.
    """

    out: Float[Array, "b t (g m) e", Dtype(_out_dtype), Remat("dsa_out")]
    max_logit: Float[Array, "b t (g m)", accumulated("q"), CONSTANT, Remat("dsa_lse")]
    log_sum: Float[Array, "b t (g m)", accumulated("q"), Remat("dsa_lse")]


class Gradients(NamedTuple):
    """The gradients of q in its dtype, and of k (None for FP8 records), v and sinks in float32.

    Gradients of k, v and sinks are sums over shards. They are rounded after the shards are added.
    """

    q: Array
    k: Float[Array, "", accumulated("k")] | None
    v: Float[Array, "", accumulated("v")] | None
    sinks: Float[Array, "", accumulated("q")] | None


@dataclasses.dataclass(frozen=True)
class PlanOptions:
    """Static options of a plan: N, G and D of the calls, and whether keys are FP8 records."""

    heads: int
    groups: int
    dim: int
    records: bool

    def result_sizes(self, known: Mapping[str, int]) -> dict[str, int]:
        """Returns the sizes of a plan."""
        return {"w": PLAN_RANGES, "l": PLAN_FIELDS}


class PlanOperands(NamedTuple):
    """The half-open range of keys that each query sees. A batch entry is a plan for n requests."""

    starts: Int[Array, "b n t"]
    ends: Int[Array, "b n t"]


class PlanResults(NamedTuple):
    """The ranges of each plan."""

    ranges: Int[Array, "b w l", jnp.int32]
