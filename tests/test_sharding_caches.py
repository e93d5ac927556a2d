"""Caches on meshes of eight devices: appending to them exchanges nothing."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from support.decoders import SHARING, decoder
from support.marks import slow
from support.meshes import MESHES, mesh_of

import jax_dsa
from jax_dsa import nn, training


@pytest.mark.parametrize("kind", MESHES)
@pytest.mark.parametrize("cache", ["flat", "htree"])
def test_appending_to_a_sharded_cache(
    cache: str, kind: str, rng: np.random.Generator, cpus: list[jax.Device]
) -> None:
    B, T, D = 8, 3, 4
    new = [np.asarray(rng.normal(size=(B, T, 1, D)), np.float32) for _ in range(2)]
    counts = rng.integers(0, T + 1, B).astype(np.int32)
    if cache == "flat":
        empty: Any = jax_dsa.FlatCache.empty(B, 8, D, dtype=jnp.float32)
        append = lambda cache, k, v, counts: cache.append(k, counts)  # noqa: E731
    else:
        empty = jax_dsa.HTreeCache.empty(B, 8, D, compression=2, top_k=2, dtype=jnp.float32)
        append = lambda cache, k, v, counts: cache.append(k, v, counts)  # noqa: E731
    mesh, context = mesh_of(kind, (8,), ("x",), cpus)
    args = (jax.tree.map(np.asarray, empty), *new, counts)
    want = append(*jax.tree.map(jnp.asarray, args))
    with context(mesh):
        placed = jax.device_put(args, NamedSharding(mesh, PartitionSpec("x")))
        compiled = jax.jit(append).lower(*placed).compile()
        assert "all-" not in compiled.as_text()
        got = compiled(*placed)
    jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(got), jax.tree.leaves(want))


@pytest.mark.parametrize("kind", MESHES)
@pytest.mark.parametrize(("dim", "fp8"), [(4, False), (576, True), (512, True)])
def test_appending_to_pages_that_sharded_requests_share(
    dim: int, fp8: bool, kind: str, rng: np.random.Generator, cpus: list[jax.Device]
) -> None:
    B, T = 8, 3
    cache = jax_dsa.PagedCache.empty(2 * B, 2, B, 2, dim, dtype=jnp.float32, fp8=fp8)
    table = rng.permutation(2 * B).reshape(B, 2).astype(np.int32)
    cache = dataclasses.replace(cache, page_table=table)
    args = jax.tree.map(np.asarray, cache), np.asarray(rng.normal(size=(B, T, 1, dim)), np.float32)
    append = jax.jit(lambda cache, rows: cache.append(rows).pages)
    want = append(*args)
    mesh, context = mesh_of(kind, (8,), ("x",), cpus)
    with context(mesh):
        replicated, sharded = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in ((), ("x",)))
        placement = dataclasses.replace(
            args[0], pages=replicated, page_table=sharded, lengths=sharded
        )
        got = append(*jax.device_put(args, (placement, sharded)))
    np.testing.assert_array_equal(got, want)
    assert np.asarray(want).any()


@pytest.mark.parametrize("kind", [slow("explicit"), "explicit-of-types"])
@pytest.mark.parametrize("axis", [0, 1], ids=["pages", "tokens"])
def test_decoding_from_a_sharded_pool(
    axis: int, kind: str, rng: np.random.Generator, cpus: list[jax.Device]
) -> None:
    """The pages that requests share may be sharded, also along the tokens of a page."""
    B, P, L, C = 2, 8, 8, 4
    q, w = rng.normal(size=(B, 1, 3, C)), rng.normal(size=(B, 1, 3))
    pages, scales = rng.normal(size=(P, L, 1, C)), rng.normal(size=(P, L))
    arrays = [np.asarray(x, np.float32) for x in (q, w, pages, scales)]
    table = rng.permutation(P).reshape(B, -1).astype(np.int32)
    lengths = np.asarray([20, 31], np.int32)

    @jax.jit
    def select(q: Any, w: Any, pages: Any, scales: Any) -> Any:
        cache = jax_dsa.PagedCache(pages, table, lengths)
        return jax_dsa.indexer_topk(q, cache, w, 5, index_k_scale=scales)

    mesh, context = mesh_of(kind, (8,), ("x",), cpus)
    whole = NamedSharding(mesh, PartitionSpec())
    sharded = NamedSharding(mesh, PartitionSpec(*[None] * axis, "x"))
    with context(mesh):
        got = select(*jax.device_put(arrays, [whole, whole, sharded, sharded]))
    jax.tree.map(np.testing.assert_array_equal, got, select(*arrays))


@pytest.mark.parametrize("kind", [slow("explicit"), "explicit-of-types"])
@pytest.mark.parametrize("method", ["flat", "update", "htree"])
@pytest.mark.parametrize("axis", [0, 1, 3], ids=["batch", "tokens", "dim"])
def test_rows_that_are_sharded_unlike_the_cache(
    axis: int, method: str, kind: str, rng: np.random.Generator, cpus: list[jax.Device]
) -> None:
    """The result is sharded like the cache, which is replicated here."""
    B, T, D = 2, 4, 4
    rows = np.asarray(rng.normal(size=(B, T, 1, D)), np.float32)
    if method == "htree":
        cache: Any = jax_dsa.HTreeCache.empty(B, 8, D, compression=2, top_k=2, dtype=jnp.float32)
        write = lambda cache, x: cache.append(x, 2 * x)  # noqa: E731
    else:
        cache = jax_dsa.FlatCache.empty(B, 8, D, dtype=jnp.float32)
        places = np.arange(B * T, dtype=np.int32).reshape(B, T)
        write = (  # noqa: E731
            lambda cache, x: cache.append(x) if method == "flat" else cache.update(x, places)
        )
    cache = jax.tree.map(np.asarray, cache)
    want = write(cache, rows)
    mesh, context = mesh_of(kind, (2,), ("x",), cpus[:2])
    with context(mesh):
        given = jax.device_put(cache, NamedSharding(mesh, PartitionSpec()))
        spec = PartitionSpec(*(("x" if i == axis else None) for i in range(4)))
        got = jax.jit(write)(given, jax.device_put(rows, NamedSharding(mesh, spec)))
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert not any(g.sharding.spec)
        np.testing.assert_array_equal(g, w)


@pytest.mark.parametrize("kind", MESHES)
@pytest.mark.parametrize("paged", [False, True])
def test_counts_that_are_sharded_unlike_the_cache(
    paged: bool, kind: str, cpus: list[jax.Device]
) -> None:
    B = 8
    cache: Any = jax_dsa.FlatCache.empty(B, 4, 2, dtype=jnp.float32)
    if paged:
        cache = jax_dsa.PagedCache.empty(B, 4, B, 1, 2, dtype=jnp.float32)
        cache = dataclasses.replace(cache, page_table=jnp.arange(B, dtype=jnp.int32)[:, None])
    mesh, context = mesh_of(kind, (8,), ("x",), cpus)
    with context(mesh):
        cache = jax.device_put(cache, NamedSharding(mesh, PartitionSpec()))
        args = jnp.ones((B, 3, 1, 2)), jnp.arange(B, dtype=jnp.int32) % 4
        rows, counts = jax.device_put(args, NamedSharding(mesh, PartitionSpec("x")))
        got = jax.jit(lambda cache, rows, counts: cache.append(rows, counts))(cache, rows, counts)
    np.testing.assert_array_equal(np.asarray(got.lengths), np.arange(B) % 4)
    if kind != "auto":
        assert not any(got.lengths.sharding.spec)


@pytest.mark.parametrize("kind", ["explicit", slow("explicit-of-types")])
@pytest.mark.parametrize(("dim", "paged"), [(576, False), slow(576, True), slow(512, True)])
def test_appending_records_of_rows_that_are_sharded(
    dim: int, paged: bool, kind: str, rng: np.random.Generator, cpus: list[jax.Device]
) -> None:
    cache: Any = jax_dsa.FlatCache.empty(2, 8, dim, fp8=True) if not paged else None
    if paged:
        cache = jax_dsa.PagedCache.empty(4, 2, 2, 2, dim, fp8=True)
        cache = dataclasses.replace(cache, page_table=np.array([[0, 3], [1, 2]], np.int32))
    args = jax.tree.map(np.asarray, cache), np.asarray(rng.normal(size=(2, 3, 1, dim)), np.float32)
    append = jax.jit(lambda cache, rows: cache.append(rows))
    want = append(*args)
    mesh, context = mesh_of(kind, (2,), ("x",), cpus[:2])
    with context(mesh):
        whole, split = (NamedSharding(mesh, PartitionSpec(*s)) for s in ((), (None,) * 3 + ("x",)))
        got = append(*jax.device_put(args, (whole, split)))
    jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(got), jax.tree.leaves(want))


@pytest.mark.slow
@pytest.mark.parametrize("page_size", [None, 3])
@pytest.mark.parametrize("kind", MESHES)
def test_serving_sharded_requests(
    kind: str, page_size: int | None, rng: np.random.Generator, cpus: list[jax.Device]
) -> None:
    """Requests end and begin on a mesh. Their pool of pages is on every device."""
    model = decoder(dataclasses.replace(SHARING, num_layers=2))
    prompts = rng.integers(0, 11, size=(4, 3)).astype(np.int32)
    counts, other = np.array([3, 1, 0, 2], np.int32), np.array([0, 0, 2, 3], np.int32)
    table = rng.permutation(8).reshape(4, 2).astype(np.int32)

    def tokens(place: Any) -> list[Any]:
        cache = model.init_cache(4, 6, page_size=page_size, num_pages=page_size and 8)
        sampler = training.Sampler(model, temperature=0)
        pool = PartitionSpec() if page_size else PartitionSpec("x")
        spec = jax.tree.map(lambda x: PartitionSpec("x") if x.dtype == jnp.int32 else pool, cache)
        cache = nn.DecoderCache(*jax.tree.map(place, cache, spec))
        rows = PartitionSpec("x")
        if page_size:
            cache = cache.with_page_table(place(table, rows))
        args = place(prompts, rows), cache, jax.random.key(0)
        first, stream = sampler.prefill(*args, counts=place(counts, rows))
        active = place((counts > 0).astype(np.int32), rows)
        second, (cache, key) = sampler.step(first, stream, counts=active)
        cache = cache.with_lengths(cache.lengths * place(np.array([1, 1, 0, 0]), rows))
        args = place(prompts[::-1].copy(), rows), cache, key
        third, stream = sampler.prefill(*args, counts=place(other, rows))
        return [np.asarray(x) for x in (first, second, third, stream.cache.lengths)]

    want = tokens(lambda x, spec: jnp.asarray(x))
    assert want[3].tolist() == [4, 2, 2, 3]
    mesh, context = mesh_of(kind, (4,), ("x",), cpus[:4])
    with context(mesh):
        got = tokens(lambda x, spec: jax.device_put(np.asarray(x), NamedSharding(mesh, spec)))
    jax.tree.map(np.testing.assert_array_equal, got, want)
