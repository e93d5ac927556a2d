"""Training with selections of pools and of blocks: stages, recalls, meshes and packed documents."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.compare import assert_matches
from support.marks import slow
from support.training import (
    ATTENTIONS,
    CONFIG,
    STAGES,
    all_equal,
    corpus,
    leaves,
    shared_evaluator,
    shared_program,
    tokens,
)

from jax_dsa import training
from jax_dsa.training.data import Batches
from jax_dsa.training.mesh import make_mesh
from jax_dsa.training.selections import recency_selection
from jax_dsa.training.steps import Program

OTHERS = tuple(kind for kind in ATTENTIONS if kind != "keys")
kinds = pytest.mark.parametrize("kind", OTHERS)
one_kind = pytest.mark.parametrize("kind", [slow("pools"), slow("blocks"), "means"])


def config_of(kind, **changes):
    model = dataclasses.replace(CONFIG.model, attention=ATTENTIONS[kind])
    return dataclasses.replace(CONFIG, model=model, **changes)


@one_kind
def test_each_stage_trains_its_own_parameters(kind):
    program = shared_program(config_of(kind))
    for stage, step in STAGES.items():
        before = program.init()._replace(step=jnp.asarray(step, jnp.int32))
        old = jax.tree.map(np.asarray, before)
        after, losses = program.step(before, tokens())
        assert all(np.isfinite(x) for x in losses.values())
        assert all_equal(after.backbone, old.backbone) == (stage == "warmup")
        assert all_equal(after.indexer, old.indexer) == (stage == "dense")
        assert {"dense": 1, "warmup": 2, "sparse": 3}[stage] == len(losses)
        if stage != "dense":  # The optimizer's moments are those of a gradient.
            assert all(np.any(x) for x in leaves(after.indexer.opt))


@pytest.mark.parametrize("sparse", [True, slow(False)])
@one_kind
def test_each_loss_has_gradients_only_for_its_own_parameters(kind, sparse):
    program = shared_program(config_of(kind))
    state, batch = program.init(), program.place(tokens())

    @jax.jit
    def gradients(params):
        _, pull = jax.vjp(lambda p: program._losses(*p, batch, sparse), params)
        return pull((1.0, 0.0))[0], pull((0.0, 1.0))[0]

    lm, kl = gradients((state.backbone.params, state.indexer.params))
    assert all(np.any(g) for g in leaves(lm[0])) and not any(np.any(g) for g in leaves(lm[1]))
    assert all(np.any(g) for g in leaves(kl[1])) and not any(np.any(g) for g in leaves(kl[0]))


@pytest.mark.parametrize("packed", [False, slow(True)])
@kinds
def test_recalls(kind, packed):
    """Compares the recall of the latest keys with a count by hand, and all with the best one."""
    config = config_of(kind, packed=packed)
    attention, program = config.model.attention, shared_program(config)
    state = program.init()
    found = shared_evaluator(program).selection(state, [tokens()])
    assert all(found[name] <= found["best"] + 1e-6 for name in ("indexer", "random", "recency"))
    assert found["random"] > 0 and found["kl"] > 0

    batch = program.place(tokens())
    (aux,) = jax.jit(lambda *p: program.logits(*p, batch, sparse=False)[1])(
        state.backbone.params, state.indexer.params
    )
    q, k, lse = aux.q, aux.kv if kind == "pools" else aux.k, aux.lse
    (rows, length), groups = batch.inputs.shape, k.shape[2]
    size = attention.index_pool if kind == "pools" else attention.block_size
    ids = np.zeros((rows, length)) if batch.segment_ids is None else np.asarray(batch.segment_ids)
    held = []
    for b, t in np.ndindex(rows, length):
        start = int(np.flatnonzero(ids[b] == ids[b, t])[0])
        count = (t + 1 - start + (size - 1 if kind == "blocks" else 0)) // size
        slots = attention.selected * size + (size - 1 if kind != "blocks" else 0)
        if t + 1 - start <= slots:
            continue
        first = start + (count - attention.selected) * size
        for n in range(q.shape[2]):
            keys = k[b, :, n // (q.shape[2] // groups)]
            p = np.exp(attention.scale * np.asarray(keys @ q[b, t, n]) - lse[b, t, n])
            held.append(p[first : t + 1].sum())
    np.testing.assert_allclose(found["recency"], np.mean(held) if held else 0, rtol=1e-5)


@pytest.mark.parametrize("packed", [False, slow(True)])
@kinds
def test_similarity_of_neighbouring_selections(kind, packed):
    """Compares sets of the selections that the sparse model attends to."""
    config = config_of(kind, packed=packed)
    attention, program = config.model.attention, shared_program(config)
    state, batch = program.init(), program.place(tokens())
    found = shared_evaluator(program).similarity(state, [tokens()])
    (aux,) = jax.jit(lambda *p: program.logits(*p, batch, sparse=True)[1])(
        state.backbone.params, state.indexer.params
    )
    (rows, length) = batch.inputs.shape
    lists = np.asarray(aux.indices).reshape(rows, length, -1, aux.indices.shape[-1])
    size = attention.index_pool if kind == "pools" else attention.block_size
    ids = np.zeros((rows, length)) if batch.segment_ids is None else np.asarray(batch.segment_ids)
    kept, unions = [], []
    for b, t, g in np.ndindex(rows, length - 1, lists.shape[2]):
        start = int(np.flatnonzero(ids[b] == ids[b, t])[0])
        if (t + 1 - start + (size - 1 if kind == "blocks" else 0)) // size <= attention.selected:
            continue
        eight = [set(x[x >= 0]) for x in lists[b, t : t + 8, g]]
        if ids[b, t] == ids[b, t + 1]:
            kept.append(len(eight[1] & eight[0]) / len(eight[1]))
        if t % 8 == 0 and len(eight) == 8 and ids[b, t] == ids[b, t + 7]:
            unions.append(8 * len(set.union(*eight)) / sum(map(len, eight)))
    np.testing.assert_allclose(found["kept"], np.mean(kept), rtol=1e-5)
    np.testing.assert_allclose(found["union"], np.mean(unions), rtol=1e-5)


@kinds
def test_a_replayed_recency_selection_is_a_window(kind):
    """Tokens that are far behind do not change the loss of a model that sees the latest only."""
    program = shared_program(config_of(kind))
    state, batch = program.init(), tokens()
    changed = batch.copy()
    changed[:, 0] += 1
    losses = [
        shared_evaluator(program).token_losses(
            state.backbone.params, state.indexer.params, [x], "recency"
        )
        for x in (batch, changed)
    ]
    same = losses[0] == losses[1]
    # 4 keys of pools of 2 and a tail of 1; 2 blocks of 4 keys, with a tail of 3 for means.
    assert not same[:, 0].any() and same[:, {"pools": 6, "blocks": 8, "means": 12}[kind] :].all()


def test_recency_selections():
    ends = jnp.array([[10, 12]])
    starts = jnp.array([[2, 5]])
    latest = recency_selection(ATTENTIONS["blocks"], starts, ends)
    np.testing.assert_array_equal(latest, [[[[0, 1]] * 2, [[0, 1]] * 2]])
    latest = recency_selection(ATTENTIONS["means"], starts, ends)
    np.testing.assert_array_equal(latest, [[[0, 1], [-1, 0]]])
    latest = recency_selection(ATTENTIONS["pools"], starts, ends)
    np.testing.assert_array_equal(latest, [[[3, 4], [3, 4]]])


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"fsdp": 2, "context": 2}, {"tensor": 2, "data": 2}], ids=str)
@kinds
def test_a_step_on_a_mesh_matches_a_step_on_one_device(kind, sizes):
    config = config_of(kind, batch_size=4)
    batch = Batches(corpus().train, config.seq_len + 1, config.batch_size, 0)[0]
    programs = Program(config, make_mesh({"data": 1} | sizes)), Program(config)
    for stage, step in STAGES.items():
        (got, losses), (want, expected) = (
            p.step(p.init()._replace(step=jnp.asarray(step, jnp.int32)), batch) for p in programs
        )
        assert_matches(losses, expected, 1e-5, stage)
        for name in ("backbone", "indexer"):
            moments = (getattr(x, name).opt for x in (got, want))
            assert_matches(*moments, 1e-4, f"{stage} {name}", least=1e-3)


def test_a_run_trains_an_indexer():
    model = dataclasses.replace(
        CONFIG.model, attention=dataclasses.replace(ATTENTIONS["blocks"], indexer=None)
    )
    with pytest.raises(ValueError, match=r"TrainConfig: argument 'model.attention.indexer' is"):
        dataclasses.replace(CONFIG, model=model)


@pytest.mark.parametrize(("kind", "pool"), [("blocks", 1), ("means", 4)])
def test_flops_match_a_count_by_hand(kind, pool):
    """One layer; 24 tokens; 2 blocks of 4 keys; queries and keys of 4 and 2 heads of width 8."""
    heads = 4 * 8
    found = training.rates.flops_per_token(config_of(kind))
    gate = 16 * heads if kind == "means" else 0
    attention = 16 * heads + 2 * 16 * 16 + heads * 16 + gate
    matrices = 2 * (attention + 3 * 16 * 16 + 16 * CONFIG.model.vocab)
    index = 2 * (16 * 2 * 8 + 16 * 8)
    seen = 25 / 2
    scored = sum(t // pool * pool for t in range(1, 25)) / 24
    selected = sum(min(t // pool * pool, 8) for t in range(1, 25)) / 24
    attended = selected + seen - scored
    teacher, score = 2 * heads, 2 * 2 * 8 / pool
    dense = 3 * (matrices + 2 * 2 * heads * seen)
    assert found["dense"] == pytest.approx(dense)
    warmup = dense / 3 + 2 * index + teacher * seen + 3 * score * scored
    assert found["warmup"] == pytest.approx(warmup)
    sparse = 3 * (matrices + 2 * 2 * heads * attended) + 2 * index
    sparse += score * scored + (teacher + 2 * score) * selected
    assert found["sparse"] == pytest.approx(dense + sparse)
