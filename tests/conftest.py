"""Settings that all tests share: devices, seeds, compilation, and the meaning of the marks.

Without JAX_DSA_TEST_SEED every random choice is the same in every run, so that a test that fails
does so again. `make test-all` sets a fresh seed and prints it.
"""

from __future__ import annotations

import gc
import os
import pathlib
import re
from typing import TYPE_CHECKING, Any

# Tests of sharding need eight CPU devices. Autotuning would take most of a GPU's compilation time,
# and tests do not measure speed. Without its newest emitters XLA compiles for the CPU in half the
# time.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "")
    + " --xla_force_host_platform_device_count=8 --xla_gpu_autotune_level=0"
    + " --xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"
)
# Several test processes share one GPU, so each must leave memory to the others.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
os.environ.setdefault("XLA_PYTHON_CLIENT_ALLOCATOR", "platform")
# The tolerances of float32 results assume float32 products.
os.environ.setdefault("JAX_DEFAULT_MATMUL_PRECISION", "highest")

import hypothesis
import jax
import numpy as np
import pytest
from support.machine import Extension

from jax_dsa.core import ffi

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

HAS_GPU = pathlib.Path("/proc/driver/nvidia/version").exists()
SEED = int(os.environ.get("JAX_DSA_TEST_SEED") or 0)

# Most tests compile much and run little. The mark `full_optimization` excepts a test.
jax.config.update("jax_disable_most_optimizations", True)

# How long an example takes depends on what else the machine does, so there is no deadline.
hypothesis.settings.register_profile("fixed", derandomize=True, deadline=None)
hypothesis.settings.register_profile("fresh", deadline=None, print_blob=True)
hypothesis.settings.load_profile("fresh" if os.environ.get("JAX_DSA_TEST_SEED") else "fixed")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Passes the seed on to hypothesis, before its plugin reads the option."""
    if os.environ.get("JAX_DSA_TEST_SEED"):
        config.option.hypothesis_seed = str(SEED)
    ffi.gpus()  # is cached, so that tests which replace the extension do not ask the replacement


def pytest_report_header() -> str:
    return f"JAX_DSA_TEST_SEED={SEED}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips the tests marked `gpu` where there is no NVIDIA GPU."""
    if HAS_GPU:
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no NVIDIA GPU on this machine"))


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Fails a run that skipped every GPU test although the machine has a GPU."""
    # pytest collects garbage twice at the end, which takes seconds with all that JAX keeps. xdist
    # interrupts a worker that needs more than five, and the traceback hides the tests' results.
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


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    """With JAX_DSA_TIER=portable, skips tests of kernels that only Hopper has (docs/which.md)."""
    try:
        yield
    except NotImplementedError as error:
        if ffi.portable_tier_forced() and re.search(r"JAX_DSA_TIER|other than Hopper", str(error)):
            pytest.skip(str(error))
        raise


@pytest.fixture(autouse=True)
def optimizations(request: pytest.FixtureRequest) -> Iterator[None]:
    """Lets XLA optimise in tests marked `full_optimization` or `gpu`, and in those alone."""
    full = any(request.node.get_closest_marker(name) for name in ("full_optimization", "gpu"))
    jax.config.update("jax_disable_most_optimizations", not full)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


@pytest.fixture(autouse=True, scope="module")
def forget_programs() -> Iterator[None]:
    """Drops a module's compiled programs when its tests are done.

    Linux gives a process 65,530 memory maps, and every compiled program takes some. A worker that
    kept all of its programs used 58,000 maps and 11 GB.
    """
    yield
    jax.clear_caches()


@pytest.fixture
def seed() -> int:
    """The run's seed: JAX_DSA_TEST_SEED, by default 0. A failing test shows it."""
    print(f"JAX_DSA_TEST_SEED={SEED}")
    return SEED


@pytest.fixture
def rng(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


@pytest.fixture
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes default calls use the XLA implementation, as if the extension were not installed."""
    monkeypatch.setattr(ffi, "status", lambda: (False, "a test says so"))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A function that simulates a machine with the extension and the given GPUs."""
    ask = ffi._machine
    monkeypatch.delenv("JAX_DSA_TIER", raising=False)

    def pretend(*gpus: tuple[int, int], **others: Any) -> None:
        monkeypatch.setattr(ffi, "_LOADED", (True, ""))
        monkeypatch.setattr(ffi, "extension", lambda: Extension(*gpus, **others))
        monkeypatch.setattr(ffi, "_machine", ask.__wrapped__)  # without the cache

    return pretend


@pytest.fixture(scope="session")
def cpus() -> list[jax.Device]:
    """The eight CPU devices, also where the default backend is a GPU."""
    devices = jax.devices("cpu")
    assert len(devices) == 8
    return devices
