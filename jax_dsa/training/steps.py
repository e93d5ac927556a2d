"""The state of a run and the one step that each stage repeats."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jax_dsa.core.typing import Array, Float, Int
from jax_dsa.nn import DecoderLM
from jax_dsa.nn.stripes import striped
from jax_dsa.training.data import RunError
from jax_dsa.training.losses import INDEXER, indexer_loss, next_token_loss
from jax_dsa.training.mesh import BATCH, annotate, fitted, make_mesh, shardings
from jax_dsa.training.remat import remat_policy

if TYPE_CHECKING:
    from collections.abc import Callable

    from jax.sharding import Mesh

    from jax_dsa.nn import AttentionAux
    from jax_dsa.training.config import TrainConfig

Params = Any  # a tree of nnx variables


class Batch(NamedTuple):
    """Sequences on the mesh's devices."""

    inputs: Int[Array, "B T"]
    targets: Int[Array, "B T"]
    """The token that follows each of the inputs."""
    segment_ids: Int[Array, "B T"] | None
    """The inputs' documents, or None if a sequence counts as one."""


class Learner(NamedTuple):
    """Parameters and their optimiser's state."""

    params: Params
    opt: Any


class Rates(NamedTuple):
    """The learning rates of a step."""

    backbone: Any
    indexer: Any


class TrainState(NamedTuple):
    """All that a checkpoint has to hold for a run to go on as if it had not stopped."""

    step: Int[Array, ""]
    """Steps done, which is also the number of the next batch."""
    rng: Array
    """Key of the run's random draws; each use folds the step in."""
    backbone: Learner
    indexer: Learner
    control: Learner
    """What sparse training is compared with: a copy of the backbone, made at the first sparse step,
    that goes on with dense attention on the same batches. It means nothing before that step.
    """


class Program:
    """The pure functions of one run: its first state, and the step of each stage.

    They run on `mesh`, by default one device; see `jax_dsa.training.mesh`.
    """

    def __init__(self, config: TrainConfig, mesh: Mesh | None = None) -> None:
        self.config = config
        self.mesh = make_mesh({"data": 1}) if mesh is None else mesh
        self._check_sizes()
        self._stripes = self.mesh.shape["context"]  # so that these devices have equal causal work
        self._graph: Any = nnx.graphdef(nnx.eval_shape(lambda: self._first_model(nnx.Rngs(0))))
        self._indexers = config.model.layers.count("full")
        self._optimizer = _optimizer(config)
        self._backbone_rate = _schedule(config, config.learning_rate, config.dense_steps)
        self._indexer_rate = _schedule(config, config.indexer_learning_rate, config.warmup_steps)
        places = shardings(jax.eval_shape(self._first_state), self.mesh)
        whole = places.step
        self._init = jax.jit(self._first_state, out_shardings=places)
        self._dense = jax.jit(
            self._dense_update, donate_argnums=0, out_shardings=(places.backbone, whole)
        )
        self._warmup = jax.jit(
            self._warmup_update, donate_argnums=0, out_shardings=(places.indexer, whole, whole)
        )
        self._sparse = jax.jit(
            self._sparse_update,
            donate_argnums=(0, 1),
            out_shardings=(places.backbone, places.indexer, whole, whole),
        )

    def init(self) -> TrainState:
        """The state before the first step."""
        with jax.set_mesh(self.mesh):
            return self._init()

    def place(self, tokens: np.ndarray, stripes: int = 1) -> Batch:
        """A batch [B, seq_len + 1] of tokens on the devices. Each process needs only the rows that
        its devices hold.
        """
        sharding = fitted(self.mesh, BATCH, tokens[:, 1:].shape)

        def put(x: np.ndarray) -> jax.Array:
            x = striped(x, stripes)
            return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

        inputs, segment_ids = tokens[:, :-1], None
        if self.config.packed:
            segment_ids = put(np.cumsum(inputs == self.config.bos, axis=1, dtype=np.int32))
        return Batch(put(inputs), put(tokens[:, 1:]), segment_ids)

    def local_rows(self) -> set[int]:
        """The rows of a batch that devices of this process hold."""
        shape = self.config.batch_size, self.config.seq_len
        indices = fitted(self.mesh, BATCH, shape).addressable_devices_indices_map(shape).values()
        return {row for index in indices if index for row in range(shape[0])[index[0]]}

    def step(self, state: TrainState, tokens: np.ndarray) -> tuple[TrainState, dict[str, Array]]:
        """The state after one more batch [B, seq_len + 1] of tokens, and the batch's losses.

        The given state's arrays are given up. "lm_loss" is always there, "kl" (mean of the
        indexers) once the indexers learn, "control_loss" in the sparse stage.
        """
        backbone, indexer, control = state.backbone, state.indexer, state.control
        step = int(state.step)
        stage = self.config.stage(step)
        batch = self.place(tokens, self._stripes)
        rates = self._rates(step)
        with jax.set_mesh(self.mesh):
            if stage == "dense":
                backbone, lm = self._dense(backbone, indexer.params, batch, rates)
                losses = {"lm_loss": lm}
            elif stage == "warmup":
                indexer, lm, kl = self._warmup(indexer, backbone.params, batch, rates)
                losses = {"lm_loss": lm, "kl": kl}
            else:
                if step == self.config.sparse_start:
                    control = _copy(backbone)
                control, control_loss = self._dense(control, indexer.params, batch, rates)
                backbone, indexer, lm, kl = self._sparse(backbone, indexer, batch, rates)
                losses = {"lm_loss": lm, "kl": kl, "control_loss": control_loss}
            return TrainState(state.step + 1, state.rng, backbone, indexer, control), losses

    def logits(
        self,
        backbone: Params,
        indexer: Params,
        batch: Batch,
        *,
        sparse: bool,
        stripes: int = 1,
        remat: str = "none",
        indices: Int[Array, "B T K"] | None = None,
    ) -> tuple[Float[Array, "B T V"], list[AttentionAux]]:
        """What the model with these parameters makes of a batch; `indices` are a selection for all
        layers in place of their own.
        """
        hidden = (*batch.inputs.shape, self.config.model.attention.model_dim)
        return self.model(backbone, indexer)(
            batch.inputs,
            indices=None if indices is None else [indices] * self.config.model.num_layers,
            segment_ids=batch.segment_ids,
            stripes=stripes,
            sparse=sparse,
            remat_policy=remat_policy(remat),
            activation_sharding=fitted(self.mesh, BATCH, hidden),
        )

    def _rates(self, step: int) -> Rates:
        """Operands, not constants: a run of other lengths is the same programs."""
        c = self.config
        backbone = step if step < c.dense_steps else step - c.warmup_steps
        count = (self._backbone_rate, backbone), (self._indexer_rate, step - c.dense_steps)
        return Rates(*(np.float32(rate(max(0, n))) for rate, n in count))

    def model(self, backbone: Params, indexer: Params) -> DecoderLM:
        """The model with these parameters."""
        return nnx.merge(self._graph, indexer, backbone)

    def _losses(
        self, backbone: Params, indexer: Params, batch: Batch, sparse: bool
    ) -> tuple[jax.Array, jax.Array]:
        logits, layers = self.logits(
            backbone,
            indexer,
            batch,
            sparse=sparse,
            stripes=self._stripes,
            remat=self.config.remat,
        )
        return next_token_loss(logits, batch.targets), indexer_loss(layers)

    def _dense_update(
        self, backbone: Learner, indexer: Params, batch: Batch, rates: Rates
    ) -> tuple[Learner, jax.Array]:
        def graded(part: Batch) -> tuple[jax.Array, Params]:
            return jax.value_and_grad(lambda p: self._losses(p, indexer, part, False)[0])(
                backbone.params
            )

        lm, grads = self._mean(graded, batch)
        return _update(self._optimizer, backbone, grads, rates.backbone), lm

    def _warmup_update(
        self, indexer: Learner, backbone: Params, batch: Batch, rates: Rates
    ) -> tuple[Learner, jax.Array, jax.Array]:
        def loss(params: Params, part: Batch) -> tuple[jax.Array, jax.Array]:
            lm, kl = self._losses(backbone, params, part, False)
            return kl, lm

        graded = jax.value_and_grad(loss, has_aux=True)
        (kl, lm), grads = self._mean(lambda part: graded(indexer.params, part), batch)
        indexer = _update(self._optimizer, indexer, grads, rates.indexer)
        return indexer, lm, kl / self._indexers

    def _sparse_update(
        self, backbone: Learner, indexer: Learner, batch: Batch, rates: Rates
    ) -> tuple[Learner, Learner, jax.Array, jax.Array]:
        def loss(
            backbone: Params, indexer: Params, part: Batch
        ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
            lm, kl = self._losses(backbone, indexer, part, True)
            return lm + kl, (lm, kl)

        # One backward pass for both losses: their gradients do not mix, nor do the norms that each
        # optimiser clips by.
        graded = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
        (_, (lm, kl)), grads = self._mean(
            lambda part: graded(backbone.params, indexer.params, part), batch
        )
        backbone = _update(self._optimizer, backbone, grads[0], rates.backbone)
        indexer = _update(self._optimizer, indexer, grads[1], rates.indexer)
        return backbone, indexer, lm, kl / self._indexers

    def _mean(self, fun: Callable[[Batch], Any], batch: Batch) -> Any:
        """The mean of `fun` over the parts of a batch, one after the other."""
        parts = self.config.accumulate
        if parts == 1:
            return fun(batch)
        # A part takes every so many rows: some from each device.
        cut = jax.tree.map(lambda x: x.reshape(-1, parts, x.shape[1]).swapaxes(0, 1), batch)
        shapes = jax.eval_shape(fun, jax.tree.map(lambda x: x[0], cut))
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        total, _ = jax.lax.scan(
            lambda total, part: (jax.tree.map(jnp.add, total, fun(part)), None), zeros, cut
        )
        return jax.tree.map(lambda x: x / parts, total)

    def _first_model(self, rngs: nnx.Rngs) -> DecoderLM:
        model = DecoderLM(self.config.model, rngs=rngs)
        annotate(model)
        return model

    def _first_state(self) -> TrainState:
        init_key, run_key = jax.random.split(jax.random.key(self.config.seed))
        indexer, backbone = nnx.state(self._first_model(nnx.Rngs(init_key)), INDEXER, ...)
        learner = Learner(backbone, self._optimizer.init(backbone))
        return TrainState(
            step=jnp.zeros((), jnp.int32),
            rng=jax.random.key_data(run_key),
            backbone=learner,
            indexer=Learner(indexer, self._optimizer.init(indexer)),
            control=_copy(learner),
        )

    def _check_sizes(self) -> None:
        sizes, c = self.mesh.shape, self.config
        rows = sizes["data"] * sizes["fsdp"] * c.accumulate
        for name, size, parts, axes in (
            ("batch_size", c.batch_size, rows, "data * fsdp * accumulate"),
            ("seq_len", c.seq_len, sizes["context"], "context"),
            ("num_heads", c.model.attention.num_heads, sizes["tensor"], "tensor"),
        ):
            if size % parts:
                raise RunError(f"Program: {name} is {size}, want a multiple of {axes} = {parts}")


def _copy(learner: Learner) -> Learner:
    return jax.tree.map(jnp.copy, learner)


def _schedule(config: TrainConfig, peak: float, flat_steps: int) -> optax.Schedule:
    """A learning rate that rises, stays, and falls along a cosine during the sparse stage."""
    ramp = min(config.ramp_steps, flat_steps)
    return optax.join_schedules(
        [
            optax.linear_schedule(0.0, peak, max(1, ramp)),
            optax.cosine_decay_schedule(
                peak, max(1, config.sparse_steps), config.final_learning_rate
            ),
        ],
        [flat_steps],
    )


def _optimizer(config: TrainConfig) -> optax.GradientTransformation:
    """AdamW at a learning rate of 1: `_update` has the step's."""
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.adamw(
            1.0,
            b2=0.98,
            weight_decay=config.weight_decay,
            mask=lambda params: jax.tree.map(lambda x: x.ndim > 1, params),
        ),
    )


def _update(
    optimizer: optax.GradientTransformation, learner: Learner, grads: Params, rate: Any
) -> Learner:
    updates, opt = optimizer.update(grads, learner.opt, learner.params)
    updates = jax.tree.map(lambda x: rate * x, updates)
    return Learner(optax.apply_updates(learner.params, updates), opt)
