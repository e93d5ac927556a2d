"""A small configuration, corpus and compiled programs for the tests of training."""

from __future__ import annotations

import dataclasses
import functools
import signal

import jax
import numpy as np

from jax_dsa import nn, training
from jax_dsa.training import trainer
from jax_dsa.training.data import BOS, VOCAB, Batches, Corpus
from jax_dsa.training.evaluate import Evaluator
from jax_dsa.training.steps import Program

ATTENTION = nn.AttentionConfig(
    model_dim=16,
    num_heads=2,
    q_rank=12,
    kv_rank=8,
    nope_dim=6,
    rope_dim=4,
    v_dim=6,
    index_heads=2,
    index_dim=8,
    index_rope_dim=4,
    top_k=4,
)
GROUPED = nn.GroupedConfig(
    model_dim=16,
    num_heads=4,
    kv_heads=2,
    head_dim=8,
    rope_dim=4,
    indexer="max",
    block_size=4,
    top_k=2,
    index_heads=2,
    index_dim=8,
)
# What the indexer selects, and the attention to it.
ATTENTIONS = {
    "keys": ATTENTION,
    "pools": dataclasses.replace(ATTENTION, rope_dim=0, index_rope_dim=0, index_pool=2),
    "blocks": GROUPED,
    "means": dataclasses.replace(GROUPED, indexer="mean", gate=True),
}
CONFIG = dataclasses.replace(
    training.PRESETS["cpu"](),
    model=nn.DecoderConfig(ATTENTION, vocab=VOCAB, num_layers=1, mlp_dim=16),
    seq_len=24,
    batch_size=2,
    dense_steps=3,
    warmup_steps=6,
    sparse_steps=4,
    ramp_steps=1,
    log_every=2,
    probe_every=4,
    probe_sequences=2,
    eval_sequences=4,
    eval_batch=2,
    checkpoint_every=100,
    sample_tokens=5,
)
MESH_CONFIG = dataclasses.replace(
    CONFIG, batch_size=4, model=dataclasses.replace(CONFIG.model, num_layers=2, mlp_dim=32)
)
# The first step of each stage of CONFIG.
STAGES = {"dense": 0, "warmup": 3, "sparse": 9}


@functools.cache
def compiled_program(config):
    return Program(config)


def shared_program(config, mesh=None):
    """Returns the program on one device, compiled once for all tests."""
    assert mesh is None or mesh.size == 1
    return compiled_program(config)


@functools.cache
def shared_evaluator(program):
    return Evaluator(program)


@functools.cache
def corpus():
    """Returns eight sequences of 60 words out of 20, the last two for validation."""
    rng = np.random.default_rng(0)
    words = [rng.integers(97, 123, size=4) for _ in range(20)]
    text = [np.concatenate([[BOS], *(words[i] for i in rng.integers(0, 20, 60))]) for _ in range(8)]
    train, validation = np.concatenate(text[:6]), np.concatenate(text[6:])
    return Corpus(train.astype(np.uint16), validation.astype(np.uint16), (6, 2), "words")


def share_programs(monkeypatch):
    """Makes all trainers of a test use the shared programs."""
    monkeypatch.setattr(trainer, "Program", shared_program)
    monkeypatch.setattr(trainer, "Evaluator", shared_evaluator)


def tokens(number=0):
    """Returns a batch of training tokens for CONFIG."""
    return Batches(corpus().train, CONFIG.seq_len + 1, CONFIG.batch_size, 0)[number]


def leaves(tree):
    return [np.asarray(x) for x in jax.tree.leaves(tree)]


def all_equal(a, b):
    """Returns whether two trees have the same leaves, bit for bit."""
    return all(np.array_equal(x, y) for x, y in zip(leaves(a), leaves(b), strict=True))


def interrupt_at(monkeypatch, number):
    """Sends SIGINT while the batch of that number is fetched."""
    fetch = Batches.rows

    def fetching(self, i, wanted):
        if i == number:
            signal.raise_signal(signal.SIGINT)
        return fetch(self, i, wanted)

    monkeypatch.setattr(Batches, "rows", fetching)
