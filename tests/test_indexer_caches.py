"""`indexer_topk` on flat and paged caches."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.compare import assert_matches
from support.indexer import inputs, options_of, paged

from jax_dsa import FlatCache, PagedCache, indexer_logits, indexer_topk, topk


@pytest.mark.parametrize("with_scale", [False, True])
def test_pages(with_scale, rng):
    """`indexer_topk` selects from the mapped keys of a paged cache."""
    q, k, weights = inputs(rng, B=3, S=40)
    ranges = options_of(rng, B=3, S=40)
    scale = ranges.pop("index_k_scale")
    scale = scale if with_scale else None
    pool, scales, table, mapped = paged(rng, k, 8, scale)
    pool = pool[:, :, None]

    def call(q, pool, scales, weights, table, **ranges):
        cache = PagedCache(pool, table, jnp.full(q.shape[:-3], 40))
        return indexer_topk(q, cache, weights, 7, index_k_scale=scales, **ranges)

    got = call(q, pool, scales, weights, table, **ranges)
    logits = np.asarray(indexer_logits(q, k, weights, index_k_scale=scale, **ranges))
    expected = topk(np.where(mapped[:, None], logits, -np.inf), 7, return_values=True)
    assert_matches(got, expected, 1e-6)

    if with_scale:
        one = [call(q[i], pool, scales, weights[i], table[i]) for i in range(3)]
        one = jax.tree.map(lambda *x: np.stack(x), *one)
        vmapped = jax.vmap(call, in_axes=(0, None, None, 0, 0))(q, pool, scales, weights, table)
        assert_matches(vmapped, one, 1e-6)
        pools = np.stack([pool, pool[::-1]]), np.stack([scales, scales[::-1]])
        each = [call(q, pools[0][i], pools[1][i], weights, table) for i in range(2)]
        vmapped = jax.vmap(call, in_axes=(None, 0, 0, None, None))(q, *pools, weights, table)
        assert_matches(vmapped, jax.tree.map(lambda *x: np.stack(x), *each), 1e-6)


@pytest.mark.parametrize("is_causal", [False, True])
def test_caches(is_causal, rng):
    """The queries are the last tokens of each request.

    They see keys up to its length, and up to their own positions if they are causal. Later rows of
    the cache do not matter.
    """
    q, k, weights = inputs(rng, B=4, T=3, S=24)
    lengths = np.array([24, 2, 9, 99], np.int32)
    options = options_of(rng, B=4, T=3, S=24)
    scale = options.pop("index_k_scale")
    held = np.minimum(lengths, 24)[:, None]
    seen = lengths[:, None] - 3 + np.arange(3) + 1 if is_causal else held
    ends = np.minimum(options["ends"], np.minimum(seen, held)).astype(np.int32)
    logits = indexer_logits(q, k, weights, index_k_scale=scale, starts=options["starts"], ends=ends)
    dirty = np.where(np.arange(24) < held, 1, np.nan).astype(np.float32)
    k, scale = k * dirty[..., None], scale * dirty
    pool, scales, table, mapped = paged(rng, k, 4, scale)
    caches = (
        (FlatCache(k[:, :, None], lengths), scale, np.ones_like(mapped)),
        (PagedCache(pool[:, :, None], table, lengths), scales, mapped),
    )
    for cache, scale, mapped in caches:
        given = options | {"index_k_scale": scale, "is_causal": is_causal}
        got = indexer_topk(q, cache, weights, 6, **given)
        expected = topk(np.where(mapped[:, None], logits, -np.inf), 6, return_values=True)
        assert_matches(got, expected, 1e-6)


def test_a_cache_of_one_request(rng):
    q, k, weights = inputs(rng, B=1)
    cache = FlatCache(k[:, :, None], np.array([6], np.int32))
    single = jax.tree.map(lambda x: x[0], cache)
    got = indexer_topk(q[0], single, weights[0], 3, is_causal=True)
    expected = indexer_topk(q, cache, weights, 3, is_causal=True)
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_array_equal(a, b[0])


def test_gradients_through_a_flat_cache(rng):
    q, k, weights = inputs(rng)
    lengths = np.array([9, 6], np.int32)
    ends = (lengths[:, None] - 5 + np.arange(5) + 1).astype(np.int32)

    def cached(q, k, weights):
        cache = FlatCache(k[:, :, None], lengths)
        return jnp.sum(jnp.exp(indexer_topk(q, cache, weights, 3, is_causal=True)[1]))

    def plain(*arrays):
        return jnp.sum(jnp.exp(indexer_topk(*arrays, 3, ends=ends)[1]))

    got, expected = (jax.grad(fn, argnums=(0, 1, 2))(q, k, weights) for fn in (cached, plain))
    assert_matches(got, expected, tol=1e-6)  # On a GPU, scattered additions have no fixed order.


def test_pages_have_no_gradient(rng):
    q, k, weights = inputs(rng, B=2, S=8)
    pool, _, table, _ = paged(rng, k, 4)
    pool = pool[:, :, None]

    def call(q, pool, table):
        return indexer_topk(q, PagedCache(pool, table, np.full(2, 8)), weights, 3)[1].sum()

    with pytest.raises(NotImplementedError, match="indexer_topk: gradients through a page table"):
        jax.grad(call)(q, pool, table)
    with pytest.raises(ValueError, match=r"indexer_topk: argument 'index_k.page_table' has shape"):
        call(q, pool, table[:1])
    large = jax.ShapeDtypeStruct((2, 2**29), jnp.int32)
    with pytest.raises(ValueError, match=r"argument 'index_k.page_table' is 2147483648, want room"):
        jax.eval_shape(lambda table: call(q, pool, table), large)
    with pytest.raises(
        ValueError, match=r"indexer_topk: argument 'index_k.pages' has shape .*at least one row"
    ):
        call(q, pool[:, :0], table)
