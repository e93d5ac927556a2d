"""Several documents in one sequence give the same losses and gradients as each one alone."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.compare import assert_matches
from support.training import CONFIG, STAGES

from jax_dsa import training
from jax_dsa.training.data import BOS
from jax_dsa.training.evaluate import Evaluator
from jax_dsa.training.mesh import make_mesh
from jax_dsa.training.steps import Program

MODEL = dataclasses.replace(CONFIG.model, num_layers=2, indexer_types=("full", "shared"))
PACKED = dataclasses.replace(CONFIG, model=MODEL, seq_len=48, packed=True)
LENGTHS = (9, 23, 16)  # All but the first have more keys than are selected.


@functools.cache
def packed_program(*sizes):
    return Program(PACKED, make_mesh({"data": 1} | dict(sizes)))


def documents(rng, lengths=LENGTHS):
    return [np.concatenate([[BOS], rng.integers(97, 123, n - 1)]) for n in lengths]


def packed(*rows):
    """Returns rows of documents, each followed by the token that its last token predicts."""
    return np.stack([np.concatenate([*row, [BOS]]) for row in rows]).astype(np.int32)


def found(program, tokens, sparse):
    """Returns the logits, and the lse and the selection of each layer."""
    state = program.init()

    @jax.jit
    def run(backbone, indexer, batch):
        logits, layers = program.logits(backbone, indexer, batch, sparse=sparse)
        return logits, [x.lse for x in layers], [x.indices for x in layers]

    with jax.set_mesh(program.mesh):
        return run(state.backbone.params, state.indexer.params, program.place(tokens))


@pytest.mark.parametrize("sparse", [True, False])
def test_no_token_sees_another_document(rng, sparse):
    """The results of a document do not depend on its neighbours, bit for bit."""
    program = packed_program()
    one, other = documents(rng), documents(rng)
    other[1] = one[1]
    with jax.default_matmul_precision("highest"):
        got, want = (found(program, packed(x), sparse) for x in (one, other))
    middle = slice(LENGTHS[0], sum(LENGTHS[:2]))
    different = 0
    for g, w in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        np.testing.assert_array_equal(g[:, middle], w[:, middle])
        different += np.any(np.asarray(g[:, middle.stop :]) != np.asarray(w[:, middle.stop :]))
    assert different > 2


@pytest.mark.parametrize("sparse", [True, False])
def test_packed_documents_match_documents_alone(rng, sparse):
    """Results agree up to rounding, because XLA tiles products of other shapes differently."""
    program, texts = packed_program(), documents(rng)
    logits, lse, indices = found(program, packed(texts), sparse)
    start = 0
    for text in texts:
        alone = found(program, packed([text]), sparse)
        own = slice(start, start + len(text))
        assert_matches(logits[:, own], alone[0], 5e-6)
        assert_matches([x[:, own] for x in lse], alone[1], 5e-6)
        for chosen, want in zip(indices, alone[2], strict=True):
            if sparse:
                chosen = np.asarray(chosen[:, own])
                np.testing.assert_array_equal(np.where(chosen < 0, -1, chosen - start), want)
        start += len(text)


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes", [{}, {"data": 2, "context": 2}, {"fsdp": 2, "tensor": 2}], ids=str
)
def test_every_stage_learns_the_same_from_documents_alone(rng, sizes):
    """Compares a step on two packed rows with a step on one document per row."""
    one, two = documents(rng, (16,) * 3), documents(rng, (16,) * 3)
    short = dataclasses.replace(PACKED, seq_len=16, batch_size=6)
    alone, program = Program(short), packed_program(*sizes.items())
    for stage, step in STAGES.items():
        steps = []
        for run, tokens in (
            (program, packed(one, two)),
            (alone, packed(*([text] for text in one + two))),
        ):
            state = run.init()._replace(step=jnp.asarray(step, jnp.int32))
            state, losses = run.step(state, tokens)
            steps.append((losses, state.backbone.opt, state.indexer.opt, state.control.opt))
        assert_matches(*steps, 2e-5, stage, least=1e-3)


@pytest.mark.slow
def test_evaluation_of_packed_documents_matches_documents_alone(rng):
    one, two = documents(rng, (16,) * 3), documents(rng, (16,) * 3)
    program = packed_program()
    alone = Program(dataclasses.replace(PACKED, seq_len=16, batch_size=6))
    state = program.init()
    tokens = packed(one, two), packed(*([text] for text in one + two))
    got, want = (
        Evaluator(run).selection(state, [batch])
        for run, batch in zip((program, alone), tokens, strict=True)
    )
    for name in ("kl", "indexer", "recency", "best"):
        np.testing.assert_allclose(got[name], want[name], rtol=1e-5, err_msg=name)
    assert (
        np.abs(got["random"] - want["random"]).max() < 0.2
    )  # The number of keys is the same, but other keys are drawn.
    for sparse in (True, False):
        got, want = (
            Evaluator(run).loss(state.backbone.params, state.indexer.params, [batch], sparse=sparse)
            for run, batch in zip((program, alone), tokens, strict=True)
        )
        np.testing.assert_allclose(got, want, rtol=1e-6)


def test_selections_stay_in_their_document():
    starts = jnp.array([[0, 0, 0, 3, 3, 3, 3, 7]])
    recent = training.recency_indices(1, 8, 2, starts)
    want = [[-1, 0], [0, 1], [1, 2], [-1, 3], [3, 4], [4, 5], [5, 6], [-1, 7]]
    np.testing.assert_array_equal(recent[0], want)
    drawn = np.asarray(training.random_indices(jax.random.key(0), 1, 8, 2, starts))[0]
    for t, (row, start) in enumerate(zip(drawn, starts[0], strict=True)):
        chosen = row[row >= 0]
        assert len(chosen) == min(2, t + 1 - start) and all((start <= chosen) & (chosen <= t))
    mass = jnp.eye(8)[
        None
    ]  # One of the three queries that see more than two keys attends to another key.
    mass = mass.at[0, 5].set(jnp.eye(8)[3])
    np.testing.assert_allclose(training.mass_recall(mass, recent, starts), 2 / 3)
