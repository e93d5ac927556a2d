"""`sparse_mla` against the float64 oracle, and at its edges. Decode: test_caches.py."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params
from jax.test_util import check_grads
from support.compare import Variable, assert_as_good_as, assert_matches, assert_unmoved
from support.oracles import sparse_mla as oracle
from support.sparse_mla import INT_MAX, INT_MIN, B, D, E, G, K, N, S, T, both, grads, inputs

from jax_dsa import sparse_mla
from jax_dsa.core import streaming
from jax_dsa.core.rows import query_bytes
from jax_dsa.core.softmax import row_products
from jax_dsa.ops.sparse_mla import xla
from jax_dsa.ops.sparse_mla.spec import Operands, Options, Results

CASES = {
    "plain": {},
    "scale": {"scale": 0.7},
    "causal": {"is_causal": True, "query_start": 4},
    "causal-before-all-keys": {"is_causal": True, "query_start": -4},
    "compressed": {"is_causal": True, "query_start": np.array([9, 20], np.int32), "key_stride": 3},
    "length": {"topk_length": np.array([[9, 0, 1, 5, 3, -2, 99], [8, 7, 6, 5, 4, 3, 2]], np.int32)},
    "sinks": {"sinks": np.array([0.5, -1.0, np.inf, -np.inf, 3.0, 0.0], np.float32)},
}
EVERY_CASE = pytest.mark.parametrize("options", CASES.values(), ids=CASES.keys())


def test_oracle_on_a_hand_computed_case() -> None:
    q, kv = np.array([[[[2.0]]]]), np.array([[[[1.0]], [[3.0]], [[7.0]]]])
    out, lse = oracle.sparse_mla(q, kv, np.array([[[[0, 1, -1, 0]]]]), value_dim=1, scale=0.5)
    e1, e3 = np.exp(1.0), np.exp(3.0)
    np.testing.assert_allclose(out, (2 * e1 * 1 + e3 * 3) / (2 * e1 + e3))
    np.testing.assert_allclose(lse, np.log(2 * e1 + e3))


@EVERY_CASE
def test_forward(options: dict, rng: np.random.Generator) -> None:
    args = inputs(rng)
    want = oracle.sparse_mla(*args, value_dim=E, **{"scale": D**-0.5, **options})
    assert_matches(both(*args, **options), tuple(x.astype(np.float32) for x in want), tol=1e-5)


@EVERY_CASE
def test_gradients(options: dict, rng: np.random.Generator) -> None:
    args = inputs(rng)
    dout = rng.normal(size=(B, T, N, E)).astype(np.float32)
    dlse = rng.normal(size=(B, T, N)).astype(np.float32)
    got = grads(args, dout, dlse, **options)
    filled = {"scale": D**-0.5, **options}
    want = oracle.sparse_mla_grads(*args, dout, dlse, value_dim=E, **filled)
    want = want if "sinks" in options else want[:2]
    got = got if "sinks" in options else got[:2]
    assert_matches(got, tuple(x.astype(np.float32) for x in want), tol=1e-5)


def test_gradients_against_finite_differences(rng: np.random.Generator) -> None:
    q, kv, indices = inputs(rng, np.float64, t=3)
    sinks = rng.normal(size=N)

    def fn(q: Any, kv: Any, sinks: Any) -> Any:
        out, lse = both(q, kv, indices, sinks=sinks, is_causal=True, query_start=5)
        return out, jnp.where(jnp.isfinite(lse), lse, 0)

    with jax.enable_x64(True):
        args = tuple(jnp.asarray(x) for x in (q, kv, sinks))
        assert fn(*args)[0].dtype == jnp.float64
        check_grads(fn, args, order=1, modes=["rev"], atol=1e-7, rtol=1e-7, eps=1e-5)


def test_a_row_without_a_valid_slot(rng: np.random.Generator) -> None:
    q, kv, indices = inputs(rng)
    sinks = np.array([0.0, np.inf, -np.inf, 1.0, 0.0, 0.0], np.float32)
    row = T // 2
    out, lse = both(q, kv, indices, sinks=sinks)
    assert np.all(np.asarray(out[0, row]) == 0) and np.all(np.asarray(lse[0, row]) == -np.inf)
    dq, dkv, dsinks = grads(
        (q, kv, np.full_like(indices, -1)), jnp.ones_like(out), jnp.ones_like(lse), sinks
    )
    for g in (dq, dkv, dsinks):
        assert np.all(np.asarray(g) == 0)


@pytest.mark.parametrize(
    ("poison", "deterministic"), [(np.nan, False), (np.inf, True), (-np.inf, False)]
)
def test_keys_that_no_slot_selects(
    poison: float, deterministic: bool, rng: np.random.Generator
) -> None:
    q, kv, indices = inputs(rng)
    length = rng.integers(0, K, size=(B, T)).astype(np.int32)
    indices[..., K - 1] = 0  # beyond every row's length
    indices[..., : K - 1][indices[..., : K - 1] == 0] = 1
    indices[indices == S - 1] = -1
    bad = kv.copy()
    bad[:, [0, S - 1]] = poison
    cotangents = rng.normal(size=(B, T, N, E)), rng.normal(size=(B, T, N))
    cotangents = tuple(x.astype(np.float32) for x in cotangents)
    options = {"topk_length": length, "deterministic": deterministic}
    for a, b in zip(both(q, kv, indices, **options), both(q, bad, indices, **options), strict=True):
        np.testing.assert_array_equal(a, b)
    clean = grads((q, kv, indices), *cotangents, **options)
    dirty = grads((q, bad, indices), *cotangents, **options)
    assert_unmoved(clean[:2], dirty[:2])
    assert np.all(np.asarray(dirty[1])[:, [0, S - 1]] == 0)


@pytest.mark.parametrize("cotangents", [(np.nan, 1), (1, -np.inf)])
def test_cotangents_of_a_query_without_a_slot(
    cotangents: tuple[float, float], rng: np.random.Generator
) -> None:
    """They may be NaN, like the derivative of a function of lse at -inf."""
    args = inputs(rng)
    row, sinks = (0, T // 2), rng.normal(size=N).astype(np.float32)
    dout, dlse = np.ones((B, T, N, E), np.float32), np.ones((B, T, N), np.float32)
    want = grads(args, dout, dlse, sinks)
    dout[row], dlse[row] = cotangents
    jax.tree.map(np.testing.assert_array_equal, grads(args, dout, dlse, sinks), want)
    assert np.all(np.asarray(want[0])[row] == 0)


def test_nan_in_a_key_affects_only_queries_that_select_it(rng: np.random.Generator) -> None:
    q, kv, indices = inputs(rng)
    indices[indices == 3] = 4
    indices[1, 2, 0, 0] = 3
    kv[1, 3] = np.nan
    out, lse = both(q, kv, indices)
    hit = np.zeros((B, T, N), bool)
    hit[1, 2, : N // G] = True
    np.testing.assert_array_equal(np.isnan(lse), hit)
    np.testing.assert_array_equal(np.isnan(out).all(-1), hit)
    np.testing.assert_array_equal(np.isnan(out).any(-1), hit)


def test_duplicates_count_once_per_occurrence(rng: np.random.Generator) -> None:
    q, kv, _ = inputs(rng, g=1)
    once = np.zeros((B, T, 1, 1), np.int32)
    out, lse = both(q, kv, np.repeat(once, 4, axis=-1))
    single, single_lse = both(q, kv, once)
    assert_matches(out, single, tol=1e-6)
    assert_matches(lse, single_lse + np.log(4).astype(np.float32), tol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_low_precision(dtype: Any, rng: np.random.Generator) -> None:
    q, kv, indices = inputs(rng, t=13, g=1)
    low = jnp.asarray(q, dtype), jnp.asarray(kv, dtype)
    exact = tuple(np.asarray(x, np.float32) for x in low)
    dout = jnp.asarray(rng.normal(size=(B, 13, N, E)), dtype)
    indices = np.where((indices < 0) | (indices >= S), 0, indices)

    def plain(q: Any, kv: Any) -> Any:
        rows = jax.vmap(lambda x, i: x[i])(kv[:, :, 0], indices[:, :, 0])
        s = jnp.einsum("btnd,btkd->btnk", q, rows) * jnp.asarray(D**-0.5, q.dtype)
        return jnp.einsum("btnk,btke->btne", jax.nn.softmax(s), rows[..., :E])

    @functools.partial(jax.jit, static_argnums=0)
    def run(fn: Any, args: Any) -> tuple:
        out, pull = jax.vjp(fn, *args)
        return out, *pull(dout.astype(out.dtype))

    ours = run(lambda q, kv: sparse_mla(q, kv, indices, value_dim=E), low)
    names = ("out", "dq", "dkv")
    for name, got, lo, ex in zip(names, ours, run(plain, low), run(plain, exact), strict=True):
        assert got.dtype == dtype
        assert_as_good_as(got, lo, ex, factor=3 if name == "out" else 4, what=name)


@pytest.mark.parametrize(
    ("t", "s", "k"), [(1, 11, 9), (62, 11, 3), (0, 11, 9), (7, 0, 9), (7, 11, 0)]
)
def test_sizes(t: int, s: int, k: int, rng: np.random.Generator) -> None:
    args = inputs(rng, t=max(t, 1), s=s, k=k)
    args = args[0][:, :t], args[1], args[2][:, :t]
    want = oracle.sparse_mla(*args, value_dim=E, scale=D**-0.5)
    got = both(*args)
    assert_matches(got, tuple(x.astype(np.float32) for x in want), tol=1e-5)
    dq, dkv, _ = grads(args, *(jnp.ones_like(x) for x in got))
    assert dq.shape == args[0].shape and dkv.shape == args[1].shape


@pytest.mark.parametrize("deterministic", [False, True])
def test_chunks_of_queries(
    deterministic: bool, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, kv, indices = inputs(rng)
    dout, dlse = (jnp.asarray(rng.normal(size=x), jnp.float32) for x in ((B, T, N, E), (B, T, N)))
    options = Options(scale=0.3, value_dim=E, deterministic=deterministic)
    length, sinks = jnp.full((B, T), 5, jnp.int32), jnp.ones((B, N))
    arrays = jnp.asarray(q), jnp.asarray(kv), jnp.asarray(indices)
    operands = Operands(*arrays, topk_length=length, sinks=sinks)

    def run() -> tuple:
        y = xla.sparse_mla_fwd(options, operands)
        return *y, *xla.sparse_mla_bwd(options, operands, y, Results(dout, None, dlse))

    whole = jax.jit(run)()
    per_query = query_bytes(q, indices, 8, 12)
    monkeypatch.setattr(streaming, "BUDGET", 3 * per_query)  # 3 + 3 + 1 queries
    assert_matches(jax.jit(lambda: run())(), whole, tol=1e-6)


def test_memory_is_bounded(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """No array of either pass is as large as the gathered rows of all queries."""
    queries, keys, heads, dim, k = 64, 32, 4, 32, 32
    q = jnp.zeros((1, queries, heads, dim))
    kv = jnp.zeros((1, keys, 1, dim))
    indices = jnp.zeros((1, queries, 1, k), jnp.int32)
    out, lse = jnp.zeros((1, queries, heads, dim)), jnp.zeros((1, queries, heads))
    monkeypatch.setattr(streaming, "BUDGET", 4 * k * dim * 8)

    def sizes(jaxpr: Any) -> Any:
        for eqn in jaxpr.eqns:
            yield from (v.aval.size for v in eqn.outvars if hasattr(v.aval, "size"))
            for sub in jaxprs_in_params(eqn.params):
                yield from sizes(sub)

    options = Options(scale=1.0, value_dim=dim)
    operands, results = Operands(q, kv, indices), Results(out, lse, lse)
    for fn, args in (
        (xla.sparse_mla_fwd, (operands,)),
        (xla.sparse_mla_bwd, (operands, results, results)),
    ):
        largest = max(sizes(jax.make_jaxpr(lambda *a, fn=fn: fn(options, *a))(*args).jaxpr))
        assert largest <= max(queries * heads * dim, 4 * k * dim)


def test_deterministic_gradients(rng: np.random.Generator) -> None:
    """Deterministic gradients are the same sums in another order, for which slots are sorted."""
    q, kv, indices = inputs(rng, s=3)
    dout, dlse = jnp.ones((B, T, N, E)), jnp.ones((B, T, N))

    def gradients(deterministic: bool) -> Any:
        def run(q: Any, kv: Any) -> Any:
            return grads((q, kv, indices), dout, dlse, deterministic=deterministic)[:2]

        lowered = jax.jit(run).lower(q, kv)
        assert ("stablehlo.sort" in lowered.as_text()) == deterministic
        return lowered.compile()(q, kv)

    assert_matches(gradients(True), gradients(False), tol=1e-5)


def test_without_batch_axis(rng: np.random.Generator) -> None:
    q, kv, indices = inputs(rng)
    length = np.full((B, T), 5, np.int32)
    out, lse = both(q, kv, indices, topk_length=length, is_causal=True, query_start=np.int32(3))
    for b in range(B):
        one = both(
            q[b], kv[b], indices[b], topk_length=length[b], is_causal=True, query_start=jnp.int32(3)
        )
        assert_matches(one, (out[b], lse[b]), tol=1e-6)


def test_indices_shared_by_all_groups(rng: np.random.Generator) -> None:
    q, kv, indices = inputs(rng)
    shared = indices[:, :, 0]
    want = both(q, kv, np.stack([shared] * G, axis=2), is_causal=True, query_start=3)
    got = both(q, kv, shared, is_causal=True, query_start=3)
    assert_matches(got, want, tol=0)
    single = both(q[1], kv[1], shared[1], is_causal=True, query_start=3)
    assert_matches(single, (want[0][1], want[1][1]), tol=1e-6)


def test_default_value_dim(rng: np.random.Generator) -> None:
    args = inputs(rng)
    assert sparse_mla(*args).shape == (B, T, N, D)
    wide = np.zeros((1, 1, 1, 576), np.float32)
    assert sparse_mla(wide, wide, np.zeros((1, 1, 1), int)).shape == (1, 1, 1, 512)


def test_arguments_of_other_types(rng: np.random.Generator) -> None:
    q, kv, indices = inputs(rng)
    length = np.full((B, T), 5)
    options = {"is_causal": True, "query_start": 3, "scale": 0.5, "key_stride": 1}
    want = both(q, kv, indices, topk_length=length.astype(np.int32), **options)
    options = {
        "query_start": np.int64(3),
        "scale": jnp.float32(0.5),
        "key_stride": np.int64(1),
        "is_causal": np.True_,
    }
    wide = np.where(indices == INT_MAX, 2**40, indices.astype(np.int64))
    got = both(Variable(q), Variable(kv), wide, topk_length=length, **options)
    assert_matches(got, want, tol=0)


@pytest.mark.parametrize("start", [INT_MAX, np.int64(2**31 - 1), np.array([INT_MAX] * B)])
def test_last_positions_see_all_keys(start: Any, rng: np.random.Generator) -> None:
    args = inputs(rng)
    assert_matches(both(*args, is_causal=True, query_start=start), both(*args), tol=0)


def test_positions_before_the_first_key_see_no_key(rng: np.random.Generator) -> None:
    out, lse = both(*inputs(rng), is_causal=True, query_start=INT_MIN)
    assert not out.any() and (lse == -jnp.inf).all()


def test_traced_query_start_and_single_result(rng: np.random.Generator) -> None:
    args = inputs(rng)
    fn = jax.jit(lambda start: sparse_mla(*args, value_dim=E, is_causal=True, query_start=start))
    for start in (0, 6):
        want, _ = both(*args, is_causal=True, query_start=start)
        assert_matches(fn(jnp.int32(start)), want, tol=1e-6)


def test_row_products_use_rounded_values(rng: np.random.Generator) -> None:
    """Operands are rounded to their dtype even if XLA fuses the conversion."""
    x = jnp.asarray(rng.normal(size=(64, 512)), jnp.float32)
    out = jnp.asarray(rng.normal(size=(64, 512)), jnp.bfloat16)

    def products(x: jax.Array) -> jax.Array:
        return row_products(jnp.cos(x).astype(jnp.bfloat16), out)

    np.testing.assert_allclose(jax.jit(products)(x), products(x), rtol=0, atol=1e-4)
