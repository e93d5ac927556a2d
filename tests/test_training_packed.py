"""Several documents in one sequence: each is trained on, and judged, as if it were alone."""

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
LENGTHS = (9, 23, 16)  # all but the first select from more keys than they may keep


@functools.cache
def packed_program(*sizes):
    return Program(PACKED, make_mesh({"data": 1} | dict(sizes)))


def documents(rng, lengths=LENGTHS):
    return [np.concatenate([[BOS], rng.integers(97, 123, n - 1)]) for n in lengths]


def packed(*rows):
    """Rows of documents, with the token that each row's last one predicts."""
    return np.stack([np.concatenate([*row, [BOS]]) for row in rows]).astype(np.int32)


def found(program, tokens, sparse):
    """Logits, KLs, and the loss's gradients."""
    state = program.init()

    @jax.jit
    def run(backbone, indexer, batch):
        logits, layers = program.logits(backbone, indexer, batch, sparse=sparse)
        return logits, [x.lse for x in layers], [x.indices for x in layers]

    with jax.set_mesh(program.mesh):
        return run(state.backbone.params, state.indexer.params, program.place(tokens))


@pytest.mark.parametrize("sparse", [True, False])
def test_no_token_sees_another_document(rng, sparse):
    """Bit for bit: a document's results do not depend on what lies beside it."""
    program = packed_program()
    one, other = documents(rng), documents(rng)
    other[1] = one[1]
    with jax.default_matmul_precision("highest"):
        got, want = (found(program, packed(x), sparse) for x in (one, other))
    part = slice(LENGTHS[0], sum(LENGTHS[:2]))
    different = 0
    for g, w in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        np.testing.assert_array_equal(g[:, part], w[:, part])
        different += np.any(np.asarray(g[:, part.stop :]) != np.asarray(w[:, part.stop :]))
    assert different > 2


@pytest.mark.parametrize("sparse", [True, False])
def test_packed_documents_give_what_they_give_alone(rng, sparse):
    """Up to the order of sums: XLA cuts products of other shapes into other blocks."""
    program, texts = packed_program(), documents(rng)
    logits, lse, indices = found(program, packed(texts), sparse)
    start = 0
    for text in texts:
        alone = found(program, packed([text]), sparse)
        part = slice(start, start + len(text))
        assert_matches(logits[:, part], alone[0], 5e-6)
        assert_matches([x[:, part] for x in lse], alone[1], 5e-6)
        for chosen, want in zip(indices, alone[2], strict=True):
            if sparse:
                chosen = np.asarray(chosen[:, part])
                np.testing.assert_array_equal(np.where(chosen < 0, -1, chosen - start), want)
        start += len(text)


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes", [{}, {"data": 2, "context": 2}, {"fsdp": 2, "tensor": 2}], ids=str
)
def test_every_stage_learns_what_the_documents_teach_alone(rng, sizes):
    """Losses and moments of a step on two packed rows and on one document a row."""
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


def test_what_an_evaluation_says_of_packed_documents(rng):
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
    assert np.abs(got["random"] - want["random"]).max() < 0.2  # other keys, as many
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
    mass = jnp.eye(8)[None]  # of the queries that see more than two keys, one attends elsewhere
    mass = mass.at[0, 5].set(jnp.eye(8)[3])
    np.testing.assert_allclose(training.mass_recall(mass, recent, starts), 2 / 3)
