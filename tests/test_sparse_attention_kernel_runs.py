"""Tests the sparse attention kernels under transforms, in repeated runs and on large arrays."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.compare import assert_matches
from support.masked_attention_kernel import inputs, integers
from support.sparse_attention_kernel import CAUSAL, FORCED, compare, lists, run

from jax_dsa import sparse_attention

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("m", "d", "size", "slots"), [(16, 128, 64, 16), (1, 64, 16, 40), (12, 256, 4, 200)]
)
def test_results_have_the_same_bits_in_20_runs(
    m: int, d: int, size: int, slots: int, rng: np.random.Generator
) -> None:
    arrays = inputs(rng, t=2100, s=2100, n=2 * m, g=2, d=d)
    which = lists(rng, arrays, size, slots)
    options = {"block_size": size, "deterministic": True, **FORCED}
    first = run("cuda", jnp.bfloat16, arrays, which, **options)
    for _ in range(20):
        again = run("cuda", jnp.bfloat16, arrays, which, **options)
        jax.tree.map(np.testing.assert_array_equal, again, first)


def test_transforms(rng: np.random.Generator) -> None:
    q, k, v = inputs(rng, b=6, t=100, s=130, n=16, g=2, d=128)
    indices = lists(rng, (q, k, v), 16, 4)["indices"]

    def gradients(q: Any, k: Any, v: Any, indices: Any, fn: Any = lambda f: f) -> Any:
        @fn
        def attend(q: Any, k: Any, v: Any) -> Any:
            options = {"block_size": 16, "implementation": "cuda", **FORCED}
            return sparse_attention(q, k, v, indices, **options)

        def loss(*arrays: Any) -> tuple[Any, Any]:
            out = attend(*arrays)
            return jnp.sin(out.astype(jnp.float32)).sum(), out

        return jax.grad(loss, argnums=(0, 1, 2), has_aux=True)(q, k, v)

    want = jax.jit(gradients)(q, k, v, indices)
    pairs = [x.reshape(2, 3, *x.shape[1:]) for x in (q, k, v, indices)]
    nested = jax.jit(jax.vmap(jax.vmap(gradients)))(*pairs)
    routes = {
        "eager": gradients(q, k, v, indices),
        "remat": jax.jit(functools.partial(gradients, fn=jax.checkpoint))(q, k, v, indices),
        "vmap without a batch axis": jax.jit(jax.vmap(gradients))(q, k, v, indices),
        "nested vmap": jax.tree.map(lambda x: x.reshape(6, *x.shape[2:]), nested),
    }
    for name, got in routes.items():
        jax.tree.map(functools.partial(np.testing.assert_array_equal, err_msg=name), got, want)
    # The gradient of keys that all batch entries share is a sum.
    shared = jax.jit(jax.vmap(gradients, in_axes=(0, None, None, 0)))(q, k[0], v[0], indices)
    tiled = (jnp.tile(x[:1], (6, 1, 1, 1)) for x in (k, v))
    assert_matches(shared, jax.jit(jax.vmap(gradients))(q, *tiled, indices), tol=8e-3)


def test_replayed_program(rng: np.random.Generator) -> None:
    """XLA records programs as CUDA graphs and replays them, with new inputs."""
    sizes = {"t": 300, "s": 300, "n": 16, "g": 2}
    for _ in range(6):
        arrays = inputs(rng, **sizes)
        compare(arrays, lists(rng, arrays, 16, 5), block_size=16, **CAUSAL)


def test_queries_of_more_than_2_to_the_31_elements(rng: np.random.Generator) -> None:
    """The last queries of a long call have the results of a call with only those queries."""
    t, last, heads, dim = 270_000, 300, 64, 128
    q = jax.random.normal(jax.random.key(1), (1, t, heads, dim), jnp.bfloat16)
    _, k, v = inputs(rng, b=1, t=1, s=t, n=heads, g=4, d=dim)
    indices = integers(rng, 0, t // 64, 1, t, 4, 4)
    options: Any = {"block_size": 64, "implementation": "cuda", **FORCED}
    got = sparse_attention(q, k, v, indices, **options)[:, -last:]
    start = {"query_start": t - last}
    want = sparse_attention(q[:, -last:], k, v, indices[:, -last:], **start, **options)
    assert_matches(got, want, 8e-3)


def test_keys_of_more_than_2_to_the_31_elements(rng: np.random.Generator) -> None:
    """The last keys of a long call have the gradients of a call with only those keys."""
    s, last, size = 8_400_000, 64_000, 64
    shapes = (1, 100, 16, 256), (1, s, 1, 256), (1, s, 1, 64)
    keys = jax.random.split(jax.random.key(1), 3)
    q, k, v = (jax.random.normal(*x, jnp.bfloat16) for x in zip(keys, shapes, strict=True))
    indices = integers(rng, 0, last // size, 1, 100, 1, 8)

    @jax.jit
    def gradients(q: Any, k: Any, v: Any, indices: Any) -> Any:
        def loss(*arrays: Any) -> Any:
            options: Any = {"block_size": size, "implementation": "cuda"}
            return jnp.sin(sparse_attention(*arrays, indices, **options).astype(jnp.float32)).sum()

        return jax.grad(loss, argnums=(0, 1, 2))(q, k, v)

    got = gradients(q, k, v, indices + (s - last) // size)
    want = gradients(q, k[:, -last:], v[:, -last:], indices)
    assert_matches((got[0], *(x[:, -last:] for x in got[1:])), want, 8e-3)
