"""How far it is from a call to a kernel: what Python does, and not the device.

    python benchmarks/call_path.py

Prints, for `sparse_mla` and `dsa_attention`: frames of this package between the call and the custom
call, calls of its functions for a first trace, and what an eager call costs more than the same
call under `jax.jit`; and the circles in the package's imports.
"""

from __future__ import annotations

import ast
import collections
import os
import pathlib
import statistics
import sys
import time
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

import jax_dsa
from jax_dsa.core import ffi

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PACKAGE = pathlib.Path(jax_dsa.__file__).parent
B, T, S, N, D, K, J, C = 1, 64, 256, 16, 576, 64, 4, 64


def arguments(queries: int) -> dict[str, tuple[Callable[..., Any], tuple[jax.Array, ...]]]:
    """The functions, and arguments that the kernels support."""
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


def frames() -> list[str]:
    """Our functions between a call of `sparse_mla` and the custom call, as on a machine with the
    extension.
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

    fun, args = arguments(T + 1)["sparse_mla"]
    jax.ffi.ffi_call, ffi.status = seen, lambda: (True, "")
    try:
        jax.make_jaxpr(fun)(*args)
    finally:
        jax.ffi.ffi_call, ffi.status = ffi_call, status
    return stacks[0]


def calls(fun: Callable[..., Any], args: tuple[jax.Array, ...]) -> collections.Counter[str]:
    """Calls of our functions in each file for a first trace."""
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


def milliseconds(fun: Callable[..., Any], args: tuple[jax.Array, ...], times: int = 200) -> float:
    """Median time of a call."""
    samples = []
    for _ in range(times + 5):
        start = time.perf_counter()
        jax.block_until_ready(fun(*args))
        samples.append(time.perf_counter() - start)
    return 1e3 * statistics.median(samples[5:])


def imports(path: pathlib.Path) -> Iterator[str]:
    """The modules of the package that a file imports, for types too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("jax_dsa"):
            for alias in node.names:
                whole = f"{node.module}.{alias.name}".split(".")[1:]
                module = PACKAGE.joinpath(*whole)
                if module.with_suffix(".py").exists() or (module / "__init__.py").exists():
                    yield ".".join(whole)
                else:
                    yield ".".join(str(node.module).split(".")[1:])


def import_circles() -> list[list[str]]:
    """The shortest circle of imports through every module that lies on one, each circle once."""
    graph = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        graph[".".join(p for p in parts if p != "__init__")] = set(imports(path))
    graph.pop("", None)  # the package itself, which imports everything
    circles = {}
    for start in sorted(graph):
        paths = collections.deque([[start]])
        seen = set()
        while paths:
            way = paths.popleft()
            for module in sorted(graph.get(way[-1], ())):
                if module == start:
                    circles.setdefault(frozenset(way), way)
                    paths.clear()
                    break
                if module not in seen:
                    seen.add(module)
                    paths.append([*way, module])
    return list(circles.values())


def main() -> None:
    """Prints everything."""
    for name, (fun, args) in arguments(T).items():
        count = calls(fun, args)
        where = ", ".join(f"{file} {n}" for file, n in count.most_common(4))
        print(f"{name}: {count.total()} calls for a first trace ({where})")
    way = frames()
    print(f"sparse_mla: {len(way)} frames to the custom call\n  " + "\n  ".join(way))
    for name, (fun, args) in arguments(1).items():
        eager, jitted = milliseconds(fun, args), milliseconds(jax.jit(fun), args)
        print(f"{name}: {eager:.3f} ms eagerly, {jitted:.3f} ms under jax.jit")
    circles = import_circles()
    print(f"{len(circles)} circles of imports")
    for circle in circles:
        print("  " + " -> ".join([*circle, circle[0]]))


if __name__ == "__main__":
    main()
