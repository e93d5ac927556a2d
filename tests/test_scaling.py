"""`benchmarks/scaling.py` in small: every row is right on eight host devices."""

from __future__ import annotations

import importlib
import pathlib
import sys

import numpy as np
import pytest

BENCHMARKS = pathlib.Path(__file__).parent.parent / "benchmarks"
T = 64


@pytest.fixture
def scaling(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield importlib.import_module("scaling")
    sys.modules.pop("scaling")


def run(scaling, path, program, *meshes):
    """The rows of a program on these meshes."""
    for mesh in meshes:
        scaling.main([program, mesh, "--small", "--csv", str(path)])
    return {row["mesh"]: row for row in scaling.rows(path) if row["program"] == program}


def same_loss(rows):
    losses = [float(row["result"]) for row in rows.values()]
    np.testing.assert_allclose(losses, losses[0], rtol=1e-5)


def test_a_checkpoint_on_another_mesh(scaling, tmp_path):
    path = tmp_path / "results" / "scaling.csv"
    found = run(scaling, path, "fsdp", "fsdp=4")
    again = run(scaling, path, "resume", "fsdp=2")
    same_loss(found | again)
    assert float(found["fsdp=4"]["gathered_mib"]) > 0
    assert found["fsdp=4"]["held_gib"] and not again["fsdp=2"]["held_gib"]


@pytest.mark.slow
def test_parameters_are_split(scaling, tmp_path):
    found = run(scaling, tmp_path / "scaling.csv", "fsdp", "fsdp=1", "fsdp=8")
    same_loss(found)
    assert float(found["fsdp=8"]["held_gib"]) < 0.2 * float(found["fsdp=1"]["held_gib"])


@pytest.mark.slow
def test_steps(scaling, tmp_path):
    meshes = "data=1", "data=8", "context=2", "tensor=2", "data=2,context=2,tensor=2"
    found = run(scaling, tmp_path / "scaling.csv", "step", *meshes)
    same_loss(found)
    assert float(found["data=8"]["gathered_mib"]) == 0
    one, every = found["data=1"], found["data=2,context=2,tensor=2"]
    rates = [float(row["tokens_per_second"]) for row in (one, every)]
    assert float(every["efficiency"]) == pytest.approx(rates[1] / rates[0] / 8, abs=5e-4)
    assert not every["product"]  # data=2 is missing


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "meshes"),
    [("layer-131072", ["context=1", "context=8"]), ("layer-32768", ["tensor=1", "tensor=8"])],
)
def test_layers(scaling, tmp_path, program, meshes):
    found = run(scaling, tmp_path / "scaling.csv", program, *meshes)
    same_loss(found)
    if (
        program == "layer-131072"
    ):  # the latent keys and the index keys, in the passes that want them
        keys = 4 * T * (80 + 32) / 2**20
        passes = float(found["context=8"]["gathered_mib"]) / (keys * 7 / 8)
        assert passes == pytest.approx(round(passes)) and passes <= 3


def test_what_is_exchanged(scaling):
    text = """
      %g = bf16[8,16]{1,0} all-gather(%x), replica_groups={{0,1},{2,3}}, dimensions={0}
      %s = (f32[2]{0}, f32[8]{0}) all-gather-start(%x), replica_groups=[1,4]<=[4]
      %d = f32[8]{0} all-gather-done(%s)
      %r = (f32[4]{0}, s32[2]{0}) all-reduce(%x, %y), replica_groups={}, to_apply=%add
      %t = f32[3]{0} reduce-scatter(%x), replica_groups={{0,1,2,3}}
      %p = f8e4m3fn[32]{0} collective-permute(%x), source_target_pairs={{0,1},{1,0}}
    """
    found = [(x.name, x.bytes, x.devices) for x in scaling.collectives(text, 4)]
    assert found == [
        ("all-gather", 256, 2),
        ("all-gather", 32, 4),
        ("all-reduce", 24, 4),
        ("reduce-scatter", 12, 4),
        ("collective-permute", 32, 4),
    ]
    mib = {name: value * 2**20 for name, value in scaling.exchanged(text, 4).items()}
    assert mib == {"gathered_mib": 128 + 24, "reduced_mib": 36 + 36, "other_mib": 32}


def test_meshes(scaling):
    assert scaling.MESHES["step"](1) == [{"data": 1}]
    assert scaling.MESHES["layer-131072"](4) == [{"context": n} for n in (1, 2, 4)]
    every = {"data": 2, "context": 2, "tensor": 2}
    assert scaling.MESHES["layer-32768"](8)[-3:] == [{"data": 2}, {"context": 2}, every]
    assert scaling.axes(scaling.mesh_name(every)) == every


@pytest.mark.slow
def test_from_the_command_line(scaling, tmp_path, capsys):
    path = tmp_path / "scaling.csv"
    found = scaling.main(["fsdp", "--small", "--devices", "2", "--csv", str(path)])
    assert [row["mesh"] for row in found] == ["fsdp=1", "fsdp=2"]
    assert path.with_suffix(".svg").exists()
    assert "| fsdp | fsdp=2 |" in capsys.readouterr().out
    scaling.main(
        ["fsdp", "--small", "--devices", "2", "--csv", str(path)]
    )  # there is nothing to do
    assert len(scaling.rows(path)) == 2
