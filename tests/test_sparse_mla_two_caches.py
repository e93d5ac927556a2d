"""`sparse_mla_decode` over two caches: one softmax over the keys that both lists select."""

from __future__ import annotations

import dataclasses
import functools
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.compare import assert_matches
from support.oracles import sparse_mla as oracle
from support.oracles.mqa_decode import unpaged

from jax_dsa import FlatCache, PagedCache, sparse_mla, sparse_mla_decode
from jax_dsa.ops.sparse_mla import cuda, xla
from jax_dsa.ops.sparse_mla.spec import Operands, Options, Results
from jax_dsa.serving import pack_page_records, unpack_page_records

B, T, N, G, K, K2 = 3, 2, 4, 2, 7, 9
INT_MIN, INT_MAX = -(2**31), 2**31 - 1
SINKS = jnp.asarray([0.1, 1.0, -jnp.inf, 2.0], jnp.float32)
LENGTHS, EXTRA_LENGTHS = [20, 9, 1], [6, 0, 99]


def cache_of(rng: np.random.Generator, kind: str, page: int, dim: int, lengths: Any) -> Any:
    """Returns a cache of 20 tokens per request; every fifth page is not mapped."""
    rows = jnp.asarray(rng.normal(size=(B, 20, G, dim)), jnp.float32)
    if kind == "flat":
        return FlatCache(rows, jnp.asarray(lengths, jnp.int32))
    entries = 20 // page
    cache = PagedCache.empty(
        B * entries + 2, page, B, entries, dim, groups=G, dtype=jnp.float32, fp8=kind == "records"
    )
    table = rng.permutation(B * entries + 2)[: B * entries].reshape(B, entries)
    cache = cache.with_page_table(jnp.asarray(table, jnp.int32)).append(rows)
    table = np.where(rng.random(table.shape) < 0.2, rng.choice([-1, 99, INT_MIN]), table)
    return dataclasses.replace(
        cache, page_table=jnp.asarray(table, jnp.int32), lengths=jnp.asarray(lengths, jnp.int32)
    )


def held(cache: Any) -> tuple[np.ndarray, np.ndarray]:
    """Returns the rows [B, S, G, D] of a cache in float64, and which of them exist."""
    if isinstance(cache, FlatCache):
        rows, exists = np.asarray(cache.data), np.ones(cache.data.shape[:2], bool)
    else:
        pages = cache.pages
        if pages.dtype == jnp.uint8:
            P, L = pages.shape[:2]
            flat = unpack_page_records(pages.reshape(P, L * G, 584), jnp.float32)
            pages = flat.reshape(P, L, G, 512)
        rows, exists = unpaged(np.asarray(pages), np.asarray(cache.page_table))
    return np.asarray(rows, np.float64), exists & (
        np.arange(rows.shape[1]) < np.asarray(cache.lengths)[:, None]
    )


def picks(rng: np.random.Generator, slots: int, keys: int = 20) -> jax.Array:
    bad = np.array([INT_MIN, -1, keys, INT_MAX])
    chosen = rng.integers(0, keys, (B, T, G, slots))
    chosen = np.where(rng.random(chosen.shape) < 0.2, rng.choice(bad, chosen.shape), chosen)
    return jnp.asarray(chosen, jnp.int32)


def visible(
    cache: Any, indices: Any, end: np.ndarray | None, length: Any
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the rows of a cache, and the indices of the valid slots, others -1."""
    rows, exists = held(cache)
    indices = np.asarray(indices, np.int64)
    inside = np.clip(indices, 0, rows.shape[1] - 1)
    seen = (indices == inside) & exists[np.arange(B)[:, None, None, None], inside]
    if end is not None:
        seen &= indices < end[:, :, None, None]
    if length is not None:
        seen &= np.arange(indices.shape[3]) < np.asarray(length)[:, :, None, None]
    return rows, np.where(seen, indices, -1)


def want(q: Any, cache: Any, indices: Any, **x: Any) -> tuple[np.ndarray, np.ndarray]:
    """Returns the float64 result over the concatenation of both caches' keys."""
    token = np.asarray(cache.lengths)[:, None] - T + np.arange(T)  # the position of each query
    causal = x.get("is_causal", False)
    end = token + 1 if causal else None
    entry = np.maximum(token + 1, 0) // x.get("extra_key_stride", 1) if causal else None
    rows, first = visible(cache, indices, end, x.get("topk_length"))
    other = visible(x["extra_cache"], x["extra_indices"], entry, x.get("extra_topk_length"))
    kv = np.concatenate([rows, other[0]], axis=1)
    joined = np.concatenate([first, np.where(other[1] < 0, -1, other[1] + rows.shape[1])], axis=3)
    sinks = np.full(N, -np.inf) if x.get("sinks") is None else np.asarray(x["sinks"], np.float64)
    dim = q.shape[3]
    options = {"value_dim": min(512, dim), "scale": dim**-0.5, "sinks": sinks}
    out, lse = oracle.sparse_mla(np.asarray(q, np.float64), kv, joined, **options)
    return out.astype(np.float32), lse.astype(np.float32)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    ("kind", "other", "dim"),
    [
        ("flat", "flat", 16),
        ("paged", "flat", 16),
        ("flat", "paged", 16),
        ("paged", "paged", 16),
        ("records", "records", 512),
        ("flat", "records", 512),
        ("records", "paged", 512),
    ],
)
def test_both_caches_share_one_softmax(
    kind: str, other: str, dim: int, is_causal: bool, rng: np.random.Generator
) -> None:
    cache = cache_of(rng, kind, 4, dim, LENGTHS)
    extra = cache_of(rng, other, 10, dim, EXTRA_LENGTHS)
    q = jnp.asarray(rng.normal(size=(B, T, N, dim)), jnp.float32)
    arrays = {
        "extra_cache": extra,
        "extra_indices": picks(rng, K2),
        "topk_length": jnp.asarray([[7, 3], [5, 7], [7, 0]], jnp.int32),
        "extra_topk_length": jnp.asarray([[9, 2], [5, -1], [20, 0]], jnp.int32),
        "sinks": SINKS,
    }
    indices, options = picks(rng, K), {"is_causal": is_causal, "extra_key_stride": 3}
    expected = want(q, cache, indices, **arrays, **options)

    def call(q: Any, cache: Any, indices: Any, arrays: Any) -> Any:
        return sparse_mla_decode(q, cache, indices, **arrays, **options, return_lse=True)

    for run in (call, jax.jit(call)):
        out, lse = run(q, cache, indices, arrays)
        assert_matches(out, expected[0], tol=1e-5)
        assert_matches(lse, expected[1], tol=1e-5)
    invariant = sparse_mla_decode(q, cache, indices, **arrays, **options, batch_invariant=True)
    assert_matches(invariant, expected[0], tol=1e-5)


def test_gradients_equal_those_over_the_concatenated_keys(rng: np.random.Generator) -> None:
    dim = 16
    q = jnp.asarray(rng.normal(size=(B, T, N, dim)), jnp.float32)
    kv, other = (jnp.asarray(rng.normal(size=(B, 20, G, dim)), jnp.float32) for _ in range(2))
    indices, extra_indices = picks(rng, K), picks(rng, K2)
    lengths = jnp.full(B, 20)
    weight = jnp.asarray(rng.normal(size=(B, T, N, dim)), jnp.float32)

    def two(q: Any, kv: Any, other: Any, sinks: Any) -> Any:
        extra = {"extra_cache": FlatCache(other, lengths), "extra_indices": extra_indices}
        cache = FlatCache(kv, lengths)
        out, lse = sparse_mla_decode(q, cache, indices, **extra, sinks=sinks, return_lse=True)
        return (out * weight).sum() + jnp.where(jnp.isfinite(lse), lse, 0).sum()

    def joined(q: Any, kv: Any, other: Any, sinks: Any) -> Any:
        inside = [jnp.where((i >= 0) & (i < 20), i, -1) for i in (indices, extra_indices)]
        both = jnp.concatenate([inside[0], jnp.where(inside[1] < 0, -1, inside[1] + 20)], axis=3)
        keys = jnp.concatenate([kv, other], axis=1)
        out, lse = sparse_mla(q, keys, both, sinks=sinks, return_lse=True)
        return (out * weight).sum() + jnp.where(jnp.isfinite(lse), lse, 0).sum()

    args, which = (q, kv, other, SINKS.at[2].set(-1.0)), (0, 1, 2, 3)
    got, expected = (jax.grad(f, argnums=which)(*args) for f in (two, joined))
    for one, other_one in zip(got, expected, strict=True):
        assert_matches(one, other_one, tol=1e-5)
    plain = jax.grad(lambda q: two(q, *args[1:]))
    mapped = jax.vmap(plain)(jnp.stack([q, 2 * q]))
    assert_matches(mapped[1], plain(2 * q), tol=1e-5)


def rows_of(cache: Any) -> dict[str, Any]:
    """Returns the operands of a cache, as an operator passes them to its passes."""
    ends = jnp.broadcast_to(cache.lengths[:, None], (B, T))
    if isinstance(cache, FlatCache):
        return {"kv": cache.data, "ends": ends}
    P, L, *row = cache.pages.shape
    return {"kv": cache.pages.reshape(1, P * L, *row), "ends": ends, "page_table": cache.page_table}


@pytest.mark.parametrize(
    ("kind", "other", "dim", "copies", "budget"),
    [
        ("flat", "flat", 16, False, 2**27),
        ("paged", "flat", 16, False, 2**27),
        ("records", "records", 512, False, 2**27),
        ("records", None, 512, False, 2**27),
        ("flat", "records", 512, True, 2**27),
        ("records", "paged", 512, True, 1),  # query by query
    ],
)
def test_the_kernel_reads_caches_or_copies_of_the_selected_rows(
    kind: str,
    other: str | None,
    dim: int,
    copies: bool,
    budget: int,
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A stand-in for the handler computes with XLA what the kernel would compute."""
    caches = [cache_of(rng, kind, 4, dim, LENGTHS)]
    x = Operands(
        jnp.asarray(rng.normal(size=(B, T, N, dim)), jnp.float32),
        indices=picks(rng, K),
        topk_length=jnp.asarray([[7, 3], [5, 7], [7, 0]], jnp.int32),
        sinks=jnp.broadcast_to(SINKS, (B, N)),
        **rows_of(caches[0]),
    )
    if other is not None:
        caches.append(cache_of(rng, other, 10, dim, EXTRA_LENGTHS))
        more = {**rows_of(caches[1]), "indices": picks(rng, K2)}
        x = x._replace(**{f"extra_{name}": value for name, value in more.items()})
    pages = [None if isinstance(c, FlatCache) else c.pages.shape[1] for c in caches]
    options = Options(0.3, dim, page_size=pages[0], extra_page_size=pages[-1])

    def handler(target: str, operands: Any, avals: Any, **attrs: Any) -> Any:
        assert target == "jax_dsa.sparse_mla_decode.v5"
        given = Operands(*operands)
        if copies:
            assert given.page_table is None and given.extra_kv is None
        else:
            assert given.kv is x.kv and given.extra_kv is x.extra_kv
        sizes = int(attrs["page_size"]), int(attrs["extra_page_size"])
        seen = Options(float(attrs["scale"]), dim, page_size=sizes[0], extra_page_size=sizes[1])
        got = xla.sparse_mla_fwd(seen, given)
        assert [a.shape for a in got] == [a.shape for a in avals[:3]]
        return [*got, None, None]

    extension = SimpleNamespace(sparse_mla_decode_splits=lambda **_: 1)
    monkeypatch.setattr(cuda, "ffi", SimpleNamespace(call=handler, extension=lambda: extension))
    monkeypatch.setattr(cuda, "BUDGET", budget)
    expected = jax.jit(functools.partial(xla.sparse_mla_fwd, options))(x)
    avals: Any = Results(*(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in expected))  # type: ignore[arg-type]
    for got, want in zip(cuda.sparse_mla_decode_fwd(options, avals, x), expected, strict=True):
        assert_matches(got, want, tol=1e-5)


@pytest.mark.parametrize("page", [4, 5])
def test_the_kernel_reads_copies_of_pages_that_are_not_aligned(
    page: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page of five records of 584 bytes has no multiple of 16 bytes."""
    read = []

    def handler(target: str, operands: Any, avals: Any, **attrs: Any) -> Any:
        read.append(operands[1].dtype)
        return [jnp.zeros(a.shape, a.dtype) for a in avals[:3]]

    extension = SimpleNamespace(sparse_mla_decode_splits=lambda **_: 1)
    monkeypatch.setattr(cuda, "ffi", SimpleNamespace(call=handler, extension=lambda: extension))
    x = Operands(
        jnp.zeros((1, 1, 2, 512), jnp.bfloat16),
        jnp.zeros((1, 2 * page, 1, 584), jnp.uint8),
        jnp.zeros((1, 1, 1, 3), jnp.int32),
        page_table=jnp.zeros((1, 2), jnp.int32),
    )
    row = jax.ShapeDtypeStruct((1, 1, 2), jnp.float32)
    avals: Any = Results(jax.ShapeDtypeStruct(x.q.shape, x.q.dtype), row, row)  # type: ignore[arg-type]
    cuda.sparse_mla_decode_fwd(Options(0.3, 512, page_size=page), avals, x)
    assert read == [jnp.uint8 if page == 4 else jnp.bfloat16]


@pytest.mark.gpu
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "records"])
@pytest.mark.parametrize("heads", [128, 64, 16])
def test_the_kernel_has_the_bits_of_a_joined_list(
    heads: int, fp8: bool, rng: np.random.Generator
) -> None:
    """The first list is filled up to a multiple of 64 slots, as DeepSeek-V4's window is."""
    caches, joined = [], []
    for pages in (2, 9):
        rows = jnp.asarray(rng.normal(size=(2, pages * 64, 1, 512)), jnp.bfloat16)
        cache = PagedCache.empty(2 * pages, 64, 2, pages, 512, fp8=fp8)
        table = jnp.asarray(rng.permutation(2 * pages).reshape(2, pages), jnp.int32)
        caches.append(cache.with_page_table(table).append(rows))
        if fp8:
            packed = pack_page_records(rows.reshape(-1, 64, 512))
            rows = unpack_page_records(packed, jnp.bfloat16).reshape(rows.shape)
        joined.append(rows)
    q = jnp.asarray(rng.normal(size=(2, 3, heads, 512)), jnp.bfloat16)
    first = jnp.asarray(rng.integers(-9, 128, (2, 3, 100)), jnp.int32)
    second = jnp.asarray(rng.integers(-9, 9 * 64, (2, 3, 500)), jnp.int32)
    options: dict[str, Any] = {
        "sinks": jnp.asarray(rng.normal(size=heads), jnp.float32),
        "batch_invariant": True,
        "implementation": "cuda",
        "return_lse": True,
    }
    got = sparse_mla_decode(
        q, caches[0], first, extra_cache=caches[1], extra_indices=second, **options
    )
    full = jnp.pad(first, ((0, 0), (0, 0), (0, 28)), constant_values=-1)
    both = jnp.concatenate([full, jnp.where(second < 0, -1, second + 128)], axis=2)
    want = sparse_mla(q, jnp.concatenate(joined, axis=1), both, **options)
    for one, other in zip(got, want, strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


def test_one_list_alone_and_none(rng: np.random.Generator) -> None:
    """Either list may be empty, or have no slot at all. Without a valid slot the output is 0."""
    cache, extra = (cache_of(rng, "flat", 0, 16, [20] * B) for _ in range(2))
    q = jnp.asarray(rng.normal(size=(B, T, N, 16)), jnp.float32)
    first, second = picks(rng, K), picks(rng, K2)
    for no in (first[..., :0], jnp.full_like(first, -1)):
        got = sparse_mla_decode(q, cache, no, extra_cache=extra, extra_indices=second)
        assert_matches(got, sparse_mla_decode(q, extra, second), tol=1e-6)
        got = sparse_mla_decode(q, cache, first, extra_cache=extra, extra_indices=no)
        assert_matches(got, sparse_mla_decode(q, cache, first), tol=1e-6)
        out, lse = sparse_mla_decode(
            q, cache, no, extra_cache=extra, extra_indices=no, sinks=SINKS, return_lse=True
        )
        assert not out.any() and (lse == -jnp.inf).all()


def test_nan_reaches_only_the_queries_that_select_it(rng: np.random.Generator) -> None:
    """A NaN scale or value makes its key NaN. What no valid slot selects may be NaN, too."""
    cache = cache_of(rng, "records", 4, 512, [20] * B)
    extra = cache_of(rng, "records", 10, 512, [12] * B)
    extra = extra.with_page_table(jnp.asarray([[0, 1], [2, 3], [4, -1]], jnp.int32))
    q = jnp.asarray(rng.normal(size=(B, T, N, 512)), jnp.float32)
    flat = np.asarray(extra.pages).reshape(len(extra.pages), -1).copy()
    flat[0, 10 * G * 576 + 3 * G * 8] = 255  # the first scale of entry 3, group 0, of request 0
    flat[2, 5 * G * 576 + 576] = 0x7F  # the first value of entry 5, group 1, of request 1
    flat[5:] = 0xFF  # pages of no request
    flat[1, 2 * G * 576 : 10 * G * 576] = 0x7F  # entries from 12 on of request 0
    extra = dataclasses.replace(extra, pages=jnp.asarray(flat.reshape(extra.pages.shape)))
    second = jnp.broadcast_to(jnp.asarray([0, 1, 2, 12, 13, 19]), (B, T, G, 6))
    second = second.at[0, 1, :, 0].set(3).at[1, 0, :, 0].set(5)
    out = sparse_mla_decode(q, cache, picks(rng, K), extra_cache=extra, extra_indices=second)
    is_nan = np.isnan(np.asarray(out)).any(-1)
    assert is_nan[0, 1, : N // G].all() and is_nan[1, 0, N // G :].all()
    assert is_nan.sum() == 2 * (N // G)


def test_requests_without_a_batch_axis(rng: np.random.Generator) -> None:
    cache = cache_of(rng, "paged", 4, 16, LENGTHS)
    extra = cache_of(rng, "flat", 0, 16, EXTRA_LENGTHS)
    q, first, second = jnp.ones((B, T, N, 16)), picks(rng, K), picks(rng, K2)
    all_of_them = sparse_mla_decode(q, cache, first, extra_cache=extra, extra_indices=second)
    one = PagedCache(cache.pages, cache.page_table[1], cache.lengths[1])
    other = FlatCache(extra.data[1], extra.lengths[1])
    got = sparse_mla_decode(q[1], one, first[1], extra_cache=other, extra_indices=second[1])
    assert_matches(got, all_of_them[1], tol=1e-6)
    shared = sparse_mla_decode(q, cache, first[:, :, 0], extra_cache=extra, extra_indices=second)
    assert shared.shape == q.shape


def test_misuse_names_the_argument(rng: np.random.Generator) -> None:
    cache, extra = (cache_of(rng, "flat", 0, 16, [20] * B) for _ in range(2))
    q, first, second = jnp.ones((B, T, N, 16)), picks(rng, K), picks(rng, K2)
    records = PagedCache.empty(3, 4, B, 2, 512, groups=G, fp8=True)
    wide = FlatCache.empty(B, 20, 576, groups=G, dtype=jnp.float32)
    both = {"extra_cache": extra, "extra_indices": second}
    cases: list[tuple[dict[str, Any], str]] = [
        ({"extra_cache": extra}, "'extra_indices' is None, want the positions"),
        ({"extra_indices": second}, "'extra_indices' is .* want None without 'extra_cache'"),
        ({"extra_topk_length": second[:, :, 0, 0]}, "'extra_topk_length' is .* without"),
        ({"extra_key_stride": 2}, "'extra_key_stride' is 2, want 1 without 'extra_cache'"),
        (both | {"extra_key_stride": 0}, "'extra_key_stride' is 0, want int in"),
        (both | {"extra_cache": FlatCache(extra.data[:2], extra.lengths[:2])}, "with B=3"),
        (both | {"extra_cache": FlatCache(extra.data[:, :, :1], extra.lengths)}, "G=2"),
        (both | {"extra_cache": FlatCache(extra.data[..., :8], extra.lengths)}, "D=16"),
        (both | {"extra_cache": records}, "'extra_cache' holds rows of 584 .* for queries of D=16"),
        (both | {"extra_indices": second[:, :1]}, r"'extra_indices' .* or \[B, T, K2\] with .*T=2"),
        (both | {"extra_topk_length": second[0, 0]}, "'extra_topk_length' has shape"),
    ]
    for arguments, message in cases:
        with pytest.raises(ValueError, match=f"sparse_mla_decode: .*{message}"):
            sparse_mla_decode(q, cache, first, **arguments)
    for arguments, message in (
        (both | {"extra_cache": extra.data}, "'extra_cache' is .* want a FlatCache or a Paged"),
        (both | {"extra_indices": second * 1.0}, "'extra_indices' has dtype float32, want int32"),
    ):
        with pytest.raises(TypeError, match=f"sparse_mla_decode: .*{message}"):
            sparse_mla_decode(q, cache, first, **arguments)
    with pytest.raises(ValueError, match=r"'extra_cache' holds rows of 584 .* D=576"):
        sparse_mla_decode(
            jnp.ones((B, T, N, 576)), wide, first, extra_cache=records, extra_indices=second
        )
    with pytest.raises(NotImplementedError, match="sparse_mla_decode: implementation='cuda'"):
        sparse_mla_decode(q, cache, first, **both, implementation="cuda")
