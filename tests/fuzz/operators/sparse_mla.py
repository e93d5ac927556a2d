"""Random calls of `sparse_mla`, `sparse_mla_decode`, `attn_dist` and `block_tokens`."""

from __future__ import annotations

from typing import Any

import numpy as np
from fuzz.draw import INT_MAX, INT_MIN, Call, Draw, f32, f64, i32, peak, without_batch
from support.oracles import attn_dist as dist_oracle
from support.oracles import sparse_mla as oracle
from support.oracles.cache import packed, unpacked
from support.oracles.mqa_decode import unpaged

from jax_dsa import (
    FlatCache,
    PagedCache,
    attn_dist,
    block_tokens,
    sparse_mla,
    sparse_mla_decode,
)

# Options that change neither the formula nor the number of results.
UNUSED = "deterministic", "batch_invariant"

KERNEL = {"T": (1, 5), "S": (70, 200), "G": (1,), "M": (4, 64, 70), "D": (512, 576), "K": (5, 130)}


def wide(dtype: np.dtype) -> np.dtype:
    """Returns the dtype of sums."""
    return f64 if dtype == f64 else f32


def draw_start(c: Draw, r: Draw, batch: int, keys: int) -> Any:
    """Returns the position of the first query in one of its forms."""
    ends = INT_MIN, -1, keys, INT_MAX - 1, INT_MAX
    number = c.integer(c.one(0, 1, int(c.rng.integers(-2, keys + 2)), c.one(*ends)))
    return c.one(number, r.positions(keys), r.positions(keys, batch))


def whole(start: Any) -> Any:
    """Returns Python ints, which do not overflow."""
    return [int(x) for x in start] if np.ndim(start) else int(start)


def draw_slots(c: Draw, r: Draw, batch: int, queries: int, groups: int, keys: int, K: int) -> dict:
    """Returns the arguments that say which slots are valid."""
    shape = (batch, queries, K) if c.chance(0.3) else (batch, queries, groups, K)
    return {
        "indices": r.positions(keys, *shape),
        "topk_length": r.positions(K, batch, queries) if c.chance() else None,
    }


def draw_causal(c: Draw, r: Draw, batch: int, keys: int) -> dict[str, Any]:
    """Returns the arguments that say which keys are visible."""
    return {
        "is_causal": c.flag(),
        "query_start": draw_start(c, r, batch, keys),
        "key_stride": c.integer(c.one(1, 1, 2, 3, *([INT_MAX] if c.edge else []))),
    }


def oracle_options(kwargs: dict[str, Any], q: np.ndarray, groups: int) -> dict[str, Any]:
    """Converts the options of `sparse_mla` and `attn_dist` to those of the oracles."""
    x = dict(kwargs)
    x["scale"] = max(1, q.shape[3]) ** -0.5 if x["scale"] is None else float(x["scale"])
    if x["indices"].ndim == 3:
        x["indices"] = np.repeat(x["indices"][:, :, None], groups, 2)
    if "query_start" in x:
        # The position of the last query is capped at the largest int32.
        x["query_start"] = np.minimum(whole(x["query_start"]), INT_MAX - q.shape[1])
        x["key_stride"] = int(x["key_stride"])
    return {n: v for n, v in x.items() if n not in UNUSED}


def draw_sparse_mla(c: Draw, r: Draw) -> Call:
    B, T, S, G, M, D, K = c.dims(KERNEL, B=3, T=4, S=12, G=2, M=3, D=6, K=6)
    dtype = c.dtype()
    E = c.one(None, c.integer(c.below(D)))
    kwargs = {
        "q": r.floats(dtype, B, T, G * M, D),
        "kv": r.floats(dtype, B, S, G, D),
        "value_dim": 512 if c.kernel else E,
        "scale": c.scale(),
        "deterministic": c.flag(),
        "batch_invariant": c.flag(),
        "return_lse": c.flag(0.7),
        "sinks": r.limits(wide(dtype), G * M) if c.chance() else None,
        **draw_slots(c, r, B, T, G, S, K),
        **draw_causal(c, r, B, S),
    }

    def want(q: Any, kv: Any, value_dim: Any, return_lse: Any, **others: Any) -> list[np.ndarray]:
        E = min(512, q.shape[3]) if value_dim is None else int(value_dim)
        options = oracle_options(others, q, kv.shape[2])
        out, lse = oracle.sparse_mla(q, kv, value_dim=E, **options)
        return [out, lse] if return_lse else [out]

    call = Call(
        sparse_mla,
        kwargs,
        want,
        (dtype, wide(dtype)) if kwargs["return_lse"] else (dtype,),
        diff=("q", "kv", *(["sinks"] if kwargs["sinks"] is not None else [])),
        poison=("kv",),
        peak=peak(kwargs["scale"], kwargs["q"], kwargs["kv"]),
    )
    return without_batch(call) if B == 1 and c.chance() else call


def draw_cache(c: Draw, r: Draw, rows: tuple[int, ...], batch: int, dtype: Any) -> Any:
    """Returns a flat or paged cache of rows; of FP8 records if dtype is uint8.

    It has room for at least one token, except in edge cases.
    """

    def draw_rows(*shape: int) -> np.ndarray:
        if dtype == np.uint8:
            return packed(r.floats(f32, *shape, *rows))
        return r.floats(dtype, *shape, *rows)

    if c.chance():
        (S,) = c.dims({"S": (70, 200)}, S=10)
        return FlatCache(draw_rows(batch, S), r.positions(S, batch))
    P, L, R = c.dims({"P": (9,), "L": (64,), "R": (1, 3)}, P=6, L=4, R=3)
    return PagedCache(draw_rows(P, L), r.positions(P, batch, R), r.positions(R * L, batch))


def cached_rows(cache: Any) -> tuple[np.ndarray, np.ndarray]:
    """Returns the rows [B, S, ...] of a cache, and which of them exist."""
    if isinstance(cache, FlatCache):
        data = np.asarray(cache.data)
        rows, exists = data, np.ones(data.shape[:2], bool)
    else:
        rows, exists = unpaged(np.asarray(cache.pages), np.asarray(cache.page_table))
    return unpacked(rows) if rows.dtype == np.uint8 else rows, exists


SLOTS = ("indices", "topk_length")


def seen_keys(
    cache: Any, indices: np.ndarray, topk_length: np.ndarray | None, ends: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the rows of a cache, and its selected and visible keys [B, T, G, K], others -1."""
    rows, exists = cached_rows(cache)
    if indices.ndim == 3:
        indices = np.repeat(indices[:, :, None], rows.shape[2], 2)
    b = np.arange(len(indices))[:, None, None, None]
    lengths = np.clip(cache.lengths.astype(np.int64), 0, rows.shape[1])
    seen = (indices >= 0) & (indices < lengths[b])
    if ends is not None:
        seen &= indices < ends[:, :, None, None]
    if topk_length is not None:
        seen &= np.arange(indices.shape[3]) < topk_length[:, :, None, None]
    if rows.shape[1]:
        seen &= exists[b, np.clip(indices, 0, rows.shape[1] - 1)]
    return rows, np.where(seen, indices.astype(np.int64), -1)


def draw_sparse_mla_decode(c: Draw, r: Draw) -> Call:
    B, T, G, M, D, K = c.dims(KERNEL, B=3, T=3, G=2, M=3, D=6, K=6)
    dtype, records = c.dtype(), not c.gradient and c.chance(0.2)
    D = 576 if records else D
    cache = draw_cache(c, r, (G, D), B, np.uint8 if records else dtype)
    kwargs = {
        "q": r.floats(dtype, B, T, G * M, D),
        "cache": cache,
        "value_dim": 512 if c.kernel else c.one(None, c.integer(c.below(D))),
        "scale": c.scale(),
        "is_causal": c.flag(),
        "batch_invariant": c.flag(),
        "return_lse": c.flag(0.7),
        "sinks": r.limits(wide(dtype), G * M) if c.chance() else None,
        **draw_slots(c, r, B, T, G, cache.capacity, K),
    }
    caches = [cache]
    if c.chance(0.4):
        caches.append(draw_cache(c, r, (G, D), B, np.uint8 if records else dtype))
        slots = draw_slots(c, r, B, T, G, caches[1].capacity, c.dims({"K2": (3, 70)}, K2=5)[0])
        kwargs |= {f"extra_{name}": x for name, x in slots.items()}
        kwargs |= {
            "extra_cache": caches[1],
            "extra_key_stride": c.integer(c.one(1, 2, 4, *([INT_MAX] if c.edge else []))),
        }

    def want(
        q: Any, cache: Any, value_dim: Any, return_lse: Any, is_causal: Any, **others: Any
    ) -> list[np.ndarray]:
        E = min(512, q.shape[3]) if value_dim is None else int(value_dim)
        T = q.shape[1]
        tokens = np.maximum(cache.lengths.astype(np.int64), 0)[:, None] - T + 1 + np.arange(T)
        extra = {n: others.pop(f"extra_{n}", None) for n in ("cache", *SLOTS, "key_stride")}
        first = {n: others.pop(n) for n in SLOTS}
        ends = tokens if is_causal else None
        rows, indices = seen_keys(cache, ends=ends, **first)
        if extra["cache"] is not None:
            stride = int(extra.pop("key_stride"))
            ends = np.maximum(tokens, 0) // stride if is_causal else None
            more, chosen = seen_keys(**extra, ends=ends)
            chosen = np.where(chosen < 0, -1, chosen + rows.shape[1])
            rows = np.concatenate([rows, more], 1)
            indices = np.concatenate([indices, chosen], 3)
        options = oracle_options({**others, "indices": indices}, q, rows.shape[2])
        out, lse = oracle.sparse_mla(q, rows, value_dim=E, **options)
        return [out, lse] if return_lse else [out]

    call = Call(
        sparse_mla_decode,
        kwargs,
        want,
        (dtype, wide(dtype)) if kwargs["return_lse"] else (dtype,),
        diff=("q", *(["sinks"] if kwargs["sinks"] is not None else [])),
        peak=max(peak(kwargs["scale"], kwargs["q"], cached_rows(x)[0]) for x in caches),
    )
    return without_batch(call) if B == 1 and c.chance() else call


def draw_attn_dist(c: Draw, r: Draw) -> Call:
    B, T, S, G, M, D, K = c.dims(KERNEL, B=3, T=4, S=12, G=2, M=4, D=6, K=6)
    dtype = c.dtype()
    divisors = [m for m in range(1, M + 1) if M % m == 0]
    kwargs = {
        "q": r.floats(dtype, B, T, G * M, D),
        "kv": r.floats(dtype, B, S, G, D),
        "lse": r.floats(wide(dtype), B, T, G * M) + 2,
        "block_size": c.integer(c.one(1, 1, 2, 3, 4, *([INT_MAX] if c.edge else []))),
        "scale": c.scale(),
        "head_group": c.one(*([None] if G == 1 else []), *map(c.integer, divisors or [1])),
        "deterministic": c.flag(),
        "sinks": r.limits(wide(dtype), G * M) if c.chance() else None,
        **draw_slots(c, r, B, T, G, S, K),
        **draw_causal(c, r, B, S),
    }
    if r.hostile:
        kwargs["lse"] = np.where(r.rng.random((B, T, G * M)) < 0.2, -np.inf, kwargs["lse"])
        kwargs["lse"] = kwargs["lse"].astype(wide(dtype))

    def want(q: Any, kv: Any, lse: Any, head_group: Any, **others: Any) -> list[np.ndarray]:
        options = oracle_options(others, q, kv.shape[2])
        options["block_size"] = int(options["block_size"])
        group = None if head_group is None else int(head_group)
        return [dist_oracle.attn_dist(q, kv, lse=lse, head_group=group, **options)]

    call = Call(
        attn_dist,
        kwargs,
        want,
        (wide(dtype),),
        diff=("q", "kv", "lse", *(["sinks"] if kwargs["sinks"] is not None else [])),
        poison=("kv",),
        peak=peak(kwargs["scale"], kwargs["q"], kwargs["kv"]),
    )
    return without_batch(call) if B == 1 and c.chance() else call


def draw_block_tokens(c: Draw, r: Draw) -> Call:
    B, T, K = c.dims(B=3, T=4, K=6)
    leading = c.one((), (B,), (B, T), (B, T, 2))
    kwargs = {
        "indices": r.positions(2**31 // 4, *leading, K),
        "block_size": c.integer(c.one(1, 2, 3, 4, 16)),
    }

    def want(indices: Any, block_size: Any) -> list[np.ndarray]:
        size = int(block_size)
        first = indices.astype(np.int64)[..., None] * size
        tokens = np.where((first < 0) | (first + size > 2**31), -1, first + np.arange(size))
        return [tokens.reshape(*leading, K * size)]

    return Call(block_tokens, kwargs, want, (i32,))


GENERATORS = {
    "block_tokens": draw_block_tokens,
    "sparse_mla": draw_sparse_mla,
    "sparse_mla_decode": draw_sparse_mla_decode,
    "attn_dist": draw_attn_dist,
}
