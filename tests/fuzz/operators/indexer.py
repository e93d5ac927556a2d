"""Random calls of the lightning indexer.

The inputs are -3, -1, 1 and 3, so that all sums, and with them the selection, are exact.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from fuzz.draw import Call, Draw, bf16, e4m3, f32, f64, i32, without_batch
from fuzz.operators.sparse_mla import cached_rows, draw_cache, draw_start, whole
from support.oracles import documents
from support.oracles import indexer as oracle
from support.oracles import topk as topk_oracle

from jax_dsa import FlatCache, PagedCache, indexer_logits, indexer_topk

KERNEL = {"T": (1, 5), "S": (70, 300), "J": (4, 64), "C": (32, 64, 128)}


def draw_inputs(c: Draw, r: Draw, B: int, T: int, S: int, J: int, C: int) -> dict[str, Any]:
    """Draws the arrays of the indexer. C is odd, so that no score is 0."""
    C = C if c.kernel or not C else C | 1
    dtype = c.one(bf16, e4m3) if c.kernel else c.one(c.dtype(), c.dtype(), e4m3)
    if c.gradient and dtype == e4m3:
        dtype = bf16
    index_k = r.odd(dtype, B, S, C)
    if r.hostile and r.chance(0.3):
        index_k[r.rng.random((B, S)) < 0.1] = np.nan
    sums = f64 if dtype == f64 else f32
    return {
        "index_q": r.odd(dtype, B, T, J, C),
        "index_k": index_k,
        "index_weights": r.odd(sums, B, T, J) / sums.type(8),
        "index_k_scale": r.powers(sums, B, S) if c.chance() else None,
    }


def draw_ranges(c: Draw, r: Draw, B: int, T: int, S: int) -> dict[str, Any]:
    """Draws the arguments that determine which keys each query sees."""
    packed = T == S and c.chance(0.7)
    return {
        "is_causal": c.flag(),
        "query_start": c.integer(0) if packed else draw_start(c, r, B, S),
        "segment_ids": r.rng.integers(0, 2, (B, T)).astype(i32) if packed else None,
        "starts": r.positions(S, B, T) if c.chance() else None,
        "ends": r.positions(S, B, T) if c.chance() else None,
    }


def ranges(
    shape: tuple[int, ...],
    is_causal: Any,
    query_start: Any,
    starts: Any,
    ends: Any,
    segment_ids: Any = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the half-open range of keys of each query, for keys [B, S] and queries [B, T]."""
    B, T, S = shape
    first = np.zeros((B, T), np.int64) if starts is None else np.clip(starts, 0, S)
    last = np.full((B, T), S, np.int64) if ends is None else np.clip(ends, 0, S)
    if is_causal:
        start = np.broadcast_to(np.asarray(whole(query_start), np.int64), (B,))
        last = np.minimum(last, start[:, None] + np.arange(1, T + 1))
    if segment_ids is not None:
        own_first, own_last = documents.bounds(segment_ids)
        first, last = np.maximum(first, own_first), np.minimum(last, own_last)
    return first, last


def logits_of(
    index_q: Any, index_k: Any, index_weights: Any, index_k_scale: Any, relu: Any, **which: Any
) -> np.ndarray:
    """Returns the expected logits [B, T, S]."""
    starts, ends = ranges((*index_q.shape[:2], index_k.shape[1]), **which)
    scale = {"index_k_scale": index_k_scale}
    return oracle.indexer_logits(
        index_q, index_k, index_weights, **scale, starts=starts, ends=ends, relu=bool(relu)
    )


def gradients(kwargs: dict[str, Any]) -> tuple[str, ...]:
    """Returns the names of the arguments that have gradients."""
    names = "index_q", "index_k", "index_weights", "index_k_scale"
    return tuple(n for n in names if isinstance(kwargs[n], np.ndarray))


def result_dtype(kwargs: dict[str, Any]) -> np.dtype:
    """Returns the dtype of the logits."""
    return f64 if kwargs["index_q"].dtype == f64 else f32


def draw_indexer_logits(c: Draw, r: Draw) -> Call:
    B, T, S, J, C = c.dims(KERNEL, B=3, T=4, S=10, J=3, C=5)
    S = T if c.chance(0.3) else S  # as `segment_ids` need it
    kwargs = {
        **draw_inputs(c, r, B, T, S, J, C),
        **draw_ranges(c, r, B, T, S),
        "relu": c.flag(0.8),
    }
    call = Call(
        indexer_logits,
        kwargs,
        lambda **kwargs: [logits_of(**kwargs)],
        (result_dtype(kwargs),),
        diff=gradients(kwargs),
        poison=("index_k",),
        peak=30.0,
    )
    return without_batch(call) if B == 1 and c.chance() else call


def draw_indexer_topk(c: Draw, r: Draw) -> Call:
    B, T, S, J, C = c.dims(KERNEL, B=3, T=4, S=10, J=3, C=5)
    S = T if c.chance(0.3) else S  # as `segment_ids` need it
    kwargs: dict[str, Any] = {
        **draw_inputs(c, r, B, T, S, J, C),
        **draw_ranges(c, r, B, T, S),
        "top_k": c.integer(c.one(0, 1, c.below(S + 2), c.below(S + 2), 300 if c.kernel else 3)),
        "relu": c.flag(0.8),
        "deterministic": c.flag(),
    }
    if not c.gradient and c.chance(0.4):
        dtype, dim = kwargs["index_q"].dtype, kwargs["index_q"].shape[3]
        cache = draw_cache(c, r, (1, dim), B, kwargs["index_weights"].dtype)
        flat = isinstance(cache, FlatCache)
        name = "data" if flat else "pages"
        rows = r.odd(dtype, *getattr(cache, name).shape)
        kwargs["index_k"] = type(cache)(rows, *list(vars(cache).values())[1:])
        if kwargs["index_k_scale"] is not None:
            kwargs["index_k_scale"] = r.powers(kwargs["index_weights"].dtype, *rows.shape[:2])
        kwargs |= {"query_start": 0, "segment_ids": None}

    def logits(
        index_k: Any, index_k_scale: Any, is_causal: Any, query_start: Any, ends: Any, top_k: Any,
        deterministic: Any, **others: Any,
    ) -> np.ndarray:  # fmt: skip
        keys: Any = {"index_k": index_k, "index_k_scale": index_k_scale, "ends": ends}
        if isinstance(index_k, FlatCache | PagedCache):
            keys["index_k"], mapped = cached_rows(index_k)
            keys["index_k"] = keys["index_k"][:, :, 0]
            if index_k_scale is not None and isinstance(index_k, PagedCache):
                pool = PagedCache(index_k_scale[:, :, None], index_k.page_table, index_k.lengths)
                keys["index_k_scale"] = cached_rows(pool)[0][:, :, 0]
            shape = *others["index_q"].shape[:2], keys["index_k"].shape[1]
            lengths = np.maximum(index_k.lengths.astype(np.int64), 0)
            _, last = ranges(shape, is_causal, lengths - shape[1], None, ends)
            keys["ends"] = np.minimum(last, lengths[:, None])
            is_causal, query_start = False, 0
        I = logits_of(**keys, is_causal=is_causal, query_start=query_start, **others)
        if isinstance(index_k, FlatCache | PagedCache):
            I = np.where(mapped[:, None], I, -np.inf)
        return I

    def hold(**kwargs: Any) -> dict[str, Any]:
        return {"selected": topk_oracle.topk(logits(**kwargs), int(kwargs["top_k"]))}

    def want(selected: Any, **kwargs: Any) -> list[np.ndarray]:
        return [selected, topk_oracle.values(logits(**kwargs), selected)]

    paged = isinstance(kwargs["index_k"], PagedCache)
    call = Call(
        indexer_topk,
        kwargs,
        want,
        (i32, result_dtype(kwargs)),
        diff=() if paged else gradients(kwargs),
        poison=("index_k",),
        hold=hold,
        peak=30.0,
    )
    return without_batch(call) if B == 1 and c.chance() and not paged else call


GENERATORS = {"indexer_logits": draw_indexer_logits, "indexer_topk": draw_indexer_topk}
