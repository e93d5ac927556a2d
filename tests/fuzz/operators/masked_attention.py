"""Generators of calls of masked attention, its packed form, its probabilities, and block masks."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from fuzz.draw import INT_MAX, Call, Draw, peak, without_batch
from fuzz.operators.sparse_mla import wide
from jax.sharding import PartitionSpec
from support.oracles import documents
from support.oracles import masked_attention as oracle

from jax_dsa import (
    BlockMask,
    attention_probs,
    make_block_mask,
    masked_attention,
    masked_attention_varlen,
)
from jax_dsa.core import compat

# Sizes that the kernels cover.
KERNEL = {"T": (1, 62, 213), "S": (1, 70, 300), "M": (1, 3), "D": (64, 72, 128), "E": (40, 64, 128)}


def draw_window(c: Draw) -> dict[str, Any]:
    """Draws the arguments that bound visible positions."""
    sizes = [c.integer(0), c.integer(2), (1, 0), (0, 3), (INT_MAX, 1), [2, 2]]
    return {
        "is_causal": c.flag(),
        "causal_alignment": c.one("top_left", "bottom_right"),
        "local_window_size": c.one(None, None, *sizes, *([2**31, 2**70] if c.edge else [])),
    }


def draw_softcap(c: Draw) -> Any:
    if c.edge:
        return c.one(None, 1e-30, 1e38, 1e38, 1e300)
    return c.one(None, None, 2.0, 3, np.float32(30))


def draw_blocks(c: Draw, r: Draw, B: int, N: int, G: int, T: int, S: int) -> Any:
    """Draws a block mask of random bools."""
    shape = c.one(1, B), c.one(1, G, N), T, S
    return jax.tree.map(
        np.asarray, _blocks(r.bools(*shape), c.one(2, 3, 128), 128 if c.kernel else c.one(8, 16))
    )


@functools.partial(jax.jit, static_argnums=(1, 2))
def _blocks(mask: Any, block_q: int, block_k: int) -> BlockMask:
    """Makes a block mask under jit, so that its number of slots does not depend on the mask."""
    return make_block_mask(mask, block_q=block_q, block_k=block_k)


def expanded(blocks: Any) -> Any:
    """Returns the mask [1|B, 1|H, T, S] that a block mask represents."""
    tiles, (bq, bk) = jnp.asarray(blocks.tiles), (blocks.block_q, blocks.block_k)
    B, H, I, J = tiles.shape
    if not tiles.size:
        return jnp.zeros((B, H, blocks.query_length, blocks.key_length), bool)
    bits = jnp.unpackbits(jnp.asarray(blocks.bits), axis=-1, bitorder="little").astype(bool)
    b, h = jnp.ix_(jnp.arange(B), jnp.arange(H))
    partial = bits[b[..., None, None], h[..., None, None], jnp.maximum(tiles, 0)]
    whole = jnp.where((tiles >= 0)[..., None, None], partial, (tiles == -1)[..., None, None])
    mask = jnp.swapaxes(whole, 3, 4).reshape(B, H, I * bq, J * bk)
    return mask[:, :, : blocks.query_length, : blocks.key_length]


def window_of(window: Any) -> Any:
    """Returns a window as the oracle takes it, clamped to ints that NumPy holds."""
    if window is None:
        return None
    pair = window if isinstance(window, tuple | list) else (window, window)
    return tuple(min(int(n), 2**40) for n in pair)


def solution(x: dict[str, Any], count: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns out, lse and probabilities of a call by the oracle."""
    scale, softcap = x["scale"], x["softcap"]
    scale = max(1, x["q"].shape[3]) ** -0.5 if scale is None else float(scale)
    softcap = None if softcap is None else float(softcap)
    arrays = (x[name] for name in ("q", "k", "v", "bias"))
    return oracle.attention(*arrays, count, scale, softcap, x["sinks"])


def results(x: dict[str, Any], count: np.ndarray) -> list[np.ndarray]:
    """Returns the results of a call of `masked_attention` by the oracle."""
    out, lse, _ = solution(x, count)
    return [out, lse] if x["return_lse"] else [out]


def draw_common(c: Draw, r: Draw, shape: tuple[int, ...], dtype: np.dtype) -> dict[str, Any]:
    """Draws the arguments of both functions, with a batch axis."""
    B, T, S, G, M, D, E = shape
    N = G * M
    per_score = [(c.one(1, B), c.one(1, G, N), c.one(1, T), S) for _ in range(2)]
    blocks = draw_blocks(c, r, B, N, G, T, S) if c.chance(0.3) else None
    kept = blocks is None and c.chance(0.4)
    return {
        "q": r.floats(dtype, B, T, N, D),
        "k": r.floats(dtype, B, S, G, D),
        "v": r.normal(
            dtype, B, S, G, E
        ),  # without NaN, which could reach queries that do not see it
        "bias": r.floats(dtype, *per_score[0]) if c.chance() else None,
        "mask": r.bools(*per_score[1]) if c.chance() else None,
        "scale": c.scale(),
        **draw_window(c),
        "softcap": draw_softcap(c),
        "block_mask": blocks,
        "kv_indices": r.positions(S, B, G, 70 if c.kernel else c.below(5)) if kept else None,
        "sinks": r.limits(wide(dtype), N) if c.chance() else None,
        "deterministic": c.flag(),
        "return_lse": c.flag(),
    }


def whole_mask(x: dict[str, Any], shape: tuple[int, ...]) -> np.ndarray:
    """Returns `mask` and `block_mask` combined, for every score."""
    mask = np.ones(shape, bool)
    blocks = None if x["block_mask"] is None else np.asarray(expanded(x["block_mask"]))
    for own in (x["mask"], blocks):
        if own is not None:
            heads = np.repeat(own, shape[1] // max(1, own.shape[1]), 1)
            mask = mask & heads
    return mask


def finish(c: Draw, call: Call, dtype: np.dtype) -> Call:
    """Sets the properties of a call of either function."""
    x, sums = call.kwargs, wide(dtype)
    call.dtypes = (dtype, *[sums] * int(x["return_lse"]))
    call.diff = ("q", "k", "v", *(n for n in ("bias", "sinks") if x[n] is not None))
    call.poison = ("k", "v")
    call.peak = peak(x["scale"], x["q"], x["k"]) + 4
    return call


def draw_batched(c: Draw, r: Draw) -> tuple[dict[str, Any], np.dtype]:
    """Draws the arguments of `masked_attention` and their dtype."""
    B, T, S, *sizes = c.dims(KERNEL, B=2, T=5, S=7, G=2, M=2, D=5, E=4)
    S = T if c.chance(0.3) else S
    shape, dtype = (B, T, S, *sizes), c.dtype()
    ids = (
        r.rng.integers(0, 2, (B, T)).astype(np.int32),
        r.rng.integers(0, 2, (B, S)).astype(np.int32),
    )
    kwargs = {
        **draw_common(c, r, shape, dtype),
        "segment_ids": c.one(None, ids, *([ids[0]] if T == S else [])),
        "key_value_seq_lengths": r.positions(S, B) if c.chance() else None,
    }
    return kwargs, dtype


def numbers_of(segment_ids: Any) -> tuple[Any, Any]:
    """Returns numbers of queries and keys, which are equal where a query sees a key."""
    if segment_ids is None or isinstance(segment_ids, tuple):
        return segment_ids or (None, None)
    starts, _ = documents.bounds(segment_ids)
    return starts, starts


def counts(x: dict[str, Any]) -> np.ndarray:
    """Returns how often each key counts for each query, by the oracle."""
    B, T, N, _ = x["q"].shape
    of_queries, of_keys = numbers_of(x["segment_ids"])
    return oracle.counts(
        (B, N, T, x["k"].shape[1]),
        x["k"].shape[2],
        mask=whole_mask(x, (B, N, T, x["k"].shape[1])),
        is_causal=x["is_causal"],
        causal_alignment=x["causal_alignment"],
        local_window_size=window_of(x["local_window_size"]),
        q_segments=of_queries,
        kv_segments=of_keys,
        key_value_seq_lengths=x["key_value_seq_lengths"],
        kv_indices=x["kv_indices"],
    )


def draw_masked_attention(c: Draw, r: Draw) -> Call:
    kwargs, dtype = draw_batched(c, r)

    def want(**x: Any) -> list[np.ndarray]:
        return results(x, counts(x))

    call = finish(c, Call(masked_attention, kwargs, want, ()), dtype)
    return without_batch(call) if kwargs["q"].shape[0] == 1 and c.chance() else call


def draw_attention_probs(c: Draw, r: Draw) -> Call:
    kwargs, dtype = draw_batched(c, r)
    v = kwargs.pop("v")
    for name in ("deterministic", "return_lse"):
        del kwargs[name]

    def want(**x: Any) -> list[np.ndarray]:
        return [solution({**x, "v": np.zeros_like(v)}, counts(x))[2]]

    call = Call(attention_probs, kwargs, want, (wide(dtype),))
    call.poison = ("k",)
    call.peak = peak(kwargs["scale"], kwargs["q"], kwargs["k"]) + 4
    return without_batch(call) if kwargs["q"].shape[0] == 1 and c.chance() else call


def draw_masked_attention_varlen(c: Draw, r: Draw) -> Call:
    T, S, *_ = shape = c.dims(KERNEL, T=8, S=8, G=2, M=2, D=5, E=4)
    dtype, R = c.dtype(), c.below(3)
    whole = draw_common(c, r, (1, *shape), dtype)
    names = "q", "k", "v", "bias", "mask", "kv_indices"
    kwargs = {n: x[0] if n in names and x is not None else x for n, x in whole.items()}
    for name, size in (("cu_seqlens_q", T), ("cu_seqlens_k", S)):
        kwargs[name] = np.sort(r.rng.integers(0, size + 1, R + 1)).astype(np.int32)

    def want(cu_seqlens_q: Any, cu_seqlens_k: Any, **x: Any) -> list[np.ndarray]:
        x = {n: y[None] if n in names and y is not None else y for n, y in x.items()}
        T, N, S, G = *x["q"].shape[1:3], *x["k"].shape[1:3]
        mask, count = whole_mask(x, (1, N, T, S)), np.zeros((1, N, T, S), np.int64)
        cuts = (np.asarray(cu).tolist() for cu in (cu_seqlens_q, cu_seqlens_k))
        for a, b, first, last in zip(*(z for cu in cuts for z in (cu[:-1], cu[1:])), strict=True):
            kept = x["kv_indices"]
            count[:, :, a:b, first:last] = oracle.counts(
                (1, N, b - a, last - first),
                G,
                mask=mask[:, :, a:b, first:last],
                is_causal=x["is_causal"],
                causal_alignment=x["causal_alignment"],
                local_window_size=window_of(x["local_window_size"]),
                kv_indices=None if kept is None else kept.astype(np.int64) - first,
            )
        return [y[0] for y in results(x, count)]

    return finish(c, Call(masked_attention_varlen, kwargs, want, ()), dtype)


@functools.wraps(make_block_mask)
def expanded_block_mask(**kwargs: Any) -> Any:
    """Makes a block mask and returns it as a mask of the requested shape."""
    leaves, tree = jax.tree.flatten(make_block_mask(**kwargs))
    shape = kwargs["mask"].shape if kwargs["shape"] is None else kwargs["shape"]
    shape = tuple(int(n) for n in shape)

    def expand(*leaves: Any) -> Any:
        return jnp.broadcast_to(expanded(jax.tree.unflatten(tree, leaves)), shape)

    return compat.left_to_compiler(expand, leaves[0], PartitionSpec())(*leaves)


def draw_make_block_mask(c: Draw, r: Draw) -> Call:
    B, H, T, S = c.dims(B=2, H=3, T=6, S=19)
    S = T if c.chance(0.3) else S
    mask = r.bools(c.one(1, B), c.one(1, H), c.one(1, T), S) if c.chance(0.7) else None
    if mask is not None and c.chance():
        mask = r.bools(B, H, T, S)
    ids = (
        r.rng.integers(0, 2, (B, T)).astype(np.int32),
        r.rng.integers(0, 2, (B, S)).astype(np.int32),
    )
    full = mask is not None and mask.shape == (B, H, T, S)
    kwargs = {
        "mask": mask,
        "shape": None if full and c.chance() else tuple(map(c.integer, (B, H, T, S))),
        **draw_window(c),
        "segment_ids": c.one(None, ids, *([ids[0]] if T == S else [])),
        "key_value_seq_lengths": r.positions(S, B) if mask is None or c.chance() else None,
        "block_q": c.integer(c.one(1, 2, 3, 100)),
        "block_k": c.integer(c.one(8, 16, 24)),
    }

    def want(**x: Any) -> list[np.ndarray]:
        shape = (B, H, T, S)
        of_queries, of_keys = numbers_of(x["segment_ids"])
        count = oracle.counts(
            shape,
            max(1, H),
            mask=None if x["mask"] is None else np.broadcast_to(x["mask"], shape),
            is_causal=x["is_causal"],
            causal_alignment=x["causal_alignment"],
            local_window_size=window_of(x["local_window_size"]),
            q_segments=of_queries,
            kv_segments=of_keys,
            key_value_seq_lengths=x["key_value_seq_lengths"],
        )
        return [count > 0]

    return Call(expanded_block_mask, kwargs, want, (np.dtype(bool),))


GENERATORS = {
    "attention_probs": draw_attention_probs,
    "masked_attention": draw_masked_attention,
    "masked_attention_varlen": draw_masked_attention_varlen,
    "make_block_mask": draw_make_block_mask,
}
