"""Benchmark cases of `indexer_logits`, `indexer_topk` and `indexer_block_topk`."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

import jax_dsa
from jax_dsa.bench.case import (
    BF16,
    COPY,
    FP8,
    Case,
    causal_selection,
    normal,
    selected_pairs,
    visible_pairs,
)
from jax_dsa.ops.indexer import indexer_selected_logits

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jax_dsa.bench.case import Dims, Scale


def indexer(size: Scale) -> Iterator[Case]:
    """Yields cases of the logits, of the logits with their top-k, and of the backward pass.

    The note of a case says what it is: "topk" selects for many queries, "decode" for one new token
    per request, and "paged" the same with a paged cache. Both decode cases count the bytes of the
    keys. "blocks" selects blocks of 128 keys for each head, as MiniMax-M3 does, and "blocks-shared"
    for all heads together. "candidates" selects inside M blocks of b keys, and "shared" means that
    64 neighbouring queries have the same blocks. "selected" computes the logits of given keys. The
    backward pass runs over the selected keys.
    """

    def make(dims: Dims, dtype: str, key: jax.Array) -> tuple:
        n = dims.get("B", 1)
        t, s, j, c = (dims[x] for x in "TSJC")
        a, b, d = jax.random.split(key, 3)
        q, k = normal(a, n, t, j, c), normal(b, n, s, c)
        weights = normal(d, n, t, j, dtype=jnp.float32)
        ends = jnp.tile(s - t + 1 + jnp.arange(t, dtype=jnp.int32), (n, 1))
        if dtype == "bf16":
            return q, k, weights, ends
        (q, q_scale), (k, k_scale) = jax_dsa.quantize_fp8(q), jax_dsa.quantize_fp8(k)
        return q, k, weights * q_scale[..., 0], ends, k_scale[..., 0]

    def make_paged(dims: Dims, key: jax.Array) -> tuple:
        """Makes a cache with pages of 64 keys in random order."""
        q, k, weights, ends, k_scale = make(dims, "fp8", key)
        batch, size = k_scale.shape
        table = jax.random.permutation(key, batch * size // 64).astype(jnp.int32)
        pages = k.reshape(-1, 64, k.shape[2]), k_scale.reshape(-1, 64)
        lengths = jnp.full(batch, size, jnp.int32)
        cache = jax_dsa.PagedCache(pages[0][:, :, None], table.reshape(batch, -1), lengths)
        return q, cache, weights, ends, pages[1]

    def logits(q: Any, k: Any, weights: Any, ends: Any, k_scale: Any = None, **kwargs: Any) -> Any:
        return jax_dsa.indexer_logits(q, k, weights, ends=ends, index_k_scale=k_scale, **kwargs)

    def select(
        top_k: int, q: Any, k: Any, weights: Any, ends: Any, k_scale: Any = None, **kwargs: Any
    ) -> Any:
        return jax_dsa.indexer_topk(
            q, k, weights, top_k, ends=ends, index_k_scale=k_scale, **kwargs
        )

    def select_blocks(
        top_k: int, per_head: bool, q: Any, k: Any, weights: Any, ends: Any, **kwargs: Any
    ) -> Any:
        return jax_dsa.indexer_block_topk(
            q,
            k,
            None if per_head else weights,
            top_k,
            block_size=128,
            per_head=per_head,
            relu=not per_head,
            ends=ends,
            **kwargs,
        )

    def selected_block_logits(*args: Any, **kwargs: Any) -> Any:
        return select_blocks(*args, **kwargs)[1]

    def selected_logits(top_k: int, *args: Any, **kwargs: Any) -> Any:
        return select(top_k, *args, **kwargs)[1]

    for dtype, t, s, j in (
        ("fp8", 4096, 8192, 64),
        ("fp8", 4096, 32768, 64),
        ("fp8", 4096, 8192, 32),
        ("fp8", 8192, 131072, 64),
        ("bf16", 8192, 8192, 64),
    ):
        dims = size(T=t, S=s, J=j, C=128)
        work = {FP8 if dtype == "fp8" else BF16: 2 * j * 128 * visible_pairs(dims["T"], dims["S"])}
        build = functools.partial(make, dims, dtype)
        yield Case("indexer", "fwd", dims, dtype, build, logits, work)

    for dtype, t, s, j in (
        ("fp8", 4096, 8192, 64),
        ("fp8", 4096, 32768, 64),
        ("fp8", 8192, 131072, 64),
        ("bf16", 4096, 8192, 64),
        ("bf16", 8192, 8192, 4),
        ("bf16", 8192, 131072, 4),
        ("bf16", 8192, 131072, 64),
    ):
        dims = size(T=t, S=s, J=j, C=128, K=2048)
        work = {FP8 if dtype == "fp8" else BF16: 2 * j * 128 * visible_pairs(dims["T"], dims["S"])}
        build = functools.partial(make, dims, dtype)
        call = functools.partial(select, dims["K"])
        yield Case("indexer", "fwd", dims, dtype, build, call, work, note="topk")

    def make_candidates(dims: Dims, dtype: str, share: int, key: jax.Array) -> tuple:
        """Draws a block from each of M intervals of the blocks that the first query sees."""
        t, s, m, b = (dims[x] for x in "TSMb")
        blocks, slots = (s - t) // b, jnp.arange(m)
        low, high = slots * blocks // m, (slots + 1) * blocks // m
        lists = jax.random.randint(key, (-(-t // share), m), low, high)
        lists = jnp.repeat(lists, share, axis=0)[None, :t]
        return lists, *make(dims, dtype, key)

    def select_inside(block: int, top_k: int, lists: Any, *args: Any, **kwargs: Any) -> Any:
        return select(top_k, *args, candidates=lists, candidate_block_size=block, **kwargs)

    for dtype in ("fp8", "bf16"):
        for block, share in ((8, 1), (8, 64), (128, 1), (128, 64)):
            dims = size(T=8192, S=131072, J=64, C=128, M=16384 // block, b=block, K=2048)
            build = functools.partial(make_candidates, dims, dtype, share)
            call = functools.partial(select_inside, block, dims["K"])
            pairs = dims["T"] * dims["M"] * block
            work = {FP8 if dtype == "fp8" else BF16: 2 * 64 * 128 * pairs}
            note = "candidates-shared" if share > 1 else "candidates"
            yield Case("indexer", "fwd", dims, dtype, build, call, work, note=note)

    def make_selection(dims: Dims, dtype: str, key: jax.Array) -> tuple:
        q, k, weights, _, *k_scale = make(dims, dtype, key)
        return q, k, weights, causal_selection(key, *(dims[x] for x in "TSK"))[None], *k_scale

    def replay(
        q: Any, k: Any, weights: Any, indices: Any, k_scale: Any = None, **kwargs: Any
    ) -> Any:
        return indexer_selected_logits(q, k, weights, indices, index_k_scale=k_scale, **kwargs)

    for dtype, s in (("fp8", 8192), ("bf16", 8192), ("fp8", 131072), ("bf16", 131072)):
        dims = size(T=8192, S=s, J=64, C=128, K=2048)
        pairs = selected_pairs(dims["T"], dims["S"], dims["K"])
        build = functools.partial(make_selection, dims, dtype)
        work = {FP8 if dtype == "fp8" else BF16: 2 * 64 * 128 * pairs}
        all_slots = 2 * 64 * 128 * dims["T"] * dims["K"]
        yield Case(
            *("indexer", "fwd", dims, dtype, build, replay, work),
            note="selected",
            all_slots=all_slots,
        )

    for s in (8192, 131072):
        for per_head in (True, False):
            dims = size(T=8192, S=s, J=4, C=128, K=16)
            work = {BF16: 2 * 4 * 128 * visible_pairs(dims["T"], dims["S"])}
            build = functools.partial(make, dims, "bf16")
            call = functools.partial(select_blocks, dims["K"], per_head)
            note = "blocks" if per_head else "blocks-shared"
            yield Case("indexer", "fwd", dims, "bf16", build, call, work, note=note)

    for b in (1, 8, 64, 128):
        for s in (8192, 131072):
            dims = size(B=b, T=1, S=s, J=64, C=128, K=2048)
            keys = b * dims["S"]
            work = {FP8: 2 * 64 * 128 * keys, COPY: keys * (dims["C"] + 4)}
            build = functools.partial(make, dims, "fp8")
            call = functools.partial(select, dims["K"])
            yield Case("indexer", "fwd", dims, "fp8", build, call, work, note="decode")
            build = functools.partial(make_paged, dims)
            yield Case("indexer", "fwd", dims, "fp8", build, call, work, note="paged")

    dims = size(T=4096, S=8192, J=64, C=128, K=2048)
    yield Case(
        "indexer",
        "bwd",
        dims,
        "bf16",
        functools.partial(make, dims, "bf16"),
        functools.partial(selected_logits, dims["K"]),
        {BF16: 6 * 64 * 128 * selected_pairs(dims["T"], dims["S"], dims["K"])},
        diff=(0, 1, 2),
        all_slots=6 * 64 * 128 * dims["T"] * dims["K"],
    )

    dims = size(T=8192, S=8192, J=4, C=128, K=16)
    # A logit depends on one key of its block. The first queries see fewer blocks.
    pairs = sum(min(-(-seen // 128), dims["K"]) for seen in range(1, dims["T"] + 1))
    yield Case(
        "indexer",
        "bwd",
        dims,
        "bf16",
        functools.partial(make, dims, "bf16"),
        functools.partial(selected_block_logits, dims["K"], True),
        {BF16: 6 * 4 * 128 * pairs},
        diff=(0, 1),
        note="blocks",
        all_slots=6 * 4 * 128 * dims["T"] * dims["K"],
    )
