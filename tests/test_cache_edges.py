"""Caches at their edges: appends that overflow, pages that are not mapped, and export."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.caches import BOTH, ENTRIES, INT_MAX, PAGE, B, D, E, G, N, S, contents, empty, rows
from support.compare import assert_matches

from jax_dsa import (
    FlatCache,
    HTreeCache,
    PagedCache,
    htree_decode,
    indexer_topk,
    mqa_decode,
    sparse_mla_decode,
)


def attend_to_all(q: jax.Array, cache: Any) -> jax.Array:
    return mqa_decode(q, cache, value_dim=E)


def attend_to_selected(q: jax.Array, cache: Any) -> jax.Array:
    every = jnp.broadcast_to(jnp.arange(S, dtype=jnp.int32), (*q.shape[:2], S))
    return sparse_mla_decode(q, cache, every, value_dim=E, is_causal=True)


def select(q: jax.Array, cache: Any) -> jax.Array:
    name = "data" if isinstance(cache, FlatCache) else "pages"
    cache = dataclasses.replace(cache, **{name: getattr(cache, name)[:, :, :1]})
    weights = jnp.ones(q.shape[:3])
    return indexer_topk(q, cache, weights, S, is_causal=True)[1]


READERS = pytest.mark.parametrize("reader", [attend_to_all, attend_to_selected, select])


@BOTH
@READERS
def test_queries_of_an_append_that_overflows(
    kind: str, reader: Any, rng: np.random.Generator
) -> None:
    """The queries keep their positions. Those whose token did not fit see the whole cache."""
    before = empty(kind, rng, dtype=jnp.float32).append(rows(rng, S - 2))
    new, q = rows(rng, 5), jnp.asarray(rng.normal(size=(B, 5, N, D)), jnp.float32)
    cache = before.append(new)
    assert cache.lengths.tolist() == [S + 3] * B and cache.free_tokens.tolist() == [0] * B
    fitting = before.append(new[:, :2])
    np.testing.assert_array_equal(contents(cache), contents(fitting))
    got = jax.jit(reader)(q, cache)
    assert_matches(got[:, :2], reader(q[:, :2], fitting), tol=1e-6)
    assert_matches(got[:, 4:], reader(q[:, 4:], fitting), tol=1e-6)
    # A full cache takes nothing more, and a shorter length makes room again.
    again = cache.append(rows(rng, 1))
    np.testing.assert_array_equal(contents(again), contents(cache))
    assert again.lengths.tolist() == [S + 4] * B
    back = dataclasses.replace(again, lengths=jnp.full(B, S - 2, jnp.int32)).append(new[:, :2])
    np.testing.assert_array_equal(contents(back), contents(fitting))
    assert back.lengths.tolist() == [S] * B


@READERS
def test_lengths_at_the_end_of_int32(reader: Any, rng: np.random.Generator) -> None:
    """Positions do not overflow."""
    full = empty("flat", rng, dtype=jnp.float32).append(rows(rng, S))
    q = jnp.asarray(rng.normal(size=(B, 3, N, D)), jnp.float32)
    for length, same in ((INT_MAX, S + 3), (-(2**31), 0), (-1, 0)):
        cache, other = (dataclasses.replace(full, lengths=jnp.full(B, x)) for x in (length, same))
        np.testing.assert_array_equal(reader(q, cache), reader(q, other))


def test_places_without_a_page(rng: np.random.Generator) -> None:
    """An append stops at the first token whose page is not mapped, and does not count it."""
    cache = empty("paged", rng, dtype=jnp.float32)
    table = cache.page_table.at[0, 1].set(-1).at[2, 0].set(99)
    cut = dataclasses.replace(cache, page_table=table)
    assert cut.free_tokens.tolist() == [PAGE, S, 0]
    new = rows(rng, 6)
    counted = jax.jit(cut.append)(new)
    assert counted.lengths.tolist() == [PAGE, 6, 0]
    assert counted.free_tokens.tolist() == [0, S - 6, 0]
    whole = dataclasses.replace(counted, page_table=cache.page_table)
    want = cache.append(new, jnp.asarray([PAGE, 6, 0], jnp.int32))
    np.testing.assert_array_equal(whole.pages, want.pages)
    assert whole.append(new).lengths.tolist() == [PAGE + 6, 12, 6]
    # Pages before the length may be given back: they do not end a request.
    ahead = dataclasses.replace(cut, lengths=jnp.asarray([2 * PAGE, S, PAGE], jnp.int32))
    assert ahead.free_tokens.tolist() == [S - 2 * PAGE, 0, S - PAGE]
    assert ahead.append(new[:, :2]).lengths.tolist() == [2 * PAGE + 2, S + 2, PAGE + 2]
    # A length inside an unmapped page stays as it is.
    inside = dataclasses.replace(cut, lengths=jnp.asarray([PAGE + 1, 0, 2], jnp.int32))
    assert inside.free_tokens.tolist() == [0, S, 0]
    assert inside.append(new[:, :1]).lengths.tolist() == [PAGE + 1, 1, 2]


@READERS
def test_rows_of_a_former_request_are_never_read(reader: Any, rng: np.random.Generator) -> None:
    """A page that is mapped after an append does not show what it held before."""
    used = empty("paged", rng, dtype=jnp.float32).append(jnp.full((B, S, G, D), jnp.nan))
    new, q = rows(rng, 6), jnp.asarray(rng.normal(size=(B, 2, N, D)), jnp.float32)
    for unmapped in (0, 1):
        table = used.page_table.at[:, unmapped:].set(-1)
        cache = dataclasses.replace(used, page_table=table, lengths=jnp.zeros(B, jnp.int32))
        cache = dataclasses.replace(cache.append(new), page_table=used.page_table)
        assert cache.lengths.tolist() == [unmapped * PAGE] * B
        assert not np.isnan(reader(q, cache)).any()


def test_one_request_without_batch_axis(rng: np.random.Generator) -> None:
    cache = empty("paged", rng, dtype=jnp.float32)
    one = dataclasses.replace(
        cache, page_table=cache.page_table[0].at[2].set(-1), lengths=cache.lengths[0]
    )
    assert one.free_tokens == 2 * PAGE and one.capacity == S
    assert one.append(rows(rng, 9)[0]).lengths == 2 * PAGE


def test_htree_shares_the_rules(rng: np.random.Generator) -> None:
    k = rows(rng, 6)
    cache = HTreeCache.empty(B, 4, D, groups=G, dtype=jnp.float32).append(k, k)
    assert cache.lengths.tolist() == [6] * B and cache.free_tokens.tolist() == [0] * B
    q = jnp.asarray(rng.normal(size=(B, 3, N, D)), jnp.float32)  # at the positions 3, 4 and 5
    held = dataclasses.replace(cache, lengths=jnp.full(B, 4, jnp.int32))
    for t in range(3):
        got = htree_decode(q, cache)[:, t : t + 1]
        assert_matches(got, htree_decode(q[:, t : t + 1], held), tol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.int64, jnp.uint32, jnp.int32, jnp.int8])
def test_lengths_keep_their_dtype(dtype: Any, rng: np.random.Generator) -> None:
    """So a scan can carry a cache. A dtype that cannot hold every length becomes int32."""
    with jax.enable_x64(True):
        new = rows(rng, 2)
        tree = HTreeCache.empty(B, 8, D, groups=G, dtype=jnp.float32)
        for cache, step in (
            (empty("flat", rng), (new,)),
            (empty("paged", rng), (new,)),
            (tree, (new, new)),
        ):
            cache = dataclasses.replace(cache, lengths=jnp.zeros(B, dtype))
            lengths = cache.append(*step).lengths
            assert lengths.dtype == (jnp.int32 if dtype == jnp.int8 else dtype)
            if dtype != jnp.int8:
                carry, _ = jax.lax.scan(
                    lambda c, _, step=step: (c.append(*step), None), cache, length=3
                )
                assert carry.lengths.tolist() == [6] * B


def test_lists_are_no_arrays() -> None:
    cache = PagedCache.empty(B * ENTRIES, PAGE, B, ENTRIES, D, groups=G)
    wrong = dataclasses.replace(cache, page_table=[[0] * ENTRIES] * B)
    new, q = jnp.zeros((B, 1, G, D)), jnp.zeros((B, 1, N, D), jnp.bfloat16)
    for call in (
        lambda: wrong.append(new),
        lambda: wrong.update(new, jnp.zeros((B, 1), jnp.int32)),
        lambda: wrong.free_tokens,
        lambda: mqa_decode(q, wrong),
    ):
        with pytest.raises(TypeError, match=r"page_table' is list, want an array"):
            call()
    with pytest.raises(ValueError, match=r"page_table' has shape .* want \[B, R\]"):
        dataclasses.replace(cache, page_table=cache.page_table[0]).append(new)
    for kind in (FlatCache.empty(B, S, D, groups=G), HTreeCache.empty(B, S, D, groups=G)):
        with pytest.raises(TypeError, match=r"lengths' is list, want an array"):
            _ = dataclasses.replace(kind, lengths=[0] * B).free_tokens
