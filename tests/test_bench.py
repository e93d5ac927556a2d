"""The benchmark's command line, its reports and its clock, at sizes for a CPU."""

from __future__ import annotations

import csv
import functools
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_dsa.bench.__main__ as bench
from jax_dsa.bench import report, timing
from jax_dsa.bench.__main__ import main
from jax_dsa.bench.case import shrunk
from jax_dsa.bench.registry import OPERATORS

COLUMNS = (
    "operator,pass,case,dtype,implementation,milliseconds,tflops,tflops_all_slots,gbytes_per_s,"
    "ceiling,ratio,device,jax,commit"
)
TINY = ["--scale", "512", "--seconds", "0.001", "--commit", "abc"]


def rows(path: pathlib.Path) -> list[dict[str, str]]:
    assert path.read_text().splitlines()[0] == COLUMNS
    with path.open() as f:
        return list(csv.DictReader(f))


@pytest.mark.slow
def test_csv_table_and_plot(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "results.csv"
    plot = tmp_path / "plot.png"
    only = r"(M8-C14|M16-N16-K16) .* xla"
    assert main(["fp8", *TINY, "--only", only, "--csv", str(out), "--plot", str(plot)]) == 0
    found = {(r["operator"], r["case"]): r for r in rows(out)}
    assert list(found) == [
        ("fp8-matmul", "M16-N16-K16"),
        ("copy", "C524288"),
        ("fp8", "M8-C14"),
        ("fp8", "M16-N16-K16"),
    ]
    for r in found.values():
        assert float(r["milliseconds"]) > 0 and float(r["ratio"]) > 0
        assert (r["pass"], r["implementation"], r["commit"]) == ("fwd", "xla", "abc")
        assert (r["device"], r["jax"]) == (jax.devices()[0].device_kind, jax.__version__)
    by_bytes, by_flops = found["fp8", "M8-C14"], found["fp8", "M16-N16-K16"]
    assert by_bytes["tflops"] == "" and by_bytes["ceiling"].endswith("GB/s")
    assert by_flops["gbytes_per_s"] == "" and by_flops["ceiling"].endswith("TFLOPS")
    moved = 8 * (3 * 14 + 4)  # bytes
    rate = moved / float(by_bytes["milliseconds"]) * 1e-6
    np.testing.assert_allclose(float(by_bytes["gbytes_per_s"]), rate, rtol=1e-3)
    assert plot.read_bytes()[:4] == b"\x89PNG"
    assert "M16-N16-K16" in capsys.readouterr().out


def test_speed_ups_compare_the_same_problem() -> None:
    def row(case: str, implementation: str, milliseconds: float) -> report.Row:
        rest = (None, None, None, "", None, "", "", "")
        return report.Row("topk", "fwd", case, "f32", implementation, milliseconds, *rest)

    rows = [row("S8", "cuda", 2.0), row("S8", "xla", 5.0), row("S8", "lax.top_k", 84.0)]
    rows += [row("S9", "cuda", 1.0), row("S7", "xla", 3.0)]
    want = "topk fwd S8 f32: 2.5 times as fast as xla, 42 times as fast as lax.top_k"
    assert report.speed_ups(rows) == want


@pytest.mark.slow
def test_a_folder_gets_one_file_per_operator(tmp_path: pathlib.Path) -> None:
    only = "R8-S64-K8 .* (xla|lax)|M8-C14 .* xla"
    assert main(["topk", "fp8", *TINY, "--only", only, "--csv", str(tmp_path)]) == 0
    assert {r["implementation"] for r in rows(tmp_path / "topk.csv")} == {"xla", "lax.top_k"}
    assert {p.stem for p in tmp_path.iterdir()} == {"copy", "fp8", "topk"}


def test_an_interrupted_run_keeps_its_rows(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = iter([1e-3, 2e-3])

    def measure(*_: Any) -> float:
        for seconds in measured:
            return seconds
        raise KeyboardInterrupt

    monkeypatch.setattr(bench, "_measure", measure)
    out = tmp_path / "topk.csv"
    assert main(["topk", *TINY, "--only", "R8-S64-K8 .* (xla|lax)", "--csv", str(out)]) == 1
    assert [r["implementation"] for r in rows(out)] == ["xla", "xla"]  # the ceiling, the case
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:3]] == ["operator", "copy", "topk"]


@pytest.mark.slow
def test_a_backward_case(tmp_path: pathlib.Path) -> None:
    out = tmp_path / "bwd.csv"
    only = "bwd T8-S8-N64-.* xla"
    assert main(["sparse_mla", *TINY, "--only", only, "--csv", str(out)]) == 0
    assert [r["pass"] for r in rows(out)] == ["fwd", "bwd"]  # the ceiling, the case


def test_a_missing_kernel_is_reported(
    capsys: pytest.CaptureFixture[str], without_kernels: None
) -> None:
    assert main(["fp8", *TINY, "--only", "M8-N14-K8 .* cuda"]) == 0
    assert "fp8_matmul_fwd" in capsys.readouterr().err


def test_list_contains_every_operator(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {line.split()[0] for line in lines} == set(OPERATORS)
    for wanted in (
        "sparse_mla fwd T4096-S8192-N128-D576-K2048 bf16 cuda",
        "sparse_mla bwd-deterministic T4096-S8192-N128-D576-K2048 bf16 xla",
        "topk fwd R64-S32768-K2048 f32 lax.top_k",
        "fp8 fwd M4096-C7168 bf16 cuda",
    ):
        assert wanted in lines
    assert len(lines) == len(set(lines))


@pytest.mark.parametrize("operator", OPERATORS)
def test_every_case_can_be_traced(operator: str) -> None:
    for case in OPERATORS[operator](functools.partial(shrunk, 64)):
        outs = jax.eval_shape(
            lambda key, case=case: case.call(*case.make(key), implementation="xla"),
            jax.random.key(0),
        )
        assert jax.tree.leaves(outs), case.label


def test_an_unknown_operator_is_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["sparse_mlb"])
    assert "no operator sparse_mlb; there are" in capsys.readouterr().err


def test_the_timed_loop_runs_every_call() -> None:
    """XLA must not hoist, merge or drop calls."""
    seen = []

    def fn(x: jax.Array) -> jax.Array:
        def count(value: Any) -> Any:
            seen.append(float(value[0]))
            return value

        return jax.pure_callback(count, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    sets = [(jnp.full(4, 1.0),), (jnp.full(4, 2.0),)]
    jax.jit(lambda sets: timing._loop(fn, 5, sets))(sets).block_until_ready()
    assert sorted(seen) == [1.0] * 5 + [2.0] * 5


def test_the_device_is_idle_before_every_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    rests = []
    monkeypatch.setattr(timing.time, "sleep", rests.append)
    # With this budget a call is never so slow that the measurement stops after one round.
    timing._seconds_per_call(lambda x: x + 1, [(jnp.zeros(8),)], 1.0, 0.25)
    assert [rest for rest in rests if rest] == [0.25] * (3 + 5)  # one round, then several rounds


@pytest.mark.parametrize("sets", [1, 5, 16])
@pytest.mark.parametrize("product", [20e-6, 600e-6, 5e-3])
def test_the_overhead_of_the_loop_is_subtracted(
    monkeypatch: pytest.MonkeyPatch, sets: int, product: float
) -> None:
    """The calls of a round share its cost.

    Subtracting the whole cost from each call once made a product faster than a copy of its bytes.
    """
    program, chain, loop = 1e-4, 2e-6, 12e-6

    def clock(fn: Any, sets: Any) -> Any:
        products = str(jax.make_jaxpr(fn)(*sets[0])).count("dot_general")
        seconds_per_round = loop + len(sets) * (chain + product * products)
        return lambda rounds, *_: program + rounds * seconds_per_round

    monkeypatch.setattr(timing, "_clock", clock)
    monkeypatch.setattr(timing, "_overhead", timing._overhead.__wrapped__)
    x = jnp.ones((4, 4))
    got = timing.device_seconds(jnp.matmul, [(x, x)] * sets)
    np.testing.assert_allclose(got, product, rtol=0.01)


@pytest.mark.parametrize("option", ["--scale=0", "--scale=-2", "--seconds=0"])
def test_sizes_and_times_have_to_be_positive(
    option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["--list", option])
    assert "is not positive" in capsys.readouterr().err
