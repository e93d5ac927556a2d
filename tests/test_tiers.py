"""Which kernels are chosen on which GPUs, with machines that are simulated on the CPU."""

from __future__ import annotations

import inspect
import itertools
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jax_dsa
from jax_dsa.core import ffi
from jax_dsa.core.capabilities import capabilities
from jax_dsa.core.op import passes

ROOT = Path(__file__).parent.parent
AMPERE, ADA, HOPPER, BLACKWELL = ((8, 0), (8, 6)), (8, 9), (9, 0), ((10, 0), (12, 0))
OTHERS = [*AMPERE, ADA, *BLACKWELL]

QUERIES = itertools.count(2000)  # every test uses another size, so that no test reuses a trace


def text(call: Any, *dims: int) -> str:
    """Returns the program of a default call, as it is traced for all platforms."""
    return str(jax.make_jaxpr(call)(jnp.ones((next(QUERIES), *dims), jnp.bfloat16)))


def quantize(x: Any) -> Any:
    """Calls an operator whose kernel runs on every GPU."""
    return jax_dsa.quantize_fp8(x)


def product(x: Any, implementation: Any = None) -> Any:
    """Calls an operator whose portable kernel `hopper_only` takes away."""
    weights = jnp.zeros((128, 128), jnp.float8_e4m3fn), jnp.ones((1, 1))
    codes, scale = x.astype(jnp.float8_e4m3fn), jnp.ones((x.shape[0], 1))
    return jax_dsa.fp8_matmul(codes, scale, *weights, implementation=implementation)


@pytest.fixture
def hopper_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes the portable kernel away from `fp8_matmul`."""
    kernel = PASSES["fp8_matmul_fwd"].kernel
    assert kernel is not None
    changed = ffi.Kernel(kernel.run, kernel.supports, limits=kernel.limits)
    monkeypatch.setattr(PASSES["fp8_matmul_fwd"], "kernel", changed)


PASSES = {p.name: p for p in passes()}
GPUS = runpy.run_path(str(ROOT / "docs" / "gpus.py"))


@pytest.mark.parametrize("gpu", [*OTHERS, HOPPER])
def test_a_portable_kernel_is_chosen_on_every_gpu(machine: Any, gpu: tuple) -> None:
    machine(gpu)
    assert ffi.status() == (True, "")
    assert "jax_dsa.quantize_fp8.v1" in text(quantize, 128)


@pytest.mark.parametrize("gpu", OTHERS)
@pytest.mark.usefixtures("hopper_only")
def test_without_a_portable_kernel_a_call_takes_xla(machine: Any, gpu: tuple) -> None:
    machine(gpu)
    assert "jax_dsa.fp8_matmul.v1" not in text(product, 128)
    name = ffi.gpu_name(gpu)
    with pytest.raises(
        NotImplementedError,
        match=rf"^fp8_matmul: .*no kernel for GPUs of compute capability {name}; .*='xla'",
    ):
        product(jnp.ones((next(QUERIES), 128)), "cuda")


@pytest.mark.parametrize("found", [(), (HOPPER,)])
@pytest.mark.usefixtures("hopper_only")
def test_a_hopper_kernel_is_chosen_on_hopper_and_without_a_gpu(machine: Any, found: tuple) -> None:
    machine(*found)
    assert "jax_dsa.fp8_matmul.v1" in text(product, 128)


@pytest.mark.usefixtures("hopper_only")
def test_a_kernel_must_run_on_every_gpu_of_the_process(machine: Any) -> None:
    machine(HOPPER, ADA)
    assert ffi.status() == (True, "")
    assert "jax_dsa.quantize_fp8.v1" in text(quantize, 128)
    assert "jax_dsa.fp8_matmul.v1" not in text(product, 128)
    found = {p.name: p for p in capabilities_of(machine, HOPPER, ADA).passes}
    assert found["quantize_fp8"].tiers == ("hopper", "portable")
    assert not found["fp8_matmul_fwd"].cuda and "8.9" in found["fp8_matmul_fwd"].why


@pytest.mark.usefixtures("hopper_only")
def test_the_portable_tier_can_be_forced(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(HOPPER)
    monkeypatch.setenv("JAX_DSA_TIER", "portable")
    assert "jax_dsa.quantize_fp8.v1" in text(quantize, 128)
    assert "jax_dsa.fp8_matmul.v1" not in text(product, 128)
    found = {p.name: p for p in capabilities_of(machine, HOPPER).passes}
    assert found["quantize_fp8"].tiers == ("portable",)
    assert not found["fp8_matmul_fwd"].cuda
    monkeypatch.setenv("JAX_DSA_TIER", "volta")
    with pytest.raises(ValueError, match="JAX_DSA_TIER is 'volta', want 'portable'"):
        text(quantize, 128)


def capabilities_of(machine: Any, *gpus: tuple[int, int]) -> Any:
    """Returns `capabilities()` with these GPUs, which JAX sees too."""
    machine(*gpus)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax_dsa.core.capabilities, "_why_no_cuda", lambda: "")
        return capabilities()


@pytest.mark.parametrize("gpu", [*OTHERS, HOPPER])
def test_capabilities_name_the_tier_of_each_pass(machine: Any, gpu: tuple) -> None:
    found = capabilities_of(machine, gpu)
    tier = "hopper" if gpu == HOPPER else "portable"
    for p in found.passes:
        kernel = PASSES[p.name].kernel
        has = kernel is not None and (
            gpu == HOPPER or (kernel.portable is not None and gpu >= kernel.portable_since)
        )
        assert p.cuda == has and p.tiers == ((tier,) if has else ())
        assert has or kernel is None or ffi.gpu_name(gpu) in p.why
    printed = str(found)
    assert f"CUDA kernels: yes, on compute capability {ffi.gpu_name(gpu)}\n" in printed
    assert re.search(rf"^quantize_fp8 +{tier} ", printed, re.M)


@pytest.mark.parametrize(
    ("tiers", "gpu", "why"),
    [
        (("hopper",), (8, 6), r"without portable kernels \(JAX_DSA_TIERS\).* GPUs of 8\.6 here"),
        (("hopper",), HOPPER, ""),
        (("portable",), HOPPER, ""),
        (("portable",), (7, 5), r"8\.0 or newer, and there are GPUs of 7\.5 here"),
    ],
)
def test_builds_without_a_tier(machine: Any, tiers: tuple, gpu: tuple, why: str) -> None:
    machine(gpu, tiers=tiers)
    fine, reason = ffi.status()
    assert fine == (not why) and re.search(why, reason)
    assert ffi.tier_of(gpu) == (None if why else tiers[0])


def test_the_portable_tier_can_be_forced_for_a_while(machine: Any) -> None:
    machine(HOPPER)
    assert ffi.has_both_tiers()
    before = os.environ.get("JAX_DSA_TIER")
    with pytest.raises(RuntimeError, match="inside"), ffi.portable_tier():
        assert ffi.tier_of(HOPPER) == "portable" and not ffi.has_both_tiers()
        raise RuntimeError("inside")
    assert ffi.tier_of(HOPPER) == "hopper" and (os.environ.get("JAX_DSA_TIER") or None) == before
    machine(HOPPER, ADA)
    assert not ffi.has_both_tiers()


def test_a_build_without_portable_kernels_cannot_be_asked_for_them(
    machine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(HOPPER, tiers=("hopper",))
    monkeypatch.setenv("JAX_DSA_TIER", "portable")
    fine, why = ffi.status()
    assert not fine and "JAX_DSA_TIERS), and JAX_DSA_TIER asks for them" in why


def test_a_call_that_only_the_portable_kernel_covers_runs_on_hopper(machine: Any) -> None:
    machine(HOPPER)
    kernel = ffi.Kernel(lambda: None, lambda *_: "too wide", limits="", portable=lambda *_: None)
    assert kernel.unsupported_reason(None, ()) is None
    machine(HOPPER, tiers=("hopper",))
    assert kernel.unsupported_reason(None, ()) == "too wide"
    machine((8, 9))
    newer = ffi.Kernel(
        *(lambda: None, lambda *_: None),
        limits="",
        portable=lambda *_: None,
        portable_since=(10, 0),
    )
    assert "no kernel for GPUs of compute capability 8.9" in str(newer.unsupported_reason(None, ()))


def test_python_and_the_handlers_agree_about_portable_kernels() -> None:
    """A pass has a portable kernel if all handlers that it may call have one."""
    since = {
        target: constant
        for file in ROOT.glob("ffi/*.cc")
        for target, constant in re.findall(
            r'DSA_FFI_HANDLER\(\s*"(\S+)",\s*\w+,\s*(\w+)\)', file.read_text()
        )
    }
    assert len(since) > 20 and set(since.values()) <= {"kHopperOnly", "kEveryGpu"}
    checked = 0
    for p in passes():
        if p.kernel is None:
            continue
        targets = re.findall(r'"(jax_dsa\.[\w.]+)"', inspect.getsource(p.kernel.run))
        if not targets:
            continue  # it calls its handlers through another function
        checked += 1
        constants = {since[target] for target in targets}
        assert (p.kernel.portable is not None) == ("kHopperOnly" not in constants), p.name
        assert p.kernel.portable is None or p.kernel.portable_since == (8, 0), p.name
    assert checked > 10


def test_the_table_of_gpus() -> None:
    """`python docs/gpus.py` renews it."""
    page = (ROOT / "docs" / "which.md").read_text()
    assert GPUS["table"]() in page and GPUS["renewed"](page) == page


def test_the_extension_agrees() -> None:
    extension = pytest.importorskip("jax_dsa._cuda", reason="built without the extension")
    assert set(extension.tiers()) <= {"hopper", "portable"}
    assert set(extension.portable_since()) <= set(extension.targets())
    assert set(extension.portable_since().values()) == {(8, 0)}


# Calls operators whose kernels run on every GPU, and compares them with their XLA implementations.
PROGRAM = """
import functools
import jax, jax.numpy as jnp, numpy as np
import jax_dsa
from jax_dsa.core.capabilities import capabilities

tiers = {p.name: p.tiers for p in capabilities().passes}
assert tiers["topk_fwd"] == tiers["quantize_fp8"] == ("portable",), tiers
key = jax.random.key(0)

def same(call, *args):
    both = [jax.jit(functools.partial(call, implementation=x))(*args) for x in ("cuda", "xla")]
    for got, expected in zip(*map(jax.tree.leaves, both), strict=True):
        np.testing.assert_array_equal(np.float32(got), np.float32(expected))

for rows, size, k in ((1, 2**18, 2048), (3, 70001, 4096), (300, 9000, 100), (40, 8000, 2048)):
    x = jax.random.normal(key, (rows, size))
    same(functools.partial(jax_dsa.topk, top_k=k, return_values=True), x)
    same(functools.partial(jax_dsa.topk, top_k=k), jnp.round(4 * x))  # ties
    comb = jnp.where(jnp.arange(size) % 127 < 2, x + 100, x)
    same(functools.partial(jax_dsa.topk, top_k=k), comb)
x = jax.random.normal(key, (300, 1000), jnp.bfloat16)
same(jax_dsa.quantize_fp8, x)
same(jax_dsa.dequantize_fp8, *jax_dsa.quantize_fp8(x))
"""


@pytest.mark.gpu
@pytest.mark.parametrize("kib", ["", "163", "99"])
def test_the_portable_tier_on_this_gpu(kib: str) -> None:
    where = os.environ | {"JAX_DSA_TIER": "portable", "JAX_DSA_SHARED_KIB": kib}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=where, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-4000:]
