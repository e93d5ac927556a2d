"""The losses, gradients and updates of each training stage."""

from __future__ import annotations

import copy
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support.training import ATTENTION, CONFIG, STAGES, all_equal, leaves, shared_program, tokens

from jax_dsa import nn, training
from jax_dsa.core import op
from jax_dsa.training import rates
from jax_dsa.training.data import VOCAB
from jax_dsa.training.steps import Batch, Program


@pytest.mark.parametrize("sparse", [True, False])
def test_each_loss_has_gradients_only_for_its_own_parameters(sparse):
    program = shared_program(CONFIG)
    state = program.init()

    @jax.jit
    def gradients(params, batch):
        losses, pull = jax.vjp(lambda p: program._losses(*p, batch, sparse), params)
        one, zero = jnp.ones_like(losses[0]), jnp.zeros_like(losses[0])
        return pull((one, zero))[0], pull((zero, one))[0]

    batch = program.place(tokens())
    lm, kl = gradients((state.backbone.params, state.indexer.params), batch)
    for (backbone, indexer), (own, other) in ((lm, (0, 1)), (kl, (1, 0))):
        grads = backbone, indexer
        assert all(np.any(g != 0) for g in leaves(grads[own]))
        assert all(np.all(g == 0) for g in leaves(grads[other]))


def test_parameters_split_into_indexers_and_backbone():
    model = nn.DecoderLM(CONFIG.model, rngs=nnx.Rngs(0))
    _, indexer, backbone = nnx.split(model, training.INDEXER, ...)
    assert all("indexer" in path for path, _ in nnx.to_flat_state(indexer))
    assert not any("indexer" in path for path, _ in nnx.to_flat_state(backbone))
    assert len(leaves(indexer)) == len(leaves(nnx.state(model.blocks[0].attention.indexer)))


def test_each_stage_changes_only_its_own_parameters():
    program = shared_program(CONFIG)
    for stage, step in STAGES.items():
        before = program.init()._replace(step=jnp.asarray(step, jnp.int32))
        old = jax.tree.map(np.asarray, before)
        after, losses = program.step(before, tokens())
        assert int(after.step) == step + 1
        assert all_equal(after.backbone, old.backbone) == (stage == "warmup")
        assert all_equal(after.indexer, old.indexer) == (stage == "dense")
        assert all_equal(after.control, old.control) == (stage != "sparse")
        assert {"dense": 1, "warmup": 2, "sparse": 3}[stage] == len(losses)


class AdamW:
    """AdamW in NumPy on a list of arrays, with the learning rates of a run."""

    def __init__(self, params, config, peak, flat_steps):
        self.params = leaves(params)
        self.moments = [[np.zeros_like(p)] * 2 for p in self.params]
        self.config, self.peak, self.flat_steps, self.count = config, peak, flat_steps, 0

    def rate(self):
        c, count, flat = self.config, self.count, self.flat_steps
        if count < flat:
            return self.peak * min(1, count / min(c.ramp_steps, flat))
        fallen = (1 - np.cos(np.pi * min(1, (count - flat) / c.sparse_steps))) / 2
        return self.peak * (1 - (1 - c.final_learning_rate) * fallen)

    def update(self, grads):
        grads, c, rate = leaves(grads), self.config, self.rate()
        self.count += 1
        norm = np.sqrt(sum((g.astype(np.float64) ** 2).sum() for g in grads))
        assert norm > 2 * c.clip_norm  # The gradients have to be clipped.
        for i, (p, g) in enumerate(zip(self.params, grads, strict=True)):
            g = g * (c.clip_norm / norm)
            first, second = self.moments[i]
            first, second = 0.9 * first + 0.1 * g, 0.98 * second + 0.02 * g * g
            self.moments[i] = [first, second]
            step = first / (1 - 0.9**self.count)
            step = step / (np.sqrt(second / (1 - 0.98**self.count)) + 1e-8)
            decay = c.weight_decay * p if p.ndim > 1 else 0
            self.params[i] = p - rate * (step + decay)


def test_a_run_matches_updates_in_numpy():
    """Compares losses and parameters over three steps of each stage."""
    config = dataclasses.replace(
        CONFIG,
        model=dataclasses.replace(CONFIG.model, num_layers=2),
        dense_steps=3,
        warmup_steps=3,
        sparse_steps=3,
        ramp_steps=2,
        clip_norm=0.01,
    )
    program = shared_program(config)
    state = program.init()
    backbone = control = AdamW(state.backbone.params, config, config.learning_rate, 3)
    indexer = AdamW(state.indexer.params, config, config.indexer_learning_rate, 3)
    trees = [jax.tree.structure(x) for x in (state.backbone.params, state.indexer.params)]

    @functools.partial(jax.jit, static_argnums=3)
    def differentiated(backbone, indexer, tokens, sparse):
        """Returns both losses, and the gradients of the parameters that each one trains."""

        def losses(*params):
            model = program.model(*map(jax.tree.unflatten, trees, params))
            logits, layers = model(tokens[:, :-1], sparse=sparse)
            loss = jax.nn.logsumexp(logits, -1)
            loss -= jnp.take_along_axis(logits, tokens[:, 1:, None], -1)[..., 0]
            return loss.mean(), layers[0].kl + layers[1].kl

        (lm, kl), pull = jax.vjp(losses, backbone, indexer)
        one, zero = jnp.ones(()), jnp.zeros(())
        return (lm, kl / 2), pull((one, zero))[0], pull((zero, one))[1]

    for step in range(9):
        stage, batch = config.stage(step), tokens(step)
        if step == 6:
            control = copy.deepcopy(backbone)
        sparse, shared = stage == "sparse", indexer.params[:]
        (lm, kl), *grads = differentiated(backbone.params, shared, batch, sparse)
        want = {"lm_loss": lm}
        if stage != "warmup":
            backbone.update(grads[0])
        if stage != "dense":
            want["kl"] = kl
            indexer.update(grads[1])
        if stage == "sparse":
            (want["control_loss"], _), grads, _ = differentiated(
                control.params, shared, batch, False
            )
            control.update(grads)
        old = [leaves(x.params) for x in (state.backbone, state.indexer, state.control)]
        state, losses = program.step(state, batch)
        assert losses.keys() == want.keys()
        for name in want:
            np.testing.assert_allclose(losses[name], want[name], rtol=1e-4, err_msg=name)
        new = state.backbone, state.indexer, state.control
        hands = (backbone, indexer) if step < 6 else (backbone, indexer, control)
        for learner, hand, previous in zip(new, hands, old, strict=False):
            for got, exact, was in zip(leaves(learner.params), hand.params, previous, strict=True):
                # A gradient may be nothing but rounding errors, so the mean is compared.
                off, moved = np.abs(got - exact).mean(), np.abs(exact - was).mean()
                assert off <= 0.01 * moved + 1e-7, (step, got.shape)


def test_warmup_lowers_the_kl():
    config = dataclasses.replace(CONFIG, dense_steps=0, warmup_steps=60, indexer_learning_rate=1e-2)
    program = shared_program(config)
    state, kls = program.init(), []
    for _ in range(60):
        state, losses = program.step(state, tokens())
        kls.append(float(losses["kl"]))
    assert kls[-1] < kls[0] / 2


def shapes_in(jaxpr):
    """Yields the shapes of everything that a program computes, at any depth."""
    for equation in jaxpr.eqns:
        yield from (v.aval.shape for v in equation.outvars if hasattr(v.aval, "shape"))
        for value in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from shapes_in(inner)


@pytest.mark.parametrize("preset", ["h200", "v32"])
def test_large_presets_have_no_array_of_queries_by_keys(preset):
    config = training.PRESETS[preset]()
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, num_layers=1))
    program = Program(config)
    state = jax.eval_shape(program._initial_state)
    length = config.seq_len
    row = jax.ShapeDtypeStruct((config.batch_size, length), jnp.int32)
    batch = Batch(inputs=row, targets=row, segment_ids=row if config.packed else None)
    updates = (
        (program._dense, (state.backbone, state.indexer.params)),
        (program._warmup, (state.indexer, state.backbone.params)),
        (program._sparse, (state.backbone, state.indexer)),
    )
    rates = program._rates(0)
    for update, learners in updates:
        for shape in shapes_in(jax.make_jaxpr(update)(*learners, batch, rates).jaxpr):
            assert sum(n >= length for n in shape) <= 1, shape


def test_kernels_support_the_large_preset(monkeypatch):
    """Asks every operator of every stage, forward and backward."""
    config = training.PRESETS["h200"]()
    # This batch size is used nowhere else, so that JAX has not traced the operators before.
    config = dataclasses.replace(
        config, batch_size=3, model=dataclasses.replace(config.model, num_layers=1)
    )
    found = {}

    def record(self, call, options, groups, *described):
        found[self.name] = self.kernel.unsupported_reason(options, *groups)
        return implementation(self, call, options, groups, *described)

    implementation = op._implementation
    monkeypatch.setattr(op, "_implementation", record)
    program = Program(config)
    state = jax.eval_shape(program._initial_state)
    tokens = jax.ShapeDtypeStruct((config.batch_size, config.seq_len), jnp.int32)
    batch = Batch(tokens, tokens, None)
    stages = {
        "dense": (program._dense, (state.backbone, state.indexer.params)),
        "warmup": (program._warmup, (state.indexer, state.backbone.params)),
        "sparse": (program._sparse, (state.backbone, state.indexer)),
    }
    for update, learners in stages.values():
        jax.eval_shape(update, *learners, batch, program._rates(0))
    assert not any(found.values()), found
    for name in ("masked_attention", "sparse_mla", "indexer_topk", "indexer_kl_loss"):
        assert {f"{name}_fwd", f"{name}_bwd"} <= found.keys()
    assert {"dense_indexer_kl_loss_fwd", "attn_dist_fwd"} <= found.keys()


def test_flops_match_a_count_by_hand():
    """Two layers, one of them with an indexer; sequences of 24 tokens with 4 selected keys."""
    model = dataclasses.replace(CONFIG.model, num_layers=2, indexer_types=("full", "shared"))
    found = rates.flops_per_token(dataclasses.replace(CONFIG, model=model))
    attention = 16 * 12 + 12 * 2 * 10 + 16 * 12 + 2 * 8 * 6 + 2 * 8 * 6 + 2 * 6 * 16
    matrices = 2 * (2 * (attention + 3 * 16 * 16) + 16 * VOCAB)
    index = 2 * (12 * 2 * 8 + 16 * 8 + 16 * 2)
    seen, selected = 25 / 2, (1 + 2 + 3 + 21 * 4) / 24
    heads, score = 2 * 2 * 12, 2 * 2 * 8  # per latent key, per index key
    dense = 3 * (matrices + 2 * 2 * 2 * (10 + 6) * seen)
    assert found["dense"] == pytest.approx(dense)
    warmup = dense / 3 + 2 * index + (heads + 3 * score) * seen
    assert found["warmup"] == pytest.approx(warmup)
    sparse = 3 * (matrices + 2 * 2 * 2 * (12 + 8) * selected) + 2 * index
    sparse += score * seen + (heads + 2 * score) * selected
    assert found["sparse"] == pytest.approx(dense + sparse)


def test_flops_of_pools_match_a_count_by_hand():
    """One layer that selects a pool of 4 tokens; sequences of 10 tokens."""
    attention = dataclasses.replace(ATTENTION, rope_dim=0, index_rope_dim=0, index_pool=4)
    config = dataclasses.replace(
        CONFIG, seq_len=10, model=dataclasses.replace(CONFIG.model, attention=attention)
    )
    found = rates.flops_per_token(config)
    projections = 16 * 12 + 12 * 2 * 6 + 16 * 8 + 2 * 8 * 6 + 2 * 8 * 6 + 2 * 6 * 16
    matrices = 2 * (projections + 3 * 16 * 16 + 16 * VOCAB)
    index = 2 * (12 * 2 * 8 + 16 * 8 + 16 * 2 + 16 * 8 + 4 * 8)
    # The means over queries, of keys, pools, keys in the selected pool, and keys after all pools.
    keys, pools = 55 / 10, (4 * 1 + 3 * 2) / 10
    chosen, tail = 4 * 7 / 10, keys - 4 * pools
    heads, score = 2 * 2 * 8, 2 * 2 * 8  # per latent key, per pool
    dense = 3 * (matrices + 2 * 2 * (6 + 6) * keys)
    assert found["dense"] == pytest.approx(dense)
    warmup = dense / 3 + 2 * index + heads * keys + 3 * score * pools
    assert found["warmup"] == pytest.approx(warmup)
    sparse = 3 * (matrices + 2 * 2 * (8 + 8) * (chosen + tail)) + 2 * index
    sparse += score * pools + heads * chosen + 2 * score * chosen / 4
    assert found["sparse"] == pytest.approx(dense + sparse)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("learning_rate", -1e-3),
        ("indexer_learning_rate", float("nan")),
        ("weight_decay", -0.1),
        ("final_learning_rate", -0.1),
        ("clip_norm", 0.0),
        ("clip_norm", -1.0),
        ("remat", "selections"),
        ("remat", None),
    ],
)
def test_invalid_values_are_rejected(name, value):
    """A negative learning rate would increase the loss."""
    with pytest.raises(ValueError, match=f"TrainConfig: argument '{name}' is {value!r}"):
        dataclasses.replace(CONFIG, **{name: value})
