"""The state of a run, and the training step of each stage."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jax_dsa.core.export import exportable
from jax_dsa.core.typing import Array, Float, Int
from jax_dsa.nn import AttentionConfig, DecoderLM
from jax_dsa.nn.stripes import striped
from jax_dsa.training.data import RunError
from jax_dsa.training.losses import INDEXER, indexer_loss, next_token_loss
from jax_dsa.training.mesh import (
    BATCH,
    annotate,
    axis_sizes,
    fitted,
    make_mesh,
    shardings,
    with_auto_axes,
)
from jax_dsa.training.remat import remat_policy

if TYPE_CHECKING:
    from collections.abc import Callable

    from jax.sharding import Mesh

    from jax_dsa.nn import AttentionAux, GroupedAux
    from jax_dsa.training.config import TrainConfig

Params = Any  # a tree of nnx variables


@exportable
class Batch(NamedTuple):
    """A batch of sequences on the devices of the mesh.

    Attributes:
        inputs: Token numbers, int32.
        targets: The token that follows each input token.
        segment_ids: The document of each input token, or None if each sequence counts as one
            document.
    """

    inputs: Int[Array, "B T"]
    targets: Int[Array, "B T"]
    segment_ids: Int[Array, "B T"] | None


@exportable
class Learner(NamedTuple):
    """Parameters and the state of their optimizer.

    Attributes:
        params: The parameters, a tree of NNX variables.
        opt: The optimizer's state, as Optax returns it.
    """

    params: Params
    opt: Any


@exportable
class Rates(NamedTuple):
    """The learning rates of a step.

    Attributes:
        backbone: The backbone's learning rate.
        indexer: The indexers' learning rate.
    """

    backbone: Any
    indexer: Any


@exportable
class TrainState(NamedTuple):
    """Everything that a run needs to resume as if it had not stopped.

    Attributes:
        step: Number of completed steps, which is also the number of the next batch.
        rng: Key of the run's random draws. Each use folds in the step.
        backbone: The model without its indexers, and its optimizer.
        indexer: The indexers of all layers, and their optimizer.
        control: The model that sparse training is compared with. It is a copy of the backbone from
            the first sparse step, and continues with dense attention on the same batches. Before
            that step it has no meaning.
    """

    step: Int[Array, ""]
    rng: Array
    backbone: Learner
    indexer: Learner
    control: Learner


class Program:
    """The pure functions of one run: its initial state, and the step of each stage.

    Args:
        config: The run's configuration.
        mesh: The mesh to run on, with some of the axes of `jax_dsa.training.mesh`. They may have
            any type, and the compiler shards over all of them. Default: one device.

    Raises:
        RunError: If the mesh has another axis, or does not divide the batch, sequence or heads.
    """

    def __init__(self, config: TrainConfig, mesh: Mesh | None = None) -> None:
        self.config = config
        self.mesh = make_mesh({"data": 1}) if mesh is None else with_auto_axes(mesh)
        self._check_sizes()
        # Striped sequences give all devices of the context axis the same amount of causal work.
        # Layers with grouped heads take none.
        stripes = self.mesh.shape.get("context", 1)
        self._stripes = stripes if isinstance(config.model.attention, AttentionConfig) else 1
        self._graph: Any = nnx.graphdef(nnx.eval_shape(lambda: self._initial_model(nnx.Rngs(0))))
        self._indexers = config.model.layers.count("full")
        self._optimizer = _optimizer(config)
        self._backbone_rate = _schedule(config, config.learning_rate, config.dense_steps)
        self._indexer_rate = _schedule(config, config.indexer_learning_rate, config.warmup_steps)
        places = shardings(jax.eval_shape(self._initial_state), self.mesh)
        replicated = places.step
        self._init = jax.jit(self._initial_state, out_shardings=places)
        self._dense = jax.jit(
            self._dense_update, donate_argnums=0, out_shardings=(places.backbone, replicated)
        )
        self._warmup = jax.jit(
            self._warmup_update,
            donate_argnums=0,
            out_shardings=(places.indexer, replicated, replicated),
        )
        self._sparse = jax.jit(
            self._sparse_update,
            donate_argnums=(0, 1),
            out_shardings=(places.backbone, places.indexer, replicated, replicated),
        )

    def init(self) -> TrainState:
        """Returns the state before the first step."""
        with jax.set_mesh(self.mesh):
            return self._init()

    def place(self, tokens: np.ndarray, stripes: int = 1) -> Batch:
        """Puts a batch of tokens onto the devices.

        Args:
            tokens: Tokens, int32 [B, seq_len + 1]. A process needs only the rows that its devices
                hold.
            stripes: Number of stripes that the sequences are stored in; see `jax_dsa.nn.stripes`.
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
        """Returns the rows of a batch that devices of this process hold."""
        shape = self.config.batch_size, self.config.seq_len
        indices = fitted(self.mesh, BATCH, shape).addressable_devices_indices_map(shape).values()
        return {row for index in indices if index for row in range(shape[0])[index[0]]}

    def step(self, state: TrainState, tokens: np.ndarray) -> tuple[TrainState, dict[str, Array]]:
        """Runs one step of the stage that the state is in.

        Args:
            state: The state, whose arrays are donated.
            tokens: A batch of tokens, int32 [B, seq_len + 1].

        Returns:
            The state after the step, and the losses of the batch: "lm_loss" in all stages, "kl"
            (the mean over the indexers) in the warm-up and the sparse stage, and "control_loss" in
            the sparse stage.
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
        indices: Int[Array, "B T K"] | Int[Array, "B T G K"] | None = None,
    ) -> tuple[Float[Array, "B T V"], list[AttentionAux | GroupedAux]]:
        """Runs the model with these parameters.

        Args:
            backbone: Parameters of the backbone.
            indexer: Parameters of the indexers.
            batch: The batch.
            sparse: Whether attention is sparse; otherwise it is dense.
            stripes: Number of stripes that the batch is stored in.
            remat: Name of the rematerialisation policy.
            indices: A selection that all layers use instead of their own.

        Returns:
            The logits, and what each layer's attention returned.
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
        """Returns the learning rates of a step.

        They are operands of the compiled programs, not constants, so that runs with other numbers
        of steps use the same programs.
        """
        c = self.config
        backbone = step if step < c.dense_steps else step - c.warmup_steps
        count = (self._backbone_rate, backbone), (self._indexer_rate, step - c.dense_steps)
        return Rates(*(np.float32(rate(max(0, n))) for rate, n in count))

    def model(self, backbone: Params, indexer: Params) -> DecoderLM:
        """Returns the model with these parameters."""
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
        def loss_and_grads(microbatch: Batch) -> tuple[jax.Array, Params]:
            return jax.value_and_grad(lambda p: self._losses(p, indexer, microbatch, False)[0])(
                backbone.params
            )

        lm, grads = self._mean(loss_and_grads, batch)
        return _update(self._optimizer, backbone, grads, rates.backbone), lm

    def _warmup_update(
        self, indexer: Learner, backbone: Params, batch: Batch, rates: Rates
    ) -> tuple[Learner, jax.Array, jax.Array]:
        def loss(params: Params, microbatch: Batch) -> tuple[jax.Array, jax.Array]:
            lm, kl = self._losses(backbone, params, microbatch, False)
            return kl, lm

        loss_and_grads = jax.value_and_grad(loss, has_aux=True)
        (kl, lm), grads = self._mean(
            lambda microbatch: loss_and_grads(indexer.params, microbatch), batch
        )
        indexer = _update(self._optimizer, indexer, grads, rates.indexer)
        return indexer, lm, kl / self._indexers

    def _sparse_update(
        self, backbone: Learner, indexer: Learner, batch: Batch, rates: Rates
    ) -> tuple[Learner, Learner, jax.Array, jax.Array]:
        def loss(
            backbone: Params, indexer: Params, microbatch: Batch
        ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
            lm, kl = self._losses(backbone, indexer, microbatch, True)
            return lm + kl, (lm, kl)

        # One backward pass serves both losses, because no parameter has a gradient of both. Each
        # optimizer clips its own gradients by their own norm.
        loss_and_grads = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
        (_, (lm, kl)), grads = self._mean(
            lambda microbatch: loss_and_grads(backbone.params, indexer.params, microbatch), batch
        )
        backbone = _update(self._optimizer, backbone, grads[0], rates.backbone)
        indexer = _update(self._optimizer, indexer, grads[1], rates.indexer)
        return backbone, indexer, lm, kl / self._indexers

    def _mean(self, fun: Callable[[Batch], Any], batch: Batch) -> Any:
        """Returns the mean of `fun` over the microbatches, which run one after the other."""
        count = self.config.accumulate
        if count == 1:
            return fun(batch)
        # Microbatch i takes the rows i, i + count, ..., so that it has rows of every device.
        stacked = jax.tree.map(lambda x: x.reshape(-1, count, x.shape[1]).swapaxes(0, 1), batch)
        shapes = jax.eval_shape(fun, jax.tree.map(lambda x: x[0], stacked))
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        total, _ = jax.lax.scan(
            lambda total, microbatch: (jax.tree.map(jnp.add, total, fun(microbatch)), None),
            zeros,
            stacked,
        )
        return jax.tree.map(lambda x: x / count, total)

    def _initial_model(self, rngs: nnx.Rngs) -> DecoderLM:
        model = DecoderLM(self.config.model, rngs=rngs)
        annotate(model)
        return model

    def _initial_state(self) -> TrainState:
        init_key, run_key = jax.random.split(jax.random.key(self.config.seed))
        indexer, backbone = nnx.state(self._initial_model(nnx.Rngs(init_key)), INDEXER, ...)
        learner = Learner(backbone, self._optimizer.init(backbone))
        return TrainState(
            step=jnp.zeros((), jnp.int32),
            rng=jax.random.key_data(run_key),
            backbone=learner,
            indexer=Learner(indexer, self._optimizer.init(indexer)),
            control=_copy(learner),
        )

    def _check_sizes(self) -> None:
        sizes, c = axis_sizes("Program", self.mesh), self.config
        rows = sizes["data"] * sizes["fsdp"] * c.accumulate
        for name, size, divisor, axes in (
            ("batch_size", c.batch_size, rows, "data * fsdp * accumulate"),
            ("seq_len", c.seq_len, sizes["context"], "context"),
            ("num_heads", c.model.attention.num_heads, sizes["tensor"], "tensor"),
        ):
            if size % divisor:
                raise RunError(
                    f"Program: {name} is {size}, expected a multiple of {axes} = {divisor}"
                )


def _copy(learner: Learner) -> Learner:
    return jax.tree.map(jnp.copy, learner)


def _schedule(config: TrainConfig, peak: float, flat_steps: int) -> optax.Schedule:
    """Returns a learning rate that rises, stays, and decays by a cosine in the sparse stage."""
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
    """Returns AdamW with a learning rate of 1; `_update` multiplies by the step's rate."""
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
