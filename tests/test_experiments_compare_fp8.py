"""`experiments/compare_fp8.py` at a small size."""

from __future__ import annotations

import re

import numpy as np
import pytest
from support import repository  # noqa: F401
from support.training import CONFIG, corpus, share_programs

from experiments import compare_fp8
from jax_dsa import training
from jax_dsa.training import trainer as trainer_module


@pytest.fixture(autouse=True)
def share(monkeypatch):
    share_programs(monkeypatch)


@pytest.mark.slow
def test_both_runs_are_compared(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(training.PRESETS, "cpu", lambda: CONFIG)
    monkeypatch.setattr(compare_fp8, "load_corpus", lambda *_, **__: corpus())
    command = ["--run-dir", str(tmp_path), "--steps", "3"]
    status = compare_fp8.main(command)
    line = capsys.readouterr().out.splitlines()[-1]
    assert line[:4] == ("FAIL" if status else "PASS")
    losses = [float(x) for x in re.findall(r"(\d\.\d{4}) in", line)]
    assert len(losses) == 2 and losses[0] != losses[1]
    np.testing.assert_allclose(*losses, rtol=0.05)
    assert status == int(abs(losses[0] / losses[1] - 1) > 0.005)
    assert (tmp_path / "curves.png").stat().st_size > 10_000
    assert {p.name for p in tmp_path.iterdir()} == {"FP8", "float32", "curves.png"}
    assert compare_fp8.main(command) == status  # Both runs are already complete.


def test_an_interrupted_comparison_with_shorter_sequences(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(training.PRESETS, "cpu", lambda: CONFIG)
    monkeypatch.setattr(compare_fp8, "load_corpus", lambda *_, **__: corpus())
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
    assert compare_fp8.main(command) == 130
    assert "run the same command again to resume" in capsys.readouterr().out
    assert [c.model.attention.fp8 for c in seen] == [False, True]
    for config in seen:
        assert {name: getattr(config, name) for name in sizes} == sizes
        assert config.eval_sequences * config.seq_len >= CONFIG.eval_sequences * CONFIG.seq_len
    assert (tmp_path / "curves.png").stat().st_size > 10_000
