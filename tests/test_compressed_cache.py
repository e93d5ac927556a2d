"""Caches of layers other than `DSAttention`: decode steps, padding, rollback, new requests."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.compare import assert_matches
from support.marks import slow
from support.published_layers import COMPRESSED, LAYERS, B, M, hidden, layer

from jax_dsa import nn
from jax_dsa.nn import compressed_attend

KINDS = {x: c for x, c in LAYERS.items() if not isinstance(c, nn.AttentionConfig)}
ONE_KIND = pytest.mark.parametrize(
    "kind", [kind if kind in ("selected", "mean key") else slow(kind) for kind in KINDS]
)


def compiled(module):
    """Returns the forward pass and the decode step of a layer, both jitted."""
    step = jax.jit(lambda x, cache, counts=None: module.decode(x, cache, counts=counts))
    return jax.jit(lambda x: module(x)[0]), step


@ONE_KIND
def test_token_by_token_from_an_empty_cache(rng, kind):
    """The first blocks become complete in steps of their own, with no block before the first."""
    module, x = layer(rng, KINDS[kind]), hidden(rng, B, 13, M)
    forward, step = compiled(module)
    cache, found = module.init_cache(B, 13), []
    for t in range(13):
        y, cache, _ = step(x[:, t : t + 1], cache)
        found.append(y)
    assert_matches(jnp.concatenate(found, 1), forward(x), 1e-4)


@pytest.mark.parametrize(
    "config", [c for c in KINDS.values() if isinstance(c, nn.CompressedConfig)]
)
def test_steps_and_prefills_attend_alike(rng, config, monkeypatch):
    """A step reads two caches, a prefill one array of keys; both see the same keys."""
    module, x = layer(rng, config), hidden(rng, B, 13, M)
    counts = jnp.arange(B, dtype=jnp.int32) % 6
    _, cache, _ = module.decode(x[:, :8], module.init_cache(B, 16))
    want = module.decode(x[:, 8:], cache, counts=counts)
    monkeypatch.setattr(compressed_attend, "FEW_QUERIES", 0)
    assert_matches(module.decode(x[:, 8:], cache, counts=counts), want, 1e-5)


@ONE_KIND
@pytest.mark.parametrize("seed", [0, slow(1), slow(2)])
def test_steps_with_padding_rollback_and_new_requests(kind, seed):
    """Checks random schedules against the forward pass over the tokens that each request kept.

    Each step appends some tokens and padding, and then sets each length back, sometimes to 0. The
    padding and the tokens that are dropped are NaN, so that any later read of them shows.
    """
    rng = np.random.default_rng(seed)
    batch, length, capacity, most = 4, 6, 48, 5
    module = layer(rng, KINDS[kind])
    forward, step = compiled(module)
    cache = module.init_cache(batch, capacity, max_rollback=most)
    lengths, longest = np.zeros((2, batch), int)
    kept = np.zeros((batch, capacity, M), np.float32)
    for _ in range(14):
        counts = rng.integers(0, length + 1, batch)
        longest = np.maximum(np.where(lengths, longest, 0), lengths + counts)
        after = rng.integers(np.maximum(0, longest - most), lengths + counts + 1)
        after[(rng.random(batch) < 0.1) | (after > capacity - length)] = 0
        x = np.array(hidden(rng, batch, length, M))
        x[lengths[:, None] + np.arange(length) >= after[:, None]] = np.nan
        y, cache, indices = step(x, cache, jnp.asarray(counts, jnp.int32))
        for b in range(batch):
            kept[b, lengths[b] : after[b]] = x[b, : max(0, after[b] - lengths[b])]
        want = forward(kept)
        for b in range(batch):
            here = slice(lengths[b], max(lengths[b], after[b]))
            assert_matches(y[b, : here.stop - here.start], want[b, here], 1e-4)
            assert not np.any(y[b, counts[b] :])
            assert indices is None or np.all(indices[b, counts[b] :] == -1)
        lengths = after
        cache = cache.with_lengths(jnp.asarray(lengths))


@ONE_KIND
def test_rollback_by_max_rollback_tokens(rng, kind):
    """The rows of the oldest tokens are still there, for lengths of every remainder."""
    module, x = layer(rng, KINDS[kind]), hidden(rng, 4, 12, M)
    _, step = compiled(module)
    lengths, most = jnp.array([8, 9, 10, 11]), 3
    _, cache, _ = step(x, module.init_cache(4, 24, max_rollback=most), lengths)
    want, _, _ = step(x, cache)
    _, longer, _ = step(jnp.full_like(x, jnp.nan), cache, jnp.full_like(lengths, most))
    got, _, _ = step(x, longer.with_lengths(lengths))
    np.testing.assert_array_equal(got, want)


def test_an_unsupported_length_gives_nan_until_a_new_request(rng):
    module, x = layer(rng, COMPRESSED), hidden(rng, 4, 12, M)
    _, step = compiled(module)
    cache = module.init_cache(4, 24, max_rollback=3)
    want, cache, _ = step(x, cache)
    # Back by 3 tokens, by 4 tokens, forward by 1 token, and below 0.
    cache = cache.with_lengths(jnp.array([9, 8, 13, -1]))
    for _ in range(2):
        y, cache, _ = step(x, cache)
        np.testing.assert_array_equal(np.isnan(y).any((1, 2)), [False, True, True, True])
        np.testing.assert_array_equal(np.isnan(y).all((1, 2)), [False, True, True, True])
    y, cache, _ = step(x, cache.with_lengths(jnp.zeros(4, jnp.int32)))
    assert_matches(y, want, 1e-5)


@pytest.mark.parametrize(("window", "max_rollback", "capacity"), [(1, 0, 2), slow(1, 2, 0)])
def test_the_smallest_caches(rng, window, max_rollback, capacity):
    """There is no space for a compressed key, and tokens beyond the capacity use the window."""
    module, x = layer(rng, dataclasses.replace(COMPRESSED, window=window)), hidden(rng, B, 3, M)
    forward, step = compiled(module)
    cache, found = module.init_cache(B, capacity, max_rollback=max_rollback), []
    for t in range(5):
        y, cache, _ = step(x[:, t % 3 : t % 3 + 1], cache)
        found.append(y)
    assert_matches(jnp.concatenate(found[:3], 1), forward(x), 1e-4)
    assert np.isfinite(found[4]).all() and cache.lengths.tolist() == [5, 5]


def test_decoding_on_an_explicit_mesh(rng):
    module, x = layer(rng, COMPRESSED), hidden(rng, B, 9, M)
    _, step = compiled(module)
    counts = jnp.array([9, 4], jnp.int32)
    want, _, _ = step(x, module.init_cache(B, 16), counts)
    axes = (jax.sharding.AxisType.Explicit,)
    mesh = jax.make_mesh((2,), ("b",), axis_types=axes, devices=jax.devices()[:2])
    with jax.set_mesh(mesh):
        split = jax.sharding.PartitionSpec("b")
        inputs = jax.device_put((x, module.init_cache(B, 16), counts), split)
        got, _, _ = step(*inputs)
    assert got.sharding.spec[0] == "b"
    assert_matches(got, want, 1e-5)


def test_invalid_arguments_raise(rng):
    module, x = layer(rng, COMPRESSED), hidden(rng, B, 3, M)
    cache = module.init_cache(B, 8)
    for bad, error, message in (
        (x[:1], ValueError, r"'cache.lengths' has shape \(2,\), want \[B\] with B=1"),
        (x[0], ValueError, r"'x' has shape \(3, 16\), want \[B, T, M\]"),
        (x[..., 1:], ValueError, r"'x' has shape \(2, 3, 15\), want \[B, T, M\] with .*M=16"),
        (x.astype(jnp.int32), TypeError, "'x' has dtype int32, want"),
    ):
        with pytest.raises(error, match=message):
            module.decode(bad, cache)
    with pytest.raises(TypeError, match="'cache' is tuple, want CompressedCache"):
        module.decode(x, tuple(cache))
    with pytest.raises(ValueError, match=r"'counts' has shape \(3,\), want \[B\] with B=2"):
        module.decode(x, cache, counts=jnp.zeros(3, jnp.int32))
    with pytest.raises(TypeError, match="'counts' is list, want an array of int32"):
        module.decode(x, cache, counts=[1, 2])
    with pytest.raises(ValueError, match=r"'indices' has shape \(2, 1, 3\), want \[B, T, K\]"):
        module.decode(x, cache, indices=jnp.zeros((B, 1, 3), jnp.int32))
    with pytest.raises(ValueError, match=r"with_lengths: argument 'lengths' has shape \(3,\)"):
        cache.with_lengths(jnp.zeros(3, jnp.int32))
    with pytest.raises(ValueError, match="init_cache: argument 'max_rollback' is -1, want"):
        module.init_cache(B, 8, max_rollback=-1)
