"""The sparse MLA forward kernel against the XLA implementation in float32."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compare import assert_as_good_as, assert_matches

from jax_dsa import sparse_mla

pytestmark = pytest.mark.gpu

INT_MIN, INT_MAX = -(2**31), 2**31 - 1


def inputs(
    rng: np.random.Generator, *, b: int = 2, t: int, s: int, n: int, g: int = 1, d: int, k: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """bfloat16 q and kv, and indices with duplicates, every kind of invalid one, and a row of only
    those; NaN in the keys that nothing selects.
    """
    q = rng.standard_normal((b, t, n, d), np.float32)
    kv = rng.standard_normal((b, s, g, d), np.float32)
    indices = rng.integers(0, max(s - 2, 1), (b, t, g, k)).astype(np.int32)
    bad = np.array([INT_MIN, -1, s, INT_MAX], np.int32)
    hit = rng.random(indices.shape) < 0.1
    indices[hit] = rng.choice(bad, hit.sum())
    indices[0, t // 2] = rng.choice(bad, indices[0, 0].shape)
    kv[:, max(s - 2, 1) :] = np.nan
    return jnp.asarray(q, jnp.bfloat16), jnp.asarray(kv, jnp.bfloat16), jnp.asarray(indices)


def compare(q: jax.Array, kv: jax.Array, indices: jax.Array, **options: Any) -> None:
    def run(implementation: str, dtype: Any) -> tuple[jax.Array, jax.Array]:
        return sparse_mla(
            q.astype(dtype),
            kv.astype(dtype),
            indices,
            return_lse=True,
            implementation=implementation,
            **options,
        )

    out, lse = run("cuda", jnp.bfloat16)
    low, _ = run("xla", jnp.bfloat16)
    exact, exact_lse = run("xla", jnp.float32)
    assert out.dtype == jnp.bfloat16 and lse.dtype == jnp.float32
    assert_as_good_as(out, low, exact, what="out")
    assert_matches(lse, exact_lse, tol=2e-5, what="lse")


SHAPES = {
    "one query": {"t": 1, "s": 300, "n": 128, "d": 576, "k": 100},
    "no tile is whole": {"t": 62, "s": 777, "n": 64, "d": 576, "k": 130},
    "D 512": {"t": 213, "s": 500, "n": 128, "d": 512, "k": 256},
    "few heads": {"t": 33, "s": 400, "n": 5, "d": 576, "k": 64},
    "one head": {"t": 33, "s": 400, "n": 1, "d": 512, "k": 65},
    "96 heads": {"t": 9, "s": 400, "n": 96, "d": 576, "k": 192},
    "groups": {"t": 20, "s": 300, "n": 32, "g": 2, "d": 576, "k": 70},
    "K 2048": {"t": 70, "s": 4096, "n": 128, "d": 576, "k": 2048},
    "more slots than keys": {"t": 8, "s": 20, "n": 64, "d": 576, "k": 200},
    "one slot": {"t": 8, "s": 20, "n": 64, "d": 576, "k": 1},
    "many queries": {"b": 1, "t": 70000, "s": 2000, "n": 8, "d": 512, "k": 16},
}


@pytest.mark.parametrize("name", SHAPES)
def test_shapes(name: str, rng: np.random.Generator) -> None:
    compare(*inputs(rng, **SHAPES[name]))


def test_options(rng: np.random.Generator) -> None:
    q, kv, indices = inputs(rng, t=62, s=500, n=64, d=576, k=300)
    length = jnp.asarray(rng.integers(-1, 320, (2, 62)), jnp.int32)
    sinks = rng.standard_normal(64).astype(np.float32)
    sinks[:2] = -np.inf, np.inf
    compare(q, kv, indices, scale=0.01)
    compare(q, kv, indices, is_causal=True, query_start=100)
    compare(q, kv, indices, is_causal=True, query_start=jnp.array([3, 400]), key_stride=2)
    compare(q, kv, indices, topk_length=length)
    compare(q, kv, indices, sinks=jnp.asarray(sinks), topk_length=length)


@pytest.mark.parametrize("empty", ["k", "s", "t", "b"])
def test_empty_axes(empty: str, rng: np.random.Generator) -> None:
    shape = {"b": 2, "t": 3, "s": 5, "n": 64, "d": 576, "k": 4} | {empty: 0}
    q = jnp.ones((shape["b"], shape["t"], 64, 576), jnp.bfloat16)
    kv = jnp.ones((shape["b"], shape["s"], 1, 576), jnp.bfloat16)
    indices = jnp.zeros((shape["b"], shape["t"], 1, shape["k"]), jnp.int32)
    out, lse = sparse_mla(q, kv, indices, return_lse=True, implementation="cuda")
    assert out.shape == (shape["b"], shape["t"], 64, 512)
    assert np.all(np.asarray(out, np.float32) == 0) and np.all(np.asarray(lse) == -np.inf)


def test_repeats_itself_and_ignores_what_nothing_selects(rng: np.random.Generator) -> None:
    q, kv, indices = inputs(rng, t=100, s=1000, n=128, d=576, k=640)
    first = sparse_mla(q, kv, indices, return_lse=True, implementation="cuda")
    clean = jnp.nan_to_num(kv)
    for keys in (kv, kv, kv, clean):
        again = sparse_mla(q, keys, indices, return_lse=True, implementation="cuda")
        jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b), first, again)


def test_in_a_replayed_program(rng: np.random.Generator) -> None:
    """XLA records programs into CUDA graphs and replays them: new inputs must give new results."""
    program = jax.jit(lambda *a: sparse_mla(*a, implementation="cuda") * 2)
    for _ in range(6):
        args = inputs(rng, t=16, s=200, n=64, d=576, k=64)
        want = sparse_mla(*args, implementation="cuda") * 2
        np.testing.assert_array_equal(np.asarray(program(*args)), np.asarray(want))


def test_gradients_go_with_the_kernels_statistics(rng: np.random.Generator) -> None:
    """Forward by the kernel, backward by XLA from its out and lse."""
    q, kv, indices = inputs(rng, t=20, s=300, n=64, d=576, k=128)
    kv = jnp.nan_to_num(kv)

    def grads(implementation: str | None, dtype: Any) -> tuple[jax.Array, jax.Array]:
        def loss(q: jax.Array, kv: jax.Array) -> jax.Array:
            out = sparse_mla(q, kv, indices, implementation=implementation)
            return jnp.sin(out.astype(jnp.float32)).sum()

        return jax.grad(loss, argnums=(0, 1))(q.astype(dtype), kv.astype(dtype))

    got = grads(None, jnp.bfloat16)
    low, exact = grads("xla", jnp.bfloat16), grads("xla", jnp.float32)
    for g, lo, ex in zip(got, low, exact, strict=True):
        assert_as_good_as(g, lo, ex, factor=4.0)


def test_more_than_2_31_key_elements() -> None:
    keys = 3_800_000
    kv = jax.random.normal(jax.random.key(0), (1, keys, 1, 576), jnp.bfloat16)
    q = jax.random.normal(jax.random.key(1), (1, 4, 64, 576), jnp.bfloat16)
    indices = keys - 1 - jnp.arange(4 * 128, dtype=jnp.int32).reshape(1, 4, 1, 128) * 1001
    out, lse = sparse_mla(q, kv, indices, return_lse=True, implementation="cuda")
    rows = kv[0, indices[0, :, 0], 0][:, :, None]  # each query's keys as a batch entry of its own
    own = jnp.broadcast_to(jnp.arange(128, dtype=jnp.int32), (4, 1, 1, 128))
    want, want_lse = sparse_mla(q[0][:, None], rows, own, return_lse=True, implementation="cuda")
    np.testing.assert_array_equal(np.asarray(out[0]), np.asarray(want[:, 0]))
    np.testing.assert_array_equal(np.asarray(lse[0]), np.asarray(want_lse[:, 0]))


def test_what_the_kernel_does_not_cover(rng: np.random.Generator) -> None:
    q, kv, indices = inputs(rng, t=2, s=8, n=64, d=576, k=4)
    for call in (
        lambda: sparse_mla(
            q.astype(jnp.float32), kv.astype(jnp.float32), indices, implementation="cuda"
        ),
        lambda: sparse_mla(
            q[..., :500], kv[..., :500], indices, value_dim=400, implementation="cuda"
        ),
        lambda: jax.grad(lambda q: sparse_mla(q, kv, indices, implementation="cuda").sum())(q),
    ):
        with pytest.raises(NotImplementedError, match="implementation='xla'"):
            call()
