"""The CUDA kernels' logic on the CPU, by tests/emulator: needs nvcc (for its headers), no GPU."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PROGRAMS = sorted((ROOT / "tests" / "emulator").glob("*.cc"))


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.stem)
def test_kernels_on_the_emulator(program: Path, tmp_path: Path) -> None:
    nvcc = os.environ.get("CUDACXX") or shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("no nvcc")
    binary = tmp_path / program.stem
    include = [f"-I{program.parent}", f"-I{ROOT / 'cuda'}"]
    # As plain C++: nvcc only says where CUDA's headers are.
    # Fibers jump between stacks, which hardened C libraries take for an error.
    plain = ["-Xcompiler", "-U_FORTIFY_SOURCE"]
    command = [nvcc, "-x", "c++", "-std=c++20", "-O3", "-w", *plain, *include, "-o", str(binary)]
    subprocess.run([*command, str(program)], check=True)
    run = subprocess.run([binary], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stdout[-4000:]
    assert "all good" in run.stdout
