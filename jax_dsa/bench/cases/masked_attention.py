"""Benchmark cases of `masked_attention` and `masked_attention_varlen`."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_dsa
from jax_dsa.bench.case import BF16, COPY, Case, cudnn, normal, selected_pairs, visible_pairs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from jax_dsa.bench.case import Dims, Scale


# Percentage of the tiles, or of the keys, that are masked. docs/plots.py draws time against it.
EMPTY = (0, 50, 75, 90, 95)


def masked_attention(size: Scale) -> Iterator[Case]:
    """Yields cases with all kinds of masks.

    These are dense and causal attention, a causal window, packed documents, block masks, keys that
    each head keeps, a bias with its gradient, and a random mask. Only visible pairs of a query and
    a key count as work.
    """
    for step in ("fwd", "bwd"):
        yield _dense(step, size(T=16384, S=16384, N=16, D=128))
        yield _causal(step, size(T=16384, S=16384, N=16, D=128))
        yield _causal(step, size(T=8192, S=8192, N=128, D=192, E=128))
        yield _causal(step, size(T=8192, S=8192, N=32, G=8, D=128))
        yield _causal(step, size(T=8192, S=8192, N=32, D=64))
        yield _causal(step, size(T=8192, S=8192, N=16, D=256))
        for empty in EMPTY:
            yield _tiles(step, size(T=8192, S=8192, N=16, D=128), empty)
            yield _kept(step, size(T=8192, S=8192, N=16, D=128), empty)
        yield _packed(step, size(T=262144, S=262144, R=64, N=16, D=128))
        yield _window(step, size(T=131072, S=131072, W=4096, N=16, D=128))
        yield _biased(step, size(T=4096, S=4096, N=16, D=128))
    yield _random("fwd", size(T=8192, S=8192, N=16, D=128))
    for dims in ({"N": 16, "D": 128}, {"N": 128, "D": 192, "E": 128}):
        yield _causal("bwd-deterministic", size(T=8192, S=8192, **dims))


def _case(
    step: str,
    dims: Dims,
    note: str,
    pairs: int,
    call: Callable[..., Any],
    make: Callable[[Dims, jax.Array], tuple] | None = None,
    peer: Callable[..., Any] | None = None,
    all_pairs: int | None = None,
) -> Case:
    """Returns a case.

    Args:
        step: "fwd", "bwd" or "bwd-deterministic".
        dims: Sizes by letter.
        note: Name of the mask.
        pairs: Number of visible pairs of a query and a key, per head.
        call: Function of the arguments.
        make: Function of `dims` and a random key that makes the arguments. Default: q, k and v.
        peer: cuDNN's function of the arguments.
        all_pairs: Number of pairs that have to be computed, if some of them are masked.
    """
    n, d = dims["N"], dims["D"]
    e = dims.get("E", d)
    if step == "bwd-deterministic":
        call = functools.partial(call, deterministic=True)
    # Forward: S = QK^T and PV. Backward: S again, dQ and dK over D; dP and dV over E.
    per_pair = 2 * n * (d + e if step == "fwd" else 3 * d + 2 * e)
    return Case(
        "masked_attention",
        step,
        dims,
        "bf16",
        functools.partial(make or _qkv, dims),
        call,
        {BF16: per_pair * pairs},
        diff=() if step == "fwd" else (0, 1, 2),
        peers={"cudnn": peer} if peer else {},
        note=note,
        all_slots=per_pair * all_pairs if all_pairs else None,
    )


def _qkv(dims: Dims, key: jax.Array) -> tuple:
    t, s, n, d = (dims[x] for x in "TSND")
    groups, e = dims.get("G", n), dims.get("E", d)
    shapes = (1, t, n, d), (1, s, groups, d), (1, s, groups, e)
    keys = jax.random.split(key, 3)
    return tuple(normal(k, *shape) for k, shape in zip(keys, shapes, strict=True))


def _dense(step: str, dims: Dims) -> Case:
    pairs, peer = dims["T"] * dims["S"], functools.partial(cudnn, False)
    return _case(step, dims, "dense", pairs, jax_dsa.masked_attention, peer=peer)


def _causal(step: str, dims: Dims) -> Case:
    call = functools.partial(jax_dsa.masked_attention, is_causal=True)
    pairs, peer = visible_pairs(dims["T"], dims["S"]), functools.partial(cudnn, True)
    return _case(step, dims, "causal", pairs, call, peer=peer)


def _window(step: str, dims: Dims) -> Case:
    """Returns a case in which each query sees W keys: its own and those before it."""
    window: Any = {"local_window_size": (dims["W"] - 1, 0)}
    call = functools.partial(jax_dsa.masked_attention, is_causal=True, **window)
    pairs = selected_pairs(dims["T"], dims["S"], dims["W"])
    return _case(step, dims, "window", pairs, call, peer=functools.partial(cudnn, True, **window))


def document_bounds(tokens: int, count: int) -> np.ndarray:
    """Returns the bounds of packed documents of uneven lengths in random order.

    Args:
        tokens: Number of tokens of all documents together.
        count: Number of documents. Of 64 documents, the shortest has about 1/2048 of the tokens and
            the longest 1/16.

    Returns:
        Bounds, int32 [count + 1].
    """
    lengths = 1 / 2048 + (1 / 16 - 1 / 2048) * np.linspace(0, 1, count) ** 3.17
    ends = np.cumsum(np.random.default_rng(0).permutation(lengths))
    return np.rint(np.append(0, ends) / ends[-1] * tokens).astype(np.int32)


def _packed(step: str, dims: Dims) -> Case:
    """Returns a case with R causal documents. cuDNN through `jax.nn` has no packed sequences."""
    bounds = document_bounds(dims["T"], dims["R"])

    def make(dims: Dims, key: jax.Array) -> tuple:
        return *(x[0] for x in _qkv(dims, key)), jnp.asarray(bounds), jnp.asarray(bounds)

    call = functools.partial(jax_dsa.masked_attention_varlen, is_causal=True)
    pairs = sum(visible_pairs(length, length) for length in np.diff(bounds).tolist())
    return _case(step, dims, "varlen", pairs, call, make)


def _block_masked(q: Any, k: Any, v: Any, block_mask: Any, *_: Any, **kwargs: Any) -> Any:
    return jax_dsa.masked_attention(q, k, v, block_mask=block_mask, **kwargs)


def _tiles(step: str, dims: Dims, empty: int) -> Case:
    """Returns a case whose mask consists of full and empty tiles of 128 x 128, for all heads.

    Every row of tiles keeps its diagonal tile and the same number of random others. cuDNN gets the
    mask as an array.
    """
    rows, columns = -(-dims["T"] // 128), -(-dims["S"] // 128)
    keep = max(1, columns * (100 - empty) // 100)

    def make(dims: Dims, key: jax.Array) -> tuple:
        score = jax.random.uniform(key, (rows, columns)) + jnp.eye(rows, columns)
        kept = score >= jax.lax.top_k(score, keep)[0][:, -1:]
        mask = jnp.repeat(jnp.repeat(kept, 128, 0), 128, 1)[None, None, : dims["T"], : dims["S"]]
        return *_qkv(dims, key), jax_dsa.make_block_mask(mask), mask

    pairs = dims["T"] * min(dims["S"], keep * 128)
    return _case(step, dims, f"empty{empty}", pairs, _block_masked, make, _masked_cudnn)


def _masked_cudnn(q: Any, k: Any, v: Any, _: Any, mask: Any) -> Any:
    return cudnn(False, q, k, v, mask=mask)


def _kept(step: str, dims: Dims, empty: int) -> Case:
    """Returns a case in which each KV head keeps its own scattered keys."""
    keep = max(1, dims["S"] * (100 - empty) // 100)

    def make(dims: Dims, key: jax.Array) -> tuple:
        score = jax.random.uniform(key, (1, dims.get("G", dims["N"]), dims["S"]))
        return *_qkv(dims, key), jax.lax.top_k(score, keep)[1]

    def call(q: Any, k: Any, v: Any, kv_indices: Any, **kwargs: Any) -> Any:
        return jax_dsa.masked_attention(q, k, v, kv_indices=kv_indices, **kwargs)

    return _case(step, dims, f"kept{100 - empty}", dims["T"] * keep, call, make)


def _biased(step: str, dims: Dims) -> Case:
    """Returns a case with a bias for each score, [1, N, T, S], and its gradient."""
    t, s, n = (dims[x] for x in "TSN")

    def make(dims: Dims, key: jax.Array) -> tuple:
        return *_qkv(dims, key), normal(jax.random.fold_in(key, 1), 1, n, t, s)

    def peer(q: Any, k: Any, v: Any, bias: Any) -> Any:
        return cudnn(False, q, k, v, bias=bias)

    case = _case(step, dims, "bias", t * s, jax_dsa.masked_attention, make, peer)
    arrays = 1 if step == "fwd" else 2  # The bias is read, and backward its gradient is written.
    work = {**case.work, COPY: arrays * 2 * n * t * s}
    return dataclasses.replace(case, work=work, diff=(0, 1, 2, 3) if case.diff else ())


def _random(step: str, dims: Dims) -> Case:
    """Returns a case in which half of the scores are visible, and no tile is empty or full.

    cuDNN gets the mask as an array.
    """

    def make(dims: Dims, key: jax.Array) -> tuple:
        mask = jax.random.bernoulli(key, 0.5, (1, 1, dims["T"], dims["S"]))
        return *_qkv(dims, key), jax_dsa.make_block_mask(mask), mask

    scores = dims["T"] * dims["S"]
    pairs, peer = scores // 2, _masked_cudnn
    return _case(step, dims, "random", pairs, _block_masked, make, peer, all_pairs=scores)
