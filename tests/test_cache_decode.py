"""`sparse_mla_decode`, `mqa_decode` and `indexer_topk` over caches."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.caches import (
    BOTH,
    ENTRIES,
    PAGE,
    B,
    D,
    E,
    G,
    K,
    N,
    S,
    T,
    contents,
    empty,
    filled,
    picks,
    rows,
)
from support.compare import assert_matches

from jax_dsa import FlatCache, PagedCache, indexer_topk, mqa_decode, sparse_mla, sparse_mla_decode


def test_tokens_without_a_page(rng: np.random.Generator) -> None:
    cache = empty("paged", rng, dtype=jnp.float32)
    table = cache.page_table.at[0, 1].set(-1).at[2, 0].set(99)
    cache = dataclasses.replace(cache.append(rows(rng, 7)), page_table=table)
    q = jnp.asarray(rng.normal(size=(B, T, N, D)), jnp.float32)
    every = jnp.broadcast_to(jnp.arange(S, dtype=jnp.int32), (B, T, G, S))
    out, lse = sparse_mla_decode(q, cache, every, value_dim=E, return_lse=True)
    seen = [range(4), range(7), range(4, 7)]
    for b in range(B):
        kv = contents(dataclasses.replace(cache, page_table=table.clip(0, 17)))[
            b : b + 1, list(seen[b])
        ]
        picks = every[b : b + 1, ..., : len(seen[b])]
        want = sparse_mla(q[b : b + 1], kv, picks, value_dim=E, return_lse=True)
        assert_matches((out[b : b + 1], lse[b : b + 1]), want, tol=1e-5)


def test_without_batch_axis(rng: np.random.Generator) -> None:
    new = rows(rng, 3)
    for kind in ("flat", "paged"):
        cache = empty(kind, rng, dtype=jnp.float32)
        want = cache.append(new)
        q, indices = jnp.ones((B, T, N, D)), jnp.ones((B, T, G, K), jnp.int32)
        out = sparse_mla_decode(q, want, indices, value_dim=E)
        for b in range(B):
            names = ("lengths", "data" if kind == "flat" else "page_table")
            mine = {name: getattr(cache, name)[b] for name in names}
            one = dataclasses.replace(cache, **mine).append(new[b])
            assert one.lengths == 3
            got = sparse_mla_decode(q[b], one, indices[b], value_dim=E)
            assert_matches(got, out[b], tol=1e-6)


@BOTH
@pytest.mark.parametrize("is_causal", [False, True])
def test_decode_equals_sparse_mla_over_the_cached_rows(
    kind: str, is_causal: bool, rng: np.random.Generator
) -> None:
    cache, indices = filled(kind, rng, dtype=jnp.float32), picks(rng)
    q = jnp.asarray(rng.normal(size=(B, T, N, D)), jnp.float32)
    options = {
        "value_dim": E,
        "scale": 0.4,
        "topk_length": jnp.asarray([[7, 3], [5, 7], [7, 7]], jnp.int32),
        "sinks": jnp.asarray([0.1, 1.0, -jnp.inf, 2.0], jnp.float32),
        "return_lse": True,
    }
    ends = cache.lengths[:, None] - (jnp.asarray([1, 0]) if is_causal else 0)
    visible = jnp.where(indices < ends[:, :, None, None], indices, -1)
    want = sparse_mla(q, contents(cache), visible, **options)
    got = jax.jit(lambda *a: sparse_mla_decode(*a, is_causal=is_causal, **options))(
        q, cache, indices
    )
    assert_matches(got, want, tol=1e-6)


@BOTH
def test_decode_reads_only_selected_rows(kind: str, rng: np.random.Generator) -> None:
    cache, indices = filled(kind, rng, dtype=jnp.float32), picks(rng)
    indices = jnp.where(indices == 2, 3, indices)
    q = jnp.asarray(rng.normal(size=(B, T, N, D)), jnp.float32)
    want = sparse_mla_decode(q, cache, indices, value_dim=E)
    stored = contents(cache)
    poison = jnp.full((B, S, G, D), jnp.nan)
    where = np.arange(S)[None] >= np.asarray(cache.lengths)[:, None]
    where[:, 2] = True
    positions = jnp.asarray(np.where(where, np.arange(S), -1), jnp.int32)
    poisoned = cache.update(poison, positions)
    assert np.isnan(contents(poisoned)).any() and not np.isnan(stored).any()
    np.testing.assert_array_equal(sparse_mla_decode(q, poisoned, indices, value_dim=E), want)


@pytest.mark.parametrize("fp8", [False, True], ids=["keys", "records"])
@pytest.mark.parametrize("operator", [sparse_mla_decode, mqa_decode])
def test_vmap_of_pools(operator: Any, fp8: bool, rng: np.random.Generator) -> None:
    """The mapped calls have a pool each, or they share one."""
    calls, b, s, page = 2, 3, 64, 16
    pages = s // page
    q = jnp.asarray(rng.standard_normal((calls, b, 1, 4, 576)), jnp.bfloat16)
    rows = jnp.asarray(rng.standard_normal((calls, b, s, 1, 576)), jnp.bfloat16)
    indices = jnp.asarray(rng.integers(-2, s + 2, (calls, b, 1, 20)), jnp.int32)
    lengths = jnp.asarray(rng.integers(1, s + 1, (calls, b)), jnp.int32)
    table = rng.permuted(np.arange(calls * b * pages).reshape(calls, -1) % (b * pages), axis=1)

    def pool(rows: jax.Array, lengths: jax.Array, table: jax.Array) -> PagedCache:
        cache = PagedCache.empty(b * pages, page, b, pages, fp8=fp8)
        return dataclasses.replace(cache, page_table=table).append(rows, lengths)

    def step(q: jax.Array, cache: PagedCache, indices: jax.Array) -> jax.Array:
        selection = (indices,) if operator is sparse_mla_decode else ()
        return operator(q, cache, *selection, implementation="xla")

    caches = jax.vmap(pool)(rows, lengths, jnp.asarray(table.reshape(calls, b, pages), jnp.int32))
    one = jax.tree.map(lambda x: x[0], caches)
    each = jax.vmap(step)(q, caches, indices)
    shared = jax.vmap(step, (0, None, 0))(q, one, indices)
    for i in range(calls):
        own = jax.tree.map(lambda x, i=i: x[i], caches)
        assert_matches(each[i], step(q[i], own, indices[i]), tol=1e-2)
        assert_matches(shared[i], step(q[i], one, indices[i]), tol=1e-2)


def test_gradients_of_a_cache(rng: np.random.Generator) -> None:
    """The gradients of flat and paged caches agree; lengths and page tables have none."""
    flat, indices = filled("flat", rng, dtype=jnp.float32), picks(rng)
    paged = empty("paged", rng, dtype=jnp.float32)
    every = jnp.broadcast_to(jnp.arange(S, dtype=jnp.int32), (B, S))
    paged = dataclasses.replace(paged.update(flat.data, every), lengths=flat.lengths)
    q = jnp.asarray(rng.normal(size=(B, T, N, D)), jnp.float32)

    def loss(q: jax.Array, cache: Any) -> jax.Array:
        return jnp.sum(jnp.sin(sparse_mla_decode(q, cache, indices, value_dim=E)))

    dq, dflat = jax.grad(loss, argnums=(0, 1), allow_int=True)(q, flat)
    dq_paged, dpaged = jax.grad(loss, argnums=(0, 1), allow_int=True)(q, paged)
    assert_matches(dq_paged, dq, tol=1e-5)
    got = np.asarray(dpaged.pages)[np.asarray(paged.page_table)].reshape(B, S, G, D)
    assert_matches(got, np.asarray(dflat.data), tol=1e-5)
    assert np.abs(got).max() > 0


@pytest.mark.parametrize(("pages", "room"), [(3, 0), (0, 2), (0, 0)])
def test_no_pages(pages: int, room: int, rng: np.random.Generator) -> None:
    """With an empty pool or an empty page table, nothing is stored and nothing is visible."""
    shape = (pages, PAGE, 1, D)
    cache = PagedCache(jnp.ones(shape), jnp.zeros((B, room), jnp.int32), jnp.zeros(B, jnp.int32))
    new, q = jnp.ones((B, T, 1, D)), jnp.ones((B, T, N, D))
    indices = jnp.zeros((B, T, K), jnp.int32)

    def outs(new: Any, q: Any, pages: Any) -> Any:
        after = dataclasses.replace(cache, pages=pages).append(new)
        sparse = sparse_mla_decode(q, after, indices, return_lse=True)
        return after.pages, *sparse, *mqa_decode(q, after, return_lse=True)

    (kept, *results), pull = jax.vjp(outs, new, q, cache.pages)
    np.testing.assert_array_equal(kept, cache.pages)
    for out, lse in (results[:2], results[2:]):
        assert not out.any() and (lse == -jnp.inf).all()
    dnew, dq, dpages = pull((kept, *jax.tree.map(jnp.ones_like, results)))
    assert not dnew.any() and not dq.any()
    np.testing.assert_array_equal(dpages, cache.pages)
    picked, logits = indexer_topk(q, cache.append(new), jnp.ones((B, T, N)), 2)
    assert (picked == -1).all() and (logits == -jnp.inf).all()


def test_pages_of_no_rows() -> None:
    cache = PagedCache(
        jnp.ones((3, 0, 1, D)), jnp.zeros((B, 1), jnp.int32), jnp.zeros(B, jnp.int32)
    )
    q = jnp.ones((B, T, N, D))
    for op, call in (
        ("PagedCache.append", lambda: cache.append(q[:, :, :1])),
        ("sparse_mla_decode", lambda: sparse_mla_decode(q, cache, jnp.zeros((B, T, K), jnp.int32))),
        ("mqa_decode", lambda: mqa_decode(q, cache)),
        ("indexer_topk", lambda: indexer_topk(q, cache, jnp.ones((B, T, N)), 2)),
    ):
        with pytest.raises(ValueError, match=f"{op}: argument .*pages' .*at least one row"):
            call()


GOOD_Q, GOOD_INDICES = np.zeros((B, T, N, D), np.float32), np.zeros((B, T, G, K), np.int32)


GOOD_CACHE = FlatCache(np.zeros((B, S, G, D), np.float32), np.zeros(B, np.int32))


GOOD_PAGES = PagedCache(
    np.zeros((9, PAGE, G, D), np.float32), np.zeros((B, ENTRIES), np.int32), np.zeros(B, np.int32)
)


WRONG = {
    "q": ({"q": np.zeros(3, np.float32)}, ValueError, "'q' has shape"),
    "cache": ({"cache": GOOD_CACHE.data}, TypeError, "'cache' is an array .*, want a FlatCache or"),
    "dtype": ({"q": GOOD_Q.astype(jnp.bfloat16)}, TypeError, "'cache.data'.*bfloat16 or uint8"),
    "dim": ({"q": GOOD_Q[..., 1:]}, ValueError, "'cache.data'.*D=9"),
    "heads": ({"q": GOOD_Q[:, :, :3]}, ValueError, "N=3.*G=2.*multiple"),
    "batch": ({"q": GOOD_Q[:1], "indices": GOOD_INDICES[:1]}, ValueError, "'cache.data'.*B=1"),
    "lengths": (
        {"cache": FlatCache(GOOD_CACHE.data, np.zeros(2, np.int32))},
        ValueError,
        "'cache.lengths'",
    ),
    "table": (
        {"cache": dataclasses.replace(GOOD_PAGES, page_table=np.zeros(3, np.int32))},
        ValueError,
        "'cache.page_table'.*B=3",
    ),
    "pages": (
        {"cache": dataclasses.replace(GOOD_PAGES, pages=GOOD_PAGES.pages[0])},
        ValueError,
        "'cache.pages' has shape",
    ),
    "indices": ({"indices": GOOD_INDICES[..., 0, 0]}, ValueError, "'indices'"),
    "topk_length": ({"topk_length": np.zeros((T, B), np.int32)}, ValueError, "'topk_length'"),
    "value_dim": ({"value_dim": 0}, ValueError, "'value_dim' is 0"),
    "scale": ({"scale": "x"}, TypeError, "'scale'"),
    "is_causal": ({"is_causal": 1}, TypeError, "'is_causal'"),
    "sinks": ({"sinks": np.zeros(2, np.float32)}, ValueError, "'sinks'.*N=4"),
    "return_lse": ({"return_lse": 1}, TypeError, "'return_lse'"),
    "implementation": ({"implementation": 1}, ValueError, "'implementation' is 1"),
}


@pytest.mark.parametrize(("change", "error", "message"), WRONG.values(), ids=WRONG.keys())
def test_misuse_of_decode(change: dict, error: type, message: str) -> None:
    args = {"q": GOOD_Q, "cache": GOOD_CACHE, "indices": GOOD_INDICES, "value_dim": E}
    with pytest.raises(error, match=f"sparse_mla_decode: .*{message}"):
        sparse_mla_decode(**{**args, **change})
