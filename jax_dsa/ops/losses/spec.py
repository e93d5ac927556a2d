"""What the indexer's losses take and give."""

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
        rows: over how many rows the loss is a mean if all of them count, on all devices together.
    """

    rows: int

    @property
    def share(self) -> float:
        """Of one row in the loss, if all of them count."""
        return 1 / self.rows


class Operands(NamedTuple):
    """What the loss over selected keys reads.

    Attributes:
        valid: which slots take part; None: those with a logit above -inf.
    """

    logits: Float[Array, "b t k"]
    teacher: Float[Array, "b t k"]
    valid: Bool[Array, "b t k"] | None


class Results(NamedTuple):
    """Each row's KL, whether the row counts, and the gradient of its KL times `Options.share`, not
    rounded.

    The mean over rows is taken outside the passes: there it is one over all devices, and its
    derivative brings each row's share. Where all rows count and nothing weights the loss, that is
    what the gradient has already, and the backward pass has nothing to do.
    """

    kl: Float[Array, "b t", accumulated("logits")]
    counts: Bool[Array, "b t", jnp.bool_]
    grad: Float[Array, "b t k", accumulated("logits"), CONSTANT]


class Saved(NamedTuple):
    """What the backward pass reads: the gradients that came with the rows' KL, times the share."""

    logits: Float[Array, "b t k"]


class Gradients(NamedTuple):
    """Of the loss over selected keys. The teacher is a constant."""

    logits: Array


@dataclasses.dataclass(frozen=True)
class DenseOptions:
    """Static options of the loss over all keys."""

    relu: bool
    scale: float


class DenseOperands(NamedTuple):
    """What the loss over all keys reads: the indexer's operands, and the attention's."""

    index_q: Float[Array, "b t j c"]
    index_k: Float[Array, "b s c"]
    index_weights: Float[Array, "b t j"]
    index_k_scale: Float[Array, "b s"] | None
    starts: Int[Array, "b t"]
    ends: Int[Array, "b t"]
    q: Float[Array, "b t n d"]
    kv: Float[Array, "b s g d"]


class DenseResults(NamedTuple):
    """KL, summed over the rows that count, how many do, and that sum's gradients, not rounded.

    In one go, since the attention is by far the most of the work and its probabilities are too many
    to keep for a backward pass, while the gradients are of the size of the inputs.
    """

    kl: Float[Array, "b", accumulated("index_k")]
    rows: Int[Array, "b", jnp.int32, Remat("dsa_kl_grads")]
    index_q: Float[Array, "b t j c", accumulated("index_q"), CONSTANT, Remat("dsa_kl_grads")]
    index_k: Float[Array, "b s c", accumulated("index_k"), CONSTANT, Remat("dsa_kl_grads")]
    index_weights: Float[Array, "b t j", accumulated("index_q"), CONSTANT, Remat("dsa_kl_grads")]
    index_k_scale: (
        Float[Array, "b s", accumulated("index_k_scale"), CONSTANT, Remat("dsa_kl_grads")] | None
    )


class DenseGradients(NamedTuple):
    """Of the loss over all keys."""

    index_q: Array
    index_k: Array
    index_weights: Array
    index_k_scale: Array | None
