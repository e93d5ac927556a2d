"""The two losses of training with sparse attention, and the parameters that each one trains."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from flax import nnx

from jax_dsa.core.typing import Array, Float, Int

if TYPE_CHECKING:
    from jax_dsa.nn import AttentionAux

INDEXER = nnx.PathContains("indexer")
"""Filter for `nnx.split` that selects the indexers' parameters. All others are the backbone's."""


def next_token_loss(logits: Float[Array, "B T V"], targets: Int[Array, "B T"]) -> Float[Array, ""]:
    """Returns the mean cross-entropy in nats per token, which trains the backbone.

    The gradient with respect to the indexers' parameters is exactly zero.

    Args:
        logits: Logits of the next token; any float dtype.
        targets: The next tokens, int32.

    Returns:
        A scalar, float32.
    """
    return token_losses(logits, targets).mean()


def token_losses(logits: Float[Array, "B T V"], targets: Int[Array, "B T"]) -> Float[Array, "B T"]:
    """Returns the cross-entropy of each target in nats, float32 [B, T]."""
    log_probs = jax.nn.log_softmax(logits.astype(jnp.float32))
    return -jnp.take_along_axis(log_probs, targets[..., None], axis=-1)[..., 0]


def indexer_loss(layers: list[AttentionAux]) -> Float[Array, ""]:
    """Returns the sum of the indexers' KL losses, which trains the indexers.

    The gradient with respect to the backbone's parameters is exactly zero. The losses are added up
    because each indexer is trained independently, on the attention of its own layer.

    Args:
        layers: What each layer returned. Layers without an indexer (`aux.kl is None`) are ignored.

    Returns:
        A scalar, float32, in nats.
    """
    return jnp.stack([aux.kl for aux in layers if aux.kl is not None]).sum()
