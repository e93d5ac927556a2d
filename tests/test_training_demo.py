"""The demo's command line and its results."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.marks import slow
from support.training import ATTENTION, CONFIG, STAGES, corpus, interrupt_at, share_programs

from jax_dsa import training
from jax_dsa.training import cli, summary
from jax_dsa.training import trainer as trainer_module
from jax_dsa.training.data import VOCAB, RunError


@pytest.fixture(autouse=True)
def share(monkeypatch):
    share_programs(monkeypatch)


def cross_entropy(logits, tokens):
    """Returns the mean loss in nats of a batch [B, T + 1], from its first T tokens' logits."""
    logits = np.asarray(logits, np.float64)
    right = np.take_along_axis(logits, np.asarray(tokens)[:, 1:, None], -1)[..., 0]
    return np.mean(np.log(np.exp(logits).sum(-1)) - right)


def results(**changes):
    """Returns results that pass all checks, with these changes."""
    recall = {"indexer": 0.9, "random": 0.3, "recency": 0.7, "best": 0.95}
    found = summary.Results(
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


def check_output(out, trainer):
    """Computes the printed results and the last row of the log again, from the final state."""
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
        """Returns the recalls of all selections but the random one, and the warm-up loss."""
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
    for name in ("recall_indexer", "validation_kl"):  # There is only one layer.
        assert row[name] == row[f"{name}_layer_0"]
    assert int(row["step"]) * CONFIG.seq_len * CONFIG.batch_size == int(row["tokens"])

    prompt = corpus().validation[1 : CONFIG.seq_len // 3]  # after the token that precedes the file
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


@pytest.mark.slow
def test_the_demo(tmp_path, monkeypatch, capsys):
    """Runs the command line, interrupts it, and resumes it."""
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
    assert "stopped after step 6; run the same command again to resume" in capsys.readouterr().out
    assert cli.main(command) == 0
    out = capsys.readouterr().out
    for text in ("resuming from step 6", "validation loss", "top-k mass recall", "tokens/s"):
        assert text in out
    check_output(out, trainer_module.Trainer(CONFIG, corpus(), folder))
    assert (folder / "curves.png").stat().st_size > 10_000
    assert asked[0] == ((pathlib.Path("books"), folder), {"vocab": VOCAB})
    with pytest.raises(SystemExit):
        cli.main([*command, "--seed", "1"])
    assert "seed was 0, is 1" in capsys.readouterr().err
    assert (folder / "curves.png").exists()


def test_the_demo_in_fp8(monkeypatch):
    """The option --fp8 changes the model and the default folder."""
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


@pytest.mark.parametrize("absent", [slow(("dense",)), slow(tuple(STAGES))], ids=str)
def test_a_demo_without_a_stage(tmp_path, monkeypatch, capsys, absent):
    """Without a stage, checks that need it do not pass."""
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
def test_invalid_numbers_are_rejected(tmp_path, capsys, option):
    with pytest.raises(SystemExit):
        cli.main(["--run-dir", str(tmp_path / "run"), f"--{option}"])
    name, number = option.split("=")
    assert (
        f"argument '{name.replace('-', '_')}' is {number}, want int in" in capsys.readouterr().err
    )
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [(["--data", "none"], "too few text files"), (["--mesh", "data=999"], "expected at most")],
)
def test_a_failed_restart_deletes_no_checkpoint(options, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    kept = tmp_path / "run" / "checkpoints" / "kept"
    kept.parent.mkdir(parents=True)
    kept.write_text("")
    with pytest.raises(SystemExit):
        cli.main([*options, "--run-dir", "run", "--restart"])
    assert message in capsys.readouterr().err
    assert kept.exists()
