"""Compiles and runs programs of the CPU emulator in tests/kernels/emulator.

The programs are plain C++20. Compiling them takes a host compiler and CUDA's headers, which come
with nvcc or with the pip packages of the extra `dev`.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
KERNELS = ROOT / "tests" / "kernels"
PROGRAMS = sorted((KERNELS / "emulator").glob("*.cc"))
PATTERNS = sorted((KERNELS / "races").glob("*.cu"))

# The compiler reports every load and store, except atomics, to tests/kernels/emulator/races.h.
RACES = (
    *("-DEMULATOR_RACES", "-g", "-fsanitize=thread"),
    *("--param=tsan-instrument-func-entry-exit=0", "-fno-threadsafe-statics"),
)


@functools.cache
def cuda_headers() -> Path:
    """Returns the folder of CUDA's headers, of nvcc's toolkit or else of the pip packages."""
    folders = []
    if nvcc := os.environ.get("CUDACXX") or shutil.which("nvcc"):
        command = [nvcc, "--dryrun", "-c", "-x", "cu", os.devnull]
        printed = subprocess.run(command, capture_output=True, text=True).stderr
        folders += [Path(top) / "include" for top in re.findall(r"^#\$ TOP=(.*)$", printed, re.M)]
    if packages := importlib.util.find_spec("nvidia"):
        for folder in packages.submodule_search_locations or ():
            folders += sorted(Path(folder).glob("cu*/include"), reverse=True)
    for folder in folders:
        if (folder / "cuda_bf16.h").exists() and (folder / "crt" / "host_config.h").exists():
            return folder
    pytest.skip("no CUDA headers: install nvcc, or on Linux the extra 'dev'")


def compiler() -> str:
    """Returns the host's C++ compiler."""
    found = os.environ.get("CXX") or shutil.which("c++")
    if found is None:
        pytest.skip("no C++ compiler")
    return found


def compile_host(program: Path, binary: Path, *options: str, folders: tuple[Path, ...]) -> Path:
    """Compiles a C++20 program with the host's compiler and CUDA's headers.

    Returns:
        The path of the binary. It is not linked with CUDA's runtime.
    """
    cuda = cuda_headers()
    include = [f"-I{folder}" for folder in folders]
    include += [f"-isystem{folder}" for folder in (cuda, cuda / "cccl")]
    flags = ["-x", "c++", "-std=c++20", "-w", *include, *options]
    compiled = binary.with_suffix(".o")
    command = [compiler(), *flags, "-c", "-o", str(compiled), str(program)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-4000:]
    # Without -no-pie the addresses that a race is reported with are not those of the file.
    subprocess.run([compiler(), "-no-pie", "-o", str(binary), str(compiled)], check=True)
    return binary


def build(program: Path, binary: Path, *options: str) -> Path:
    """Compiles a program for the emulator and returns the path of its binary."""
    folders = (KERNELS / "emulator", ROOT / "cuda", KERNELS)
    # Fibers jump between stacks, which hardened C libraries take for an error.
    options = ("-O1", "-U_FORTIFY_SOURCE", *options)
    return compile_host(program, binary, *options, folders=folders)


def run(binary: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs a program and returns its exit code and what it printed."""
    return subprocess.run([binary, *arguments], capture_output=True, text=True, timeout=1200)


def races(binary: Path, printed: str) -> str:
    """Returns the races that a program printed, with lines of the source; "" if there are none."""
    found = []
    for what, *ends in re.findall(r"^race: (.*): 0x(\w+) after 0x(\w+)$", printed, re.M):
        command = ["addr2line", "-e", str(binary), "-i", *(hex(int(x, 16) - 1) for x in ends)]
        lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        found.append(f"{what}:\n{lines}")
    return "\n".join(found)
