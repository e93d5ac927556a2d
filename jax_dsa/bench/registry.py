"""The shapes that are measured, by operator, and how much work each is."""

from __future__ import annotations

import dataclasses
import functools
import itertools
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
    cudnn,
    normal,
    selected_pairs,
    visible_pairs,
)
from jax_dsa.bench.masked_attention import masked_attention
from jax_dsa.core.call import Call
from jax_dsa.core.layout import RECORD_BYTES
from jax_dsa.ops.block_mask.api import CLASSIFY
from jax_dsa.ops.block_mask.spec import Operands, Options

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from jax_dsa.bench.case import Dims, Scale


def rows(count: int, length: int, dtype: Any, key: jax.Array) -> tuple[jax.Array]:
    """Normal values."""
    return (normal(key, count, length, dtype=dtype),)


def sparse_mla(size: Scale) -> Iterator[Case]:
    """Causal random selections."""

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
    """One new token a request; many heads take longer than the bytes of the selected keys."""

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


def attn_dist(size: Scale) -> Iterator[Case]:
    """The same selections, all heads in groups of 64."""

    dims = size(T=4096, S=4096, N=128, D=576, K=2048)
    t, s, n, d, k = (dims[x] for x in "TSNDK")

    def make(key: jax.Array) -> tuple:
        a, b, c = jax.random.split(key, 3)
        picks = causal_selection(c, t, s, k)[None, :, None]
        lse = jnp.full((1, t, n), jnp.log(k), jnp.float32)
        return normal(a, 1, t, n, d), normal(b, 1, s, 1, d), picks, lse

    call = functools.partial(jax_dsa.attn_dist, head_group=64)
    work, all_slots = 2 * n * d * selected_pairs(t, s, k), 2 * n * d * t * k
    yield Case("attn_dist", "fwd", dims, "bf16", make, call, {BF16: work}, all_slots=all_slots)


def indexer(size: Scale) -> Iterator[Case]:
    """Logits, logits with their top-k ("topk", and "decode" for one new token a request, counted by
    the bytes of the keys, with a cache of pages "paged"), and the backward pass over selected keys.
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
        """The pages, of 64 keys, in any order."""
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

    for dtype, t, s in (
        ("fp8", 4096, 8192),
        ("fp8", 4096, 32768),
        ("fp8", 8192, 131072),
        ("bf16", 4096, 8192),
    ):
        dims = size(T=t, S=s, J=64, C=128, K=2048)
        work = {FP8 if dtype == "fp8" else BF16: 2 * 64 * 128 * visible_pairs(dims["T"], dims["S"])}
        build = functools.partial(make, dims, dtype)
        call = functools.partial(select, dims["K"])
        yield Case("indexer", "fwd", dims, dtype, build, call, work, note="topk")

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


def losses(size: Scale) -> Iterator[Case]:
    """The indexer's losses with their gradients: over selected keys, and over all keys."""

    def sparse(logits: jax.Array, teacher: jax.Array, **kwargs: Any) -> Any:
        loss = functools.partial(jax_dsa.indexer_kl_loss, **kwargs)
        return jax.value_and_grad(loss)(logits, teacher)

    def dense(*args: jax.Array, **kwargs: Any) -> Any:
        loss = functools.partial(jax_dsa.dense_indexer_kl_loss, **kwargs)
        return jax.value_and_grad(loss, argnums=(0, 1, 2))(*args)

    def make_sparse(dims: Dims, key: jax.Array) -> tuple:
        a, b = jax.random.split(key)
        shape = (1, dims["T"], dims["K"])
        return normal(a, *shape, dtype=jnp.float32), jax.random.uniform(b, shape)

    def make_dense(dims: Dims, key: jax.Array) -> tuple:
        t, n, g, d, j, c = (dims[x] for x in "TNGDJC")
        keys = jax.random.split(key, 5)
        weights = normal(keys[2], 1, t, j, dtype=jnp.float32)
        index = normal(keys[0], 1, t, j, c), normal(keys[1], 1, t, c), weights
        return *index, normal(keys[3], 1, t, n, d), normal(keys[4], 1, t, g, d)

    dims = size(T=8192, K=2048)
    work: dict[str, float] = {COPY: 12 * dims["T"] * dims["K"]}
    build = functools.partial(make_sparse, dims)
    yield Case("losses", "fwd", dims, "f32", build, sparse, work, note="gradient")
    for t, g, d in ((4096, 1, 576), (32768, 1, 576), (4096, 128, 192)):
        dims = size(T=t, N=128, G=g, D=d, J=64, C=128)
        t, n, d, j, c = (dims[x] for x in "TNDJC")
        work = {BF16: visible_pairs(t, t) * (4 * n * d + 6 * j * c)}
        build = functools.partial(make_dense, dims)
        yield Case("losses", "fwd", dims, "bf16", build, dense, work, note="gradients")


def topk(size: Scale) -> Iterator[Case]:
    """Rows of normal values; counted by bytes."""

    def lax_top_k(k: int, x: jax.Array) -> jax.Array:
        return jax.lax.top_k(x, k)[1]

    for r, s in ((64, 32768), (4096, 8192), (4096, 32768), (1024, 131072), (8192, 131072)):
        dims = size(R=r, S=s, K=2048)
        r, s, k = dims.values()
        yield Case(
            "topk",
            "fwd",
            dims,
            "f32",
            functools.partial(rows, r, s, jnp.float32),
            functools.partial(jax_dsa.topk, top_k=k),
            {COPY: 4 * r * (s + k)},
            peers={"lax.top_k": functools.partial(lax_top_k, k)},
        )


def block_mask(size: Scale) -> Iterator[Case]:
    """Which tiles of a random mask are empty or full: bound by its bytes."""

    def make(dims: Dims, key: jax.Array) -> tuple:
        return (jax.random.bernoulli(key, shape=(1, 1, dims["T"], dims["S"])),)

    def classify(mask: jax.Array, implementation: Any) -> Any:
        queries, keys = mask.shape[2:]
        x = Operands(mask, None, jnp.full((1, queries), keys, jnp.int32), None, None)
        return CLASSIFY(
            Call("make_block_mask", implementation), Options(queries, keys, 128, 128), x
        )

    dims = size(T=32768, S=32768)
    work = {COPY: dims["T"] * dims["S"]}
    yield Case("block_mask", "fwd", dims, "bool", functools.partial(make, dims), classify, work)


def mqa_decode(size: Scale) -> Iterator[Case]:
    """One query a request, K and V in one cache."""

    for b, s, n, d in (
        (64, 8192, 64, 576),
        (64, 8192, 64, 512),
        *((b, 8192, n, 576) for n in (128, 16) for b in (1, 8, 64, 128)),
        *((8, s, n, 576) for n in (128, 16) for s in (2048, 32768, 131072)),
        (1, 640, 128, 576),
    ):
        dims = size(B=b, S=s, N=n, D=d)
        s, d = dims["S"], dims["D"]
        e = min(512, d)

        def make(key: jax.Array, b: int = b, s: int = s, n: int = n, d: int = d) -> tuple:
            a, c = jax.random.split(key)
            return normal(a, b, 1, n, d), normal(c, b, s, 1, d)

        # One KV head for N queries: below about 128 heads reading it takes longer than its matmuls.
        work = {
            BF16: 2 * b * n * s * (d + e),
            COPY: b * (2 * s * d + 2 * n * (d + e)),
        }
        call = functools.partial(jax_dsa.mqa_decode, value_dim=e)
        yield Case("mqa_decode", "fwd", dims, "bf16", make, call, work)


def fp8(size: Scale) -> Iterator[Case]:
    """Quantisation, counted by bytes, and the matmul."""

    for m in (4096, 8 * 4096, 65536):
        dims = size(M=m, C=7168)
        m, c = dims.values()
        for power_of_two_scale in (False, True):
            yield Case(
                "fp8",
                "fwd",
                dims,
                "bf16",
                functools.partial(rows, m, c, jnp.bfloat16),
                functools.partial(jax_dsa.quantize_fp8, power_of_two_scale=power_of_two_scale),
                {COPY: m * (3 * c + 4 * -(-c // 128))},
                note="pow2" if power_of_two_scale else "",
            )
    for m, c in ((8192, 8192), (4 * 8192, 7168)):
        dims = size(M=m, C=c)
        m, c = dims.values()
        x, tiles = functools.partial(rows, m, c, jnp.bfloat16), (128, 128)
        quantize = functools.partial(jax_dsa.quantize_fp8, block=tiles)
        dequantize = functools.partial(jax_dsa.dequantize_fp8, dtype=jnp.bfloat16)
        yield Case("fp8", "fwd", dims, "bf16", x, quantize, {COPY: 3 * m * c}, note="tiles")

        def codes(key: jax.Array, x: Callable[..., tuple] = x) -> tuple:
            return jax_dsa.quantize_fp8(*x(key))

        work = {COPY: m * (3 * c + 4 * -(-c // 128))}
        yield Case("fp8", "fwd", dims, "bf16", codes, dequantize, work, note="dequantise")
    for m, n, k in (
        *((4096, 7168, 2048), (4096, 4096, 7168), (8192, 8192, 8192)),
        *((4000, 7000, 2000), (16, 7168, 7168), (128, 7168, 7168)),
    ):
        few = m <= 128  # rows: bound by reading b
        dims = size(M=m, N=n, K=k)
        m, n, k = dims.values()

        def make(key: jax.Array, m: int = m, n: int = n, k: int = k) -> tuple:
            a, b = jax.random.split(key)
            weights = jax_dsa.quantize_fp8(normal(b, n, k), block=(128, 128))
            return *jax_dsa.quantize_fp8(normal(a, m, k)), *weights

        work = {COPY: (m + n) * k + 2 * m * n} if few else {FP8: 2 * m * n * k}
        yield Case("fp8", "fwd", dims, "fp8", make, jax_dsa.fp8_matmul, work)
    dims = size(M=8192, N=8192, K=8192)
    m, n, k = dims.values()

    def operands(key: jax.Array) -> tuple:
        x, w, dy = jax.random.split(key, 3)
        return normal(x, m, k), normal(w, k, n), normal(dy, m, n)

    def forward_and_backward(
        linear: Callable[..., jax.Array], x: jax.Array, w: jax.Array, dy: jax.Array, **options: Any
    ) -> tuple:
        y, pullback = jax.vjp(functools.partial(linear, **options), x, w)
        return y, pullback(dy)

    call = functools.partial(forward_and_backward, jax_dsa.fp8_linear)
    peers: dict[str, Any] = {"bf16": functools.partial(forward_and_backward, jnp.matmul)}
    work, note = {FP8: 6 * m * n * k}, "linear-and-gradients"
    yield Case("fp8", "fwd", dims, "bf16", operands, call, work, peers=peers, note=note)


def htree(size: Scale) -> Iterator[Case]:
    """Prefill and decode against dense attention; no work is counted."""

    def make(dims: Dims, key: jax.Array) -> tuple:
        heads = (dims["N"], dims["G"], dims["G"])
        return tuple(
            normal(k, 1, dims["T"], h, dims["D"])
            for k, h in zip(jax.random.split(key, 3), heads, strict=True)
        )

    def make_cache(dims: Dims, key: jax.Array) -> tuple:
        b, s, n, g, d = (dims[x] for x in "BSNGD")
        x, y, z = jax.random.split(key, 3)
        cache = jax_dsa.HTreeCache.empty(b, s, d, groups=g)
        k, v = (normal(key, *cache.k.shape) for key in (y, z))
        lengths = jnp.full(b, s, jnp.int32)
        return normal(x, b, 1, n, d), dataclasses.replace(cache, k=k, v=v, lengths=lengths)

    def dense(q: Any, cache: jax_dsa.HTreeCache) -> Any:
        return jax_dsa.mqa_decode(q, cache.k, cache.v, key_value_seq_lengths=cache.lengths)

    for t in (16384, 65536, 131072, 262144, 1048576):
        dims = size(T=t, N=16, G=1, D=128)
        build = functools.partial(make, dims)
        few = t <= 262144  # a million dense take seconds
        peers: dict[str, Any] = {"cudnn": functools.partial(cudnn, True)} if few else {}
        for step, diff in (("fwd", ()), ("bwd", (0, 1, 2))):
            call = jax_dsa.htree_attention
            if step == "fwd" or few:
                yield Case("htree", step, dims, "bf16", build, call, {}, diff, peers)
    for b, s in itertools.product((1, 32), (16384, 131072, 1048576)):
        dims = size(B=b, S=s, N=16, G=1, D=128)
        yield Case(
            "htree",
            "fwd",
            dims,
            "bf16",
            functools.partial(make_cache, dims),
            jax_dsa.htree_decode,
            {},
            peers={"mqa_decode": dense},
            note="decode",
        )


OPERATORS: dict[str, Callable[[Scale], Iterator[Case]]] = {
    f.__name__: f
    for f in (
        fp8,
        topk,
        indexer,
        sparse_mla,
        attn_dist,
        masked_attention,
        block_mask,
        losses,
        masked_attention,
        mqa_decode,
        htree,
    )
}
