"""Loading the CUDA extension, the message where it cannot be loaded, and its handlers' checks."""

from __future__ import annotations

import fnmatch
import importlib
import itertools
import json
import os
import pathlib
import re
import runpy
import shutil
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from support.emulator import compile_host

import jax_dsa
from jax_dsa.core import compat, ffi
from jax_dsa.core.capabilities import capabilities
from jax_dsa.ops.quantize_fp8.api import QUANTIZE


def test_the_runtime_has_a_version() -> None:
    assert compat.runtime_ffi_api() >= (0, 3)


@pytest.mark.parametrize("runtime", [(0, 3), (0, 5)])
def test_an_extension_that_is_not_newer_loads(runtime: tuple) -> None:
    assert ffi._incompatible((0, 3), runtime) == ""


@pytest.mark.parametrize(
    ("built", "runtime", "cure"),
    [
        ((0, 5), (0, 3), "pip install -U jax\\)"),
        ((1, 0), (0, 5), "pip install -U jax\\)"),
        ((0, 5), (1, 0), "pip install -U jax_dsa\\)"),
    ],
)
def test_an_extension_that_xla_would_refuse_is_not_registered(
    built: tuple, runtime: tuple, cure: str
) -> None:
    with pytest.raises(AssertionError, match=cure) as raised:
        assert not ffi._incompatible(built, runtime)
    assert f"{built[0]}.{built[1]}" in str(raised.value)


def test_capabilities(capsys: pytest.CaptureFixture[str]) -> None:
    found = capabilities()
    names = [p.name for p in found.passes]
    assert QUANTIZE.name in names and names == sorted(names)
    for p in found.passes:
        assert p.why
        assert not (p.cuda and found.cuda)
    runpy.run_module("jax_dsa", run_name="__main__")
    printed = capsys.readouterr().out
    assert all(name in printed for name in names)
    assert jax.__version__ in printed and found.cuda in printed


ROOT = pathlib.Path(__file__).parent.parent

QUERIES = itertools.count(3)  # every test uses another size, so that no test reuses a trace


def text_for_gpus() -> str:
    """Returns the program of a default call, as it is traced for all platforms."""
    queries = next(QUERIES)
    q = jnp.ones((1, queries, 64, 576), jnp.bfloat16)
    indices = jnp.zeros((1, queries, 2), jnp.int32)
    return str(jax.make_jaxpr(lambda q: jax_dsa.sparse_mla(q, q[:, :, :1], indices))(q))


@pytest.mark.parametrize("capabilities", [(), ((9, 0),), ((9, 0), (9, 0))])
def test_kernels_are_chosen_for_hopper_and_without_a_gpu(machine: Any, capabilities: tuple) -> None:
    machine(*capabilities)
    assert ffi.status() == (True, "")
    assert "jax_dsa.sparse_mla_fwd.v2" in text_for_gpus()


@pytest.mark.parametrize("given", [False, True], ids=["selected", "given"])
def test_asking_for_kernels_does_not_concern_steps_without_kernels(
    machine: Any, given: bool
) -> None:
    """The loss has no kernel here, but `implementation="cuda"` is accepted all the same."""
    machine((9, 0))
    queries = next(QUERIES)
    q = jnp.ones((1, queries, 64, 576), jnp.bfloat16)
    index = q[:, :, :16, :64], q[:, :, 0, :64], jnp.ones((1, queries, 16))
    indices = jnp.zeros((1, queries, 2), jnp.int32)
    which: dict[str, Any] = {"indices": indices} if given else {"top_k": 2}

    def kl(q: Any) -> Any:
        kv = q[:, :, :1]
        return jax_dsa.dsa_attention(q, kv, *index, **which, implementation="cuda")[1].kl

    text = str(jax.make_jaxpr(kl)(q))
    assert "jax_dsa.attn_dist_fwd.v2" in text
    assert ("jax_dsa.indexer_topk_fwd.v1" in text) == (not given)


def test_asking_for_kernels_does_not_concern_gradients_that_need_none(machine: Any) -> None:
    """The backward passes are a scatter and a sum per block."""
    machine((9, 0))
    rows = next(QUERIES)

    def values(x: Any) -> Any:
        return jax_dsa.topk(x, 2, return_values=True, implementation="cuda")[1].sum()

    text = str(jax.make_jaxpr(jax.grad(values))(jnp.ones((2, rows, 7))))
    assert "jax_dsa.topk_fwd" in text and "topk_bwd" in text

    def dequantized(scale: Any) -> Any:
        codes = jnp.ones((rows, 128), jnp.float8_e4m3fn)
        return jax_dsa.dequantize_fp8(codes, scale, implementation="cuda").sum()

    text = str(jax.make_jaxpr(jax.grad(dequantized))(jnp.ones((rows, 1))))
    assert "jax_dsa.dequantize_fp8" in text and "dequantize_fp8_bwd" in text


@pytest.mark.parametrize("found", [((7, 5),), ((7, 5), (9, 0))])
def test_old_gpus_use_xla_and_the_error_says_why(machine: Any, found: tuple) -> None:
    machine(*found)
    assert "jax_dsa.sparse_mla_fwd.v2" not in text_for_gpus()
    q = jnp.ones((1, 3, 64, 576), jnp.bfloat16)
    with pytest.raises(
        NotImplementedError, match=r"sparse_mla: .*8\.0 or newer.*GPUs of 7\.5 here"
    ):
        jax_dsa.sparse_mla(q, q[:, :, :1], jnp.zeros((1, 3, 2), int), implementation="cuda")
    assert "7.5" in str(capabilities())


@pytest.mark.parametrize("driver", [12000, 12080, 12090])
def test_with_an_old_driver_xla_is_used_and_the_status_says_why(machine: Any, driver: int) -> None:
    machine(driver=driver)  # an old driver does not show its GPUs to a newer runtime
    fine, why = ffi.status()
    assert not fine
    assert "CUDA 13.0" in why and f"CUDA 12.{driver % 1000 // 10}:" in why
    assert "jax_dsa.sparse_mla_fwd.v2" not in text_for_gpus()


@pytest.mark.parametrize("driver", [0, 13000, 13010, 14000])
def test_kernels_are_chosen_without_a_driver_or_with_a_new_one(machine: Any, driver: int) -> None:
    machine((9, 0), driver=driver)
    assert ffi.status() == (True, "")


# A libcuda.so.1 with a given version of CUDA and no GPU. It has what CUDA's runtime needs at first.
DRIVER = """
#include <string.h>
static int none(void) { return 100; }
int cuInit(unsigned flags) { return 100; }
int cuDriverGetVersion(int* version) { *version = VERSION; return 0; }
int cuGetProcAddress_v2(const char* name, void** out, int v, unsigned long long f, int* status) {
  *out = !strcmp(name, "cuDriverGetVersion") ? (void*)cuDriverGetVersion
       : !strncmp(name, "cuGetProcAddress", 16) ? (void*)cuGetProcAddress_v2 : (void*)none;
  if (status) *status = 0;
  return 0;
}
int cuGetProcAddress(const char* name, void** out, int v, unsigned long long f) {
  return cuGetProcAddress_v2(name, out, v, f, 0);
}
"""


@pytest.mark.parametrize("version", [12090, 13000])
def test_the_extension_reports_the_version_of_the_driver(
    version: int, tmp_path: pathlib.Path
) -> None:
    pytest.importorskip("jax_dsa._cuda", reason="built without the extension")
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    (tmp_path / "driver.c").write_text(DRIVER)
    build = ["cc", "-shared", "-fPIC", f"-DVERSION={version}", "-o", "libcuda.so.1", "driver.c"]
    subprocess.run(build, cwd=tmp_path, check=True)
    ask = """
import json
from jax_dsa.core import ffi
extension = ffi.extension()
print(json.dumps([extension.cuda_versions(), extension.compute_capabilities(), ffi.status()]))
"""
    where = os.environ | {"LD_LIBRARY_PATH": str(tmp_path), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", ask], env=where, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (built, driver), found, (fine, why) = json.loads(done.stdout)
    assert driver == version and not found
    assert fine == (version // 1000 >= built // 1000), why


def test_the_environment_variable_applies_where_a_call_has_no_implementation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loss = jax_dsa.indexer_kl_loss
    x = jnp.ones((2, 3), jnp.float16)  # a dtype that the kernel does not support
    monkeypatch.setenv("JAX_DSA_IMPL", "cuda")
    with pytest.raises(NotImplementedError, match=r"^indexer_kl_loss.*implementation='cuda'"):
        loss(x, x)
    assert loss(x, x, implementation="xla") == 0
    monkeypatch.setenv("JAX_DSA_IMPL", "fast")
    with pytest.raises(ValueError, match="'JAX_DSA_IMPL' is 'fast', want None, 'cuda' or 'xla'"):
        loss(x, x)
    for chosen in ("xla", ""):
        monkeypatch.setenv("JAX_DSA_IMPL", chosen)
        assert loss(x, x) == 0


@pytest.mark.parametrize(
    ("found", "expected"),
    [("9.0\n", True), ("7.5\n8.0\n", True), ("12.0", True), ("7.5\n", False), ("", False)],
)
def test_auto_builds_kernels_only_for_gpus_that_have_them(
    monkeypatch: pytest.MonkeyPatch, found: str, expected: bool
) -> None:
    monkeypatch.syspath_prepend(str(pathlib.Path(__file__).parent.parent / "tools"))
    backend = pytest.importorskip("build_backend")
    result = SimpleNamespace(stdout=found)
    monkeypatch.setattr(backend.subprocess, "run", lambda *_, **__: result)
    monkeypatch.setenv("CUDACXX", "nvcc")
    monkeypatch.delenv("JAX_DSA_CUDA", raising=False)
    assert backend._should_build_cuda() == expected
    monkeypatch.setenv("JAX_DSA_CUDA", "OFF")
    assert not backend._should_build_cuda()


OPERATORS = sorted(path.parent for path in (ROOT / "jax_dsa" / "ops").glob("*/cuda.py"))


def called_targets() -> set[str]:
    """Returns the targets that the package calls, with "*" where a name is computed."""
    texts = [file.read_text() for path in OPERATORS for file in path.glob("*cuda.py")]
    found = re.findall(r'"(jax_dsa\.[^"]+\.v\d+)"', "\n".join(texts))
    return {re.sub(r"\{.*?\}", "*", target) for target in found}


def test_handlers_check_their_arguments(tmp_path: pathlib.Path) -> None:
    """Runs the handlers with launchers that only record their arguments."""
    program = ROOT / "tests" / "kernels" / "handlers" / "handlers.cc"
    folders = (ROOT, ROOT / "cuda", pathlib.Path(jax.ffi.include_dir()))
    binary = compile_host(program, tmp_path / "handlers", "-O0", folders=folders)
    ran = subprocess.run([binary], capture_output=True, text=True)
    assert ran.returncode == 0 and "all good" in ran.stdout, ran.stdout
    targets = re.findall(r"^target (\S+)$", ran.stdout, re.M)
    assert len(targets) == len(set(targets))
    called = called_targets()
    assert all(any(fnmatch.fnmatch(target, name) for name in called) for target in targets)
    assert all(fnmatch.filter(targets, name) for name in called)


def test_targets_of_the_extension() -> None:
    extension = pytest.importorskip("jax_dsa._cuda", reason="built without the extension")
    targets = list(extension.targets())
    assert targets == sorted(targets)
    assert all(fnmatch.filter(targets, name) for name in called_targets())


def test_limits_of_the_extension() -> None:
    """The operators' constants are those that the handlers check."""
    extension = pytest.importorskip("jax_dsa._cuda", reason="built without the extension")
    for operator, limits in extension.limits().items():
        module = importlib.import_module(f"jax_dsa.ops.{operator}.cuda")
        assert limits == {name: getattr(module, name) for name in limits}, operator


def test_sizes_of_workspaces_are_asked_for_by_keyword() -> None:
    extension = pytest.importorskip("jax_dsa._cuda", reason="built without the extension")
    sizes = {"ratio": 4, "halves": 2, "dim": 128}
    assert extension.gated_pool_tiles(**sizes) >= 1
    with pytest.raises(TypeError):
        extension.gated_pool_tiles(*sizes.values())


@pytest.mark.gpu
def test_the_extension_is_loaded() -> None:
    assert ffi.status() == (True, "")
    assert capabilities().cuda == ""
