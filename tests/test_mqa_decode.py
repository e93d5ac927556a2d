"""`mqa_decode` and `merge_attention`; FP8 records are in test_caches.py."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compare import assert_as_good_as, assert_matches
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.test_util import check_grads
from oracles import mqa_decode as oracle
from quick import compile_quickly  # noqa: F401

from jax_dsa.core import streaming
from jax_dsa.ops.mqa_decode import Options, merge_attention, mqa_decode
from jax_dsa.reference import mqa_decode as reference

B, T, S, N, G, D, E = 3, 3, 13, 6, 2, 10, 7
PAGES, PAGE = 9, 4


def inputs(rng: np.random.Generator, dtype: Any = np.float32, t: int = T, g: int = G) -> tuple:
    shapes = (B, t, N, D), (B, S, g, D), (B, S, g, E)
    return tuple(rng.normal(size=shape).astype(dtype) for shape in shapes)


def as_float32(xs: Any) -> tuple:
    return tuple(x.astype(np.float32) for x in xs)


CASES = {
    "all": {},
    "scale": {"scale": 0.7},
    "lengths": {"lengths": np.array([13, 1, 0], np.int32)},
    "beyond the cache": {"lengths": np.array([13, 14, 16], np.int32)},
    "starts": {"lengths": np.array([13, 9, 5], np.int32), "starts": np.array([4, 8, -3], np.int32)},
    "window": {"lengths": np.array([13, 4, 2], np.int32), "window": 3},
    "windows": {"window": np.array([1, 20, 0], np.int32), "starts": np.array([0, 2, 0], np.int32)},
    "sinks": {"sinks": np.array([0.5, -1.0, np.inf, -np.inf, 3.0, 0.0], np.float32)},
}


@pytest.mark.parametrize("options", CASES.values(), ids=CASES.keys())
def test_forward(options: dict, rng: np.random.Generator) -> None:
    q, k, v = inputs(rng)
    out, lse, _ = oracle.mqa_decode(q, k, v, **{"scale": D**-0.5, **options})
    assert_matches(mqa_decode(q, k, v, **options), as_float32((out, lse)), tol=1e-5)


@pytest.mark.parametrize("num_splits", [2, 5, 99])
def test_splits_change_nothing(num_splits: int, rng: np.random.Generator) -> None:
    q, k, v = inputs(rng)
    options = {"lengths": np.array([13, 7, 2], np.int32), "window": 6}
    want = mqa_decode(q, k, v, **options)
    assert_matches(mqa_decode(q, k, v, num_splits=num_splits, **options), want, tol=1e-6)


def test_values_in_the_keys(rng: np.random.Generator) -> None:
    q, k, _ = inputs(rng)
    want = mqa_decode(q, k, k[..., :E])
    assert_matches(mqa_decode(q, k, value_dim=E), want, tol=1e-6)
    assert_matches(mqa_decode(q, k, value_dim=E, return_lse=False), want[0], tol=1e-6)


@pytest.mark.parametrize("shared", [False, True])
def test_gradients_against_finite_differences(shared: bool, rng: np.random.Generator) -> None:
    q, k, v = inputs(rng, np.float64)
    sinks = rng.normal(size=N)
    options = {"lengths": np.array([13, 7, 2], np.int32), "window": 6, "num_splits": 3}

    def fn(q: Any, k: Any, v: Any, sinks: Any) -> Any:
        out, lse = mqa_decode(q, k, v, value_dim=E, sinks=sinks, **options)
        return out, jnp.where(jnp.isfinite(lse), lse, 0)

    with jax.enable_x64(True):
        args = tuple(jnp.asarray(x) for x in (q, k, v, sinks))
        if shared:
            args, fn = (args[0], args[1], args[3]), lambda q, k, s, fn=fn: fn(q, k, None, s)
        assert fn(*args)[0].dtype == jnp.float64
        check_grads(fn, args, order=1, modes=["rev"], atol=1e-7, rtol=1e-7, eps=1e-5)


def test_unnormalised(rng: np.random.Generator) -> None:
    q, k, v = inputs(rng)
    options = {"lengths": np.array([13, 2, 0], np.int32)}
    out, lse, top = oracle.mqa_decode(q, k, v, scale=D**-0.5, **options)
    total = np.where(top == -np.inf, 0, np.exp(lse - np.where(top == -np.inf, 0, top)))
    want = as_float32((out * total[..., None], top, total))
    low = tuple(jnp.asarray(x, jnp.bfloat16) for x in (q, k, v))
    assert [x.dtype for x in mqa_decode(*low, normalize=False)] == [jnp.float32] * 3
    assert_matches(mqa_decode(q, k, v, normalize=False, num_splits=4, **options), want, tol=1e-5)


def test_unnormalised_gradients(rng: np.random.Generator) -> None:
    """Of whatever does not depend on the unit m: the same as through (out, lse)."""
    q, k, v = inputs(rng)
    dout, dlse = (rng.normal(size=x).astype(np.float32) for x in ((B, T, N, E), (B, T, N)))

    def by_parts(q: Any, k: Any, v: Any) -> Any:
        o, m, total = mqa_decode(q, k, v, normalize=False)
        return o / total[..., None], m + jnp.log(total)

    want, pull_want = jax.vjp(lambda *a: mqa_decode(*a), q, k, v)
    got, pull_got = jax.vjp(by_parts, q, k, v)
    assert_matches(got, want, tol=1e-5)
    assert_matches(pull_got((dout, dlse)), pull_want((dout, dlse)), tol=1e-5)


def paged(rng: np.random.Generator) -> tuple:
    """Pages, a table that shares some and leaves some out, and the flat rows they stand for."""
    k = rng.normal(size=(PAGES, PAGE, G, D)).astype(np.float32)
    v = rng.normal(size=(PAGES, PAGE, G, E)).astype(np.float32)
    table = rng.integers(0, PAGES, size=(B, 5)).astype(np.int32)
    table[0, 1], table[1, 0], table[2, 3] = -1, PAGES, -(2**31)
    flat_k, mapped = oracle.unpaged(k, table)
    flat_v, _ = oracle.unpaged(v, table)
    return k, v, table, flat_k, flat_v, mapped


@pytest.mark.parametrize("num_splits", [None, 2])
def test_pages(num_splits: int | None, rng: np.random.Generator) -> None:
    q = inputs(rng)[0]
    k, v, table, flat_k, flat_v, mapped = paged(rng)
    options = {"lengths": np.array([20, 11, 0], np.int32), "starts": np.array([2, 0, 0], np.int32)}
    out, lse, _ = oracle.mqa_decode(q, flat_k, flat_v, scale=D**-0.5, mapped=mapped, **options)
    got = mqa_decode(q, k, v, page_table=table, num_splits=num_splits, **options)
    assert_matches(got, as_float32((out, lse)), tol=1e-5)


def test_gradients_of_pages(rng: np.random.Generator) -> None:
    """A page's gradient is the sum over everyone who reads it."""
    q = inputs(rng)[0]
    k, v, table = paged(rng)[:3]
    lengths = np.array([20, 11, 6], np.int32)
    table = np.clip(table, 0, PAGES - 1)
    flat_k, flat_v = k[table].reshape(B, -1, G, D), v[table].reshape(B, -1, G, E)
    got, pull = jax.vjp(
        lambda *a: mqa_decode(*a, page_table=table, lengths=lengths, num_splits=2), q, k, v
    )
    want, pull_flat = jax.vjp(lambda *a: mqa_decode(*a, lengths=lengths), q, flat_k, flat_v)
    assert_matches(got, want, tol=1e-5)
    cotangent = jnp.ones_like(got[0]), jnp.ones_like(got[1])
    dq, dk, dv = pull(cotangent)
    dq_flat, *flat = pull_flat(cotangent)
    assert_matches(dq, dq_flat, tol=1e-5)
    for pages, rows in ((dk, flat[0]), (dv, flat[1])):
        want = np.zeros(pages.shape, np.float32)
        np.add.at(want, table, np.asarray(rows).reshape(B, 5, PAGE, G, -1))
        assert_matches(pages, want, tol=1e-5)


def test_keys_that_nobody_sees(rng: np.random.Generator) -> None:
    """NaN in a key changes nothing for those who do not see it, and everything for those who do."""
    q, k, v = inputs(rng)
    options = {"lengths": np.array([13, 9, 2], np.int32), "window": 4}
    poisons = [(0, 12), (1, 2), (1, 9), (2, 5), (2, 12)]  # the first is seen by the last query only
    dout = rng.normal(size=(B, T, N, E)).astype(np.float32)
    clean, pull = jax.vjp(lambda *a: mqa_decode(*a, return_lse=False, **options), q, k, v)
    clean_grads = pull(dout)
    for what in ("k", "v"):
        bad_k, bad_v = k.copy(), v.copy()
        for b, j in poisons:
            {"k": bad_k, "v": bad_v}[what][b, j] = np.nan
        out, pull = jax.vjp(lambda *a: mqa_decode(*a, return_lse=False, **options), q, bad_k, bad_v)
        dq, dk, dv = pull(dout)
        assert np.isnan(out[0, 2]).all() and np.isnan(dq[0, 2]).all()
        for got, want in ((out, clean), (dq, clean_grads[0])):
            np.testing.assert_array_equal(got[0, :2], want[0, :2])
            np.testing.assert_array_equal(got[1:], want[1:])
        for got, want in ((dk, clean_grads[1]), (dv, clean_grads[2])):
            np.testing.assert_array_equal(got[1:], want[1:])
            assert np.isfinite(got[0, :9]).all()  # the poisoned query sees keys 9 to 12


def test_a_request_without_a_key(rng: np.random.Generator) -> None:
    q, k, v = inputs(rng)
    lengths = np.array([13, 0, 1], np.int32)
    sinks = np.array([0.0, np.inf, -np.inf, 1.0, 2.0, 0.0], np.float32)
    (out, lse), pull = jax.vjp(
        lambda *a: mqa_decode(*a[:3], lengths=lengths, sinks=a[3]), q, k, v, sinks
    )
    assert np.all(np.asarray(out[1]) == 0) and np.all(np.asarray(lse[1]) == -np.inf)
    assert np.all(np.asarray(lse[2, :2]) == -np.inf) and np.all(np.isfinite(lse[2, 2]))
    assert np.all(np.asarray(out[:, :, 1]) == 0)
    dq, dk, dv, dsinks = pull((jnp.ones_like(out), jnp.ones_like(lse)))
    assert all(np.isfinite(x).all() for x in (dq, dk, dv, dsinks))
    for x in (dq, dk, dv):
        assert np.all(np.asarray(x[1]) == 0)


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

    ours = run(lambda q, k: mqa_decode(q, k, value_dim=E, return_lse=False, num_splits=2), low)
    for i, (got, lo, ex) in enumerate(zip(ours, run(plain, low), run(plain, exact), strict=True)):
        assert got.dtype == jnp.bfloat16
        assert_as_good_as(got, lo, ex, factor=4 if i else 3, what=("out", "dq", "dk")[i])


def test_chunks_of_keys(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (jnp.asarray(x) for x in inputs(rng))
    starts, ends = jnp.full((B, T), 2, jnp.int32), jnp.full((B, T), 12, jnp.int32)
    operands = q, k, v, starts, ends, jnp.ones((B, N)), None
    options = Options(scale=0.3, value_dim=E, num_splits=None, normalize=True)

    def run() -> tuple:
        out, lse, _ = reference.mqa_decode_fwd(options, *operands)
        return out, lse, *reference.mqa_decode_bwd(options, *operands, out, lse, jnp.cos(out), lse)

    whole = jax.jit(run)()
    monkeypatch.setattr(streaming, "BUDGET", 6 * B * (G * D * 16 + T * N * 24))  # 6 + 6 + 1 keys
    assert_matches(jax.jit(lambda: run())(), whole, tol=1e-6)


@pytest.mark.parametrize("empty", ["b", "t", "s", "pages", "table"])
def test_empty(empty: str, rng: np.random.Generator) -> None:
    q, k, v = inputs(rng)
    table = None
    if empty == "b":
        q, k, v = q[:0], k[:0], v[:0]
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
    (out, lse), pull = jax.vjp(lambda *a: mqa_decode(*a, page_table=table), q, k, v)
    assert out.shape == (*q.shape[:3], E) and lse.shape == q.shape[:3]
    assert np.all(np.asarray(out) == 0) and np.all(np.asarray(lse) == -np.inf)
    grads = pull((jnp.ones_like(out), jnp.ones_like(lse)))
    assert [g.shape for g in grads] == [q.shape, k.shape, v.shape]
    assert all(np.all(np.asarray(g) == 0) for g in grads)


def test_without_batch_axis(rng: np.random.Generator) -> None:
    q, k, v = inputs(rng)
    lengths, windows = np.array([13, 7, 2], np.int32), np.array([3, 13, 1], np.int32)
    want = mqa_decode(q, k, v, lengths=lengths, window=windows)
    for b in range(B):
        got = mqa_decode(
            q[b], k[b], v[b], lengths=lengths[b], window=windows[b : b + 1].reshape(())
        )
        assert_matches(got, tuple(x[b] for x in want), tol=1e-6)


@pytest.mark.parametrize("as_list", [False, True])
def test_merge(as_list: bool, rng: np.random.Generator) -> None:
    outs = rng.normal(size=(4, B, T, N, E)).astype(np.float32)
    lses = rng.normal(size=(4, B, T, N)).astype(np.float32)
    lses[0, 0], lses[:, 1, 1] = -np.inf, -np.inf
    outs[0, 0] = np.nan
    want = as_float32(oracle.merge_attention(outs, lses))
    got = merge_attention(list(outs), tuple(lses)) if as_list else merge_attention(outs, lses)
    assert_matches(got, want, tol=1e-5)
    (out, lse), pull = jax.vjp(lambda *a: merge_attention(*a), outs, lses)
    grads = pull((jnp.ones_like(out), jnp.ones_like(lse)))
    assert all(np.isfinite(g).all() for g in grads)
    assert np.all(np.asarray(grads[1])[np.isneginf(lses)] == 0)


def test_merged_parts_are_the_whole(rng: np.random.Generator) -> None:
    q, k, v = inputs(rng)
    starts = [np.full(B, s, np.int32) for s in (0, 4, 5)]
    ends = [4, 5, 13]

    def whole(q: Any, k: Any, v: Any) -> Any:
        return mqa_decode(q, k, v)

    def split(q: Any, k: Any, v: Any) -> Any:
        # A part has neither the keys before its start nor those cut away behind its end.
        parts = [
            mqa_decode(q, k[:, :e], v[:, :e], starts=s, lengths=np.full(B, S, np.int32))
            for s, e in zip(starts, ends, strict=True)
        ]
        return merge_attention(*zip(*parts, strict=True))

    want, pull_want = jax.vjp(whole, q, k, v)
    got, pull_got = jax.vjp(split, q, k, v)
    assert_matches(got, want, tol=1e-5)
    cotangent = tuple(jnp.cos(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape) for x in want)
    assert_matches(pull_got(cotangent), pull_want(cotangent), tol=1e-5)


def test_merge_gradients_to_second_order(rng: np.random.Generator) -> None:
    outs, lses = rng.normal(size=(3, 2, 4)), rng.normal(size=(3, 2))
    with jax.enable_x64(True):
        args = jnp.asarray(outs), jnp.asarray(lses)
        check_grads(jax.jit(merge_attention), args, order=2, modes=["rev"])


GOOD = {
    "q": np.zeros((B, T, N, D), np.float32),
    "k": np.zeros((B, S, G, D), np.float32),
    "v": np.zeros((B, S, G, E), np.float32),
}
WRONG = {
    "q": ({"q": np.zeros(4, np.float32)}, ValueError, "'q' has shape"),
    "q dtype": ({"q": np.zeros((B, T, N, D), np.int32)}, TypeError, "'q' has dtype int32"),
    "k": ({"k": np.zeros((B, S, G, D + 1), np.float32)}, ValueError, "'k'.*D=10"),
    "k batch": ({"k": np.zeros((1, S, G, D), np.float32)}, ValueError, "'k'.*B=3"),
    "k dtype": ({"k": jnp.zeros((B, S, G, D), jnp.bfloat16)}, TypeError, "'k'.*float32 or uint8"),
    "k records": ({"k": np.zeros((B, S, G, 656), np.uint8), "v": None}, ValueError, "'k'.*D=576"),
    "heads": ({"k": np.zeros((B, S, 4, D), np.float32)}, ValueError, "N=6.*G=4.*multiple"),
    "v": ({"v": np.zeros((B, S + 1, G, E), np.float32)}, ValueError, "'v'.*S=13"),
    "v dtype": ({"v": np.zeros((B, S, G, E), np.float16)}, TypeError, "'v'.*float32"),
    "value_dim": ({"v": None, "value_dim": D + 1}, ValueError, "'value_dim' is 11"),
    "value_dim type": ({"v": None, "value_dim": None}, TypeError, "'value_dim' is None"),
    "lengths": ({"lengths": np.zeros((B, T), np.int32)}, ValueError, "'lengths'.*B=3"),
    "lengths dtype": ({"lengths": np.zeros(B, np.float32)}, TypeError, "'lengths'.*int32"),
    "starts": ({"starts": np.zeros(2, np.int32)}, ValueError, "'starts'.*B=3"),
    "window": ({"window": 0}, ValueError, "'window' is 0"),
    "window type": ({"window": 2.5}, TypeError, "'window'"),
    "windows": ({"window": np.ones(T + 1, np.int32)}, ValueError, "'window'.*B=3"),
    "sinks": ({"sinks": np.zeros(G, np.float32)}, ValueError, "'sinks'.*N=6"),
    "page_table": ({"page_table": np.zeros((2, 4), np.int32)}, ValueError, "'page_table'.*B=3"),
    "page_table type": ({"page_table": [[0]]}, TypeError, "'page_table' is list"),
    "scale": ({"scale": True}, TypeError, "'scale'"),
    "num_splits": ({"num_splits": 0}, ValueError, "'num_splits' is 0"),
    "normalize": ({"normalize": 0}, TypeError, "'normalize'"),
    "sinks unnormalised": (
        {"normalize": False, "sinks": np.zeros(N)},
        ValueError,
        "'sinks'.*normalize",
    ),
    "return_lse": ({"normalize": False, "return_lse": False}, ValueError, "'return_lse' is False"),
    "implementation": ({"implementation": "cpu"}, ValueError, "'implementation' is 'cpu'"),
}


@pytest.mark.parametrize(("change", "error", "message"), WRONG.values(), ids=WRONG.keys())
def test_misuse(change: dict, error: type, message: str) -> None:
    with pytest.raises(error, match=f"mqa_decode: .*{message}"):
        mqa_decode(**{**GOOD, **change})


OUTS, LSES = np.zeros((2, 3, 4), np.float32), np.zeros((2, 3), np.float32)
WRONG_MERGE = {
    "outs type": (3, LSES, {}, TypeError, "'outs' is int"),
    "outs items": ([OUTS[0], 1.0], LSES, {}, TypeError, "'outs' is a sequence"),
    "outs shapes": ([OUTS[0], OUTS[0, :2]], LSES, {}, ValueError, "'outs' holds"),
    "outs dtype": (OUTS.astype(np.int32), LSES, {}, TypeError, "'outs' has dtype int32"),
    "no parts": ([], [], {}, ValueError, "'outs' holds nothing"),
    "no stacked parts": (OUTS[:0], LSES[:0], {}, ValueError, "'outs' has shape"),
    "lses shape": (OUTS, LSES[:, :2], {}, ValueError, "'lses' has shape"),
    "lses count": (OUTS, [LSES[0]], {}, ValueError, "'lses' has shape"),
    "lses dtype": (OUTS, LSES.astype(np.float16), {}, TypeError, "'lses' has dtype float16"),
    "implementation": (OUTS, LSES, {"implementation": "best"}, ValueError, "'implementation'"),
    "cuda": (OUTS, LSES, {"implementation": "cuda"}, NotImplementedError, "no CUDA kernel"),
}


@pytest.mark.parametrize(
    ("outs", "lses", "options", "error", "message"), WRONG_MERGE.values(), ids=WRONG_MERGE.keys()
)
def test_misuse_of_merge(outs: Any, lses: Any, options: dict, error: type, message: str) -> None:
    with pytest.raises(error, match=f"merge_attention: .*{message}"):
        merge_attention(outs, lses, **options)


@settings(max_examples=12, deadline=None)
@given(st.data())
def test_any_wrong_shape_is_refused(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(GOOD)))
    shape = list(GOOD[name].shape)
    axis = data.draw(st.integers(0, 3))
    shape[axis] = data.draw(st.integers(0, 20).filter(lambda n: n != shape[axis]))
    bad = {**GOOD, name: np.zeros(shape, GOOD[name].dtype)}
    free = (name, axis) in (("q", 1), ("v", 3)) or (name == "q" and axis == 2 and shape[2] % G == 0)
    if free:
        out, _ = mqa_decode(**bad)
        assert out.shape == (*bad["q"].shape[:3], bad["v"].shape[3])
    else:
        with pytest.raises(ValueError, match="mqa_decode: argument"):
            mqa_decode(**bad)
