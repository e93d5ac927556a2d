"""The kernel of `sparse_attention_decode`, and the lists that it is called with."""

from __future__ import annotations

import dataclasses
import functools
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.compare import assert_matches
from support.marks import slow

from jax_dsa import FlatCache, PagedCache, sparse_attention_decode
from jax_dsa.core import ffi
from jax_dsa.ops.sparse_attention import cached, cached_cuda
from jax_dsa.ops.sparse_attention.spec import Operands, Options

B, T, N, G, D, K = 3, 2, 4, 2, 64, 3
FORCED = {"is_causal": True, "sink_blocks": 1, "local_blocks": 2}


def handler(target: str, operands: Any, avals: Any, **attrs: Any) -> list[Any]:
    """Computes what the handler returns, from its operands alone."""
    assert target == "jax_dsa.sparse_attention_decode.v1"
    q, k, v, blocks, ends, sinks, table, *factors = operands
    assert [a.dtype for a in (blocks, ends)] == [jnp.int32] * 2
    assert all(a is None or a.dtype == jnp.float32 for a in (sinks, *factors))
    x = Operands(q, k, v, blocks, None, None, ends, None, sinks, table, *factors)
    options = Options(**{name: value.item() for name, value in attrs.items()})
    y = cached.sparse_attention_decode_fwd(options, x)
    return [a.astype(aval.dtype) for a, aval in zip(y, avals, strict=True)]


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces the kernel by `handler`."""
    monkeypatch.setattr(cached_cuda, "ffi", SimpleNamespace(call=handler))
    monkeypatch.setattr(ffi, "status", lambda: (True, ""))
    jax.clear_caches()


# The page size or 0, the capacity, the size of a block, and options.
CASES: dict[str, tuple[int, int, int, dict[str, Any]]] = {
    "flat": (0, 24, 4, {}),
    "flat, large blocks": (0, 24, 16, {**FORCED, "sinks": np.array([np.inf, -2, 0.5, 3])}),
    "large pages": (16, 48, 4, {"is_causal": True, "tail_block": True}),
    "small pages": (4, 32, 16, FORCED),
    "neither divides": (6, 24, 4, FORCED),
    "fp8": (0, 24, 16, {"batch_invariant": True}),
    "fp8, pages": (6, 24, 4, FORCED),
    "keys": (4, 24, 1, {**FORCED, "topk_length": np.array([[1, 2], [0, -1], [3, 9]], np.int32)}),
}


@pytest.mark.parametrize("lengths", [(24, 7, 1), slow((99, 0, 13))])
@pytest.mark.parametrize("name", CASES)
def test_lists(name: str, lengths: Any, rng: np.random.Generator, kernels: None) -> None:
    page, capacity, size, options = CASES[name]
    options = dict(options)
    if "sinks" in options:
        options["sinks"] = options["sinks"].astype(np.float32)
    lengths = jnp.asarray(lengths, jnp.int32)
    if page == 0:
        shape: tuple = (B, capacity, G, D)
        make = functools.partial(FlatCache, lengths=lengths)
    else:
        shape = 9, page, G, D
        table = rng.integers(-1, 10, size=(B, capacity // page)).astype(np.int32)
        make = functools.partial(PagedCache, page_table=jnp.asarray(table), lengths=lengths)
    q = jnp.asarray(rng.normal(size=(B, T, N, D)), jnp.bfloat16)
    pair = [make(jnp.asarray(rng.normal(size=shape), jnp.bfloat16)) for _ in range(2)]
    factors: dict[str, Any] = {}
    if "fp8" in name:
        pair, factors = fp8_caches(rng, pair, scaled=True)
    indices = rng.integers(-2, capacity // size + 2, size=(B, T, G, K)).astype(np.int32)
    indices[..., 2] = indices[..., 1]
    call = functools.partial(
        sparse_attention_decode,
        block_size=size,
        return_lse=True,
        return_max_logit=True,
        **factors,
        **options,
    )
    got = call(q, *pair, indices, implementation="cuda")
    want = call(q, *pair, indices, implementation="xla")
    assert_matches(got[0], want[0], 2e-2)
    assert_matches(got[1:], want[1:], 1e-5)


def test_vmap_of_pools(rng: np.random.Generator, kernels: None) -> None:
    """The pools of the mapped calls follow one another."""
    pools = [jnp.asarray(rng.normal(size=(2, 5, 8, G, D)), jnp.bfloat16) for _ in range(2)]
    q = jnp.asarray(rng.normal(size=(2, B, 1, N, D)), jnp.bfloat16)
    table = jnp.asarray(rng.integers(-1, 6, size=(B, 3)), jnp.int32)
    indices = rng.integers(-1, 7, size=(2, B, 1, K)).astype(np.int32)

    def call(q: Any, k: Any, v: Any, indices: Any, implementation: str) -> Any:
        caches = [PagedCache(x, table, jnp.asarray([24, 9, 3])) for x in (k, v)]
        return sparse_attention_decode(
            q, *caches, indices, block_size=4, return_lse=True, implementation=implementation
        )

    got, want = (
        jax.vmap(functools.partial(call, implementation=name))(q, *pools, indices)
        for name in ("cuda", "xla")
    )
    assert_matches(got[0], want[0], 2e-2)
    assert_matches(got[1], want[1], 1e-5)


def fp8_caches(
    rng: np.random.Generator, caches: list[Any], scaled: bool
) -> tuple[list[Any], dict[str, Any]]:
    """Returns the caches in FP8, and the factors of their rows."""
    field = "pages" if isinstance(caches[0], PagedCache) else "data"
    rows = [getattr(cache, field) for cache in caches]
    made = [
        dataclasses.replace(cache, **{field: (2 * x).astype(jnp.float8_e4m3fn)})
        for cache, x in zip(caches, rows, strict=True)
    ]
    names = ("k_scale", "v_scale") if scaled else ()
    return made, {
        name: jnp.asarray(rng.uniform(0.2, 0.9, x.shape[:-1]), jnp.float32)
        for name, x in zip(names, rows, strict=False)
    }


UNSUPPORTED: dict[str, tuple[dict[str, Any], str]] = {
    "dtype": ({"dtype": jnp.float32}, "it takes bfloat16, and caches also in float8_e4m3fn, got"),
    "dim": ({"dim": 96}, r"it has D=E in \(64, 128, 256\), got D=96 and E=96"),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_limits(name: str, kernels: None) -> None:
    options, message = UNSUPPORTED[name]
    options = {"block_size": 4, **options}
    dtype, dim = options.pop("dtype", jnp.bfloat16), options.pop("dim", D)
    capacity, stored = options.pop("capacity", 24), options.pop("stored", dtype)
    cache = FlatCache.empty(B, capacity, dim, groups=G, dtype=stored)
    q, indices = jnp.zeros((B, 1, N, dim), dtype), jnp.zeros((B, 1, K), jnp.int32)
    with pytest.raises(NotImplementedError, match=f"sparse_attention_decode: .*{message}"):
        sparse_attention_decode(q, cache, cache, indices, implementation="cuda", **options)


# B, T, N, G, D, block size, slots, capacity, page size or 0.
ON_A_GPU = [
    (1, 1, 64, 4, 128, 128, 16, 8192, 0),
    (64, 1, 64, 4, 128, 128, 16, 4096, 64),
    (5, 3, 24, 2, 256, 4, 512, 4096, 64),
    (3, 8, 6, 1, 64, 32, 9, 960, 48),
    (2, 2, 80, 1, 128, 64, 5, 1024, 128),
    (1, 1, 32, 1, 256, 1, 1, 1, 0),
    (3, 1, 4, 2, 64, 16, 62, 213, 71),
]


def on_a_gpu(
    rng: np.random.Generator, sizes: tuple[int, ...], fp8: bool
) -> tuple[Any, tuple, dict[str, Any]]:
    """Returns a call, its arrays and its factors. Keys that no query sees are NaN."""
    b, t, n, g, d, size, slots, capacity, page = sizes
    lengths = jnp.asarray(rng.integers(1, capacity + 9, b), jnp.int32)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape), jnp.bfloat16)

    if page:
        r = capacity // page
        table = jnp.asarray(rng.permutation(b * r + 5)[: b * r].reshape(b, r) - 2, jnp.int32)
        pair: list[Any] = [
            PagedCache(normal(b * r + 3, page, g, d), table, lengths) for _ in range(2)
        ]
    else:
        pair = [FlatCache(normal(b, capacity, g, d), lengths) for _ in range(2)]
        past = jnp.arange(capacity)[None, :, None, None] >= lengths[:, None, None, None]
        pair = [dataclasses.replace(x, data=jnp.where(past, jnp.nan, x.data)) for x in pair]
    factors: dict[str, Any] = {}
    if fp8:
        pair, factors = fp8_caches(rng, pair, scaled=bool(slots % 2 == 0))
    q = normal(b, t, n, d)
    ends = -(-np.asarray(lengths) // size)[:, None, None, None]
    indices = (rng.random((b, t, g, slots)) * ends).astype(np.int32)
    odd = np.asarray([-(2**31), -1, capacity // size + 1, 2**31 - 1], np.int32)
    invalid = rng.random(indices.shape) < 0.1
    indices = np.where(invalid, odd[rng.integers(0, 4, indices.shape)], indices)
    call = functools.partial(
        sparse_attention_decode,
        block_size=size,
        sinks=jnp.asarray(rng.standard_normal(n), jnp.float32),
        return_lse=True,
        return_max_logit=True,
        **FORCED,
    )
    return call, (q, *pair, indices), factors


@pytest.mark.gpu
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("sizes", ON_A_GPU, ids=str)
def test_the_kernel(sizes: tuple[int, ...], fp8: bool, rng: np.random.Generator) -> None:
    call, arrays, factors = on_a_gpu(rng, sizes, fp8)
    got, want = (
        jax.jit(functools.partial(call, implementation=name))(*arrays, **factors)
        for name in ("cuda", "xla")
    )
    assert_matches(got[0], want[0], 2e-2)
    # XLA rounds a row of an FP8 cache, times its factor, to bfloat16.
    assert_matches(got[1:], want[1:], 2e-2 if fp8 else 1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_batch_invariant_bits(fp8: bool, rng: np.random.Generator) -> None:
    """A request has the same bits alone, and among others that are listed in another order."""
    sizes = (40, 2, 64, 4, 128, 128, 16, 4096, 0)
    call, (q, k, v, indices), factors = on_a_gpu(rng, sizes, fp8)
    run = jax.jit(functools.partial(call, batch_invariant=True, implementation="cuda"))

    def of(rows: Any) -> Any:
        caches = [FlatCache(x.data[rows], x.lengths[rows]) for x in (k, v)]
        part = {name: x[rows] for name, x in factors.items()}
        return run(q[rows], *caches, indices[rows], **part)

    whole, turned = of(slice(None)), of(slice(None, None, -1))
    for a, b, alone in zip(whole, turned, of(slice(7, 8)), strict=True):
        assert np.array_equal(a, b[::-1], equal_nan=True)
        assert np.array_equal(a[7:8], alone, equal_nan=True)
