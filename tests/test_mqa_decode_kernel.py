"""The mqa_decode kernels against the XLA implementation in float32, and their FFI calls."""

from __future__ import annotations

import dataclasses
import functools
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.compare import assert_as_good_as, assert_matches

from jax_dsa import FlatCache, PagedCache, mqa_decode
from jax_dsa.ops.mqa_decode import cuda
from jax_dsa.ops.mqa_decode.spec import Operands, Options, Results

gpu = pytest.mark.gpu
MOST, LEAST = 2**31 - 1, -(2**31)


def inputs(
    rng: np.random.Generator, *, b: int, t: int, s: int, n: int, g: int = 1, d: int = 576
) -> tuple[Any, ...]:
    """Returns bfloat16 q, k and (for D < 512) v, and lengths, one of which is s and one 0.

    Keys and values that no query sees are NaN.
    """
    lengths = rng.integers(0, s + 1, b).astype(np.int32)
    lengths[0] = s
    if b > 1:
        lengths[1] = 0
    shapes = [(b, s, g, d)] * (1 if d >= 512 else 2)
    rows = [rng.standard_normal(shape, np.float32) for shape in shapes]
    for x in rows:
        x[np.arange(s) >= lengths[:, None]] = np.nan
    q = rng.standard_normal((b, t, n, d), np.float32)
    return *(jnp.asarray(x, jnp.bfloat16) for x in (q, *rows)), jnp.asarray(lengths)


def compare(*arrays: Any, **options: Any) -> None:
    """Compares out and lse. The last of `arrays` are the lengths."""

    @functools.partial(jax.jit, static_argnums=0)
    def run(implementation: str, q: Any, k: Any, v: Any, lengths: Any) -> Any:
        held = {"key_value_seq_lengths": lengths, "return_lse": True}
        return mqa_decode(q, k, v, **held, **options, implementation=implementation)

    q, k, *v, lengths = arrays
    v = v[0] if v else None
    out, lse = run("cuda", q, k, v, lengths)
    low, _ = run("xla", q, k, v, lengths)
    wide = (x if x is None else x.astype(jnp.float32) for x in (q, k, v))
    exact, exact_lse = run("xla", *wide, lengths)
    assert out.dtype == jnp.bfloat16 and lse.dtype == jnp.float32
    assert_as_good_as(out, low, exact, what="out")
    assert_matches(lse, exact_lse, tol=2e-5, what="lse")


SHAPES = {
    "one request": {"b": 1, "t": 1, "s": 9000, "n": 128},
    "one short request": {"b": 1, "t": 1, "s": 640, "n": 128},
    "one short request, few heads": {"b": 1, "t": 1, "s": 640, "n": 16},
    "short requests, queries": {"b": 2, "t": 3, "s": 300, "n": 20},
    "64 heads": {"b": 5, "t": 1, "s": 700, "n": 64},
    "many requests": {"b": 140, "t": 1, "s": 500, "n": 128},
    "queries": {"b": 4, "t": 5, "s": 700, "n": 50},
    "D 512": {"b": 4, "t": 2, "s": 700, "n": 128, "d": 512},
    "groups": {"b": 3, "t": 3, "s": 400, "n": 80, "g": 2},
    "few heads": {"b": 9, "t": 1, "s": 2000, "n": 16},
    "few heads, queries": {"b": 9, "t": 4, "s": 900, "n": 7},
    "one head": {"b": 2, "t": 1, "s": 65, "n": 1, "d": 512},
    "D 128": {"b": 9, "t": 1, "s": 2000, "n": 32, "g": 8, "d": 128},
    "D 128, many rows": {"b": 3, "t": 8, "s": 300, "n": 24, "g": 2, "d": 128},
    "D 256": {"b": 3, "t": 2, "s": 900, "n": 16, "g": 2, "d": 256},
    "D 64": {"b": 3, "t": 1, "s": 900, "n": 64, "g": 8, "d": 64},
    "fewer keys than queries": {"b": 3, "t": 8, "s": 5, "n": 16},
}


@gpu
@pytest.mark.parametrize("name", SHAPES)
def test_shapes(name: str, rng: np.random.Generator) -> None:
    compare(*inputs(rng, **SHAPES[name]))


@gpu
@pytest.mark.parametrize("name", ["queries", "few heads, queries", "D 256"])
def test_options(name: str, rng: np.random.Generator) -> None:
    shape = SHAPES[name]
    arrays, b, t, n = inputs(rng, **shape), shape["b"], shape["t"], shape["n"]
    sinks = rng.standard_normal(n).astype(np.float32)
    sinks[:2] = -np.inf, np.inf
    starts = rng.integers(-3, 500, (b, t)).astype(np.int32)
    starts[0, 0], starts[0, 1] = LEAST, MOST
    compare(*arrays, scale=0.01, num_splits=3)
    compare(*arrays, sinks=jnp.asarray(sinks))
    compare(*arrays, local_window_size=70, sinks=jnp.asarray(sinks))
    compare(*arrays, starts=jnp.asarray(starts))
    compare(*arrays, starts=jnp.asarray(starts[:, 0]), local_window_size=(300, 0))


@gpu
@pytest.mark.parametrize("heads", [16, 96])
def test_unnormalized(heads: int, rng: np.random.Generator) -> None:
    q, k, lengths = inputs(rng, b=5, t=2, s=900, n=heads)
    call = functools.partial(mqa_decode, normalize=False, key_value_seq_lengths=lengths)
    got = call(q * 4, k, implementation="cuda")
    want = call((q * 4).astype(jnp.float32), k.astype(jnp.float32), implementation="xla")
    assert [x.dtype for x in got] == [jnp.float32] * 3
    for name, g, w in zip("oml", got, want, strict=True):
        assert_matches(g, w, tol=1e-2 if name == "o" else 1e-3, what=name)


@gpu
@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("page", [1, 16, 64, 256])
def test_pages(page: int, heads: int, rng: np.random.Generator) -> None:
    q, k, lengths = inputs(rng, b=7, t=2, s=768, n=heads)
    count = 7 * 768 // page
    order = rng.permutation(count + 3)[:count].astype(np.int32)
    pages = np.full((count + 3, page, 1, 576), np.nan, np.float32)
    pages[order] = np.asarray(k, np.float32).reshape(count, page, 1, 576)
    order[rng.random(count) < 0.2] = rng.choice(np.array([LEAST, -1, count + 3, MOST], np.int32))
    table = jnp.asarray(order.reshape(7, -1))

    def run(implementation: str, dtype: Any) -> Any:
        cache = PagedCache(jnp.asarray(pages, dtype), table, lengths)
        return mqa_decode(q.astype(dtype), cache, return_lse=True, implementation=implementation)

    (out, lse), (low, _) = run("cuda", jnp.bfloat16), run("xla", jnp.bfloat16)
    exact, exact_lse = run("xla", jnp.float32)
    assert_as_good_as(out, low, exact, what="out")
    assert_matches(lse, exact_lse, tol=2e-5, what="lse")


@gpu
@pytest.mark.parametrize("paged", [False, True], ids=["flat", "paged"])
@pytest.mark.parametrize(("heads", "queries"), [(16, 1), (8, 4), (128, 1), (24, 2)])
def test_records(heads: int, queries: int, paged: bool, rng: np.random.Generator) -> None:
    q, k, lengths = inputs(rng, b=7, t=queries, s=768, n=heads)
    k = jnp.nan_to_num(k)
    if paged:
        order = jnp.asarray(rng.permutation(7 * 12 + 2)[: 7 * 12].reshape(7, 12), jnp.int32)
        cache: Any = PagedCache.empty(7 * 12 + 2, 64, 7, 12, fp8=True)
        cache = dataclasses.replace(cache, page_table=order).append(k)
    else:
        cache = FlatCache.empty(7, 768, fp8=True).append(k)
    cache = dataclasses.replace(cache, lengths=lengths)

    def run(implementation: str, dtype: Any) -> Any:
        call = functools.partial(mqa_decode, return_lse=True, implementation=implementation)
        return call(q.astype(dtype), cache)

    (out, lse), (low, _) = run("cuda", jnp.bfloat16), run("xla", jnp.bfloat16)
    exact, exact_lse = run("xla", jnp.float32)
    assert_as_good_as(out, low, exact, what="out")
    assert_matches(lse, exact_lse, tol=5e-3, what="lse")


@gpu
@pytest.mark.parametrize("heads", [4, 64])
def test_infinities_reach_the_queries_that_see_them(heads: int, rng: np.random.Generator) -> None:
    """Query t of four sees one key more than the query before."""
    q, k, _ = inputs(rng, b=1, t=4, s=300, n=heads)
    for key in (297, 298, 299):
        out = mqa_decode(q, k.at[0, key, 0, 5].set(jnp.inf), implementation="cuda")
        seen = ~np.isfinite(np.asarray(out, np.float32)).all(-1)[0]
        np.testing.assert_array_equal(seen.all(1), np.arange(4) >= key - 296)
        np.testing.assert_array_equal(seen.any(1), np.arange(4) >= key - 296)


@gpu
def test_in_a_replayed_program(rng: np.random.Generator) -> None:
    """XLA replays programs as CUDA graphs: new lengths must give new work ranges."""
    program = jax.jit(lambda *a: mqa_decode(*a[:2], key_value_seq_lengths=a[2]) * 2)
    for _ in range(6):
        args = inputs(rng, b=9, t=1, s=3000, n=64)
        want = mqa_decode(*args[:2], key_value_seq_lengths=args[2], implementation="cuda") * 2
        np.testing.assert_array_equal(np.asarray(program(*args)), np.asarray(want))


@gpu
@pytest.mark.parametrize("heads", [16, 128])
def test_repeats_itself(heads: int, rng: np.random.Generator) -> None:
    q, k, lengths = inputs(rng, b=30, t=1, s=2500, n=heads)
    call = functools.partial(mqa_decode, key_value_seq_lengths=lengths, implementation="cuda")
    first = call(q, k)
    for keys in (k, k, jnp.nan_to_num(k)):
        np.testing.assert_array_equal(np.asarray(call(q, keys)), np.asarray(first))


@gpu
def test_batch_invariance(rng: np.random.Generator) -> None:
    q, k, lengths = inputs(rng, b=20, t=1, s=2000, n=128)
    cache = FlatCache(k, lengths)
    call = functools.partial(mqa_decode, batch_invariant=True, implementation="cuda")
    whole = np.asarray(call(q, cache))
    for b in (0, 7, 19):
        own = call(q[b : b + 1], FlatCache(k[b : b + 1], lengths[b : b + 1]))
        np.testing.assert_array_equal(np.asarray(own)[0], whole[b])


@gpu
@pytest.mark.parametrize("empty", ["s", "t", "b"])
@pytest.mark.parametrize("heads", [16, 64])
def test_empty_axes(empty: str, heads: int) -> None:
    shape = {"b": 2, "t": 3, "s": 5} | {empty: 0}
    q = jnp.ones((shape["b"], shape["t"], heads, 576), jnp.bfloat16)
    k = jnp.ones((shape["b"], shape["s"], 1, 576), jnp.bfloat16)
    out, lse = mqa_decode(q, k, return_lse=True, implementation="cuda")
    assert out.shape == (shape["b"], shape["t"], heads, 512)
    assert np.all(np.asarray(out, np.float32) == 0) and np.all(np.asarray(lse) == -np.inf)


@gpu
def test_under_vmap(rng: np.random.Generator) -> None:
    """Each entry has its own page pool, or all share one."""
    pages = jnp.asarray(rng.standard_normal((3, 9, 64, 1, 576)), jnp.bfloat16)
    table = jnp.asarray(rng.permutation(9)[:8].reshape(2, 4), jnp.int32)
    q = jnp.asarray(rng.standard_normal((3, 2, 1, 64, 576)), jnp.bfloat16)
    lengths = jnp.array([200, 77], jnp.int32)

    def one(q: Any, pages: Any) -> Any:
        return mqa_decode(q, PagedCache(pages, table, lengths), implementation="cuda")

    for axes, given in (((0, 0), pages), ((0, None), pages[0])):
        got = jax.vmap(one, in_axes=axes)(q, given)
        for i in range(3):
            want = one(q[i], pages[i] if axes[1] == 0 else given)
            assert_matches(got[i].astype(jnp.float32), want.astype(jnp.float32), tol=1e-2)


@gpu
def test_gradients(rng: np.random.Generator) -> None:
    """The backward pass runs in XLA and uses the kernel's results."""
    q, k, lengths = inputs(rng, b=3, t=2, s=300, n=64)

    def loss(implementation: str | None, dtype: Any) -> Any:
        def f(q: Any, k: Any) -> Any:
            held = {"key_value_seq_lengths": lengths, "return_lse": True}
            out, lse = mqa_decode(q, k, **held, implementation=implementation)
            return jnp.sin(out.astype(jnp.float32)).sum() + jnp.where(lse > LEAST, lse, 0).sum()

        return jax.grad(f, (0, 1))(q.astype(dtype), jnp.nan_to_num(k).astype(dtype))

    got, low, exact = loss(None, q.dtype), loss("xla", q.dtype), loss("xla", jnp.float32)
    for g, lo, ex in zip(got, low, exact, strict=True):
        assert_as_good_as(g, lo, ex, factor=4.0)


@gpu
def test_more_than_2_31_key_elements() -> None:
    keys = 3_800_000
    k = jax.random.normal(jax.random.key(0), (1, keys, 1, 576), jnp.bfloat16)
    q = jax.random.normal(jax.random.key(1), (1, 1, 64, 576), jnp.bfloat16)
    got = mqa_decode(q, k, starts=jnp.array([keys - 500]), implementation="cuda")
    want = mqa_decode(q, k[:, -500:], implementation="cuda")
    assert_matches(got.astype(jnp.float32), want.astype(jnp.float32), tol=1e-2)


def operands(**changes: Any) -> Operands:
    shapes = {"q": (5, 2, 64, 576), "k": (5, 90, 1, 576)} | changes
    dtype = shapes.pop("dtype", jnp.bfloat16)
    own = {"k": shapes.pop("k_dtype", dtype)}
    x = {n: jax.ShapeDtypeStruct(s, own.get(n, dtype)) for n, s in shapes.items()}
    each = jnp.zeros((5, 2), jnp.int32)
    table = x.get("page_table")
    return Operands(x["q"], x["k"], x.get("v"), each, each, None, table)  # type: ignore[arg-type]


LATENT = Options(0.1, 512, None, normalize=True)


def test_supported_calls() -> None:
    separate = {"q": (5, 2, 8, 128), "k": (5, 9, 2, 128), "v": (5, 9, 2, 128)}
    own = Options(0.1, 128, None, normalize=True)
    assert cuda.supports(LATENT, operands()) is None
    assert cuda.supports(own, operands(**separate)) is None
    assert cuda.supports(LATENT, operands(k=(5, 90, 1, 656), k_dtype=jnp.uint8)) is None
    for options, x, why in (
        (LATENT, operands(dtype=jnp.float16), "bfloat16, got float16"),
        (LATENT, operands(q=(5, 2, 64, 128), k=(5, 9, 1, 128)), "D=128 and value_dim=512"),
        (Options(0.1, 500, None, normalize=True), operands(), "value_dim=500"),
        (own, operands(**separate | {"v": (5, 9, 2, 64)}), "D=128 and E=64"),
        (Options(0.0, 512, None, normalize=True), operands(), "scale > 0"),
        (LATENT, operands(q=(5, 2, 0, 576)), "at least one head"),
        (LATENT, operands(k=(5, 2**31 - 30, 1, 576)), "keys"),
        (
            dataclasses.replace(LATENT, page_size=64),
            operands(k=(1, 640, 1, 576), page_table=(5, 2**25)),
            "keys",
        ),
        (
            LATENT,
            operands(q=(5, 2, 64, 512), k=(5, 90, 1, 584), k_dtype=jnp.uint8),
            "records of 656 bytes, got 584",
        ),
    ):
        assert why in (cuda.supports(options, x) or "")


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_ffi_calls(batch_invariant: bool, normalize: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With batch_invariant, each request is a call of its own."""
    calls: list[Any] = []

    def call(target: str, operands: Any, avals: Any, **attrs: Any) -> Any:
        calls.append((operands[0].shape, [a.shape for a in avals], attrs))
        return [jnp.zeros(a.shape, a.dtype) for a in avals]

    extension = SimpleNamespace(mqa_decode_workspace=lambda **_: (1000, 132))
    monkeypatch.setattr(cuda, "ffi", SimpleNamespace(call=call, extension=lambda: extension))
    x = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), operands())
    dtype = jnp.bfloat16 if normalize else jnp.float32
    row = jax.ShapeDtypeStruct((5, 2, 64), jnp.float32)
    out = jax.ShapeDtypeStruct((5, 2, 64, 512), dtype)
    avals: Any = Results(out, row, row)  # type: ignore[arg-type]
    options = Options(
        0.1, 512, None, normalize=normalize, page_size=7, batch_invariant=batch_invariant
    )
    got = cuda.mqa_decode_fwd(options, avals, x)
    assert jax.tree.map(lambda a: (a.shape, a.dtype), got) == jax.tree.map(
        lambda a: (a.shape, a.dtype), avals
    )
    b = 1 if batch_invariant else 5
    (shape, shapes, attrs), *more = calls
    assert not more and shape == (b, 2, 64, 576)
    assert shapes == [(b, 2, 64, 512), (b, 2, 64), (b, 2, 64), (1000, 512), (1000, 2), (132, 2)]
    assert attrs == {"scale": np.float32(0.1), "page_size": 7, "exact_max": True}


def test_workspace() -> None:
    """Each CTA of a device with 132 SMs has two partial results; 264 CTAs may split work tiles."""
    extension = pytest.importorskip("jax_dsa._cuda", reason="built without the extension")

    def workspace(queries: int, heads: int, groups: int, dim: int, records: bool) -> Any:
        return extension.mqa_decode_workspace(
            queries=queries, heads=heads, groups=groups, dim=dim, records=records
        )

    assert workspace(1, 128, 1, 576, False) == (2 * 132 * 64, 264)
    assert workspace(4, 8, 1, 576, False) == (2 * 264 * 32, 264)
    assert workspace(4, 8, 1, 576, True) == (2 * 132 * 64, 264)
    assert workspace(4, 8, 2, 576, True) == (2 * 264 * 16, 264)
    assert workspace(8, 128, 1, 128, False) == (2 * 264 * 32, 264)
