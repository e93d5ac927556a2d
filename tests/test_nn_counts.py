"""Decoding of requests with different numbers of new tokens: right padding, and idle requests."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support.compare import assert_matches
from support.decoders import CONFIG, SHARING, B, M, attention, decoder, hidden
from support.marks import slow

from jax_dsa import nn, training

PAGE = 3
CAPACITY = 12
# Two layers. The second one attends to the keys that the first one's indexer selects.
DECODER = dataclasses.replace(SHARING, num_layers=2)
# The numbers of tokens of some calls. At first, request 0 has fewer tokens than an indexer selects.
CALLS = ((3, 4), (0, 3), (0, 1), (1, 0), (0, 0), (4, 2))


def shuffled(cache):
    """Returns a paged cache with its pages in another order; a flat cache stays as it is."""
    kv = cache.layers[0].kv
    if not hasattr(kv, "page_table"):
        return cache
    order = np.random.default_rng(0).permutation(kv.page_table.size).astype(np.int32)
    return cache.with_page_table(order[np.asarray(kv.page_table)])


@pytest.mark.parametrize(
    ("page_size", "index_fp8", "fp8"),
    [
        (PAGE, True, False),
        slow(None, False, False),
        slow(None, True, True),
        slow(PAGE, False, True),
    ],
)
def test_padded_calls_equal_decoding_one_by_one(rng, page_size, index_fp8, fp8):
    """Only the tokens of a request change its part of the cache."""
    sizes = {"kv_rank": 512, "rope_dim": 64} if fp8 else {}
    attention = dataclasses.replace(CONFIG, index_fp8=index_fp8, **sizes)
    model = decoder(dataclasses.replace(DECODER, attention=attention))
    options = {"page_size": page_size, "fp8": fp8}
    step = jax.jit(lambda t, c, n=None: model.decode(t, c, counts=n, return_indices=True))
    tokens = rng.integers(0, 11, size=(B, CAPACITY)).astype(np.int32)
    cache = shuffled(model.init_cache(B, CAPACITY, **options))
    alone = [model.init_cache(1, CAPACITY, **options) for _ in range(B)]
    done = np.zeros(B, int)
    for counts in CALLS:
        new = np.full((B, 4), 1_000_000, np.int32)  # Padding may be any number.
        new[0] = -7
        for b, n in enumerate(counts):
            new[b, :n] = tokens[b, done[b] : done[b] + n]
        before = cache
        logits, cache, selected = step(new, cache, np.asarray(counts, np.int32))
        assert np.isfinite(logits).all()
        for b, n in enumerate(counts):
            assert all((x[b, n:] == -1).all() for x in selected)
            for t in range(n):
                want, alone[b], indices = step(new[b : b + 1, t : t + 1], alone[b])
                # In FP8, a value near the middle of two codes may round to the other code.
                assert_matches(logits[b, t], want[0, 0], 0.05 if fp8 else 1e-4, f"{counts}[{b}]")
                for x, y in () if fp8 else zip(selected, indices, strict=True):
                    np.testing.assert_array_equal(x[b, t], y[0, 0])
        done += counts
        for layer in cache.layers:
            np.testing.assert_array_equal(layer.lengths, done)
        if not any(counts):
            jax.tree.map(np.testing.assert_array_equal, cache, before)


@pytest.mark.parametrize("page_size", [slow(PAGE), None])
def test_padding_of_layers(rng, page_size):
    """Also where a layer reads another layer's keys or selection. The padding is NaN."""
    full, sharing = attention(), attention(shares_keys=True)
    follower = nn.DSAttention(CONFIG, "shared", rngs=nnx.Rngs(3))
    counts = np.array([2, 4], np.int32)
    is_token = np.arange(5) < counts[:, None]
    x = jnp.where(is_token[..., None], hidden(rng, B, 5, M), jnp.nan)

    @jax.jit
    def layers(x, caches, counts=None):
        y, first, indices = full.decode(x, caches[0], counts=counts)
        z, second, chosen = sharing.decode(x, caches[1], kv=first.kv, counts=counts)
        w, third, reused = follower.decode(x, caches[2], indices=indices, counts=counts)
        return (y, z, w), (indices, chosen, reused), (first, second, third)

    def empty(batch):
        return (
            nn.LayerCache.empty(CONFIG, batch, 6, page_size=page_size),
            nn.LayerCache.empty(sharing.config, batch, 6),
            nn.LayerCache.empty(CONFIG, batch, 6, indexer_type="shared", page_size=page_size),
        )

    outputs, indices, caches = layers(x, empty(B), counts)
    for y, selected in zip(outputs, indices, strict=True):
        np.testing.assert_array_equal(np.where(is_token[..., None], 0, y), 0)
        np.testing.assert_array_equal(np.where(is_token[..., None], -1, selected), -1)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(caches))
    for b, n in enumerate(counts):
        alone = empty(1)
        for t in range(n):
            want, _, alone = layers(x[b : b + 1, t : t + 1], alone)
            for y, z in zip(outputs, want, strict=True):
                assert_matches(y[b, t], z[0, 0], 1e-5)
        for got, one in zip(caches, alone, strict=True):
            if got.index_k is not None and page_size is None:
                assert_matches(got.index_k[b], one.index_k[0], 1e-5)


@pytest.mark.parametrize("size", [3, slow(7)])
def test_sampler_returns_the_token_after_each_prompts_end(rng, size, monkeypatch):
    """The prompts end in the first chunk, in the last one, and nowhere."""
    monkeypatch.setattr(training.Sampler, "PREFILL", size * 3)
    model = decoder(dataclasses.replace(DECODER, num_layers=1))
    counts = np.array([2, 6, 0])
    sampler = training.Sampler(model, temperature=0)
    prompt = rng.integers(0, 11, size=(3, 6)).astype(np.int32)
    cache = model.init_cache(3, CAPACITY, page_size=PAGE)
    token, stream = sampler.prefill(prompt, cache, jax.random.key(0), counts=counts)
    tokens = [token]
    for second in (1, 0, 1):  # The second request pauses once.
        following, stream = sampler.step(token, stream, counts=jnp.array([1, second, 0]))
        token = jnp.where(following < 0, token, following)
        tokens.append(following)
    found = np.concatenate(tokens, axis=1)
    np.testing.assert_array_equal(found < 0, [[0] * 4, [0, 0, 1, 0], [1] * 4])
    np.testing.assert_array_equal(stream.cache.layers[0].lengths, [5, 8, 0])
    forward = jax.jit(lambda t: model(t)[0].argmax(-1))
    for b, n in enumerate(counts[:2]):
        own = found[b][found[b] >= 0]
        row = np.zeros((1, CAPACITY), np.int32)
        row[0, : n + len(own)] = [*prompt[b, :n], *own]
        np.testing.assert_array_equal(forward(row)[0, n - 1 : n - 1 + len(own)], own)


@pytest.mark.slow
def test_generating_after_prompts_of_different_lengths(rng):
    model = decoder(DECODER)
    prompt, key = rng.integers(0, 11, size=(2, 6)).astype(np.int32), jax.random.key(0)
    options = {"steps": 3, "key": key, "temperature": 0}
    got = training.generate(model, prompt, counts=np.array([4, 6]), **options)
    for b, n in enumerate((4, 6)):
        want = training.generate(model, prompt[b : b + 1, :n], **options)
        np.testing.assert_array_equal(got[b], want[0])


def test_invalid_counts_raise(rng):
    model = decoder()
    cache, tokens = model.init_cache(B, 8), jnp.zeros((B, 2), jnp.int32)
    sampler = training.Sampler(model)
    for counts, error, message in (
        ([1, 2], TypeError, "'counts' is list, want an array of int32"),
        (np.ones(B, np.float32), TypeError, "'counts' has dtype float32, want int32"),
        (np.ones(3, np.int32), ValueError, r"'counts' has shape \(3,\), want \[B\] with B=2"),
    ):
        with pytest.raises(error, match=r"DecoderLM\.decode: argument " + message):
            model.decode(tokens, cache, counts=counts)
        with pytest.raises(error, match=r"DSAttention\.decode: argument " + message):
            model.blocks[0].attention.decode(hidden(rng, B, 2, M), cache.layers[0], counts=counts)
        with pytest.raises(error, match=r"Sampler\.prefill: argument " + message):
            sampler.prefill(tokens, cache, jax.random.key(0), counts=counts)


def test_counts_beyond_their_range_are_clipped(rng):
    module, x, cache = attention(), hidden(rng, B, 4, M), nn.LayerCache.empty(CONFIG, B, 8)
    step = jax.jit(lambda n: module.decode(x, cache, counts=n))
    got, want = (step(np.array(n)) for n in ([-3, 99], [0, 4]))
    jax.tree.map(np.testing.assert_array_equal, got, want)
