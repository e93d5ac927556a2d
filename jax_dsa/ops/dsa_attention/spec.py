"""What DeepSeek Sparse Attention takes and gives."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from jax_dsa.core.typing import Array, Float, Int
from jax_dsa.ops.indexer.spec import IndexerOperands


@dataclasses.dataclass(frozen=True)
class Options:
    """Static options; `top_k` counts only where the indexer selects."""

    top_k: int
    value_dim: int
    scale: float
    deterministic: bool


class Operands(NamedTuple):
    """What its parts read.

    Attributes:
        q, kv: queries and keys of the attention.
        indexer: None if the selection comes from elsewhere and no loss is wanted.
        starts, ends: the half-open range of keys that each query sees.
        indices: a selection from elsewhere.
        sinks: logits without a value.
    """

    q: Float[Array, "B T N D"]
    kv: Float[Array, "B S G D"]
    indexer: IndexerOperands | None
    starts: Int[Array, "B T"]
    ends: Int[Array, "B T"]
    indices: Int[Array, "B T K"] | None
    sinks: Float[Array, "1 N"] | None


class DSAAux(NamedTuple):
    """What `dsa_attention` returns beside its output."""

    indices: Int[Array, "B T K"]
    """The selected keys of each query in ascending order, then -1; or those that were given."""
    kl: Float[Array, ""]
    """The indexer's loss: mean over queries of KL(attention || indexer) on the selected keys; 0
    without an indexer."""
    lse: Float[Array, "B T N"]
    """Natural-log sum of the exponentiated scores over the selected keys, without the sink."""
