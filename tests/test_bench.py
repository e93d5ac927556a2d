"""The benchmark's command line and its clock, at sizes that a CPU can take."""

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
from jax_dsa.bench.case import Case, causal_selection, selected_pairs, shrunk, visible_pairs
from jax_dsa.bench.masked_attention import document_bounds
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


def case(label: str) -> Case:
    operator = label.split()[0]
    (found,) = [c for c in OPERATORS[operator](functools.partial(shrunk, 1)) if c.label == label]
    return found


def test_only_slots_with_a_key_count() -> None:
    """Of T = S = 4096 a quarter has none."""
    rates = {"bf16-matmul": 800e12}
    for name in ("sparse_mla bwd", "attn_dist fwd"):
        full = case(f"{name} T4096-S4096-N128-D576-K2048 bf16")
        got = report.row(full, "cuda", 1e-3, rates, "")
        assert got.tflops and got.tflops_all_slots and got.ratio
        keys = np.asarray(causal_selection(jax.random.key(0), 4096, 4096, 2048)) >= 0
        np.testing.assert_allclose(got.tflops / got.tflops_all_slots, keys.mean(), rtol=1e-12)
        np.testing.assert_allclose(got.ratio, got.tflops / 800)
    whole = report.row(
        case("sparse_mla fwd T4096-S8192-N128-D576-K2048 bf16"), "cuda", 1e-3, rates, ""
    )
    assert whole.tflops == whole.tflops_all_slots


NOTES = {"dense": 512, "causal": 512, "window": 512, "varlen": 512, "random": 64, "bias": 512}
NOTES |= {"empty0": 32, "empty75": 32, "kept100": 64, "kept25": 64}


@pytest.mark.parametrize(("note", "scale"), NOTES.items())
def test_only_keys_that_a_query_sees_count(note: str, scale: int) -> None:
    cases = OPERATORS["masked_attention"](functools.partial(shrunk, scale))
    one = next(c for c in cases if c.note == note)

    def seen(key: jax.Array) -> jax.Array:
        """Counts visible keys: without scores, lse is the logarithm of their number."""
        arrays = jax.tree.map(
            lambda x: jnp.zeros_like(x) if jnp.issubdtype(x.dtype, jnp.floating) else x,
            one.make(key),
        )
        _, lse = one.call(*arrays, return_lse=True, implementation="xla")
        return jnp.round(jnp.exp(lse)).sum()

    want = 4 * one.dims["D"] * int(jax.jit(seen)(jax.random.key(0)))
    np.testing.assert_allclose(one.work["bf16-matmul"], want, rtol=0.05 * (note == "random"))


def test_a_pass_counts_its_products() -> None:
    """Two of keys' and values' dims forward; backward scores again, and three of D and two of E."""
    pairs = visible_pairs(8192, 8192) * 128
    for step, dims in (("fwd", 192 + 128), ("bwd", 3 * 192 + 2 * 128)):
        wide = case(f"masked_attention {step} T8192-S8192-N128-D192-E128-causal bf16")
        assert wide.work["bf16-matmul"] == 2 * dims * pairs


def test_documents_are_uneven() -> None:
    lengths = np.diff(document_bounds(262144, 64))
    assert lengths.sum() == 262144 and lengths.size == 64
    assert 120 < lengths.min() < 136 and 16000 < lengths.max() < 16500


def test_the_ceiling_is_the_one_that_takes_longest() -> None:
    """128 heads are bound by the matmul, and by the copy where that is slow."""
    decode = case("sparse_mla fwd B128-T1-S8192-N128-D576-K2048-decode bf16")
    operations, moved = 2 * 128 * 2048 * 128 * 1088, 128 * (2048 * 1152 + 256 * 1088)
    fast = report.row(decode, "cuda", 1e-4, {"bf16-matmul": 800e12, "copy": 4e12}, "")
    slow = report.row(decode, "cuda", 1e-4, {"bf16-matmul": 800e12, "copy": 1e12}, "")
    assert (fast.ceiling, slow.ceiling) == ("bf16-matmul 800 TFLOPS", "copy 1000 GB/s")
    np.testing.assert_allclose(fast.ratio, operations / 800e12 / 1e-4)
    np.testing.assert_allclose(slow.ratio, moved / 1e12 / 1e-4)
    for row in (fast, slow):
        np.testing.assert_allclose(row.tflops, operations / 1e8)
        np.testing.assert_allclose(row.gbytes_per_s, moved / 1e5)
    assert report.row(decode, "cuda", 1e-4, {}, "").ratio is None


def test_speed_ups_are_over_the_same_problem() -> None:
    def row(case: str, implementation: str, milliseconds: float) -> report.Row:
        rest = (None, None, None, "", None, "", "", "")
        return report.Row("topk", "fwd", case, "f32", implementation, milliseconds, *rest)

    rows = [row("S8", "cuda", 2.0), row("S8", "xla", 5.0), row("S8", "lax.top_k", 84.0)]
    rows += [row("S9", "cuda", 1.0), row("S7", "xla", 3.0)]
    want = "topk fwd S8 f32: 2.5 times as fast as xla, 42 times as fast as lax.top_k"
    assert report.speed_ups(rows) == want


def test_a_folder_gets_a_file_for_each_operator(tmp_path: pathlib.Path) -> None:
    only = "R8-S64-K8 .* (xla|lax)|M8-C14 .* xla"
    assert main(["topk", "fp8", *TINY, "--only", only, "--csv", str(tmp_path)]) == 0
    assert {r["implementation"] for r in rows(tmp_path / "topk.csv")} == {"xla", "lax.top_k"}
    assert {p.stem for p in tmp_path.iterdir()} == {"copy", "fp8", "topk"}


def test_a_run_that_is_stopped_leaves_its_rows(
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


def test_a_backward_pass(tmp_path: pathlib.Path) -> None:
    out = tmp_path / "bwd.csv"
    only = "bwd T8-S8-N64-.* xla"
    assert main(["sparse_mla", *TINY, "--only", only, "--csv", str(out)]) == 0
    assert [r["pass"] for r in rows(out)] == ["fwd", "bwd"]  # the ceiling, the case


def test_what_has_no_kernel_is_said(
    capsys: pytest.CaptureFixture[str], without_kernels: None
) -> None:
    assert main(["fp8", *TINY, "--only", "M8-N14-K8 .* cuda"]) == 0
    assert "fp8_matmul_fwd" in capsys.readouterr().err


def test_list_names_every_operator(capsys: pytest.CaptureFixture[str]) -> None:
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
def test_every_case_is_a_call_that_its_operator_takes(operator: str) -> None:
    """Traced, not run."""
    for case in OPERATORS[operator](functools.partial(shrunk, 64)):
        outs = jax.eval_shape(
            lambda key, case=case: case.call(*case.make(key), implementation="xla"),
            jax.random.key(0),
        )
        assert jax.tree.leaves(outs), case.label


def test_an_unknown_operator_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["sparse_mlb"])
    assert "no operator sparse_mlb; there are" in capsys.readouterr().err


def test_the_timed_loop_runs_every_call() -> None:
    """XLA neither hoists nor merges the calls, nor drops one whose result looks unused."""
    seen = []

    def fn(x: jax.Array) -> jax.Array:
        def count(value: Any) -> Any:
            seen.append(float(value[0]))
            return value

        return jax.pure_callback(count, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    sets = [(jnp.full(4, 1.0),), (jnp.full(4, 2.0),)]
    jax.jit(lambda sets: timing._loop(fn, 5, sets))(sets).block_until_ready()
    assert sorted(seen) == [1.0] * 5 + [2.0] * 5


def test_the_device_rests_before_every_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    rests = []
    monkeypatch.setattr(timing.time, "sleep", rests.append)
    # A budget of which no machine, however busy, needs ten times for one call.
    timing._seconds_a_call(lambda x: x + 1, [(jnp.zeros(8),)], 1.0, 0.25)
    assert [rest for rest in rests if rest] == [0.25] * (3 + 5)  # one round, and several


@pytest.mark.parametrize("sets", [1, 5, 16])
@pytest.mark.parametrize("product", [20e-6, 600e-6, 5e-3])
def test_what_the_loop_adds_is_taken_off(
    monkeypatch: pytest.MonkeyPatch, sets: int, product: float
) -> None:
    """A round's own cost is shared by its calls. Taken off as if each call had a round to itself,
    it once made a product faster than its bytes can be copied.
    """
    program, chain, loop = 1e-4, 2e-6, 12e-6

    def clock(fn: Any, sets: Any) -> Any:
        products = str(jax.make_jaxpr(fn)(*sets[0])).count("dot_general")
        a_round = loop + len(sets) * (chain + product * products)
        return lambda rounds, *_: program + rounds * a_round

    monkeypatch.setattr(timing, "_clock", clock)
    monkeypatch.setattr(timing, "_overhead", timing._overhead.__wrapped__)
    x = jnp.ones((4, 4))
    got = timing.device_seconds(jnp.matmul, [(x, x)] * sets)
    np.testing.assert_allclose(got, product, rtol=0.01)


def test_selections_are_causal_and_distinct() -> None:
    picks = np.asarray(causal_selection(jax.random.key(1), queries=6, keys=10, picks=7))
    for t, row in enumerate(picks):
        visible = 10 - 6 + 1 + t
        valid = row[row >= 0]
        assert len(valid) == min(7, visible) == len(set(valid.tolist()))
        assert valid.max() < visible and (np.diff(valid) > 0).all()
    assert selected_pairs(6, 10, 7) == (picks >= 0).sum()
    assert visible_pairs(6, 10) == sum(10 - 6 + 1 + t for t in range(6))
