"""What a run is judged by, on validation text."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from jax_dsa.core.typing import Array, Float, Int
from jax_dsa.ops.indexer import indexer_topk
from jax_dsa.training.losses import next_token_loss
from jax_dsa.training.metrics import (
    largest_mass,
    mass_recall,
    random_indices,
    recency_indices,
    selected_mass,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from jax_dsa.training.steps import Params, Program, TrainState

SELECTIONS = ("indexer", "random", "recency", "best")


class Evaluator:
    """Losses and recalls of a program's states on batches [B, seq_len + 1] of tokens."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self._loss = jax.jit(self._loss_of, static_argnames="sparse")
        self._selection = jax.jit(self._selection_of)

    def loss(
        self, backbone: Params, indexer: Params, batches: Iterable[np.ndarray], *, sparse: bool
    ) -> float:
        """Mean next-token loss in nats, with sparse or dense attention."""
        losses = [self._loss(backbone, indexer, b, sparse=sparse) for b in batches]
        return float(jnp.stack(losses).mean())

    def selection(self, state: TrainState, batches: Iterable[np.ndarray]) -> dict[str, np.ndarray]:
        """Along a forward pass with dense attention: "kl", the warm-up loss of each indexer, and
        for each layer the `mass_recall` of the selection that it attends to ("indexer") beside
        three of the same size: "random" keys, the "recency" window, and the keys of largest mass
        ("best"), which is all that any selection of that size can hold.
        """
        step = int(state.step)
        results = [
            self._selection(
                state.backbone.params,
                state.indexer.params,
                jax.random.fold_in(jax.random.wrap_key_data(state.rng), step + i),
                batch,
            )
            for i, batch in enumerate(batches)
        ]
        return {k: np.mean([np.asarray(r[k]) for r in results], axis=0) for k in results[0]}

    def _loss_of(
        self, backbone: Params, indexer: Params, tokens: jax.Array, *, sparse: bool
    ) -> jax.Array:
        logits, _ = self.program.model(backbone, indexer)(tokens[:, :-1], sparse=sparse)
        return next_token_loss(logits, tokens[:, 1:])

    def _selection_of(
        self, backbone: Params, indexer: Params, key: jax.Array, tokens: Int[Array, "B T"]
    ) -> dict[str, Float[Array, "..."]]:
        model = self.program.model(backbone, indexer)
        config = model.config.attention
        _, layers = model(tokens[:, :-1], sparse=False)
        batch, length = tokens[:, :-1].shape
        top_k, scale = config.top_k, config.scale
        found: list[dict[str, jax.Array]] = []
        for layer in layers:
            if layer.indexer is not None:
                chosen, _ = indexer_topk(**layer.indexer._asdict(), top_k=top_k, is_causal=True)
            selections = {
                "indexer": chosen,
                "random": random_indices(key, batch, length, top_k),
                "recency": recency_indices(batch, length, top_k),
            }
            dense = layer.q, layer.kv, layer.lse
            masses = {k: selected_mass(*dense, i, scale=scale) for k, i in selections.items()}
            masses["best"] = largest_mass(*dense, top_k, scale=scale)
            found.append({name: mass_recall(mass, top_k) for name, mass in masses.items()})
        recalls = jax.tree.map(lambda *x: jnp.stack(x), *found)
        return recalls | {"kl": jnp.stack([x.kl for x in layers if x.kl is not None])}
