"""What the lightning indexer takes and gives: all logits, or those of the keys that it selects."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from jax_dsa.core.spec import SHARED, Remat
from jax_dsa.core.typing import Array, Float, Int


@dataclasses.dataclass(frozen=True)
class Options:
    """Static options; `indexer_logits` knows `relu` alone.

    Attributes:
        page_size: of a key pool's pages; 0 without a page table.
    """

    relu: bool
    top_k: int = 0
    deterministic: bool = False
    page_size: int = 0


class IndexerOperands(NamedTuple):
    """The arrays that every function of the indexer starts with, checked."""

    q: Float[Array, "B T J C"]
    k: Float[Array, "B S C"]
    weights: Float[Array, "B T J"]
    k_scale: Float[Array, "B S"] | None


class Operands(NamedTuple):
    """What both operators read.

    Attributes:
        q, k, weights, k_scale: queries, keys, head weights, and the scales of FP8 keys.
        starts, ends: the half-open range of keys that each query sees.
        page_table: the pages of each request, where `k` is a pool of pages.
    """

    q: Float[Array, "b t j c"]
    k: Float[Array, "b s c", SHARED]
    weights: Float[Array, "b t j"]
    k_scale: Float[Array, "b s", SHARED] | None
    starts: Int[Array, "b t"]
    ends: Int[Array, "b t"]
    page_table: Int[Array, "b r"] | None = None


class Logits(NamedTuple):
    """Those of all keys, -inf outside a query's range."""

    logits: Float[Array, "b t s"]


class Selection(NamedTuple):
    """The keys of the largest logits, and these."""

    indices: Int[Array, "b t k", Remat("dsa_topk_indices")]
    logits: Float[Array, "b t k"]


class Selected(NamedTuple):
    """What the backward pass over the selected keys reads."""

    q: Float[Array, "b t j c"]
    k: Float[Array, "b s c"]
    weights: Float[Array, "b t j"]
    k_scale: Float[Array, "b s"] | None
    indices: Int[Array, "b t k"]


class Gradients(NamedTuple):
    """Of the inputs; those of keys are sums, which are rounded after shards have been added."""

    q: Array
    k: Array
    weights: Array
    k_scale: Array | None
