"""Random calls of top-k and of the masks that are computed with it."""

from __future__ import annotations

from typing import Any

import numpy as np
from fuzz.draw import Call, Draw, f32, i32
from support.oracles import topk as oracle

from jax_dsa import topk, topk_indices, topk_mask


def rows(c: Draw, r: Draw, *shape: int) -> np.ndarray:
    """Draws rows with ties, signed zeros, infinities and NaN; some rows are all -inf.

    In some rows the values depend on the position, so that a sample of positions may mislead.
    """
    x = r.rng.normal(size=shape)
    if r.chance():
        period = 2 ** r.rng.integers(1, 10)
        x += r.rng.random() * (np.arange(shape[-1]) % period < period / 2)
    x = r.one(x, x.round(), x * 1e4, np.zeros(shape), r.limits(f32, *shape), x.round(1))
    special = [np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-45, -1e-45, 3e38]
    if r.hostile and r.chance():
        x = np.where(r.rng.random(shape) < 0.2, r.rng.choice(special, shape), x)
        x[r.rng.random(shape[:-1]) < 0.2] = -np.inf
    return x.astype(f32 if c.kernel else c.dtype())


def draw_topk(c: Draw, r: Draw) -> Call:
    *leading, size = c.dims(A=2, B=3, T=4, S=20, on_kernel={"S": (1, 70, 4096, 9000)})
    leading = leading[c.one(0, 1, 1, 2, 3) :]
    x = rows(c, r, *leading, size)
    top_k = c.one(0, 1, 2, size, size + 3) if c.chance() else c.below(2 * size)
    kwargs = {
        "x": x,
        "top_k": c.integer(min(top_k, 4096) if c.kernel else top_k),
        "starts": r.positions(size, *leading) if c.chance() else None,
        "ends": r.positions(size, *leading) if c.chance() else None,
        "return_values": c.flag(),
    }

    def hold(x: Any, top_k: Any, starts: Any, ends: Any, return_values: Any) -> dict[str, Any]:
        return {"selected": oracle.topk(x, int(top_k), starts, ends)}

    def want(x: Any, selected: Any, return_values: Any, **_: Any) -> list[np.ndarray]:
        return [selected, oracle.values(x, selected)] if return_values else [selected]

    values = bool(kwargs["return_values"])
    dtypes = (i32, x.dtype) if values else (i32,)
    diff = ("x",) if values and top_k else ()
    return Call(topk, kwargs, want, dtypes, diff, poison=diff, hold=hold, exact=True)


def draw_topk_mask(c: Draw, r: Draw) -> Call:
    *leading, size = c.dims(B=3, T=4, S=12)
    leading = leading[c.one(0, 1, 2) :]
    x = rows(c, r, *leading, size)
    mask = r.bools(*(c.one(1, n) for n in leading), size) if c.chance() else None
    kwargs = {"bias": x, "top_k": c.integer(c.below(size + 2)), "mask": mask}

    def want(bias: Any, top_k: Any, mask: Any) -> list[np.ndarray]:
        kept = bias if mask is None else np.where(mask, bias, -np.inf)
        selected = oracle.topk(kept, int(top_k))
        return [(selected[..., None] == np.arange(size)).any(-2)]

    return Call(topk_mask, kwargs, want, (np.dtype(bool),))


def draw_topk_indices(c: Draw, r: Draw) -> Call:
    *leading, size = c.dims(B=3, T=4, S=12)
    x = rows(c, r, *leading[c.one(0, 1, 2) :], size)
    kwargs = {"bias": x, "top_k": c.integer(c.below(size + 2))}

    def want(bias: Any, top_k: Any) -> list[np.ndarray]:
        return [oracle.topk(bias, int(top_k))]

    return Call(topk_indices, kwargs, want, (i32,))


GENERATORS = {"topk": draw_topk, "topk_mask": draw_topk_mask, "topk_indices": draw_topk_indices}
