"""The CUDA kernels of hierarchical tree attention against float64 and the XLA implementation."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.compare import assert_as_good_as, assert_matches
from support.oracles import htree as oracle

from jax_dsa import HTreeCache, htree_attention, htree_decode, htree_select
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
    """The oracle is given the selection, which rounding errors may change."""
    args = inputs(rng, *shape)
    batch, tokens, _, groups, _ = shape
    layers = jax.tree.map(np.asarray, htree_select(*args[:2], implementation="cuda", **options))
    choice = {
        at: [[int(x) for x in layer.selected[at] if x >= 0] for layer in layers]
        for at in np.ndindex(batch, tokens, groups)
    }
    out, lse, seen = oracle.attention(*args, **options, choice=choice)
    for at, (candidates, _) in seen.items():
        for layer, want in zip(layers, candidates, strict=True):
            assert [x for x in layer.candidates[at] if x >= 0] == want
    got = both(args, **options)
    assert_matches(got[0].astype(np.float32), out.astype(np.float32), tol=2e-2)
    assert_matches(got[1], lse.astype(np.float32), tol=1e-2)


def at_some_tokens(q: Any, k: Any, v: Any, positions: Any, **options: Any) -> Results:
    """Returns the forward pass of queries at these tokens only."""
    options = {"scale": q.shape[3] ** -0.5} | options
    operands = Operands(q, k, v, jnp.asarray(positions, jnp.int32)[None])
    layers = tree.tree_layers(k.shape[1], options["compression"], options["top_k"])
    return cuda.htree_fwd(Options(**options), avals(operands, options, layers), operands)


@pytest.mark.parametrize("t", [8191, 8193, 131073])
def test_tokens_around_a_new_layer(t: int, rng: np.random.Generator) -> None:
    """The oracle is given the selection."""
    sizes = {"compression": 16, "top_k": 512}
    positions = [0, 4321, t - 1]
    q, _, _ = inputs(rng, 1, len(positions), 2, 1, 64)
    _, k, v = inputs(rng, 1, t, 1, 1, 64)
    y = at_some_tokens(q, k, v, positions, **sizes)
    layers = [layer.size for layer in tree.tree_layers(t, **sizes)]
    trees = [oracle.layers(np.asarray(x[0, :, 0], np.float64), **sizes) for x in (k, v)]
    for i, position in enumerate(positions):
        selected = np.asarray(y.selected[0, i, 0])
        choice = oracle.selected_nodes(selected, position, layers, 16)
        query = np.asarray(q[0, i], np.float64)
        out, lse, *_ = oracle.query(query, *trees, position, 16, 512, 64**-0.5, 10000.0, choice)
        assert_matches(y.out[0, i].astype(np.float32), out.astype(np.float32), tol=2e-2)
        assert_matches((y.max_logit + y.log_sum)[0, i], lse.astype(np.float32), tol=1e-2)


@pytest.mark.parametrize("options", [(16, 512), (8, 100), (32, 7)], ids=str)
def test_accumulated_nodes_are_a_partition_of_many_tokens(
    options: tuple[int, int], rng: np.random.Generator
) -> None:
    sizes = {"compression": options[0], "top_k": options[1]}
    tokens = int(rng.integers(100_000, 300_001))
    positions = np.append(rng.integers(0, tokens, 99), tokens - 1)
    q, _, _ = inputs(rng, 1, 100, 2, 1, 64)
    _, k, v = inputs(rng, 1, tokens, 1, 1, 64)
    selected = np.asarray(at_some_tokens(q, k, v, positions, **sizes).selected[0, :, 0])
    layers = [layer.size for layer in tree.tree_layers(tokens, *options)]
    oracle.assert_partition(selected, positions, tokens, layers, **sizes)


def test_selection_is_exact_with_many_ties(rng: np.random.Generator) -> None:
    """Checks 1000 queries in two layers, and decode."""
    tokens, sizes = 20_000, {"compression": 16, "top_k": 32}
    exact = oracle.exact_problem(rng, tokens, 16, 64, 16)
    q, k = (jnp.asarray(x, jnp.bfloat16) for x in exact)
    rotary = {"rope_base": 1e38, "scale": 0.125}
    positions = rng.integers(0, tokens, 1000)
    y = at_some_tokens(q[:, positions], k, k, positions, **rotary, **sizes)
    selected = np.asarray(y.selected[0, :, 0])
    cache = HTreeCache.empty(1, tokens, 64, **sizes).append(k, k)
    operands = Operands(
        q[:, -4:], cache.k, cache.v, jnp.arange(tokens - 4, tokens, dtype=jnp.int32)[None]
    )
    layers = tree.tree_layers(tokens, **sizes)
    y = cuda.htree_fwd(
        Options(capacity=tokens, **rotary, **sizes), avals(operands, sizes, layers), operands
    )
    selected = np.concatenate([selected, np.asarray(y.selected[0, :, 0])])
    for got, position in zip(selected, [*positions, *range(tokens - 4, tokens)], strict=True):
        want = oracle.exact_selection(
            exact[0][0, position, 0], exact[1][0, :, 0], position, **sizes
        )
        for row, ordinals in zip(got, want, strict=True):
            np.testing.assert_array_equal(row[row >= 0], ordinals)


@pytest.mark.parametrize("t", [1, 15, 16, 17, 2000, 8192])
def test_one_layer_is_dense_attention(t: int, rng: np.random.Generator) -> None:
    args = inputs(rng, 1, t, 16, 1, 128)
    exact = [x.astype(jnp.float32) for x in args]
    want, low = both(exact, "xla"), both(args, "xla")
    assert_as_good_as(both(args)[0], low[0], want[0])
    assert_matches(both(args)[1], want[1], tol=1e-2)


def test_later_tokens_have_no_influence(rng: np.random.Generator) -> None:
    """Results are the same bits if later tokens are NaN, and if there are none."""
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
    for _ in range(100):
        again = both(args, **tree)
        assert all(np.array_equal(x, y) for x, y in zip(whole, again, strict=True))
    monkeypatch.setattr(cuda, "WORKSPACE_BUDGET", 2_000_000)
    jax.clear_caches()
    chunks = both(args, **tree)
    assert all(np.array_equal(x, y) for x, y in zip(whole, chunks, strict=True))


def gradients(
    args: Any, weights: Any, implementation: str | None, dtype: Any = jnp.bfloat16, **options: Any
) -> Any:
    """Returns the gradients of a loss of out and lse."""

    def loss(*args: Any) -> jax.Array:
        results = htree_attention(*args, return_lse=True, implementation=implementation, **options)
        return sum(jnp.vdot(w, x.astype(w.dtype)) for w, x in zip(weights, results, strict=True))

    return jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(*(x.astype(dtype) for x in args))


def cotangents(rng: np.random.Generator, q: jax.Array) -> tuple[jax.Array, jax.Array]:
    out, lse = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in (q.shape, q.shape[:3]))
    return out, lse


# With one layer nothing is selected, so rounding errors cannot change a selection.
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
    """The XLA implementation's backward pass is given the kernels' selection."""
    args = inputs(rng, *shape)
    weights = cotangents(rng, args[0])
    got = gradients(args, weights, "cuda", **options)
    positions = jnp.broadcast_to(jnp.arange(shape[1], dtype=jnp.int32), shape[:2])
    operands = Operands(*args, positions)
    scale = {"scale": shape[4] ** -0.5} | options
    layers = tree.tree_layers(shape[1], options["compression"], options["top_k"])
    y = cuda.htree_fwd(Options(**scale), avals(operands, options, layers), operands)
    wide = Operands(*(x.astype(jnp.float32) for x in args), positions)
    exact = xla.htree_bwd(
        Options(**scale),
        wide,
        y._replace(out=y.out.astype(jnp.float32)),
        Results(weights[0], None, weights[1], None),  # type: ignore[arg-type]
    )
    for name, g, ex in zip("qkv", got, exact, strict=True):
        error = jnp.linalg.norm(g.astype(jnp.float32) - ex) / jnp.linalg.norm(ex)
        assert error < 0.02, name


def avals(x: Operands, options: dict, layers: Any) -> Results:
    """Returns the shapes and dtypes of the forward pass over a tree."""
    batch, tokens, heads, _ = x.q.shape
    row = jax.ShapeDtypeStruct((batch, tokens, heads), jnp.float32)
    return Results(
        jax.ShapeDtypeStruct(x.q.shape, x.q.dtype),
        row,
        row,
        jax.ShapeDtypeStruct(
            (batch, tokens, x.k.shape[2], len(layers) - 1, options["top_k"]), jnp.int16
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
    """Holds even if they see NaN."""
    q, k, v = inputs(rng, 1, 400, 4, 1, 64)
    out, lse = cotangents(rng, q)
    has_cotangent = jnp.arange(400)[None, :, None] < 300
    weights = jnp.where(has_cotangent[..., None], out, 0), jnp.where(has_cotangent, lse, 0)
    nan = [jnp.where(has_cotangent[..., None], x, jnp.nan).astype(x.dtype) for x in (q, k, v)]
    want = gradients((q, k, v), weights, "cuda", compression=8, top_k=4)
    got = gradients(nan, weights, "cuda", compression=8, top_k=4)
    for name, g, w in zip("qkv", got, want, strict=True):
        np.testing.assert_array_equal(np.asarray(g), np.asarray(w), err_msg=name)


def steps(cache: HTreeCache, args: Any, counts: Any) -> Any:
    """Appends `counts` tokens at a time; yields their start, their queries and the cache."""
    start = 0
    for count in counts:
        q, k, v = (x[:, start : start + count] for x in args)
        cache = jax.jit(HTreeCache.append)(cache, k, v)
        yield start, q, cache
        start += count


def dirty_cache(args: Any, capacity: int, **options: Any) -> HTreeCache:
    """Returns a cache without tokens, filled with NaN."""
    k = args[1]
    cache = HTreeCache.empty(k.shape[0], capacity, k.shape[3], groups=k.shape[2], **options)
    return dataclasses.replace(
        cache, k=jnp.full_like(cache.k, jnp.nan), v=jnp.full_like(cache.v, jnp.nan)
    )


@pytest.mark.parametrize(("shape", "options"), TREES.values(), ids=TREES.keys())
def test_decode_against_the_oracle(shape: Any, options: dict, rng: np.random.Generator) -> None:
    """Appends a prompt, then one or four tokens per step, to a cache with capacity for more.

    The oracle is given the selection.
    """
    args = inputs(rng, *shape)
    batch, tokens, heads, groups, dim = shape
    sizes = {name: options[name] for name in ("compression", "top_k")}
    chosen = {"scale": dim**-0.5, "rope_base": 10000.0} | options
    exact = [np.asarray(x, np.float64) for x in args]
    cache = dirty_cache(args, tokens + 2000, **sizes)
    layers = tree.tree_layers(cache.capacity, **sizes)
    for start, q, cache in steps(cache, args, [tokens - 9, 4, 4, 1]):  # noqa: B020
        first = start + max(q.shape[1] - 4, 0)
        q = q[:, -4:]
        positions = first + jnp.arange(q.shape[1], dtype=jnp.int32)
        operands = Operands(q, cache.k, cache.v, jnp.broadcast_to(positions, q.shape[:2]))
        y = cuda.htree_fwd(
            Options(capacity=cache.capacity, **chosen), avals(operands, options, layers), operands
        )
        got = htree_decode(q, cache, return_lse=True, implementation="cuda", **rotary(options))
        np.testing.assert_array_equal(got[0], y.out)
        np.testing.assert_array_equal(got[1], y.max_logit + y.log_sum)
        for b, t, g in np.ndindex(batch, q.shape[1], groups):
            group = slice(g * (heads // groups), (g + 1) * (heads // groups))
            trees = [oracle.layers(x[b, :, g], **sizes) for x in exact[1:]]
            choice = oracle.selected_nodes(
                np.asarray(y.selected[b, t, g]),
                first + t,
                [layer.size for layer in layers],
                sizes["compression"],
            )
            out, lse, *_ = oracle.query(
                exact[0][b, first + t, group],
                *trees,
                first + t,
                *sizes.values(),
                chosen["scale"],
                chosen["rope_base"],
                choice,
            )
            assert_matches(y.out[b, t, group].astype(np.float32), out.astype(np.float32), tol=2e-2)
            assert_matches((y.max_logit + y.log_sum)[b, t, group], lse.astype(np.float32), tol=1e-2)


def rotary(options: dict) -> dict:
    return {name: x for name, x in options.items() if name in ("scale", "rope_base")}


def test_decode_is_attention(rng: np.random.Generator) -> None:
    """Holds with one layer, where rounding errors cannot change a selection."""
    args = inputs(rng, 2, 3000, 16, 1, 128)
    want = both(args)
    cache = dirty_cache(args, 4000)
    for start, q, cache in steps(cache, args, [2990, 1, 2, 3, 4]):  # noqa: B020
        got = htree_decode(q[:, -4:], cache, return_lse=True, implementation="cuda")
        at = slice(start + q.shape[1] - got[0].shape[1], start + q.shape[1])
        assert_matches(got[0].astype(np.float32), want[0][:, at].astype(np.float32), tol=2e-2)
        assert_matches(got[1], want[1][:, at], tol=1e-2)


def test_decode_in_a_jitted_step_with_a_donated_cache(rng: np.random.Generator) -> None:
    """The results have the same bits on every run."""
    args = inputs(rng, 3, 2000, 16, 2, 64)
    options = {"compression": 8, "top_k": 16}

    @functools.partial(jax.jit, donate_argnums=0)
    def step(cache: HTreeCache, q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
        cache = cache.append(k, v)
        return cache, htree_decode(q, cache, return_lse=True, implementation="cuda")

    prompt = jax.jit(HTreeCache.append)(
        dirty_cache(args, 2100, **options), *(x[:, :1990] for x in args[1:])
    )
    first = None
    for _ in range(100):
        cache = jax.tree.map(jnp.copy, prompt)
        results = []
        for t in range(1990, 1994):
            cache, got = step(cache, *(x[:, t : t + 1] for x in args))
            results += [np.asarray(x, np.float32) for x in got]
        assert all(np.isfinite(x).all() for x in results)
        first = first or results
        assert all(np.array_equal(x, y) for x, y in zip(first, results, strict=True))


def test_decode_of_requests_without_tokens(rng: np.random.Generator) -> None:
    args = inputs(rng, 2, 50, 4, 1, 64)
    cache = dirty_cache(args, 300, compression=8, top_k=4)
    cache = cache.append(*args[1:], counts=jnp.asarray([0, 2], jnp.int32))
    out, lse = htree_decode(args[0][:, :3], cache, return_lse=True, implementation="cuda")
    seen = np.array([[False] * 3, [False, True, True]])
    assert np.all(np.asarray(out, np.float32)[~seen] == 0) and np.all(
        np.asarray(lse)[~seen] == -np.inf
    )
    want = np.repeat(np.asarray(args[2], np.float32)[1, 0], 4, axis=0)
    np.testing.assert_array_equal(np.asarray(out, np.float32)[1, 1], want)


@pytest.mark.parametrize("empty", ["b", "t"])
def test_empty_axes(empty: str, rng: np.random.Generator) -> None:
    shape = {"b": 2, "t": 40} | {empty: 0}
    args = inputs(rng, shape["b"], shape["t"], 4, 1, 64)
    out, lse = both(args, compression=8, top_k=2)
    assert out.shape == args[0].shape and lse.shape == out.shape[:3]
