"""Options, operands and results of DeepSeek Sparse Attention."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from jax_dsa.core.export import exportable
from jax_dsa.core.typing import Array, Float, Int
from jax_dsa.ops.indexer.spec import IndexerOperands


@dataclasses.dataclass(frozen=True)
class Options:
    """Static options. `top_k` is used only where the indexer selects."""

    top_k: int
    value_dim: int
    scale: float
    deterministic: bool
    return_teacher: bool


class Operands(NamedTuple):
    """The operands of all steps.

    Attributes:
        q, kv: queries and keys of the attention.
        indexer: the indexer's inputs; None if the selection comes from elsewhere and no loss is
            wanted.
        starts, ends: the half-open range of keys that each query sees.
        indices: a selection from elsewhere.
        sinks: logits that have no value vector.
    """

    q: Float[Array, "B T N D"]
    kv: Float[Array, "B S G D"]
    indexer: IndexerOperands | None
    starts: Int[Array, "B T"]
    ends: Int[Array, "B T"]
    indices: Int[Array, "B T K"] | None
    sinks: Float[Array, "1 N"] | None


@exportable
class DSAAux(NamedTuple):
    """The results of `dsa_attention` besides its output.

    Attributes:
        indices: The selected keys of each query in ascending order, then -1; or the given
            selection.
        kl: The indexer's loss: the mean over queries of KL(attention || indexer) on the selected
            keys; 0 without an indexer, and with `return_teacher`.
        lse: Logarithm of the sum of the exponentiated scores of the selected keys, without the
            sink.
        logits: With `return_teacher`, the indexer's logits of the selected keys, -inf in empty
            slots. None without an indexer. Default: None.
        teacher: With `return_teacher`, the attention's probabilities of the selected keys, summed
            over heads, as `attn_dist` returns them. Default: None.
    """

    indices: Int[Array, "B T K"]
    kl: Float[Array, ""]
    lse: Float[Array, "B T N"]
    logits: Float[Array, "B T K"] | None = None
    teacher: Float[Array, "B T K"] | None = None
