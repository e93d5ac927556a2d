"""The sparse MLA kernels (forward, backward, decode) against the XLA implementation in float32."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.compare import assert_as_good_as, assert_matches

from jax_dsa import FlatCache, PagedCache, sparse_mla, sparse_mla_decode

pytestmark = pytest.mark.gpu

INT_MIN, INT_MAX = -(2**31), 2**31 - 1


def inputs(
    rng: np.random.Generator, *, b: int = 2, t: int, s: int, n: int, g: int = 1, d: int, k: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns bfloat16 q and kv, and indices.

    The indices contain duplicates, every kind of invalid index, and a row of only invalid ones.
    Keys that nothing selects are NaN.
    """
    q = rng.standard_normal((b, t, n, d), np.float32)
    kv = rng.standard_normal((b, s, g, d), np.float32)
    indices = rng.integers(0, max(s - 2, 1), (b, t, g, k)).astype(np.int32)
    bad = np.array([INT_MIN, -1, s, INT_MAX], np.int32)
    hit = rng.random(indices.shape) < 0.1
    indices[hit] = rng.choice(bad, hit.sum())
    indices[0, t // 2] = rng.choice(bad, indices[0, 0].shape)
    kv[:, max(s - 2, 1) :] = np.nan
    return jnp.asarray(q, jnp.bfloat16), jnp.asarray(kv, jnp.bfloat16), jnp.asarray(indices)


def compare(q: jax.Array, kv: jax.Array, indices: jax.Array, **options: Any) -> None:
    # All arrays are arguments, because XLA would spend minutes folding large constants.
    @functools.partial(jax.jit, static_argnums=0)
    def run(implementation: str, *arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
        return sparse_mla(*arrays, return_lse=True, implementation=implementation, **options)

    out, lse = run("cuda", q, kv, indices)
    low, _ = run("xla", q, kv, indices)
    exact, exact_lse = run("xla", q.astype(jnp.float32), kv.astype(jnp.float32), indices)
    assert out.dtype == jnp.bfloat16 and lse.dtype == jnp.float32
    assert_as_good_as(out, low, exact, what="out")
    assert_matches(lse, exact_lse, tol=2e-5, what="lse")


SHAPES = {
    "one query": {"t": 1, "s": 300, "n": 128, "d": 576, "k": 100},
    "no tile is whole": {"t": 62, "s": 777, "n": 64, "d": 576, "k": 130},
    "D 512": {"t": 213, "s": 500, "n": 128, "d": 512, "k": 256},
    "few heads": {"t": 33, "s": 400, "n": 5, "d": 576, "k": 64},
    "one head": {"t": 33, "s": 400, "n": 1, "d": 512, "k": 65},
    "16 heads": {"t": 70, "s": 4096, "n": 16, "d": 576, "k": 2048},
    "32 heads": {"t": 300, "s": 400, "n": 32, "d": 576, "k": 200},
    "96 heads": {"t": 9, "s": 400, "n": 96, "d": 576, "k": 192},
    "groups": {"t": 20, "s": 300, "n": 32, "g": 2, "d": 576, "k": 70},
    "K 2048": {"t": 70, "s": 4096, "n": 128, "d": 576, "k": 2048},
    "more slots than keys": {"t": 8, "s": 20, "n": 64, "d": 576, "k": 200},
    "one slot": {"t": 8, "s": 20, "n": 64, "d": 576, "k": 1},
    "many queries": {"b": 1, "t": 70000, "s": 2000, "n": 8, "d": 512, "k": 16},
}


@pytest.mark.parametrize("name", SHAPES)
def test_shapes(name: str, rng: np.random.Generator) -> None:
    compare(*inputs(rng, **SHAPES[name]))


@pytest.mark.parametrize("heads", [16, 32, 64])
def test_options(heads: int, rng: np.random.Generator) -> None:
    q, kv, indices = inputs(rng, t=62, s=500, n=heads, d=576, k=300)
    length = jnp.asarray(rng.integers(-1, 320, (2, 62)), jnp.int32)
    sinks = rng.standard_normal(heads).astype(np.float32)
    sinks[:2] = -np.inf, np.inf
    compare(q, kv, indices, scale=0.01)
    compare(q, kv, indices, is_causal=True, query_start=100)
    compare(q, kv, indices, is_causal=True, query_start=jnp.array([3, 400]), key_stride=2)
    compare(q, kv, indices, topk_length=length)
    compare(q, kv, indices, sinks=jnp.asarray(sinks), topk_length=length)


@pytest.mark.parametrize("empty", ["k", "s", "t", "b"])
def test_empty_axes(empty: str, rng: np.random.Generator) -> None:
    shape = {"b": 2, "t": 3, "s": 5, "n": 64, "d": 576, "k": 4} | {empty: 0}
    q = jnp.ones((shape["b"], shape["t"], shape["n"], 576), jnp.bfloat16)
    kv = jnp.ones((shape["b"], shape["s"], 1, 576), jnp.bfloat16)
    indices = jnp.zeros((shape["b"], shape["t"], 1, shape["k"]), jnp.int32)
    out, lse = sparse_mla(q, kv, indices, return_lse=True, implementation="cuda")
    assert out.shape == (shape["b"], shape["t"], shape["n"], 512)
    assert np.all(np.asarray(out, np.float32) == 0) and np.all(np.asarray(lse) == -np.inf)


def test_no_heads() -> None:
    """XLA computes this case; the kernel refuses it."""
    q, kv = jnp.ones((2, 3, 0, 576), jnp.bfloat16), jnp.ones((2, 5, 1, 576), jnp.bfloat16)
    indices = jnp.zeros((2, 3, 1, 4), jnp.int32)
    assert sparse_mla(q, kv, indices).shape == (2, 3, 0, 512)
    with pytest.raises(NotImplementedError, match="at least one head"):
        sparse_mla(q, kv, indices, implementation="cuda")


@pytest.mark.parametrize("heads", [16, 128])
def test_repeats_and_ignores_keys_that_nothing_selects(
    heads: int, rng: np.random.Generator
) -> None:
    q, kv, indices = inputs(rng, t=100, s=1000, n=heads, d=576, k=640)
    first = sparse_mla(q, kv, indices, return_lse=True, implementation="cuda")
    clean = jnp.nan_to_num(kv)
    for keys in (kv, kv, kv, clean):
        again = sparse_mla(q, keys, indices, return_lse=True, implementation="cuda")
        jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b), first, again)


def test_in_a_replayed_program(rng: np.random.Generator) -> None:
    """XLA records programs into CUDA graphs and replays them: new inputs must give new results."""
    program = jax.jit(lambda *a: sparse_mla(*a, implementation="cuda") * 2)
    for _ in range(6):
        args = inputs(rng, t=16, s=200, n=64, d=576, k=64)
        want = sparse_mla(*args, implementation="cuda") * 2
        np.testing.assert_array_equal(np.asarray(program(*args)), np.asarray(want))


def gradients(
    implementation: str,
    dtype: Any,
    q: Any,
    kv: Any,
    indices: Any,
    sinks: Any = None,
    **options: Any,
) -> tuple[jax.Array, ...]:
    """Returns the gradients of a loss of both out and lse."""

    @jax.jit
    @functools.partial(jax.grad, argnums=(0, 1) if sinks is None else (0, 1, 2))
    def gradient(q: jax.Array, kv: jax.Array, sinks: Any) -> jax.Array:
        out, lse = sparse_mla(
            q, kv, indices, sinks=sinks, return_lse=True, implementation=implementation, **options
        )
        lse = jnp.where(jnp.isfinite(lse), lse, 0)
        return jnp.sin(out.astype(jnp.float32) * 3).sum() + jnp.cos(lse).sum()

    return gradient(q.astype(dtype), kv.astype(dtype), sinks)


def compare_gradients(*args: Any, deterministic: bool = False, **options: Any) -> None:
    got = gradients("cuda", jnp.bfloat16, *args, deterministic=deterministic, **options)
    low = gradients("xla", jnp.bfloat16, *args, **options)
    exact = gradients("xla", jnp.float32, *args, **options)
    for name, g, lo, ex in zip(("dq", "dkv", "dsinks"), got, low, exact, strict=False):
        assert g.dtype == lo.dtype
        assert_as_good_as(g, lo, ex, factor=4.0, what=name)


BACKWARD_SHAPES = {name: x for name, x in SHAPES.items() if name != "many queries"} | {
    "several batch entries": {"b": 5, "t": 7, "s": 300, "n": 128, "d": 576, "k": 200},
    "160 heads": {"t": 5, "s": 300, "n": 160, "d": 576, "k": 200},
    "packed queries": {"t": 64, "s": 900, "n": 16, "d": 576, "k": 500},
    "packed, 8 heads": {"t": 48, "s": 400, "n": 8, "d": 512, "k": 300},
    "packed, windows": {"t": 30, "s": 30000, "n": 32, "d": 576, "k": 700},
    "windows of the keys": {"t": 9, "s": 30000, "n": 64, "d": 576, "k": 700},
    "windows, 128 heads": {"t": 5, "s": 30000, "n": 128, "d": 512, "k": 1100},
    "many queries": {"b": 1, "t": 70000, "s": 200, "n": 2, "d": 512, "k": 4},
}


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", BACKWARD_SHAPES)
def test_gradients(name: str, deterministic: bool, rng: np.random.Generator) -> None:
    compare_gradients(*inputs(rng, **BACKWARD_SHAPES[name]), deterministic=deterministic)


def test_gradients_with_options(rng: np.random.Generator) -> None:
    q, kv, indices = inputs(rng, t=62, s=500, n=64, d=576, k=300)
    length = jnp.asarray(rng.integers(-1, 320, (2, 62)), jnp.int32)
    sinks = rng.standard_normal(64).astype(np.float32)
    sinks[:2] = -np.inf, np.inf
    compare_gradients(q, kv, indices, is_causal=True, query_start=100, topk_length=length)
    compare_gradients(q, kv, indices, jnp.asarray(sinks), scale=0.02, topk_length=length)


@pytest.mark.parametrize("heads", [16, 64, 128])
def test_gradients_of_neighboring_queries(heads: int, rng: np.random.Generator) -> None:
    """Queries of up to 64 heads share the sums of common keys, sorted as by top-k or unsorted."""
    q, kv, _ = inputs(rng, t=63, s=700, n=heads, d=576, k=8)
    scores = rng.standard_normal((2, 1, 698)) + 0.5 * rng.standard_normal((2, 63, 698))
    picks = np.sort(np.argsort(-scores)[:, :, :300])[:, :, None].astype(np.int32)
    common = [
        len(np.intersect1d(a, b)) for a, b in zip(picks[0, ::2], picks[0, 1::2], strict=False)
    ]
    assert min(common) >= 128
    compare_gradients(q, kv, jnp.asarray(picks))
    unsorted = rng.permuted(picks, axis=-1)
    unsorted[:, ::7, :, ::5] = -1
    compare_gradients(q, kv, jnp.asarray(unsorted))


def test_gradients_of_many_slots(rng: np.random.Generator) -> None:
    """Beyond 8192 slots, the kernel does not reorder the slots of neighboring queries."""
    for slots in (8192, 8200):
        compare_gradients(*inputs(rng, b=1, t=3, s=500, n=16, d=512, k=slots))


@pytest.mark.parametrize("empty", ["k", "s", "t", "b"])
def test_gradients_of_empty_axes(empty: str) -> None:
    shape = {"b": 2, "t": 3, "s": 5, "k": 4, "n": 64} | {empty: 0}
    q = jnp.ones((shape["b"], shape["t"], shape["n"], 576), jnp.bfloat16)
    kv = jnp.ones((shape["b"], shape["s"], 1, 576), jnp.bfloat16)
    indices = jnp.zeros((shape["b"], shape["t"], 1, shape["k"]), jnp.int32)
    for deterministic in (False, True):
        dq, dkv = gradients("cuda", q.dtype, q, kv, indices, deterministic=deterministic)
        assert not np.any(np.asarray(dq, np.float32)) and not np.any(np.asarray(dkv, np.float32))


def test_deterministic_gradients_repeat(rng: np.random.Generator) -> None:
    args = inputs(rng, t=200, s=300, n=128, d=576, k=256)
    first = gradients("cuda", jnp.bfloat16, *args, deterministic=True)
    for _ in range(3):
        again = gradients("cuda", jnp.bfloat16, *args, deterministic=True)
        jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b), first, again)


def test_default_takes_the_faster_route(rng: np.random.Generator) -> None:
    """Gradients of keys are summed by rows if the sums exceed the L2."""
    args = inputs(rng, b=1, t=64, s=40000, n=128, d=576, k=1100)
    compare_gradients(*args)
    default = gradients("cuda", jnp.bfloat16, *args)
    by_rows = gradients("cuda", jnp.bfloat16, *args, deterministic=True)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b), default, by_rows)


def test_gradients_in_a_replayed_program(rng: np.random.Generator) -> None:
    """The kernel's counters must be cleared in every replay."""

    def step(q: jax.Array, kv: jax.Array, indices: jax.Array) -> Any:
        return gradients("cuda", q.dtype, q, kv, indices, deterministic=True)

    program = jax.jit(step)
    args = inputs(rng, t=16, s=200, n=64, d=576, k=64)
    for _ in range(6):
        args = (args[0] + 1, args[1], (args[2] + 3) % 190)
        want = step(*args)
        assert_matches(program(*args), want, tol=1e-2)  # the loss may be fused differently


def test_more_than_2_31_key_elements() -> None:
    keys = 3_800_000
    kv = jax.random.normal(jax.random.key(0), (1, keys, 1, 576), jnp.bfloat16)
    q = jax.random.normal(jax.random.key(1), (1, 4, 64, 576), jnp.bfloat16)
    indices = keys - 1 - jnp.arange(4 * 128, dtype=jnp.int32).reshape(1, 4, 1, 128) * 1001
    out, lse = sparse_mla(q, kv, indices, return_lse=True, implementation="cuda")
    rows = kv[0, indices[0, :, 0], 0][:, :, None]  # makes each query's keys a batch entry
    own = jnp.broadcast_to(jnp.arange(128, dtype=jnp.int32), (4, 1, 1, 128))
    want, want_lse = sparse_mla(q[0][:, None], rows, own, return_lse=True, implementation="cuda")
    np.testing.assert_array_equal(np.asarray(out[0]), np.asarray(want[:, 0]))
    np.testing.assert_array_equal(np.asarray(lse[0]), np.asarray(want_lse[:, 0]))


def test_unsupported_calls(rng: np.random.Generator) -> None:
    q, kv, indices = inputs(rng, t=2, s=8, n=64, d=576, k=4)
    for call in (
        lambda: sparse_mla(
            q.astype(jnp.float32), kv.astype(jnp.float32), indices, implementation="cuda"
        ),
        lambda: sparse_mla(
            q[..., :500], kv[..., :500], indices, value_dim=400, implementation="cuda"
        ),
    ):
        with pytest.raises(NotImplementedError, match="implementation='xla'"):
            call()


def decode_inputs(
    rng: np.random.Generator, *, b: int, t: int, s: int, n: int, k: int
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Returns q, rows for a cache, indices with invalid ones, and the lengths of requests."""
    q, kv, indices = inputs(rng, b=b, t=t, s=s, n=n, d=576, k=k)
    lengths = jnp.asarray(rng.integers(t, s + 1, b), jnp.int32)
    return q, jnp.nan_to_num(kv), indices, lengths


DECODE_SHAPES = {
    "one request": {"b": 1, "t": 1, "s": 3000, "n": 128, "k": 2048},
    "few slots": {"b": 3, "t": 2, "s": 500, "n": 64, "k": 70},
    "many requests": {"b": 70, "t": 1, "s": 700, "n": 128, "k": 640},
    "few heads": {"b": 8, "t": 4, "s": 900, "n": 16, "k": 300},
}


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("paged", [False, True], ids=["flat", "paged"])
@pytest.mark.parametrize("name", DECODE_SHAPES)
def test_decode(name: str, paged: bool, fp8: bool, rng: np.random.Generator) -> None:
    q, rows, indices, lengths = decode_inputs(rng, **DECODE_SHAPES[name])
    b, s = rows.shape[:2]
    if paged:
        pages = -(-s // 64)
        order = jnp.asarray(
            rng.permutation(b * pages + 3)[: b * pages].reshape(b, pages), jnp.int32
        )
        cache = PagedCache.empty(b * pages + 3, 64, b, pages, fp8=fp8)
        cache = dataclasses.replace(cache, page_table=order).append(rows)
    else:
        cache = FlatCache.empty(b, s, fp8=fp8).append(rows)
    cache = dataclasses.replace(cache, lengths=lengths)

    @functools.partial(jax.jit, static_argnums=(0, 1))
    def run(implementation: str, dtype: Any) -> tuple[jax.Array, jax.Array]:
        own = cache
        if dtype == jnp.float32 and not fp8:
            own = jax.tree.map(lambda x: x.astype(dtype) if x.dtype == jnp.bfloat16 else x, cache)
        return sparse_mla_decode(
            q.astype(dtype), own, indices, return_lse=True, implementation=implementation
        )

    out, lse = run("cuda", jnp.bfloat16)
    low, _ = run("xla", jnp.bfloat16)
    exact, exact_lse = run("xla", jnp.float32)
    assert_as_good_as(out, low, exact, what="out")
    assert_matches(lse, exact_lse, tol=5e-3 if fp8 else 2e-5, what="lse")


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_decode_of_several_pools(fp8: bool, rng: np.random.Generator) -> None:
    """Under vmap each request reads the page pool of its own call."""
    calls, b, s = 3, 2, 320
    q, rows, indices, lengths = decode_inputs(rng, b=calls * b, t=1, s=s, n=16, k=70)
    pages = s // 64

    def pool(rows: jax.Array, lengths: jax.Array, order: jax.Array) -> PagedCache:
        cache = PagedCache.empty(b * pages + 1, 64, b, pages, fp8=fp8)
        cache = dataclasses.replace(cache, page_table=order).append(rows)
        return dataclasses.replace(cache, lengths=lengths)

    orders = [rng.permutation(b * pages + 1)[: b * pages].reshape(b, pages) for _ in range(calls)]
    q, rows, indices, lengths = (
        x.reshape(calls, b, *x.shape[1:]) for x in (q, rows, indices, lengths)
    )
    caches = jax.vmap(pool)(rows, lengths, jnp.asarray(np.stack(orders), jnp.int32))
    step = functools.partial(sparse_mla_decode, implementation="cuda")
    got = jax.jit(jax.vmap(step))(q, caches, indices)
    for i in range(calls):
        want = step(q[i], jax.tree.map(lambda x, i=i: x[i], caches), indices[i])
        assert_matches(got[i], want, tol=1e-2)
