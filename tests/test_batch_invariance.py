"""With `batch_invariant=True` the bits of a request do not depend on the rest of the batch."""

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

from jax_dsa import (
    FlatCache,
    PagedCache,
    indexer_topk,
    mqa_decode,
    quantize_fp8,
    sparse_mla,
    sparse_mla_decode,
)
from jax_dsa.core import streaming
from jax_dsa.ops.sparse_mla import cuda
from jax_dsa.ops.sparse_mla.spec import Operands, Options, Results
from jax_dsa.serving import pack_records, unpack_records

PAGE = 64


def problem(
    rng: np.random.Generator, *, b: int, s: int, n: int, k: int, paged: bool = False, **kind: Any
) -> tuple[jax.Array, FlatCache | PagedCache, jax.Array]:
    """Returns q, a cache of requests of several lengths, and a selection with empty slots."""
    q = jnp.asarray(rng.standard_normal((b, 1, n, 576)), jnp.bfloat16)
    rows = jnp.asarray(rng.standard_normal((b, s, 1, 576)), jnp.bfloat16)
    indices = jnp.asarray(rng.integers(-2, s + 2, (b, 1, k)), jnp.int32)
    lengths = jnp.asarray(rng.integers(1, s + 1, b), jnp.int32)
    if not paged:
        return q, FlatCache.empty(b, s, **kind).append(rows, lengths), indices
    pages = s // PAGE
    cache = PagedCache.empty(b * pages, PAGE, b, pages, **kind)
    table = jnp.asarray(rng.permutation(b * pages).reshape(b, pages), jnp.int32)
    return q, dataclasses.replace(cache, page_table=table).append(rows, lengths), indices


def first(count: int, cache: FlatCache | PagedCache) -> FlatCache | PagedCache:
    """Returns a cache of the first requests alone, with the same pages."""
    if isinstance(cache, FlatCache):
        return jax.tree.map(lambda a: a[:count], cache)
    table, lengths = cache.page_table[:count], cache.lengths[:count]
    return dataclasses.replace(cache, page_table=table, lengths=lengths)


def differing(call: Any, sizes: Any, q: Any, cache: Any, *arrays: Any) -> list[int]:
    """Returns the batch sizes at which a request's results differ from those in the whole batch."""
    whole = jax.tree.map(np.asarray, call(q, cache, *arrays))
    found = []
    for count in sizes:
        few = call(q[:count], first(count, cache), *[a[:count] for a in arrays])
        if any((np.asarray(a) != b[:count]).any() for a, b in zip(few, whole, strict=True)):
            found.append(count)
    return found


def programs(operator: Any, **options: Any) -> tuple[Any, Any]:
    """Returns the compiled operator, as it is by default and batch-invariant."""
    call = functools.partial(operator, return_lse=True, **options)
    return jax.jit(call), jax.jit(functools.partial(call, batch_invariant=True))


@pytest.mark.parametrize(
    ("paged", "fp8"), [(False, False), (True, True)], ids=["keys", "paged-records"]
)
def test_sparse_mla_decode(paged: bool, fp8: bool, rng: np.random.Generator) -> None:
    args = problem(rng, b=5, s=320, n=8, k=160, paged=paged, fp8=fp8)
    default, invariant = programs(sparse_mla_decode, implementation="xla")
    assert not differing(invariant, (1, 3), *args)
    for got, want in zip(invariant(*args), default(*args), strict=True):
        assert_matches(got, want, tol=1e-2)
    one_by_one = ["length=5" in str(program.trace(*args).jaxpr) for program in (default, invariant)]
    assert one_by_one == [False, True]


def test_mqa_decode(rng: np.random.Generator, monkeypatch: Any) -> None:
    """By default more requests lead to more chunks of keys."""
    monkeypatch.setattr(streaming, "BUDGET", 2**20)
    q, cache, _ = problem(rng, b=5, s=320, n=8, k=1)
    default, invariant = programs(mqa_decode)
    assert not differing(invariant, (1, 3), q, cache)
    assert differing(default, (1, 3), q, cache)
    for got, want in zip(invariant(q, cache), default(q, cache), strict=True):
        assert_matches(got, want, tol=1e-2)


def test_no_requests() -> None:
    cache = FlatCache.empty(0, 8, 32, dtype=jnp.float32)
    q, indices = jnp.ones((0, 1, 4, 32)), jnp.zeros((0, 1, 3), jnp.int32)
    assert sparse_mla_decode(q, cache, indices, batch_invariant=True).shape == (0, 1, 4, 32)
    assert mqa_decode(q, cache, batch_invariant=True).shape == (0, 1, 4, 32)


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_the_arguments_of_the_kernel(batch_invariant: bool, monkeypatch: Any) -> None:
    """The handler may reduce the KV splits on a small device, except for batch invariance."""
    asked, passed = [], {}

    def splits(**sizes: Any) -> int:
        asked.append(sizes)
        return 3

    def call(target: str, operands: Any, avals: Any, **attrs: Any) -> Any:
        passed.update(attrs, shapes=[a.shape for a in avals])
        return avals

    extension = SimpleNamespace(sparse_mla_decode_splits=splits)
    monkeypatch.setattr(cuda, "ffi", SimpleNamespace(call=call, extension=lambda: extension))
    q, kv = jnp.zeros((5, 1, 128, 576), jnp.bfloat16), jnp.zeros((5, 9, 1, 576), jnp.bfloat16)
    x = Operands(q, kv, jnp.zeros((5, 1, 1, 1100), jnp.int32))
    row = jnp.zeros((5, 1, 128))
    avals = Results(jax.ShapeDtypeStruct((5, 1, 128, 512), q.dtype), row, row)
    options = Options(0.1, 512, batch_invariant=batch_invariant)
    cuda.sparse_mla_decode_fwd(options, avals, x)
    assert asked == [{"items": 10, "slots": 1100, "batch_invariant": batch_invariant}]
    assert bool(passed["batch_invariant"]) == batch_invariant and passed["splits"] == 3
    assert passed["shapes"][3:] == [(10, 3, 64, 512), (10, 3, 64, 2)]


def test_the_forward_pass_runs_the_decode_kernel(monkeypatch: Any) -> None:
    """It takes as many queries at a time as have partial results of BUDGET bytes."""
    calls = []

    def call(target: str, operands: Any, avals: Any, **attrs: Any) -> Any:
        calls.append((target, attrs["splits"], [None if x is None else x.shape for x in operands]))
        return [jnp.zeros(a.shape, a.dtype) for a in avals]

    extension = SimpleNamespace(sparse_mla_decode_splits=lambda **_: 3)
    monkeypatch.setattr(cuda, "ffi", SimpleNamespace(call=call, extension=lambda: extension))
    monkeypatch.setattr(cuda, "BUDGET", 4 * 2 * 2 * 3 * 64 * 514 * 4)
    q, kv = jnp.zeros((2, 11, 128, 576), jnp.bfloat16), jnp.zeros((2, 9, 1, 576), jnp.bfloat16)
    x = Operands(
        *(q, kv, jnp.zeros((2, 11, 1, 1100), jnp.int32)),
        topk_length=jnp.ones((2, 11), jnp.int32),
        sinks=jnp.zeros((2, 128)),
    )
    row = jax.ShapeDtypeStruct((2, 11, 128), jnp.float32)
    avals: Any = Results(jax.ShapeDtypeStruct((2, 11, 128, 512), q.dtype), row, row)  # type: ignore[arg-type]
    got = cuda.sparse_mla_fwd(Options(0.1, 512, batch_invariant=True), avals, x)
    assert jax.tree.map(lambda a: (a.shape, a.dtype), got) == jax.tree.map(
        lambda a: (a.shape, a.dtype), avals
    )
    fours, threes = (
        [(2, n, 128, 576), (2, 9, 1, 576), (2, n, 1, 1100), None, (2, n), (2, 128)] + [None] * 6
        for n in (4, 3)
    )
    # The scan over two chunks of four queries is traced once.
    assert calls == [
        ("jax_dsa.sparse_mla_decode.v5", 3, fours),
        ("jax_dsa.sparse_mla_decode.v5", 3, threes),
    ]


def test_the_forward_pass(rng: np.random.Generator) -> None:
    q, kv = (
        jnp.asarray(rng.standard_normal(s), jnp.float32) for s in ((3, 5, 4, 32), (3, 40, 1, 32))
    )
    indices = jnp.asarray(rng.integers(-2, 42, (3, 5, 7)), jnp.int32)
    call = functools.partial(sparse_mla, return_lse=True, implementation="xla")
    got = call(q, kv, indices, batch_invariant=True)
    assert_matches(got, call(q, kv, indices), tol=1e-6)
    alone = call(q[1:2], kv[1:2], indices[1:2], batch_invariant=True)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[1:2], b), got, alone)
    with pytest.raises(TypeError, match=r"'batch_invariant' is 1.*want a bool"):
        sparse_mla(q, kv, indices, batch_invariant=1)  # type: ignore[arg-type]


def test_kv_splits_of_the_kernel() -> None:
    """Batch-invariant splits depend on the number of slots alone."""
    extension = pytest.importorskip("jax_dsa._cuda", reason="built without the extension")

    def splits(items: int, slots: int, batch_invariant: bool) -> int:
        return extension.sparse_mla_decode_splits(
            items=items, slots=slots, batch_invariant=batch_invariant
        )

    for slots, expected in ((0, 1), (1, 1), (512, 1), (513, 2), (2048, 4), (2**20, 64)):
        for items in (1, 2, 128, 4096):
            assert splits(items, slots, True) == expected
    assert splits(2, 2048, False) > 4
    assert splits(128, 2048, False) < 4


@pytest.mark.gpu
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("paged", [False, True], ids=["flat", "paged"])
def test_the_kernel(paged: bool, fp8: bool, rng: np.random.Generator) -> None:
    """Without the option the number of KV splits differs between 1 and 128 requests."""
    args = problem(rng, b=128, s=640, n=128, k=2048, paged=paged, fp8=fp8)
    default, invariant = programs(sparse_mla_decode, implementation="cuda")
    assert not differing(invariant, (1, 2, 7, 64), *args)
    assert differing(default, (1, 2, 7, 64), *args)
    assert_matches(invariant(*args)[1], default(*args)[1], tol=1e-5, what="lse")


@pytest.mark.gpu
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize(("n", "k"), [(128, 2048), (64, 512), (16, 2048), (5, 600)])
def test_training_and_rollout(n: int, k: int, fp8: bool, rng: np.random.Generator) -> None:
    """A whole prefill, chunks of it, and 200 random batches of a decode step have the same bits."""
    requests, t, s = 64, 6, 8 * PAGE
    q = jnp.asarray(rng.standard_normal((requests, t, n, 576)), jnp.bfloat16)
    rows = jnp.asarray(rng.standard_normal((requests, s, 1, 576)), jnp.bfloat16)
    indices = jnp.asarray(rng.integers(-s // 8, s + 9, (requests, t, k)), jnp.int32)
    used = jnp.asarray(rng.integers(0, k + 1, (requests, t)), jnp.int32)
    pool, records = rows.reshape(-1, PAGE, 1, 576), {}
    if fp8:
        pool, records = pack_records(pool), {"fp8": True}
        rows = unpack_records(pool, jnp.bfloat16).reshape(rows.shape)
    options: dict[str, Any] = {
        "sinks": jnp.asarray(rng.standard_normal(n), jnp.float32),
        "batch_invariant": True,
        "implementation": "cuda",
        "return_lse": True,
    }

    @jax.jit
    def prefill(q: Any, rows: Any, indices: Any, used: Any) -> Any:
        return sparse_mla(q, rows, indices, topk_length=used, **options)

    @jax.jit
    def step(q: Any, pool: Any, table: Any, indices: Any, used: Any) -> Any:
        cache = PagedCache.empty(len(pool), PAGE, len(q), s // PAGE, **records)
        full = jnp.full(len(q), s, jnp.int32)
        cache = dataclasses.replace(cache, pages=pool, page_table=table, lengths=full)
        return sparse_mla_decode(q, cache, indices, topk_length=used, **options)

    whole = [np.asarray(y) for y in prefill(q, rows, indices, used)]
    assert np.isfinite(whole[0].astype(np.float32)).all()
    for part in (slice(0, 1), slice(1, 6)):
        got = prefill(q[:, part], rows, indices[:, part], used[:, part])
        for y, want in zip(got, whole, strict=True):
            np.testing.assert_array_equal(np.asarray(y), want[:, part])
    pages = np.arange(requests * s // PAGE, dtype=np.int32).reshape(requests, -1)
    for i in range(200):
        size = (1, 2, 7, 33, 256)[i % 5]
        b, at = rng.integers(0, requests, size), rng.integers(0, t, size)
        each = q[b, at][:, None], pool, pages[b], indices[b, at][:, None], used[b, at][:, None]
        for y, want in zip(step(*each), whole, strict=True):
            np.testing.assert_array_equal(np.asarray(y)[:, 0], want[b, at])


@pytest.mark.gpu
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_the_indexers_kernels(fp8: bool, rng: np.random.Generator) -> None:
    """A logit depends on its own query and key alone."""
    q = jnp.asarray(rng.standard_normal((64, 1, 64, 128)), jnp.bfloat16)
    k = jnp.asarray(rng.standard_normal((64, 5000, 128)), jnp.bfloat16)
    weights = jnp.asarray(rng.standard_normal((64, 1, 64)), jnp.float32)
    ends = jnp.asarray(rng.integers(0, 5001, (64, 1)), jnp.int32)
    scales: tuple = ()
    if fp8:
        (q, q_scale), (k, k_scale) = quantize_fp8(q), quantize_fp8(k)
        weights, scales = weights * q_scale[..., 0], (k_scale[..., 0],)

    @jax.jit
    def select(*arrays: Any) -> Any:
        q, k, weights, ends, *scale = arrays
        options = {"index_k_scale": scale[0]} if scale else {}
        return indexer_topk(q, k, weights, 2048, ends=ends, implementation="cuda", **options)

    arrays = q, k, weights, ends, *scales
    whole = [np.asarray(y) for y in select(*arrays)]
    for count in (1, 2, 7, 63):
        for got, want in zip(select(*[a[:count] for a in arrays]), whole, strict=True):
            np.testing.assert_array_equal(np.asarray(got), want[:count])
