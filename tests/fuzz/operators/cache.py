"""Appends to and updates of flat and paged caches, compared bit by bit."""

from __future__ import annotations

from typing import Any

import numpy as np
from fuzz.draw import INT_MAX, Call, Draw, bf16, f16, f32, i32
from support.oracles.cache import packed

from jax_dsa import FlatCache, PagedCache


def draw_cache(c: Draw, r: Draw, kind: type, B: int, G: int, dim: int, fp8: bool) -> Any:
    """Draws a cache with arbitrary contents, whose requests share no pages."""
    dtype, width = (np.uint8, 656) if fp8 else (c.one(f32, bf16, f16), dim)

    def rows(*shape: int) -> np.ndarray:
        x = r.rng.integers(0, 99, (*shape, G, width))
        return x.astype(dtype)

    if kind is FlatCache:
        (S,) = c.dims(S=8)
        return FlatCache(rows(B, S), r.positions(S, B))
    spare, L, R = c.dims(P=3, L=4, R=3)
    P = B * R + spare
    table = r.rng.permutation(P)[: B * R].reshape(B, R)
    ends = r.positions(P, B, R)
    outside = (ends < 0) | (ends >= P)
    table = np.where(outside & (r.rng.random((B, R)) < 0.3), ends, table).astype(i32)
    return PagedCache(rows(P, L), table, r.positions(R * L, B))


def written(cache: Any, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Returns the stored rows with new ones written at positions [B, T]."""
    data = (cache.data if isinstance(cache, FlatCache) else cache.pages).copy()
    new = packed(rows) if data.dtype == np.uint8 else rows.astype(data.dtype)
    for b, t in np.ndindex(*positions.shape):
        p = int(positions[b, t])
        if isinstance(cache, FlatCache):
            if 0 <= p < data.shape[1]:
                data[b, p] = new[b, t]
        elif 0 <= p < cache.page_table.shape[1] * data.shape[1]:
            page = int(cache.page_table[b, p // data.shape[1]])
            if 0 <= page < len(data):
                data[page, p % data.shape[1]] = new[b, t]
    return data


def places_end(cache: Any, lengths: np.ndarray) -> np.ndarray:
    """Returns the first position from `lengths` on that has no place in the cache."""
    ends = np.full(lengths.shape, cache.capacity)
    if isinstance(cache, PagedCache):
        count, size = cache.pages.shape[:2]
        for b, r in np.ndindex(*cache.page_table.shape):
            if not 0 <= cache.page_table[b, r] < count and r >= lengths[b] // max(1, size):
                ends[b] = min(ends[b], r * size)
    return ends


def result(cache: Any, data: np.ndarray, lengths: np.ndarray) -> list[np.ndarray]:
    """Returns the leaves of a cache."""
    if isinstance(cache, FlatCache):
        return [data, lengths]
    return [data, cache.page_table, lengths]


def draw_step(c: Draw, r: Draw, kind: type) -> tuple[Any, np.ndarray, tuple]:
    """Draws a cache and new rows. Returns them and the dtypes of the cache's leaves."""
    B, T, G, D = c.dims(B=3, T=5, G=2, D=4)
    fp8 = D > 0 and c.chance(0.2)
    dim = 576 if fp8 else D
    cache = draw_cache(c, r, kind, B, G, dim, fp8)
    rows = r.rng.normal(size=(B, T, G, dim)).astype(c.one(f32, bf16, f16))
    stored = (cache.data if kind is FlatCache else cache.pages).dtype
    return cache, rows, (stored, i32) if kind is FlatCache else (stored, i32, i32)


def appender(kind: type) -> Any:
    def draw(c: Draw, r: Draw) -> Call:
        cache, rows, dtypes = draw_step(c, r, kind)
        B, T = rows.shape[:2]
        kwargs = {"self": cache, "rows": rows, "counts": r.positions(T, B) if c.chance() else None}

        def want(**x: Any) -> list[np.ndarray]:
            cache = x["self"]
            start = np.maximum(cache.lengths.astype(np.int64), 0)
            counts = np.full(B, T) if x["counts"] is None else np.clip(x["counts"], 0, T)
            lengths = np.minimum(start + counts, INT_MAX)
            ends = places_end(cache, start)
            counted = np.maximum(start, np.minimum(lengths, ends))
            lengths = np.where(ends < cache.capacity, counted, lengths)
            positions = start[:, None] + np.arange(T)
            inside = positions < np.minimum(lengths, ends)[:, None]
            data = written(cache, x["rows"], np.where(inside, positions, -1))
            return result(cache, data, lengths)

        return Call(kind.append, kwargs, want, dtypes, exact=True)

    return draw


def updater(kind: type) -> Any:
    def draw(c: Draw, r: Draw) -> Call:
        cache, rows, dtypes = draw_step(c, r, kind)
        B, T = rows.shape[:2]
        # All positions differ, because the order of writes to one position is undefined.
        positions = np.stack([r.rng.permutation(T + 9)[:T] - 2 for _ in range(B)] or [np.zeros(T)])
        ends = r.positions(0, B, T)
        outside = (ends < 0) | (ends > 10**6)
        positions = np.where(outside, ends, positions[:B]).astype(i32)
        kwargs = {"self": cache, "rows": rows, "positions": positions}

        def want(**x: Any) -> list[np.ndarray]:
            data = written(x["self"], x["rows"], x["positions"])
            return result(x["self"], data, x["self"].lengths)

        return Call(kind.update, kwargs, want, dtypes, exact=True)

    return draw


GENERATORS = {
    "FlatCache.append": appender(FlatCache),
    "FlatCache.update": updater(FlatCache),
    "PagedCache.append": appender(PagedCache),
    "PagedCache.update": updater(PagedCache),
}
