"""What lies between a call and its kernel: imports, function calls and stack frames."""

from __future__ import annotations

import ast
import collections
import os
import pathlib
import sys
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

import jax_dsa
from jax_dsa.core import ffi

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PACKAGE = pathlib.Path(jax_dsa.__file__).parent
B, S, N, D, K, J, C = 1, 256, 16, 576, 64, 4, 64


def imports(path: pathlib.Path) -> Iterator[str]:
    """Yields the modules of the package that a file imports, those for annotations included."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("jax_dsa"):
            for alias in node.names:
                whole = f"{node.module}.{alias.name}".split(".")[1:]
                module = PACKAGE.joinpath(*whole)
                if module.with_suffix(".py").exists() or (module / "__init__.py").exists():
                    yield ".".join(whole)
                else:
                    yield ".".join(str(node.module).split(".")[1:])


def modules() -> list[tuple[str, set[str]]]:
    """Returns every module of the package, by its name within it, and the modules it imports."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        names = path.relative_to(PACKAGE).with_suffix("").parts
        found.append((".".join(n for n in names if n != "__init__"), set(imports(path))))
    return found


def import_cycles() -> list[list[str]]:
    """Returns the shortest import cycle through every module that is on one; each cycle once."""
    graph = {name: imported for name, imported in modules() if name}  # "" imports everything
    cycles: dict[frozenset[str], list[str]] = {}
    for start in sorted(graph):
        paths = collections.deque([[start]])
        seen = set()
        while paths:
            path = paths.popleft()
            for module in sorted(graph.get(path[-1], ())):
                if module == start:
                    cycles.setdefault(frozenset(path), path)
                    paths.clear()
                    break
                if module not in seen:
                    seen.add(module)
                    paths.append([*path, module])
    return list(cycles.values())


def arguments(queries: int) -> dict[str, tuple[Callable[..., Any], tuple[jax.Array, ...]]]:
    """Returns functions by name, each with arguments that its kernels support."""
    q = jnp.ones((B, queries, N, D), jnp.bfloat16)
    kv = jnp.ones((B, S, 1, D), jnp.bfloat16)
    indices = jnp.zeros((B, queries, 1, K), jnp.int32)
    index_q = jnp.ones((B, queries, J, C), jnp.bfloat16)
    index_k = jnp.ones((B, S, C), jnp.bfloat16)
    index_weights = jnp.ones((B, queries, J))

    def sparse_mla(*args: jax.Array) -> Any:
        return jax_dsa.sparse_mla(*args, is_causal=True, query_start=5)

    def dsa_attention(*args: jax.Array) -> Any:
        return jax_dsa.dsa_attention(*args, top_k=K)

    return {
        "sparse_mla": (sparse_mla, (q, kv, indices)),
        "dsa_attention": (dsa_attention, (q, kv, index_q, index_k, index_weights)),
    }


def calls(fun: Callable[..., Any], args: tuple[jax.Array, ...]) -> collections.Counter[str]:
    """Returns how often a first trace calls functions of each file of the package."""
    count: collections.Counter[str] = collections.Counter()
    root = f"{PACKAGE}{os.sep}"

    def profile(frame: Any, event: str, _: Any) -> None:
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(root):
            count[name.removeprefix(root)] += 1

    sys.setprofile(profile)
    try:
        jax.make_jaxpr(fun)(*args)
    finally:
        sys.setprofile(None)
    return count


def frames() -> list[str]:
    """Returns the package's functions between a call of `sparse_mla` and the custom call, outermost
    first, as on a machine with the extension.
    """
    stacks: list[list[str]] = []
    ffi_call, status = jax.ffi.ffi_call, ffi.status

    def seen(*args: Any, **kwargs: Any) -> Any:
        frame: Any = sys._getframe(1)
        stack = []
        while frame is not None:
            path = pathlib.Path(frame.f_code.co_filename)
            if PACKAGE in path.parents:
                stack.append(f"{path.relative_to(PACKAGE)}:{frame.f_code.co_name}")
            frame = frame.f_back
        stacks.append(stack[::-1])
        return ffi_call(*args, **kwargs)

    fun, args = arguments(65)["sparse_mla"]
    jax.ffi.ffi_call, ffi.status = seen, lambda: (True, "")
    try:
        jax.make_jaxpr(fun)(*args)
    finally:
        jax.ffi.ffi_call, ffi.status = ffi_call, status
    return stacks[0]
