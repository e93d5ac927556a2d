"""Caches can be donated: no two of their arrays share a buffer."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.decoders import CONFIG, SHARING, B, decoder
from support.published_layers import LAYERS, layer

import jax_dsa
from jax_dsa import nn

pytestmark = pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")

LENGTHS = jnp.array([3, 1], jnp.int32)
TABLE = jnp.array([[2, 1], [3, 0]], jnp.int32)


def decoder_caches():
    """Yields a decoder's caches with all kinds of layers, from all methods that make a cache."""
    wide = dataclasses.replace(CONFIG, kv_rank=512, rope_dim=64, index_fp8=True)
    for attention, fp8 in ((CONFIG, False), (wide, True)):
        config = dataclasses.replace(SHARING, attention=attention)
        empty = functools.partial(nn.DecoderCache.empty, config, B, 8, fp8=fp8)
        for page_size in (None, 4):
            yield empty(page_size=page_size)
            yield empty(page_size=page_size).with_lengths(LENGTHS)
        yield empty(page_size=4, num_pages=3).with_page_table(TABLE)


def layer_caches(rng):
    for kind in ("selected", "all", "window", "best key", "mean key"):
        module = layer(rng, LAYERS[kind])
        yield module.init_cache(B, 8)
        # Two layers that get the same lengths.
        yield [module.init_cache(B, 8).with_lengths(LENGTHS) for _ in range(2)]
    for indexer_type in ("full", "shared"):
        for shares_keys in (False, True):
            config = dataclasses.replace(CONFIG, shares_keys=shares_keys)
            yield nn.LayerCache.empty(config, B, 8, indexer_type=indexer_type)


def operator_caches():
    for fp8 in (False, True):
        yield jax_dsa.FlatCache.empty(B, 8, fp8=fp8)
        yield jax_dsa.PagedCache.empty(4, 4, B, 2, fp8=fp8)
        # Two layers that get the same lengths and the same page table.
        flat = [jax_dsa.FlatCache.empty(B, 8, fp8=fp8).with_lengths(LENGTHS) for _ in range(2)]
        yield flat, jax_dsa.PagedCache.empty(4, 4, B, 2).with_page_table(TABLE)
    yield jax_dsa.HTreeCache.empty(B, 16, 8, compression=4, top_k=3)
    yield [jax_dsa.HTreeCache.empty(B, 16, 8).with_lengths(LENGTHS) for _ in range(2)]


def check_donation(cache):
    arrays = jax.tree.leaves(cache)
    pointers = [x.unsafe_buffer_pointer() for x in arrays if x.size]
    assert len(set(pointers)) == len(pointers)
    jax.block_until_ready(jax.jit(lambda c: jax.tree.map(jnp.copy, c), donate_argnums=0)(cache))
    assert all(x.is_deleted() for x in arrays)


@pytest.mark.parametrize("caches", ["decoder", "layer", "operator"])
def test_no_two_arrays_of_a_cache_share_a_buffer(rng, caches):
    made = {"decoder": decoder_caches, "layer": lambda: layer_caches(rng)}
    for cache in made.get(caches, operator_caches)():
        check_donation(cache)
    assert not TABLE.is_deleted() and not LENGTHS.is_deleted()


@pytest.mark.parametrize("page_size", [None, 4])
def test_decode_steps_with_a_donated_cache(rng, page_size):
    """Results equal those without donation. The caller's page table and lengths survive."""
    model = decoder(SHARING)
    tokens = jnp.asarray(rng.integers(0, 11, size=(B, 3)), jnp.int32)
    found = []
    for options in ({}, {"donate_argnums": 1}):
        step = jax.jit(lambda t, cache: model.decode(t, cache), **options)
        cache = model.init_cache(B, 8, page_size=page_size)
        if page_size is not None:
            cache = cache.with_page_table(TABLE)
        first, cache = step(tokens, cache)
        found.append((first, *step(tokens, cache.with_lengths(LENGTHS))))
    jax.tree.map(np.testing.assert_array_equal, *found)
