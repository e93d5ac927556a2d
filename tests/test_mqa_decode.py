"""`mqa_decode` against the float64 oracle, and at its edges. FP8 records: test_caches.py."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads
from support.compare import assert_as_good_as, assert_matches
from support.mqa_decode import (
    PAGE,
    PAGES,
    B,
    D,
    E,
    G,
    N,
    T,
    as_float32,
    both,
    inputs,
    lengths,
    paged,
)
from support.oracles import mqa_decode as oracle

import jax_dsa
from jax_dsa.core import streaming
from jax_dsa.ops.cache import FlatCache, PagedCache
from jax_dsa.ops.mqa_decode import mqa_decode, xla
from jax_dsa.ops.mqa_decode.spec import Operands, Options, Results

LEAST, MOST = -(2**31), 2**31 - 1
CASES = {
    "all": {},
    "scale": {"scale": 0.7},
    "lengths": lengths(13, 1, 0),
    "beyond the cache": lengths(13, 14, 16),
    "any lengths": lengths(MOST, LEAST, LEAST + 1),
    "starts": {**lengths(13, 9, 5), "starts": np.array([4, 8, -3], np.int32)},
    "starts of queries": {
        **lengths(13, 9, 5),
        "starts": np.array([[4, 12, 0], [MOST, LEAST, 8], [3, 4, 5]], np.int32),
    },
    "window": {**lengths(13, 4, 2), "local_window_size": 2},
    "windows": {
        "local_window_size": np.array([0, 19, -1], np.int32),
        "starts": np.array([0, 2, 0], np.int32),
    },
    "any windows": {"local_window_size": np.array([MOST, LEAST, 12], np.int32)},
    "widest window": {**lengths(MOST, 13, LEAST), "local_window_size": MOST},
    "wide integers": {
        "key_value_seq_lengths": np.array([2**40, -(2**40), 7]),
        "starts": np.array([-(2**40), 0, 2]),
        "local_window_size": np.array([2**40, 3, 4]),
    },
    "narrow integers": {
        "key_value_seq_lengths": np.array([13, 9, 200], np.uint8),
        "local_window_size": np.int64(5),
    },
    "sinks": {"sinks": np.array([0.5, -1.0, np.inf, -np.inf, 3.0, 0.0], np.float32)},
}


@pytest.mark.parametrize("options", CASES.values(), ids=CASES.keys())
def test_forward(options: dict, rng: np.random.Generator) -> None:
    q, k, v = inputs(rng)
    want = oracle.mqa_decode(q, k, v, **{"scale": D**-0.5, **options})
    got = both(q, k, v, return_max_logit=True, **options)
    assert_matches(got, as_float32(want), tol=1e-5)


def test_wide_integers_of_jax(rng: np.random.Generator) -> None:
    arrays, options = inputs(rng), CASES["wide integers"]
    want = both(*arrays, **options)
    with jax.enable_x64(True):
        wide = {name: jnp.asarray(x) for name, x in options.items()}
        assert {x.dtype for x in wide.values()} == {jnp.dtype("int64")}
        assert_matches(both(*arrays, **wide), want, tol=1e-6)


def test_window_forms(rng: np.random.Generator) -> None:
    """An int, (left, 0) and one window per request agree, also under jit and vmap."""
    q, k, v = inputs(rng)
    want = mqa_decode(q, k, v, local_window_size=3)
    each = np.full(B, 3, np.int32)
    for window in ((3, 0), [3, 0], (np.int64(3), 0), each):
        np.testing.assert_array_equal(mqa_decode(q, k, v, local_window_size=window), want)
    for over in (jax.jit, jax.vmap):
        got = over(lambda q, k, v, n: mqa_decode(q, k, v, local_window_size=n))(q, k, v, each)
        assert_matches(got, want, tol=1e-6)


@pytest.mark.parametrize("num_splits", [2, 5, 99])
def test_num_splits_changes_only_rounding(num_splits: int, rng: np.random.Generator) -> None:
    q, k, v = inputs(rng)
    options = {**lengths(13, 7, 2), "local_window_size": 5}
    want = both(q, k, v, **options)
    assert_matches(both(q, k, v, num_splits=num_splits, **options), want, tol=1e-6)


def test_values_in_the_keys(rng: np.random.Generator) -> None:
    q, k, _ = inputs(rng)
    want = both(q, k, k[..., :E])
    assert_matches(both(q, k, value_dim=E), want, tol=1e-6)
    assert_matches(mqa_decode(q, k, value_dim=E), want[0], tol=1e-6)
    assert_matches(mqa_decode(q, k), mqa_decode(q, k, k), tol=1e-6)
    wide = jax.ShapeDtypeStruct((1, 1, 1, 576), jnp.bfloat16)
    assert jax.eval_shape(mqa_decode, wide, wide).shape == (1, 1, 1, 512)


@pytest.mark.parametrize("shared", [False, True])
def test_gradients_against_finite_differences(shared: bool, rng: np.random.Generator) -> None:
    q, k, v = inputs(rng, np.float64)
    sinks = rng.normal(size=N)
    options = {**lengths(13, 7, 2), "local_window_size": 5, "num_splits": 3}

    def fn(q: Any, k: Any, v: Any, sinks: Any) -> Any:
        out, lse = both(q, k, v, value_dim=E, sinks=sinks, **options)
        return out, jnp.where(jnp.isfinite(lse), lse, 0)

    with jax.enable_x64(True):
        args = tuple(jnp.asarray(x) for x in (q, k, v, sinks))
        if shared:
            args, fn = (args[0], args[1], args[3]), lambda q, k, s, fn=fn: fn(q, k, None, s)
        assert fn(*args)[0].dtype == jnp.float64
        check_grads(fn, args, order=1, modes=["rev"], atol=1e-7, rtol=1e-7, eps=1e-5)


def test_unnormalized(rng: np.random.Generator) -> None:
    q, k, v = inputs(rng)
    options = lengths(13, 2, 0)
    out, lse, top = oracle.mqa_decode(q, k, v, scale=D**-0.5, **options)
    total = np.where(top == -np.inf, 0, np.exp(lse - np.where(top == -np.inf, 0, top)))
    want = as_float32((out * total[..., None], top, total))
    low = tuple(jnp.asarray(x, jnp.bfloat16) for x in (q, k, v))
    assert [x.dtype for x in mqa_decode(*low, normalize=False)] == [jnp.float32] * 3
    got = mqa_decode(q, k, v, normalize=False, num_splits=4, **options)
    assert_matches(got, want, tol=1e-5)
    again = mqa_decode(q, k, v, normalize=False, num_splits=4, return_lse=True, **options)
    jax.tree.map(np.testing.assert_array_equal, again, got)


def test_unnormalized_gradients(rng: np.random.Generator) -> None:
    """Functions that do not depend on the unit m have the gradients of functions of (out, lse)."""
    q, k, v = inputs(rng)
    dout, dlse = (rng.normal(size=x).astype(np.float32) for x in ((B, T, N, E), (B, T, N)))

    def unnormalized(q: Any, k: Any, v: Any) -> Any:
        o, m, total = mqa_decode(q, k, v, normalize=False)
        return o / total[..., None], m + jnp.log(total)

    want, pull_want = jax.vjp(both, q, k, v)
    got, pull_got = jax.vjp(unnormalized, q, k, v)
    assert_matches(got, want, tol=1e-5)
    assert_matches(pull_got((dout, dlse)), pull_want((dout, dlse)), tol=1e-5)


def test_results_are_those_asked_for(rng: np.random.Generator) -> None:
    q, k, v = inputs(rng)
    out, lse, top = both(q, k, v, return_max_logit=True)
    assert_matches(mqa_decode(q, k, v), out, tol=0)
    assert_matches(mqa_decode(q, k, v, return_lse=True), (out, lse), tol=0)
    assert_matches(mqa_decode(q, k, v, return_max_logit=True), (out, top), tol=0)


@pytest.mark.parametrize("plain", [False, True])
def test_the_largest_score_has_no_gradient(plain: bool, rng: np.random.Generator) -> None:
    q, k, v = inputs(rng)

    def loss(q: Any, k: Any, v: Any) -> Any:
        return mqa_decode(q, k, v, return_max_logit=True)[1].sum()

    if plain:
        with jax_dsa.plain_xla():
            grads = jax.grad(loss, (0, 1, 2))(q, k, v)
    else:
        grads = jax.grad(loss, (0, 1, 2))(q, k, v)
    assert all(np.all(np.asarray(g) == 0) for g in grads)


@pytest.mark.parametrize("num_splits", [None, 2])
def test_pages(num_splits: int | None, rng: np.random.Generator) -> None:
    q = inputs(rng)[0]
    k, v, table, flat_k, flat_v, mapped = paged(rng)
    held, starts = lengths(20, 11, 0), np.array([2, 0, 0], np.int32)
    options = {"scale": D**-0.5, "mapped": mapped, "starts": starts, **held}
    cache = PagedCache(k, table, *held.values())
    for values, rows in ((v, flat_v), (None, flat_k)):
        out, lse, _ = oracle.mqa_decode(q, flat_k, rows, **options)
        got = both(q, cache, values, num_splits=num_splits, starts=starts)
        assert_matches(got, as_float32((out, lse)), tol=1e-5)


def test_flat_cache(rng: np.random.Generator) -> None:
    """A cache gives the results of an array, with and without separate values."""
    q, k, v = inputs(rng)
    held = lengths(13, 7, 0)
    cache = FlatCache(k, *held.values())
    for values in (v, None):
        want = both(q, k, values, local_window_size=4, **held)
        got = both(q, cache, values, local_window_size=4)
        jax.tree.map(np.testing.assert_array_equal, got, want)
    want = jax.grad(lambda k, v: mqa_decode(q, k, v, **held).sum(), (0, 1))(k, v)
    of_cache = jax.jit(jax.grad(lambda c, v: mqa_decode(q, c, v).sum(), (0, 1), allow_int=True))
    dcache, dv = of_cache(jax.tree.map(jnp.asarray, cache), v)
    assert_matches((dcache.data, dv), want, tol=1e-6)


@pytest.mark.parametrize("kind", ["flat", "paged"])
def test_cache_of_one_request(kind: str, rng: np.random.Generator) -> None:
    q, k, v = inputs(rng)
    cache: Any = FlatCache(k, np.array([13, 7, 2], np.int32))
    if kind == "paged":
        k, v, table = paged(rng)[:3]
        cache = PagedCache(k, table, np.array([20, 7, 2], np.int32))
    want = both(q, cache, v)
    for b in range(B):
        if kind == "paged":
            one = PagedCache(k, cache.page_table[b], cache.lengths[b]), v
        else:
            one = FlatCache(k[b], cache.lengths[b]), v[b]
        assert_matches(both(q[b], *one), tuple(x[b] for x in want), tol=1e-6)


def test_gradients_of_pages(rng: np.random.Generator) -> None:
    """The gradient of a page is the sum over all requests that read it."""
    q = inputs(rng)[0]
    k, v, table = paged(rng)[:3]
    held = lengths(20, 11, 6)
    table = np.clip(table, 0, PAGES - 1)
    flat_k, flat_v = k[table].reshape(B, -1, G, D), v[table].reshape(B, -1, G, E)
    cached = lambda k: PagedCache(k, table, *held.values())  # noqa: E731
    got, pull = jax.vjp(lambda q, k, v: both(q, cached(k), v, num_splits=2), q, k, v)
    want, pull_flat = jax.vjp(lambda *a: both(*a, **held), q, flat_k, flat_v)
    assert_matches(got, want, tol=1e-5)
    cotangent = jnp.ones_like(got[0]), jnp.ones_like(got[1])
    dq, dk, dv = pull(cotangent)
    dq_flat, *flat = pull_flat(cotangent)
    assert_matches(dq, dq_flat, tol=1e-5)
    for pages, rows in ((dk, flat[0]), (dv, flat[1])):
        want = np.zeros(pages.shape, np.float32)
        np.add.at(want, table, np.asarray(rows).reshape(B, 5, PAGE, G, -1))
        assert_matches(pages, want, tol=1e-5)


def test_nan_in_keys(rng: np.random.Generator) -> None:
    """NaN in a key affects the queries that see it, and no others."""
    q, k, v = inputs(rng)
    options = {**lengths(13, 9, 2), "local_window_size": 3}
    nan_keys = [(0, 12), (1, 2), (1, 9), (2, 5), (2, 12)]  # only the last query sees the first one
    dout = rng.normal(size=(B, T, N, E)).astype(np.float32)
    clean, pull = jax.vjp(lambda *a: mqa_decode(*a, **options), q, k, v)
    clean_grads = pull(dout)
    for what in ("k", "v"):
        bad_k, bad_v = k.copy(), v.copy()
        for b, j in nan_keys:
            {"k": bad_k, "v": bad_v}[what][b, j] = np.nan
        out, pull = jax.vjp(lambda *a: mqa_decode(*a, **options), q, bad_k, bad_v)
        dq, dk, dv = pull(dout)
        assert np.isnan(out[0, 2]).all() and np.isnan(dq[0, 2]).all()
        for got, want in ((out, clean), (dq, clean_grads[0])):
            np.testing.assert_array_equal(got[0, :2], want[0, :2])
            np.testing.assert_array_equal(got[1:], want[1:])
        for got, want in ((dk, clean_grads[1]), (dv, clean_grads[2])):
            np.testing.assert_array_equal(got[1:], want[1:])
            assert np.isfinite(got[0, :9]).all()  # the query with NaN sees keys 9 to 12


@pytest.mark.parametrize("key", [2, 10])
def test_nan_in_one_of_several_chunks(key: int, rng: np.random.Generator) -> None:
    """NaN in the values of one group, in the first or in the last of three chunks."""
    q, k, v = inputs(rng)
    clean, lse = both(q, k, v, num_splits=3)
    v[1, key, 0] = np.nan
    out, again = both(q, k, v, num_splits=3)
    hit = np.zeros(out.shape, bool)
    hit[1, :, : N // G] = True
    np.testing.assert_array_equal(np.isnan(out), hit)
    np.testing.assert_array_equal(np.where(hit, clean, out), clean)
    np.testing.assert_array_equal(again, lse)


def test_a_request_without_a_key(rng: np.random.Generator) -> None:
    q, k, v = inputs(rng)
    held = lengths(13, 0, 1)
    sinks = np.array([0.0, np.inf, -np.inf, 1.0, 2.0, 0.0], np.float32)
    (out, lse), pull = jax.vjp(lambda *a: both(*a[:3], sinks=a[3], **held), q, k, v, sinks)
    assert np.all(np.asarray(out[1]) == 0) and np.all(np.asarray(lse[1]) == -np.inf)
    assert np.all(np.asarray(lse[2, :2]) == -np.inf) and np.all(np.isfinite(lse[2, 2]))
    assert np.all(np.asarray(out[:, :, 1]) == 0)
    dq, dk, dv, dsinks = pull((jnp.ones_like(out), jnp.ones_like(lse)))
    assert all(np.isfinite(x).all() for x in (dq, dk, dv, dsinks))
    for x in (dq, dk, dv):
        assert np.all(np.asarray(x[1]) == 0)


def test_a_query_without_a_key_affects_nothing(rng: np.random.Generator) -> None:
    """NaN in such a query or in its cotangents, as a function of lse has at -inf, is ignored."""
    q, k, v = inputs(rng)
    sinks = rng.normal(size=N).astype(np.float32)
    alone = np.zeros((B, T), bool)
    alone[1] = alone[2, :2] = True

    def grads(q: Any, *, dout: float, dlse: float) -> Any:
        held = lengths(13, 0, 1)
        (out, lse), pull = jax.vjp(lambda *a: both(*a[:3], sinks=a[3], **held), q, k, v, sinks)
        dout = np.where(alone[..., None, None], dout, np.ones_like(out))
        return pull((dout, np.where(alone[..., None], dlse, np.ones_like(lse))))

    want = grads(q, dout=1, dlse=1)
    bad = np.where(alone[..., None, None], np.float32(np.nan), q)
    for got in (
        grads(bad, dout=1, dlse=1),
        grads(q, dout=np.nan, dlse=1),
        grads(q, dout=1, dlse=-np.inf),
    ):
        jax.tree.map(np.testing.assert_array_equal, got, want)


def test_low_precision(rng: np.random.Generator) -> None:
    q, k, _ = inputs(rng, t=1, g=1)
    low = jnp.asarray(q, jnp.bfloat16), jnp.asarray(k, jnp.bfloat16)
    exact = tuple(np.asarray(x, np.float32) for x in low)

    def plain(q: Any, k: Any) -> Any:
        s = jnp.einsum("btnd,bsd->btns", q, k[:, :, 0]) * jnp.asarray(D**-0.5, q.dtype)
        return jnp.einsum("btns,bse->btne", jax.nn.softmax(s), k[:, :, 0, :E])

    def run(fn: Any, args: Any) -> tuple:
        out, pull = jax.vjp(fn, *args)
        return out, *pull(jnp.cos(jnp.arange(out.size)).reshape(out.shape).astype(out.dtype))

    ours = run(lambda q, k: mqa_decode(q, k, value_dim=E, num_splits=2), low)
    for i, (got, lo, ex) in enumerate(zip(ours, run(plain, low), run(plain, exact), strict=True)):
        assert got.dtype == jnp.bfloat16
        assert_as_good_as(got, lo, ex, factor=4 if i else 3, what=("out", "dq", "dk")[i])


def test_chunks_of_keys(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (jnp.asarray(x) for x in inputs(rng))
    starts, ends = jnp.full((B, T), 2, jnp.int32), jnp.full((B, T), 12, jnp.int32)
    x = Operands(q, k, v, starts, ends, jnp.ones((B, N)), None)
    options = Options(scale=0.3, value_dim=E, num_splits=None, normalize=True)

    def run() -> tuple:
        y = xla.mqa_decode_fwd(options, x)
        return *y, *xla.mqa_decode_bwd(options, x, y, Results(jnp.cos(y.out), None, y.log_sum))

    whole = jax.jit(run)()
    monkeypatch.setattr(streaming, "BUDGET", 6 * B * (G * D * 16 + T * N * 24))  # 6 + 6 + 1 keys
    assert_matches(jax.jit(lambda: run())(), whole, tol=1e-6)


@pytest.mark.parametrize("empty", ["b", "t", "s", "pages", "table"])
def test_empty(empty: str, rng: np.random.Generator) -> None:
    q, k, v = inputs(rng)
    table, starts = None, np.zeros(B, np.int32)
    if empty == "b":
        q, k, v, starts = q[:0], k[:0], v[:0], starts[:0]
    elif empty == "t":
        q = q[:, :0]
    elif empty == "s":
        k, v = k[:, :0], v[:, :0]
    else:
        k, v, table = paged(rng)[:3]
        if empty == "pages":
            k, v = k[:0], v[:0]
        else:
            table = table[:, :0]

    def run(q: Any, k: Any, v: Any) -> Any:
        keys = k if table is None else PagedCache(k, table, np.full(B, MOST, np.int32))
        return both(q, keys, v, starts=starts)

    (out, lse), pull = jax.vjp(run, q, k, v)
    assert out.shape == (*q.shape[:3], E) and lse.shape == q.shape[:3]
    assert np.all(np.asarray(out) == 0) and np.all(np.asarray(lse) == -np.inf)
    grads = pull((jnp.ones_like(out), jnp.ones_like(lse)))
    assert [g.shape for g in grads] == [q.shape, k.shape, v.shape]
    assert all(np.all(np.asarray(g) == 0) for g in grads)


def test_without_batch_axis(rng: np.random.Generator) -> None:
    q, k, v = inputs(rng)
    held, windows = np.array([13, 7, 2], np.int32), np.array([2, 12, -1], np.int32)
    starts = np.array([[0, 11, 12], [6, 0, 0], [0, 0, 1]], np.int32)
    want = both(q, k, v, key_value_seq_lengths=held, local_window_size=windows, starts=starts)
    for b in range(B):
        window = windows[b : b + 1].reshape(())
        one = {"local_window_size": window, "starts": starts[b]}
        got = both(q[b], k[b], v[b], key_value_seq_lengths=held[b], **one)
        assert_matches(got, tuple(x[b] for x in want), tol=1e-6)
