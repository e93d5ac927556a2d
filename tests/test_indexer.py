"""`indexer_logits` and `indexer_topk` against loops in float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.test_util import check_grads
from support.compare import Variable, assert_as_good_as, assert_matches, assert_unmoved
from support.oracles import indexer as oracle
from support.oracles import topk as topk_oracle

import jax_dsa
from jax_dsa import FlatCache, PagedCache, indexer_logits, indexer_topk, topk
from jax_dsa.core import streaming
from jax_dsa.ops.indexer import xla
from jax_dsa.ops.indexer.spec import Logits, Operands, Options, Selected, Selection

FP8 = ml_dtypes.float8_e4m3fn


def inputs(rng, B=2, T=5, J=3, C=4, S=9, dtype=np.float32):
    q, k = (rng.normal(size=s).astype(dtype) for s in ((B, T, J, C), (B, S, C)))
    return q, k, rng.normal(size=(B, T, J)).astype(np.float32)


def options_of(rng, B=2, T=5, S=9):
    """A scale for every key, and ranges of which some are empty, clipped or reversed."""
    starts, ends = (rng.integers(-2, S + 3, size=(B, T)).astype(np.int32) for _ in range(2))
    starts[0, 0], ends[0, 0] = -(2**31), 2**31 - 1
    k_scale = np.exp(rng.normal(size=(B, S))).astype(np.float32)
    return {"index_k_scale": k_scale, "starts": starts, "ends": ends}


def gathered(logits, indices):
    return np.where(indices >= 0, np.take_along_axis(logits, np.maximum(indices, 0), -1), -np.inf)


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
        want = oracle.indexer_logits(*arrays, relu=relu, **options)
        assert_matches(got, want.astype(np.float32), 1e-6)


@pytest.mark.full_optimization
def test_selection_is_top_k_of_the_logits(rng):
    """Its set is bit for bit that of the two operators one after the other."""
    arrays, options = inputs(rng, T=7, S=40), options_of(rng, T=7, S=40)
    for k in (3, 50):
        indices, logits = indexer_topk(*arrays, k, **options)
        whole = indexer_logits(*arrays, **options)
        want, values = topk(whole, k, return_values=True)
        np.testing.assert_array_equal(indices, want)
        np.testing.assert_array_equal(logits, values)
        exact = oracle.indexer_logits(*arrays, **options)
        np.testing.assert_array_equal(indices, topk_oracle.topk(exact, k))


LAST = 2**31 - 1
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
    """They see what `ends` would let them see; no position overflows."""
    arrays, options, query_start = inputs(rng), options_of(rng), STARTS[name]
    first = np.broadcast_to(np.asarray(query_start, np.int64), 2)[:, None]
    visible = np.clip(first + np.arange(5) + 1, 0, 9)
    same = options | {"ends": np.minimum(options["ends"], visible).astype(np.int32)}
    causal = options | {"is_causal": True, "query_start": query_start}
    got, want = (indexer_logits(*arrays, **o) for o in (causal, same))
    np.testing.assert_array_equal(got, want)
    got, want = (indexer_topk(*arrays, 3, **o) for o in (causal, same))
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_misuse_of_query_start(rng):
    arrays = inputs(rng)
    for call in (indexer_logits, lambda *a, **o: indexer_topk(*a, 3, **o)):
        for error, start in ((ValueError, 2**31), (TypeError, 0.5), (ValueError, np.zeros(3, int))):
            with pytest.raises(error, match=r"^indexer_(logits|topk): argument 'query_start' .*w"):
                call(*arrays, is_causal=True, query_start=start)
        with pytest.raises(TypeError, match="argument 'is_causal' is 1"):
            call(*arrays, is_causal=1)


@pytest.mark.parametrize("dtype", [np.int64, np.int16, np.uint8, np.uint64])
def test_integers_of_any_width(dtype, rng):
    """Beyond int32's range they are its ends."""
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
    want = indexer_topk(*arrays, 3, **options | narrow)
    jax.tree.map(np.testing.assert_array_equal, got, want)
    if dtype == np.int64:
        with jax.enable_x64(True):
            wide = {n: jnp.asarray(x) for n, x in wide.items()}
            assert all(x.dtype == jnp.int64 for x in wide.values())
            got = indexer_topk(*arrays, 3, **options | wide)
        np.testing.assert_array_equal(got[0], want[0])


def test_variables_are_arrays(rng):
    """What says which array it is, as Flax's variables do, is taken for that array."""
    arrays, options = inputs(rng), options_of(rng) | {"query_start": np.array([2, 5])}
    variables = [Variable(x) for x in arrays], {n: Variable(x) for n, x in options.items()}
    got = indexer_logits(*variables[0], is_causal=True, **variables[1])
    np.testing.assert_array_equal(got, indexer_logits(*arrays, is_causal=True, **options))
    got = indexer_topk(*variables[0], 3, is_causal=True, **variables[1])
    want = indexer_topk(*arrays, 3, is_causal=True, **options)
    jax.tree.map(np.testing.assert_array_equal, got, want)


def paged(rng, k, page, k_scale=None):
    """A pool with the keys' pages in any order, some of them not mapped; and which keys are."""
    batch, size, channels = k.shape
    own = size // page
    pages = batch * own + 2
    table = rng.permutation(pages)[: batch * own].reshape(batch, own).astype(np.int32)
    pool, scales = np.full((pages, page, channels), np.nan, k.dtype), np.full((pages, page), np.nan)
    pool[table] = k.reshape(batch, own, page, channels)
    if k_scale is not None:
        scales[table] = k_scale.reshape(batch, own, page)
    hole = rng.random(table.shape) < 0.3
    table[hole] = rng.choice([-1, pages, 2**31 - 1, -(2**31)], hole.sum())
    scales = None if k_scale is None else scales.astype(np.float32)
    return pool, scales, table, np.repeat(~hole, page, axis=1)


@pytest.mark.parametrize("with_scale", [False, True])
def test_pages(with_scale, rng):
    """The selection from the keys that are there, each where its page table has it."""
    q, k, weights = inputs(rng, B=3, S=40)
    ranges = options_of(rng, B=3, S=40)
    scale = ranges.pop("index_k_scale")
    scale = scale if with_scale else None
    pool, scales, table, there = paged(rng, k, 8, scale)
    pool = pool[:, :, None]

    def call(q, pool, scales, weights, table, **ranges):
        cache = PagedCache(pool, table, jnp.full(q.shape[:-3], 40))
        return indexer_topk(q, cache, weights, 7, index_k_scale=scales, **ranges)

    got = call(q, pool, scales, weights, table, **ranges)
    logits = np.asarray(indexer_logits(q, k, weights, index_k_scale=scale, **ranges))
    want = topk(np.where(there[:, None], logits, -np.inf), 7, return_values=True)
    assert_matches(got, want, 1e-6)

    if with_scale:
        one = [call(q[i], pool, scales, weights[i], table[i]) for i in range(3)]
        one = jax.tree.map(lambda *x: np.stack(x), *one)
        mapped = jax.vmap(call, in_axes=(0, None, None, 0, 0))(q, pool, scales, weights, table)
        assert_matches(mapped, one, 1e-6)
        pools = np.stack([pool, pool[::-1]]), np.stack([scales, scales[::-1]])
        each = [call(q, pools[0][i], pools[1][i], weights, table) for i in range(2)]
        mapped = jax.vmap(call, in_axes=(None, 0, 0, None, None))(q, *pools, weights, table)
        assert_matches(mapped, jax.tree.map(lambda *x: np.stack(x), *each), 1e-6)


@pytest.mark.parametrize("is_causal", [False, True])
def test_caches(is_causal, rng):
    """The queries are the last tokens of each request: bounded by its length, and by their own
    positions if they are causal. What lies behind does not matter.
    """
    q, k, weights = inputs(rng, B=4, T=3, S=24)
    lengths = np.array([24, 2, 9, 99], np.int32)
    options = options_of(rng, B=4, T=3, S=24)
    scale = options.pop("index_k_scale")
    held = np.minimum(lengths, 24)[:, None]
    seen = held - 3 + np.arange(3) + 1 if is_causal else np.broadcast_to(held, (4, 3))
    ends = np.minimum(options["ends"], seen).astype(np.int32)
    logits = indexer_logits(q, k, weights, index_k_scale=scale, starts=options["starts"], ends=ends)
    dirty = np.where(np.arange(24) < held, 1, np.nan).astype(np.float32)
    k, scale = k * dirty[..., None], scale * dirty
    pool, scales, table, there = paged(rng, k, 4, scale)
    caches = (
        (FlatCache(k[:, :, None], lengths), scale, np.ones_like(there)),
        (PagedCache(pool[:, :, None], table, lengths), scales, there),
    )
    for cache, scale, there in caches:
        given = options | {"index_k_scale": scale, "is_causal": is_causal}
        got = indexer_topk(q, cache, weights, 6, **given)
        want = topk(np.where(there[:, None], logits, -np.inf), 6, return_values=True)
        assert_matches(got, want, 1e-6)


def test_a_cache_of_one_request(rng):
    q, k, weights = inputs(rng, B=1)
    cache = FlatCache(k[:, :, None], np.array([6], np.int32))
    single = jax.tree.map(lambda x: x[0], cache)
    got = indexer_topk(q[0], single, weights[0], 3, is_causal=True)
    want = indexer_topk(q, cache, weights, 3, is_causal=True)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b[0])


def test_gradients_through_a_flat_cache(rng):
    q, k, weights = inputs(rng)
    lengths = np.array([9, 6], np.int32)
    ends = (lengths[:, None] - 5 + np.arange(5) + 1).astype(np.int32)

    def cached(q, k, weights):
        cache = FlatCache(k[:, :, None], lengths)
        return jnp.sum(jnp.exp(indexer_topk(q, cache, weights, 3, is_causal=True)[1]))

    def plain(*arrays):
        return jnp.sum(jnp.exp(indexer_topk(*arrays, 3, ends=ends)[1]))

    got, want = (jax.grad(fn, argnums=(0, 1, 2))(q, k, weights) for fn in (cached, plain))
    assert_matches(got, want, tol=1e-6)  # a GPU's scattered additions have no fixed order


def test_misuse_of_caches(rng):
    q, k, weights = inputs(rng)
    flat = FlatCache(k[:, :, None], np.array([9, 6], np.int32))
    paged = PagedCache(np.zeros((4, 3, 1, 4), np.float32), np.zeros((2, 3), np.int32), flat.lengths)
    records = FlatCache(np.zeros((2, 9, 1, 4), np.uint8), flat.lengths)
    groups = FlatCache(np.zeros((2, 9, 2, 4), np.float32), flat.lengths)
    for error, message, cache, options in (
        (ValueError, "'query_start' is 1, want 0 with a cache", flat, {"query_start": 1}),
        (ValueError, "'index_k_scale' has shape", flat, {"index_k_scale": k[:, :3, 0]}),
        (ValueError, "'index_k_scale' has shape", paged, {"index_k_scale": k[..., 0]}),
        (TypeError, r"'index_k\.data' has dtype uint8, want float32", records, {}),
        (ValueError, r"'index_k\.data' has shape .* want \[B, S, 1, C\]", groups, {}),
        (ValueError, "'ends' has shape", paged, {"ends": np.zeros((2, 4), np.int32)}),
    ):
        with pytest.raises(error, match=rf"^indexer_topk: argument {message}"):
            indexer_topk(q, cache, weights, 3, **options)
    with pytest.raises(TypeError, match="indexer_logits: argument 'index_k' is FlatCache"):
        indexer_logits(q, flat, weights)


def test_pages_have_no_gradient(rng):
    q, k, weights = inputs(rng, B=2, S=8)
    pool, _, table, _ = paged(rng, k, 4)
    pool = pool[:, :, None]

    def call(q, pool, table):
        return indexer_topk(q, PagedCache(pool, table, np.full(2, 8)), weights, 3)[1].sum()

    with pytest.raises(NotImplementedError, match="indexer_topk: gradients through a page table"):
        jax.grad(call)(q, pool, table)
    with pytest.raises(ValueError, match=r"indexer_topk: argument 'index_k.page_table' has shape"):
        call(q, pool, table[:1])
    large = jax.ShapeDtypeStruct((2, 2**29), jnp.int32)
    with pytest.raises(ValueError, match=r"argument 'index_k.page_table' is 2147483648, want room"):
        jax.eval_shape(lambda table: call(q, pool, table), large)
    with pytest.raises(
        ValueError, match=r"indexer_topk: argument 'index_k.pages' has shape .*at least one row"
    ):
        call(q, pool[:, :0], table)


@pytest.mark.full_optimization
@pytest.mark.parametrize("budget", [1, 30_000, 10**9])
def test_chunks(budget, rng, monkeypatch):
    """No chunk, some with a remainder, one query of one batch entry: one result, and in every case
    the selection is bit for bit that of the logits.
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
    want = oracle.indexer_gradients(q, k, weights, seen, index_k_scale=scale)
    got = run(xla.indexer_logits_bwd, x, Logits(g))
    assert_matches(got, tuple(w.astype(np.float32) for w in want), 1e-5)

    picked = np.zeros_like(g)
    for i in np.ndindex(B, T):
        for s in np.asarray(indices)[i]:
            picked[(*i, s)] = g[(*i, s)] if s >= 0 else picked[(*i, s)]
    want = oracle.indexer_gradients(q, k, weights, picked, index_k_scale=scale)
    dy = Selection(None, gathered(g, np.asarray(indices)))
    got = run(xla.indexer_topk_bwd, chosen, dy)
    assert_matches(got, tuple(w.astype(np.float32) for w in want), 1e-5)


@pytest.mark.full_optimization
def test_workspace_is_bounded():
    """Neither direction of `indexer_topk` compiles to temporaries of the size of [B, T, J, S], nor
    of [B, T, S].
    """
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


@pytest.mark.parametrize("relu", [True, False])
def test_gradients_against_finite_differences(relu, rng):
    with jax.enable_x64(True):
        q, k, weights = (jnp.asarray(x, jnp.float64) for x in inputs(rng, B=1, T=3, S=5))
        chosen = options_of(rng, B=1, T=3, S=5)
        scale = jnp.asarray(chosen.pop("index_k_scale"), jnp.float64)
        g = jnp.asarray(rng.normal(size=(1, 3, 5)))

        def dense(q, k, weights, scale):
            logits = indexer_logits(q, k, weights, index_k_scale=scale, relu=relu, **chosen)
            return jnp.sum(jnp.where(jnp.isfinite(logits), jnp.sin(logits), 0) * g)

        def sparse(q, k, weights, scale):
            logits = indexer_topk(q, k, weights, 2, index_k_scale=scale, relu=relu, **chosen)[1]
            return jnp.sum(jnp.where(jnp.isfinite(logits), jnp.sin(logits), 0) * g[..., :2])

        for fn in (dense, sparse):
            check_grads(jax.jit(fn), (q, k, weights, scale), 1, ["rev"], eps=1e-7, rtol=1e-5)


def test_deterministic_gradients(rng):
    """The same sums, in an order of their own, for which the slots are sorted."""
    arrays, options = inputs(rng, T=9, S=20), options_of(rng, T=9, S=20)

    def gradients(deterministic):
        def loss(*arrays):
            logits = indexer_topk(*arrays, 6, deterministic=deterministic, **options)[1]
            return jnp.sum(jnp.where(jnp.isfinite(logits), jnp.sin(logits), 0))

        lowered = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(*arrays)
        assert ("stablehlo.sort" in lowered.as_text()) == deterministic
        return lowered.compile()(*arrays)

    assert_matches(gradients(True), gradients(False), 1e-6)


def test_relu_has_no_gradient_at_zero():
    q, k = np.zeros((1, 1, 1, 2), np.float32), np.ones((1, 1, 2), np.float32)
    weights = np.ones((1, 1, 1), np.float32)
    for fn in (indexer_logits, lambda *a: indexer_topk(*a, 1)[1]):
        grads = jax.grad(lambda *a, fn=fn: fn(*a).sum(), argnums=(0, 1, 2))(q, k, weights)
        assert all((np.asarray(g) == 0).all() for g in grads)


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_keys_out_of_range_do_not_matter(poison, rng):
    """Bit for bit, forward and backward, in the logits and in the selection."""
    q, k, weights = inputs(rng, S=12)
    starts, ends = np.full((2, 5), 2, np.int32), np.full((2, 5), 9, np.int32)
    poisoned = k.copy()
    poisoned[:, :2] = poisoned[:, 9:] = poison
    scale = np.ones((2, 12), np.float32)
    bad_scale = np.where(np.isfinite(poisoned[..., 0]), scale, np.nan)

    def dense(q, k, weights, scale):
        logits = indexer_logits(q, k, weights, index_k_scale=scale, starts=starts, ends=ends)
        return jnp.sum(jnp.where(jnp.isfinite(logits), logits, 0)), logits

    def sparse(q, k, weights, scale):
        out = indexer_topk(q, k, weights, 9, index_k_scale=scale, starts=starts, ends=ends)
        return jnp.sum(jnp.where(out[0] >= 0, out[1], 0)), out

    for fn in (dense, sparse):
        run = jax.jit(jax.value_and_grad(fn, argnums=(0, 1, 2, 3), has_aux=True))
        assert_unmoved(run(q, k, weights, scale), run(q, poisoned, weights, bad_scale))


@pytest.mark.parametrize("name", ["logits", "selection", "loss"])
def test_what_a_query_without_a_key_holds_reaches_nothing(name, rng):
    q, k, weights = inputs(rng)
    main = [rng.normal(size=s).astype(np.float32) for s in ((2, 5, 2, 4), (2, 9, 1, 4))]
    seen = {"starts": np.full((2, 5), 2, np.int32), "ends": np.array([[9, 2, 9, 9, 9]] * 2)}
    fn = {
        "logits": lambda *a: indexer_logits(*a, **seen),
        "selection": lambda *a: indexer_topk(*a, 3, **seen)[1],
        "loss": lambda *a: jax_dsa.dense_indexer_kl_loss(*a, *main, is_causal=False, **seen),
    }[name]

    def grads(*args):
        y, pull = jax.vjp(fn, *args)
        return pull(jnp.ones_like(y))

    want = grads(q, k, weights)
    for i in (0, 2):
        bad = [q.copy(), k, weights.copy()]
        bad[i][:, 1] = np.nan
        jax.tree.map(np.testing.assert_array_equal, grads(*bad), want)


def test_a_nan_key_in_range_stays_in_its_column(rng):
    q, k, weights = inputs(rng)
    k[:, 4] = np.nan
    logits = np.asarray(indexer_logits(q, k, weights))
    assert np.isnan(logits[..., 4]).all()
    assert np.isfinite(np.delete(logits, 4, axis=-1)).all()
    assert not (np.asarray(indexer_topk(q, k, weights, 9)[0]) == 4).any()


def test_bfloat16(rng):
    q, k, weights = inputs(rng, J=8, C=32, S=20)
    q16, k16 = (jnp.asarray(x, jnp.bfloat16) for x in (q, k))
    g = rng.normal(size=(2, 5, 20)).astype(np.float32)

    def plain(q, k, weights):
        x = jnp.maximum(jnp.einsum("btjc,bsc->btjs", q, k), 0)
        return jnp.einsum("btjs,btj->bts", x, weights.astype(x.dtype))

    def grads(fn, *args):
        return jax.jit(jax.grad(lambda *a: (fn(*a) * g).sum(), argnums=(0, 1, 2)))(*args)

    exact = (np.asarray(q16, np.float32), np.asarray(k16, np.float32), weights)
    got, low = indexer_logits(q16, k16, weights), plain(q16, k16, weights)
    assert got.dtype == jnp.float32
    assert_as_good_as(got, low, plain(*exact))
    for name, a, b, c in zip(
        ("dq", "dk", "dw"),
        grads(indexer_logits, q16, k16, weights),
        grads(plain, q16, k16, weights),
        grads(plain, *exact),
        strict=True,
    ):
        assert a.dtype == b.dtype
        assert_as_good_as(a, b, c, 4.0, name)


def test_float8(rng):
    """Products of FP8 values are exact, their sums nearly so; gradients come in FP8, saturated."""
    q, k, weights = inputs(rng, dtype=FP8)
    scale = np.exp(rng.normal(size=(2, 9))).astype(np.float32)
    got = indexer_logits(q, k, weights, index_k_scale=scale)
    want = oracle.indexer_logits(q, k, weights, index_k_scale=scale)
    # A GPU's FP8 tensor cores, which XLA may choose, keep fewer bits of a sum than float32 has.
    tol = 1e-6 if jax.default_backend() == "cpu" else 1e-4
    assert_matches(got, want.astype(np.float32), tol)

    def loss(q, k, weights):
        return 1e4 * jnp.sum(indexer_topk(q, k, weights, 3, index_k_scale=scale)[1])

    dq, dk, dw = jax.grad(loss, argnums=(0, 1, 2))(*(jnp.asarray(x) for x in (q, k, weights)))
    assert dq.dtype == dk.dtype == FP8 and dw.dtype == jnp.float32
    for x in (dq, dk):
        assert np.abs(np.asarray(x, np.float32)).max() == 448
        assert np.isfinite(np.asarray(x, np.float32)).all()


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


def test_no_key_to_select():
    arrays = [jnp.ones((1, 2, 1, 3)), jnp.ones((1, 4, 3)), jnp.ones((1, 2, 1))]
    ends = jnp.zeros((1, 2), jnp.int32)
    indices, logits = indexer_topk(*arrays, 2, ends=ends)
    assert (np.asarray(indices) == -1).all() and (np.asarray(logits) == -np.inf).all()
    loss = lambda *a: jnp.sum(jnp.exp(indexer_topk(*a, 2, ends=ends)[1]))  # noqa: E731
    for g in jax.grad(loss, argnums=(0, 1, 2))(*arrays):
        assert (np.asarray(g) == 0).all()
    assert indexer_topk(*arrays, 0)[0].shape == (1, 2, 0)


Q, K_, W = (
    np.zeros((2, 3, 2, 4), np.float32),
    np.zeros((2, 5, 4), np.float32),
    np.zeros((2, 3, 2), np.float32),
)
ROWS = np.zeros((2, 3), np.int32)
NAMES = ("index_q", "index_k", "index_weights", "index_k_scale", "starts", "ends")


@pytest.mark.parametrize(
    "call", [indexer_logits, lambda *a, **o: indexer_topk(*a, 2, **o)], ids=["logits", "topk"]
)
@pytest.mark.parametrize(
    ("error", "name", "args", "options"),
    [
        (TypeError, "index_q", ([0.0], K_, W), {}),
        (ValueError, "index_q", (Q[0, 0], K_, W), {}),
        (TypeError, "index_q", (Q.astype(np.int32), K_, W), {}),
        (TypeError, "index_k", (Q, K_.astype(np.float16), W), {}),
        (ValueError, "index_k", (Q, K_[:1], W), {}),
        (ValueError, "index_k", (Q, K_[..., :3], W), {}),
        (ValueError, "index_k", (Q[0], K_, W), {}),
        (TypeError, "index_weights", (Q, K_, W.astype(np.int32)), {}),
        (ValueError, "index_weights", (Q, K_, W[..., :1]), {}),
        (TypeError, "index_k_scale", (Q, K_, W), {"index_k_scale": 1.0}),
        (ValueError, "index_k_scale", (Q, K_, W), {"index_k_scale": W[..., 0]}),
        (TypeError, "starts", (Q, K_, W), {"starts": W[..., 0]}),
        (ValueError, "starts", (Q, K_, W), {"starts": ROWS[:, :2]}),
        (ValueError, "ends", (Q, K_, W), {"ends": ROWS[0]}),
        (TypeError, "relu", (Q, K_, W), {"relu": 1}),
        (ValueError, "implementation", (Q, K_, W), {"implementation": "jnp"}),
    ],
)
def test_misuse(call, error, name, args, options):
    with pytest.raises(error, match=rf"^indexer_(logits|topk): argument '{name}' .*want"):
        call(*args, **options)


@pytest.mark.parametrize(
    ("error", "top_k"), [(ValueError, -1), (TypeError, 2.0), (TypeError, None)]
)
def test_misuse_of_top_k(error, top_k):
    with pytest.raises(error, match=r"^indexer_topk: argument 'top_k' .*want"):
        indexer_topk(Q, K_, W, top_k)


def test_cuda_on_request_or_an_error():
    with pytest.raises(NotImplementedError, match=r"indexer_logits.*implementation='xla'"):
        indexer_logits(Q, K_, W, implementation="cuda")


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_one_wrong_axis_is_named(data):
    """Any one axis of any argument made longer: an error that names an argument."""
    arrays = dict(zip(NAMES, (Q, K_, W, K_[..., 0], ROWS, ROWS), strict=True))
    name = data.draw(st.sampled_from(sorted(arrays)))
    axis = data.draw(st.integers(0, arrays[name].ndim - 1))
    # S and T of q's and k's own are free; what must agree with them then is what is named.
    shape = list(arrays[name].shape)
    shape[axis] += 1
    arrays[name] = np.zeros(shape, arrays[name].dtype)
    with pytest.raises(ValueError, match=r"^indexer_logits: argument '\w+' has shape"):
        indexer_logits(**arrays)


def test_are_exported_under_their_names():
    assert jax_dsa.indexer_logits is indexer_logits
    assert jax_dsa.indexer_topk is indexer_topk


def test_weights_of_low_precision(rng):
    q, k, weights = inputs(rng)
    low = weights.astype(jnp.bfloat16)

    def fn(weights):
        logits = indexer_logits(q, k, weights)
        return logits, indexer_topk(q, k, weights, 3)[1]

    got, pull = jax.vjp(fn, low)
    want, pull_wide = jax.vjp(fn, low.astype(jnp.float32))
    jax.tree.map(np.testing.assert_array_equal, got, want)
    (grad,), (wide,) = pull(got), pull_wide(got)
    assert grad.dtype == jnp.bfloat16
    assert_matches(grad, wide.astype(jnp.bfloat16), tol=2**-7)  # two roundings
