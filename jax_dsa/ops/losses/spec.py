"""Options, operands, results and gradients of the indexer's losses."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp

from jax_dsa.core.spec import CONSTANT, Remat, accumulated
from jax_dsa.core.typing import Array, Bool, Float, Int


@dataclasses.dataclass(frozen=True)
class Options:
    """Static options of the loss over selected keys.

    Attributes:
        rows: Number of rows on all devices. The loss is their mean if all of them count.
    """

    rows: int

    @property
    def row_weight(self) -> float:
        """The weight of one row in the loss if all rows count."""
        return 1 / self.rows


class Operands(NamedTuple):
    """The operands of the loss over selected keys.

    Attributes:
        logits: The indexer's logits of the selected keys.
        teacher: The main attention's probabilities of the selected keys, not normalised.
        valid: Which slots are used; None: those with a logit above -inf.
    """

    logits: Float[Array, "b t k"]
    teacher: Float[Array, "b t k"]
    valid: Bool[Array, "b t k"] | None


class Results(NamedTuple):
    """The results of the loss over selected keys.

    The mean over rows is computed outside the operator, over the rows of all devices. Its
    derivative gives each row its weight. If all rows count and the loss itself has no weight, this
    is `Options.row_weight`, which `grad` contains already, and the backward pass has nothing to do.

    Attributes:
        kl: The KL of each row.
        counts: Whether each row counts.
        grad: The gradient of each row's KL, times `Options.row_weight`, not rounded.
    """

    kl: Float[Array, "b t", accumulated("logits")]
    counts: Bool[Array, "b t", jnp.bool_]
    grad: Float[Array, "b t k", accumulated("logits"), CONSTANT]


class Saved(NamedTuple):
    """The residuals of the backward pass: `Results.grad`."""

    logits: Float[Array, "b t k"]


class Gradients(NamedTuple):
    """The gradients of the loss over selected keys. The teacher is a constant."""

    logits: Array


@dataclasses.dataclass(frozen=True)
class DenseOptions:
    """Static options of the loss over all keys.

    Attributes:
        relu: Whether a ReLU is applied to the scores of the indexer's heads.
        scale: Scale of the attention's scores.
        block_size: Number of tokens that share a key of the indexer.
    """

    relu: bool
    scale: float
    block_size: int = 1


class DenseOperands(NamedTuple):
    """The operands of the loss over all keys: those of the indexer and of the attention.

    The indexer has w keys, one for each block of tokens. `starts` and `ends` are the range of the
    tokens that each query sees.
    """

    index_q: Float[Array, "b t j c"]
    index_k: Float[Array, "b w c"]
    index_weights: Float[Array, "b t j"]
    index_k_scale: Float[Array, "b w"] | None
    starts: Int[Array, "b t"]
    ends: Int[Array, "b t"]
    q: Float[Array, "b t n d"]
    kv: Float[Array, "b s g d"]


class DenseResults(NamedTuple):
    """The KL summed over the rows that count, the number of these rows, and the sum's gradients.

    The gradients are computed in the forward pass and not rounded. The attention is most of the
    work and its probabilities are too large to keep for a backward pass, but the gradients are only
    as large as the inputs.
    """

    kl: Float[Array, "b", accumulated("index_k")]
    rows: Int[Array, "b", jnp.int32, Remat("dsa_kl_grads")]
    index_q: Float[Array, "b t j c", accumulated("index_q"), CONSTANT, Remat("dsa_kl_grads")]
    index_k: Float[Array, "b w c", accumulated("index_k"), CONSTANT, Remat("dsa_kl_grads")]
    index_weights: Float[Array, "b t j", accumulated("index_q"), CONSTANT, Remat("dsa_kl_grads")]
    index_k_scale: (
        Float[Array, "b w", accumulated("index_k_scale"), CONSTANT, Remat("dsa_kl_grads")] | None
    )


class DenseGradients(NamedTuple):
    """The gradients of the loss over all keys."""

    index_q: Array
    index_k: Array
    index_weights: Array
    index_k_scale: Array | None
