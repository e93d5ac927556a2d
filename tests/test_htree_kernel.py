"""The kernels of hierarchical tree attention against float64 and the XLA implementation."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compare import assert_as_good_as, assert_matches
from oracles import htree as oracle

from jax_dsa import htree_attention, htree_select
from jax_dsa.ops.htree import cuda, tree, xla
from jax_dsa.ops.htree.spec import Operands, Options, Results

pytestmark = pytest.mark.gpu


def inputs(
    rng: np.random.Generator, b: int, t: int, n: int, g: int, d: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    q, k, v = (jnp.asarray(rng.normal(size=(b, t, heads, d)), jnp.bfloat16) for heads in (n, g, g))
    return q, k, v


def both(args: Any, implementation: str = "cuda", **options: Any) -> tuple[jax.Array, jax.Array]:
    return htree_attention(*args, return_lse=True, implementation=implementation, **options)


TREES = {
    "one layer": ((2, 63, 4, 2, 64), {"compression": 16, "top_k": 4}),
    "two layers": ((1, 90, 6, 1, 64), {"compression": 16, "top_k": 3, "scale": 0.3}),
    "three layers": ((1, 150, 4, 2, 64), {"compression": 8, "top_k": 2, "rope_base": 500.0}),
    "one selected": ((1, 70, 2, 1, 128), {"compression": 8, "top_k": 1}),
    "32 children": ((1, 100, 17, 1, 64), {"compression": 32, "top_k": 2}),
}


@pytest.mark.parametrize(("shape", "options"), TREES.values(), ids=TREES.keys())
def test_against_the_oracle(shape: Any, options: dict, rng: np.random.Generator) -> None:
    """It is given the selection, which rounding may decide."""
    args = inputs(rng, *shape)
    batch, tokens, _, groups, _ = shape
    layers = jax.tree.map(np.asarray, htree_select(*args[:2], implementation="cuda", **options))
    choice = {
        at: [[int(x) for x in layer.selected[at] if x >= 0] for layer in layers]
        for at in np.ndindex(batch, tokens, groups)
    }
    out, lse, seen = oracle.attention(*args, **options, choice=choice)
    for at, (candidates, _) in seen.items():
        for layer, nodes in zip(layers, candidates, strict=True):
            assert [x for x in layer.candidates[at] if x >= 0] == nodes
    got = both(args, **options)
    assert_matches(got[0].astype(np.float32), out.astype(np.float32), tol=2e-2)
    assert_matches(got[1], lse.astype(np.float32), tol=1e-2)


@pytest.mark.parametrize("t", [1, 15, 16, 17, 2000, 8192])
def test_up_to_the_budget_it_is_dense_attention(t: int, rng: np.random.Generator) -> None:
    args = inputs(rng, 1, t, 16, 1, 128)
    exact = [x.astype(jnp.float32) for x in args]
    want, low = both(exact, "xla"), both(args, "xla")
    assert_as_good_as(both(args)[0], low[0], want[0])
    assert_matches(both(args)[1], want[1], tol=1e-2)


def test_later_tokens_do_not_matter(rng: np.random.Generator) -> None:
    """Bit for bit: not if they are NaN, not if there are none."""
    q, k, v = inputs(rng, 2, 9000, 8, 2, 64)
    whole = both((q, k, v))
    late = jnp.arange(9000)[None, :, None, None] >= 8100
    nan = [jnp.where(late, jnp.nan, x).astype(x.dtype) for x in (k, v)]
    for got in (both((q, *nan)), both((q[:, :8100], k[:, :8100], v[:, :8100]))):
        for x, y in zip(whole, got, strict=True):
            np.testing.assert_array_equal(np.asarray(x[:, :8100]), np.asarray(y[:, :8100]))


def test_chunks_and_runs_have_the_same_bits(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = inputs(rng, 2, 3000, 16, 1, 128)
    tree = {"compression": 16, "top_k": 32}
    whole = both(args, **tree)
    for _ in range(20):
        again = both(args, **tree)
        assert all(np.array_equal(x, y) for x, y in zip(whole, again, strict=True))
    monkeypatch.setattr(cuda, "WORKSPACE_BUDGET", 2_000_000)
    jax.clear_caches()
    chunks = both(args, **tree)
    assert all(np.array_equal(x, y) for x, y in zip(whole, chunks, strict=True))


def gradients(
    args: Any, weights: Any, implementation: str | None, dtype: Any = jnp.bfloat16, **options: Any
) -> Any:
    """Of a loss of out and lse."""

    def loss(*args: Any) -> jax.Array:
        results = htree_attention(*args, return_lse=True, implementation=implementation, **options)
        return sum(jnp.vdot(w, x.astype(w.dtype)) for w, x in zip(weights, results, strict=True))

    return jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(*(x.astype(dtype) for x in args))


def cotangents(rng: np.random.Generator, q: jax.Array) -> tuple[jax.Array, jax.Array]:
    out, lse = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in (q.shape, q.shape[:3]))
    return out, lse


# Rounding selects nothing there.
ONE_LAYER = {
    "one layer": ((2, 60, 4, 2, 64), {"compression": 16, "top_k": 4}),
    "20 heads a group": ((1, 130, 40, 2, 128), {"compression": 8, "top_k": 32}),
    "32 children": ((1, 500, 16, 1, 128), {"compression": 32, "top_k": 16}),
}


@pytest.mark.parametrize(("shape", "options"), ONE_LAYER.values(), ids=ONE_LAYER.keys())
def test_gradients_are_those_of_the_xla_implementation(
    shape: Any, options: dict, rng: np.random.Generator
) -> None:
    args = inputs(rng, *shape)
    weights = cotangents(rng, args[0])
    got = gradients(args, weights, "cuda", **options)
    low = gradients(args, weights, "xla", **options)
    exact = gradients(args, weights, "xla", jnp.float32, **options)
    for name, g, lo, ex in zip("qkv", got, low, exact, strict=True):
        assert_as_good_as(g, lo, ex, factor=4.0, what=name)


@pytest.mark.parametrize(("shape", "options"), TREES.values(), ids=TREES.keys())
def test_gradients_through_all_layers(shape: Any, options: dict, rng: np.random.Generator) -> None:
    """Against the XLA implementation's backward pass, given the kernels' selection."""
    args = inputs(rng, *shape)
    weights = cotangents(rng, args[0])
    got = gradients(args, weights, "cuda", **options)
    positions = jnp.broadcast_to(jnp.arange(shape[1], dtype=jnp.int32), shape[:2])
    operands = Operands(*args, positions)
    scale = {"scale": shape[4] ** -0.5} | options
    y = cuda.htree_fwd(Options(**scale), forward_avals(operands, options), operands)
    wide = Operands(*(x.astype(jnp.float32) for x in args), positions)
    exact = xla.htree_bwd(
        Options(**scale),
        wide,
        y._replace(out=y.out.astype(jnp.float32)),
        Results(*weights, selected=None),  # type: ignore[arg-type]
    )
    for name, g, ex in zip("qkv", got, exact, strict=True):
        error = jnp.linalg.norm(g.astype(jnp.float32) - ex) / jnp.linalg.norm(ex)
        assert error < 0.02, name


def forward_avals(x: Operands, options: dict) -> Results:
    batch, tokens, heads, _ = x.q.shape
    layers = len(tree.tree_layers(tokens, options["compression"], options["top_k"]))
    return Results(
        jax.ShapeDtypeStruct(x.q.shape, x.q.dtype),
        jax.ShapeDtypeStruct((batch, tokens, heads), jnp.float32),
        jax.ShapeDtypeStruct(
            (batch, tokens, x.k.shape[2], layers - 1, options["top_k"]), jnp.int16
        ),
    )


def test_gradients_have_the_same_bits_on_every_run(rng: np.random.Generator) -> None:
    args = inputs(rng, 1, 3000, 16, 1, 128)
    weights = cotangents(rng, args[0])
    first = gradients(args, weights, "cuda", compression=16, top_k=32)
    for _ in range(100):
        again = gradients(args, weights, "cuda", compression=16, top_k=32)
        assert all(np.array_equal(x, y) for x, y in zip(first, again, strict=True))


def test_queries_without_cotangents_have_no_gradients(rng: np.random.Generator) -> None:
    """Not even if they meet NaN."""
    q, k, v = inputs(rng, 1, 400, 4, 1, 64)
    out, lse = cotangents(rng, q)
    early = jnp.arange(400)[None, :, None] < 300
    weights = jnp.where(early[..., None], out, 0), jnp.where(early, lse, 0)
    nan = [jnp.where(early[..., None], x, jnp.nan).astype(x.dtype) for x in (q, k, v)]
    want = gradients((q, k, v), weights, "cuda", compression=8, top_k=4)
    got = gradients(nan, weights, "cuda", compression=8, top_k=4)
    for name, g, w in zip("qkv", got, want, strict=True):
        np.testing.assert_array_equal(np.asarray(g), np.asarray(w), err_msg=name)


@pytest.mark.parametrize("empty", ["b", "t"])
def test_empty_axes(empty: str, rng: np.random.Generator) -> None:
    shape = {"b": 2, "t": 40} | {empty: 0}
    args = inputs(rng, shape["b"], shape["t"], 4, 1, 64)
    out, lse = both(args, compression=8, top_k=2)
    assert out.shape == args[0].shape and lse.shape == out.shape[:3]
