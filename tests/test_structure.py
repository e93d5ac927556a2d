"""The package's structure: which layer may import which, how many calls lie between a call and a
kernel, and what a user's tools see.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import pathlib
import re
import subprocess
import sys
import typing
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from support import call_path

import jax_dsa

ROOT = pathlib.Path(__file__).parent.parent

# A layer may import those to its left. Within an operator, a module may import those to its left.
LAYERS = ("core", "ops", "nn", "serving", "training", "bench")
MODULES = ("spec", "xla", "cuda", "api")


def layer(module: str) -> int:
    package = module.split(".")[0]
    return LAYERS.index(package) if package in LAYERS else len(LAYERS)


def test_no_import_goes_up() -> None:
    upward = []
    for name, imported in call_path.modules():
        if name.split(".")[0] not in LAYERS:
            continue  # the package itself and its command line
        own = name.split(".")
        for other in imported:
            theirs = other.split(".")
            if layer(other) > layer(name) and other != "version":
                upward.append(f"{name} -> {other}")
            if own[0] == theirs[0] == "ops" and len(own) == len(theirs) == 3:
                mine, its = (MODULES.index(x[2]) if x[2] in MODULES else 0 for x in (own, theirs))
                # A specification needs no implementation, and no implementation a public function.
                if own[2] in MODULES and (its > mine or (own[2] == "cuda" and theirs[2] == "xla")):
                    upward.append(f"{name} -> {other}")
    assert not upward


def test_no_import_cycles() -> None:
    assert call_path.import_cycles() == []


@pytest.mark.parametrize(("name", "most"), [("sparse_mla", 180), ("dsa_attention", 600)])
def test_calls_for_a_first_trace(name: str, most: int) -> None:
    fun, args = call_path.arguments(19)[name]
    assert call_path.calls(fun, args).total() <= most


def test_frames_to_the_kernel() -> None:
    frames = call_path.frames()
    assert frames[0].endswith(":sparse_mla") and len(frames) <= 7


def test_operators_and_passes_have_their_names_in_compiled_programs() -> None:
    q, kv = jnp.ones((1, 4, 2, 96)), jnp.ones((1, 8, 1, 96))
    index = jnp.ones((1, 4, 2, 32)), jnp.ones((1, 8, 32)), jnp.ones((1, 4, 2))

    def loss(q: Any, kv: Any, *index: Any) -> Any:
        out, aux = jax_dsa.dsa_attention(q, kv, *index, top_k=3)
        return jnp.square(out).sum() + aux.kl

    program = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3, 4)))
    text = program.lower(q, kv, *index).compile().as_text()
    for name in ("sparse_mla", "indexer_topk"):
        for step in ("fwd", "bwd"):
            assert f"jit({name}_{step})" in text
    for name in ("dsa_attention", "attn_dist_fwd", "indexer_kl_loss_fwd"):
        assert f"jit({name})" in text


PUBLIC = [getattr(jax_dsa, name) for name in jax_dsa.__all__]
FUNCTIONS = [x for x in PUBLIC if inspect.isfunction(x)]
CLASSES = [x for x in PUBLIC if inspect.isclass(x)]


def test_dir_shows_what_is_public() -> None:
    assert dir(jax_dsa) == sorted(jax_dsa.__all__)
    with pytest.raises(AttributeError, match="'jax_dsa' has no attribute 'nothing'"):
        getattr(jax_dsa, "nothing")  # noqa: B009


@pytest.mark.parametrize("package", ["nn", "serving", "training"])
def test_packages_load_when_they_are_used(package: str) -> None:
    code = (
        "import sys, jax_dsa\n"
        f"assert 'jax_dsa.{package}' not in sys.modules\n"
        f"assert jax_dsa.{package}.__all__ and 'jax_dsa.{package}' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_public_functions_tell_their_types(function: Any) -> None:
    hints = typing.get_type_hints(function)
    assert set(hints) == {*inspect.signature(function).parameters, "return"}
    assert hints["return"] is not Any


@pytest.mark.parametrize("public", [*FUNCTIONS, *CLASSES], ids=lambda f: f.__name__)
def test_docstrings_refer_to_what_a_wheel_has(public: Any) -> None:
    assert "docs/" not in (inspect.getdoc(public) or "")


def test_the_package_is_typed() -> None:
    assert (call_path.PACKAGE / "py.typed").exists()


def test_the_users_file_calls_every_public_function() -> None:
    text = (ROOT / "tests" / "typing" / "user.py").read_text()
    missing = [f.__name__ for f in FUNCTIONS if f"jax_dsa.{f.__name__}(" not in text]
    assert not missing


def test_every_operator_has_an_api() -> None:
    for path in sorted((call_path.PACKAGE / "ops").iterdir()):
        if path.is_dir() and path.name != "__pycache__":
            operator = importlib.import_module(f"jax_dsa.ops.{path.name}")
            assert operator.__all__ and (path / "api.py").exists()


def test_bazel_compiles_what_cmake_compiles() -> None:
    """Handlers and translation units of kernels are listed twice."""
    text = (ROOT / "CMakeLists.txt").read_text()

    def in_cmake(name: str) -> list[str]:
        found = re.search(rf"^set\({name}\n(.*?)^\)", text, re.M | re.S)
        assert found
        return found[1].split()

    def in_bazel(file: str, name: str) -> Any:
        found = re.search(rf"^{name} = ([{{\[].*?^[}}\]])", (ROOT / file).read_text(), re.M | re.S)
        assert found
        return ast.literal_eval(found[1])

    folders = in_bazel("cuda/BUILD.bazel", "FOLDERS")
    hopper = {f"cuda/{x}/{unit}.cu" for x, (units, _, _) in folders.items() for unit in units}
    common = {f"cuda/{x}/{unit}.cu" for x, (_, units, _) in folders.items() for unit in units}
    assert in_cmake("hopper") == sorted(hopper)
    assert in_cmake("common") == sorted(common)
    handlers = in_bazel("ffi/BUILD.bazel", "HANDLERS")
    assert sorted(re.findall(r"^  (ffi/\S+)$", text, re.M)) == sorted(
        f"ffi/{x}.cc" for x in ("common", *handlers)
    )
    one_ptx = in_cmake("one_ptx")
    assert one_ptx == in_bazel("bazel/cuda.bzl", "ONE_PTX")
    assert one_ptx == sorted(set(one_ptx))
    for file in one_ptx:  # CMake has another list for FP8
        assert "fp8" not in file and (file in common or "/portable" in file)
        assert (ROOT / file).is_file()


def test_bazel_tests_files_that_exist() -> None:
    text = (ROOT / "tests" / "BUILD.bazel").read_text()
    found = re.search(r"^FAST = (\[.*?^\])", text, re.M | re.S)
    assert found
    missing = [n for n in ast.literal_eval(found[1]) if not (ROOT / f"tests/test_{n}.py").exists()]
    assert not missing


def test_tests_import_neither_each_other_nor_benchmarks() -> None:
    """What several tests need belongs to tests/support."""
    names = {path.stem for path in ROOT.glob("tests/test_*.py")}
    names |= {path.stem for path in ROOT.glob("benchmarks/*.py")}
    found = []
    for path in sorted((ROOT / "tests").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            imported = [x.name for x in node.names] if isinstance(node, ast.Import) else []
            imported += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            found += [f"{path.name}: {name}" for name in imported if name.split(".")[0] in names]
    assert not found
