"""Eight CPU devices for the sharding tests, and what the mark `gpu` means.

Tests marked `gpu` are skipped only where there is no NVIDIA GPU. Where there is one, a run that
skipped all of them fails.
"""

from __future__ import annotations

import gc
import os
import pathlib
from typing import TYPE_CHECKING, Any

# Without autotuning, which takes most of a GPU's compilations and gains a test nothing.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "")
    + " --xla_force_host_platform_device_count=8 --xla_gpu_autotune_level=0"
)

# Test processes share one GPU, and float32 tolerances assume float32 products.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
# Many processes share the GPU: what one has freed, another may need.
os.environ.setdefault("XLA_PYTHON_CLIENT_ALLOCATOR", "platform")
os.environ.setdefault("JAX_DEFAULT_MATMUL_PRECISION", "highest")

import jax
import numpy as np
import pytest

from jax_dsa.core import ffi

if TYPE_CHECKING:
    from collections.abc import Iterator

HAS_GPU = pathlib.Path("/proc/driver/nvidia/version").exists()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if HAS_GPU:
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no NVIDIA GPU on this machine"))


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    # pytest collects garbage twice more, seconds each with all that JAX keeps, and xdist interrupts
    # a worker that takes longer than five: a KeyboardInterrupt in a callback of the collector.
    gc.collect()
    gc.freeze()
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if not HAS_GPU or reporter is None or exitstatus != pytest.ExitCode.OK:
        return

    def gpu_tests(outcome: str) -> list[Any]:
        return [r for r in reporter.stats.get(outcome, []) if "gpu" in getattr(r, "keywords", {})]

    if gpu_tests("skipped") and not gpu_tests("passed"):
        reporter.write_line("every GPU test was skipped on a machine with a GPU", red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture(autouse=True, scope="module")
def forget_programs() -> Iterator[None]:
    """Linux gives a process 65,530 maps of memory, and every compiled program takes some: a worker
    that kept all of them had come to 58,000, and to 11 GB.
    """
    yield
    jax.clear_caches()


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """A fresh seed for every run; a failing test shows it, JAX_DSA_TEST_SEED repeats it."""
    chosen = int(os.environ.get("JAX_DSA_TEST_SEED") or np.random.SeedSequence().entropy % 2**32)
    print(f"JAX_DSA_TEST_SEED={chosen}")
    return chosen


@pytest.fixture
def rng(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


@pytest.fixture
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the extension were not there: default calls take XLA alone."""
    monkeypatch.setattr(ffi, "status", lambda: (False, "a test says so"))


@pytest.fixture(scope="session")
def cpus() -> list[jax.Device]:
    """The eight host devices, whatever the default backend is."""
    devices = jax.devices("cpu")
    assert len(devices) == 8
    return devices
