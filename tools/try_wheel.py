"""Tries an installed wheel in the Python interpreter that runs this script.

    python try_wheel.py README.md [--gpu]

It runs README's example and the examples of all public functions. With --gpu it compares gradients
computed by the kernels with those of XLA instead of running the functions' examples. It needs only
jax_dsa and its dependencies.
"""

from __future__ import annotations

import argparse
import doctest
import inspect
import re
import sys
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp

import jax_dsa


def examples() -> int:
    """Runs the docstrings' examples and returns the number of functions."""
    public = [vars(jax_dsa)[name] for name in jax_dsa.__all__ if name in vars(jax_dsa)]
    functions = [f for f in public if inspect.isfunction(inspect.unwrap(f))]
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    for function in functions:
        finder = doctest.DocTestFinder(recurse=False)
        for example in finder.find(inspect.unwrap(function), function.__name__, globs={}):
            runner.run(example)
    if runner.failures:
        sys.exit(f"{runner.failures} lines of the examples fail")
    return len(functions)


def readme_example(readme: Path) -> None:
    """Runs the README's Python block and checks its gradients."""
    found = re.search(r"```python\n(.*?)```", readme.read_text(), re.S)
    assert found, f"{readme} has no Python block"
    names: dict[str, Any] = {}
    exec(compile(found[1], str(readme), "exec"), names)
    for i, gradient in enumerate(names["gradients"]):
        assert jnp.isfinite(gradient).all() and gradient.any(), i


def gradient_by_kernels() -> None:
    """Compares gradients of sparse attention with its index loss, by kernels and by XLA."""
    shapes: dict[str, tuple[int, ...]] = {
        "q": (1, 256, 64, 576),
        "kv": (1, 256, 1, 576),
        "index_q": (1, 256, 64, 128),
    }
    shapes |= {"index_k": (1, 256, 128), "index_weights": (1, 256, 64)}
    keys = jax.random.split(jax.random.key(0), len(shapes))
    x = {
        name: jax.random.normal(key, shape, jnp.float32 if "weights" in name else jnp.bfloat16)
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }
    indices = jnp.argsort(jax.random.uniform(keys[0], (1, 256, 256)))[..., :64].astype(jnp.int32)

    def gradients(implementation: Literal["cuda", "xla"]) -> dict[str, Any]:
        def loss(x: dict[str, Any]) -> Any:
            out, aux = jax_dsa.dsa_attention(
                **x, indices=indices, value_dim=512, implementation=implementation
            )
            return jnp.square(out.astype(jnp.float32)).mean() + aux.kl

        return jax.tree.map(lambda g: g.astype(jnp.float32), jax.jit(jax.grad(loss))(x))

    kernels, xla = gradients("cuda"), gradients("xla")
    for name in shapes:
        error = jnp.linalg.norm(kernels[name] - xla[name]) / jnp.linalg.norm(xla[name])
        print(f"gradient of {name}, kernels and XLA: relative difference {error:.1e}")
        assert error < 0.02, name


def main() -> None:
    """Runs all checks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("readme", type=Path)
    parser.add_argument("--gpu", action="store_true")
    asked = parser.parse_args()
    python = ".".join(map(str, sys.version_info[:3]))
    print(f"Python {python}, JAX {jax.__version__}, {jax.default_backend()}, {jax_dsa.__file__}")
    readme_example(asked.readme)
    print("the example of the README runs")
    if asked.gpu:
        return gradient_by_kernels()
    print(f"the examples of {examples()} functions run")
    libraries = Path("/proc/self/maps").read_text()
    assert "libcudart" not in libraries, "the extension loaded the shared library of CUDA's runtime"
    print("the extension is", "loaded" if "jax_dsa/_cuda" in libraries else "not installed")


if __name__ == "__main__":
    main()
