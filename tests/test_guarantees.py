"""One test for each promise of docs/guarantees.md, named after what a user wants."""

from __future__ import annotations

import pathlib
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from support.compare import assert_as_good_as, assert_matches
from support.oracles import sparse_mla as oracle

from jax_dsa import (
    FlatCache,
    dense_indexer_kl_loss,
    dsa_attention,
    indexer_topk,
    masked_attention,
    sparse_mla,
    sparse_mla_decode,
    topk,
)

IMPLEMENTATIONS = ["xla", pytest.param("cuda", marks=pytest.mark.gpu)]
both = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


def normal(rng: np.random.Generator, *shape: int, dtype: Any = jnp.bfloat16) -> jax.Array:
    return jnp.asarray(rng.standard_normal(shape), dtype)


def selection(rng: np.random.Generator, *shape: int, keys: int) -> jax.Array:
    """Returns slots with and without a key; some keys are selected twice."""
    return jnp.asarray(rng.integers(-2, keys + 2, shape), jnp.int32)


def gradients(
    implementation: str, q: jax.Array, kv: jax.Array, indices: jax.Array, **options: Any
) -> tuple[jax.Array, ...]:
    """Returns dq and dkv of a loss that depends on both results of `sparse_mla`."""

    @jax.jit
    def run(q: jax.Array, kv: jax.Array, indices: jax.Array) -> Any:
        def loss(q: jax.Array, kv: jax.Array) -> jax.Array:
            out, lse = sparse_mla(
                q, kv, indices, return_lse=True, implementation=implementation, **options
            )
            return jnp.sin(out.astype(jnp.float32)).sum() + jnp.where(lse > -1e30, lse, 0).sum()

        return jax.grad(loss, argnums=(0, 1))(q, kv)

    return run(q, kv, indices)


def assert_equal(got: Any, want: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, got, want)


@both
def test_equal_scores_are_kept_by_their_index(
    implementation: str, rng: np.random.Generator
) -> None:
    """Where the threshold falls on equal scores, lower indices win in every run and row."""
    for levels in (1, 2, 7):
        x = rng.integers(0, levels, (6, 5000)).astype(np.float32)
        want = np.argsort(-x, axis=1, kind="stable")[:, :2000]
        for rows in (slice(None), [3, 1, 5]):
            for _ in range(5):
                got = topk(jnp.asarray(x[rows]), 2000, implementation=implementation)
                np.testing.assert_array_equal(np.sort(got, axis=1), np.sort(want[rows], axis=1))


def test_every_tensor_parallel_rank_selects_the_same_keys_in_the_same_order(
    cpus: list[jax.Device], rng: np.random.Generator
) -> None:
    """Four devices share the heads. Scores are integers, so that many of them are equal."""
    q, kv = normal(rng, 1, 40, 8, 96), normal(rng, 1, 40, 1, 96)
    index_q, index_k = (
        jnp.asarray(rng.integers(-1, 2, s), jnp.bfloat16) for s in ((1, 40, 4, 32), (1, 40, 32))
    )
    weights = jnp.ones((1, 40, 4))

    @jax.jit
    def select(*x: jax.Array) -> jax.Array:
        return dsa_attention(*x, top_k=9, value_dim=64)[1].indices

    want = select(q, kv, index_q, index_k, weights)
    mesh = jax.make_mesh((4,), ("tensor",), devices=cpus[:4])
    with jax.set_mesh(mesh):
        heads = NamedSharding(mesh, P(None, None, "tensor"))
        whole = NamedSharding(mesh, P())
        placed = [jax.device_put(np.asarray(q), heads)]
        placed += [jax.device_put(np.asarray(x), whole) for x in (kv, index_q, index_k, weights)]
        got = jax.jit(lambda i: jax.sharding.reshard(i, P()))(select(*placed))
    assert len(got.addressable_shards) == 4
    for shard in got.addressable_shards:
        np.testing.assert_array_equal(shard.data, want)


@both
def test_finite_inputs_have_finite_gradients(implementation: str, rng: np.random.Generator) -> None:
    """Scores are large, and there are queries with no key, few keys or one key in every slot."""
    q, kv = 30 * normal(rng, 1, 8, 16, 576), 30 * normal(rng, 1, 50, 1, 576)
    indices = np.array(selection(rng, 1, 8, 1, 64, keys=50))
    indices[0, 0], indices[0, 1], indices[0, 2, 0, 1:] = -1, 7, -1
    grads = gradients(implementation, q, kv, jnp.asarray(indices))
    for grad in grads:
        assert np.all(np.isfinite(np.asarray(grad, np.float32)))
    assert not np.any(np.asarray(grads[0], np.float32)[0, 0])

    def loss(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        out = masked_attention(
            q, k, v, key_value_seq_lengths=jnp.array([3, 0]), local_window_size=(2, 0),
            implementation=implementation,
        )  # fmt: skip
        return jnp.square(out.astype(jnp.float32)).sum()

    arrays = [30 * normal(rng, 2, 20, 4, 64) for _ in range(3)]
    for grad in jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(*arrays):
        assert np.all(np.isfinite(np.asarray(grad, np.float32)))


@both
def test_slots_from_topk_length_on_are_not_read(
    implementation: str, rng: np.random.Generator
) -> None:
    """Those slots may hold valid indices of keys that are NaN."""
    q, kv = normal(rng, 1, 5, 16, 576), normal(rng, 1, 60, 1, 576)
    lengths = jnp.array([[0, 1, 20, 63, 64]], jnp.int32)
    inside = jnp.arange(64) < lengths[..., None, None]
    indices = jnp.where(inside, selection(rng, 1, 5, 1, 64, keys=48), 55)
    dirty = kv.at[:, 50:].set(jnp.nan)
    got = gradients(implementation, q, dirty, indices, topk_length=lengths)
    want = gradients(implementation, q, kv, jnp.where(inside, indices, -1))
    assert_equal(got, want)


def test_the_warm_up_loss_scores_all_keys(rng: np.random.Generator) -> None:
    """Every visible key has an effect and a gradient, since no selection is involved."""
    # Scores are positive. Otherwise the last key might have no score above 0 in any head of its
    # only query, and no gradient.
    index_q, index_k = jnp.abs(normal(rng, 1, 30, 4, 32)), jnp.abs(normal(rng, 1, 30, 32))
    weights = jnp.abs(normal(rng, 1, 30, 4, dtype=jnp.float32))
    q, kv = normal(rng, 1, 30, 8, 64), normal(rng, 1, 30, 1, 64)

    def loss(index_k: jax.Array, kv: jax.Array) -> jax.Array:
        return dense_indexer_kl_loss(index_q, index_k, weights, q, kv)

    assert np.all(np.any(np.asarray(jax.grad(loss)(index_k, kv), np.float32)[0], axis=1))
    first = loss(index_k, kv)
    for key in (0, 13, 29):
        assert loss(index_k, kv.at[:, key].multiply(3)) != first


@pytest.mark.full_optimization
def test_nothing_has_the_size_of_queries_times_keys(rng: np.random.Generator) -> None:
    """This is the forward and backward pass of a layer with the indexer's loss, in XLA."""
    t = 8192
    shapes = {"q": (t, 2, 32), "kv": (t, 1, 32), "index_q": (t, 2, 32), "index_k": (t, 32)}
    shapes["index_weights"] = (t, 2)

    def loss(x: dict[str, jax.Array]) -> jax.Array:
        out, aux = dsa_attention(**x, top_k=16, value_dim=16, implementation="xla")
        return jnp.square(out).mean() + aux.kl

    x = {n: jax.ShapeDtypeStruct((1, *s), jnp.float32) for n, s in shapes.items()}
    compiled = jax.jit(jax.grad(loss)).lower(x).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < t * t * 4


@both
@pytest.mark.parametrize("heads", [1, 3, 7, 12, 48, 100, 129])
def test_any_number_of_heads(heads: int, implementation: str, rng: np.random.Generator) -> None:
    """XLA's gradients match float64, and the kernels' are as good as XLA's in bfloat16."""
    q, kv = normal(rng, 1, 4, heads, 576), normal(rng, 1, 90, 1, 576)
    indices = selection(rng, 1, 4, 1, 64, keys=90)
    numbers = [np.asarray(x, np.float64) for x in (q, kv)]
    held = {"value_dim": 512, "scale": 576**-0.5}
    out, lse = oracle.sparse_mla(*numbers, np.asarray(indices), **held)
    exact = oracle.sparse_mla_grads(
        *numbers, np.asarray(indices), np.cos(out), np.isfinite(lse) * 1.0, **held
    )[:2]
    if implementation == "xla":
        single = gradients("xla", q.astype(jnp.float32), kv.astype(jnp.float32), indices)
        assert_matches(single, tuple(x.astype(np.float32) for x in exact))
        return
    got, low = gradients("cuda", q, kv, indices), gradients("xla", q, kv, indices)
    for three in zip(got, low, exact, strict=True):
        assert_as_good_as(*three, factor=4.0)


@both
@pytest.mark.several_gpus
def test_deterministic_gradients_repeat_bit_for_bit(
    implementation: str, rng: np.random.Generator
) -> None:
    """They repeat 100 times on a GPU, and on two GPUs that share the requests."""
    args = normal(rng, 2, 60, 16, 576), normal(rng, 2, 90, 1, 576)
    args = *args, selection(rng, 2, 60, 1, 128, keys=90)
    want = gradients(implementation, *args, deterministic=True)
    for _ in range(99 if implementation == "cuda" else 2):
        assert_equal(gradients(implementation, *args, deterministic=True), want)
    devices = jax.devices()[:2]
    if implementation == "cuda" and len(devices) == 2:
        mesh = jax.make_mesh((2,), ("data",), devices=devices)
        with jax.set_mesh(mesh):
            rows = NamedSharding(mesh, P("data"))
            placed = [jax.device_put(np.asarray(x), rows) for x in args]
            assert_equal(gradients(implementation, *placed, deterministic=True), want)


@both
def test_a_request_decodes_alike_in_every_batch(
    implementation: str, rng: np.random.Generator
) -> None:
    """This holds bit for bit with `batch_invariant=True`."""
    q, rows = normal(rng, 9, 1, 16, 576), normal(rng, 9, 300, 1, 576)
    indices = selection(rng, 9, 1, 128, keys=300)

    def decode(n: int) -> np.ndarray:
        cache = FlatCache.empty(n, 300).append(rows[:n])
        options: dict[str, Any] = {"batch_invariant": True, "implementation": implementation}
        return np.asarray(sparse_mla_decode(q[:n], cache, indices[:n], **options))

    whole = decode(9)
    for n in (1, 2, 8):
        np.testing.assert_array_equal(decode(n), whole[:n])


@pytest.mark.gpu
def test_training_computes_the_bits_of_the_rollout(rng: np.random.Generator) -> None:
    """A decode step of every position has the bits of one call for all queries."""
    q, rows = normal(rng, 1, 40, 16, 576), normal(rng, 1, 300, 1, 576)
    indices = selection(rng, 1, 40, 1, 128, keys=300)
    options: dict[str, Any] = {"batch_invariant": True, "implementation": "cuda"}
    whole = np.asarray(sparse_mla(q, rows, indices, **options))
    cache = FlatCache.empty(1, 300).append(rows)
    for t in range(40):
        step = sparse_mla_decode(q[:, t : t + 1], cache, indices[:, t : t + 1], **options)
        np.testing.assert_array_equal(np.asarray(step)[:, 0], whole[:, t])


@both
def test_the_selection_is_the_same_in_every_batch_and_run(
    implementation: str, rng: np.random.Generator
) -> None:
    index_q, index_k = normal(rng, 3, 40, 8, 64), normal(rng, 3, 900, 64)
    weights = normal(rng, 3, 40, 8, dtype=jnp.float32)

    def select(rows: slice) -> Any:
        arrays = (x[rows] for x in (index_q, index_k, weights))
        return indexer_topk(*arrays, 128, implementation=implementation)

    whole = select(slice(None))
    for rows in (slice(None), slice(0, 1), slice(1, 3)):
        assert_equal(select(rows), tuple(x[rows] for x in whole))


def test_the_page_names_every_test() -> None:
    page = (pathlib.Path(__file__).parent.parent / "docs" / "guarantees.md").read_text()
    tests = {name for name in globals() if name.startswith("test_")}
    assert set(re.findall(r"`(test_\w+)`", page)) == tests - {"test_the_page_names_every_test"}
