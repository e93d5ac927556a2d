"""Operands, results and static options of the lightning indexer."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

import jax.numpy as jnp

from jax_dsa.core.spec import SHARED, Remat, accumulated
from jax_dsa.core.typing import Array, Float, Int
from jax_dsa.ops.topk.spec import Blocks


@dataclasses.dataclass(frozen=True)
class Options:
    """Static options. `indexer_logits` uses only `relu`.

    Attributes:
        relu: Whether a ReLU is applied to the scores.
        top_k: Number of selected keys per query.
        deterministic: Whether the gradients must be bit-identical on every run.
        page_size: Number of keys per page, or None without a page table.
        candidate_block_size: Number of keys per candidate block, or None without candidates.
    """

    relu: bool
    top_k: int = 0
    deterministic: bool = False
    page_size: int | None = None
    candidate_block_size: int | None = None

    def result_sizes(self, known: Mapping[str, int]) -> dict[str, int]:
        """Returns the number of selected keys where this operator selects them."""
        return {} if "k" in known else {"k": self.top_k}


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockOptions(Options):
    """Static options of `indexer_block_topk`.

    Attributes:
        blocks: How blocks are selected.
        mean: Whether a block's score is that of the mean of its keys, not that of its best key.
    """

    blocks: Blocks
    mean: bool


class IndexerOperands(NamedTuple):
    """The checked arrays that every operator of the indexer takes."""

    q: Float[Array, "B T J C"]
    k: Float[Array, "B S C"]
    weights: Float[Array, "B T J"]
    k_scale: Float[Array, "B S"] | None


class Operands(NamedTuple):
    """Operands of `indexer_logits` and `indexer_topk`.

    Attributes:
        q: Queries.
        k: Keys, or a pool of pages.
        weights: Head weights.
        k_scale: Scales of FP8 keys, or None.
        starts: First key of each query.
        ends: Exclusive end of the keys of each query.
        page_table: Pages of each request, or None if `k` is not a pool.
        candidates: Numbers of the blocks that each query may select from, or None for all keys.
            Blocks count from `starts`. A kernel need only score these blocks.
    """

    q: Float[Array, "b t j c"]
    k: Float[Array, "b s c", SHARED]
    weights: Float[Array, "b t j"]
    k_scale: Float[Array, "b s", SHARED] | None
    starts: Int[Array, "b t"]
    ends: Int[Array, "b t"]
    page_table: Int[Array, "b r"] | None = None
    candidates: Int[Array, "b t m"] | None = None


class Logits(NamedTuple):
    """Logits of all keys, -inf for keys outside the range of a query."""

    logits: Float[Array, "b t s", accumulated("q")]


class Selection(NamedTuple):
    """The keys with the largest logits, and their logits."""

    indices: Int[Array, "b t k", jnp.int32, Remat("dsa_topk_indices")]
    logits: Float[Array, "b t k", accumulated("q")]


class Selected(NamedTuple):
    """Operands of the passes over selected keys."""

    q: Float[Array, "b t j c"]
    k: Float[Array, "b s c"]
    weights: Float[Array, "b t j"]
    k_scale: Float[Array, "b s"] | None
    indices: Int[Array, "b t k"]


class BlockOperands(NamedTuple):
    """Operands of `indexer_block_topk`, which selects blocks for each group of J heads.

    Attributes:
        q: Queries.
        k: Keys, or a pool of pages.
        weights: Head weights; None means 1.
        k_scale: Scales of FP8 keys, or None.
        starts: First key of each query, from which its blocks count. None: blocks count from key 0.
        ends: Exclusive end of the keys of each query.
        page_table: Pages of each request, or None if `k` is not a pool.
    """

    q: Float[Array, "b t g j c"]
    k: Float[Array, "b s c", SHARED]
    weights: Float[Array, "b t g j"] | None
    k_scale: Float[Array, "b s", SHARED] | None
    starts: Int[Array, "b t"] | None
    ends: Int[Array, "b t"]
    page_table: Int[Array, "b r"] | None


class BlockSelection(NamedTuple):
    """The selected blocks, their logits, and the keys that these logits depend on.

    The latter are the best keys of the blocks, or the means of the blocks, by the number of the
    block. They are -1 where a logit depends on none.
    """

    indices: Int[Array, "b t g k", jnp.int32, Remat("dsa_topk_indices")]
    logits: Float[Array, "b t g k", accumulated("q")]
    keys: Int[Array, "b t g k", jnp.int32, Remat("dsa_topk_indices")]


class BlockSelected(NamedTuple):
    """Operands of the backward pass of `indexer_block_topk`."""

    q: Float[Array, "b t g j c"]
    k: Float[Array, "b s c"]
    weights: Float[Array, "b t g j"] | None
    k_scale: Float[Array, "b s"] | None
    keys: Int[Array, "b t g k"]


def folded(x: Array) -> Array:
    """Merges the axes of queries and groups of [B, T, G, ...]."""
    return x.reshape(x.shape[0], x.shape[1] * x.shape[2], *x.shape[3:])


def weights_of_groups(x: BlockOperands | BlockSelected) -> Float[Array, "B T G J"]:
    """Returns the head weights; ones if there are none."""
    return jnp.ones(x.q.shape[:4], jnp.float32) if x.weights is None else x.weights


class Gradients(NamedTuple):
    """Gradients of the inputs.

    Those of keys are sums over queries. They are rounded after the shards have been added.
    """

    q: Array
    k: Float[Array, "", accumulated("k")]
    weights: Array | None
    k_scale: Float[Array, "", accumulated("k_scale")] | None
