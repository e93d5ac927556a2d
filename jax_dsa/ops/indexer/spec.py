"""What the lightning indexer takes and gives: all logits, or those of the keys that it selects."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

import jax.numpy as jnp

from jax_dsa.core.spec import SHARED, Remat, accumulated
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

    def result_sizes(self, known: Mapping[str, int]) -> dict[str, int]:
        """Returns the number of selected keys where this operator selects them."""
        return {} if "k" in known else {"k": self.top_k}


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

    logits: Float[Array, "b t s", accumulated("q")]


class Selection(NamedTuple):
    """The keys of the largest logits, and these."""

    indices: Int[Array, "b t k", jnp.int32, Remat("dsa_topk_indices")]
    logits: Float[Array, "b t k", accumulated("q")]


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
    k: Float[Array, "", accumulated("k")]
    weights: Array
    k_scale: Float[Array, "", accumulated("k_scale")] | None
