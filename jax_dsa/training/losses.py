"""The two losses of training with sparse attention, and the parameters that each one trains."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from flax import nnx

from jax_dsa.core.checks import FLOATS, INT32, Args, type_of
from jax_dsa.core.typing import Array, Float, Int

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jax_dsa.nn import AttentionAux, CompressedAux, GroupedAux

INDEXER = nnx.PathContains("indexer")
"""Filter for `nnx.split` that selects the indexers' parameters. All others are the backbone's."""


def next_token_loss(logits: Float[Array, "B T V"], targets: Int[Array, "B T"]) -> Float[Array, ""]:
    """Returns the mean cross-entropy in nats per token, which trains the backbone.

    The gradient with respect to the indexers' parameters is exactly zero.

    Args:
        logits: Logits of the next token; any float dtype.
        targets: The next tokens, int32: `tokens[:, 1:]` for the logits of `tokens[:, :-1]`. Every
            target counts, and one outside 0..V-1 makes the loss NaN, because a traced function
            cannot raise.

    Returns:
        A scalar, float32.

    Raises:
        TypeError, ValueError: If an argument has the wrong type or shape.
    """
    return token_losses(logits, targets, "next_token_loss").mean()


def token_losses(
    logits: Float[Array, "B T V"], targets: Int[Array, "B T"], function: str = "token_losses"
) -> Float[Array, "B T"]:
    """Returns the cross-entropy of each target in nats, float32 [B, T].

    The arguments are those of `next_token_loss`; errors name the `function`.
    """
    args = Args(function, "logits", logits, "B T V")
    logits = args.array("logits", logits, "B T V", FLOATS)
    targets = args.array("targets", targets, "B T", INT32)
    log_probs = jax.nn.log_softmax(logits.astype(jnp.float32))
    losses = -jnp.take_along_axis(log_probs, targets[..., None], axis=-1)[..., 0]
    # A negative index would count from the end of the vocabulary.
    return args.restore(jnp.where(targets >= 0, losses, jnp.nan))


def indexer_loss(layers: Sequence[AttentionAux | CompressedAux | GroupedAux]) -> Float[Array, ""]:
    """Returns the sum of the indexers' KL losses, which trains the indexers.

    The gradient with respect to the backbone's parameters is exactly zero. The losses are added up
    because each indexer is trained independently, on the attention of its own layer, or of all
    layers that attend to its selection if the decoder has a shared teacher.

    Args:
        layers: The second result of each layer, `aux` of `y, aux = layer(x)`. Layers without an
            indexer (`aux.kl is None`) are ignored.

    Returns:
        A scalar, float32, in nats.

    Raises:
        TypeError: If `layers` is the `aux` of one layer, or an entry has no `kl`.
        ValueError: If no layer has an indexer.
    """
    if not isinstance(layers, list | tuple) or hasattr(layers, "kl"):
        raise TypeError(
            f"indexer_loss: argument 'layers' is {type_of(layers)}, want a list with the aux "
            f"of each layer, such as [aux]"
        )
    for i, aux in enumerate(layers):
        if not hasattr(aux, "kl"):
            raise TypeError(
                f"indexer_loss: argument 'layers[{i}]' is {type_of(aux)}, want the aux of a "
                f"layer, which is the second result in `y, aux = layer(x)`"
            )
    losses = [aux.kl for aux in layers if aux.kl is not None]
    if not losses:
        raise ValueError(
            "indexer_loss: argument 'layers' has no layer with an indexer, want at least one"
        )
    return jnp.stack(losses).sum()
