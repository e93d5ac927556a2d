"""The CUDA kernels' logic on the CPU, by tests/emulator: needs nvcc (for its headers), no GPU."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PROGRAMS = sorted((ROOT / "tests" / "emulator").glob("*.cc"))


PATTERNS = sorted((ROOT / "benchmarks" / "micro" / "racecheck").glob("*.cu"))


def run(program: Path, binary: Path, *options: str) -> subprocess.CompletedProcess[str]:
    nvcc = os.environ.get("CUDACXX") or shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("no nvcc")
    rooms = (ROOT / "tests" / "emulator", ROOT / "cuda", ROOT / "benchmarks" / "micro")
    include = [f"-I{room}" for room in rooms]
    # As plain C++: nvcc only says where CUDA's headers are.
    # Fibers jump between stacks, which hardened C libraries take for an error.
    plain = ["-Xcompiler", "-U_FORTIFY_SOURCE"]
    command = [nvcc, "-x", "c++", "-std=c++20", "-O3", "-w", *plain, *include, *options]
    subprocess.run([*command, "-o", str(binary), str(program)], check=True)
    return subprocess.run([binary], capture_output=True, text=True, timeout=300)


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.stem)
def test_kernels_on_the_emulator(program: Path, tmp_path: Path) -> None:
    ran = run(program, tmp_path / program.stem)
    assert ran.returncode == 0, ran.stdout[-4000:]
    assert "all good" in ran.stdout


@pytest.mark.slow
@pytest.mark.parametrize("race", [False, True], ids=["right", "race"])
@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda p: p.stem)
def test_patterns_for_racecheck_are_right_without_their_race(
    pattern: Path, race: bool, tmp_path: Path
) -> None:
    ran = run(pattern, tmp_path / pattern.stem, *(["-DRACE"] if race else []))
    assert ran.returncode == 0, ran.stdout
    assert (re.search(r"^0 of \d+ values wrong", ran.stdout, re.M) is None) == race
