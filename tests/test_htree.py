"""`htree_attention` and `htree_select` against the float64 oracle.

test_htree_decode.py tests trees and decode, test_htree_arguments.py tests misuse.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params
from jax.test_util import check_grads
from support.compare import assert_as_good_as, assert_matches, assert_unmoved
from support.oracles import htree as oracle

import jax_dsa
from jax_dsa.core import streaming
from jax_dsa.ops.htree import (
    HTreeCache,
    htree_attention,
    htree_build,
    htree_select,
    tree,
    xla,
)
from jax_dsa.ops.htree.spec import Operands, Options, Results

B, T, N, G, D, E = 2, 62, 4, 2, 6, 5
TREE = {"compression": 3, "top_k": 3}  # layers of 62, 21 and 7 nodes


def inputs(rng: np.random.Generator, dtype: Any = np.float32, t: int = T) -> tuple:
    shapes = (B, t, N, D), (B, t, G, D), (B, t, G, E)
    return tuple(rng.normal(size=shape).astype(dtype) for shape in shapes)


def both(q: Any, k: Any, v: Any, **options: Any) -> tuple[jax.Array, jax.Array]:
    return htree_attention(q, k, v, return_lse=True, **{**TREE, **options})


@functools.partial(jax.jit, static_argnums=3)
def grads(args: tuple, dout: Any, dlse: Any, options: tuple = ()) -> tuple:
    return jax.vjp(lambda *args: both(*args, **dict(options)), *args)[1]((dout, dlse))


def cotangents(rng: np.random.Generator, t: int = T) -> tuple:
    shapes = (B, t, N, E), (B, t, N)
    return tuple(rng.normal(size=shape).astype(np.float32) for shape in shapes)


def listed(indices: Any) -> list[int]:
    """Returns a row of an `HTreeSelection` without the -1 at its end, checking its order."""
    row = np.asarray(indices)
    count = (row >= 0).sum()
    assert np.all(row[:count] >= 0) and np.all(np.diff(row[:count]) > 0)
    return row[:count].tolist()


def test_oracle_on_a_hand_computed_case() -> None:
    k, v = np.zeros((1, 4, 1, 2)), np.array([1.0, 3.0, 10.0, 20.0]).reshape(1, 4, 1, 1)
    q = np.ones((1, 4, 1, 2))
    out, lse, seen = oracle.attention(q, k, v, compression=2, top_k=1)
    # The last query attends to tokens 2 and 3 themselves, and to the mean of the first two.
    np.testing.assert_allclose(out[0, :, 0, 0], [1, 2, (2 + 10) / 2, (2 + 10 + 20) / 3])
    np.testing.assert_allclose(lse[0, :, 0], np.log([1, 2, 2, 3]))
    assert seen[0, 3, 0] == [[[2, 3], [0, 1]], [[], [1]]]
    rotated = oracle.rope(np.array([1.0, 1.0, 0.0, 0.0]), 3, base=100.0)
    np.testing.assert_allclose(rotated, [np.cos(3), np.cos(0.3), np.sin(3), np.sin(0.3)])


def test_defaults(rng: np.random.Generator) -> None:
    """With 16 children per node and 512 selected nodes, up to 8192 tokens are one layer."""
    small = inputs(rng, t=20)
    assert_matches(htree_attention(*small), oracle.dense(*small).astype(np.float32), tol=1e-5)
    q, k = (jax.ShapeDtypeStruct((1, 8193, heads, D), jnp.float32) for heads in (N, G))
    assert [x.shape[1] for x, _ in jax.eval_shape(htree_build, k, k)] == [8193, 513]
    tokens, top = jax.eval_shape(htree_select, q, k)
    assert tokens.candidates.shape[3] == 8192 and top.selected.shape[3] == 512
    cache = jax.eval_shape(lambda: HTreeCache.empty(1, 8193, D))
    assert [x.shape[1] for x, _ in jax.eval_shape(lambda c: c.layers, cache)] == [8193, 513]
    assert cache.v.shape == cache.k.shape and cache.k.dtype == jnp.bfloat16


CASES = {
    "three layers": (T, {}),
    "one selected": (7, {"compression": 2, "top_k": 1, "scale": 0.9, "rope_base": 50.0}),
    "one layer": (9, {}),
    "one token more": (10, {}),
    "one token": (1, {}),
}


@pytest.mark.parametrize(("t", "options"), CASES.values(), ids=CASES.keys())
def test_forward_and_selection(t: int, options: dict, rng: np.random.Generator) -> None:
    args = inputs(rng, t=t)
    out, lse, seen = oracle.attention(*args, **{**TREE, **options})
    assert_matches(both(*args, **options), (out.astype(np.float32), lse.astype(np.float32)), 1e-5)
    layers = htree_select(*args[:2], **{**TREE, **options})
    assert layers[0].selected.shape == (B, t, G, 0)
    for (b, t, g), (candidates, selected) in seen.items():
        for level, layer in enumerate(layers):
            assert listed(layer.candidates[b, t, g]) == candidates[level]
            assert listed(layer.selected[b, t, g]) == selected[level]


def test_accumulated_nodes_are_a_partition(rng: np.random.Generator) -> None:
    q, k, _ = inputs(rng)
    layers = jax.tree.map(np.asarray, htree_select(q, k, **TREE))
    for b, t, g in np.ndindex(B, T, G):
        times = np.zeros(T, int)
        for level, layer in enumerate(layers):
            span = TREE["compression"] ** level
            for node in set(listed(layer.candidates[b, t, g])) - set(
                listed(layer.selected[b, t, g])
            ):
                times[node * span : (node + 1) * span] += 1
        np.testing.assert_array_equal(times, np.arange(T) <= t)


def at_some_tokens(q: Any, k: Any, positions: Any, **options: Any) -> np.ndarray:
    """Returns the ordinals [queries, layers - 1, K] that queries at these tokens select."""
    operands = Operands(jnp.asarray(q), jnp.asarray(k), jnp.asarray(k), jnp.asarray(positions))
    results = jax.jit(xla.htree_fwd, static_argnums=0)(Options(**options), operands)
    return np.asarray(results.selected)[0, :, 0]


@pytest.mark.parametrize("options", [(16, 512), (8, 100), (32, 7)], ids=str)
def test_accumulated_nodes_are_a_partition_of_many_tokens(
    options: tuple[int, int], rng: np.random.Generator
) -> None:
    sizes = {"compression": options[0], "top_k": options[1]}
    tokens = int(rng.integers(100_000, 300_001))
    positions = np.append(rng.integers(0, tokens, 5), tokens - 1).astype(np.int32)
    q, k = (rng.normal(size=(1, n, 1, 2)).astype(np.float32) for n in (6, tokens))
    selected = at_some_tokens(q, k, positions[None], **sizes)
    layers = [layer.size for layer in tree.tree_layers(tokens, *options)]
    oracle.assert_partition(selected, positions, tokens, layers, **sizes)


@pytest.mark.slow
def test_selection_is_exact_with_many_ties(rng: np.random.Generator) -> None:
    """Checks 1000 queries in two layers."""
    tokens, sizes = 20_000, {"compression": 16, "top_k": 32}
    q, k = oracle.exact_problem(rng, tokens, 2, 16, 16)
    positions = rng.integers(0, tokens, 1000).astype(np.int32)
    selected = at_some_tokens(
        q[:, positions].astype(np.float32),
        k.astype(np.float32),
        positions[None],
        rope_base=1e38,
        scale=0.125,
        **sizes,
    )
    for got, position in zip(selected, positions, strict=True):
        want = oracle.exact_selection(q[0, position, 0], k[0, :, 0], position, **sizes)
        for row, ordinals in zip(got, want, strict=True):
            np.testing.assert_array_equal(row[row >= 0], ordinals)


@pytest.mark.parametrize("top_k", [16, 512])
def test_one_layer_is_dense_attention(top_k: int, rng: np.random.Generator) -> None:
    """Holds for exactly r * K tokens, and for fewer."""
    args = inputs(rng, t=64)
    got = htree_attention(*args, compression=4, top_k=top_k)
    assert_matches(got, oracle.dense(*args).astype(np.float32), tol=1e-5)


def test_later_tokens_have_no_influence(rng: np.random.Generator) -> None:
    """Trees of three layers, of two and of one give the same results."""
    args = inputs(rng)
    whole = both(*args)
    for t in (7, 20):
        shorter = both(*(x[:, :t] for x in args))
        assert_matches(shorter, tuple(x[:, :t] for x in whole), tol=1e-5)


@pytest.mark.parametrize("t", [T, 9], ids=["three layers", "one layer"])
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_poisoned_future(t: int, poison: float, rng: np.random.Generator) -> None:
    """The results of queries 0..last, and their gradients, do not change by a single bit."""
    last = t // 2
    args, (dout, dlse) = inputs(rng, t=t), cotangents(rng, t)
    dout[:, last + 1 :], dlse[:, last + 1 :] = 0, 0
    bad = [x.copy() for x in args]
    for x in bad:
        x[:, last + 1 :] = poison
    for clean, dirty in zip(both(*args), both(*bad), strict=True):
        np.testing.assert_array_equal(clean[:, : last + 1], dirty[:, : last + 1])
        assert not np.isfinite(dirty[:, last + 1 :]).any()
    clean, dirty = grads(args, dout, dlse), grads(tuple(bad), dout, dlse)
    assert_unmoved(clean, dirty)
    for b in dirty:
        assert np.all(np.asarray(b)[:, last + 1 :] == 0)
        assert np.asarray(b)[:, : last + 1].any()


@pytest.mark.parametrize("t", [T, 9], ids=["three layers", "one layer"])
def test_visible_nan_reaches_the_output(t: int, rng: np.random.Generator) -> None:
    q, k, v = inputs(rng, t=t)
    v[0, 5, 1, 2] = np.nan
    k[1, 3, 0, 4] = np.nan
    out, lse = (np.asarray(x) for x in both(q, k, v))
    hit = np.zeros(out.shape, bool)
    hit[0, 5:, N // G :, 2] = True
    hit[1, 3:, : N // G] = True
    np.testing.assert_array_equal(np.isnan(out), hit)
    np.testing.assert_array_equal(np.isnan(lse), hit.all(-1))


def test_large_score_gaps(rng: np.random.Generator) -> None:
    """Scores of selected and of other nodes differ by tens of nats, in either direction."""
    q, k, v = inputs(rng)
    q *= 40
    out, lse, _ = oracle.attention(q, k, v, **TREE)
    assert np.ptp(lse) > 40
    got = both(q, k, v)
    assert_matches(got, (out.astype(np.float32), lse.astype(np.float32)), tol=1e-4)
    dout, dlse = cotangents(rng)
    assert all(np.isfinite(x).all() for x in grads((q, k, v), dout, dlse))


def test_ties_go_to_the_lower_ordinal(rng: np.random.Generator) -> None:
    q, k, _ = inputs(rng)
    layers = htree_select(np.zeros_like(q), k, **TREE)
    for b, t, g in np.ndindex(B, T, G):
        for level in (1, 2):
            nodes = listed(layers[level].candidates[b, t, g])
            want = nodes[:2] + nodes[-1:] if len(nodes) > 3 else nodes
            assert listed(layers[level].selected[b, t, g]) == want


def test_importance_is_over_all_heads_of_a_group() -> None:
    """Node 1 has the largest logsumexp over both heads; node 0 has the largest single score."""
    q = np.zeros((1, 8, 2, 2), np.float32)
    q[0, 7] = [[30.0, 0.0], [0.0, 30.0]]
    k = np.zeros((1, 8, 1, 2), np.float32)
    k[0, 0:2, 0], k[0, 2:4, 0] = [1.0, -10.0], [0.95, 0.95]
    # The query has ordinal 3 in the upper layer. This rotation cancels that of the scores.
    for t in range(8):
        k[0, t, 0] = oracle.rope(k[0, t, 0], 3 - t // 2, 1.0)
    upper = htree_select(q, k, compression=2, top_k=2, scale=0.05)[1]
    assert listed(upper.selected[0, 7, 0]) == [1, 3]


@pytest.mark.parametrize("t", [T, 9], ids=["three layers", "one layer"])
def test_gradients_are_those_of_plain_autodiff(t: int, rng: np.random.Generator) -> None:
    """Checks cotangents of both results, and of each alone."""
    args, (dout, dlse) = inputs(rng, t=t), cotangents(rng, t)
    plain = jax.jit(lambda args, cts: jax.vjp(both, *args)[1](cts))
    for cts in ((dout, dlse), (dout, 0 * dlse), (0 * dout, dlse)):
        with jax_dsa.plain_xla():
            want = plain(args, cts)
        assert_matches(grads(args, *cts), want, tol=1e-5)


def test_gradients_against_finite_differences(rng: np.random.Generator) -> None:
    with jax.enable_x64(True):
        args = tuple(jnp.asarray(x) for x in inputs(rng, np.float64, t=7))
        fn = jax.jit(functools.partial(both, compression=2, top_k=2))
        assert fn(*args)[0].dtype == jnp.float64
        check_grads(fn, args, order=1, modes=["rev"], atol=1e-6, rtol=1e-6, eps=1e-6)


def dense(q: Any, k: Any, v: Any) -> jax.Array:
    """Returns causal attention with RoPE, in the dtype of its operands."""
    t = q.shape[1]
    angle = np.arange(t)[:, None] * 10000.0 ** -(np.arange(D // 2) / (D // 2))
    cos, sin = (f(angle)[:, None].astype(np.float32) for f in (np.cos, np.sin))

    def rotate(x: Any) -> Any:
        a, b = jnp.split(x, 2, axis=-1)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)

    k, v = (jnp.repeat(x, N // G, axis=2) for x in (rotate(k), v))
    s = jnp.einsum("btnd,bsnd->bnts", rotate(q), k) * jnp.asarray(D**-0.5, q.dtype)
    s = jnp.where(np.tri(t, dtype=bool), s, -jnp.inf)
    return jnp.einsum("bnts,bsne->btne", jax.nn.softmax(s), v)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_low_precision_of_one_layer(dtype: Any, rng: np.random.Generator) -> None:
    args = [jnp.asarray(x, dtype) for x in inputs(rng, t=9)]
    dout = jnp.asarray(rng.normal(size=(B, 9, N, E)), dtype)

    @functools.partial(jax.jit, static_argnums=0)
    def run(fn: Any, args: Any) -> tuple:
        out, pull = jax.vjp(fn, *args)
        return out, *pull(dout.astype(out.dtype))

    ours = run(functools.partial(htree_attention, **TREE), args)
    low, exact = (run(dense, [x.astype(d) for x in args]) for d in (dtype, np.float32))
    for name, got, lo, ex in zip(("out", "dq", "dk", "dv"), ours, low, exact, strict=True):
        assert got.dtype == dtype
        assert_as_good_as(got, lo, ex, factor=3 if name == "out" else 4, what=name)


def test_low_precision_of_a_tree(rng: np.random.Generator) -> None:
    """The oracle is given the selection, which rounding errors may change."""
    t = 20
    args = [jnp.asarray(x, jnp.bfloat16) for x in inputs(rng, t=t)]
    layers = jax.tree.map(np.asarray, htree_select(*args[:2], **TREE))
    choice = {
        (b, t, g): [listed(layer.selected[b, t, g]) for layer in layers]
        for b, t, g in np.ndindex(B, t, G)
    }
    out, lse, _ = oracle.attention(*args, **TREE, choice=choice)
    got = both(*args)
    assert got[0].dtype == jnp.bfloat16 and got[1].dtype == jnp.float32
    assert_matches(got[0].astype(np.float32), out.astype(np.float32), tol=1e-2)
    assert_matches(got[1], lse.astype(np.float32), tol=1e-2)


def passes(args: tuple, cts: tuple, options: Options) -> Any:
    """Returns both passes of the XLA implementation, traced again, and their operands."""

    def run(q: Any, k: Any, v: Any, dout: Any, dlse: Any) -> tuple:
        positions = jnp.broadcast_to(jnp.arange(q.shape[1], dtype=jnp.int32), q.shape[:2])
        x = Operands(q, k, v, positions)
        y = xla.htree_fwd(options, x)
        return *y, *xla.htree_bwd(options, x, y, Results(dout, None, dlse, None))

    return jax.jit(run), (*args, *cts)


def test_chunks(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of a few queries, and of whole batch entries, give the results of one chunk."""
    t, options = 22, Options(**TREE, scale=0.4)
    args = tuple(jnp.asarray(x) for x in inputs(rng, t=t))
    run, operands = passes(args, cotangents(rng, t), options)
    whole = run(*operands)
    for queries in (11, t):
        monkeypatch.setattr(streaming, "BUDGET", queries * xla.query_bytes(options, *args))
        run, operands = passes(args, operands[3:], options)
        assert_matches(run(*operands), whole, tol=1e-5)


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """No array of either pass is larger than the inputs or a chunk of 4 queries."""
    t, n, d, tree = 256, 4, 16, Options(compression=4, top_k=8)
    q, k = jnp.zeros((1, t, n, d)), jnp.zeros((1, t, 1, d))
    monkeypatch.setattr(streaming, "BUDGET", 4 * xla.query_bytes(tree, q, k, k))

    def sizes(jaxpr: Any) -> Any:
        for eqn in jaxpr.eqns:
            yield from (v.aval.size for v in eqn.outvars if hasattr(v.aval, "size"))
            for sub in jaxprs_in_params(eqn.params):
                yield from sizes(sub)

    run, operands = passes((q, k, k), (q, q[..., 0]), tree)
    assert max(sizes(jax.make_jaxpr(run)(*operands).jaxpr)) <= max(t * n * d, 4 * 32 * d * n)


@pytest.mark.parametrize("shape", [(0, 12), (2, 0)])
def test_empty(shape: tuple) -> None:
    q, k, v = (jnp.zeros((*shape, heads, dim)) for heads, dim in ((N, D), (G, D), (G, E)))
    out, lse = both(q, k, v)
    assert out.shape == (*shape, N, E) and lse.shape == (*shape, N)
    assert jax.grad(lambda k: both(q, k, v)[0].sum())(k).shape == k.shape
    tree = lambda k: htree_build(k, v, **TREE)  # noqa: E731
    (pooled, _), pull = jax.vjp(lambda k: tree(k)[0], k)
    assert pooled.shape == k.shape and pull((pooled, v))[0].shape == k.shape


def test_without_batch_axis(rng: np.random.Generator) -> None:
    q, k, v = inputs(rng, t=20)
    assert_matches(both(q[0], k[0], v[0]), tuple(x[0] for x in both(q, k, v)), tol=1e-5)
    one, all_ = htree_select(q[1], k[1], **TREE), htree_select(q, k, **TREE)
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x, y[1]), one, all_)
