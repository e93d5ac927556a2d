"""Random calls of the functions that pool tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
from fuzz.draw import Call, Draw, i32, without_batch
from fuzz.operators.sparse_mla import wide
from support.oracles import gated_pool as oracle

from jax_dsa import gated_pool, mean_pool


def draw_starts(c: Draw, r: Draw, B: int, S: int) -> np.ndarray | None:
    """Returns the first row of each token's document; None for one document."""
    if c.chance():
        return None
    begins = np.where(r.rng.random((B, S)) < r.one(0.1, 0.5, 1), np.arange(S), 0)
    return np.maximum.accumulate(begins, axis=1).astype(i32)


def starts_or_zeros(starts: Any, values: np.ndarray) -> np.ndarray:
    return np.zeros(values.shape[:2], i32) if starts is None else starts


def draw_gated_pool(c: Draw, r: Draw) -> Call:
    B, S, D = c.dims(B=3, S=20, D=5)
    H, R = c.one(1, 2), c.one(1, 2, 3, 4, 7)
    dtype = c.dtype()
    kwargs = {
        "values": r.floats(dtype, B, S, H, D),
        "gates": r.floats(dtype, B, S, H, D),
        "bias": r.normal(wide(dtype), R, H, D),
        "starts": draw_starts(c, r, B, S),
    }

    def want(values: Any, gates: Any, bias: Any, starts: Any) -> list[np.ndarray]:
        return [oracle.pooled(values, gates, bias, starts_or_zeros(starts, values))]

    call = Call(
        gated_pool,
        kwargs,
        want,
        (dtype,),
        diff=("values", "gates", "bias"),
        poison=("values", "gates"),
        peak=10.0,
    )
    return without_batch(call) if B == 1 and c.chance() else call


def draw_mean_pool(c: Draw, r: Draw) -> Call:
    B, S, D = c.dims(B=3, S=20, D=5)
    dtype = c.dtype()
    kwargs = {
        "values": r.floats(dtype, B, S, D),
        "ratio": c.integer(c.one(1, 2, 3, 4, 7)),
        "starts": draw_starts(c, r, B, S),
    }

    def want(values: Any, ratio: Any, starts: Any) -> list[np.ndarray]:
        return [oracle.mean_pooled(values, int(ratio), starts_or_zeros(starts, values))]

    call = Call(mean_pool, kwargs, want, (dtype,), diff=("values",), poison=("values",))
    return without_batch(call) if B == 1 and c.chance() else call


GENERATORS = {"gated_pool": draw_gated_pool, "mean_pool": draw_mean_pool}
