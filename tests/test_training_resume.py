"""Runs that are killed, resumed on another mesh, or distributed over two processes."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import json
import pathlib
import shutil
import signal
import sys
import time

import jax
import numpy as np
import pytest
from support.training import CONFIG, MESH_CONFIG, corpus
from support.workers import Worker, finish, free_port

from jax_dsa.training.checkpoint import Checkpoints
from jax_dsa.training.mesh import make_mesh
from jax_dsa.training.trainer import Log, Trainer

PROGRAM = pathlib.Path(__file__).parent / "support" / "training_worker.py"
MOMENTS: list = []  # Functions that run before each change of a file by Python.

sys.addaudithook(
    lambda event, _: (
        [at() for at in MOMENTS] if event in ("os.rename", "os.mkdir", "open") else None
    )
)


@pytest.mark.slow
def test_a_run_resumes_on_another_mesh(tmp_path, monkeypatch):
    """The losses on two different meshes of four devices match those of one device."""
    whole = Trainer(MESH_CONFIG, corpus(), tmp_path / "whole")
    assert whole.run()
    folder = tmp_path / "moved"
    first = make_mesh({"data": 1, "fsdp": 2, "tensor": 2})
    interrupted = Trainer(MESH_CONFIG, corpus(), folder, first)
    stops_after(monkeypatch, interrupted, 10)
    assert not interrupted.run() and interrupted.step == 10
    second = make_mesh({"data": 2, "context": 2})
    last = Trainer(MESH_CONFIG, corpus(), folder, second)
    held = last.state.backbone.params
    assert {x.sharding.mesh for x in jax.tree.leaves(held)} == {second}
    for old, new in zip(
        jax.tree.leaves(interrupted.state), jax.tree.leaves(last.state), strict=True
    ):
        np.testing.assert_array_equal(old, new)
    assert last.run()
    rows = [run.log.rows() for run in (last, whole)]
    for got, want in zip(*rows, strict=True):
        for name in ("lm_loss", "kl", "control_loss", "validation_sparse", "recall_indexer"):
            if want[name]:
                np.testing.assert_allclose(float(got[name]), float(want[name]), rtol=1e-3)


def stops_after(monkeypatch, trainer, steps):
    """Makes SIGINT arrive in the middle of the last of these steps."""
    step = trainer.program.step

    def stepping(state, tokens):
        if int(state.step) == steps - 1:
            signal.raise_signal(signal.SIGINT)
        return step(state, tokens)

    monkeypatch.setattr(trainer.program, "step", stepping)


@pytest.mark.slow
def test_a_run_can_resume_from_any_moment(tmp_path, monkeypatch):
    """Copies the folder before each change of a file, and resumes from some of the copies."""
    config = dataclasses.replace(CONFIG, checkpoint_every=2, log_every=1)
    folder, states, copies = tmp_path / "run", {}, []
    trainer = Trainer(config, corpus(), folder)
    save = Checkpoints.save

    def saving(self, state, facts):
        states[int(state.step)] = jax.tree.map(np.array, state)
        save(self, state, facts)

    monkeypatch.setattr(Checkpoints, "save", saving)

    def copy():
        at = list(MOMENTS)
        MOMENTS.clear()  # Copying changes files too.
        copies.append(tmp_path / f"copy{len(copies)}")
        with contextlib.suppress(
            shutil.Error, FileNotFoundError
        ):  # Files may be moved away meanwhile.
            shutil.copytree(folder, copies[-1])
        MOMENTS.extend(at)

    MOMENTS.append(copy)
    try:
        assert trainer.run()
    finally:
        MOMENTS.clear()
    assert len(states) == 9 and len(copies) > 50
    partial = [c for c in copies if list(c.glob("checkpoints/*tmp*"))]
    assert len(partial) > 10
    found = set()
    for left in [c for c in copies if c.exists()][::3] + partial[::3]:
        checkpoints = Checkpoints(left / "checkpoints")
        step = checkpoints.latest()
        log = Log(left / "metrics.csv", trainer.log.columns)
        log.keep_until(step or 0)
        assert [int(r["step"]) for r in log.rows()] == list(range(1, (step or 0) + 1))
        if step is not None:
            assert checkpoints.facts(step)["corpus"] == corpus().fingerprint
            restored = checkpoints.restore(step, trainer.state)
            jax.tree.map(np.testing.assert_array_equal, restored, states[step])
        checkpoints.close()
        found.add(step)
    assert len(found) > 4


def test_an_incomplete_row_is_deleted(tmp_path):
    log = Log(tmp_path / "metrics.csv")
    log.keep_until(0)
    for step in (2, 12):
        log.append({"step": step, "stage": "dense"})
    text = log.path.read_text()
    for end in range(text.index("12,"), len(text)):
        log.path.write_text(text[:end])
        log.keep_until(2)
        assert [r["step"] for r in log.rows()] == ["2"]


def start(folder, *arguments, devices=1):
    log = folder.with_name(f"{folder.name}{''.join(arguments[-1:])}.log")
    return Worker(log, PROGRAM, str(folder), *arguments, devices=devices)


def losses(folder):
    with (folder / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    return [[float(r[k] or 0) for k in ("step", "lm_loss", "kl", "control_loss")] for r in rows]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["keys", "means"])
def test_a_killed_run_resumes(kind, tmp_path):
    """The process is killed while it writes a checkpoint."""
    finish(start(tmp_path / "whole", "--attention", kind))
    killed = start(tmp_path / "killed", "--attention", kind)
    deadline = time.time() + 300
    while not list((tmp_path / "killed").glob("checkpoints/*tmp*")):
        assert killed.process.poll() is None and time.time() < deadline
    killed.kill()
    assert killed.process.returncode == -signal.SIGKILL
    finish(start(tmp_path / "killed", "--attention", kind))
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{"data": 4}, {"fsdp": 2, "context": 2}], ids=str)
def test_two_processes_match_one(tmp_path, mesh):
    """Each process has two devices."""
    finish(start(tmp_path / "one"))
    address = f"127.0.0.1:{free_port()}"
    arguments = ("--mesh", json.dumps(mesh), "--address", address)
    finish(*(start(tmp_path / "two", *arguments, "--process", str(i), devices=2) for i in range(2)))
    np.testing.assert_allclose(losses(tmp_path / "two"), losses(tmp_path / "one"), rtol=1e-3)
