"""The build backend: scikit-build-core, which builds the CUDA extension only where it is useful.

By default the extension `jax_dsa._cuda` is built if `nvcc` and a GPU that has kernels are both
found. With `JAX_DSA_CUDA=ON` in the environment it is always built, and the build fails if
something is missing. With `OFF` it is never built. Without the extension the wheel is pure Python:
CMake does not run, and nothing is compiled.

The FFI headers come from the oldest jaxlib that the package supports, because XLA loads a kernel
only if it was built against an API version no newer than its own. `JAX_DSA_FFI_INCLUDE` names
another directory with the headers, for machines that cannot download that jaxlib. `JAX_DSA_TIERS`
and `JAX_DSA_PORTABLE_ARCHITECTURES` are passed on to CMake (CMakeLists.txt describes them).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from typing import Any

from scikit_build_core import build as _backend

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

OLDEST_JAXLIB = "jaxlib==0.10.2"
NANOBIND = "nanobind>=2.4"

build_sdist = _backend.build_sdist
get_requires_for_build_sdist = _backend.get_requires_for_build_sdist


def _should_build_cuda() -> bool:
    asked = os.environ.get("JAX_DSA_CUDA", "AUTO").upper()
    if asked in ("ON", "1", "TRUE"):
        return True
    if asked in ("OFF", "0", "FALSE"):
        return False
    if asked != "AUTO":
        raise SystemExit(f"JAX_DSA_CUDA is {asked!r}, expected ON, OFF or AUTO")
    return bool((os.environ.get("CUDACXX") or shutil.which("nvcc")) and _has_gpu())


def _has_gpu() -> bool:
    """Returns whether the driver reports a GPU of compute capability 8.0 or newer."""
    command = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return any(float(capability) >= 8 for capability in re.findall(r"\d+\.\d+", found.stdout))


def _settings(config_settings: dict[str, Any] | None) -> dict[str, Any]:
    settings = dict(config_settings or {})
    if not _should_build_cuda():
        return settings | {"wheel.cmake": "false"}
    settings["wheel.py-api"] = "cp312"  # the stable ABI; older Pythons ignore it
    for name in ("JAX_DSA_FFI_INCLUDE", "JAX_DSA_TIERS", "JAX_DSA_PORTABLE_ARCHITECTURES"):
        if given := os.environ.get(name):
            settings[f"cmake.define.{name}"] = given
    return settings


def _requires() -> list[str]:
    if not _should_build_cuda():
        return []
    headers = [] if os.environ.get("JAX_DSA_FFI_INCLUDE") else [OLDEST_JAXLIB]
    return [NANOBIND, *headers]


def get_requires_for_build_wheel(config_settings: dict[str, Any] | None = None) -> list[str]:
    """Implements the PEP 517 hook."""
    return _backend.get_requires_for_build_wheel(_settings(config_settings)) + _requires()


def get_requires_for_build_editable(config_settings: dict[str, Any] | None = None) -> list[str]:
    """Implements the PEP 660 hook."""
    return _backend.get_requires_for_build_editable(_settings(config_settings)) + _requires()


def prepare_metadata_for_build_wheel(
    metadata_directory: str, config_settings: dict[str, Any] | None = None
) -> str:
    """Implements the PEP 517 hook."""
    return _backend.prepare_metadata_for_build_wheel(metadata_directory, _settings(config_settings))


def prepare_metadata_for_build_editable(
    metadata_directory: str, config_settings: dict[str, Any] | None = None
) -> str:
    """Implements the PEP 660 hook."""
    return _backend.prepare_metadata_for_build_editable(
        metadata_directory, _settings(config_settings)
    )


def build_wheel(
    wheel_directory: str,
    config_settings: dict[str, Any] | None = None,
    metadata_directory: str | None = None,
) -> str:
    """Implements the PEP 517 hook."""
    return _backend.build_wheel(wheel_directory, _settings(config_settings), metadata_directory)


def build_editable(
    wheel_directory: str,
    config_settings: dict[str, Any] | None = None,
    metadata_directory: str | None = None,
) -> str:
    """Implements the PEP 660 hook."""
    return _backend.build_editable(wheel_directory, _settings(config_settings), metadata_directory)
