"""`indexer_topk` inside candidate blocks, and causality of compressed keys."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.compare import assert_matches
from support.indexer import inputs, options_of, paged
from support.oracles import indexer as oracle
from support.oracles import topk as topk_oracle

from jax_dsa import (
    FlatCache,
    PagedCache,
    block_topk,
    indexer_block_topk,
    indexer_logits,
    indexer_topk,
    topk,
)
from jax_dsa.core import streaming

LAST = 2**31 - 1


@pytest.mark.full_optimization
@pytest.mark.parametrize("with_starts", [False, True])
@pytest.mark.parametrize("block_size", [1, 3, LAST])
def test_selection(block_size, with_starts, rng):
    """The selection is bit for bit the `topk` of the logits with -inf outside the candidates."""
    arrays, options = inputs(rng, S=14), options_of(rng, S=14)
    if not with_starts:
        del options["starts"]
    candidates = rng.integers(-2, 8, size=(2, 5, 3)).astype(np.int32)
    candidates[0, 0] = LAST, -LAST - 1, 0
    got = indexer_topk(
        *arrays, 4, candidates=candidates, candidate_block_size=block_size, **options
    )
    starts = options.get("starts")
    logits = np.asarray(indexer_logits(*arrays, **options))
    logits = oracle.inside(logits, candidates, block_size, starts)
    expected = topk(logits, 4, return_values=True)
    jax.tree.map(np.testing.assert_array_equal, got, expected)
    np.testing.assert_array_equal(got[0], topk_oracle.topk(logits, 4))


@pytest.mark.full_optimization
def test_chunks(rng, monkeypatch):
    arrays, options = inputs(rng, S=14), options_of(rng, S=14)
    options |= {"candidates": rng.integers(0, 5, size=(2, 5, 2)), "candidate_block_size": 3}
    expected = indexer_topk(*arrays, 4, **options)
    monkeypatch.setattr(streaming, "BUDGET", 1)
    jax.clear_caches()
    jax.tree.map(np.testing.assert_array_equal, indexer_topk(*arrays, 4, **options), expected)


def test_gradients(rng):
    """They are those of the same keys without candidates."""
    q, k, weights = inputs(rng, S=14)
    blocks = np.broadcast_to(np.array([3, -1, 0], np.int32), (2, 5, 3))
    own = np.array([0, 1, 2, 3, 12, 13])  # blocks of 4 keys

    def inside(q, k, weights):
        options = {"candidates": blocks, "candidate_block_size": 4}
        return jnp.exp(indexer_topk(q, k, weights, 3, **options)[1]).sum()

    def cut(q, k, weights):
        return jnp.exp(indexer_topk(q, k[:, own], weights, 3)[1]).sum()

    got, expected = (jax.grad(fn, argnums=(0, 1, 2))(q, k, weights) for fn in (inside, cut))
    assert_matches(got, expected, 1e-6)


def test_caches(rng):
    q, k, weights = inputs(rng, B=3, T=2, S=24)
    lengths = np.array([24, 9, 2], np.int32)
    candidates = rng.integers(0, 6, size=(3, 2, 3)).astype(np.int32)
    ends = np.maximum(lengths[:, None] - 2 + np.arange(2) + 1, 0).astype(np.int32)
    logits = np.asarray(indexer_logits(q, k, weights, ends=ends))
    logits = oracle.inside(logits, candidates, 4)
    pool, _, table, mapped = paged(rng, k, 4)
    caches = (
        (FlatCache(k[:, :, None], lengths), np.ones_like(mapped)),
        (PagedCache(pool[:, :, None], table, lengths), mapped),
    )
    options = {"candidates": candidates, "candidate_block_size": 4, "is_causal": True}
    for cache, mapped in caches:
        got = indexer_topk(q, cache, weights, 5, **options)
        expected = topk(np.where(mapped[:, None], logits, -np.inf), 5, return_values=True)
        assert_matches(got, expected, 1e-6)


@pytest.mark.parametrize("start", [0, 3, -5, np.array([LAST, 1])])
def test_key_stride(start, rng):
    """Key i is visible once its tokens are: i < (p + 1) // key_stride."""
    arrays, options = inputs(rng, T=7), options_of(rng, T=7)
    first = np.broadcast_to(np.asarray(start, np.int64), 2)[:, None]
    visible = np.clip((first + np.arange(7) + 1) // 3, 0, 9)
    same = options | {"ends": np.minimum(options["ends"], visible).astype(np.int32)}
    strided = options | {"is_causal": True, "query_start": start, "key_stride": 3}
    for call in (
        indexer_logits,
        lambda *a, **o: indexer_topk(*a, 3, **o),
        lambda *a, **o: indexer_block_topk(*a, 2, block_size=2, **o),
    ):
        got, expected = (call(*arrays, **o) for o in (strided, same))
        jax.tree.map(np.testing.assert_array_equal, got, expected)


def test_a_source_of_candidates_and_its_consumers(rng):
    """V4.1: one layer publishes blocks of compressed entries, and later layers select inside.

    The source scores all visible entries once. It publishes the best blocks, the newest of which is
    forced, and selects its own entries from all. A consumer scores with its own indexer.
    """
    S, ratio, blocks, top_k = 48, 2, 5, 7
    T = S * ratio
    source, consumer = (inputs(rng, B=1, T=T, S=S) for _ in range(2))
    causal = {"is_causal": True, "key_stride": ratio}
    logits = indexer_logits(*source, **causal)
    own = topk(logits, top_k)
    published = block_topk(logits, blocks, block_size=8)
    np.testing.assert_array_equal(
        published, indexer_block_topk(*source, blocks, block_size=8, **causal)[0]
    )
    jax.tree.map(np.testing.assert_array_equal, own, indexer_topk(*source, top_k, **causal)[0])
    indices, _ = indexer_topk(
        *consumer, top_k, candidates=published, candidate_block_size=8, **causal
    )
    whole = indexer_logits(*consumer, **causal)
    for t in range(T):
        length = (t + 1) // ratio
        shown = np.asarray(published[0, t])
        if not length:
            assert (shown == -1).all() and (indices[0, t] == -1).all()
            continue
        assert (length - 1) // 8 in shown
        scores = [np.max(logits[0, t, j : min(j + 8, length)]) for j in range(0, length, 8)]
        scores[-1] = np.inf
        best = sorted(np.argsort(-np.array(scores), kind="stable")[:blocks])
        np.testing.assert_array_equal(shown[shown >= 0], best)
        entries = [s for j in best for s in range(8 * j, min(8 * j + 8, length))]
        order = np.argsort(-np.asarray(whole)[0, t, entries], kind="stable")[:top_k]
        want = sorted(entries[i] for i in order)
        np.testing.assert_array_equal(indices[0, t, : len(want)], want)
        assert (indices[0, t, len(want) :] == -1).all()


def test_two_levels_of_one_indexer(rng):
    """HISA: the means of 128 keys select blocks, in which the same indexer selects keys."""
    q, k, weights = inputs(rng, B=1, T=6, S=700, C=8)
    causal = {"is_causal": True, "query_start": 690}
    blocks, _ = indexer_block_topk(q, k, weights, 3, block_size=128, pooling="mean", **causal)
    indices, logits = indexer_topk(
        q, k, weights, 32, candidates=blocks, candidate_block_size=128, **causal
    )
    means = oracle.block_means(k, 128)
    scores = oracle.indexer_logits(q, means, weights)[0]
    whole = np.asarray(indexer_logits(q, k, weights, **causal))
    for t in range(6):
        best = np.argsort(-scores[t, :5], kind="stable")[:2]  # The last block is not whole.
        np.testing.assert_array_equal(blocks[0, t], [*sorted(best), 5])
    expected = topk(oracle.inside(whole, np.asarray(blocks), 128), 32, return_values=True)
    jax.tree.map(np.testing.assert_array_equal, (indices, logits), expected)


BLOCKS = np.zeros((2, 5, 3), np.int32)


@pytest.mark.parametrize(
    ("error", "name", "options"),
    [
        (ValueError, "candidate_block_size", {"candidates": BLOCKS}),
        (ValueError, "candidate_block_size", {"candidate_block_size": 4}),
        (ValueError, "candidate_block_size", {"candidates": BLOCKS, "candidate_block_size": 0}),
        (TypeError, "candidate_block_size", {"candidates": BLOCKS, "candidate_block_size": 2.5}),
        (ValueError, "candidates", {"candidates": BLOCKS[:1], "candidate_block_size": 4}),
        (ValueError, "candidates", {"candidates": BLOCKS[0], "candidate_block_size": 4}),
        (TypeError, "candidates", {"candidates": BLOCKS * 0.5, "candidate_block_size": 4}),
        (ValueError, "key_stride", {"key_stride": 0}),
        (TypeError, "key_stride", {"key_stride": 1.5}),
    ],
)
def test_misuse(error, name, options, rng):
    with pytest.raises(error, match=rf"^indexer_topk: argument '{name}' .*want"):
        indexer_topk(*inputs(rng), 3, **options)


def test_misuse_of_key_stride(rng):
    q, k, weights = inputs(rng, T=9)
    cache = FlatCache(k[:, :, None], np.array([9, 6], np.int32))
    with pytest.raises(ValueError, match="'key_stride' is 2, want 1 with a cache; pass 'starts'"):
        indexer_topk(q, cache, weights, 3, key_stride=2)
    with pytest.raises(ValueError, match="'key_stride' is 2, want 1 beside 'segment_ids'; pass"):
        indexer_logits(q, k, weights, segment_ids=np.zeros((2, 9), np.int32), key_stride=2)
