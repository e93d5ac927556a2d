"""Random calls of the lightning indexer.

The inputs are -3, -1, 1 and 3, so that all sums, and with them the selection, are exact.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from fuzz.draw import INT_MAX, Call, Draw, bf16, e4m3, f32, f64, i32, without_batch
from fuzz.operators.sparse_mla import cached_rows, draw_cache, draw_start, whole
from fuzz.operators.topk import rows as draw_rows
from support.oracles import documents
from support.oracles import indexer as oracle
from support.oracles import topk as topk_oracle

from jax_dsa import (
    FlatCache,
    PagedCache,
    block_topk,
    indexer_block_topk,
    indexer_logits,
    indexer_topk,
)
from jax_dsa.ops.indexer import indexer_selected_logits

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
    key_stride: Any = 1,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the half-open range of keys of each query, for keys [B, S] and queries [B, T]."""
    B, T, S = shape
    first = np.zeros((B, T), np.int64) if starts is None else np.clip(starts, 0, S)
    last = np.full((B, T), S, np.int64) if ends is None else np.clip(ends, 0, S)
    if is_causal:
        start = np.broadcast_to(np.asarray(whole(query_start), np.int64), (B,))
        visible = (start[:, None] + np.arange(1, T + 1)) // int(key_stride)
        last = np.maximum(np.minimum(last, visible), 0)
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


def draw_weights(c: Draw, weights: np.ndarray) -> np.ndarray | None:
    """Returns the weights, or None for ones."""
    return None if c.chance(0.2) else weights


def draw_stride(c: Draw, segment_ids: Any) -> Any:
    """Draws the argument 'key_stride'."""
    strides = [1] if segment_ids is not None else [1, 1, 2, 3, *([INT_MAX] if c.edge else [])]
    return c.integer(c.one(*strides))


def draw_keys(c: Draw, r: Draw, kwargs: dict[str, Any], flat: bool = False) -> dict[str, Any]:
    """Returns the arguments with the keys in a cache, a flat one if `flat`, or as they are."""
    if c.gradient or not c.chance(0.4):
        return kwargs
    q, sums = kwargs["index_q"], result_dtype(kwargs)
    cache = draw_cache(c, r, (1, q.shape[3]), q.shape[0], sums)
    is_flat = isinstance(cache, FlatCache)
    if flat and not is_flat:
        return kwargs
    rows = r.odd(q.dtype, *getattr(cache, "data" if is_flat else "pages").shape)
    changes = {"index_k": type(cache)(rows, *list(vars(cache).values())[1:])}
    if kwargs["index_k_scale"] is not None:
        changes["index_k_scale"] = r.powers(sums, *rows.shape[:2])
    return kwargs | changes | {"query_start": 0, "segment_ids": None, "key_stride": 1}


def plain_keys(kwargs: dict[str, Any]) -> tuple[dict[str, Any], np.ndarray]:
    """Returns the arguments with arrays in place of a cache, and which keys are mapped [B, S]."""
    cache = kwargs["index_k"]
    if not isinstance(cache, FlatCache | PagedCache):
        return kwargs, np.ones(cache.shape[:2], bool)
    rows, mapped = cached_rows(cache)
    x = {**kwargs, "index_k": rows[:, :, 0]}
    if x["index_k_scale"] is not None and isinstance(cache, PagedCache):
        pool = PagedCache(x["index_k_scale"][:, :, None], cache.page_table, cache.lengths)
        x["index_k_scale"] = cached_rows(pool)[0][:, :, 0]
    shape = *x["index_q"].shape[:2], rows.shape[1]
    lengths = np.maximum(cache.lengths.astype(np.int64), 0)
    _, last = ranges(shape, x["is_causal"], lengths - shape[1], None, x["ends"])
    x["ends"] = np.minimum(last, lengths[:, None])
    return x | {"is_causal": False, "query_start": 0}, mapped


WHICH = "is_causal", "query_start", "starts", "ends", "segment_ids", "key_stride"
INPUTS = "index_q", "index_k", "index_weights", "index_k_scale", "relu"


def visible_logits(kwargs: dict[str, Any]) -> np.ndarray:
    """Returns the expected logits [B, T, S] of a call whose keys may be in a cache."""
    x, mapped = plain_keys(kwargs)
    return np.where(mapped[:, None], logits_of(**{n: x[n] for n in (*INPUTS, *WHICH)}), -np.inf)


def draw_indexer_logits(c: Draw, r: Draw) -> Call:
    B, T, S, J, C = c.dims(KERNEL, B=3, T=4, S=10, J=3, C=5)
    S = T if c.chance(0.3) else S  # as `segment_ids` need it
    kwargs = {
        **draw_inputs(c, r, B, T, S, J, C),
        **draw_ranges(c, r, B, T, S),
        "relu": c.flag(0.8),
    }
    kwargs["index_weights"] = draw_weights(c, kwargs["index_weights"])
    kwargs["key_stride"] = draw_stride(c, kwargs["segment_ids"])
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
    B, T, S, J, C, M = c.dims(KERNEL, B=3, T=4, S=10, J=3, C=5, M=4)
    S = T if c.chance(0.3) else S  # as `segment_ids` need it
    kwargs: dict[str, Any] = {
        **draw_inputs(c, r, B, T, S, J, C),
        **draw_ranges(c, r, B, T, S),
        "top_k": c.integer(c.one(0, 1, c.below(S + 2), c.below(S + 2), 300 if c.kernel else 3)),
        "relu": c.flag(0.8),
        "deterministic": c.flag(),
        "candidates": None,
        "candidate_block_size": None,
    }
    kwargs["index_weights"] = draw_weights(c, kwargs["index_weights"])
    kwargs["key_stride"] = draw_stride(c, kwargs["segment_ids"])
    kwargs = draw_keys(c, r, kwargs)
    if not c.kernel and c.chance(0.4):
        size = c.one(1, 2, 3, 8, *([INT_MAX] if c.edge else []))
        kwargs["candidates"] = r.positions(-(-S // size), B, T, M)
        kwargs["candidate_block_size"] = c.integer(size)

    def logits(kwargs: dict[str, Any]) -> np.ndarray:
        I = visible_logits(kwargs)
        if kwargs["candidates"] is None:
            return I
        x, _ = plain_keys(kwargs)
        starts, _ = ranges(I.shape, **{n: x[n] for n in WHICH})
        return oracle.inside(I, x["candidates"], int(x["candidate_block_size"]), starts)

    def hold(**kwargs: Any) -> dict[str, Any]:
        return {"selected": topk_oracle.topk(logits(kwargs), int(kwargs["top_k"]))}

    def want(selected: Any, **kwargs: Any) -> list[np.ndarray]:
        return [selected, topk_oracle.values(logits(kwargs), selected)]

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


def draw_indexer_selected_logits(c: Draw, r: Draw) -> Call:
    B, T, S, J, C, K = c.dims(KERNEL | {"K": (1, 150)}, B=3, T=4, S=10, J=3, C=5, K=12)
    kwargs = {
        **draw_inputs(c, r, B, T, S, J, C),
        "indices": r.positions(S, B, T, K),
        "relu": c.flag(0.8),
    }
    kwargs["index_weights"] = draw_weights(c, kwargs["index_weights"])

    def want(indices: Any, **kwargs: Any) -> list[np.ndarray]:
        I = logits_of(**kwargs, is_causal=False, query_start=0, starts=None, ends=None)
        return [topk_oracle.values(I, np.where(indices < I.shape[2], indices, -1))]

    call = Call(
        indexer_selected_logits,
        kwargs,
        want,
        (result_dtype(kwargs),),
        diff=gradients(kwargs),
        poison=("index_k",),
        peak=30.0,
    )
    return without_batch(call) if B == 1 and c.chance() else call


def draw_blocks(c: Draw, sizes: tuple[int, ...]) -> dict[str, Any]:
    """Draws the arguments that determine which blocks there are and how many are selected."""
    edges = [INT_MAX] if c.edge else []
    return {
        "top_k": c.integer(c.one(0, 1, 2, 3, 20)),
        "block_size": c.integer(c.one(*sizes, *edges)),
        "sink_blocks": c.integer(c.one(0, 0, 1, 2, *edges)),
        "local_blocks": c.integer(c.one(0, 1, 1, 2, *edges)),
    }


def block_numbers(x: dict[str, Any]) -> dict[str, int]:
    """Returns these arguments as the oracles take them."""
    names = "block_size", "sink_blocks", "local_blocks"
    return {"k": int(x["top_k"]), **{n: int(x[n]) for n in names}}


def _even(size: int) -> int:
    """Returns the largest even number up to `size`, and 1 for 1."""
    return size if size == 1 else size & ~1


def draw_indexer_block_topk(c: Draw, r: Draw) -> Call:
    B, T, S, J, C = c.dims(B=3, T=4, S=12, J=3, C=5)
    mean = c.chance(0.3)
    S = T if c.chance(0.3) and not mean else S  # as `segment_ids` need it
    # The means of one, two and four odd numbers are exact.
    S, sizes = (_even(S), (1, 2, 4)) if mean else (S, (1, 2, 3, 8))
    kwargs: dict[str, Any] = {
        **draw_inputs(c, r, B, T, S, J, C),
        **draw_ranges(c, r, B, T, S),
        **draw_blocks(c, sizes),
        "per_head": c.flag(0.3),
        "pooling": "mean" if mean else "max",
        "relu": c.flag(0.8),
        "deterministic": c.flag(),
    }
    if mean:
        kwargs |= {"index_k_scale": None, "starts": None, "segment_ids": None}
        kwargs["block_size"] = min(kwargs["block_size"], 4)
        if c.gradient:  # A mean may have the score 0, where the ReLU has no derivative.
            kwargs["relu"] = False
    each = bool(kwargs["per_head"])
    kwargs["index_weights"] = None if each else draw_weights(c, kwargs["index_weights"])
    kwargs["key_stride"] = draw_stride(c, kwargs["segment_ids"])
    kwargs = draw_keys(c, r, kwargs, flat=mean)
    if mean and isinstance(kwargs["index_k"], FlatCache):
        cache = kwargs["index_k"]
        even = _even(cache.data.shape[1])
        kwargs["index_k"] = FlatCache(cache.data[:, :even], cache.lengths)

    def groups(x: dict[str, Any]) -> list[dict[str, Any]]:
        """Returns the arguments of each group of heads that select together."""
        q = x["index_q"]
        heads = range(q.shape[2])
        return [{**x, "index_q": q[:, :, j : j + 1]} for j in heads] if each else [x]

    def logits(x: dict[str, Any]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns the logits of keys or means, and the range of each query."""
        plain, _ = plain_keys(x)
        shape = *plain["index_q"].shape[:2], plain["index_k"].shape[1]
        bounds = ranges(shape, **{n: plain[n] for n in WHICH})
        if not mean:
            return visible_logits(x), *bounds
        means = oracle.block_means(plain["index_k"], int(x["block_size"]))
        inputs = plain["index_q"], means, plain["index_weights"]
        return oracle.indexer_logits(*inputs, relu=bool(x["relu"])), *bounds

    def hold(**x: Any) -> dict[str, Any]:
        lists = []
        for own in groups(x):
            I, starts, ends = logits(own)
            if mean:
                size = plain_keys(own)[0]["index_k"].shape[1]
                found = oracle.mean_block_topk(I, **block_numbers(x), size=size, ends=ends)
            else:
                found = oracle.block_topk(I, **block_numbers(x), starts=starts)
            lists.append((found[0], found[2]))
        return {"selected": lists}

    def want(selected: Any, **x: Any) -> list[np.ndarray]:
        indices = [blocks for blocks, _ in selected]
        values = [
            topk_oracle.values(logits(own)[0], keys)
            for own, (_, keys) in zip(groups(x), selected, strict=True)
        ]
        if not each:
            return [indices[0], values[0]]
        if not indices:
            empty = (*x["index_q"].shape[:3], int(x["top_k"]))
            return [np.zeros(empty, i32), np.zeros(empty)]
        return [np.stack(indices, 2), np.stack(values, 2)]

    paged = isinstance(kwargs["index_k"], PagedCache)
    call = Call(
        indexer_block_topk,
        kwargs,
        want,
        (i32, result_dtype(kwargs)),
        diff=() if paged else gradients(kwargs),
        poison=("index_k",),
        hold=hold,
        peak=30.0,
    )
    return without_batch(call) if B == 1 and c.chance() and not paged else call


def draw_block_topk(c: Draw, r: Draw) -> Call:
    B, T, S = c.dims(B=3, T=4, S=20)
    kwargs = {
        "logits": draw_rows(c, r, B, T, S),
        **draw_blocks(c, (1, 2, 3, 8)),
        "starts": r.positions(S, B, T) if c.chance() else None,
        "ends": r.positions(S, B, T) if c.chance() else None,
    }

    def want(logits: Any, starts: Any, ends: Any, **x: Any) -> list[np.ndarray]:
        first, last = ranges(logits.shape, False, 0, starts, ends)
        at = np.arange(logits.shape[2])
        seen = (at >= first[..., None]) & (at < last[..., None])
        shown = np.where(seen, logits.astype(f64), -np.inf)
        return [oracle.block_topk(shown, **block_numbers(x), starts=first)[0]]

    call = Call(block_topk, kwargs, want, (i32,), poison=("logits",), exact=True)
    return without_batch(call) if B == 1 and c.chance() else call


GENERATORS = {
    "indexer_logits": draw_indexer_logits,
    "indexer_topk": draw_indexer_topk,
    "indexer_selected_logits": draw_indexer_selected_logits,
    "indexer_block_topk": draw_indexer_block_topk,
    "block_topk": draw_block_topk,
}
