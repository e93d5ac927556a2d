"""Loading the CUDA extension, and what is said where it cannot be."""

from __future__ import annotations

import runpy

import jax
import pytest

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


@pytest.mark.gpu
def test_the_extension_is_loaded() -> None:
    assert ffi.status() == (True, "")
    assert capabilities().cuda == ""
