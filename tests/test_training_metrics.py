"""Attention mass, recalls of selections, and generated text."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.compare import assert_matches
from support.training import ATTENTION, CONFIG, STAGES, shared_program, tokens

import jax_dsa
from jax_dsa import training
from jax_dsa.training import evaluate, losses
from jax_dsa.training.evaluate import Evaluator
from jax_dsa.training.steps import Program


def test_attention_mass_and_recall(rng):
    B, T, N, D, K = 2, 9, 3, 4, 3
    q = rng.normal(size=(B, T, N, D)).astype(np.float32)
    kv = rng.normal(size=(B, T, 1, D)).astype(np.float32)
    scores = np.einsum("btnd,bsd->btns", q, kv[:, :, 0]) * 0.7
    scores = np.where(np.arange(T) <= np.arange(T)[:, None, None], scores, -np.inf)
    want = np.asarray(jax.nn.softmax(scores, -1)).mean(2)
    lse = jax.nn.logsumexp(scores, -1)
    mass = training.attention_mass(q, kv, lse, scale=0.7)
    assert_matches(mass, want, 1e-5)

    recent = training.recency_indices(B, T, K)
    np.testing.assert_array_equal(recent[0, :4], [[-1, -1, 0], [-1, 0, 1], [0, 1, 2], [1, 2, 3]])
    by_hand = np.mean([want[b, t, t - 2 : t + 1].sum() for b in range(B) for t in range(K, T)])
    np.testing.assert_allclose(training.mass_recall(mass, recent), by_hand, rtol=1e-5)

    drawn = np.asarray(training.random_indices(jax.random.key(0), 400, T, K))
    for t in range(T):
        rows = drawn[:, t]
        assert (np.sort(rows[rows >= 0].reshape(400, -1), -1) <= t).all()
        assert ((rows >= 0).sum(-1) == min(K, t + 1)).all()
        assert all(len(set(r[r >= 0])) == (r >= 0).sum() for r in rows)
    share = np.bincount(drawn[:, T - 1].ravel(), minlength=T) / 400
    assert np.abs(share - K / T).max() < 0.12
    everything = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T, T))
    assert training.mass_recall(mass, everything) == 0  # No query had to leave keys out.


@pytest.mark.slow
def test_layers_without_an_indexer_have_a_recall_and_no_kl():
    model = dataclasses.replace(CONFIG.model, num_layers=3, indexer_types=("full", "shared"))
    program = Program(dataclasses.replace(CONFIG, model=model))
    state = program.init()._replace(step=jnp.asarray(STAGES["warmup"], jnp.int32))
    evaluator = Evaluator(program)
    found = evaluator.selection(state, [tokens()])
    assert found["kl"].shape == (2,) and found["indexer"].shape == found["best"].shape == (3,)
    assert (found["indexer"] <= found["best"] + 1e-6).all() and (found["indexer"] > 0).all()
    trained = program.model(state.backbone.params, state.indexer.params)
    _, layers = jax.jit(lambda t: trained(t, sparse=False))(tokens()[:, :-1])
    for layer, selecting, recall in zip(layers, (0, 0, 2), found["indexer"], strict=True):
        mass = training.attention_mass(layer.q, layer.kv, layer.lse, scale=ATTENTION.scale)
        index = layers[selecting].indexer._asdict()
        chosen, _ = jax_dsa.indexer_topk(**index, top_k=ATTENTION.top_k, is_causal=True)
        np.testing.assert_allclose(recall, training.mass_recall(mass, chosen), rtol=1e-4)
    twice = evaluator.selection(state, [tokens()] * 2)
    assert_matches(twice["indexer"], found["indexer"], 1e-6)
    assert (twice["random"] != found["random"]).all()  # Every batch draws other keys.
    _, losses = program.step(state, tokens())
    assert_matches(losses["kl"], found["kl"].mean(), 1e-5)


def test_stages_and_recalls_of_pooled_indexers():
    """Recalls count tokens: those of the selected pools, and the tail."""
    attention = dataclasses.replace(
        ATTENTION, rope_dim=0, index_rope_dim=0, top_k=6, index_pool=3, query_chunk=8
    )
    model = dataclasses.replace(CONFIG.model, attention=attention)
    program = Program(dataclasses.replace(CONFIG, model=model))
    for step in STAGES.values():
        state = program.init()._replace(step=jnp.asarray(step, jnp.int32))
        state, losses = program.step(state, tokens())
        assert all(np.isfinite(loss) for loss in jax.tree.leaves(losses))
    evaluator = Evaluator(program)
    found = evaluator.selection(state, [tokens()])
    trained = program.model(state.backbone.params, state.indexer.params)
    _, (layer,) = jax.jit(lambda t: trained(t, sparse=False))(tokens()[:, :-1])
    mass = np.asarray(
        training.attention_mass(layer.q, layer.kv, layer.lse, scale=attention.scale), np.float64
    )
    logits = np.asarray(jax_dsa.indexer_logits(**layer.indexer._asdict()))
    held = []
    for b, t in np.ndindex(*mass.shape[:2]):
        if t + 1 > 6 + 2:
            pools = np.argsort(-logits[b, t, : (t + 1) // 3], kind="stable")[:2]
            keys = [3 * i + u for i in pools for u in range(3)]
            held.append(mass[b, t, [*keys, *range((t + 1) // 3 * 3, t + 1)]].sum())
    np.testing.assert_allclose(found["indexer"], [np.mean(held)], rtol=1e-5)
    assert found["indexer"] <= found["best"]
    losses = [
        evaluator.token_losses(state.backbone.params, state.indexer.params, [tokens()], keys)
        for keys in ("sparse", "dense", "recency")
    ]
    assert all(np.isfinite(x).all() for x in losses) and (losses[0] != losses[2]).any()


def test_recalls_of_long_sequences_use_evenly_spread_queries(monkeypatch):
    monkeypatch.setattr(evaluate, "_QUERIES", 7)
    program = shared_program(CONFIG)
    state, batch = program.init(), program.place(tokens())
    found = Evaluator(program).selection(state, [tokens()])
    logits = jax.jit(lambda *params: program.logits(*params, batch, sparse=False)[1])
    (layer,) = logits(state.backbone.params, state.indexer.params)
    mass = training.attention_mass(layer.q, layer.kv, layer.lse, scale=ATTENTION.scale)
    chosen, _ = jax_dsa.indexer_topk(**layer.indexer._asdict(), top_k=4, is_causal=True)
    queries = [t * 24 // 7 for t in range(7)]
    queries = [t for t in queries if t >= 4]
    held = np.take_along_axis(np.asarray(mass), np.asarray(chosen), -1).sum(-1)
    np.testing.assert_allclose(found["indexer"], [held[:, queries].mean()], rtol=1e-5)


def test_generate_is_greedy_decoding():
    program = shared_program(CONFIG)
    state = program.init()
    model = program.model(state.backbone.params, state.indexer.params)
    prompt = jnp.asarray(tokens()[:, :6])

    def run(steps, temperature):
        key = jax.random.key(0)
        return jax.jit(
            lambda: training.generate(model, prompt, steps, key, temperature=temperature)
        )()

    got = run(4, 0)
    np.testing.assert_array_equal(run(4, 1e-6), got)
    drawn = np.asarray(run(4, 1e6))
    assert (drawn != drawn[:, :1]).any(1).all()  # Each token is drawn with its own key.
    seen = jnp.concatenate([prompt, got], axis=1)[:, :-1]
    logits = jax.jit(lambda seen: model(seen)[0])(seen)
    np.testing.assert_array_equal(got, logits[:, 5:].argmax(-1))
    assert run(1, 1.0).shape == (2, 1)
    with pytest.raises(ValueError, match="'steps' is 0, expected at least 1"):
        training.generate(model, prompt, 0, jax.random.key(0))
    with pytest.raises(ValueError, match=r"'prompt' has shape \(2, 0\), want \[B, P\] with P"):
        training.generate(model, prompt[:, :0], 1, jax.random.key(0))


@pytest.mark.parametrize("temperature", [-1.0, -1e-6, float("nan"), float("inf")])
def test_invalid_temperatures_are_rejected(temperature):
    """A negative temperature would draw the least likely tokens."""
    program = shared_program(CONFIG)
    state = program.init()
    model = program.model(state.backbone.params, state.indexer.params)
    prompt, key = jnp.asarray(tokens()[:, :6]), jax.random.key(0)
    message = "argument 'temperature' is .*, expected a finite number of at least 0"
    with pytest.raises(ValueError, match=f"generate: {message}"):
        training.generate(model, prompt, 2, key, temperature=temperature)
    with pytest.raises(ValueError, match=f"Sampler: {message}"):
        training.Sampler(model, temperature=temperature)


@pytest.mark.parametrize("top_k", [0, -1])
def test_an_empty_selection_is_rejected(top_k):
    with pytest.raises(ValueError, match=f"recency_indices: argument 'top_k' is {top_k}"):
        training.recency_indices(1, 8, top_k)
    with pytest.raises(ValueError, match=f"random_indices: argument 'top_k' is {top_k}"):
        training.random_indices(jax.random.key(0), 1, 8, top_k)


LOGITS, TARGETS = jnp.zeros((2, 5, 11)), jnp.zeros((2, 5), jnp.int32)
AUX = jax_dsa.DSAAux(indices=TARGETS, kl=jnp.float32(3), lse=LOGITS)
Q, KV, LSE = jnp.ones((2, 5, 3, 4)), jnp.ones((2, 5, 1, 4)), jnp.zeros((2, 5, 3))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: training.next_token_loss(LOGITS[:, :-1], TARGETS),
            ValueError,
            r"next_token_loss: argument 'targets' has shape \(2, 5\), want \[B, T\] with .*T=4",
        ),
        (
            lambda: training.next_token_loss(LOGITS, TARGETS * 1.0),
            TypeError,
            "next_token_loss: argument 'targets' has dtype float32, want int32",
        ),
        (
            lambda: training.next_token_loss((LOGITS, [AUX]), TARGETS),
            TypeError,
            "next_token_loss: argument 'logits' is tuple, want an array",
        ),
        (
            lambda: training.indexer_loss(AUX),
            TypeError,
            "indexer_loss: argument 'layers' is DSAAux, want a list with the aux of each layer",
        ),
        (
            lambda: training.indexer_loss([AUX, (LOGITS, AUX)]),
            TypeError,
            r"indexer_loss: argument 'layers\[1\]' is tuple, want the aux of a layer",
        ),
        (
            lambda: training.indexer_loss([AUX._replace(kl=None)]),
            ValueError,
            "indexer_loss: argument 'layers' has no layer with an indexer",
        ),
        (
            lambda: training.attention_mass(Q, KV[:, :, 0], LSE, scale=0.5),
            ValueError,
            r"attention_mass: argument 'kv' has shape \(2, 5, 4\), want \[B, S, 1, D\]",
        ),
        (
            lambda: training.mass_recall(jnp.ones((2, 5, 5)), TARGETS),
            ValueError,
            r"mass_recall: argument 'indices' has shape \(2, 5\), want \[B, T, K\]",
        ),
    ],
)
def test_wrong_arguments(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("target", [-1, -100, 11])
def test_a_target_outside_the_vocabulary(target):
    """It is NaN in its own place, and does not count from the end of the vocabulary."""
    found = losses.token_losses(LOGITS, TARGETS.at[1, 2].set(target))
    np.testing.assert_array_equal(np.isnan(found), np.arange(10).reshape(2, 5) == 7)
    assert np.isnan(training.next_token_loss(LOGITS[1], TARGETS[1].at[2].set(target)))
