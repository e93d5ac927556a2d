"""FP8 records of caches: their layout, and decoding over them."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.caches import (
    BOTH,
    ENTRIES,
    PAGE,
    B,
    G,
    N,
    S,
    T,
    contents,
    empty,
    filled,
    picks,
    rows,
)
from support.compare import assert_matches

from jax_dsa import FlatCache, PagedCache, mqa_decode, sparse_mla, sparse_mla_decode
from jax_dsa.serving import (
    import_page_records,
    pack_page_records,
    pack_records,
    unpack_page_records,
    unpack_records,
)


def test_records_keep_their_layout(rng: np.random.Generator) -> None:
    """A record is 512 e4m3 bytes, 4 little-endian float32 scales and 64 bfloat16 values.

    Other programs read and write the same layout.
    """
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
    # Half a unit of e4m3 is 2^-4 of the value, or 2^-10 of the scale for a subnormal value.
    error = np.abs(latent * scale[..., None] - blocks)
    assert np.all(error <= np.maximum(np.abs(blocks) * 2**-4, scale[..., None] * 2**-10))
    np.testing.assert_array_equal(rope, values[:, 512:].astype(jnp.bfloat16))
    for dtype in (jnp.float32, jnp.bfloat16):
        got = np.asarray(unpack_records(jnp.asarray(records), dtype), np.float32)
        np.testing.assert_array_equal(got[:, :512], (latent * scale[..., None]).reshape(5, 512))
        np.testing.assert_array_equal(got[:, 512:], rope.astype(np.float32))


def test_pages_of_records_keep_their_layout(rng: np.random.Generator) -> None:
    """The e4m3 bytes and bfloat16 values of all tokens precede the exponents of all tokens."""
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


def test_pages_written_by_other_programs(rng: np.random.Generator) -> None:
    """The smallest scale, 2^-127, is subnormal; 255 means NaN; the last byte may be anything."""
    page = np.asarray(pack_page_records(jnp.ones((1, 512)))).copy()
    page[0, 576:] = [1, 127, 130, 254, 255, 100, 0, 99]
    got = np.asarray(unpack_page_records(jnp.asarray(page), jnp.float32))[0, :448:64]
    ones = page[0, :1].view(jnp.float8_e4m3fn).astype(np.float32)
    want = ones * 2.0 ** np.array([-126, 0, 3, 127, np.nan, -27])
    np.testing.assert_allclose(got[:6], np.where(want > 3e38, np.inf, want))
    assert got[6] == ones[0] * 2.0**-127


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("byte", [0, 1, 2, 100, 200])
def test_scales_of_pages_down_to_the_smallest(byte: int, dtype: Any) -> None:
    """Every reader takes scale byte x for 2^(x - 127), also where that is a subnormal number."""
    size = 2
    codes = np.linspace(-448, 448, 448).astype(jnp.float8_e4m3fn)
    page = np.zeros(size * 584, np.uint8)
    page[576 : 576 + 448] = codes.view(np.uint8)
    page[size * 576 + 8 : size * 576 + 15] = byte
    pages = jnp.asarray(page.reshape(1, size, 584))
    want = codes.astype(np.float64) * 2.0 ** (byte - 127)
    # Devices differ in how they treat subnormal results.
    exact = np.abs(want) >= 2.0**-126
    cache = PagedCache(pages[:, :, None], jnp.zeros((1, 1), jnp.int32), jnp.asarray([size]))
    q, second = jnp.zeros((1, 1, 1, 512), dtype), jnp.ones((1, 1, 1), jnp.int32)

    def readers(pages: jax.Array, cache: PagedCache) -> Any:
        return (
            unpack_page_records(pages, dtype)[0, 1],
            sparse_mla_decode(q, cache, second)[0, 0, 0],
            mqa_decode(q, cache, starts=second[..., 0])[0, 0, 0],
        )

    for read in (readers, jax.jit(readers)):
        for got in read(pages, cache):
            np.testing.assert_array_equal(np.asarray(got, np.float64)[:448][exact], want[exact])


def test_a_cache_of_pages_of_records(rng: np.random.Generator) -> None:
    """Decoding over records equals decoding over their rows; an append writes the packed layout."""
    cache, indices = filled("paged", rng, 512, fp8=True), picks(rng)
    assert cache.pages.shape == (B * ENTRIES + 3, PAGE, G, 584)
    held = unpack_page_records(cache.pages.reshape(-1, PAGE * G, 584), jnp.float32)
    held = held.reshape(-1, PAGE, G, 512)
    held = np.asarray(held)[np.asarray(cache.page_table)].reshape(B, S, G, 512)
    again = empty("paged", rng, 512, fp8=True)
    again = dataclasses.replace(again, page_table=cache.page_table)
    given = rows(rng, S, 512)
    whole = pack_page_records(given.reshape(B, ENTRIES, PAGE * G, 512))
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

    # vmap over two caches, of which the second has the page table of another request.
    stacked = jax.tree.map(lambda x: jnp.stack([x, jnp.roll(x, 1, 0)]), (q, cache, indices))
    both = jax.vmap(sparse_mla_decode)(*stacked)
    assert_matches(both[0], want, tol=1e-6)
    alone = jax.tree.map(lambda x: x[1], stacked)
    assert_matches(both[1], sparse_mla_decode(*alone), tol=1e-6)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("dtype", [jnp.uint8, jnp.float8_e4m3fn])
def test_import_of_padded_pages(groups: int, dtype: Any, rng: np.random.Generator) -> None:
    """Padding up to a multiple of 576 bytes is dropped, whatever it holds."""
    size = 64
    rows_of_pages = jnp.asarray(rng.normal(size=(3, size * groups, 512)), jnp.float32)
    pages = np.asarray(pack_page_records(rows_of_pages)).reshape(3, -1)
    padded = np.full((3, -(-pages.shape[1] // 576) * 576), 0x7F, np.uint8)
    padded[:, : pages.shape[1]] = pages
    for given in (padded, padded.reshape(3, -1, 1, 576)):
        got = jax.jit(lambda x: import_page_records(x, size, groups=groups))(given.view(dtype))
        assert got.dtype == jnp.uint8
        np.testing.assert_array_equal(got, pages.reshape(3, size, groups, 584))
    if groups == 1:
        assert padded.shape == (3, 37440)


def test_misuse_of_the_import() -> None:
    pages = jnp.zeros((3, 37375), jnp.uint8)
    with pytest.raises(
        ValueError, match=r"import_page_records: argument 'pages' .* at least 37376"
    ):
        import_page_records(pages, 64)
    with pytest.raises(ValueError, match="and less than 576 bytes of padding"):
        import_page_records(pages, 63)
    with pytest.raises(ValueError, match=r"'pages' has shape .* at least 1168 .* G=2"):
        import_page_records(pages[0], 1, groups=2)
    with pytest.raises(TypeError, match="'pages' has dtype int8, want uint8 or float8_e4m3fn"):
        import_page_records(pages.astype(jnp.int8), 8)
    with pytest.raises(ValueError, match="'page_size' is 0"):
        import_page_records(pages, 0)


@pytest.mark.parametrize("shape", [(0, 4), (2, 0)])
def test_no_records(shape: tuple[int, int]) -> None:
    for pack, unpack, dim, width in (
        (pack_records, unpack_records, 576, 656),
        (pack_page_records, unpack_page_records, 512, 584),
    ):
        records = pack(jnp.zeros((*shape, dim)))
        assert records.shape == (*shape, width)
        assert unpack(records, jnp.bfloat16).shape == (*shape, dim)


@pytest.mark.parametrize(("pages", "batch", "entries"), [(3, 0, 2), (0, 2, 2), (3, 2, 0)])
@pytest.mark.parametrize("dim", [512, 576])
def test_pages_of_records_without_a_token(dim: int, pages: int, batch: int, entries: int) -> None:
    cache = PagedCache.empty(pages, 4, batch, entries, dim, fp8=True)
    q = jnp.ones((batch, 1, N, dim))
    for out in (mqa_decode(q, cache), sparse_mla_decode(q, cache, jnp.zeros((batch, 1, 3), int))):
        assert out.shape == (batch, 1, N, 512) and not np.any(np.asarray(out))


def test_records_of_the_wrong_layout_are_refused() -> None:
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
    """Decoding over records equals decoding over their rows, and q has a gradient."""
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


def test_scales_that_are_subnormal_numbers() -> None:
    """A CPU flushes subnormal numbers to zero, but the products of codes and scales are normal."""
    codes = np.linspace(-448, 448, 512).astype(jnp.float8_e4m3fn)
    small = np.array([2.0**-127, 2.0**-130, 1.5 * 2.0**-128, 2.0**-126], np.float32)
    record = np.zeros(656, np.uint8)
    record[:512], record[512:528] = codes.view(np.uint8), small.view(np.uint8)
    page = np.zeros(584, np.uint8)
    page[:448], page[576:583] = codes[:448].view(np.uint8), [0, 1, 2, 0, 0, 254, 100]
    exact = codes.astype(np.float64)
    wide = np.repeat(2.0 ** (page[576:583].astype(np.float64) - 127), 64)
    for dtype in (jnp.float32, jnp.bfloat16):
        for got, want in (
            (unpack_records(jnp.asarray(record), dtype)[:512], exact * np.repeat(small, 128)),
            (unpack_page_records(jnp.asarray(page[None]), dtype)[0, :448], exact[:448] * wide),
        ):
            with np.errstate(over="ignore"):
                want = want.astype(np.float32).astype(dtype)
            normal = np.abs(want.astype(np.float64)) >= 2.0**-126
            assert normal.sum() > 300
            np.testing.assert_array_equal(np.asarray(got)[normal], want[normal])
