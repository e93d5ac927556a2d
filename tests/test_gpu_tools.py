"""The tools that run GPU tests and the sanitizer, on machines with simulated GPUs."""

from __future__ import annotations

import os
import re
import sys
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from support.scripts import load_script

if TYPE_CHECKING:
    from pathlib import Path
    from types import ModuleType

# In place of pytest: appends to a file when it begins and ends, and writes what a test asks for.
PYTEST = """
import os, pathlib, signal, sys, time
results = pathlib.Path(sys.argv[sys.argv.index("--results") + 1])
where = {x: os.environ[x] for x in ("CUDA_VISIBLE_DEVICES", "JAX_DSA_SHARED_KIB")}
events = open(results.parent / "events", "a", buffering=1)
print("begin", results.stem, *where.values(), file=events)
print("the log of", results.stem, sys.argv[-1], flush=True)
wanted = pathlib.Path(os.environ["WANTED"]) / results.name
lines = wanted.read_text() if wanted.exists() else '''
{"selected": 2}
{"test": "a", "outcome": "passed", "reason": ""}
{"test": "b", "outcome": "skipped", "reason": "Skipped: only Hopper has it"}
'''.lstrip()
results.write_text(lines)
if "hang" in lines:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    time.sleep(60)
time.sleep(0.1)
print("end", results.stem, file=events)
sys.exit("failed" in lines)
"""


@pytest.fixture(name="tool")
def fixture_tool(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """tools/gpu_tests.py on a machine with two GPUs and the pytest above."""
    tool = load_script("tools/gpu_tests.py", monkeypatch)
    (tmp_path / "fake.py").write_text(PYTEST)
    monkeypatch.setattr(tool, "PYTEST", [sys.executable, "-S", str(tmp_path / "fake.py")])
    monkeypatch.setattr(tool, "check_kernels", lambda: None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4, 7")
    monkeypatch.setenv("WANTED", str(tmp_path))
    monkeypatch.chdir(tmp_path)  # the tool changes the folder, too
    return tool


def run(tool: ModuleType, tmp_path: Path, *arguments: str) -> int:
    return tool.main(["--output", str(tmp_path / "out"), "--workers", "2", *arguments])


def printed(capsys: pytest.CaptureFixture[str]) -> str:
    """Returns what the tool printed, without times."""
    return re.sub(r"\d+ s\b", "T", capsys.readouterr().out)


def events(tmp_path: Path) -> list[list[str]]:
    return [line.split() for line in (tmp_path / "out" / "events").read_text().splitlines()]


def test_configurations_share_the_gpus(
    tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tool, tmp_path, "--", "-k", "topk") == 0
    happened = events(tmp_path)
    begun = {e[1]: e[2:] for e in happened if e[0] == "begin"}
    assert list(begun)[:2] in (["hopper", "portable"], ["portable", "hopper"])
    assert list(begun)[-1] == "several" and happened[-2][:2] == ["begin", "several"]
    assert {*(x for name, (x, *_) in begun.items() if name != "several")} == {"4", "7"}
    assert [begun[x][1:] for x in ("hopper", "portable", "portable-163", "portable-99")] == [
        *([], ["227"], ["163"], ["99"])
    ]
    assert begun["several"] == ["4,7"]
    running = 0
    for event in happened:
        running += 1 if event[0] == "begin" else -1
        assert running <= 2
    assert (tmp_path / "out" / "hopper.log").read_text() == "the log of hopper topk\n"
    text = printed(capsys)
    assert "portable-99: 1 skipped: only Hopper has it\n" in text
    assert "| several | 4,7 | 1 | 0 | 1 | 0 |" in text


def test_one_gpu_leaves_out_the_tests_of_several(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert run(tool, tmp_path) == 0
    names = ("hopper", "portable", "portable-163", "portable-99")
    assert [e[:2] for e in events(tmp_path)] == [[x, n] for n in names for x in ("begin", "end")]


PASSED = '{"test": "a", "outcome": "passed", "reason": ""}\n'
FAILED = '{"test": "b", "outcome": "failed", "reason": "f:1: in f\\nE   assert 0\\nE   and"}\n'
SKIPPED = '{"test": "c", "outcome": "skipped", "reason": "Skipped: one GPU"}\n'


@pytest.mark.parametrize(
    ("lines", "row"),
    [
        ('{"selected": 3}\n' + PASSED + FAILED + SKIPPED, "1 | 1 | 1 | 0 | T | failed"),
        ('{"selected": 3}\n' + PASSED + SKIPPED, "1 | 0 | 1 | 1 | T | incomplete"),
        ('{"selected": 1}\n' + SKIPPED, "0 | 0 | 1 | 0 | T | all skipped"),
        # A test that passed may fail in its teardown.
        ('{"selected": 1}\n' + FAILED + PASSED.replace('"a"', '"b"'), "0 | 1 | 0 | 0 | T | failed"),
        # Errors during collection.
        ("failed", "0 | 0 | 0 | all | T | exit status 1"),
    ],
)
def test_the_exit_status_tells_of_what_went_wrong(
    tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], lines: str, row: str
) -> None:
    (tmp_path / "portable.jsonl").write_text(lines)
    assert run(tool, tmp_path, "--configurations", "hopper", "portable") == 1
    text = printed(capsys)
    assert "| hopper | 4 | 1 | 0 | 1 | 0 | T | ok |" in text
    assert f"| portable | 7 | {row} |" in text
    assert ("portable: b: assert 0\n" in text) == ("f:1" in lines)


def test_the_limit_stops_everything(
    tool: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The results up to the limit count, also those of a process that ignores the interrupt."""
    hang = '{"selected": 9}\n' + PASSED + FAILED + '{"test": "hang'
    for name in ("hopper", "portable-163"):
        (tmp_path / f"{name}.jsonl").write_text(hang)

    def clock() -> float:
        """Reaches the limit when both GPUs run a process that hangs."""
        files = [tmp_path / "out" / f"{name}.jsonl" for name in ("hopper", "portable-163")]
        hanging = all(file.exists() and file.read_text() == hang for file in files)
        return time.monotonic() + 1000 * hanging

    queue = sys.modules[tool.run_tasks.__module__]
    monkeypatch.setattr(queue, "GRACE", 0.1)
    monkeypatch.setattr(queue, "time", SimpleNamespace(monotonic=clock, sleep=time.sleep))
    assert run(tool, tmp_path, "--limit", "900") == 1
    assert [e[1] for e in events(tmp_path) if e[0] == "end"] == ["portable"]
    text = printed(capsys)
    assert "| hopper | 4 | 1 | 1 | 0 | 7 | T | stopped |" in text
    assert "| portable-163 | 7 | 1 | 1 | 0 | 7 | T | stopped |" in text
    for name in ("portable-99", "several"):
        assert f"| {name} | - | 0 | 0 | 0 | all | T | not started |" in text


def test_a_machine_without_a_gpu(tool: ModuleType, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(SystemExit, match="no NVIDIA GPU"):
        run(tool, tmp_path)


TESTS = """
import os, pytest

@pytest.mark.gpu
def test_where():
    assert os.environ["JAX_DSA_TIER"] == "portable"

@pytest.mark.gpu
@pytest.mark.several_gpus
def test_skips():
    pytest.skip("one GPU")

@pytest.mark.gpu
def test_crashes():
    os._exit(1)

@pytest.fixture
def broken():
    raise ValueError("a fixture fails")

@pytest.mark.gpu
def test_of_a_broken_fixture(broken):
    pass

def test_without_a_gpu():
    pass
"""


def test_pytest_writes_every_result(
    tool: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The real pytest with pytest-xdist."""
    (tmp_path / "test_all.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n    several_gpus\n")
    monkeypatch.setattr(tool, "PYTEST", [sys.executable, "-m", "pytest"])
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    arguments = ["--configurations", "portable", "--", "-p", "xdist", str(tmp_path)]
    assert run(tool, tmp_path, *arguments) == 1
    text = printed(capsys)
    assert "| portable | 4 | 1 | 2 | 1 | 0 |" in text
    assert "test_of_a_broken_fixture: ValueError: a fixture fails" in text
    assert "portable: 1 skipped: one GPU" in text


# In place of nvcc and compute-sanitizer.
NVCC = """#!/bin/sh
echo "$@" >> {log}
"""
SANITIZER = """#!/bin/sh
echo "$@ ${{JAX_DSA_TIER:-hopper}} GPU $CUDA_VISIBLE_DEVICES" >> {log}
case "$*" in
  *_race) echo "RACECHECK SUMMARY: 1 hazard displayed" ;;
  *memcheck*topk_check*) echo "ERROR SUMMARY: 2 errors" ;;
  *racecheck*) echo "RACECHECK SUMMARY: 0 hazards displayed" ;;
  *) echo "ERROR SUMMARY: 0 errors" ;;
esac
"""


@pytest.fixture(name="sanitize")
def fixture_sanitize(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """tools/sanitize.py on a machine with two GPUs and the tools above, which log their calls."""
    for name, script in (("nvcc", NVCC), ("compute-sanitizer", SANITIZER)):
        (tmp_path / name).write_text(script.format(log=tmp_path / f"{name}.log"))
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("CUDACXX", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    return load_script("tools/sanitize.py", monkeypatch)


def calls(tmp_path: Path, tool: str) -> list[str]:
    return (tmp_path / f"{tool}.log").read_text().splitlines()


HOPPER_SOURCES = ("cuda/htree/bwd.cu", "cuda/htree/fwd.cu", "cuda/topk/cluster.cu")


def test_programs_share_objects(sanitize: ModuleType, tmp_path: Path) -> None:
    assert sanitize.main(["--build", str(tmp_path / "programs"), "--only", "htree", "topk"]) == 0
    compiled = [c for c in calls(tmp_path, "nvcc") if " -c cuda/" in c]
    sources = [c.split(" -c ")[1].split()[0] for c in compiled]
    assert len({*sources}) == len(sources) and "cuda/htree/fwd.cu" in sources
    for call, source in zip(compiled, sources):
        assert ("sm_90a" in call) == (source in HOPPER_SOURCES), call
    (link,) = [c for c in calls(tmp_path, "nvcc") if c.endswith("/topk_check")]
    assert [x.rsplit("/")[-1] for x in link.split() if x.endswith(".o")] == [
        *("tests.kernels.gpu.topk_check.cu.o", "cuda.topk.cluster.cu.o", "cuda.topk.dispatch.cu.o")
    ]


def test_sources_compile_in_one_way_for_all_programs(sanitize: ModuleType, tmp_path: Path) -> None:
    """Otherwise one program would get the object of another."""
    programs = {p: sanitize.build_steps([p], tmp_path)[0] for p in sanitize.CHECKS}
    commands = {tuple(c) for steps in programs.values() for c in steps}
    assert len(commands) == len(sanitize.build_steps(sanitize.CHECKS, tmp_path)[0])


def test_the_sanitizer_runs_on_all_gpus_in_both_tiers(
    sanitize: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tools = ["--only", "topk_check", "losses", "--tools", "racecheck", "memcheck"]
    configurations = ["--configurations", "hopper", "portable-99", "--jobs", "4"]
    folders = ["--programs", str(tmp_path / "programs"), "--output", str(tmp_path / "logs")]
    assert sanitize.main([*tools, *configurations, *folders]) == 1
    made = calls(tmp_path, "compute-sanitizer")
    assert len(made) == 2 * 2 * 2 + 2 * len(sanitize.PATTERNS)
    assert len([c for c in made if " small portable GPU " in c]) == 4
    assert {c[-1] for c in made} == {"0", "1"}
    assert (tmp_path / "logs" / "losses_check.portable-99.memcheck.log").is_file()
    text = printed(capsys)
    assert "| losses_check (portable-99) | 0 (T) | 0 (T) | - | - |" in text
    assert text.endswith(
        "\n\ntopk_check: 2 errors of memcheck\ntopk_check (portable-99): 2 errors of memcheck\n"
    )


def test_the_limit_stops_the_sanitizer(
    sanitize: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--only", "topk_check", "--tools", "memcheck", "--limit", "0"]
    assert sanitize.main([*arguments, "--programs", str(tmp_path)]) == 1
    assert "topk_check: memcheck not started\n" in printed(capsys)
