"""`jax.export` serializes programs that take and return the package's types."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.decoders import SHARING, B, T, decoder

import jax_dsa
from jax_dsa import nn, training
from jax_dsa.nn import compressor, grouped_indexer, open_pool
from jax_dsa.training import sampling


def stored(program: Any, *args: Any) -> Any:
    """Returns a program that was exported, serialized and read again."""
    exported = jax.export.export(jax.jit(program))(*args)
    return jax.export.deserialize(exported.serialize()).call


def public_tuples() -> dict[str, type]:
    found = {
        f"{module.__name__}.{name}": getattr(module, name)
        for module in (jax_dsa, nn, training)
        for name in module.__all__
        if hasattr(getattr(module, name), "_fields")
    }
    del found["jax_dsa.nn.HFLayer"]  # It has no arrays.
    inside = compressor.Stream, open_pool.OpenPool, grouped_indexer.OpenBlock, sampling.Stream
    for inner in inside:
        found[f"{inner.__module__}.{inner.__name__}"] = inner
    return found


@pytest.mark.parametrize("name", public_tuples())
def test_named_tuples(name: str) -> None:
    cls = public_tuples()[name]
    value = cls(*(jnp.full(2, float(i)) for i in range(len(cls._fields))))
    got = stored(lambda x: x, value)(value)
    assert type(got) is cls
    jax.tree.map(np.testing.assert_array_equal, got, value)


def test_classes_with_static_fields() -> None:
    """The capacity and the lengths of the axes are part of the stored program."""
    k = jnp.ones((1, 3, 1, 8))
    tree = jax_dsa.HTreeCache.empty(1, 7, 8, compression=2, top_k=3)
    got = stored(lambda cache, k: cache.append(k, k), tree, k)(tree, k)
    assert (got.capacity, got.compression, got.top_k) == (7, 2, 3) and got.lengths.tolist() == [3]
    mask = jax_dsa.make_block_mask(jnp.ones((1, 1, 130, 140), bool))
    got = stored(lambda x: x, mask)(mask)
    assert (got.query_length, got.key_length) == (130, 140)
    plan = jax_dsa.mqa_decode_plan(jnp.array([3, 4]), num_heads=8, queries=2, dim=512, fp8=True)
    got = stored(lambda x: x, plan)(plan)
    assert got.sizes == (2, 2, 8, 1, 512, True)


def test_a_step_over_a_paged_cache() -> None:
    cache = jax_dsa.PagedCache.empty(4, 4, 2, 2, 8, dtype=jnp.float32)
    cache = dataclasses.replace(cache, page_table=jnp.asarray([[0, 1], [2, 3]], jnp.int32))
    rows = jnp.arange(16.0).reshape(2, 1, 1, 8)

    def step(cache: Any, rows: Any) -> Any:
        cache = cache.append(rows)
        return cache, jax_dsa.mqa_decode(rows, cache), cache.free_tokens

    jax.tree.map(
        np.testing.assert_array_equal, stored(step, cache, rows)(cache, rows), step(cache, rows)
    )


@pytest.mark.parametrize("page_size", [None, 4])
def test_caches_of_symbolic_sizes(page_size: int | None) -> None:
    """The numbers of requests, tokens, and places or pages may be symbols."""
    b, t, s = jax.export.symbolic_shape("b, t, s")
    struct = jax.ShapeDtypeStruct
    lengths = struct((b,), jnp.int32)
    cache: Any
    if page_size is None:
        cache = jax_dsa.FlatCache(struct((b, s, 1, 8), jnp.float32), lengths)
        small = jax_dsa.FlatCache.empty(2, 5, 8, dtype=jnp.float32)
    else:
        pages = struct((s, page_size, 1, 8), jnp.float32)
        cache = jax_dsa.PagedCache(pages, struct((b, s), jnp.int32), lengths)
        small = jax_dsa.PagedCache.empty(3, page_size, 2, 3, 8, dtype=jnp.float32)
        table = jnp.asarray([[0, 1, -1], [2, -1, -1]], jnp.int32)
        small = dataclasses.replace(small, page_table=table)
    step = stored(
        lambda cache, rows: (cache.append(rows), cache.free_tokens),
        cache,
        struct((b, t, 1, 8), jnp.float32),
    )
    rows = jnp.ones((2, 7, 1, 8))
    got, free = step(small, rows)
    want = small.append(rows)
    jax.tree.map(np.testing.assert_array_equal, (got, free), (want, small.free_tokens))


def test_a_decode_step_of_a_decoder() -> None:
    model = decoder(SHARING)
    cache, tokens = model.init_cache(B, T), jnp.ones((B, 1), jnp.int32)
    logits, cache = stored(model.decode, tokens, cache)(tokens, cache)
    assert logits.shape == (B, 1, 11) and cache.layers[0].lengths.tolist() == [1] * B


@pytest.mark.slow
def test_a_padded_prefill_of_symbolic_length() -> None:
    """One program takes prompts of every length."""
    model = decoder(dataclasses.replace(SHARING, num_layers=1))
    (t,) = jax.export.symbolic_shape("t")
    cache, counts = model.init_cache(B, T), np.array([3, 1], np.int32)
    step = lambda tokens, cache, counts: model.decode(tokens, cache, counts=counts)  # noqa: E731
    tokens = np.arange(2 * B, dtype=np.int32).reshape(B, 2)
    call = stored(step, jax.ShapeDtypeStruct((B, t), jnp.int32), cache, counts)
    got = call(tokens, cache, counts)
    assert got[1].lengths.tolist() == [2, 1]


def test_selected_attention_returns_its_record() -> None:
    x = jnp.ones((1, 4, 2, 8))
    weights = jnp.ones((1, 4, 2))

    def program(q: Any) -> Any:
        inputs = {"index_q": q, "index_k": q[:, :, 0], "index_weights": weights}
        return jax_dsa.dsa_attention(q, q[:, :, :1], **inputs, top_k=2)

    (_, got), (_, want) = stored(program, x)(x), program(x)
    assert type(got) is jax_dsa.DSAAux
    np.testing.assert_array_equal(got.indices, want.indices)
