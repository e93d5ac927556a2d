"""Evaluation on validation text: losses, and the attention mass that selections hold."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jax_dsa.core.documents import document_starts
from jax_dsa.core.typing import Array, Float
from jax_dsa.training.losses import next_token_loss, token_losses
from jax_dsa.training.selections import recalls, recency_selection, similarity

if TYPE_CHECKING:
    from collections.abc import Iterable

    from jax_dsa.training.steps import Batch, Params, Program, TrainState

_QUERIES = 8192
"""Largest number of queries per sequence that recalls are computed for. Of longer sequences, this
many evenly spread queries are taken."""
SELECTIONS = ("indexer", "random", "recency", "best")
Keys = Literal["sparse", "dense", "recency"]
"""The keys that a model attends to: those that it selects, all keys, or the same number of latest
keys (or pools)."""


class Evaluator:
    """Computes losses and recalls of a program's states on batches [B, seq_len + 1] of tokens.

    Args:
        program: The program whose model is evaluated.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self._loss = jax.jit(self._loss_of, static_argnames="sparse")
        self._selection = jax.jit(self._selection_of)
        self._similarity = jax.jit(self._similarity_of)
        whole = NamedSharding(program.mesh, PartitionSpec())
        self._tokens = jax.jit(self._tokens_of, static_argnames="keys", out_shardings=whole)

    def loss(
        self, backbone: Params, indexer: Params, batches: Iterable[np.ndarray], *, sparse: bool
    ) -> float:
        """Returns the mean next-token loss in nats.

        Args:
            backbone: Parameters of the backbone.
            indexer: Parameters of the indexers.
            batches: Batches of tokens, [B, seq_len + 1].
            sparse: Whether attention is sparse; otherwise it is dense.
        """
        with jax.set_mesh(self.program.mesh):
            losses = [
                self._loss(backbone, indexer, self.program.place(b), sparse=sparse) for b in batches
            ]
        return float(np.mean([float(loss) for loss in losses]))

    def token_losses(
        self, backbone: Params, indexer: Params, batches: Iterable[np.ndarray], keys: Keys
    ) -> np.ndarray:
        """Returns the loss of each token in nats, [sequences, seq_len].

        Args:
            backbone: Parameters of the backbone.
            indexer: Parameters of the indexers.
            batches: Batches of tokens, [B, seq_len + 1].
            keys: The keys that the model attends to.
        """
        with jax.set_mesh(self.program.mesh):
            losses = [
                np.asarray(self._tokens(backbone, indexer, self.program.place(b), keys=keys))
                for b in batches
            ]
        return np.concatenate(losses)

    def selection(self, state: TrainState, batches: Iterable[np.ndarray]) -> dict[str, np.ndarray]:
        """Returns how good the indexers' selections are, from a forward pass with dense attention.

        Args:
            state: The state to evaluate.
            batches: Batches of tokens, [B, seq_len + 1].

        Returns:
            "kl": the warm-up loss of each indexer. The other entries are the `mass_recall` of each
            layer for four selections of the same size: "indexer" is the selection that the layer
            attends to, "random" are random keys, "recency" are the latest keys, and "best" are the
            keys of largest mass, which no selection can exceed.
        """
        step = int(state.step)
        with jax.set_mesh(self.program.mesh):
            results = [
                self._selection(
                    state.backbone.params,
                    state.indexer.params,
                    jax.random.fold_in(jax.random.wrap_key_data(state.rng), step + i),
                    self.program.place(batch),
                )
                for i, batch in enumerate(batches)
            ]
        return _mean(results)

    def similarity(self, state: TrainState, batches: Iterable[np.ndarray]) -> dict[str, np.ndarray]:
        """Returns how similar the selections of neighbouring queries are.

        Args:
            state: The state to evaluate.
            batches: Batches of tokens, [B, seq_len + 1].

        Returns:
            For each layer that selects, "kept": the part of a query's selection that the query
            before it selected, too; and "union": how many different numbers eight neighbouring
            queries select, divided by the number that one of them selects.
        """
        backbone, indexer = state.backbone.params, state.indexer.params
        with jax.set_mesh(self.program.mesh):
            return _mean(
                [self._similarity(backbone, indexer, self.program.place(b)) for b in batches]
            )

    def _loss_of(
        self, backbone: Params, indexer: Params, batch: Batch, *, sparse: bool
    ) -> jax.Array:
        logits, _ = self.program.logits(backbone, indexer, batch, sparse=sparse)
        return next_token_loss(logits, batch.targets)

    def _tokens_of(
        self, backbone: Params, indexer: Params, batch: Batch, *, keys: Keys
    ) -> jax.Array:
        indices = None
        if keys == "recency":
            visible = _visible(batch, jnp.arange(batch.inputs.shape[1]))
            indices = recency_selection(self.program.config.model.attention, *visible)
        sparse = keys != "dense"
        logits, _ = self.program.logits(backbone, indexer, batch, sparse=sparse, indices=indices)
        return token_losses(logits, batch.targets)

    def _selection_of(
        self, backbone: Params, indexer: Params, key: jax.Array, batch: Batch
    ) -> dict[str, Float[Array, "..."]]:
        config = self.program.config.model.attention
        _, layers = self.program.logits(backbone, indexer, batch, sparse=False)
        length = batch.inputs.shape[1]
        queries = jnp.arange(min(length, _QUERIES)) * length // min(length, _QUERIES)
        starts, ends = _visible(batch, queries)
        found: list[dict[str, jax.Array]] = []
        selecting: Any = None
        for layer in layers:
            selecting = layer.indexer if layer.indexer is not None else selecting
            found.append(recalls(config, layer, selecting, queries, key, starts, ends))
        stacked = jax.tree.map(lambda *x: jnp.stack(x), *found)
        return stacked | {"kl": jnp.stack([x.kl for x in layers if x.kl is not None])}

    def _similarity_of(
        self, backbone: Params, indexer: Params, batch: Batch
    ) -> dict[str, Float[Array, "layers"]]:
        config = self.program.config.model.attention
        _, layers = self.program.logits(backbone, indexer, batch, sparse=False)
        queries = jnp.arange(batch.inputs.shape[1])[-_QUERIES:]
        found = [
            similarity(config, layer.indexer, queries, *_visible(batch, queries))
            for layer in layers
            if layer.indexer is not None
        ]
        return jax.tree.map(lambda *x: jnp.stack(x), *found)


def _visible(batch: Batch, queries: Array) -> tuple[Array, Array]:
    """Returns the first token of each query's document, and one past its own token, [B, T]."""
    ends = jnp.broadcast_to(queries.astype(jnp.int32) + 1, (len(batch.inputs), len(queries)))
    if batch.segment_ids is None:
        return jnp.zeros_like(ends), ends
    return document_starts(batch.segment_ids)[:, queries], ends


def _mean(results: list[dict[str, jax.Array]]) -> dict[str, np.ndarray]:
    return {k: np.mean([np.asarray(r[k]) for r in results], axis=0) for k in results[0]}
