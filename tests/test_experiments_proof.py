"""`experiments/proof.py` at a small size."""

from __future__ import annotations

import csv
import dataclasses
import json

import jax
import numpy as np
import pytest
from support import repository  # noqa: F401
from support.training import CONFIG, corpus, share_programs, shared_program

from experiments import proof
from jax_dsa import training
from jax_dsa.training import trainer as trainer_module


@pytest.fixture(autouse=True)
def share(monkeypatch):
    """The trial that plans the run has as many steps as the run, so both share programs."""
    share_programs(monkeypatch)
    monkeypatch.setattr(proof, "Program", shared_program)
    monkeypatch.setattr(proof, "load_corpus", lambda *_, **__: corpus())
    monkeypatch.setitem(training.PRESETS, "cpu", lambda: CONFIG)
    before = jax.config.jax_compilation_cache_dir
    yield
    jax.config.update("jax_compilation_cache_dir", before)


def arguments(folder, top_k):
    options = {"data": "site", "run-dir": folder, "preset": "cpu", "top-k": top_k}
    options |= {"sequences": 4, "minutes": "0,0,0"}
    return [f"--{name}={value}" for name, value in options.items()]


@pytest.mark.slow
def test_the_proof(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "run"
    folder.mkdir()
    command = arguments(folder, top_k=4)
    assert proof.main([*command, "--stop-after", "0"]) == 130
    assert "stopped after step 1; run the same command again" in capsys.readouterr().out
    assert set(json.loads((folder / "plan.json").read_text()).values()) == {proof.TRIAL}
    trainers = []

    def make(*arguments, **options):
        trainers.append(trainer_module.Trainer(*arguments, **options))
        return trainers[-1]

    monkeypatch.setattr(proof, "Trainer", make)
    status = proof.main(command)
    out = capsys.readouterr().out
    assert "1 are done" in out and "validation loss by position" in out
    verdicts = [line for line in out.splitlines() if line[:4] in ("PASS", "FAIL")][-3:]
    assert status == int(any(line.startswith("FAIL") for line in verdicts))
    for name in ("proof.txt", "proof.png", "curves.png", "metrics.csv"):
        assert (folder / name).stat().st_size > 500
    with (folder / "proof.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    check(trainers[0], rows)


def test_a_selection_of_all_keys_is_rejected(tmp_path, capsys):
    with pytest.raises(SystemExit):
        proof.main(arguments(tmp_path, top_k=CONFIG.seq_len))
    assert f"argument --top-k: {CONFIG.seq_len} keys are all keys" in capsys.readouterr().err


def check(trainer, rows):
    """Computes the losses by position and of copies again."""
    program, state = trainer.program, trainer.state
    batches = trainer.validation(4)

    def losses(name, tokens):
        learner = state.control if name == "control" else state.backbone
        model = program.model(learner.params, state.indexer.params)
        recent = training.recency_indices(*tokens[:, 1:].shape, 4)

        @jax.jit
        def run(tokens):
            indices = [recent] if name == "last keys" else None
            sparse = name in ("sparse", "last keys")
            logits, _ = model(tokens[:, :-1], indices=indices, sparse=sparse)
            log = jax.nn.log_softmax(logits)
            return -jax.numpy.take_along_axis(log, tokens[:, 1:, None], -1)[..., 0]

        return np.asarray(run(tokens))

    seen = set()
    for name in proof.MODELS:
        want = np.concatenate([losses(name, b) for b in batches]).mean(0)
        got = [r for r in rows if r["model"] == name and r["measure"] == "position"]
        bins = [losses.mean() for losses in np.array_split(want, proof.BINS)]
        np.testing.assert_allclose([float(r["value"]) for r in got], bins, 1e-4)
        seen.add(tuple(r["value"] for r in got))
    assert len(seen) == 4
    copies = {r["model"]: float(r["value"]) for r in rows if r["measure"] == "copy"}
    assert copies.keys() == {*proof.MODELS, "first reading"}
    assert len(set(copies.values())) == 5
    for name, want in trainer.evaluator.similarity(state, batches).items():
        got = [float(r["value"]) for r in rows if r["measure"] == name]
        np.testing.assert_allclose(got, want, 1e-4)


def test_losses_of_copies_are_taken_at_the_copies():
    """Uses losses of 1 at the copy, 2 at the first occurrence, and 0 everywhere else."""

    class Evaluator:
        def token_losses(self, backbone, indexer, batches, keys):
            length = batches[0].shape[1] - 1
            found = []
            for row in np.concatenate(batches):
                span = length // 8
                copies = [
                    (a, b)
                    for a in range(1, length + 2 - span)
                    for b in range(a + length // 2 + 1, length + 2 - span)
                    if (row[a : a + span] == row[b : b + span]).all()
                ]
                ((a, b),) = copies
                cue = span * proof.CUE // proof.SPAN
                loss = np.zeros(length)
                loss[a + cue - 1 : a + span - 1] = 2.0
                loss[b + cue - 1 : b + span - 1] = 1.0
                found.append(loss)
            return np.array(found)

    class Trainer:
        config = dataclasses.replace(CONFIG, seq_len=256)
        evaluator = Evaluator()

        class state:  # noqa: N801
            class backbone:  # noqa: N801
                params = None

            control = indexer = backbone

        def validation(self, sequences):
            rng = np.random.default_rng(0)
            return [rng.integers(0, 1000, (2, 257)) for _ in range(3)]

    found = proof.loss_of_copies(Trainer())
    assert found.pop("first reading") == 2.0
    assert set(found.values()) == {1.0} and found.keys() == set(proof.MODELS)
