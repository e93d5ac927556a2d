"""Tests `sparse_attention_decode` against NumPy float64 and against `sparse_attention`."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.compare import assert_matches
from support.marks import slow
from support.oracles import mqa_decode as pages_oracle
from support.oracles import sparse_attention as oracle
from support.sparse_attention import sizes_of_intermediates

from jax_dsa import (
    FlatCache,
    PagedCache,
    plain_xla,
    quantize_fp8,
    sparse_attention,
    sparse_attention_decode,
)
from jax_dsa.core import streaming

f32 = np.float32
B, T, N, G, D, E, K, S = 4, 2, 4, 2, 6, 5, 3, 24
INT_MIN, INT_MAX = -(2**31), 2**31 - 1
CAUSAL = {"is_causal": True}
FORCED = {**CAUSAL, "sink_blocks": 1, "local_blocks": 2}

both = functools.partial(sparse_attention_decode, return_lse=True)


def three(*args: Any, **options: Any) -> tuple[jax.Array, ...]:
    return both(*args, return_max_logit=True, **options)


def caches(kind: str, rng: np.random.Generator, lengths: Any, page: int = 4) -> tuple[Any, Any]:
    """Returns a pair of caches. Of the pages, some are shared by requests and some are missing."""
    lengths = np.array(lengths, np.int32)
    if kind == "flat":
        k, v = (rng.normal(size=(B, S, G, d)).astype(f32) for d in (D, E))
        return FlatCache(k, lengths), FlatCache(v, lengths)
    pages = 9
    table = rng.integers(0, pages, size=(B, S // page)).astype(np.int32)
    table[0, 1], table[1, 0], table[3, 2] = -1, pages, INT_MIN
    k, v = (rng.normal(size=(pages, page, G, d)).astype(f32) for d in (D, E))
    return PagedCache(k, table, lengths), PagedCache(v, table, lengths)


def rows(cache: Any) -> np.ndarray:
    return cache.data if isinstance(cache, FlatCache) else cache.pages


def with_rows(cache: Any, new: Any) -> Any:
    name = "data" if isinstance(cache, FlatCache) else "pages"
    return dataclasses.replace(cache, **{name: new})


def queries(rng: np.random.Generator, size: int, *shared: bool) -> tuple[np.ndarray, np.ndarray]:
    """Returns q and indices with duplicates and every kind of invalid number."""
    q = rng.normal(size=(B, T, N, D)).astype(f32)
    blocks = -(-S // size)
    shape = (B, T, *([] if shared else [G]), K)
    bad = np.array([INT_MIN, -1, blocks, INT_MAX], np.int32)
    indices = rng.integers(0, blocks, size=shape)
    indices = np.where(rng.random(shape) < 0.3, rng.choice(bad, shape), indices)
    return q, indices.astype(np.int32)


def expected(q: Any, k: Any, v: Any, indices: Any, **options: Any) -> tuple[Any, dict[str, Any]]:
    """Returns the arguments of the oracle."""
    options["query_start"] = np.maximum(k.lengths, 0).astype(np.int64) - T
    options["key_value_seq_lengths"] = k.lengths
    if isinstance(k, FlatCache):
        return (q, k.data, v.data, indices), options
    (keys, exists), (values, _) = (
        pages_oracle.unpaged(x.pages, np.asarray(x.page_table)) for x in (k, v)
    )
    return (q, keys, values, indices), options | {"exists": exists}


def in_pages(rows: np.ndarray, cache: PagedCache, exists: np.ndarray) -> np.ndarray:
    """Returns the sums of rows [B, S, ...] over the requests that have a row's page."""
    total = np.zeros((*np.shape(cache.pages)[:2], *rows.shape[2:]))
    page = total.shape[1]
    for b, s in np.ndindex(*rows.shape[:2]):
        if exists[b, s]:
            total[cache.page_table[b, s // page], s % page] += rows[b, s]
    return total


def check(rng: np.random.Generator, args: tuple, options: dict[str, Any]) -> None:
    """Compares results and gradients with the oracle."""
    q, k, v, indices = args
    oracle_args, which = expected(*args, **options)
    want = oracle.sparse_attention(*oracle_args, **which)
    assert_matches(
        jax.jit(functools.partial(three, **options))(*args), [x.astype(f32) for x in want], 1e-5
    )
    dout, dlse = (rng.normal(size=x.shape).astype(f32) for x in want[:2])
    sinks = options.get("sinks")

    @jax.jit
    def grads(q: Any, a: Any, b: Any, sinks: Any) -> Any:
        def fn(q: Any, a: Any, b: Any, sinks: Any) -> Any:
            caches = with_rows(k, a), with_rows(v, b)
            return both(q, *caches, indices, **{**options, "sinks": sinks})

        return jax.vjp(fn, q, a, b, sinks)[1]((dout, dlse))

    got = grads(q, rows(k), rows(v), sinks)
    dq, dk, dv, dsinks = oracle.sparse_attention_grads(*oracle_args, dout, dlse, **which)
    if isinstance(k, PagedCache):
        dk, dv = (in_pages(d, k, which["exists"]) for d in (dk, dv))
    exact = (dq, dk, dv) if sinks is None else (dq, dk, dv, dsinks)
    assert_matches(jax.tree.leaves(got), [x.astype(f32) for x in exact], 1e-5)


# The kind of cache, its page size, the size of a block and options.
CASES: dict[str, tuple[str, int, int, dict[str, Any]]] = {
    "flat": ("flat", 0, 4, {}),
    "flat, forced": ("flat", 0, 16, FORCED),
    "flat, tail": ("flat", 0, 4, {**CAUSAL, "tail_block": True, "topk_length": True}),
    "paged": ("paged", 4, 4, CAUSAL),
    "small pages": ("paged", 4, 16, {**FORCED, "sinks": True}),
    "large pages": ("paged", 8, 4, {**FORCED, "topk_length": True}),
    "neither divides": ("paged", 6, 4, {**CAUSAL, "tail_block": True, "sinks": True}),
    "all local": ("paged", 6, 16, {**CAUSAL, "local_blocks": 99}),
    "one key": ("paged", 4, 1, {**FORCED, "scale": 0.3}),
}
FAST = "flat, tail", "neither divides"


@pytest.mark.parametrize("name", [name if name in FAST else slow(name) for name in CASES])
@pytest.mark.parametrize("lengths", [(S, 9, 1, 14), slow((S + 5, 0, -3, INT_MAX))])
def test_equals_the_oracle(name: str, lengths: tuple, rng: np.random.Generator) -> None:
    kind, page, size, options = CASES[name]
    options = dict(options)
    if "topk_length" in options:
        options["topk_length"] = rng.integers(-1, K + 2, size=(B, T)).astype(np.int32)
    if "sinks" in options:
        options["sinks"] = np.array([np.inf, -np.inf, 0.5, 3], f32)
    q, indices = queries(rng, size, *([True] if name in ("paged", "one key") else []))
    pair = caches(kind, rng, lengths, page)
    check(rng, (q, *pair, indices), {"block_size": size, **options})


@pytest.mark.parametrize("kind", ["flat", slow("paged")])
def test_equals_sparse_attention(kind: str, rng: np.random.Generator) -> None:
    """The newest tokens are the last queries of the sequence."""
    length = 19
    k, v = (rng.normal(size=(1, length, G, d)).astype(f32) for d in (D, E))
    q = rng.normal(size=(1, length, N, D)).astype(f32)
    indices = rng.integers(-1, 6, size=(1, length, G, K)).astype(np.int32)
    if kind == "flat":
        empty = [FlatCache.empty(1, S, d, groups=G, dtype=jnp.float32) for d in (D, E)]
    else:
        table = jnp.asarray([[3, 0, 1, 4, 6]])
        empty = [PagedCache.empty(7, 5, 1, 5, d, groups=G, dtype=jnp.float32) for d in (D, E)]
        empty = [x.with_page_table(table) for x in empty]
    pair = [cache.append(x) for cache, x in zip(empty, (k, v), strict=True)]
    options = {"block_size": 4, **FORCED}
    want = sparse_attention(q, k, v, indices, return_lse=True, return_max_logit=True, **options)
    got = three(q[:, -3:], *pair, indices[:, -3:], **options)
    assert_matches(got, [x[:, -3:] for x in want], 1e-5)
    one = jax.tree.map(lambda x: x[0], pair)
    if kind == "paged":
        one = [dataclasses.replace(x, pages=y.pages) for x, y in zip(one, pair, strict=True)]
    alone = three(q[0, -3:], *one, indices[0, -3:], **options)
    assert_matches(alone, [x[0, -3:] for x in want], 1e-5)


@pytest.mark.parametrize("kind", [slow("flat"), "paged"])
def test_only_rows_that_are_seen_are_read(kind: str, rng: np.random.Generator) -> None:
    q, indices = queries(rng, 4)
    k, v = caches(kind, rng, (S, 9, 1, 14))
    options = {"block_size": 4, **CAUSAL, "sink_blocks": 1}
    oracle_args, which = expected(q, k, v, indices, **options)
    seen = np.zeros((*oracle_args[1].shape[:2], G), bool)
    for (b, _, _), g, keys in oracle.selections(*oracle_args[:2], indices, **which):
        seen[b, keys, g] = True
    if kind == "paged":
        seen = in_pages(seen.astype(f32), k, which["exists"]) > 0
    assert not seen.all()
    dirty = [with_rows(x, np.where(seen[..., None], rows(x), np.nan)) for x in (k, v)]
    want = three(q, k, v, indices, **options)
    assert_matches(three(q, *dirty, indices, **options), want, 0)

    def grads(k: Any, v: Any) -> Any:
        def loss(q: Any, a: Any, b: Any) -> Any:
            pair = with_rows(k, a), with_rows(v, b)
            return sparse_attention_decode(q, *pair, indices, **options).sum()

        return jax.grad(loss, (0, 1, 2))(q, rows(k), rows(v))

    assert_matches(grads(*dirty), grads(k, v), 0)


@pytest.mark.parametrize("paged", [slow(False), True])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, slow(jnp.float32)])
def test_fp8(paged: bool, dtype: Any, rng: np.random.Generator) -> None:
    """Caches of codes and their scales give what the caches of the products give."""
    q, indices = queries(rng, 4)
    pair = caches("paged" if paged else "flat", rng, (S, 9, 1, 14))
    codes, scales, products = [], [], []
    for cache in pair:
        code, scale = quantize_fp8(rows(cache), block=(1, rows(cache).shape[-1]))
        codes.append(with_rows(cache, code))
        scales.append(scale[..., 0])
        products.append(with_rows(cache, (code.astype(jnp.float32) * scale).astype(dtype)))
    options = {"block_size": 4, **FORCED}
    low = jnp.asarray(q, dtype)
    want, pull = jax.vjp(lambda q: both(q, *products, indices, **options), low)

    def call(q: Any, codes: Any, scales: Any) -> Any:
        pairs = dict(zip(("k_scale", "v_scale"), scales, strict=True))
        return both(q, *codes, indices, **pairs, **options)

    got, own_pull = jax.vjp(lambda q: call(q, codes, scales), low)
    assert_matches(got, want, 1e-6)
    assert_matches(own_pull(want), pull(want), 1e-6)
    constant = jax.grad(lambda s: call(low, codes, s)[0].astype(jnp.float32).sum())
    with plain_xla():
        assert all(not x.any() for x in constant(scales))
    assert all(not x.any() for x in constant(scales))
    ones = [jnp.ones_like(x) for x in scales]
    without = both(low, *codes, indices, **options)
    assert_matches(without, call(low, codes, ones), 0)


@pytest.mark.parametrize("kind", ["flat", slow("paged")])
def test_batch_invariance(kind: str, rng: np.random.Generator) -> None:
    """A request has the same bits in every batch."""
    q, indices = queries(rng, 4)
    pair = caches(kind, rng, (S, 9, 1, 14))
    run = jax.jit(functools.partial(three, block_size=4, batch_invariant=True, **FORCED))
    whole = run(q, *pair, indices)
    assert_matches(whole, three(q, *pair, indices, block_size=4, **FORCED), 1e-6)

    def first(cache: Any, count: int) -> Any:
        if isinstance(cache, FlatCache):
            return jax.tree.map(lambda x: x[:count], cache)
        few = cache.page_table[:count], cache.lengths[:count]
        return dataclasses.replace(cache, page_table=few[0], lengths=few[1])

    for count in (1, 3):
        got = run(q[:count], *(first(x, count) for x in pair), indices[:count])
        for x, y in zip(got, whole, strict=True):
            np.testing.assert_array_equal(x, y[:count])


@pytest.mark.parametrize("paged", [slow(False), True])
def test_chunks(paged: bool, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 3 of the 8 queries and a remainder of 2 give what a single chunk gives."""
    q, indices = queries(rng, 4)
    k, v = caches("paged" if paged else "flat", rng, (S, 9, 1, 14))
    sinks = rng.normal(size=N).astype(f32)
    options = {"block_size": 4, **FORCED}

    def run(q: Any, a: Any, b: Any, sinks: Any) -> Any:
        def fn(q: Any, a: Any, b: Any, sinks: Any) -> Any:
            return three(q, with_rows(k, a), with_rows(v, b), indices, sinks=sinks, **options)

        results, pull = jax.vjp(fn, q, a, b, sinks)
        return results, pull(tuple(jnp.where(jnp.isinf(x), 0, x) for x in results))

    args = q, rows(k), rows(v), sinks
    want = jax.jit(run)(*args)
    # The gathered rows of 3 queries, with one query as a batch entry.
    per_query = (K + 3) * (4 * (G * (D + E) * 4 + N * 12) + G * 3)
    monkeypatch.setattr(streaming, "BUDGET", 3 * per_query + 1)
    monkeypatch.setattr(streaming, "CACHED", 1)
    jax.clear_caches()
    assert_matches(jax.jit(lambda *x: run(*x))(*args), want, 1e-5)


def test_no_array_holds_the_rows_of_all_requests() -> None:
    """The largest intermediate has at most the bytes of the budget."""
    b, s, size, slots, dim = 256, 512, 128, 32, 128
    cache = FlatCache(
        jax.ShapeDtypeStruct((b, s, 2, dim), jnp.bfloat16), jax.ShapeDtypeStruct((b,), jnp.int32)
    )
    q = jax.ShapeDtypeStruct((b, 1, 16, dim), jnp.bfloat16)
    indices = jax.ShapeDtypeStruct((b, 1, slots), jnp.int32)
    call = functools.partial(sparse_attention_decode, block_size=size, **CAUSAL)
    sizes = sizes_of_intermediates(call, q, cache, cache, indices)
    assert len(sizes) > 50
    assert max(sizes) <= streaming.BUDGET < b * slots * size * dim * 2


def test_vmap_of_pools(rng: np.random.Generator) -> None:
    """The mapped calls have a pool each, or they share one."""
    samples = [caches("paged", rng, (S, 9, 1, 14)) for _ in range(2)]
    q, indices = (np.stack(x) for x in zip(*(queries(rng, 4) for _ in range(2)), strict=True))
    call = functools.partial(three, block_size=4, **FORCED)
    pair = jax.tree.map(lambda *x: jnp.stack(x), *samples)
    got = jax.vmap(call)(q, *pair, indices)
    shared = jax.vmap(call, in_axes=(0, None, None, 0))(q, *samples[0], indices)
    for i in range(2):
        assert_matches([x[i] for x in got], call(q[i], *samples[i], indices[i]), 1e-6)
        assert_matches([x[i] for x in shared], call(q[i], *samples[0], indices[i]), 1e-6)


@pytest.mark.parametrize("empty", ["B", "T", "S", "K", "P"])
def test_empty_arrays(empty: str) -> None:
    size = {"B": B, "T": T, "S": S, "K": K, "P": 3, empty: 0}
    lengths = jnp.full(size["B"], 7, jnp.int32)
    if empty == "P":
        table = jnp.zeros((B, 2), jnp.int32)
        pair = [PagedCache(jnp.ones((0, 4, G, d)), table, lengths) for d in (D, E)]
    else:
        pair = [FlatCache(jnp.ones((size["B"], size["S"], G, d)), lengths) for d in (D, E)]
    q = jnp.ones((size["B"], size["T"], N, D))
    indices = jnp.zeros((size["B"], size["T"], size["K"]), jnp.int32)

    def total(q: Any, k: Any, v: Any) -> Any:
        pairs = with_rows(pair[0], k), with_rows(pair[1], v)
        out, lse = both(q, *pairs, indices, block_size=4)
        assert out.shape == (*q.shape[:3], E) and lse.shape == q.shape[:3]
        return out.sum()

    for gradient in jax.grad(total, (0, 1, 2))(q, rows(pair[0]), rows(pair[1])):
        assert not gradient.any()
