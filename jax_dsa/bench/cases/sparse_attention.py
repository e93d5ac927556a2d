"""Benchmark cases of `sparse_attention`."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

import jax_dsa
from jax_dsa.bench.case import BF16, COPY, Case, normal

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jax_dsa.bench.case import Dims, Scale


def sparse_attention(size: Scale) -> Iterator[Case]:
    """Yields causal cases in two variants, compared with dense attention.

    "similar": each query keeps 15 of 16 blocks of the query before it, as in trained models. The
    lists of 8 neighbours together then have 1.44 times as many blocks as one list. "random": the
    lists of neighbours are unrelated. K is the length of a list and b the number of keys in a
    block.
    """
    for b in (64, 128):
        for t in (8192, 32768):
            dims = size(T=t, N=64, G=4, D=128, K=16) | {"b": b}
            for lists in ("similar", "random"):
                yield _case("fwd", dims, lists)
                yield _case("bwd", dims, lists)
    for t in (2048, 4096, 131072):  # with 8192 and 32768: from which length lists pay
        for step in ("fwd", "bwd"):
            yield _case(step, size(T=t, N=64, G=4, D=128, K=16) | {"b": 128}, "similar")
    for lists in ("similar", "random"):
        yield _case("fwd", size(T=32768, N=24, G=2, D=256, K=512) | {"b": 4}, lists, tail=True)


def sparse_attention_decode(size: Scale) -> Iterator[Case]:
    """Yields cases with one query per request, which lists distinct blocks of a flat cache.

    Caches are in bfloat16, or in FP8 with a factor for each row.
    """
    for dtype in ("bf16", "fp8"):
        for requests, capacity in ((1, 131072), (8, 32768), (64, 8192), (128, 4096)):
            dims = size(B=requests, S=capacity, N=64, G=4, D=128, K=16) | {"b": 128}
            yield _decode_case(dims, dtype)


def _decode_case(dims: Dims, dtype: str) -> Case:
    """Returns a case; `dtype` is that of the caches, "bf16" or "fp8"."""
    b, s, n, g, d, k, block = (dims[x] for x in "BSNGDKb")

    def make(key: jax.Array) -> tuple:
        a, *others, c = jax.random.split(key, 4)
        lengths = jnp.full(b, s)
        numbers = jnp.argsort(jax.random.uniform(c, (b, 1, g, max(k, s // block))))[..., :k]
        rows = [normal(x, b, s, g, d) for x in others]
        factors = []
        if dtype == "fp8":
            rows, factors = map(list, zip(*(_quantized_rows(x) for x in rows), strict=True))
        caches = [jax_dsa.FlatCache(x, lengths) for x in rows]
        return normal(a, b, 1, n, d), *caches, numbers, *factors

    def call(q: Any, k: Any, v: Any, indices: Any, *factors: Any, **keywords: Any) -> Any:
        scales = dict(zip(("k_scale", "v_scale"), factors, strict=False))
        return jax_dsa.sparse_attention_decode(
            q, k, v, indices, block_size=block, **scales, **keywords
        )

    row_bytes = 2 * d if dtype == "bf16" else d + 4
    work = {
        BF16: 4 * b * n * k * block * d,
        COPY: 2 * b * (g * k * block * row_bytes + n * 2 * d),
    }
    return Case("sparse_attention_decode", "fwd", dims, dtype, make, call, work)


def _quantized_rows(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns rows in FP8 and their factors."""
    codes, scales = jax_dsa.quantize_fp8(x, block=(1, x.shape[-1]))
    return codes, scales[..., 0]


def block_lists(key: jax.Array, dims: Dims, tail: bool, groups: int, *, similar: bool) -> jax.Array:
    """Returns causal lists of distinct blocks, int32 [1, T, groups, K].

    Slot i contains one of the blocks i, i + K, i + 2 K, ... Similar lists draw it anew every 16
    queries, at other times than the neighbouring slots, and random lists for each query.

    Args:
        key: A random key.
        dims: Sizes by letter.
        tail: Whether a query lists only complete blocks, because it sees the last one as the tail
            block. Otherwise it lists the block that has its position, and blocks before that.
        groups: Number of lists of a query.
        similar: Whether neighbouring queries share most blocks.
    """
    t, k, b = (dims[x] for x in "TKb")
    query, slot = jnp.arange(t)[:, None, None], jnp.arange(k)[None, None]
    turn = (query + slot) // 16 if similar else query + 0 * slot
    drawn_at = jnp.maximum(16 * turn - slot, 0) if similar else query

    def visible(query: Any) -> Any:
        return (query + 1) // b if tail else query // b + 1

    drawn = jax.random.randint(key, (t + k, groups, k), 0, 2**31 - 1)
    drawn = jnp.take_along_axis(drawn, jnp.broadcast_to(turn, (t, groups, k)), axis=0)
    choices = jnp.maximum((visible(drawn_at) - slot + k - 1) // k, 1)
    number = drawn % choices
    if not tail:
        own = query // b
        number = jnp.where(slot == own % k, own // k, number)
    return jnp.where(slot < visible(query), slot + k * number, -1)[None]


def listed_pairs(dims: Dims, tail: bool) -> int:
    """Returns the number of (query, key) pairs of the lists of one KV head."""
    t, k, b = (dims[x] for x in "TKb")
    if tail:
        return sum(min(k, (i + 1) // b) * b + (i + 1) % b for i in range(t))
    return sum((min(k, i // b + 1) - 1) * b + i % b + 1 for i in range(t))


def _case(step: str, dims: Dims, lists: str, *, tail: bool = False) -> Case:
    """Returns a case.

    Args:
        step: "fwd" or "bwd".
        dims: Sizes by letter.
        lists: "similar" or "random".
        tail: Whether all KV heads share a list, and a query sees its incomplete block.
    """
    t, n, g, d, k, b = (dims[x] for x in "TNGDKb")

    def make(key: jax.Array) -> tuple:
        a, *others, c = jax.random.split(key, 4)
        indices = block_lists(c, dims, tail, 1 if tail else g, similar=lists == "similar")
        indices = indices[:, :, 0] if tail else indices
        return normal(a, 1, t, n, d), *(normal(x, 1, t, g, d) for x in others), indices

    def dense(q: Any, k: Any, v: Any, _: Any) -> Any:
        return jax_dsa.masked_attention(q, k, v, is_causal=True)

    call = functools.partial(
        jax_dsa.sparse_attention, block_size=b, is_causal=True, tail_block=tail
    )
    per_pair = 2 * n * (2 * d if step == "fwd" else 5 * d)
    return Case(
        "sparse_attention",
        step,
        dims,
        "bf16",
        make,
        call,
        {BF16: per_pair * listed_pairs(dims, tail)},
        diff=() if step == "fwd" else (0, 1, 2),
        peers={"masked_attention": dense},
        note=f"{lists}-tail" if tail else lists,
        all_slots=per_pair * t * k * b,
    )
