"""Tests the attn_dist kernel against the XLA implementation in float32."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.compare import assert_as_good_as, assert_matches

from jax_dsa import attn_dist, sparse_mla

pytestmark = pytest.mark.gpu

INT_MIN, INT_MAX = -(2**31), 2**31 - 1


def inputs(
    rng: np.random.Generator, *, b: int = 2, t: int, s: int, n: int, g: int = 1, d: int, k: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns q, kv with NaN in the last two keys, and indices with all kinds of invalid ones."""
    q = rng.standard_normal((b, t, n, d), np.float32)
    kv = rng.standard_normal((b, s, g, d), np.float32)
    indices = rng.integers(0, max(s - 2, 1), (b, t, g, k)).astype(np.int32)
    hit = rng.random(indices.shape) < 0.1
    indices[hit] = rng.choice(np.array([INT_MIN, -1, s, INT_MAX], np.int32), hit.sum())
    indices[0, t // 2] = -1
    kv[:, max(s - 2, 1) :] = np.nan
    return jnp.asarray(q, jnp.bfloat16), jnp.asarray(kv, jnp.bfloat16), jnp.asarray(indices)


def compare(
    q: jax.Array,
    kv: jax.Array,
    indices: jax.Array,
    lse: jax.Array | None = None,
    **options: Any,
) -> None:
    """Compares the implementations, by default with the lse of `sparse_mla`."""
    exact = q.astype(jnp.float32), kv.astype(jnp.float32), indices
    shared = {x: y for x, y in options.items() if x != "head_group"}

    # Pass all arrays as arguments. If they were constants, XLA would spend minutes folding them.
    @jax.jit
    def statistics(*arrays: jax.Array) -> jax.Array:
        return sparse_mla(*arrays, return_lse=True, implementation="xla", **shared)[1]

    @functools.partial(jax.jit, static_argnums=0)
    def run(implementation: str, *arrays: jax.Array) -> jax.Array:
        return attn_dist(*arrays, implementation=implementation, **options)

    lse = statistics(*exact) if lse is None else lse
    got = run("cuda", q, kv, indices, lse)
    assert_matches(got, run("xla", *exact, lse), tol=2e-5, what="dist")
    again = run("cuda", q, jnp.nan_to_num(kv), indices, lse)
    np.testing.assert_array_equal(np.asarray(got), np.asarray(again))


SHAPES = {
    "one query": ({"t": 1, "s": 300, "n": 128, "d": 576, "k": 100}, 64),
    "no tile is whole": ({"t": 62, "s": 777, "n": 64, "d": 576, "k": 130}, 32),
    "D 512": ({"t": 213, "s": 500, "n": 128, "d": 512, "k": 256}, 64),
    "all heads": ({"t": 33, "s": 400, "n": 128, "d": 576, "k": 200}, None),
    "few heads": ({"t": 33, "s": 400, "n": 6, "d": 576, "k": 64}, 2),
    "192 heads": ({"t": 9, "s": 400, "n": 192, "d": 576, "k": 192}, None),
    "groups": ({"t": 20, "s": 300, "n": 32, "g": 2, "d": 576, "k": 70}, 16),
    "K 2048": ({"t": 70, "s": 4096, "n": 128, "d": 576, "k": 2048}, 64),
    "more slots than keys": ({"t": 8, "s": 20, "n": 64, "d": 576, "k": 200}, 64),
    "many queries": ({"b": 1, "t": 70000, "s": 2000, "n": 8, "d": 512, "k": 16}, 8),
}


@pytest.mark.parametrize("name", SHAPES)
def test_shapes(name: str, rng: np.random.Generator) -> None:
    shape, head_group = SHAPES[name]
    compare(*inputs(rng, **shape), head_group=head_group)


def test_options(rng: np.random.Generator) -> None:
    q, kv, indices = inputs(rng, t=62, s=500, n=64, d=576, k=300)
    length = jnp.asarray(rng.integers(-1, 320, (2, 62)), jnp.int32)
    sinks = rng.standard_normal(64).astype(np.float32)
    sinks[:2] = -np.inf, np.inf
    compare(q, kv, indices, scale=0.01)
    compare(q, kv, indices, is_causal=True, query_start=jnp.array([3, 400]), key_stride=2)
    compare(q, kv, indices, sinks=jnp.asarray(sinks), topk_length=length, head_group=None)


GROUPED = {
    "D 128, 4 groups of 16": ({"t": 62, "s": 777, "n": 64, "g": 4, "d": 128, "k": 2048}, 16),
    "D 256, 2 groups of 12": ({"t": 33, "s": 400, "n": 24, "g": 2, "d": 256, "k": 200}, 12),
    "D 192, one head each": ({"t": 9, "s": 400, "n": 3, "g": 3, "d": 192, "k": 131}, 1),
    "D 64, sums of 8": ({"t": 20, "s": 300, "n": 64, "d": 64, "k": 70}, 8),
    "D 128, groups of 40": ({"t": 9, "s": 90, "n": 80, "g": 2, "d": 128, "k": 99}, 40),
    "D 64, many queries": ({"b": 1, "t": 70000, "s": 200, "n": 8, "g": 2, "d": 64, "k": 16}, 4),
}


@pytest.mark.parametrize("name", GROUPED)
def test_dims_of_grouped_heads(name: str, rng: np.random.Generator) -> None:
    shape, head_group = GROUPED[name]
    q, kv, indices = inputs(rng, **shape)
    lse = jnp.asarray(rng.standard_normal(q.shape[:3]) + 2, jnp.float32)
    compare(q, kv, indices, lse, head_group=head_group)


def test_blocks_of_grouped_heads(rng: np.random.Generator) -> None:
    q, kv, _ = inputs(rng, t=62, s=777, n=64, g=4, d=128, k=1)
    blocks = jnp.asarray(rng.integers(-1, 9, (2, 62, 4, 5)), jnp.int32)
    lse = jnp.asarray(rng.standard_normal(q.shape[:3]) + 2, jnp.float32)
    compare(q, kv, blocks, lse, head_group=16, block_size=128, is_causal=True, query_start=700)


@pytest.mark.parametrize("empty", ["k", "s", "t", "b"])
def test_empty_axes(empty: str) -> None:
    shape = {"b": 2, "t": 3, "s": 5, "k": 4} | {empty: 0}
    q = jnp.ones((shape["b"], shape["t"], 64, 576), jnp.bfloat16)
    kv = jnp.ones((shape["b"], shape["s"], 1, 576), jnp.bfloat16)
    indices = jnp.zeros((shape["b"], shape["t"], 1, shape["k"]), jnp.int32)
    lse = jnp.zeros((shape["b"], shape["t"], 64), jnp.float32)
    dist = attn_dist(q, kv, indices, lse, head_group=64, implementation="cuda")
    assert dist.shape == (shape["b"], 1, shape["t"], shape["k"]) and not np.any(np.asarray(dist))


def test_gradients_are_those_of_the_xla_implementation(rng: np.random.Generator) -> None:
    q, kv, indices = inputs(rng, t=20, s=300, n=64, d=576, k=128)
    kv = jnp.nan_to_num(kv)
    lse = jnp.full((2, 20, 64), 5.0)

    def grads(implementation: str | None, dtype: Any) -> tuple[jax.Array, jax.Array]:
        def loss(q: jax.Array, kv: jax.Array) -> jax.Array:
            return jnp.sin(attn_dist(q, kv, indices, lse, implementation=implementation)).sum()

        return jax.grad(loss, argnums=(0, 1))(q.astype(dtype), kv.astype(dtype))

    got = grads(None, jnp.bfloat16)
    low, exact = grads("xla", jnp.bfloat16), grads("xla", jnp.float32)
    for g, lo, ex in zip(got, low, exact, strict=True):
        assert_as_good_as(g, lo, ex, factor=4.0)
