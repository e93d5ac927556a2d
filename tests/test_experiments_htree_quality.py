"""`experiments/htree_quality.py` at a small size."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

pytest.importorskip("flax")
pytest.importorskip("optax")

from support import repository  # noqa: F401

from experiments import htree_quality

SMALL = {"layers": 1, "width": 32, "heads": 2, "dim": 16, "sequences": 2, "minutes": 0.001}


def run(folder: Path, tokens: int, top_k: int) -> tuple[int, dict[tuple[str, str], list[float]]]:
    text = folder / "text"
    for package in "abcdefghijklmnopqrstuvwx":  # One in twenty is for validation.
        (text / package).mkdir(parents=True)
        lines = (f"{package}_{i} = {i * i} + {package}_{i // 2}\n" for i in range(120))
        (text / package / "module.py").write_text("".join(lines))
    options = {"data": text, "run-dir": folder / "run", "tokens": tokens, "top-k": top_k, **SMALL}
    status = htree_quality.main([f"--{name}={value}" for name, value in options.items()])
    found: dict[tuple[str, str], list[float]] = {}
    with (folder / "run" / "htree_quality.csv").open() as file:
        for row in csv.DictReader(file):
            found.setdefault((row["measure"], row["model"]), []).append(float(row["nats_per_byte"]))
    return status, found


def test_a_tree_that_selects_all_nodes_equals_dense_attention(tmp_path: Path) -> None:
    status, found = run(tmp_path, 128, 8)
    assert status == 0
    for measure in ("step", "part"):
        assert found[measure, "tree, top_k 8"] == pytest.approx(found[measure, "dense"], abs=0.02)


def test_a_tree_that_selects_nodes_is_compared_with_dense_attention(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, found = run(tmp_path, 512, 2)
    assert found["step", "tree, top_k 2"] != found["step", "dense"]
    trained, dense_model = (
        found["part", name] for name in ("tree, top_k 2", "dense with tree, top_k 2")
    )
    assert len(trained) == len(dense_model) == htree_quality.BINS
    change = sum(trained) / sum(found["part", "dense"]) - 1
    assert status == int(change > htree_quality.TOLERANCE)
    assert f"attention's: {change:+.2%}" in capsys.readouterr().out
