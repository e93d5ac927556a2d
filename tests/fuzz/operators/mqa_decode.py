"""Random calls of `mqa_decode` and `merge_attention`."""

from __future__ import annotations

from typing import Any

import numpy as np
from fuzz.draw import INT_MAX, Call, Draw, peak, without_batch
from fuzz.operators.sparse_mla import cached_rows, draw_cache, wide
from support.oracles import mqa_decode as oracle

from jax_dsa import FlatCache, PagedCache, merge_attention, mqa_decode

# Shapes that the kernels support. D up to 256 requires v.
KERNEL = {"T": (1, 3), "S": (70, 300), "M": (1, 16, 70), "D": (64, 128, 256, 512, 576)}


def draw_mqa_decode(c: Draw, r: Draw) -> Call:
    B, T, S, G, M, D, E = c.dims(KERNEL, B=3, T=3, S=10, G=2, M=3, D=6, E=5)
    E = D if c.kernel else E
    dtype = c.dtype()
    cached = c.chance()
    records = cached and not c.gradient and c.chance(0.3)
    D = 576 if records else D
    k: Any = r.floats(dtype, B, S, G, D)
    if cached:
        k = draw_cache(c, r, (G, D), B, np.uint8 if records else dtype)
    rows = k if not cached else k.data if isinstance(k, FlatCache) else k.pages
    own = not records and (D <= 256 if c.kernel else c.chance())
    # For queries that see a NaN in a value, the kernels also return NaN as lse.
    v = (r.normal if c.kernel else r.floats)(dtype, *rows.shape[:-1], E) if own else None
    width = 512 if c.kernel else c.integer(c.below(D))
    normalize = c.flag(0.7)
    given = not cached and c.chance(0.7)
    sinks = r.limits(wide(dtype), G * M) if normalize and c.chance() else None
    kwargs = {
        "q": r.floats(dtype, B, T, G * M, D),
        "k": k,
        "v": v,
        "value_dim": c.one(None, width) if v is None else c.one(None, E),
        "key_value_seq_lengths": r.positions(S + 2, B) if given else None,
        "starts": c.one(None, None, None, r.positions(S, B), r.positions(S, B, T)),
        "local_window_size": c.one(
            None, None, None, None, c.integer(3), (2, 0), INT_MAX, r.positions(S, B)
        ),
        "sinks": sinks,
        "scale": c.scale(),
        "num_splits": c.one(None, c.integer(c.below(5)), c.integer(100)),
        "normalize": normalize,
        "return_lse": c.flag(),
        "return_max_logit": c.flag(),
    }

    def visible(k: Any, lengths: Any) -> tuple[Any, Any, Any]:
        rows, there = (k, None) if isinstance(k, np.ndarray) else cached_rows(k)
        if not isinstance(k, np.ndarray):
            lengths = k.lengths
        return rows, there, lengths if lengths is None else np.maximum(lengths, 0)

    def attended(
        q: Any, k: Any, v: Any, value_dim: Any, key_value_seq_lengths: Any, starts: Any,
        local_window_size: Any, sinks: Any, scale: Any, **_: Any,
    ) -> Any:  # fmt: skip
        rows, there, lengths = visible(k, key_value_seq_lengths)
        if v is None:
            values = rows[..., : min(512, rows.shape[-1]) if value_dim is None else int(value_dim)]
        elif isinstance(k, PagedCache):
            values = oracle.unpaged(v, np.asarray(k.page_table))[0]
        else:
            values = v
        window = local_window_size
        window = window[0] if isinstance(window, tuple) else window
        window = None if window is None else np.asarray(window).astype(np.int64)
        scale = max(1, q.shape[3]) ** -0.5 if scale is None else float(scale)
        return oracle.mqa_decode(
            q, rows, values, scale=scale, key_value_seq_lengths=lengths, starts=starts,
            local_window_size=window, sinks=sinks, mapped=there,
        )  # fmt: skip

    def hold(**kwargs: Any) -> dict[str, Any]:
        return {"top": attended(**kwargs)[2]}

    def want(
        top: Any, normalize: Any, return_lse: Any, return_max_logit: Any, **kwargs: Any
    ) -> list[np.ndarray]:
        out, lse, _ = attended(**kwargs)
        if normalize:
            return [out, *([lse] if return_lse else []), *([top] if return_max_logit else [])]
        total = np.where(top == -np.inf, 0, np.exp(lse - np.where(top == -np.inf, 0, top)))
        return [out * total[..., None], top, total]

    more = [kwargs["return_lse"], kwargs["return_max_logit"]]
    results = [dtype, *[wide(dtype) for returned in more if returned]]
    call = Call(
        mqa_decode,
        kwargs,
        want,
        tuple(results if normalize else [wide(dtype)] * 3),
        diff=(
            "q",
            *(["k"] if not cached else []),
            *(n for n in ("v", "sinks") if kwargs[n] is not None),
        ),
        poison=() if cached else ("k",),
        hold=hold,
        low=dtype,
        peak=peak(kwargs["scale"], kwargs["q"], cached_rows(k)[0] if cached else k),
    )
    return without_batch(call) if B == 1 and c.chance() and not isinstance(k, PagedCache) else call


def draw_merge_attention(c: Draw, r: Draw) -> Call:
    if c.chance(0.3):
        return draw_merge_of_sums(c, r)
    P, *shape, E = c.dims(P=3, B=2, T=3, N=3, E=4)
    dtype = c.dtype()
    shape = shape[c.one(0, 1, 2, 3) :]
    outs = r.floats(dtype, P, *shape, E)
    lses = r.limits(wide(dtype), P, *shape)
    lses = np.where(lses == np.inf, -np.inf, lses)

    def want(outs: Any, lses: Any) -> list[np.ndarray]:
        return list(oracle.merge_attention(np.asarray(outs, np.float64), np.asarray(lses)))

    kwargs = {"outs": outs, "lses": lses}
    return Call(merge_attention, kwargs, want, (dtype, wide(dtype)), diff=("outs", "lses"))


def draw_merge_of_sums(c: Draw, r: Draw) -> Call:
    P, *shape, E = c.dims(P=3, B=2, T=3, N=3, E=4)
    dtype = c.dtype()
    shape = shape[c.one(0, 1, 2, 3) :]
    max_logits = r.limits(wide(dtype), P, *shape)
    max_logits = np.where(max_logits == np.inf, -np.inf, max_logits)

    def want(outs: Any, max_logits: Any, sums: Any) -> list[np.ndarray]:
        top, empty = max_logits.max(0), max_logits == -np.inf
        weights = np.where(empty, 0, np.exp(max_logits - np.where(top == -np.inf, 0, top)))
        # A set without a key counts for nothing, even if it holds NaN.
        outs = np.where(empty[..., None], 0, outs.astype(np.float64))
        sums = np.where(empty, 0, sums.astype(np.float64))
        return [(weights[..., None] * outs).sum(0), top, (weights * sums).sum(0)]

    kwargs = {
        "outs": r.floats(dtype, P, *shape, E),
        "max_logits": max_logits,
        "sums": np.abs(r.floats(wide(dtype), P, *shape)),
    }
    return Call(merge_attention, kwargs, want, (wide(dtype),) * 3, diff=("outs", "sums"))


GENERATORS = {"mqa_decode": draw_mqa_decode, "merge_attention": draw_merge_attention}
