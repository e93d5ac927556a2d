"""Schedules of decoding, compared with the forward pass over the tokens that were kept."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from fuzz.draw import Draw, f32
from support.compare import assert_matches
from support.decoders import CONFIG, DECODER, SHARING, decoder
from support.published_layers import LAYERS, POOLED, M, layer

STEPS = 4
INT_MAX = 2**31 - 1


def compressed_schedule(case: Any, c: Draw, r: Draw) -> None:
    """Appends tokens and padding, drops tokens, begins new requests, and sets wrong lengths.

    The padding and the tokens that are dropped are NaN, so that any later read of them shows.
    """
    config = LAYERS[c.one("selected", "selected", "all", "window")]
    config = dataclasses.replace(config, window=c.one(1, 3, 6))
    batch, tokens, most, capacity = c.one(1, 3), c.one(1, 3, 6), c.one(0, 1, 5), 24
    module = layer(c.rng, config)
    forward = case.compiled(lambda x: module(x)[0], "forward")
    step = case.compiled(lambda x, cache, counts: module.decode(x, cache, counts=counts), "decode")
    cache = module.init_cache(batch, capacity, max_rollback=most)
    lengths, longest = np.zeros((2, batch), int)
    is_valid = np.ones(batch, bool)
    kept = np.zeros((batch, capacity, M), f32)
    for _ in range(STEPS):
        counts = r.rng.integers(-1, tokens + 2, batch)  # clipped to 0..tokens
        added = np.clip(counts, 0, tokens)
        is_valid |= lengths == 0
        is_valid &= (lengths == 0) | ((lengths <= longest) & (lengths >= longest - most))
        is_valid &= lengths >= 0
        longest = np.maximum(np.where(lengths, longest, 0), lengths + added)
        least = np.clip(longest - most, 0, np.maximum(lengths + added, 0))
        after = r.rng.integers(least, np.maximum(lengths + added, 0) + 1)
        after[(r.rng.random(batch) < 0.1) | (after > capacity - tokens)] = 0
        x = r.normal(f32, batch, tokens, M)
        x[lengths[:, None] + np.arange(tokens) >= after[:, None]] = np.nan
        y, cache, indices = jax.tree.map(np.asarray, step(x, cache, counts.astype(np.int32)))
        for b in np.flatnonzero(is_valid):
            kept[b, lengths[b] : after[b]] = x[b, : max(0, after[b] - lengths[b])]
        want = np.asarray(forward(np.nan_to_num(kept)))
        for b in range(batch):
            if not is_valid[b]:
                assert np.isnan(y[b]).all(), f"request {b} is not valid"
                continue
            here = slice(lengths[b], max(lengths[b], after[b]))
            assert_matches(y[b, : here.stop - here.start], want[b, here], 1e-3, f"request {b}")
            assert not y[b, added[b] :].any() and np.isfinite(y[b, added[b] :]).all()
            assert indices is None or (indices[b, added[b] :] == -1).all()
        # A request that is not valid stays so until its length is 0.
        longest = np.where(is_valid, longest, INT_MAX)
        wrong = r.one(-1, *(longest[:1] - most - 1).tolist(), *(longest[:1] + 1).tolist())
        onwards = np.maximum(lengths + added, 1)  # what a caller who does not notice goes on from
        onwards[(onwards > capacity - tokens) | r.chance(0.3)] = 0
        lengths = np.where(is_valid, after, onwards)
        if r.chance(0.2) and -1 <= wrong < capacity - tokens:
            lengths[0] = wrong
        cache = cache.with_lengths(lengths.astype(np.int32))


def pooled_schedule(case: Any, c: Draw, r: Draw) -> None:
    """Does what `compressed_schedule` does, for a layer whose indexer selects pools of tokens.

    Outputs after a supported length are right. After another length they are right or NaN, and
    once they are NaN they stay so until the length is 0.
    """
    size, batch, tokens, most, capacity = (
        c.one(2, 3, 4),
        c.one(1, 3),
        c.one(1, 3, 6),
        c.one(0, 5),
        24,
    )
    config = dataclasses.replace(
        POOLED, index_pool=size, top_k=size * c.one(1, 3), index_tail=c.one(True, True, False)
    )
    module = layer(c.rng, config)
    forward = case.compiled(lambda x: module(x)[0], "forward")
    step = case.compiled(lambda x, cache, counts: module.decode(x, cache, counts=counts), "decode")
    page = c.one(None, size, 2 * size)
    cache = module.init_cache(batch, capacity, max_rollback=most, page_size=page)
    lengths, longest = np.zeros((2, batch), int)
    was_valid, must_be_valid = np.ones((2, batch), bool)
    kept = np.zeros((batch, capacity, M), f32)
    for _ in range(STEPS):
        counts = r.rng.integers(-1, tokens + 2, batch)  # clipped to 0..tokens
        added = np.clip(counts, 0, tokens)
        longest = np.maximum(np.where(lengths, longest, 0), lengths + added)
        end = np.maximum(lengths + added, 0)
        after = r.rng.integers(np.clip(longest - most, 0, end), end + 1)
        far = r.rng.integers(0, end + 1) // size * size
        after = np.where(r.rng.random(batch) < 0.3, far, after)
        after[(r.rng.random(batch) < 0.1) | (after > capacity - tokens)] = 0
        x = r.normal(f32, batch, tokens, M)
        x[lengths[:, None] + np.arange(tokens) >= after[:, None]] = np.nan
        y, cache, indices = jax.tree.map(np.asarray, step(x, cache, counts.astype(np.int32)))
        is_valid = cache.open_pool.longest < INT_MAX
        for b in np.flatnonzero(is_valid):
            kept[b, lengths[b] : after[b]] = x[b, : max(0, after[b] - lengths[b])]
        want = np.asarray(forward(np.nan_to_num(kept)))
        for b in range(batch):
            if not is_valid[b]:
                assert not must_be_valid[b], f"request {b} is valid"
                assert np.isnan(y[b]).all(), f"request {b} is not valid"
                continue
            assert was_valid[b] or lengths[b] == 0, f"request {b} stays not valid"
            here = slice(lengths[b], max(lengths[b], after[b]))
            assert_matches(y[b, : here.stop - here.start], want[b, here], 1e-3, f"request {b}")
            assert not y[b, added[b] :].any() and (indices[b, added[b] :] == -1).all()
        wrong = r.one(-1, *(longest[:1] - most - 1).tolist(), *(longest[:1] + 1).tolist())
        # The cache has NaN in the rows from `after` to `longest`. After a length between the two,
        # results cannot be compared.
        comparable = wrong <= after[0] or wrong > longest[0]
        longest = np.where(after < longest - most, after, longest)
        onwards = np.maximum(lengths + added, 1)  # what a caller who does not notice goes on from
        onwards[(onwards > capacity - tokens) | r.chance(0.3)] = 0
        lengths, was_valid = np.where(is_valid, after, onwards), is_valid
        must_be_valid = is_valid | (lengths == 0)
        if r.chance(0.2) and comparable and -1 <= wrong < capacity - tokens and wrong % size:
            lengths[0], must_be_valid[0] = wrong, False
        cache = cache.with_lengths(lengths.astype(np.int32))


def decoder_schedule(case: Any, c: Draw, r: Draw) -> None:
    """Decodes with flat and paged caches: rollbacks, overflows, new requests and new pages."""
    config = c.one(DECODER, SHARING)
    batch, tokens, capacity, page = c.one(1, 2), c.one(1, 2, 5), 12, c.one(None, 3, 4)
    attention = dataclasses.replace(CONFIG, top_k=c.one(2, CONFIG.top_k))
    if c.chance(0.3):
        size = page or 3
        attention = dataclasses.replace(
            CONFIG, index_rope_dim=0, index_pool=size, top_k=size * c.one(1, 2)
        )
    model = decoder(dataclasses.replace(config, attention=attention))
    forward = case.compiled(lambda x: model(x)[0], "forward")
    step = case.compiled(lambda x, cache: model.decode(x, cache), "decode")
    cache = model.init_cache(batch, capacity, page_size=page)
    lengths, kept = np.zeros(batch, int), np.zeros((batch, capacity), np.int32)
    tables = None
    if page is not None:
        tables = r.rng.permutation(batch * capacity // page).reshape(batch, -1).astype(np.int32)
        cache = cache.with_page_table(tables)
    for _ in range(STEPS):
        x = r.rng.integers(0, config.vocab, (batch, tokens)).astype(np.int32)
        got, cache = step(x, cache)
        for b in range(batch):
            here = kept[b, lengths[b] : lengths[b] + tokens]
            here[:] = x[b, : len(here)]
        want = np.asarray(forward(kept))
        for b in range(batch):
            expected = want[b, lengths[b] : lengths[b] + tokens]
            found = np.asarray(got)[b, : len(expected)]
            assert_matches(found, expected, 1e-3, f"request {b}")
        lengths = lengths + tokens
        for one in cache.layers:
            if one.kv is not None:
                np.testing.assert_array_equal(one.lengths, lengths, err_msg="lengths")
        lengths = np.minimum(lengths, r.one(capacity, r.rng.integers(0, capacity + 1, batch)))
        lengths[r.rng.random(batch) < 0.2] = 0
        cache = cache.with_lengths(jnp.asarray(lengths, jnp.int32))
        if tables is not None and r.chance():  # Pages without tokens are dealt again.
            used = [list(tables[b, : -(-n // page)]) for b, n in enumerate(lengths)]
            taken = {p for pages in used for p in pages}
            free = [p for p in r.rng.permutation(tables.size) if p not in taken]
            for b, pages in enumerate(used):
                rest = tables.shape[1] - len(pages)
                tables[b] = [*pages, *free[:rest]]
                del free[:rest]
            cache = cache.with_page_table(tables.copy())


def grouped_schedule(case: Any, c: Draw, r: Draw) -> None:
    """Appends tokens and padding to flat and paged caches, drops tokens, and begins new requests.

    The padding and the tokens that are dropped are NaN, so that any later read of them shows.
    """
    config = LAYERS[c.one("best key", "mean key", "mean key", "grouped")]
    batch, tokens, most, capacity = c.one(1, 3), c.one(1, 3, 6), c.one(0, 1, 5), 24
    page = c.one(None, 4, 8)
    module = layer(c.rng, config)
    forward = case.compiled(lambda x: module(x)[0], "forward")
    step = case.compiled(lambda x, cache, counts: module.decode(x, cache, counts=counts), "decode")
    cache = module.init_cache(batch, capacity, page_size=page, max_rollback=most)
    if page is not None:
        table = r.rng.permutation(batch * capacity // page).reshape(batch, -1)
        cache = cache.with_page_table(table.astype(np.int32))
    lengths, longest = np.zeros((2, batch), int)
    kept = np.zeros((batch, capacity, M), f32)
    for _ in range(STEPS):
        counts = r.rng.integers(-1, tokens + 2, batch)  # clipped to 0..tokens
        added = np.clip(counts, 0, tokens)
        longest = np.maximum(np.where(lengths, longest, 0), lengths + added)
        # Only the mean limits how far a request may go back.
        least = np.maximum(longest - most, 0) if config.indexer == "mean" else 0 * longest
        after = r.rng.integers(least, lengths + added + 1)
        after[(r.rng.random(batch) < 0.1) | (after > capacity - tokens)] = 0
        x = r.normal(f32, batch, tokens, M)
        x[lengths[:, None] + np.arange(tokens) >= after[:, None]] = np.nan
        y, cache, indices = jax.tree.map(np.asarray, step(x, cache, counts.astype(np.int32)))
        for b in range(batch):
            kept[b, lengths[b] : after[b]] = x[b, : max(0, after[b] - lengths[b])]
        want = np.asarray(forward(np.nan_to_num(kept)))
        for b in range(batch):
            here = slice(lengths[b], max(lengths[b], after[b]))
            assert_matches(y[b, : here.stop - here.start], want[b, here], 1e-3, f"request {b}")
            assert not y[b, added[b] :].any() and np.isfinite(y[b, added[b] :]).all()
            assert indices is None or (indices[b, added[b] :] == -1).all()
        lengths = after
        cache = cache.with_lengths(lengths.astype(np.int32))


PROGRAMS = {
    "compressed_cache": compressed_schedule,
    "pooled_cache": pooled_schedule,
    "decoder_cache": decoder_schedule,
    "grouped_cache": grouped_schedule,
}
