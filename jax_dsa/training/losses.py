"""The two losses of training with sparse attention, and which parameters each belongs to."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from flax import nnx

from jax_dsa.core.typing import Array, Float, Int

if TYPE_CHECKING:
    from jax_dsa.nn import AttentionAux

INDEXER = nnx.PathContains("indexer")
"""Filter for `nnx.split`: the indexers' parameters. All others are the backbone's."""


def next_token_loss(logits: Float[Array, "B T V"], targets: Int[Array, "B T"]) -> Float[Array, ""]:
    """Mean cross-entropy in nats a token: the backbone's loss.

    It gives the indexers exactly zero gradient.
    """
    return token_losses(logits, targets).mean()


def token_losses(logits: Float[Array, "B T V"], targets: Int[Array, "B T"]) -> Float[Array, "B T"]:
    """Cross-entropy of each target in nats."""
    log_probs = jax.nn.log_softmax(logits.astype(jnp.float32))
    return -jnp.take_along_axis(log_probs, targets[..., None], axis=-1)[..., 0]


def indexer_loss(layers: list[AttentionAux]) -> Float[Array, ""]:
    """Sum of the indexers' KL losses. Gives the backbone exactly zero gradient.

    A sum because the indexers are trained side by side, each on its own layer's attention; layers
    without an indexer have no part in it.
    """
    return jnp.stack([aux.kl for aux in layers if aux.kl is not None]).sum()
