"""`indexer_logits` and `indexer_topk` against loops in float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.compare import Variable, assert_matches
from support.indexer import LAST, gathered, inputs, options_of
from support.oracles import indexer as oracle
from support.oracles import topk as topk_oracle

import jax_dsa
from jax_dsa import indexer_logits, indexer_topk, topk
from jax_dsa.core import streaming
from jax_dsa.ops.indexer import xla
from jax_dsa.ops.indexer.spec import Logits, Operands, Options, Selected, Selection


@pytest.mark.parametrize("relu", [True, False])
@pytest.mark.parametrize(
    "sizes",
    [{"T": 1, "J": 1, "C": 1, "S": 1}, {}, {"B": 1, "T": 13, "J": 5, "C": 7, "S": 62}],
    ids=["ones", "small", "odd"],
)
def test_logits(sizes, relu, rng):
    arrays = inputs(rng, **sizes)
    shape = dict(zip("BTS", (*arrays[0].shape[:2], arrays[1].shape[1]), strict=True))
    for options in ({}, options_of(rng, **shape)):
        got = indexer_logits(*arrays, relu=relu, **options)
        expected = oracle.indexer_logits(*arrays, relu=relu, **options)
        assert_matches(got, expected.astype(np.float32), 1e-6)


@pytest.mark.full_optimization
def test_selection_is_top_k_of_the_logits(rng):
    """`indexer_topk` equals `topk` of `indexer_logits`, bit for bit."""
    arrays, options = inputs(rng, T=7, S=40), options_of(rng, T=7, S=40)
    for k in (3, 50):
        indices, logits = indexer_topk(*arrays, k, **options)
        whole = indexer_logits(*arrays, **options)
        expected, values = topk(whole, k, return_values=True)
        np.testing.assert_array_equal(indices, expected)
        np.testing.assert_array_equal(logits, values)
        exact = oracle.indexer_logits(*arrays, **options)
        np.testing.assert_array_equal(indices, topk_oracle.topk(exact, k))


STARTS = {
    "int": 4,
    "before the keys": -3,
    "largest": LAST,
    "smallest": -LAST - 1,
    "scalar": np.int64(2),
    "of JAX": jnp.int32(LAST),
    "each": np.array([3, LAST - 1], np.int32),
    "wide": np.array([-(2**40), 2**40]),
    "unsigned": np.array([2, 2**32 - 1], np.uint32),
}


@pytest.mark.parametrize("name", STARTS)
def test_causal_queries(name, rng):
    """`is_causal` has the same effect as the corresponding `ends`, and no position overflows."""
    arrays, options, query_start = inputs(rng), options_of(rng), STARTS[name]
    first = np.broadcast_to(np.asarray(query_start, np.int64), 2)[:, None]
    visible = np.clip(first + np.arange(5) + 1, 0, 9)
    same = options | {"ends": np.minimum(options["ends"], visible).astype(np.int32)}
    causal = options | {"is_causal": True, "query_start": query_start}
    got, expected = (indexer_logits(*arrays, **o) for o in (causal, same))
    np.testing.assert_array_equal(got, expected)
    got, expected = (indexer_topk(*arrays, 3, **o) for o in (causal, same))
    jax.tree.map(np.testing.assert_array_equal, got, expected)


@pytest.mark.parametrize("dtype", [np.int64, np.int16, np.uint8, np.uint64])
def test_integers_of_any_width(dtype, rng):
    """Integers outside the range of int32 become the ends of that range."""
    arrays, options = inputs(rng), options_of(rng)
    info = np.iinfo(dtype)
    starts = rng.integers(0, 4, size=(2, 5)).astype(dtype)
    ends = rng.integers(4, 9, size=(2, 5)).astype(dtype)
    starts[0, 0], ends[0, 0], ends[1, 1] = info.min, info.max, info.min
    wide = {"starts": starts, "ends": ends}
    narrow = {
        n: np.clip(x.astype(object), -LAST - 1, LAST).astype(np.int32) for n, x in wide.items()
    }
    got = indexer_topk(*arrays, np.int64(3), **options | wide)
    expected = indexer_topk(*arrays, 3, **options | narrow)
    jax.tree.map(np.testing.assert_array_equal, got, expected)
    if dtype == np.int64:
        with jax.enable_x64(True):
            wide = {n: jnp.asarray(x) for n, x in wide.items()}
            assert all(x.dtype == jnp.int64 for x in wide.values())
            got = indexer_topk(*arrays, 3, **options | wide)
        np.testing.assert_array_equal(got[0], expected[0])


def test_variables_are_arrays(rng):
    """Objects with `__jax_array__`, such as Flax variables, are accepted as arrays."""
    arrays, options = inputs(rng), options_of(rng) | {"query_start": np.array([2, 5])}
    variables = [Variable(x) for x in arrays], {n: Variable(x) for n, x in options.items()}
    got = indexer_logits(*variables[0], is_causal=True, **variables[1])
    np.testing.assert_array_equal(got, indexer_logits(*arrays, is_causal=True, **options))
    got = indexer_topk(*variables[0], 3, is_causal=True, **variables[1])
    expected = indexer_topk(*arrays, 3, is_causal=True, **options)
    jax.tree.map(np.testing.assert_array_equal, got, expected)


@pytest.mark.full_optimization
@pytest.mark.parametrize("budget", [1, 30_000, 10**9])
def test_chunks(budget, rng, monkeypatch):
    """The size of the chunks does not matter.

    The budgets give chunks of one query, several chunks with a remainder, and no chunks. For each
    of them the selection is bit for bit that of the logits.
    """
    B, T, S, K = 3, 7, 33, 6
    q, k, weights = inputs(rng, B=B, T=T, S=S)
    ranges = options_of(rng, B=B, T=T, S=S)
    scale = ranges["index_k_scale"]
    x = Operands(q, k, weights, scale, ranges["starts"], ranges["ends"])
    options = Options(relu=True, top_k=K)
    monkeypatch.setattr(streaming, "BUDGET", budget)

    def run(fn, *args):
        return jax.jit(fn, static_argnums=0)(options, *args)

    (logits,) = run(xla.indexer_logits_fwd, x)
    exact = oracle.indexer_logits(q, k, weights, **ranges)
    assert_matches(logits, exact.astype(np.float32), 1e-5)
    indices, selected = run(xla.indexer_topk_fwd, x)
    np.testing.assert_array_equal(indices, topk(logits, K))
    np.testing.assert_array_equal(selected, gathered(np.asarray(logits), np.asarray(indices)))
    chosen = Selected(q, k, weights, scale, indices)
    assert_matches(run(xla.indexer_selected_fwd, chosen).logits, selected, 1e-5)

    g = rng.normal(size=(B, T, S)).astype(np.float32)
    seen = np.where(np.isfinite(exact), g, 0)
    expected = oracle.indexer_gradients(q, k, weights, seen, index_k_scale=scale)
    got = run(xla.indexer_logits_bwd, x, Logits(g))
    assert_matches(got, tuple(w.astype(np.float32) for w in expected), 1e-5)

    selected_g = np.zeros_like(g)
    for i in np.ndindex(B, T):
        for s in np.asarray(indices)[i]:
            selected_g[(*i, s)] = g[(*i, s)] if s >= 0 else selected_g[(*i, s)]
    expected = oracle.indexer_gradients(q, k, weights, selected_g, index_k_scale=scale)
    dy = Selection(None, gathered(g, np.asarray(indices)))
    got = run(xla.indexer_topk_bwd, chosen, dy)
    assert_matches(got, tuple(w.astype(np.float32) for w in expected), 1e-5)


@pytest.mark.full_optimization
def test_workspace_is_bounded():
    """Neither pass of `indexer_topk` has temporaries of size [B, T, J, S] or [B, T, S]."""
    B, T, J, C, S, K = 2, 4096, 4, 8, 8192, 16
    shapes = [(B, T, J, C), (B, S, C), (B, T, J)]

    def loss(q, k, weights):
        indices, logits = indexer_topk(q, k, weights, K)
        return jnp.sum(jnp.where(indices >= 0, logits, 0))

    arrays = [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes]
    compiled = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2))).lower(*arrays).compile()
    temporaries = compiled.memory_analysis().temp_size_in_bytes
    assert temporaries < 2 * streaming.BUDGET
    assert temporaries < B * T * S * 4


def test_no_batch_axis(rng):
    arrays, options = inputs(rng, B=1), options_of(rng, B=1)
    single = [x[0] for x in arrays]
    single_options = {name: x[0] for name, x in options.items()}
    got = indexer_logits(*single, **single_options)
    np.testing.assert_array_equal(got, indexer_logits(*arrays, **options)[0])
    got = indexer_topk(*single, 3, **single_options)
    for a, b in zip(got, indexer_topk(*arrays, 3, **options), strict=True):
        np.testing.assert_array_equal(a, b[0])


@pytest.mark.parametrize("empty", ["B", "T", "J", "S"])
def test_empty_axes(empty, rng):
    arrays = [jnp.asarray(x) for x in inputs(rng, **{empty: 0})]
    (B, T), S = arrays[0].shape[:2], arrays[1].shape[1]
    logits = indexer_logits(*arrays)
    np.testing.assert_array_equal(logits, np.zeros((B, T, S)))
    indices, selected = indexer_topk(*arrays, 3)
    assert indices.shape == selected.shape == (B, T, 3)
    grads = jax.grad(lambda *a: indexer_topk(*a, 3)[1].sum(), argnums=(0, 1, 2))(*arrays)
    for g, x in zip(grads, arrays, strict=True):
        np.testing.assert_array_equal(g, np.zeros(x.shape))


def test_exported_names():
    assert jax_dsa.indexer_logits is indexer_logits
    assert jax_dsa.indexer_topk is indexer_topk
