"""Random calls of `sparse_attention` and its variants."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from fuzz.draw import INT_MAX, Call, Draw, e4m3, f32, peak, without_batch
from fuzz.operators.sparse_mla import cached_rows, draw_cache, draw_start, whole, wide
from support.oracles import sparse_attention as oracle
from support.oracles.mqa_decode import unpaged

from jax_dsa import (
    FlatCache,
    PagedCache,
    sparse_attention,
    sparse_attention_decode,
    sparse_attention_varlen,
)

RETURNS = "return_lse", "return_max_logit"
SCALES = "k_scale", "v_scale"
UNUSED = (*RETURNS, "deterministic")
KERNEL = {
    "T": (1, 5, 40), "S": (1, 70, 200), "M": (1, 4, 12, 32), "D": (64, 72, 192), "E": (64, 128),
    "K": (1, 3, 6),
}  # fmt: skip
DECODE_KERNEL = {**KERNEL, "T": (1, 2, 8), "M": (1, 12, 16, 40), "D": (64, 128, 256)}


def draw_common(
    c: Draw, r: Draw, dtype: np.dtype, on_kernel: dict[str, tuple[int, ...]] = KERNEL
) -> dict[str, Any]:
    """Draws the arguments of all functions, with a batch axis."""
    B, T, S, G, M, D, E, K = c.dims(on_kernel, B=3, T=4, S=21, G=2, M=2, D=5, E=4, K=4)
    size = c.one(1, 4, 4, 16, 128)
    blocks = -(-S // size)
    causal = c.chance(0.7)
    slots = (B, T, K) if c.chance(0.3) else (B, T, G, K)
    counts = [0, 0, 1, 2, *([INT_MAX] if c.edge else [])]
    return {
        "q": r.floats(dtype, B, T, G * M, D),
        "k": r.floats(dtype, B, S, G, D),
        # In the kernels, NaN could reach queries that do not see it.
        "v": (r.normal if c.kernel else r.floats)(dtype, B, S, G, E),
        "indices": r.positions(blocks, *slots),
        "block_size": c.integer(size),
        "scale": c.scale(),
        "is_causal": c.one(bool, np.bool_)(causal),
        "sink_blocks": c.integer(c.one(*counts) if causal else 0),
        "local_blocks": c.integer(c.one(*counts) if causal else 0),
        "tail_block": c.flag() if causal else False,
        "topk_length": r.positions(K, B, T) if c.chance() else None,
        "sinks": r.limits(wide(dtype), G * M) if c.chance() else None,
        "deterministic": c.flag(),
        "return_lse": c.flag(),
        # The largest score has no gradient.
        "return_max_logit": c.flag(0 if c.gradient else 0.5),
    }


def oracle_options(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Converts the options of a call to those of the oracle."""
    x = {n: y for n, y in kwargs.items() if n not in UNUSED}
    x["scale"] = None if x["scale"] is None else float(x["scale"])
    for name in "block_size", "sink_blocks", "local_blocks":
        x[name] = int(x[name])
    return x


def finish(call: Call, dtype: np.dtype) -> Call:
    """Sets the properties of a call of either function."""
    x = call.kwargs
    call.dtypes = (dtype, *[wide(dtype)] * sum(int(x[name]) for name in RETURNS))
    call.diff = ("q", "k", "v", *(["sinks"] if x["sinks"] is not None else []))
    call.poison = ("k", "v")
    call.peak = peak(x["scale"], x["q"], x["k"])
    return call


def chosen(results: tuple[np.ndarray, ...], x: dict[str, Any]) -> list[np.ndarray]:
    """Returns the results that a call returns."""
    out, *others = results
    return [out, *(y for y, name in zip(others, RETURNS, strict=True) if x[name])]


def draw_sparse_attention(c: Draw, r: Draw) -> Call:
    dtype = c.dtype()
    kwargs = draw_common(c, r, dtype)
    (B, S), T = kwargs["k"].shape[:2], kwargs["q"].shape[1]
    packed = T <= S and c.chance(0.3)
    if packed:  # The tokens of documents have a query and a key each.
        kwargs |= {name: kwargs[name][:, :T] for name in ("k", "v")}
        S = T
    kwargs["segment_ids"] = r.rng.integers(0, 2, (B, T)).astype(np.int32) if packed else None
    kwargs["query_start"] = 0 if packed else draw_start(c, r, B, S)
    kwargs["key_value_seq_lengths"] = r.positions(S, B) if c.chance(0.3) else None

    def want(**x: Any) -> list[np.ndarray]:
        # The position of the last query is capped at the largest int32.
        start = np.minimum(whole(x["query_start"]), INT_MAX - x["q"].shape[1])
        options = oracle_options({**x, "query_start": start})
        return chosen(oracle.sparse_attention(**options), x)

    call = finish(Call(sparse_attention, kwargs, want, ()), dtype)
    return without_batch(call) if B == 1 and c.chance() else call


def draw_sparse_attention_varlen(c: Draw, r: Draw) -> Call:
    dtype, R = c.dtype(), c.below(3)
    names = "q", "k", "v", "indices", "topk_length"
    common = draw_common(c, r, dtype)
    if not common["q"].shape[0]:
        common = {
            n: np.zeros((1, *x.shape[1:]), x.dtype) if n in names and x is not None else x
            for n, x in common.items()
        }
    kwargs = {n: x[0] if n in names and x is not None else x for n, x in common.items()}
    kwargs["causal_alignment"] = c.one("top_left", "bottom_right")
    for name, array in (("cu_seqlens_q", "q"), ("cu_seqlens_k", "k")):
        cuts = r.rng.integers(0, len(kwargs[array]) + 1, R + 1)
        kwargs[name] = np.sort(cuts).astype(np.int32)

    def want(
        cu_seqlens_q: Any, cu_seqlens_k: Any, causal_alignment: Any, **x: Any
    ) -> list[np.ndarray]:
        options = oracle_options(x)
        T, N, E = *x["q"].shape[:2], x["v"].shape[2]
        results = np.zeros((T, N, E)), np.full((T, N), -np.inf), np.full((T, N), -np.inf)
        bounds = (np.asarray(cu).tolist() for cu in (cu_seqlens_q, cu_seqlens_k))
        pairs = (z for cu in bounds for z in (cu[:-1], cu[1:]))
        for a, b, first, last in zip(*pairs, strict=True):
            rows, keys = slice(a, b), slice(first, last)
            own = dict.fromkeys(names, rows) | {"k": keys, "v": keys}
            sequence = {n: None if x[n] is None else x[n][own[n]][None] for n in names}
            start = last - first - (b - a) if causal_alignment == "bottom_right" else 0
            parts = oracle.sparse_attention(**{**options, **sequence, "query_start": start})
            for whole_result, part in zip(results, parts, strict=True):
                whole_result[rows] = part[0]
        return chosen(results, x)

    return finish(Call(sparse_attention_varlen, kwargs, want, ()), dtype)


def draw_sparse_attention_decode(c: Draw, r: Draw) -> Call:
    dtype = c.dtype()
    kwargs = draw_common(c, r, dtype, DECODE_KERNEL)
    B, _, G, D = kwargs["k"].shape
    E = D if c.kernel else kwargs["v"].shape[3]
    fp8 = not c.gradient and c.chance(0.3)
    k = draw_cache(c, r, (G, D), B, e4m3 if fp8 else dtype)
    shape = (k.data if isinstance(k, FlatCache) else k.pages).shape[:3]
    rows = r.floats(e4m3 if fp8 else dtype, *shape, E)
    if isinstance(k, FlatCache):
        v: Any = FlatCache(rows, k.lengths)
    else:
        v = PagedCache(rows, k.page_table, k.lengths)
    scales = {n: r.powers(f32, *shape) if fp8 and c.chance() else None for n in SCALES}
    blocks = -(-k.capacity // int(kwargs["block_size"]))
    arrays = {"k_cache": k, "v_cache": v, **scales}
    arrays["indices"] = r.positions(blocks, *kwargs["indices"].shape)
    dropped = "k", "v", "deterministic"
    kwargs = {n: x for n, x in (kwargs | arrays).items() if n not in dropped}
    kwargs["batch_invariant"] = c.flag()

    def stored(cache: Any, scale: Any) -> np.ndarray:
        return products(cached_rows(cache)[0], scale, cache)

    def want(k_cache: Any, v_cache: Any, k_scale: Any, v_scale: Any, **x: Any) -> list[np.ndarray]:
        if isinstance(k_cache, PagedCache):  # vmap may map the table of one of them only.
            v_cache = dataclasses.replace(v_cache, page_table=k_cache.page_table)
        options = oracle_options(x)
        options.pop("batch_invariant")
        lengths = np.maximum(k_cache.lengths.astype(np.int64), 0)
        results = oracle.sparse_attention(
            k=stored(k_cache, k_scale),
            v=stored(v_cache, v_scale),
            query_start=lengths - x["q"].shape[1],
            key_value_seq_lengths=lengths,
            exists=cached_rows(k_cache)[1],
            **options,
        )
        return chosen(results, x)

    call = Call(sparse_attention_decode, kwargs, want, ())
    call.dtypes = (dtype, *[wide(dtype)] * sum(int(kwargs[name]) for name in RETURNS))
    call.diff = ("q", *(["sinks"] if kwargs["sinks"] is not None else []))
    call.peak = peak(kwargs["scale"], kwargs["q"], stored(k, scales["k_scale"]))
    # The scales of a pool of pages have no batch axis.
    has_pool_scales = isinstance(k, PagedCache) and any(x is not None for x in scales.values())
    return without_batch(call) if B == 1 and not has_pool_scales and c.chance() else call


def products(rows: np.ndarray, scale: np.ndarray | None, cache: Any) -> np.ndarray:
    """Returns the rows [B, S, G, D] of a cache times their scales."""
    if scale is None:
        return rows.astype(np.float64) if rows.dtype == e4m3 else rows
    if isinstance(cache, PagedCache):
        scale = unpaged(scale[..., None], np.asarray(cache.page_table))[0]
        return rows.astype(np.float64) * scale
    return rows.astype(np.float64) * scale[..., None]


GENERATORS = {
    "sparse_attention": draw_sparse_attention,
    "sparse_attention_decode": draw_sparse_attention_decode,
    "sparse_attention_varlen": draw_sparse_attention_varlen,
}
