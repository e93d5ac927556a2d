"""The trainer: interruption and resumption, the clock, and the metrics file."""

from __future__ import annotations

import dataclasses
import signal

import jax
import numpy as np
import pytest
from support.compare import assert_matches
from support.training import CONFIG, all_equal, corpus, interrupt_at, share_programs

from jax_dsa.training import trainer as trainer_module
from jax_dsa.training.data import RunError


@pytest.fixture(autouse=True)
def share(monkeypatch):
    share_programs(monkeypatch)


def without_measurements(rows):
    """Returns the rows without the columns that depend on time or on the device."""
    measured = ("second", "share", "memory")
    return [{k: v for k, v in r.items() if not any(x in k for x in measured)} for r in rows]


def test_an_interrupted_run_resumes_exactly(tmp_path, monkeypatch):
    handler = signal.getsignal(signal.SIGINT)
    whole = trainer_module.Trainer(CONFIG, corpus(), tmp_path / "whole")
    assert whole.run()
    for number in (1, 10):  # in the dense stage, then in the sparse stage
        with monkeypatch.context() as patch:
            interrupt_at(patch, number)
            interrupted = trainer_module.Trainer(CONFIG, corpus(), tmp_path / "interrupted")
            assert not interrupted.run() and interrupted.step == number + 1
    assert signal.getsignal(signal.SIGINT) is handler
    last = trainer_module.Trainer(CONFIG, corpus(), tmp_path / "interrupted")
    assert 0 < last.seconds <= interrupted.seconds
    assert last.step == 11 and last.run()
    assert jax.tree.structure(last.state) == jax.tree.structure(whole.state)
    full = {r["step"]: r for r in without_measurements(whole.log.rows())}
    resumed = {r["step"]: r for r in without_measurements(last.log.rows())}
    assert resumed.keys() == full.keys() and len(last.log.rows()) == len(full)
    if jax.default_backend() == "cpu":  # On a GPU the order of atomic additions varies.
        assert all_equal(last.state, whole.state)
        assert resumed == full
    else:
        assert_matches(last.state.backbone.params, whole.state.backbone.params, tol=1e-2)
        losses = [[float(r["lm_loss"]) for r in rows.values()] for rows in (resumed, full)]
        np.testing.assert_allclose(*losses, rtol=1e-2)

    other = dataclasses.replace(CONFIG, seed=1)
    with pytest.raises(RunError, match=r"has another configuration.*: seed was 0, is 1\."):
        trainer_module.Trainer(other, corpus(), tmp_path / "interrupted")
    text = corpus().validation.copy()
    text[-1] ^= 1
    other = dataclasses.replace(corpus(), validation=text, name="other words")
    refusal = r"corpus was words \(8 files.*\), is other words \(.*--restart or another --run-dir"
    with pytest.raises(RunError, match=refusal):
        trainer_module.Trainer(CONFIG, other, tmp_path / "interrupted")
    renamed = dataclasses.replace(corpus(), name="the same words")
    assert trainer_module.Trainer(CONFIG, renamed, tmp_path / "interrupted").step == 13

    small = dataclasses.replace(corpus(), validation=corpus().validation[:30])
    with pytest.raises(RunError, match="expected at least"):
        trainer_module.Trainer(CONFIG, small, tmp_path / "interrupted", restart=True)
    assert trainer_module.Trainer(CONFIG, corpus(), tmp_path / "interrupted").step == 13
    anew = dataclasses.replace(CONFIG, seed=1)
    anew = trainer_module.Trainer(anew, corpus(), tmp_path / "interrupted", restart=True)
    assert anew.step == 0 and not anew.log.rows() and anew.checkpoints.latest() is None


def test_a_rate_counts_the_steps_since_the_last_mark(monkeypatch):
    now = 10.0
    monkeypatch.setattr(trainer_module.time, "perf_counter", lambda: now)
    clock = trainer_module.Clock(2)
    now = 15.0
    assert clock.rate(7, 100) == 100  # five steps in five seconds
    clock.mark(7)
    now = 19.0
    assert clock.rate(10, 100) == 75 and clock.total() == 9


def test_rates_of_a_resumed_run_leave_out_the_compiler(tmp_path, monkeypatch):
    """The first step after a resume takes 100 s and every other step 1 s."""
    now = 0.0
    monkeypatch.setattr(trainer_module.time, "perf_counter", lambda: now)
    monkeypatch.setattr(trainer_module, "matmul_peak", lambda _: 1.0)
    monkeypatch.setattr(trainer_module.Trainer, "probe", lambda *_: {})
    for stop, rated in ((3, {2: 1}), (None, {6: 1, 8: 2, 9: 1, 12: 2, 13: 1})):
        trainer = trainer_module.Trainer(CONFIG, corpus(), tmp_path / "run")
        seconds = iter([100.0])

        def step(state, tokens, seconds=seconds):
            nonlocal now
            now += next(seconds, 1.0)
            return state._replace(step=state.step + 1), {"lm_loss": jax.numpy.ones(())}

        monkeypatch.setattr(trainer.program, "step", step)
        with monkeypatch.context() as patch:
            if stop is not None:
                interrupt_at(patch, stop)
            assert trainer.run() == (stop is None)
        rows = {int(row["step"]): row["tokens_per_second"] for row in trainer.log.rows()}
        for done, steps in rated.items():
            assert float(rows[done]) == CONFIG.seq_len * CONFIG.batch_size, (done, steps)


def test_a_second_interrupt_takes_effect_at_once():
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


def test_rows_after_the_checkpoint_are_dropped(tmp_path):
    log = trainer_module.Log(tmp_path / "metrics.csv")
    log.keep_until(0)
    for step in (2, 4, 6):
        log.append({"step": step, "stage": "dense", "lm_loss": 1 / 3})
    log.keep_until(4)
    assert [r["step"] for r in log.rows()] == ["2", "4"]
    assert log.rows()[0]["lm_loss"] == "0.333333" and log.rows()[0]["kl"] == ""


def test_tensorboard_gets_all_numbers(tmp_path):
    pytest.importorskip("tensorboardX")
    log = trainer_module.Log(tmp_path / "metrics.csv", tensorboard=tmp_path / "board")
    log.keep_until(0)
    log.append({"step": 2, "stage": "dense", "lm_loss": 1 / 3, "memory_gib": None})
    log.close()
    (events,) = (tmp_path / "board").iterdir()
    written = events.read_bytes()
    assert b"lm_loss" in written and b"memory_gib" not in written


def test_a_corpus_that_is_too_small_fails_before_training(tmp_path):
    small = dataclasses.replace(corpus(), validation=corpus().validation[:30])
    with pytest.raises(RunError, match="30 tokens make 1 windows of 25, expected at least"):
        trainer_module.Trainer(CONFIG, small, tmp_path)
