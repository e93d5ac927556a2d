"""Caches, and `sparse_mla_decode` and `mqa_decode` over them."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.compare import assert_matches

from jax_dsa import (
    FlatCache,
    HTreeCache,
    PagedCache,
    indexer_topk,
    mqa_decode,
    sparse_mla,
    sparse_mla_decode,
)
from jax_dsa.serving import (
    pack_page_records,
    pack_records,
    unpack_page_records,
    unpack_records,
)

B, T, N, G, D, E, K, PAGE, ROOM = 3, 2, 4, 2, 10, 6, 7, 4, 5
S = PAGE * ROOM
INT_MIN, INT_MAX = -(2**31), 2**31 - 1


def rows(rng: np.random.Generator, t: int, dim: int = D) -> jax.Array:
    return jnp.asarray(rng.normal(size=(B, t, G, dim)), jnp.float32)


def empty(kind: str, rng: np.random.Generator, dim: int = D, **options: Any) -> Any:
    if kind == "flat":
        return FlatCache.empty(B, S, dim, groups=G, **options)
    cache = PagedCache.empty(B * ROOM + 3, PAGE, B, ROOM, dim, groups=G, **options)
    pages = rng.permutation(B * ROOM + 3)[: B * ROOM].reshape(B, ROOM)
    return dataclasses.replace(cache, page_table=jnp.asarray(pages, jnp.int32))


def contents(cache: Any) -> np.ndarray:
    """What the cache stores, [B, S, G, ...], whatever it is."""
    if isinstance(cache, FlatCache):
        return np.asarray(cache.data)
    pages, table = np.asarray(cache.pages), np.asarray(cache.page_table)
    return pages[table].reshape(B, S, *pages.shape[2:])


BOTH = pytest.mark.parametrize("kind", ["flat", "paged"])


@BOTH
def test_append(kind: str, rng: np.random.Generator) -> None:
    """Prompts of different lengths, single tokens, then more than fits: against lists."""
    cache = empty(kind, rng, dtype=jnp.float32)
    want: list[list[np.ndarray]] = [[] for _ in range(B)]
    append = jax.jit(lambda cache, new, counts: cache.append(new, counts))
    for t, counts in ((6, [6, 0, 3]), (1, None), (1, None), (14, [14, 14, 99])):
        new = rows(rng, t)
        cache = append(cache, new, None if counts is None else jnp.asarray(counts, jnp.int32))
        for b in range(B):
            want[b] = (want[b] + list(new[b, : t if counts is None else counts[b]]))[:S]
        assert cache.lengths.dtype == jnp.int32
        np.testing.assert_array_equal(cache.lengths, [len(x) for x in want])
        for b in range(B):
            np.testing.assert_array_equal(
                contents(cache)[b, : len(want[b])],
                np.stack(want[b]) if want[b] else np.zeros((0, G, D)),
            )
            assert not contents(cache)[b, len(want[b]) :].any()
    assert cache.capacity == S and cache.lengths.tolist() == [20, 16, 19]


@BOTH
def test_rows_of_e4m3(kind: str, rng: np.random.Generator) -> None:
    """They stay as they are; others would want a scale."""
    cache = empty(kind, rng, dtype=jnp.float8_e4m3fn)
    new = rows(rng, 3).astype(jnp.float8_e4m3fn)
    held = contents(cache.append(new))
    assert held.dtype == new.dtype
    np.testing.assert_array_equal(held[:, :3], new)
    with pytest.raises(TypeError, match=r"append: argument 'rows' .*float8_e4m3fn"):
        cache.append(rows(rng, 3))


@BOTH
def test_update_drops_what_lies_outside(kind: str, rng: np.random.Generator) -> None:
    cache = empty(kind, rng, dtype=jnp.bfloat16).append(rows(rng, 5))
    positions = jnp.asarray([[4, 0], [-1, S], [INT_MAX, INT_MIN]], jnp.int32)
    new = rows(rng, 2)
    after = cache.update(new, positions)
    want = contents(cache).copy()
    want[0, [4, 0]] = np.asarray(new[0].astype(jnp.bfloat16))
    np.testing.assert_array_equal(contents(after), want)
    np.testing.assert_array_equal(after.lengths, cache.lengths)


def test_tokens_without_a_page(rng: np.random.Generator) -> None:
    cache = empty("paged", rng, dtype=jnp.float32)
    table = cache.page_table.at[0, 1].set(-1).at[2, 0].set(99)
    cache = dataclasses.replace(cache, page_table=table).append(rows(rng, 7))
    q = jnp.asarray(rng.normal(size=(B, T, N, D)), jnp.float32)
    every = jnp.broadcast_to(jnp.arange(S, dtype=jnp.int32), (B, T, G, S))
    out, lse = sparse_mla_decode(q, cache, every, value_dim=E, return_lse=True)
    seen = [range(4), range(7), range(4, 7)]
    for b in range(B):
        kv = contents(dataclasses.replace(cache, page_table=table.clip(0, 17)))[
            b : b + 1, list(seen[b])
        ]
        picks = every[b : b + 1, ..., : len(seen[b])]
        want = sparse_mla(q[b : b + 1], kv, picks, value_dim=E, return_lse=True)
        assert_matches((out[b : b + 1], lse[b : b + 1]), want, tol=1e-5)


def test_without_batch_axis(rng: np.random.Generator) -> None:
    new = rows(rng, 3)
    for kind in ("flat", "paged"):
        cache = empty(kind, rng, dtype=jnp.float32)
        want = cache.append(new)
        q, indices = jnp.ones((B, T, N, D)), jnp.ones((B, T, G, K), jnp.int32)
        out = sparse_mla_decode(q, want, indices, value_dim=E)
        for b in range(B):
            names = ("lengths", "data" if kind == "flat" else "page_table")
            mine = {name: getattr(cache, name)[b] for name in names}
            one = dataclasses.replace(cache, **mine).append(new[b])
            assert one.lengths == 3
            got = sparse_mla_decode(q[b], one, indices[b], value_dim=E)
            assert_matches(got, out[b], tol=1e-6)


def filled(kind: str, rng: np.random.Generator, dim: int = D, **options: Any) -> Any:
    """A cache of requests of lengths 20, 9 and 1."""
    lengths = jnp.asarray([20, 9, 1], jnp.int32)
    return empty(kind, rng, dim, **options).append(rows(rng, S, dim), lengths)


def picks(rng: np.random.Generator) -> jax.Array:
    bad = np.array([INT_MIN, -1, S, INT_MAX], np.int32)
    chosen = rng.integers(0, S, size=(B, T, G, K))
    chosen = np.where(rng.random(chosen.shape) < 0.2, rng.choice(bad, size=chosen.shape), chosen)
    return jnp.asarray(chosen, jnp.int32)


@BOTH
@pytest.mark.parametrize("is_causal", [False, True])
def test_decode_is_sparse_mla_over_what_is_cached(
    kind: str, is_causal: bool, rng: np.random.Generator
) -> None:
    cache, indices = filled(kind, rng, dtype=jnp.float32), picks(rng)
    q = jnp.asarray(rng.normal(size=(B, T, N, D)), jnp.float32)
    options = {
        "value_dim": E,
        "scale": 0.4,
        "topk_length": jnp.asarray([[7, 3], [5, 7], [7, 7]], jnp.int32),
        "sinks": jnp.asarray([0.1, 1.0, -jnp.inf, 2.0], jnp.float32),
        "return_lse": True,
    }
    ends = cache.lengths[:, None] - (jnp.asarray([1, 0]) if is_causal else 0)
    visible = jnp.where(indices < ends[:, :, None, None], indices, -1)
    want = sparse_mla(q, contents(cache), visible, **options)
    got = jax.jit(lambda *a: sparse_mla_decode(*a, is_causal=is_causal, **options))(
        q, cache, indices
    )
    assert_matches(got, want, tol=1e-6)


@BOTH
def test_decode_reads_only_selected_rows(kind: str, rng: np.random.Generator) -> None:
    cache, indices = filled(kind, rng, dtype=jnp.float32), picks(rng)
    indices = jnp.where(indices == 2, 3, indices)
    q = jnp.asarray(rng.normal(size=(B, T, N, D)), jnp.float32)
    want = sparse_mla_decode(q, cache, indices, value_dim=E)
    stored = contents(cache)
    poison = jnp.full((B, S, G, D), jnp.nan)
    where = np.arange(S)[None] >= np.asarray(cache.lengths)[:, None]
    where[:, 2] = True
    positions = jnp.asarray(np.where(where, np.arange(S), -1), jnp.int32)
    poisoned = cache.update(poison, positions)
    assert np.isnan(contents(poisoned)).any() and not np.isnan(stored).any()
    np.testing.assert_array_equal(sparse_mla_decode(q, poisoned, indices, value_dim=E), want)


@pytest.mark.parametrize("fp8", [False, True], ids=["keys", "records"])
@pytest.mark.parametrize("operator", [sparse_mla_decode, mqa_decode])
def test_vmap_of_pools(operator: Any, fp8: bool, rng: np.random.Generator) -> None:
    """Calls with a pool each, and calls that share one."""
    calls, b, s, page = 2, 3, 64, 16
    pages = s // page
    q = jnp.asarray(rng.standard_normal((calls, b, 1, 4, 576)), jnp.bfloat16)
    rows = jnp.asarray(rng.standard_normal((calls, b, s, 1, 576)), jnp.bfloat16)
    indices = jnp.asarray(rng.integers(-2, s + 2, (calls, b, 1, 20)), jnp.int32)
    lengths = jnp.asarray(rng.integers(1, s + 1, (calls, b)), jnp.int32)
    table = rng.permuted(np.arange(calls * b * pages).reshape(calls, -1) % (b * pages), axis=1)

    def pool(rows: jax.Array, lengths: jax.Array, table: jax.Array) -> PagedCache:
        cache = PagedCache.empty(b * pages, page, b, pages, fp8=fp8)
        return dataclasses.replace(cache, page_table=table).append(rows, lengths)

    def step(q: jax.Array, cache: PagedCache, indices: jax.Array) -> jax.Array:
        selection = (indices,) if operator is sparse_mla_decode else ()
        return operator(q, cache, *selection, implementation="xla")

    caches = jax.vmap(pool)(rows, lengths, jnp.asarray(table.reshape(calls, b, pages), jnp.int32))
    one = jax.tree.map(lambda x: x[0], caches)
    each = jax.vmap(step)(q, caches, indices)
    shared = jax.vmap(step, (0, None, 0))(q, one, indices)
    for i in range(calls):
        own = jax.tree.map(lambda x, i=i: x[i], caches)
        assert_matches(each[i], step(q[i], own, indices[i]), tol=1e-2)
        assert_matches(shared[i], step(q[i], one, indices[i]), tol=1e-2)


def test_gradients_of_a_cache(rng: np.random.Generator) -> None:
    """Flat and paged caches agree, and integers have none."""
    flat, indices = filled("flat", rng, dtype=jnp.float32), picks(rng)
    paged = empty("paged", rng, dtype=jnp.float32)
    every = jnp.broadcast_to(jnp.arange(S, dtype=jnp.int32), (B, S))
    paged = dataclasses.replace(paged.update(flat.data, every), lengths=flat.lengths)
    q = jnp.asarray(rng.normal(size=(B, T, N, D)), jnp.float32)

    def loss(q: jax.Array, cache: Any) -> jax.Array:
        return jnp.sum(jnp.sin(sparse_mla_decode(q, cache, indices, value_dim=E)))

    dq, dflat = jax.grad(loss, argnums=(0, 1), allow_int=True)(q, flat)
    dq_paged, dpaged = jax.grad(loss, argnums=(0, 1), allow_int=True)(q, paged)
    assert_matches(dq_paged, dq, tol=1e-5)
    got = np.asarray(dpaged.pages)[np.asarray(paged.page_table)].reshape(B, S, G, D)
    assert_matches(got, np.asarray(dflat.data), tol=1e-5)
    assert np.abs(got).max() > 0


def test_records_keep_their_layout(rng: np.random.Generator) -> None:
    """512 e4m3 bytes, 4 little-endian float32 scales, 64 bfloat16: what others read and write."""
    values = rng.normal(size=(5, 576)).astype(np.float32) * np.exp(rng.normal(size=(5, 1)) * 4)
    values[1, :128] = 0
    records = np.asarray(pack_records(jnp.asarray(values)))
    assert records.shape == (5, 656) and records.dtype == np.uint8
    latent = records[:, :512].view(jnp.float8_e4m3fn).astype(np.float32).reshape(5, 4, 128)
    scale = records[:, 512:528].copy().view("<f4")
    rope = records[:, 528:].copy().view(jnp.bfloat16)
    blocks = values[:, :512].reshape(5, 4, 128)
    np.testing.assert_array_equal(np.frexp(scale)[0], 0.5)
    amax = np.maximum(np.abs(blocks).max(-1), 1e-4)
    assert np.all(scale >= amax / 448) and np.all(scale < 2 * amax / 448 * (1 + 1e-6))
    # Half a unit of e4m3: 2^-4 of the value, or 2^-10 of the scale where it is subnormal.
    error = np.abs(latent * scale[..., None] - blocks)
    assert np.all(error <= np.maximum(np.abs(blocks) * 2**-4, scale[..., None] * 2**-10))
    np.testing.assert_array_equal(rope, values[:, 512:].astype(jnp.bfloat16))
    for dtype in (jnp.float32, jnp.bfloat16):
        got = np.asarray(unpack_records(jnp.asarray(records), dtype), np.float32)
        np.testing.assert_array_equal(got[:, :512], (latent * scale[..., None]).reshape(5, 512))
        np.testing.assert_array_equal(got[:, 512:], rope.astype(np.float32))


def test_pages_of_records_keep_their_layout(rng: np.random.Generator) -> None:
    """Of each token 448 e4m3 bytes and 64 bfloat16, then of each 7 exponents and a zero."""
    size = 5
    values = rng.normal(size=(2, size, 512)) * np.exp(rng.normal(size=(2, size, 1)) * 4)
    values = values.astype(np.float32)
    values[1, 2, :64] = 0
    values[0, 1, 70] = np.inf
    pages = np.asarray(pack_page_records(jnp.asarray(values)))
    assert pages.shape == (2, size, 584) and pages.dtype == np.uint8
    flat = pages.reshape(2, size * 584)
    tokens = flat[:, : size * 576].reshape(2, size, 576)
    exponents = flat[:, size * 576 :].reshape(2, size, 8)
    assert (exponents[..., 7] == 0).all() and exponents[0, 1, 1] == 255
    latent = tokens[..., :448].copy().view(jnp.float8_e4m3fn).astype(np.float32)
    rope = tokens[..., 448:].copy().view(jnp.bfloat16)
    np.testing.assert_array_equal(rope, values[..., 448:].astype(jnp.bfloat16))
    scale = 2.0 ** (exponents[..., :7].astype(np.float64) - 127)
    scale[0, 1, 1] = np.nan
    blocks = values[..., :448].reshape(2, size, 7, 64)
    amax = np.maximum(np.abs(blocks).max(-1), 1e-4)
    whole = np.isfinite(scale)
    assert whole.sum() == scale.size - 1
    assert np.all((scale >= amax / 448)[whole] & (scale < 2 * amax / 448 * (1 + 1e-6))[whole])
    held = latent.reshape(blocks.shape) * scale[..., None]
    error = np.abs(held - blocks)[whole]
    assert np.all(error <= np.maximum(np.abs(blocks) * 2**-4, scale[..., None] * 2**-10)[whole])
    for dtype in (jnp.float32, jnp.bfloat16):
        got = np.asarray(unpack_page_records(jnp.asarray(pages), dtype), np.float32)
        np.testing.assert_array_equal(got[..., :448], held.reshape(2, size, 448))
        np.testing.assert_array_equal(got[..., 448:], rope.astype(np.float32))


def test_exponents_of_others_in_a_page(rng: np.random.Generator) -> None:
    """The smallest scale, 2^-127, is subnormal; 255 is NaN; the last byte may be anything."""
    page = np.asarray(pack_page_records(jnp.ones((1, 512)))).copy()
    page[0, 576:] = [1, 127, 130, 254, 255, 100, 0, 99]
    got = np.asarray(unpack_page_records(jnp.asarray(page), jnp.float32))[0, :448:64]
    ones = page[0, :1].view(jnp.float8_e4m3fn).astype(np.float32)
    want = ones * 2.0 ** np.array([-126, 0, 3, 127, np.nan, -27])
    np.testing.assert_allclose(got[:6], np.where(want > 3e38, np.inf, want))
    assert got[6] in (0, ones[0] * 2.0**-127)  # a processor may flush it


def test_a_cache_of_pages_of_records(rng: np.random.Generator) -> None:
    """Decode over them is decode over the rows they hold; what is appended lies as it is packed."""
    cache, indices = filled("paged", rng, 512, fp8=True), picks(rng)
    assert cache.pages.shape == (B * ROOM + 3, PAGE, G, 584)
    held = unpack_page_records(cache.pages.reshape(-1, PAGE * G, 584), jnp.float32)
    held = held.reshape(-1, PAGE, G, 512)
    held = np.asarray(held)[np.asarray(cache.page_table)].reshape(B, S, G, 512)
    again = empty("paged", rng, 512, fp8=True)
    again = dataclasses.replace(again, page_table=cache.page_table)
    given = rows(rng, S, 512)
    whole = pack_page_records(given.reshape(B, ROOM, PAGE * G, 512))
    stored = np.asarray(again.append(given).pages)[np.asarray(cache.page_table)]
    np.testing.assert_array_equal(stored.reshape(whole.shape), whole)

    q = jnp.asarray(rng.normal(size=(B, T, N, 512)), jnp.float32)
    visible = jnp.where(indices < cache.lengths[:, None, None, None], indices, -1)
    want, pull = jax.vjp(lambda q: sparse_mla(q, held, visible, value_dim=512), q)
    got, pull_fp8 = jax.vjp(lambda q: sparse_mla_decode(q, cache, indices), q)
    assert_matches(got, want, tol=1e-6)
    assert_matches(pull_fp8(got), pull(got), tol=1e-5)
    low = sparse_mla_decode(q.astype(jnp.bfloat16), cache, indices)
    assert low.dtype == jnp.bfloat16
    assert np.abs(np.asarray(low, np.float32) - np.asarray(want)).max() < 0.1

    dense = mqa_decode(q, cache, num_splits=2, return_lse=True)
    options = {"key_value_seq_lengths": cache.lengths, "return_lse": True}
    assert_matches(dense, mqa_decode(q, held, **options), tol=1e-5)

    # A step over each request's own pages, and requests along an axis of vmap.
    stacked = jax.tree.map(lambda x: jnp.stack([x, jnp.roll(x, 1, 0)]), (q, cache, indices))
    both = jax.vmap(sparse_mla_decode)(*stacked)
    assert_matches(both[0], want, tol=1e-6)
    alone = jax.tree.map(lambda x: x[1], stacked)
    assert_matches(both[1], sparse_mla_decode(*alone), tol=1e-6)


@pytest.mark.parametrize("shape", [(0, 4), (2, 0)])
def test_no_records(shape: tuple[int, int]) -> None:
    for pack, unpack, dim, width in (
        (pack_records, unpack_records, 576, 656),
        (pack_page_records, unpack_page_records, 512, 584),
    ):
        records = pack(jnp.zeros((*shape, dim)))
        assert records.shape == (*shape, width)
        assert unpack(records, jnp.bfloat16).shape == (*shape, dim)


def test_records_that_lie_elsewhere_are_refused() -> None:
    q = np.zeros((B, T, N, 512), np.float32)
    flat = FlatCache(np.zeros((B, S, G, 584), np.uint8), np.zeros(B, np.int32))
    with pytest.raises(ValueError, match=r"'k' holds rows of 584.*in pages, of 584 with D=512"):
        mqa_decode(q, flat)
    with pytest.raises(ValueError, match=r"FlatCache\.empty: argument 'dim' is 512, want 576"):
        FlatCache.empty(B, S, 512, fp8=True)
    with pytest.raises(ValueError, match=r"PagedCache\.empty: .*'dim' is 256, want 576 or 512"):
        PagedCache.empty(3, PAGE, B, 1, 256, fp8=True)
    with pytest.raises(ValueError, match=r"'rows' has shape \(512,\), want \[\.\.\., L, 512\]"):
        pack_page_records(jnp.zeros(512))
    none = PagedCache.empty(0, PAGE, B, 1, 512, fp8=True)
    assert none.append(jnp.zeros((B, 1, 1, 512))).pages.size == 0
    out = sparse_mla_decode(q, none, np.zeros((B, T, 1), np.int32))
    assert (np.asarray(out) == 0).all()


@BOTH
def test_fp8_cache(kind: str, rng: np.random.Generator) -> None:
    """Decode over records is decode over the rows they hold; q has a gradient."""
    cache, indices = filled(kind, rng, 576, fp8=True), picks(rng)
    q = jnp.asarray(rng.normal(size=(B, T, N, 576)), jnp.float32)
    held = unpack_records(jnp.asarray(contents(cache)), jnp.float32)
    visible = jnp.where(indices < cache.lengths[:, None, None, None], indices, -1)
    want, pull = jax.vjp(lambda q: sparse_mla(q, held, visible), q)
    got, pull_fp8 = jax.vjp(lambda q: sparse_mla_decode(q, cache, indices), q)
    assert_matches(got, want, tol=1e-6)
    assert_matches(pull_fp8(got), pull(got), tol=1e-5)
    store = cache.data if kind == "flat" else cache.pages
    assert store.dtype == jnp.uint8 and store.shape[-1] == 656

    dense = mqa_decode(q, cache, num_splits=2, return_lse=True)
    options = {"key_value_seq_lengths": cache.lengths, "return_lse": True}
    assert_matches(dense, mqa_decode(q, held, **options), tol=1e-5)
    low = mqa_decode(q.astype(jnp.bfloat16), cache, return_lse=True)
    assert low[0].dtype == jnp.bfloat16 and low[0].shape == (B, T, N, 512)


def test_misuse_of_caches() -> None:
    flat, paged = (
        FlatCache.empty(B, S, D, groups=G),
        PagedCache.empty(9, PAGE, B, ROOM, D, groups=G),
    )
    new = jnp.zeros((B, 1, G, D))
    for name, cache in (("FlatCache", flat), ("PagedCache", paged)):
        for call, error, message in (
            (lambda c=cache: c.append(new[..., 1:]), ValueError, "append: argument 'rows'.*R=10"),
            (lambda c=cache: c.append(new[:1]), ValueError, "append: argument 'rows'.*B=3"),
            (lambda c=cache: c.append(new.astype(jnp.int32)), TypeError, "'rows' has dtype int32"),
            (lambda c=cache: c.append(None), TypeError, "'rows' is NoneType"),
            (lambda c=cache: c.append(new, jnp.ones(2, jnp.int32)), ValueError, "'counts'.*B=3"),
            (lambda c=cache: c.update(new, jnp.ones((B, 2), jnp.int32)), ValueError, "'rows'.*T=2"),
            (lambda c=cache: c.update(new, jnp.ones((B, 1))), TypeError, "'positions'.*int32"),
        ):
            with pytest.raises(error, match=f"{name}.*{message}"):
                call()
    with pytest.raises(ValueError, match=r"FlatCache\.empty: argument 'dim' is 10, want 576"):
        FlatCache.empty(B, S, D, fp8=True)
    with pytest.raises(ValueError, match=r"pack_records: argument 'rows'.*576"):
        pack_records(jnp.zeros((3, 512)))


def test_misuse_of_empty_caches() -> None:
    flat, paged = FlatCache.empty, PagedCache.empty
    for call, error, message in (
        (lambda: flat(-1, S, D), ValueError, r"FlatCache\.empty: argument 'batch' is -1"),
        (lambda: flat(B, 4.5, D), TypeError, r"FlatCache\.empty: argument 'capacity' is 4\.5"),
        (lambda: flat(B, S, 0), ValueError, r"FlatCache\.empty: argument 'dim' is 0"),
        (lambda: flat(B, S, 576, fp8=1), TypeError, r"FlatCache\.empty: argument 'fp8' is 1"),
        (lambda: flat(B, S, D, groups=-1), ValueError, r"FlatCache\.empty: argument 'groups'"),
        (lambda: paged(1, 0, B, 1, D), ValueError, r"PagedCache\.empty: argument 'page_size' is 0"),
        (
            lambda: paged(1, 2, None, 1, D),
            TypeError,
            r"PagedCache\.empty: argument 'batch' is None",
        ),
        (
            lambda: paged(1, 2**20, 0, 2**12, D),
            ValueError,
            r"PagedCache\.empty: argument 'pages_per_request' is 4096, want int in 0\.\.2047",
        ),
    ):
        with pytest.raises(error, match=message):
            call()


@pytest.mark.parametrize(("pages", "room"), [(3, 0), (0, 2), (0, 0)])
def test_no_pages(pages: int, room: int, rng: np.random.Generator) -> None:
    """An empty pool, an empty page table: nothing is kept, nothing is seen."""
    shape = (pages, PAGE, 1, D)
    cache = PagedCache(jnp.ones(shape), jnp.zeros((B, room), jnp.int32), jnp.zeros(B, jnp.int32))
    new, q = jnp.ones((B, T, 1, D)), jnp.ones((B, T, N, D))
    indices = jnp.zeros((B, T, K), jnp.int32)

    def outs(new: Any, q: Any, pages: Any) -> Any:
        after = dataclasses.replace(cache, pages=pages).append(new)
        sparse = sparse_mla_decode(q, after, indices, return_lse=True)
        return after.pages, *sparse, *mqa_decode(q, after, return_lse=True)

    (kept, *results), pull = jax.vjp(outs, new, q, cache.pages)
    np.testing.assert_array_equal(kept, cache.pages)
    for out, lse in (results[:2], results[2:]):
        assert not out.any() and (lse == -jnp.inf).all()
    dnew, dq, dpages = pull((kept, *jax.tree.map(jnp.ones_like, results)))
    assert not dnew.any() and not dq.any()
    np.testing.assert_array_equal(dpages, cache.pages)
    picked, logits = indexer_topk(q, cache.append(new), jnp.ones((B, T, N)), 2)
    assert (picked == -1).all() and (logits == -jnp.inf).all()


def test_pages_of_no_rows() -> None:
    cache = PagedCache(
        jnp.ones((3, 0, 1, D)), jnp.zeros((B, 1), jnp.int32), jnp.zeros(B, jnp.int32)
    )
    q = jnp.ones((B, T, N, D))
    for op, call in (
        ("PagedCache.append", lambda: cache.append(q[:, :, :1])),
        ("sparse_mla_decode", lambda: sparse_mla_decode(q, cache, jnp.zeros((B, T, K), jnp.int32))),
        ("mqa_decode", lambda: mqa_decode(q, cache)),
        ("indexer_topk", lambda: indexer_topk(q, cache, jnp.ones((B, T, N)), 2)),
    ):
        with pytest.raises(ValueError, match=f"{op}: argument .*pages' .*at least one row"):
            call()


def test_room(rng: np.random.Generator) -> None:
    """What a caller compares with what comes: in `jit` nothing can raise."""
    k = rows(rng, 6)[:, :, :1]
    tree = HTreeCache.empty(B, S, D, compression=2, top_k=2)
    paged = empty("paged", rng)
    paged = dataclasses.replace(paged, pages=paged.pages[:, :, :1])
    for cache in (FlatCache.empty(B, S, D), paged, tree):
        new = (k, k) if cache is tree else (k,)
        append = jax.jit(lambda cache, counts, new=new: cache.append(*new, counts))
        assert cache.free_tokens.tolist() == [S] * B
        for _ in range(4):
            cache = append(cache, jnp.asarray([6, 5, 0], jnp.int32))
        assert cache.free_tokens.tolist() == [0, 0, S] and cache.lengths.tolist() == [S, S, 0]
        below = dataclasses.replace(cache, lengths=jnp.asarray([INT_MIN, INT_MAX, 3], jnp.int32))
        assert below.free_tokens.tolist() == [S, 0, S - 3]


def test_caches_compare_and_hash_by_identity(rng: np.random.Generator) -> None:
    tree = HTreeCache.empty(B, S, D)
    for cache in (empty("flat", rng), empty("paged", rng), tree):
        assert cache == cache and cache != dataclasses.replace(cache)
        assert len({cache, cache}) == 1


@BOTH
def test_lengths_out_of_range(kind: str, rng: np.random.Generator) -> None:
    lengths = jnp.asarray([INT_MAX, INT_MIN, S - 1], jnp.int32)
    cache = dataclasses.replace(empty(kind, rng), lengths=lengths)
    np.testing.assert_array_equal(cache.append(rows(rng, 3)).lengths, [S, 3, S])


GOOD_Q, GOOD_INDICES = np.zeros((B, T, N, D), np.float32), np.zeros((B, T, G, K), np.int32)
GOOD_CACHE = FlatCache(np.zeros((B, S, G, D), np.float32), np.zeros(B, np.int32))
GOOD_PAGES = PagedCache(
    np.zeros((9, PAGE, G, D), np.float32), np.zeros((B, ROOM), np.int32), np.zeros(B, np.int32)
)
WRONG = {
    "q": ({"q": np.zeros(3, np.float32)}, ValueError, "'q' has shape"),
    "cache": ({"cache": GOOD_CACHE.data}, TypeError, "'cache' is ndarray, want a FlatCache or"),
    "dtype": ({"q": GOOD_Q.astype(jnp.bfloat16)}, TypeError, "'cache.data'.*bfloat16 or uint8"),
    "dim": ({"q": GOOD_Q[..., 1:]}, ValueError, "'cache'.*D=9"),
    "heads": ({"q": GOOD_Q[:, :, :3]}, ValueError, "N=3.*G=2.*multiple"),
    "batch": ({"q": GOOD_Q[:1], "indices": GOOD_INDICES[:1]}, ValueError, "'cache.data'.*B=1"),
    "lengths": (
        {"cache": FlatCache(GOOD_CACHE.data, np.zeros(2, np.int32))},
        ValueError,
        "'cache.lengths'",
    ),
    "table": (
        {"cache": dataclasses.replace(GOOD_PAGES, page_table=np.zeros(3, np.int32))},
        ValueError,
        "'cache.page_table'.*B=3",
    ),
    "pages": (
        {"cache": dataclasses.replace(GOOD_PAGES, pages=GOOD_PAGES.pages[0])},
        ValueError,
        "'cache.pages' has shape",
    ),
    "indices": ({"indices": GOOD_INDICES[..., 0, 0]}, ValueError, "'indices'"),
    "topk_length": ({"topk_length": np.zeros((T, B), np.int32)}, ValueError, "'topk_length'"),
    "value_dim": ({"value_dim": 0}, ValueError, "'value_dim' is 0"),
    "scale": ({"scale": "x"}, TypeError, "'scale'"),
    "is_causal": ({"is_causal": 1}, TypeError, "'is_causal'"),
    "sinks": ({"sinks": np.zeros(2, np.float32)}, ValueError, "'sinks'.*N=4"),
    "return_lse": ({"return_lse": 1}, TypeError, "'return_lse'"),
    "implementation": ({"implementation": 1}, ValueError, "'implementation' is 1"),
}


@pytest.mark.parametrize(("change", "error", "message"), WRONG.values(), ids=WRONG.keys())
def test_misuse_of_decode(change: dict, error: type, message: str) -> None:
    args = {"q": GOOD_Q, "cache": GOOD_CACHE, "indices": GOOD_INDICES, "value_dim": E}
    with pytest.raises(error, match=f"sparse_mla_decode: .*{message}"):
        sparse_mla_decode(**{**args, **change})


def test_room_is_a_deprecated_name_of_free_tokens() -> None:
    for cache in (
        FlatCache.empty(B, S, D),
        HTreeCache.empty(B, S, D, compression=2, top_k=2),
    ):
        with pytest.warns(DeprecationWarning, match="use free_tokens"):
            assert cache.room.tolist() == cache.free_tokens.tolist()
