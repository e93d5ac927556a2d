"""Runs the CUDA kernels on the CPU emulator. Needs nvcc for its headers, but no GPU."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
KERNELS = ROOT / "tests" / "kernels"
PROGRAMS = sorted((KERNELS / "emulator").glob("*.cc"))
PATTERNS = sorted((KERNELS / "races").glob("*.cu"))


def build(program: Path, binary: Path, *options: str) -> Path:
    nvcc = os.environ.get("CUDACXX") or shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("no nvcc")
    folders = (KERNELS / "emulator", ROOT / "cuda", KERNELS)
    include = [f"-I{folder}" for folder in folders]
    # As plain C++: nvcc only says where CUDA's headers are.
    # Fibers jump between stacks, which hardened C libraries take for an error.
    plain = ["-Xcompiler", "-U_FORTIFY_SOURCE"]
    command = [nvcc, "-x", "c++", "-std=c++20", "-O3", "-w", *plain, *include, *options]
    compiled = binary.with_suffix(".o")
    subprocess.run([*command, "-c", "-o", str(compiled), str(program)], check=True)
    # Addresses in it are those of its file.
    subprocess.run([nvcc, "-Xcompiler", "-no-pie", "-o", str(binary), str(compiled)], check=True)
    return binary


def run(binary: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([binary], capture_output=True, text=True, timeout=600)


# The compiler tells tests/kernels/emulator/races.h of all loads and stores, and of no atomics.
RACES = (
    *("-DEMULATOR_RACES", "-g", "-Xcompiler"),
    "-fsanitize=thread,--param=tsan-instrument-func-entry-exit=0,-fno-threadsafe-statics",
)


def races(binary: Path, printed: str) -> str:
    """The races that a program has printed, with the lines of the source; "" without any."""
    found = []
    for what, *ends in re.findall(r"^race: (.*): 0x(\w+) after 0x(\w+)$", printed, re.M):
        command = ["addr2line", "-e", str(binary), "-i", *(hex(int(x, 16) - 1) for x in ends)]
        lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        found.append(f"{what}:\n{lines}")
    return "\n".join(found)


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.stem)
def test_kernels_on_the_emulator(program: Path, tmp_path: Path) -> None:
    ran = run(build(program, tmp_path / program.stem))
    assert ran.returncode == 0, ran.stdout[-4000:]
    assert "all good" in ran.stdout


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.stem)
def test_kernels_have_no_races(program: Path, tmp_path: Path) -> None:
    binary = build(program, tmp_path / program.stem, *RACES)
    ran = run(binary)
    assert ran.returncode == 0, ran.stdout[-4000:]
    assert not races(binary, ran.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("race", [False, True], ids=["right", "race"])
@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda p: p.stem)
def test_patterns_for_racecheck_are_right_without_their_race(
    pattern: Path, race: bool, tmp_path: Path
) -> None:
    binary = build(pattern, tmp_path / pattern.stem, *RACES, *(["-DRACE"] if race else []))
    ran = run(binary)
    assert ran.returncode == 0, ran.stdout
    assert (re.search(r"^0 of \d+ values wrong", ran.stdout, re.M) is None) == race
    assert bool(found := races(binary, ran.stdout)) == race, found
