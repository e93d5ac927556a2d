"""Hierarchical tree attention, its tree, and decode over a cache.

Rounding errors may change a selection except in float64. Therefore trees have one layer in other
dtypes.
"""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
from fuzz.draw import INT_MAX, Call, Draw, bf16, f32, f64, i32, peak
from fuzz.operators.sparse_mla import wide
from support.oracles import htree as oracle

from jax_dsa import HTreeCache, htree_attention, htree_build, htree_decode, htree_select
from jax_dsa.ops.htree.tree import node_count, tree_layers


def draw_tree(c: Draw, tokens: int, dtype: np.dtype) -> dict[str, Any]:
    """Draws the options of a tree over `tokens` tokens."""
    if c.kernel:  # one layer, because rounding may change a selection
        return {"compression": c.integer(c.one(8, 16, 32)), "top_k": c.integer(512)}
    if dtype == f64 and c.chance(0.8):
        return {"compression": c.integer(c.one(2, 3, 4)), "top_k": c.integer(c.one(1, 2, 3))}
    fits = c.one((16, 512), (2, max(1, tokens)), (max(2, tokens), 1), (3, 2**31 - 1))
    return {"compression": c.integer(fits[0]), "top_k": c.integer(fits[1])}


def draw_dims(c: Draw) -> list[int]:
    """Draws B, T, G, M, D and E, with D even."""
    on_kernel = {"T": (1, 17, 300), "M": (1, 16, 64), "D": (32, 64)}
    B, T, G, M, half, E = c.dims(on_kernel, B=2, T=14, G=2, M=2, D=3, E=4)
    return [B, T, G, M, 2 * half, 2 * half if c.kernel else E]


def draw_rotary(c: Draw) -> dict[str, Any]:
    """Draws the options of the scores."""
    # With a base below 1 angles grow large; float32 cannot represent an angle of 1e15.
    bases = [10000.0, 10000, np.float32(100), *([0.5, 1e30, 1e300] if c.edge else [])]
    return {"scale": c.scale(), "rope_base": c.one(*bases)}


def options_of(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Returns the options for the oracle."""
    numbers = {"compression": int, "top_k": int, "rope_base": float}
    return {
        **{n: kind(kwargs[n]) for n, kind in numbers.items()},
        "scale": None if kwargs["scale"] is None else float(kwargs["scale"]),
    }


def draw_htree_attention(c: Draw, r: Draw) -> Call:
    B, T, G, M, D, E = draw_dims(c)
    dtype = bf16 if c.kernel else c.one(f64, f64, f32)
    q, k = r.floats(dtype, B, T, G * M, D), r.floats(dtype, B, T, G, D)
    if r.hostile and r.chance(0.3):
        q[:] = 0  # all nodes of a layer are equally important
    kwargs = {
        **{"q": q, "k": k, "v": r.floats(dtype, B, T, G, E)},
        **draw_tree(c, T, dtype),
        **draw_rotary(c),
        "return_lse": c.flag(0.7),
    }

    def hold(q: Any, k: Any, v: Any, **others: Any) -> dict[str, Any]:
        _, _, seen = oracle.attention(q, k, v, **options_of(others))
        return {"choice": {at: selected for at, (_, selected) in seen.items()}}

    def want(q: Any, k: Any, v: Any, choice: Any, **others: Any) -> list[np.ndarray]:
        out, lse, _ = oracle.attention(q, k, v, **options_of(others), choice=choice)
        return [out, lse] if others["return_lse"] else [out]

    return Call(
        htree_attention,
        kwargs,
        want,
        (dtype, wide(dtype)) if kwargs["return_lse"] else (dtype,),
        diff=("q", "k", "v"),
        hold=hold,
        peak=peak(kwargs["scale"], q, k),
        low=dtype,  # the dtype of rotated keys
    )


def draw_htree_select(c: Draw, r: Draw) -> Call:
    B, T, G, M, D, _ = draw_dims(c)
    dtype = c.one(f64, f64, f32)
    kwargs = {
        "q": r.floats(dtype, B, T, G * M, D),
        "k": r.floats(dtype, B, T, G, D),
        **draw_tree(c, T, dtype),
        **draw_rotary(c),
    }
    kwargs = {n: np.nan_to_num(x) if isinstance(x, np.ndarray) else x for n, x in kwargs.items()}
    # The result has r * K indices per row.
    if kwargs["compression"] > 16 or kwargs["top_k"] > 16:
        kwargs |= {"compression": 4, "top_k": 8}

    tree = {n: int(kwargs[n]) for n in ("compression", "top_k")}
    sizes = [len(x) for x in oracle.layers(np.zeros(T), **tree)]

    def want(q: Any, k: Any, **others: Any) -> list[np.ndarray]:
        options = options_of(others)
        _, _, seen = oracle.attention(q, k, k, **options)
        results = []
        for layer, size in enumerate(sizes):
            widths = (
                min(size, options["compression"] * options["top_k"]),
                options["top_k"] * (layer > 0),
            )
            for field, width in enumerate(widths):  # candidates, selected
                rows = np.full((B, T, G, width), -1)
                for (b, t, g), views in seen.items():
                    nodes = views[field][layer]
                    rows[b, t, g, : len(nodes)] = nodes
                results.append(rows)
        return results

    return Call(htree_select, kwargs, want, (i32,) * 2 * len(sizes))


def tree_of(x: np.ndarray, compression: int, top_k: int) -> list[np.ndarray]:
    """Returns the layers of the trees over all batch entries' tokens."""
    x = np.moveaxis(np.asarray(x, np.float64), 1, 0)
    return [np.moveaxis(y, 0, 1) for y in oracle.layers(x, compression, top_k)]


def draw_htree_build(c: Draw, r: Draw) -> Call:
    B, T, G, _, D, E = draw_dims(c)
    dtype = c.one(f64, f32)  # other dtypes round once per layer
    k, v = r.floats(dtype, B, T, G, D), r.floats(dtype, B, T, G, E)
    kwargs = {
        "k": k,
        "v": v,
        "compression": c.integer(c.one(2, 3)),
        "top_k": c.integer(c.one(1, 2)),
    }

    def want(k: Any, v: Any, compression: Any, top_k: Any) -> list[np.ndarray]:
        trees = (tree_of(x, int(compression), int(top_k)) for x in (k, v))
        return [y for layer in zip(*trees, strict=True) for y in layer]

    leaves = len(want(**kwargs))
    return Call(htree_build, kwargs, want, (dtype,) * leaves, diff=("k", "v"))


def draw_filled_cache(c: Draw, r: Draw, B: int, G: int, D: int, E: int, dtype: np.dtype) -> Any:
    """Draws a cache that is full of tokens, with random lengths."""
    capacity = c.below(14)
    tree = {n: int(x) for n, x in draw_tree(c, capacity, dtype).items()}
    layers = tree_layers(capacity, **tree)
    filled = []
    for width in (D, E):
        nodes = np.zeros((B, node_count(layers, tree["compression"]), G, width), dtype)
        means = tree_of(r.rng.normal(size=(B, capacity, G, width)), **tree)
        for layer, x in zip(layers, means, strict=True):
            nodes[:, layer.start : layer.start + layer.size] = x
        filled.append(nodes)
    return HTreeCache(*filled, r.positions(capacity, B), capacity, **tree)


def tokens_of(cache: Any, b: int) -> list[np.ndarray]:
    """Returns keys and values of the tokens of one request."""
    length = min(max(0, int(cache.lengths[b])), cache.capacity)
    return [np.asarray(x[b, :length], np.float64) for x in (cache.k, cache.v)]


def draw_htree_decode(c: Draw, r: Draw) -> Call:
    B, T, G, M, D, E = draw_dims(c)
    T = min(T, 3)
    dtype = c.one(f64, f64, f32)
    if 0 in (G, D, E):  # a cache cannot have these
        G, D, E = max(G, 1), max(D, 2), max(E, 1)
    cache = draw_filled_cache(c, r, B, G, D, E, dtype)
    kwargs = {
        "q": r.floats(dtype, B, T, G * M, D),
        "cache": cache,
        **draw_rotary(c),
        "return_lse": c.flag(0.7),
    }

    def want(q: Any, cache: Any, return_lse: Any, **rotary: Any) -> list[np.ndarray]:
        tree = {"compression": cache.compression, "top_k": cache.top_k}
        options = options_of({**rotary, **tree})
        out, lse = np.zeros((B, T, G * M, E)), np.full((B, T, G * M), -np.inf)
        for b in range(B):
            k, v = tokens_of(cache, b)
            for t in range(T):
                position = min(int(cache.lengths[b]) - T + t, len(k) - 1)
                if position >= 0:
                    padded = np.zeros((1, len(k), G * M, D))
                    padded[0, position] = q[b, t]
                    whole = oracle.attention(padded, k[None], v[None], **options)
                    out[b, t], lse[b, t] = (y[0, position] for y in whole[:2])
        return [out, lse] if return_lse else [out]

    return Call(
        htree_decode,
        kwargs,
        want,
        (dtype, wide(dtype)) if kwargs["return_lse"] else (dtype,),
        peak=peak(kwargs["scale"], kwargs["q"], cache.k),
    )


@functools.wraps(HTreeCache.append)
def appended(self: Any, k: Any, v: Any, counts: Any) -> list[Any]:
    """Returns lengths and nodes, with zeros for nodes that are not full of tokens."""
    cache = HTreeCache.append(self, k, v, counts)
    results, size, held = [cache.lengths], 1, jnp.minimum(cache.lengths, cache.capacity)
    for layer in cache.layers:
        for x in layer:
            full = jnp.arange(x.shape[1]) < held[:, None] // size
            results.append(jnp.where(full[..., None, None], x, 0))
        size *= cache.compression
    return results


def draw_htree_append(c: Draw, r: Draw) -> Call:
    B, T, G, _, D, E = draw_dims(c)
    G, D, E = max(G, 1), max(D, 2), max(E, 1)
    dtype = c.one(f64, f32)
    kwargs = {
        "self": draw_filled_cache(c, r, B, G, D, E, dtype),
        "k": r.floats(dtype, B, T, G, D),
        "v": r.floats(dtype, B, T, G, E),
        "counts": r.positions(T, B) if c.chance() else None,
    }

    def want(**x: Any) -> list[np.ndarray]:
        cache = x["self"]
        r, K, capacity = cache.compression, cache.top_k, cache.capacity
        counts = np.full(B, T) if x["counts"] is None else np.clip(x["counts"], 0, T)
        sizes = [len(y) for y in oracle.layers(np.zeros(capacity), r, K)]
        lengths, trees = np.zeros(B), [[np.zeros((B, n, G, d)) for n in sizes] for d in (D, E)]
        for b in range(B):
            for tree, old, new in zip(trees, tokens_of(cache, b), (x["k"], x["v"]), strict=True):
                tokens = np.concatenate([old, new[b, : counts[b]]])[:capacity].astype(np.float64)
                lengths[b] = min(max(0, int(cache.lengths[b])) + int(counts[b]), INT_MAX)
                for level, layer in enumerate(tree):
                    full = len(tokens) // r**level
                    for i in range(full):
                        layer[b, i] = tokens[i * r**level : (i + 1) * r**level].mean(0)
        return [lengths, *(y for layer in zip(*trees, strict=True) for y in layer)]

    leaves = len(want(**kwargs)) - 1
    return Call(appended, kwargs, want, (i32, *(dtype,) * leaves))


GENERATORS = {
    "htree_attention": draw_htree_attention,
    "htree_select": draw_htree_select,
    "htree_build": draw_htree_build,
    "htree_decode": draw_htree_decode,
    "HTreeCache.append": draw_htree_append,
}
