"""Benchmark cases of `sparse_mla` and `sparse_mla_decode`."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

import jax_dsa
from jax_dsa.bench.case import BF16, COPY, Case, causal_selection, normal, selected_pairs
from jax_dsa.core.layout import PAGE_RECORD_BYTES, RECORD_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jax_dsa.bench.case import Dims, Scale


def sparse_mla(size: Scale) -> Iterator[Case]:
    """Yields forward, backward and decode cases with causal random selections."""

    def case(step: str, dims: Dims) -> Case:
        t, s, n, d, k = (dims[x] for x in "TSNDK")
        e = min(512, d)

        def make(key: jax.Array) -> tuple:
            a, b, c = jax.random.split(key, 3)
            picks = causal_selection(c, t, s, k)[None, :, None]
            return normal(a, 1, t, n, d), normal(b, 1, s, 1, d), picks

        call = functools.partial(
            jax_dsa.sparse_mla, value_dim=e, deterministic=step == "bwd-deterministic"
        )
        pair = 2 * n * (d + e if step == "fwd" else 3 * d + 2 * e)
        return Case(
            "sparse_mla",
            step,
            dims,
            "bf16",
            make,
            call,
            {BF16: pair * selected_pairs(t, s, k)},
            diff=() if step == "fwd" else (0, 1),
            all_slots=pair * t * k,
        )

    for s in (8192, 32768, 131072):
        yield case("fwd", size(T=4096, S=s, N=128, D=576, K=2048))
    for n in (64, 16):
        yield case("fwd", size(T=4096, S=8192, N=n, D=576, K=2048))
    yield case("fwd", size(T=4096, S=8192, N=64, D=512, K=512))
    yield case("fwd", size(T=4096, S=8192, N=128, D=512, K=1024))
    for s in (4096, 8192, 32768, 131072):
        yield case("bwd", size(T=4096, S=s, N=128, D=576, K=2048))
    for s in (4096, 8192):
        yield case("bwd", size(T=4096, S=s, N=64, D=576, K=2048))
        yield case("bwd", size(T=4096, S=s, N=16, D=576, K=2048))
        yield case("bwd-deterministic", size(T=4096, S=s, N=128, D=576, K=2048))
    yield from sparse_mla_decode(size)


def sparse_mla_decode(size: Scale) -> Iterator[Case]:
    """Yields decode cases, which have one new token per request.

    With many heads the matrix products take longer than reading the selected keys.
    """

    def make(dims: Dims, fp8: bool, key: jax.Array) -> tuple:
        b, s, n, d, k = (dims[x] for x in "BSNDK")
        x, y, z = jax.random.split(key, 3)
        picks = jnp.broadcast_to(causal_selection(z, 1, s, k)[None, :, None], (b, 1, 1, k))
        cache = jax_dsa.FlatCache.empty(b, s, d, fp8=fp8).append(normal(y, b, s, 1, d))
        return normal(x, b, 1, n, d), cache, picks

    def case(b: int, n: int, fp8: bool) -> Case:
        dims = size(B=b, T=1, S=8192, N=n, D=576, K=2048)
        n, d, k = (dims[x] for x in "NDK")
        work = {
            BF16: 2 * b * n * k * (d + 512),
            COPY: b * (k * (RECORD_BYTES if fp8 else 2 * d) + 2 * n * (d + 512)),
        }
        build = functools.partial(make, dims, fp8)
        call = jax_dsa.sparse_mla_decode
        dtype = "fp8" if fp8 else "bf16"
        return Case("sparse_mla", "fwd", dims, dtype, build, call, work, note="decode")

    for fp8 in (False, True):
        for b in (1, 8, 64, 128):
            yield case(b, 128, fp8)
    for b in (64, 128):
        yield case(b, 64, True)
    yield from two_caches(size)


def two_caches(size: Scale) -> Iterator[Case]:
    """Yields DeepSeek-V4's decode steps: W keys of a window and K of S compressed keys."""
    page = 64

    def make(dims: Dims, fp8: bool, key: jax.Array) -> tuple:
        b, s, n, d, k, w = (dims[x] for x in "BSNDKW")
        x, y, z, picks = jax.random.split(key, 4)

        def paged(key: jax.Array, tokens: int) -> jax_dsa.PagedCache:
            pages = -(-tokens // page)
            cache = jax_dsa.PagedCache.empty(b * pages, page, b, pages, d, fp8=fp8)
            table = jnp.arange(b * pages, dtype=jnp.int32).reshape(b, pages)
            return cache.with_page_table(table).append(normal(key, b, tokens, 1, d))

        chosen = jnp.broadcast_to(causal_selection(picks, 1, s, k)[None], (b, 1, k))
        window = jnp.broadcast_to(jnp.arange(w, dtype=jnp.int32), (b, 1, w))
        return normal(x, b, 1, n, d), paged(y, w), window, paged(z, s), chosen

    def call(q: jax.Array, cache: Any, indices: Any, extra: Any, chosen: Any, **others: Any) -> Any:
        lists = {"extra_cache": extra, "extra_indices": chosen}
        return jax_dsa.sparse_mla_decode(q, cache, indices, **lists, **others)

    for n, k in ((64, 512), (128, 1024)):
        for b in (1, 64, 128):
            for fp8 in (False, True):
                dims = size(B=b, T=1, S=8192, N=n, D=512, W=128, K=k)
                keys, per_key = dims["W"] + dims["K"], PAGE_RECORD_BYTES if fp8 else 2 * 512
                work = {
                    BF16: 2 * b * n * keys * (512 + 512),
                    COPY: b * (keys * per_key + 2 * n * (512 + 512)),
                }
                build = functools.partial(make, dims, fp8)
                dtype = "fp8" if fp8 else "bf16"
                yield Case("sparse_mla", "fwd", dims, dtype, build, call, work, note="two-caches")
