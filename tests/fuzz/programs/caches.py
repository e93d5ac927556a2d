"""Schedules of flat, paged and htree caches, compared with what each request has in float64."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
from fuzz.draw import Draw, bf16, f32
from fuzz.operators.cache import places_end
from fuzz.operators.htree import options_of
from support.compare import assert_matches
from support.oracles import fp8 as fp8_oracle
from support.oracles import htree as htree_oracle
from support.oracles import indexer as indexer_oracle
from support.oracles import mqa_decode as mqa_oracle
from support.oracles import sparse_mla as sparse_oracle
from support.oracles import topk as topk_oracle
from support.oracles.cache import packed, unpacked

from jax_dsa import (
    FlatCache,
    HTreeCache,
    PagedCache,
    htree_decode,
    indexer_topk,
    mqa_decode,
    sparse_mla_decode,
)

STEPS = 6
INT_MAX = 2**31 - 1


def stored(rows: np.ndarray, storage: Any) -> np.ndarray:
    """Returns rows as a cache of this kind holds them, in float64."""
    if storage == 656:
        return unpacked(packed(rows)).astype(np.float64)
    if storage == 584:
        codes, scales = fp8_oracle.quantize(rows[..., :448], 64, True)
        values = codes.astype(np.float64) * np.repeat(scales.astype(np.float64), 64, -1)
        return np.concatenate([values, rows[..., 448:].astype(bf16).astype(np.float64)], -1)
    return rows.astype(storage).astype(np.float64)


class Schedule:
    """A cache, and a model of it.

    The pool of a model holds the rows of the cache in float64. In an orderly schedule no two
    requests share a page, and a page changes its request only where no tokens are. The readers'
    results are then compared with the rows that each request appended, whatever the pool holds.
    """

    def __init__(self, case: Any, c: Draw, r: Draw, paged: bool) -> None:
        self.case, self.r = case, r
        self.orderly = c.chance()
        self.storage = c.one(f32, f32, f32, bf16, 656, *([584] if paged else []))
        self.records = isinstance(self.storage, int)
        self.dim = {656: 576, 584: 512}.get(self.storage, c.one(3, 5))
        self.batch, self.groups = c.one(1, 2, 3), c.one(1, 1, 2)
        self.tokens, self.queries, self.heads = c.one(1, 2, 4), c.one(1, 2), c.one(1, 2)
        self.causal, self.top_k = c.chance(), c.one(1, 3)
        dtype, fp8 = (bf16, True) if self.records else (self.storage, False)
        options = {"groups": self.groups, "dtype": dtype, "fp8": fp8}
        B = self.batch
        if paged:
            P, L, R = c.one(2, 4, 7), c.one(1, 2, 4), c.one(1, 2, 3)
            cache: Any = PagedCache.empty(P, L, B, R, self.dim, **options)
        else:
            cache = FlatCache.empty(B, c.one(1, 4, 9), self.dim, **options)
        cache = jax.tree.map(np.asarray, cache)
        self.name = "pages" if paged else "data"
        garbage = np.full((*getattr(cache, self.name).shape[:3], self.dim), np.nan)
        if not self.records:  # Nothing may read what was never written.
            cache = dataclasses.replace(cache, **{self.name: garbage.astype(dtype)})
            self.pool = garbage
        else:
            self.pool = np.zeros(garbage.shape)
        self.cache, self.paged = cache, paged
        self.told: list[list[np.ndarray]] = [[] for _ in range(B)]

    def run(self) -> None:
        actions = [self.append, self.append, self.roll_back, self.update]
        for _ in range(STEPS):
            if self.paged:
                self.map_pages()
            self.r.one(*actions)()
            self.check_lengths()
            self.r.one(self.read_all, self.read_some, self.read_best)()

    def slots(self, positions: np.ndarray) -> dict[tuple[int, int], tuple[int, int]]:
        """Returns the place in the pool of each new row that has one.

        Raises:
            LookupError: If two rows have the same place, so that the result is undefined.
        """
        places = {}
        for b, t in np.ndindex(*positions.shape):
            p = int(positions[b, t])
            if not 0 <= p < self.cache.capacity:
                continue
            place = b, p
            if self.paged:
                page = int(self.cache.page_table[b, p // self.pool.shape[1]])
                if not 0 <= page < len(self.pool):
                    continue
                place = page, p % self.pool.shape[1]
            if place in places.values():
                raise LookupError(place)
            places[b, t] = place
        return places

    def new_rows(self) -> np.ndarray:
        shape = self.batch, self.tokens, self.groups, self.dim
        return self.r.normal(f32, *shape) if self.records else self.r.odd(f32, *shape)

    def call(self, name: str, run: Any, *args: Any) -> Any:
        return jax.tree.map(np.asarray, self.case.compiled(run, name)(*args))

    def append(self) -> None:
        rows, start = self.new_rows(), np.maximum(self.cache.lengths.astype(np.int64), 0)
        counts = self.r.positions(self.tokens, self.batch)
        counts = self.r.one(counts, np.full(self.batch, self.tokens, np.int32))
        lengths = np.minimum(start + np.clip(counts, 0, self.tokens), INT_MAX)
        ends = places_end(self.cache, start)
        counted = np.maximum(start, np.minimum(lengths, ends))
        lengths = np.where(ends < self.cache.capacity, counted, lengths)
        positions = start[:, None] + np.arange(self.tokens)
        positions = np.where(positions < np.minimum(lengths, ends)[:, None], positions, -1)
        try:
            slots = self.slots(positions)
        except LookupError:
            return
        free = np.maximum(ends - np.minimum(start, self.cache.capacity), 0)
        self.cache, before = self.call(
            "append",
            lambda x, rows, n: (x.append(rows, n), x.free_tokens),
            self.cache,
            rows,
            counts,
        )
        np.testing.assert_array_equal(before, free, err_msg="free_tokens")
        values = stored(rows, self.storage)
        for (b, t), place in slots.items():
            self.pool[place] = values[b, t]
            self.told[b].append(values[b, t])
        np.testing.assert_array_equal(self.cache.lengths, lengths, err_msg="lengths")

    def update(self) -> None:
        rows, shape = self.new_rows(), (self.batch, self.tokens)
        positions = self.r.positions(self.cache.capacity, *shape)
        if self.orderly:
            most = np.array([len(told) for told in self.told])[:, None]
            positions = np.where(positions < most, positions, -1)
        try:
            slots = self.slots(positions)
        except LookupError:
            return
        self.cache = self.call(
            "update", lambda *x: x[0].update(*x[1:]), self.cache, rows, positions
        )
        values = stored(rows, self.storage)
        for (b, t), place in slots.items():
            self.pool[place] = values[b, t]
            if self.orderly:
                self.told[b][positions[b, t]] = values[b, t]

    def roll_back(self) -> None:
        lengths = np.maximum(self.cache.lengths, 0)
        for b in range(self.batch):
            if not self.orderly:
                # NaN that was never written may be read if the lengths say so.
                lengths[b] = self.r.rng.integers(-1, lengths[b] + 1)
                continue
            lengths[b] = self.r.one(0, self.r.rng.integers(len(self.told[b]) + 1))
            del self.told[b][lengths[b] :]
        self.cache = dataclasses.replace(self.cache, lengths=lengths.astype(np.int32))

    def map_pages(self) -> None:
        """Maps random pages, also to several requests, or none; orderly only behind the tokens."""
        P, L = self.pool.shape[:2]
        table = self.cache.page_table.copy()
        if not self.orderly:
            wild = self.r.positions(P, *table.shape)
            table = np.where(self.r.rng.random(table.shape) < 0.3, wild, table)
        else:
            used = [-(-len(told) // L) for told in self.told]
            taken = {int(table[b, i]) for b, n in enumerate(used) for i in range(n)}
            free = [p for p in self.r.rng.permutation(P).tolist() if p not in taken]
            for b, n in enumerate(used):
                for i in range(n, table.shape[1]):
                    is_mapped = bool(free) and self.r.chance(0.7)
                    table[b, i] = free.pop() if is_mapped else self.r.one(-1, P, INT_MAX)
        self.cache = dataclasses.replace(self.cache, page_table=table.astype(np.int32))

    def check_lengths(self) -> None:
        if self.orderly:
            for b, told in enumerate(self.told):
                assert len(told) == min(self.cache.lengths[b], self.cache.capacity), b

    def seen(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns the rows [B, S, G, D] of the requests, which exist, and the lengths."""
        lengths = np.maximum(self.cache.lengths.astype(np.int64), 0)
        if not self.orderly:
            if self.paged:
                return *mqa_oracle.unpaged(self.pool, self.cache.page_table), lengths
            return self.pool, np.ones(self.pool.shape[:2], bool), lengths
        rows = np.zeros((self.batch, self.cache.capacity, self.groups, self.dim))
        exists = np.zeros(rows.shape[:2], bool)
        for b, told in enumerate(self.told):
            rows[b, : len(told)] = np.reshape(told, (-1, self.groups, self.dim))
            exists[b, : len(told)] = True
        return rows, exists, lengths

    def query(self) -> np.ndarray:
        heads = self.groups * self.heads
        dtype = f32 if self.records else self.storage
        return self.r.normal(dtype, self.batch, self.queries, heads, self.dim)

    def tolerance(self) -> float:
        return 2e-2 if self.storage == bf16 else 1e-4

    def read_all(self) -> None:
        """Compares `mqa_decode`."""
        q, (rows, exists, lengths) = self.query(), self.seen()
        width, scale = min(512, self.dim), self.dim**-0.5
        got = self.call(
            "mqa_decode",
            lambda q, x: mqa_decode(q, x, value_dim=width, scale=scale, return_lse=True),
            *(q, self.cache),
        )
        out, lse, _ = mqa_oracle.mqa_decode(
            *(q, rows, rows[..., :width]), scale=scale, key_value_seq_lengths=lengths, mapped=exists
        )
        self.compare("mqa_decode", got, (out, lse))

    def read_some(self) -> None:
        """Compares `sparse_mla_decode`."""
        q, (rows, exists, lengths) = self.query(), self.seen()
        causal, width = self.causal, min(512, self.dim)
        indices = self.r.positions(self.cache.capacity, self.batch, self.queries, self.groups, 5)
        got = self.call(
            "sparse_mla_decode",
            lambda *x: sparse_mla_decode(*x, value_dim=width, is_causal=causal, return_lse=True),
            *(q, self.cache, indices),
        )
        b = np.arange(self.batch)[:, None, None, None]
        t = np.arange(self.queries)[:, None, None]
        valid = (indices >= 0) & (indices < np.minimum(lengths, rows.shape[1])[b])
        if causal:
            valid &= indices <= lengths[b] - self.queries + t
        valid &= exists[b, np.clip(indices, 0, rows.shape[1] - 1)]
        slots = np.where(valid, indices, -1)
        scale = self.dim**-0.5
        want = sparse_oracle.sparse_mla(q, rows, value_dim=width, indices=slots, scale=scale)
        self.compare("sparse_mla_decode", got, want)

    def read_best(self) -> None:
        """Compares `indexer_topk`, whose scores are exact."""
        if self.records or self.groups > 1:
            self.read_all()
            return
        (rows, exists, lengths), B, T = self.seen(), self.batch, self.queries
        q = self.r.odd(self.storage, B, T, 3, self.dim)
        weights, k = self.r.odd(f32, B, T, 3) / f32.type(8), self.top_k
        got, values = self.call(
            "indexer_topk",
            lambda q, x, w: indexer_topk(q, x, w, k, is_causal=True),
            *(q, self.cache, weights),
        )
        ends = np.clip(lengths[:, None] - T + np.arange(1, T + 1), 0, rows.shape[1])
        logits = indexer_oracle.indexer_logits(
            *(q, rows[:, :, 0], weights),
            **{"index_k_scale": None, "starts": np.zeros_like(ends), "ends": ends, "relu": True},
        )
        logits = np.where(exists[:, None], logits, -np.inf)
        want = topk_oracle.topk(logits, k)
        np.testing.assert_array_equal(got, want, err_msg="indexer_topk")
        assert_matches(values, topk_oracle.values(logits, want).astype(f32), 1e-5, "indexer_topk")

    def compare(self, name: str, got: Any, want: Any) -> None:
        want = [np.asarray(w).astype(g.dtype) for g, w in zip(got, want, strict=True)]
        assert_matches(list(got), want, self.tolerance(), name, least=1.0)


def schedule(paged: bool) -> Any:
    def run(case: Any, c: Draw, r: Draw) -> None:
        Schedule(case, c, r, paged).run()

    return run


def htree_schedule(case: Any, c: Draw, r: Draw) -> None:
    """Appends, rolls back and reads an htree cache. Float64 keeps the selections exact."""
    B, G, D, E, T = c.one(1, 2), c.one(1, 2), 4, 3, c.one(1, 2, 5)
    heads, queries, capacity = G * c.one(1, 2), c.one(1, 2), c.one(1, 5, 9, 14)
    tree = {"compression": c.one(2, 3), "top_k": c.one(1, 2)}
    cache: Any = HTreeCache.empty(B, capacity, D, E, groups=G, dtype=f32, **tree)
    nan = {n: np.full(getattr(cache, n).shape, np.nan, f32) for n in "kv"}
    cache = dataclasses.replace(cache, **nan, lengths=np.zeros(B, np.int32))
    append = case.compiled(lambda cache, k, v, n: cache.append(k, v, n), "append")
    decode = case.compiled(functools.partial(htree_decode, return_lse=True), "decode")
    told: list[list[Any]] = [[] for _ in range(B)]
    lengths = np.zeros(B, np.int64)
    options = options_of({"scale": None, "rope_base": 10000.0, **tree})
    for _ in range(STEPS):
        if r.chance(0.3):
            for b in range(B):
                lengths[b] = r.one(0, r.rng.integers(len(told[b]) + 1))
                del told[b][lengths[b] :]
            cache = dataclasses.replace(cache, lengths=lengths.astype(np.int32))
        k, v = r.normal(f32, B, T, G, D), r.normal(f32, B, T, G, E)
        counts = r.positions(T, B)
        cache = append(cache, k, v, counts)
        for b, n in enumerate(np.clip(counts, 0, T)):
            lengths[b] += n
            told[b] = [*told[b], *zip(k[b, :n], v[b, :n], strict=True)][:capacity]
        np.testing.assert_array_equal(cache.lengths, lengths, err_msg="lengths")
        np.testing.assert_array_equal(cache.free_tokens, np.maximum(capacity - lengths, 0))
        q = r.normal(f32, B, queries, heads, D)
        out, lse = (np.zeros((B, queries, heads, *e)) for e in ((E,), ()))
        lse[:] = -np.inf
        for b, t in np.ndindex(B, queries):
            position = min(int(lengths[b]) - queries + t, len(told[b]) - 1)
            if position >= 0:
                padded = np.zeros((1, len(told[b]), heads, D))
                padded[0, position] = q[b, t]
                keys, values = (np.stack(x)[None].astype(np.float64) for x in zip(*told[b]))
                whole = htree_oracle.attention(padded, keys, values, **options)
                out[b, t], lse[b, t] = (y[0, position] for y in whole[:2])
        want = out.astype(f32), lse.astype(f32)
        assert_matches(list(decode(q, cache)), list(want), 1e-4, "htree_decode", least=1.0)


PROGRAMS = {
    "flat_cache": schedule(paged=False),
    "paged_cache": schedule(paged=True),
    "htree_cache": htree_schedule,
}
