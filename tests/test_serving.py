"""Pages that requests share: the allocator, pools smaller than all capacities, and new requests."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.compare import assert_matches
from support.decoders import SHARING, decoder
from support.marks import slow

import jax_dsa
from jax_dsa import nn
from jax_dsa.serving import OutOfPagesError, PageAllocator

DECODER = dataclasses.replace(SHARING, num_layers=2)


def check_pages(pages, wanted):
    """Raises unless each slot has the pages for its tokens and every page is in one place."""
    table = pages.table
    held = table[table >= 0]
    assert len(np.unique(held)) == len(held) and (held < pages.num_pages).all()
    assert len(held) + pages.free_pages == pages.num_pages
    counts = -(-np.asarray(wanted) // pages.page_size)
    np.testing.assert_array_equal(table >= 0, np.arange(table.shape[1]) < counts[:, None])


@pytest.mark.parametrize("seed", [0, slow(1), slow(2)])
def test_random_schedules_neither_share_nor_lose_a_page(seed):
    """10,000 steps. The pool is too small for all slots, so that reservations fail as well."""
    rng = np.random.default_rng(seed)
    slots, entries, size = 6, 8, 4
    pages = PageAllocator(num_pages=25, page_size=size, slots=slots, pages_per_request=entries)
    wanted, failed = np.zeros(slots, int), 0
    for _ in range(10_000):
        slot = int(rng.integers(slots))
        if rng.random() < 0.2:
            pages.free(slot)
            wanted[slot] = 0
        else:
            tokens = int(rng.integers(entries * size + 1))
            before = pages.table
            more = max(0, -(-tokens // size) - (before[slot] >= 0).sum())
            assert pages.fits(slot, tokens) == (more <= pages.free_pages)
            try:
                pages.reserve(slot, tokens)
                wanted[slot] = max(wanted[slot], tokens)
                # The pages that requests had stay where they are.
                np.testing.assert_array_equal(pages.table[before >= 0], before[before >= 0])
            except OutOfPagesError:
                failed += 1
                assert more > pages.free_pages
                np.testing.assert_array_equal(pages.table, before)
        check_pages(pages, wanted)
    assert 100 < failed < 9000


@pytest.mark.parametrize("steps", [400, slow(10_000)])
def test_no_row_of_an_ended_request_is_visible(steps):
    """Each row names its request and position. A slot sees the rows of its own request only."""
    rng = np.random.default_rng(0)
    slots, entries, size, most = 4, 4, 2, 3
    pages = PageAllocator(num_pages=9, page_size=size, slots=slots, pages_per_request=entries)
    cache = jax_dsa.PagedCache.empty(9, size, slots, entries, 2, dtype=jnp.float32)

    @jax.jit
    def step(cache, rows, counts):
        """Returns the cache with new rows, what each place holds, and which places are visible."""
        cache, q = cache.append(rows, counts), jnp.zeros((slots, 1, 1, 2))

        def row(place):
            place = jnp.full((slots, 1, 1), place, jnp.int32)
            return jax_dsa.sparse_mla_decode(q, cache, place, value_dim=2, return_lse=True)

        found, lse = jax.vmap(row, out_axes=1)(jnp.arange(cache.capacity))
        return cache, found[:, :, 0, 0], lse[:, :, 0, 0] > -jnp.inf

    requests, lengths, next_request = np.zeros(slots, int), np.zeros(slots, int), 1
    for _ in range(steps):
        counts = np.zeros(slots, np.int32)
        for slot in range(slots):
            if requests[slot] and rng.random() < 0.1:  # The request ends.
                pages.free(slot)
                requests[slot] = lengths[slot] = 0
            if not requests[slot] and rng.random() < 0.3:
                requests[slot], next_request = next_request, next_request + 1
            new = int(rng.integers(most + 1)) if requests[slot] else 0
            new = min(new, entries * size - lengths[slot])
            if pages.fits(slot, int(lengths[slot] + new)):
                pages.reserve(slot, int(lengths[slot] + new))
                counts[slot] = new
        cache = cache.with_page_table(pages.table).with_lengths(lengths)
        assert (np.asarray(cache.free_tokens) >= counts).all()
        places = lengths[:, None] + np.arange(most)
        rows = np.stack(np.broadcast_arrays(requests[:, None] + 1000.0, places), -1)
        cache, found, seen = step(cache, rows[:, :, None].astype(np.float32), counts)
        lengths = lengths + counts
        np.testing.assert_array_equal(cache.lengths, lengths)
        own = np.arange(cache.capacity) < lengths[:, None]
        np.testing.assert_array_equal(seen, own)
        want = np.broadcast_arrays(requests[:, None] + 1000.0, np.arange(cache.capacity))
        np.testing.assert_array_equal(
            np.where(own[..., None], found, -1), np.where(own[..., None], np.stack(want, -1), -1)
        )
    assert next_request > steps // 10


def test_a_pool_smaller_than_all_capacities(rng):
    """Two slots of 8 tokens share 3 pages of 4. A second request takes a slot and its pages.

    The other request goes on. Before that, the rows of the free pages are NaN, which shows any read
    of a row that the new request has not written.
    """
    model = decoder(DECODER)
    cache = model.init_cache(2, 8, page_size=4, num_pages=3)
    pages = PageAllocator(num_pages=3, page_size=4, slots=2, pages_per_request=2)
    for layer in cache.layers:
        assert layer.kv.pages.shape[:2] == (3, 4) and (layer.kv.page_table == -1).all()
        assert layer.index_k is None or layer.index_k.shape[:2] == (3, 4)
    np.testing.assert_array_equal(cache.free_tokens, [0, 0])
    step = jax.jit(lambda t, c, n: model.decode(t, c, counts=n))
    texts = {name: rng.integers(0, 11, size=8).astype(np.int32) for name in "abc"}
    found = {name: [] for name in texts}

    def run(cache, *new):
        tokens, counts = np.zeros((2, 4), np.int32), np.zeros(2, np.int32)
        for slot, (name, n) in enumerate(new):
            done = sum(map(len, found[name]))
            tokens[slot, :n] = texts[name][done : done + n]
            counts[slot] = n
            pages.reserve(slot, done + n)
        logits, cache = step(tokens, cache.with_page_table(pages.table), counts)
        for slot, (name, n) in enumerate(new):
            found[name].append(logits[slot, :n])
        return cache

    cache = run(cache, ("a", 4), ("b", 2))
    np.testing.assert_array_equal(cache.free_tokens, [0, 2])
    cache = run(cache, ("a", 2), ("b", 1))
    with pytest.raises(OutOfPagesError):
        pages.reserve(1, 5)
    pages.free(0)
    free = [page for page in range(3) if page not in pages.table]

    def without_free_pages(x):
        x = np.array(x)
        if x.dtype != np.int32:
            x[free] = np.nan
        return x

    cache = jax.tree.map(without_free_pages, cache)
    cache = cache.with_lengths(np.array([0, 3]))
    cache = run(cache, ("c", 3), ("b", 3))
    cache = run(cache, ("c", 1), ("b", 1))
    np.testing.assert_array_equal(cache.lengths, [4, 7])
    forward = jax.jit(lambda t: model(t)[0])
    for name, logits in found.items():
        got = jnp.concatenate(logits)
        assert_matches(got, forward(texts[name][None])[0, : len(got)], 1e-4, name)


def test_pools_of_other_sizes():
    """A layer without keys of its own has no pages, and FP8 records are in the pool as well."""
    options = {"page_size": 4, "num_pages": 5}
    wide = dataclasses.replace(DECODER.attention, kv_rank=512, rope_dim=64, index_fp8=True)
    layer = nn.LayerCache.empty(wide, 3, 9, fp8=True, **options)
    assert layer.kv.pages.shape == (5, 4, 1, 656) and layer.kv.page_table.shape == (3, 3)
    assert layer.index_k.shape == (5, 4, 8) and layer.index_k_scale.shape == (5, 4)
    for wrong, error, message in (
        ({"num_pages": 5}, ValueError, "'num_pages' is 5, want None without 'page_size'"),
        ({"page_size": 4, "num_pages": -1}, ValueError, "'num_pages' is -1, want int in 0"),
        ({"page_size": 4, "num_pages": 1.5}, TypeError, "'num_pages' is 1.5"),
    ):
        with pytest.raises(error, match=rf"DecoderCache\.empty: argument {message}"):
            nn.DecoderCache.empty(DECODER, 2, 8, **wrong)


def test_misuse_of_the_allocator():
    pages = PageAllocator(num_pages=3, page_size=4, slots=2, pages_per_request=2)
    for call, error, message in (
        (
            lambda: pages.reserve(2, 1),
            ValueError,
            "reserve: argument 'slot' is 2, want int in 0..1",
        ),
        (lambda: pages.free(-1), ValueError, "free: argument 'slot' is -1, want int in 0..1"),
        (lambda: pages.fits(0, 9), ValueError, "fits: argument 'tokens' is 9, want int in 0..8"),
        (lambda: pages.reserve(0, 1.0), TypeError, "reserve: argument 'tokens' is 1.0"),
    ):
        with pytest.raises(error, match=rf"PageAllocator\.{message}"):
            call()
    pages.reserve(0, 8)
    with pytest.raises(
        OutOfPagesError,
        match="8 tokens in slot 1 need 2 more pages of 4 tokens, and 1 of 3 are free",
    ):
        pages.reserve(1, 8)
    pages.table[:] = 7  # Only a copy changes.
    np.testing.assert_array_equal(pages.table, [[0, 1], [-1, -1]])
    assert PageAllocator(4, 2, 1).table.shape == (1, 4)


CACHES = {
    "flat": lambda: jax_dsa.FlatCache.empty(2, 8, 4, dtype=jnp.float32),
    "paged": lambda: jax_dsa.PagedCache.empty(4, 4, 2, 2, 4, dtype=jnp.float32),
    "htree": lambda: jax_dsa.HTreeCache.empty(2, 8, 4, compression=2, top_k=2),
    "decoder": lambda: decoder(DECODER).init_cache(2, 8, page_size=4),
}


@pytest.mark.parametrize("kind", CACHES)
def test_setting_lengths_and_page_tables(kind):
    """The arrays are copied, become int32, and errors name the method."""
    cache = CACHES[kind]()
    lengths = np.array([3, 1])
    longer = cache.with_lengths(lengths)
    lengths[:] = 0
    assert longer.lengths.tolist() == [3, 1] and longer.lengths.dtype == jnp.int32
    with pytest.raises(
        ValueError, match=r"Cache\.with_lengths: argument 'lengths' has shape \(3,\)"
    ):
        cache.with_lengths(np.zeros(3, np.int32))
    with pytest.raises(TypeError, match=r"Cache\.with_lengths: argument 'lengths' is list"):
        cache.with_lengths([0, 0])
    if kind == "paged":
        table = np.array([[1, 0], [3, -1]])
        mapped = cache.with_page_table(table)
        table[:] = 0
        assert mapped.page_table.tolist() == [[1, 0], [3, -1]]
        assert mapped.free_tokens.tolist() == [8, 4]
        with pytest.raises(ValueError, match=r"PagedCache\.with_page_table: argument 'page_table'"):
            cache.with_page_table(table[0])
