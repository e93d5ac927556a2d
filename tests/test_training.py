"""Training: whose gradient is whose, the data's order, recall, exact checkpoints, the demo."""

from __future__ import annotations

import copy
import dataclasses
import functools
import os
import pathlib
import platform
import re
import signal
import sysconfig

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support.compare import assert_matches
from support.training import ATTENTION, CONFIG, STAGES, corpus, shared_evaluator, shared_program

import jax_dsa
from jax_dsa import nn, training
from jax_dsa.core import op
from jax_dsa.training import cli, data, evaluate, rates, report
from jax_dsa.training import compare as comparison
from jax_dsa.training import trainer as trainer_module
from jax_dsa.training.data import (
    BOS,
    VOCAB,
    Batches,
    RunError,
    load_corpus,
    validation_batches,
)
from jax_dsa.training.evaluate import Evaluator
from jax_dsa.training.steps import Batch, Program


@pytest.fixture(autouse=True)
def share(monkeypatch):
    monkeypatch.setattr(trainer_module, "Program", shared_program)
    monkeypatch.setattr(trainer_module, "Evaluator", shared_evaluator)


def tokens(number=0):
    return Batches(corpus().train, CONFIG.seq_len + 1, CONFIG.batch_size, 0)[number]


def leaves(tree):
    return [np.asarray(x) for x in jax.tree.leaves(tree)]


def all_equal(a, b):
    return all(np.array_equal(x, y) for x, y in zip(leaves(a), leaves(b), strict=True))


@pytest.mark.parametrize("sparse", [True, False])
def test_each_loss_reaches_exactly_its_own_parameters(sparse):
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


def test_the_split_of_parameters():
    model = nn.DecoderLM(CONFIG.model, rngs=nnx.Rngs(0))
    _, indexer, backbone = nnx.split(model, training.INDEXER, ...)
    assert all("indexer" in path for path, _ in nnx.to_flat_state(indexer))
    assert not any("indexer" in path for path, _ in nnx.to_flat_state(backbone))
    assert len(leaves(indexer)) == len(leaves(nnx.state(model.blocks[0].attention.indexer)))


def test_what_each_stage_changes():
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


def cross_entropy(logits, tokens):
    """Nats a token of a batch [B, T + 1], from the logits of its first T."""
    logits = np.asarray(logits, np.float64)
    right = np.take_along_axis(logits, np.asarray(tokens)[:, 1:, None], -1)[..., 0]
    return np.mean(np.log(np.exp(logits).sum(-1)) - right)


class AdamW:
    """AdamW on a list of arrays, one update at a time, with the schedule that a run has."""

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
        assert norm > 2 * c.clip_norm  # so that it is clipped
        for i, (p, g) in enumerate(zip(self.params, grads, strict=True)):
            g = g * (c.clip_norm / norm)
            first, second = self.moments[i]
            first, second = 0.9 * first + 0.1 * g, 0.98 * second + 0.02 * g * g
            self.moments[i] = [first, second]
            step = first / (1 - 0.9**self.count)
            step = step / (np.sqrt(second / (1 - 0.98**self.count)) + 1e-8)
            decay = c.weight_decay * p if p.ndim > 1 else 0
            self.params[i] = p - rate * (step + decay)


def test_a_run_by_hand():
    """Three steps of each stage: whose losses, gradients, clipping, rates and decay they are."""
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
        """Both losses, and of each the gradient of what it trains."""

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
                # Where a gradient is all rounding, so is its direction: on average, then.
                off, moved = np.abs(got - exact).mean(), np.abs(exact - was).mean()
                assert off <= 0.01 * moved + 1e-7, (step, got.shape)


def test_layers_without_an_indexer_have_no_kl_but_a_recall():
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
    assert (twice["random"] != found["random"]).all()  # other keys for every batch
    _, losses = program.step(state, tokens())
    assert_matches(losses["kl"], found["kl"].mean(), 1e-5)


def test_of_long_sequences_some_queries_are_asked(monkeypatch):
    monkeypatch.setattr(evaluate, "_QUERIES", 7)
    program = shared_program(CONFIG)
    state, batch = program.init(), program.place(tokens())
    found = Evaluator(program).selection(state, [tokens()])
    logits = jax.jit(lambda *params: program.logits(*params, batch, sparse=False)[1])
    (layer,) = logits(state.backbone.params, state.indexer.params)
    mass = training.attention_mass(layer.q, layer.kv, layer.lse, scale=ATTENTION.scale)
    chosen, _ = jax_dsa.indexer_topk(**layer.indexer._asdict(), top_k=4, is_causal=True)
    asked = [t * 24 // 7 for t in range(7)]
    asked = [t for t in asked if t >= 4]
    held = np.take_along_axis(np.asarray(mass), np.asarray(chosen), -1).sum(-1)
    np.testing.assert_allclose(found["indexer"], [held[:, asked].mean()], rtol=1e-5)


def test_warmup_lowers_the_kl():
    config = dataclasses.replace(CONFIG, dense_steps=0, warmup_steps=60, indexer_learning_rate=1e-2)
    program = shared_program(config)
    state, kls = program.init(), []
    for _ in range(60):
        state, losses = program.step(state, tokens())
        kls.append(float(losses["kl"]))
    assert kls[-1] < kls[0] / 2


def shapes_in(jaxpr):
    """Shapes of everything that a program computes, at any depth."""
    for equation in jaxpr.eqns:
        yield from (v.aval.shape for v in equation.outvars if hasattr(v.aval, "shape"))
        for part in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(part, "jaxpr", part)
            if hasattr(inner, "eqns"):
                yield from shapes_in(inner)


@pytest.mark.parametrize("preset", ["h200", "v32"])
def test_the_large_presets_keep_no_array_of_queries_by_keys(preset):
    config = training.PRESETS[preset]()
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, num_layers=1))
    program = Program(config)
    state = jax.eval_shape(program._first_state)
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


def test_kernels_cover_the_large_preset(monkeypatch):
    """Each pass of each stage."""
    config = training.PRESETS["h200"]()
    # A batch of its own: what another test has traced is not traced again.
    config = dataclasses.replace(
        config, batch_size=3, model=dataclasses.replace(config.model, num_layers=1)
    )
    found = {}

    def asked(self, call, options, groups):
        found[self.name] = self.kernel.unsupported_reason(options, *groups)
        return implementation(self, call, options, groups)

    implementation = op._implementation
    monkeypatch.setattr(op, "_implementation", asked)
    program = Program(config)
    state = jax.eval_shape(program._first_state)
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


@pytest.mark.parametrize("library", [True, False])
def test_files_are_split_by_their_path(tmp_path, monkeypatch, library):
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    root = None if library else tmp_path
    load = functools.partial(load_corpus, root, tmp_path / "run")
    for i in range(60):
        (tmp_path / f"sub{i % 3}").mkdir(exist_ok=True)
        (tmp_path / f"sub{i % 3}" / f"m{i}.py").write_text(f"x = {i}\n")
    skipped = tmp_path / ("tests" if library else ".git")
    skipped.mkdir()
    (skipped / "skipped.py").write_text("nothing")
    first = load()
    assert sum(first.files) == 60 and min(first.files) > 0
    both = np.concatenate([first.train, first.validation])
    assert (both == BOS).sum() == 60 and both.dtype == np.uint16
    (tmp_path / "sub0" / "new.py").write_text("y = 0\n")
    again = load()
    old, new = (sorted(bytes(c.validation.astype(np.uint8)).split(b"\0")) for c in (first, again))
    assert set(old) <= set(new)  # no file changes sides when one is added
    assert first.fingerprint != again.fingerprint
    with pytest.raises(RunError, match="too few text files below"):
        load_corpus(skipped, tmp_path / "other")


def texts(corpus):
    """The files of each half."""
    halves = (corpus.train, corpus.validation)
    parts = [np.split(half, np.flatnonzero(half == BOS))[1:] for half in halves]
    return [[bytes(part[1:].astype(np.uint8)) for part in half] for half in parts]


def test_which_files_of_a_folder_are_text(tmp_path):
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "a.rst").write_text("größer")
    (tmp_path / "b").write_bytes(b"\xff latin")
    (tmp_path / "c.txt").write_text("")
    for i in range(8):
        (tmp_path / f"d{i}.txt").write_text(f"d{i}")
    wanted = ["größer".encode(), b"\xff latin", b"", *(b"d%d" % i for i in range(8))]
    alone = load_corpus(tmp_path, tmp_path / "runs")
    (tmp_path / "picture.png").write_bytes(b"PNG\0\1")
    (tmp_path / "link.txt").symlink_to(tmp_path / "d1.txt")
    for folder in (".hidden", "__pycache__", "runs"):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "metrics.csv").write_text("skipped")
    (tmp_path / ".hidden.txt").write_text("skipped")
    found = load_corpus(tmp_path, tmp_path / "runs")
    train, validation = texts(found)
    assert sorted(train + validation) == sorted(wanted)
    # Too few for one in twenty, yet one of them validates.
    assert found.files == (len(train), len(validation)) and min(found.files) > 0
    assert found.fingerprint == alone.fingerprint and found.name == str(tmp_path)
    moved = dataclasses.replace(found, train=found.validation, validation=found.train)
    assert moved.fingerprint != found.fingerprint


def test_names_that_are_not_utf8(tmp_path):
    for name in (b"a", b"b", b"caf\xe9"):
        (pathlib.Path(os.fsdecode(os.path.join(os.fsencode(tmp_path), name)))).write_text("text")
    assert sum(load_corpus(tmp_path, tmp_path / "run").files) == 3


def test_packages_validate_as_a_whole(tmp_path):
    """Of files that are nearly the same, one is kept."""
    rng = np.random.default_rng(0)
    site, lines = tmp_path / "site", lambda: [f"x{n} = {n}" for n in rng.integers(0, 2**40, 40)]
    for i in range(60):
        (site / f"p{i}").mkdir(parents=True)
        for name in "ab":
            (site / f"p{i}" / f"{name}.py").write_text("\n".join(lines()))
    text = (site / "p7" / "a.py").read_text().splitlines()
    (site / "p7" / "b.py").write_text("\n".join([*text[:35], "  ", *lines()[:5]]))  # a copy
    (site / "p8" / "b.py").write_text("\n".join([*text[:10], *lines()]))  # borrows a little
    (site / "notes.txt").write_text("no source")
    found = load_corpus(site, tmp_path / "run", packages=True)
    assert sum(found.files) == 119
    files = {path.read_bytes(): path.parent.name for path in site.rglob("*.py")}
    train, validation = ({files[text] for text in half} for half in texts(found))
    assert train.isdisjoint(validation) and len(train) + len(validation) == 60
    assert 1 <= len(validation) <= 3  # a twentieth of the text
    assert load_corpus(site, tmp_path / "run").files != found.files


def write_texts(folder, count=30, words=400):
    rng = np.random.default_rng(0)
    folder.mkdir()
    names = ["alpha", "größe", "gamma", "delta"]
    for i in range(count):
        lines = [" ".join(rng.choice(names, 8)) for _ in range(words // 8)]
        (folder / f"{i}.txt").write_text("\n".join(lines))


def test_text_is_streamed_through_a_file(tmp_path, monkeypatch):
    """In blocks, once, and again only when a file has changed."""
    write_texts(tmp_path / "texts")
    load = functools.partial(load_corpus, tmp_path / "texts")
    whole = load(tmp_path / "whole")
    monkeypatch.setattr(data, "_BLOCK", 100)
    blocks = list(data._blocks(tmp_path / "texts" / "0.txt"))
    assert all(block.endswith(b"\n") for block in blocks[:-1]) and len(blocks) > 5
    assert b"".join(blocks) == (tmp_path / "texts" / "0.txt").read_bytes()
    parts = load(tmp_path / "parts")
    assert parts.fingerprint == whole.fingerprint and isinstance(parts.train, np.memmap)
    monkeypatch.setattr(data, "_write_corpus", None)
    assert load(tmp_path / "parts").fingerprint == whole.fingerprint
    (tmp_path / "texts" / "0.txt").write_text("other")
    with pytest.raises(TypeError):
        load(tmp_path / "parts")


def test_a_tokenizer_of_the_text(tmp_path):
    pytest.importorskip("tokenizers")
    write_texts(tmp_path / "texts")
    load = functools.partial(load_corpus, tmp_path / "texts")
    found, plain = load(tmp_path / "run", vocab=300), load(tmp_path / "bytes")
    assert found.vocab == 300 and found.bos == 299 and found.files == plain.files
    assert len(found.train) < len(plain.train) / 4
    size = len(plain.train) + len(plain.validation)
    read = found.bytes_per_token * (len(found.train) + len(found.validation))
    assert round(read) == size and plain.bytes_per_token == 1
    starts = [np.flatnonzero(half.validation == half.bos) for half in (found, plain)]
    for first, other in zip(*starts, strict=True):
        said = report.text(found.validation[first:], found.bos, found.tokenizer)
        assert said == report.text(plain.validation[other:]) and "größe" in said
    again = load(tmp_path / "again", vocab=300)
    assert again.fingerprint == found.fingerprint != plain.fingerprint
    with pytest.raises(RunError, match="vocab is 256, want at least 257"):
        load(tmp_path / "small", vocab=256)
    with pytest.raises(RunError, match="corpus has 300 tokens, want those of the model, 257"):
        trainer_module.Trainer(CONFIG, found, tmp_path / "run")


def test_the_standard_library_is_there(tmp_path):
    found = load_corpus(None, tmp_path)
    assert found.files[0] > 100 and found.files[1] > 5 and len(found.train) > 2e6
    assert platform.python_version() in found.name


def test_batches_are_a_function_of_their_number():
    stream = np.arange(100, dtype=np.uint16)
    batches = Batches(stream, 7, 4, seed=1)  # 14 windows
    rows = np.concatenate([batches[i] for i in range(7)])  # two epochs
    for epoch in (rows[:14], rows[14:]):
        assert sorted(epoch[:, 0]) == list(range(0, 98, 7))
    assert (rows[:14] != rows[14:]).any()
    np.testing.assert_array_equal(rows, rows[:, :1] + np.arange(7))
    fresh = Batches(stream, 7, 4, seed=1)
    for i in (5, 0, 3):
        np.testing.assert_array_equal(fresh[i], rows[4 * i : 4 * i + 4])
    assert (Batches(stream, 7, 4, seed=2)[0] != rows[:4]).any()
    part = fresh.rows(2, [1, 3])
    np.testing.assert_array_equal(part[[1, 3]], fresh[2][[1, 3]])
    assert (part[[0, 2]] == 0).all()
    with pytest.raises(ValueError, match="want at least batch_size = 15"):
        Batches(stream, 7, 15, seed=1)


def test_validation_batches():
    stream = np.arange(100, dtype=np.uint16)
    batches = validation_batches(stream, 10, 2, 5)
    np.testing.assert_array_equal(np.concatenate(batches)[:, 0], [0, 20, 50, 70])
    assert len(validation_batches(stream, 10, 2, 1000)) == 5
    with pytest.raises(ValueError, match="want at least batch_size = 11"):
        validation_batches(stream, 10, 11, 11)


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
    assert training.mass_recall(mass, everything) == 0  # no query had to choose


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
    assert (drawn != drawn[:, :1]).any(1).all()  # each token by a key of its own
    seen = jnp.concatenate([prompt, got], axis=1)[:, :-1]
    logits = jax.jit(lambda seen: model(seen)[0])(seen)
    np.testing.assert_array_equal(got, logits[:, 5:].argmax(-1))
    assert run(1, 1.0).shape == (2, 1)
    with pytest.raises(ValueError, match="'steps' is 0, want at least 1"):
        training.generate(model, prompt, 0, jax.random.key(0))
    with pytest.raises(ValueError, match=r"'prompt' has shape \(2, 0\), want \[B, P >= 1\]"):
        training.generate(model, prompt[:, :0], 1, jax.random.key(0))


def interrupt_at(monkeypatch, number):
    """Sends SIGINT while the batch of that number is fetched."""
    fetch = Batches.rows

    def fetching(self, i, wanted):
        if i == number:
            signal.raise_signal(signal.SIGINT)
        return fetch(self, i, wanted)

    monkeypatch.setattr(Batches, "rows", fetching)


def timeless(rows):
    measured = ("second", "share", "memory")
    return [{k: v for k, v in r.items() if not any(x in k for x in measured)} for r in rows]


def test_an_interrupted_run_goes_on_exactly(tmp_path, monkeypatch):
    handler = signal.getsignal(signal.SIGINT)
    whole = trainer_module.Trainer(CONFIG, corpus(), tmp_path / "whole")
    assert whole.run()
    for number in (1, 10):  # within the dense stage, then within the sparse one
        with monkeypatch.context() as patch:
            interrupt_at(patch, number)
            part = trainer_module.Trainer(CONFIG, corpus(), tmp_path / "part")
            assert not part.run() and part.step == number + 1
    assert signal.getsignal(signal.SIGINT) is handler
    last = trainer_module.Trainer(CONFIG, corpus(), tmp_path / "part")
    assert 0 < last.seconds <= part.seconds
    assert last.step == 11 and last.run()
    assert jax.tree.structure(last.state) == jax.tree.structure(whole.state)
    full = {r["step"]: r for r in timeless(whole.log.rows())}
    resumed = {r["step"]: r for r in timeless(last.log.rows())}
    assert resumed.keys() == full.keys() and len(last.log.rows()) == len(full)
    if jax.default_backend() == "cpu":  # a GPU's scattered additions have no fixed order
        assert all_equal(last.state, whole.state)
        assert resumed == full
    else:
        assert_matches(last.state.backbone.params, whole.state.backbone.params, tol=1e-2)
        losses = [[float(r["lm_loss"]) for r in rows.values()] for rows in (resumed, full)]
        np.testing.assert_allclose(*losses, rtol=1e-2)

    other = dataclasses.replace(CONFIG, seed=1)
    with pytest.raises(RunError, match=r"has another configuration.*: seed was 0, is 1\."):
        trainer_module.Trainer(other, corpus(), tmp_path / "part")
    text = corpus().validation.copy()
    text[-1] ^= 1
    other = dataclasses.replace(corpus(), validation=text, name="other words")
    refusal = r"corpus was words \(8 files.*\), is other words \(.*--restart or another --run-dir"
    with pytest.raises(RunError, match=refusal):
        trainer_module.Trainer(CONFIG, other, tmp_path / "part")
    renamed = dataclasses.replace(corpus(), name="the same words")
    assert trainer_module.Trainer(CONFIG, renamed, tmp_path / "part").step == 13

    small = dataclasses.replace(corpus(), validation=corpus().validation[:30])
    with pytest.raises(RunError, match="want at least"):
        trainer_module.Trainer(CONFIG, small, tmp_path / "part", restart=True)
    assert trainer_module.Trainer(CONFIG, corpus(), tmp_path / "part").step == 13
    anew = dataclasses.replace(CONFIG, seed=1)
    anew = trainer_module.Trainer(anew, corpus(), tmp_path / "part", restart=True)
    assert anew.step == 0 and not anew.log.rows() and anew.checkpoints.latest() is None


def test_a_rate_is_of_the_steps_since_the_last_mark(monkeypatch):
    now = 10.0
    monkeypatch.setattr(trainer_module.time, "perf_counter", lambda: now)
    clock = trainer_module.Clock()
    now = 12.0
    assert clock.rate(7, 100) == 50  # the one step since the run went on
    clock.skip(7)
    now = 16.0
    assert clock.rate(10, 100) == 75 and clock.total() == 6


def test_a_second_interrupt_is_not_held_back():
    usual = []
    before = signal.signal(signal.SIGINT, lambda *_: usual.append(True))
    try:
        with trainer_module._interrupts() as stop:
            signal.raise_signal(signal.SIGINT)
            assert stop.is_set and not usual
            signal.raise_signal(signal.SIGINT)
            assert usual
    finally:
        signal.signal(signal.SIGINT, before)


def test_text_ends_with_its_file():
    a, b = b"ab"
    for tokens, text in (
        ((BOS, a, b, BOS, a, BOS), "ab"),
        ((a, BOS, b, BOS), "a"),
        ((a, 10, 7, b), "a\n\ufffdb"),
        ((), ""),
    ):
        assert report.text(np.array(tokens, np.int32)) == text


def test_rows_after_the_checkpoint_are_dropped(tmp_path):
    log = trainer_module.Log(tmp_path / "metrics.csv")
    log.keep_until(0)
    for step in (2, 4, 6):
        log.append({"step": step, "stage": "dense", "lm_loss": 1 / 3})
    log.keep_until(4)
    assert [r["step"] for r in log.rows()] == ["2", "4"]
    assert log.rows()[0]["lm_loss"] == "0.333333" and log.rows()[0]["kl"] == ""


def test_what_tensorboard_gets(tmp_path):
    pytest.importorskip("tensorboardX")
    log = trainer_module.Log(tmp_path / "metrics.csv", tensorboard=tmp_path / "board")
    log.keep_until(0)
    log.append({"step": 2, "stage": "dense", "lm_loss": 1 / 3, "memory_gib": None})
    log.close()
    (events,) = (tmp_path / "board").iterdir()
    written = events.read_bytes()
    assert b"lm_loss" in written and b"memory_gib" not in written


def test_operations_by_hand():
    """Two layers, one of them with an indexer; sequences of 24, of which 4 keys are selected."""
    model = dataclasses.replace(CONFIG.model, num_layers=2, indexer_types=("full", "shared"))
    found = rates.flops_per_token(dataclasses.replace(CONFIG, model=model))
    attention = 16 * 12 + 12 * 2 * 10 + 16 * 12 + 2 * 8 * 6 + 2 * 8 * 6 + 2 * 6 * 16
    matrices = 2 * (2 * (attention + 3 * 16 * 16) + 16 * VOCAB)
    index = 2 * (12 * 2 * 8 + 16 * 8 + 16 * 2)
    seen, selected = 25 / 2, (1 + 2 + 3 + 21 * 4) / 24
    heads, score = 2 * 2 * 12, 2 * 2 * 8  # of latent keys, of the indexer's
    dense = 3 * (matrices + 2 * 2 * 2 * (10 + 6) * seen)
    assert found["dense"] == pytest.approx(dense)
    warmup = dense / 3 + 2 * index + (heads + 3 * score) * seen
    assert found["warmup"] == pytest.approx(warmup)
    sparse = 3 * (matrices + 2 * 2 * 2 * (12 + 8) * selected) + 2 * index
    sparse += score * seen + (heads + 2 * score) * selected
    assert found["sparse"] == pytest.approx(dense + sparse)


def results(**changes):
    recall = {"indexer": 0.9, "random": 0.3, "recency": 0.7, "best": 0.95}
    found = report.Results(
        dense=2.0,
        sparse=2.03,
        control=2.0,
        recall={k: np.full(2, v) for k, v in recall.items()},
        warmup_kl=(1.0, 0.4),
        tokens_per_second={"dense": 1.0},
    )
    return dataclasses.replace(found, **changes)


def test_checks_can_fail():
    assert [ok for ok, _ in results().checks()] == [True] * 5
    bad = results(
        warmup_kl=(1.0, 0.6),
        dense=1.98,
        control=1.9,
        recall=results().recall | {"indexer": np.full(2, 0.5)},
    )
    assert [ok for ok, _ in bad.checks()] == [False] * 5


def check_what_it_says(out, trainer):
    """The printed results and the last row of the log, computed again from the final state."""
    state, program = trainer.state, trainer.program
    models = [
        program.model(x.params, state.indexer.params) for x in (state.backbone, state.control)
    ]

    @functools.partial(jax.jit, static_argnums=(0, 2))
    def run(which, tokens, sparse):
        return models[which](tokens[:, :-1], sparse=sparse)

    def losses(sequences):
        batches = trainer.validation(sequences)
        return [
            np.mean([cross_entropy(run(which, b, sparse)[0], b) for b in batches])
            for which, sparse in ((0, True), (0, False), (1, False))
        ]

    def recalls(batch):
        """Of all selections but the random one, and the warm-up loss."""
        (dense,), (sparse,) = run(0, batch, False)[1], run(0, batch, True)[1]
        mass = training.attention_mass(dense.q, dense.kv, dense.lse, scale=ATTENTION.scale)
        top_k = ATTENTION.top_k
        recent = training.recency_indices(*mass.shape[:2], top_k)
        held = [training.mass_recall(mass, i) for i in (sparse.indices, recent)]
        best = jnp.sort(mass, -1)[:, top_k:, -top_k:].sum(-1).mean()
        return jnp.stack([*held, best, dense.kl])

    speeds = [r for r in trainer.log.rows() if r["tokens_per_second"]]
    assert speeds and all(float(r["matmul_share"]) > 0 for r in speeds)
    row, shown = trainer.log.rows()[-1], losses(CONFIG.probe_sequences)
    assert len({f"{x:.4f}" for x in shown}) == 3
    for name, value in zip(("sparse", "dense", "control"), shown, strict=True):
        np.testing.assert_allclose(float(row[f"validation_{name}"]), value, rtol=1e-4)
    found = np.mean([recalls(b) for b in trainer.validation(CONFIG.probe_sequences)], axis=0)
    columns = ("recall_indexer", "recall_recency", "recall_best", "validation_kl")
    for name, value in zip(columns, found, strict=True):
        np.testing.assert_allclose(float(row[name]), value, rtol=1e-4, err_msg=name)
    for name in ("recall_indexer", "validation_kl"):  # of the only layer
        assert row[name] == row[f"{name}_layer_0"]
    assert int(row["step"]) * CONFIG.seq_len * CONFIG.batch_size == int(row["tokens"])

    prompt = corpus().validation[1 : CONFIG.seq_len // 3]  # behind the token that begins a file
    assert f"continuation:\n\n{bytes(prompt.astype(np.uint8)).decode()}|" in out

    sparse, dense, control = losses(CONFIG.eval_sequences)
    for title, value in (
        ("sparse attention, top 4 of up to 24 keys", sparse),
        ("same model, dense attention", dense),
        ("control: dense attention throughout", control),
    ):
        line = next(x for x in out.splitlines() if x.startswith(title)).removeprefix(title)
        np.testing.assert_allclose(
            [float(x) for x in line.split()], [value, value / np.log(2)], 1e-3
        )
    kl = {int(r["step"]): float(r["validation_kl"] or "nan") for r in trainer.log.rows()}
    before, after = kl[CONFIG.dense_steps], kl[CONFIG.sparse_start]
    assert f"warm-up KL more than halved: {before:.3f} to {after:.3f}" in out
    verdicts = [x[:4] for x in out.splitlines() if x[:4] in ("PASS", "FAIL")]
    assert len(verdicts) == 5
    assert verdicts[3:] == ["PASS" if sparse <= 1.02 * x else "FAIL" for x in (dense, control)]
    missed = 1 - np.mean([recalls(b) for b in trainer.validation(CONFIG.eval_sequences)], axis=0)
    assert verdicts[2] == ("PASS" if missed[0] < missed[1] / 2 else "FAIL")


def test_the_demo(tmp_path, monkeypatch, capsys):
    """The command line from start to end, and once more from its checkpoint."""
    monkeypatch.setitem(training.PRESETS, "cpu", lambda: CONFIG)
    asked = []

    def load(*args, **keywords):
        asked.append((args, keywords))
        return corpus()

    monkeypatch.setattr(cli, "load_corpus", load)
    folder = tmp_path / "run"
    command = ["--run-dir", str(folder), "--sparse-steps", "4", "--data", "books"]
    command += ["--mesh", "data=1"]
    with monkeypatch.context() as patch:
        interrupt_at(patch, 5)
        assert cli.main(command) == 130
    assert "stopped after step 6; the same command goes on from there" in capsys.readouterr().out
    assert cli.main(command) == 0
    out = capsys.readouterr().out
    for text in ("going on from step 6", "validation loss", "top-k mass recall", "tokens/s"):
        assert text in out
    check_what_it_says(out, trainer_module.Trainer(CONFIG, corpus(), folder))
    assert (folder / "curves.png").stat().st_size > 10_000
    assert asked[0] == ((pathlib.Path("books"), folder), {"vocab": VOCAB})
    with pytest.raises(SystemExit):
        cli.main([*command, "--seed", "1"])
    assert "seed was 0, is 1" in capsys.readouterr().err
    assert (folder / "curves.png").exists()


def test_the_demo_in_fp8(monkeypatch):
    """Its option reaches every projection, and names the default folder."""
    built = []

    def build(config, corpus, folder, mesh, **_):
        built.append((config, folder))
        raise RunError("enough")

    monkeypatch.setattr(cli, "load_corpus", lambda *_, **__: corpus())
    monkeypatch.setattr(cli, "Trainer", build)
    for options in ([], ["--fp8"]):
        with pytest.raises(SystemExit):
            cli.main(options)
    (plain, folder), (fp8, fp8_folder) = built
    assert not plain.model.attention.fp8 and fp8.model.attention.fp8
    assert (folder.name, fp8_folder.name) == ("cpu", "cpu-fp8")


@pytest.mark.parametrize("absent", [("dense",), tuple(STAGES)], ids=str)
def test_a_demo_without_a_stage(tmp_path, monkeypatch, capsys, absent):
    """Ends with a table that claims nothing of what there was not."""
    monkeypatch.setitem(training.PRESETS, "cpu", lambda: CONFIG)
    monkeypatch.setattr(cli, "load_corpus", lambda *_, **__: corpus())
    steps = [f"--{stage}-steps=0" for stage in absent]
    assert cli.main(["--run-dir", str(tmp_path), "--mesh", "data=1", *steps]) == 0
    out = capsys.readouterr().out
    if "dense" in absent:
        assert re.search("FAIL  warm-up KL more than halved: nan to", out)
    control = "(PASS|FAIL)  .* the model trained with dense attention throughout: .* against (.*) "
    verdict, loss = re.search(control, out).groups()
    assert (loss == "nan") == ("sparse" in absent) and not (loss == "nan" and verdict == "PASS")
    assert (tmp_path / "curves.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    "option", ["dense-steps=-1", "batch-size=0", "accumulate=0", "seed=-1", "vocab=0"]
)
def test_numbers_that_no_run_can_have(tmp_path, capsys, option):
    with pytest.raises(SystemExit):
        cli.main(["--run-dir", str(tmp_path / "run"), f"--{option}"])
    name, number = option.split("=")
    assert (
        f"argument '{name.replace('-', '_')}' is {number}, want int in" in capsys.readouterr().err
    )
    assert not (tmp_path / "run").exists()


def test_a_comparison_with_fp8(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(training.PRESETS, "cpu", lambda: CONFIG)
    monkeypatch.setattr(comparison, "load_corpus", lambda *_, **__: corpus())
    command = ["--run-dir", str(tmp_path), "--steps", "3"]
    status = comparison.main(command)
    line = capsys.readouterr().out.splitlines()[-1]
    assert line[:4] == ("FAIL" if status else "PASS")
    losses = [float(x) for x in re.findall(r"(\d\.\d{4}) in", line)]
    assert len(losses) == 2 and losses[0] != losses[1]
    np.testing.assert_allclose(*losses, rtol=0.05)
    assert status == int(abs(losses[0] / losses[1] - 1) > 0.005)
    assert (tmp_path / "curves.png").stat().st_size > 10_000
    assert {p.name for p in tmp_path.iterdir()} == {"FP8", "float32", "curves.png"}
    assert comparison.main(command) == status  # both runs are there


def test_a_comparison_of_shorter_sequences_that_is_interrupted(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(training.PRESETS, "cpu", lambda: CONFIG)
    monkeypatch.setattr(comparison, "load_corpus", lambda *_, **__: corpus())
    seen = []

    def run(trainer):
        seen.append(trainer.config)
        trainer.log.append({"step": 1, "lm_loss": 5.0})
        trainer.log.append({"step": 2, "lm_loss": 4.0})
        return len(seen) == 1

    monkeypatch.setattr(trainer_module.Trainer, "run", run)
    sizes = {"seq_len": CONFIG.seq_len // 2, "batch_size": 3}
    options = [f"--{name.replace('_', '-')}={size}" for name, size in sizes.items()]
    command = ["--run-dir", str(tmp_path), "--steps", "3", *options]
    assert comparison.main(command) == 130
    assert "goes on from there" in capsys.readouterr().out
    assert [c.model.attention.fp8 for c in seen] == [False, True]
    for config in seen:
        assert {name: getattr(config, name) for name in sizes} == sizes
        assert config.eval_sequences * config.seq_len >= CONFIG.eval_sequences * CONFIG.seq_len
    assert (tmp_path / "curves.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("options", "message"),
    [(["--data", "none"], "too few text files"), (["--mesh", "data=999"], "want at most")],
)
def test_what_cannot_run_does_not_restart_a_run(options, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    kept = tmp_path / "run" / "checkpoints" / "kept"
    kept.parent.mkdir(parents=True)
    kept.write_text("")
    with pytest.raises(SystemExit):
        cli.main([*options, "--run-dir", "run", "--restart"])
    assert message in capsys.readouterr().err
    assert kept.exists()


def test_a_corpus_that_is_too_small_fails_before_training(tmp_path):
    small = dataclasses.replace(corpus(), validation=corpus().validation[:30])
    with pytest.raises(RunError, match="30 tokens make 1 windows of 25, want at least"):
        trainer_module.Trainer(CONFIG, small, tmp_path)
