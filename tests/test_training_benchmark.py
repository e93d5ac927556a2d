"""`benchmarks/training.py` in small: every row is right on eight host devices."""

from __future__ import annotations

import csv
import importlib
import pathlib
import sys

import numpy as np
import pytest
from quick import compile_quickly  # noqa: F401

BENCHMARKS = pathlib.Path(__file__).parent.parent / "benchmarks"
T = 64


@pytest.fixture
def training(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield importlib.import_module("training")
    sys.modules.pop("training")


@pytest.mark.parametrize(
    "row",
    [
        "fsdp",
        *(pytest.param(row, marks=pytest.mark.slow) for row in ("data", "context", "tensor")),
        pytest.param("step", marks=pytest.mark.slow),
    ],
)
def test_a_row(training, tmp_path, capsys, row):
    path = tmp_path / "results" / "training.csv"
    found = training.main([row, "--small", "--devices", "4", "--csv", str(path)])
    with path.open(newline="") as file:
        assert [r["row"] for r in csv.DictReader(file)] == [row]
    assert found["devices"] == (1 if row == "step" else 4)
    if row == "fsdp":
        assert found["gain"] < 0.3
        return
    assert found["tokens_per_second"] > 0
    if row == "step":
        return
    np.testing.assert_allclose(found["result"], found["result_one"], rtol=1e-5)
    work = 4 if row == "data" else 1
    np.testing.assert_allclose(found["gain"], work * found["ms_one"] / found["ms"])
    lines = [line for line in capsys.readouterr().out.splitlines() if "all-gather" in line]
    gathered = {line.split()[-1] for line in lines}
    if row == "context":  # the latent keys and the index keys, nothing of the queries' size
        assert gathered == {f"f32[1,{T},1,80]", f"f32[1,{T},32]"}
    if row == "data":
        assert not gathered
