"""`FlatCache` and `PagedCache`: appending, updating and refusing wrong arguments."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.caches import (
    BOTH,
    ENTRIES,
    INT_MAX,
    INT_MIN,
    PAGE,
    B,
    D,
    G,
    S,
    contents,
    empty,
    rows,
)
from support.compare import Variable

from jax_dsa import FlatCache, HTreeCache, PagedCache
from jax_dsa.serving import pack_records


@BOTH
def test_append(kind: str, rng: np.random.Generator) -> None:
    """Prompts of different lengths, single tokens and finally too many tokens, against lists."""
    cache = empty(kind, rng, dtype=jnp.float32)
    want: list[list[np.ndarray]] = [[] for _ in range(B)]
    lengths = np.zeros(B, int)
    append = jax.jit(lambda cache, new, counts: cache.append(new, counts))
    for t, counts in ((6, [6, 0, 3]), (1, None), (1, None), (14, [14, 14, 99])):
        new = rows(rng, t)
        cache = append(cache, new, None if counts is None else jnp.asarray(counts, jnp.int32))
        for b in range(B):
            want[b] = (want[b] + list(new[b, : t if counts is None else counts[b]]))[:S]
            lengths[b] += t if counts is None else min(t, counts[b])
        assert cache.lengths.dtype == jnp.int32
        np.testing.assert_array_equal(cache.lengths, lengths)
        for b in range(B):
            np.testing.assert_array_equal(
                contents(cache)[b, : len(want[b])],
                np.stack(want[b]) if want[b] else np.zeros((0, G, D)),
            )
            assert not contents(cache)[b, len(want[b]) :].any()
    assert cache.capacity == S and cache.lengths.tolist() == [22, 16, 19]


@BOTH
def test_rows_of_e4m3(kind: str, rng: np.random.Generator) -> None:
    """Rows of e4m3 are stored unchanged. Rows of another dtype would need a scale."""
    cache = empty(kind, rng, dtype=jnp.float8_e4m3fn)
    new = rows(rng, 3).astype(jnp.float8_e4m3fn)
    held = contents(cache.append(new))
    assert held.dtype == new.dtype
    np.testing.assert_array_equal(held[:, :3], new)
    with pytest.raises(TypeError, match=r"append: argument 'rows' .*float8_e4m3fn"):
        cache.append(rows(rng, 3))


@BOTH
def test_update_drops_rows_outside_the_cache(kind: str, rng: np.random.Generator) -> None:
    cache = empty(kind, rng, dtype=jnp.bfloat16).append(rows(rng, 5))
    positions = jnp.asarray([[4, 0], [-1, S], [INT_MAX, INT_MIN]], jnp.int32)
    new = rows(rng, 2)
    after = cache.update(new, positions)
    want = contents(cache).copy()
    want[0, [4, 0]] = np.asarray(new[0].astype(jnp.bfloat16))
    np.testing.assert_array_equal(contents(after), want)
    np.testing.assert_array_equal(after.lengths, cache.lengths)


def test_misuse_of_caches() -> None:
    flat, paged = (
        FlatCache.empty(B, S, D, groups=G),
        PagedCache.empty(9, PAGE, B, ENTRIES, D, groups=G),
    )
    new = jnp.zeros((B, 1, G, D))
    for name, cache in (("FlatCache", flat), ("PagedCache", paged)):
        for call, error, message in (
            (
                lambda c=cache: c.append(new[..., 1:]),
                ValueError,
                "append: argument 'rows'.*D=10 .from the cache.",
            ),
            (lambda c=cache: c.append(new[:, :, 1:]), ValueError, "append: argument 'rows'.*G=2"),
            (
                lambda c=cache: c.append(new[:, 0]),
                ValueError,
                r"'rows'.*\(3, 2, 10\).*\[B, T, G, D\].*D=10",
            ),
            (lambda c=cache: c.append(new[None]), ValueError, r"'rows'.*\(1, 3, 1, 2, 10\)"),
            (lambda c=cache: c.append(new[:1]), ValueError, "append: argument 'rows'.*B=3"),
            (lambda c=cache: c.append(new.astype(jnp.int32)), TypeError, "'rows' has dtype int32"),
            (lambda c=cache: c.append(None), TypeError, "'rows' is NoneType"),
            (lambda c=cache: c.append(new, jnp.ones(2, jnp.int32)), ValueError, "'counts'.*B=3"),
            (
                lambda c=cache: c.update(new, jnp.ones((B, 2), jnp.int32)),
                ValueError,
                "'positions'.*T=1",
            ),
            (lambda c=cache: c.update(new, jnp.ones((B, 1))), TypeError, "'positions'.*int32"),
        ):
            with pytest.raises(error, match=f"{name}.*{message}"):
                call()
    with pytest.raises(ValueError, match=r"FlatCache\.empty: argument 'dim' is 10, want 576"):
        FlatCache.empty(B, S, D, fp8=True)
    with pytest.raises(ValueError, match=r"pack_records: argument 'rows'.*576"):
        pack_records(jnp.zeros((3, 512)))


def test_misuse_of_empty_caches() -> None:
    flat, paged = FlatCache.empty, PagedCache.empty
    for call, error, message in (
        (lambda: flat(-1, S, D), ValueError, r"FlatCache\.empty: argument 'batch' is -1"),
        (lambda: flat(B, 4.5, D), TypeError, r"FlatCache\.empty: argument 'capacity' is 4\.5"),
        (lambda: flat(B, S, 0), ValueError, r"FlatCache\.empty: argument 'dim' is 0"),
        (lambda: flat(B, S, 576, fp8=1), TypeError, r"FlatCache\.empty: argument 'fp8' is 1"),
        (lambda: flat(B, S, D, groups=-1), ValueError, r"FlatCache\.empty: argument 'groups'"),
        (lambda: paged(1, 0, B, 1, D), ValueError, r"PagedCache\.empty: argument 'page_size' is 0"),
        (
            lambda: paged(1, 2, None, 1, D),
            TypeError,
            r"PagedCache\.empty: argument 'batch' is None",
        ),
        (
            lambda: paged(1, 2**20, 0, 2**12, D),
            ValueError,
            r"PagedCache\.empty: argument 'pages_per_request' is 4096, want int in 0\.\.2047",
        ),
    ):
        with pytest.raises(error, match=message):
            call()


def test_free_tokens(rng: np.random.Generator) -> None:
    """The property counts what can still be appended; in `jit` an append cannot raise."""
    k = rows(rng, 6)[:, :, :1]
    tree = HTreeCache.empty(B, S, D, compression=2, top_k=2)
    paged = empty("paged", rng)
    paged = dataclasses.replace(paged, pages=paged.pages[:, :, :1])
    for cache in (FlatCache.empty(B, S, D), paged, tree):
        new = (k, k) if cache is tree else (k,)
        append = jax.jit(lambda cache, counts, new=new: cache.append(*new, counts))
        assert cache.free_tokens.tolist() == [S] * B
        for _ in range(4):
            cache = append(cache, jnp.asarray([6, 5, 0], jnp.int32))
        assert cache.free_tokens.tolist() == [0, 0, S] and cache.lengths.tolist() == [24, S, 0]
        below = dataclasses.replace(cache, lengths=jnp.asarray([INT_MIN, INT_MAX, 3], jnp.int32))
        assert below.free_tokens.tolist() == [S, 0, S - 3]


def test_room_is_a_deprecated_name_of_free_tokens() -> None:
    for cache in (
        FlatCache.empty(B, S, D),
        PagedCache.empty(B * ENTRIES, PAGE, B, ENTRIES, D),
        HTreeCache.empty(B, S, D, compression=2, top_k=2),
    ):
        with pytest.warns(DeprecationWarning, match="free_tokens"):
            assert cache.room.tolist() == cache.free_tokens.tolist()


def test_caches_compare_and_hash_by_identity(rng: np.random.Generator) -> None:
    tree = HTreeCache.empty(B, S, D)
    for cache in (empty("flat", rng), empty("paged", rng), tree):
        assert cache == cache and cache != dataclasses.replace(cache)
        assert len({cache, cache}) == 1


@BOTH
def test_lengths_out_of_range(kind: str, rng: np.random.Generator) -> None:
    lengths = jnp.asarray([INT_MAX, INT_MIN, S - 1], jnp.int32)
    cache = dataclasses.replace(empty(kind, rng), lengths=lengths)
    np.testing.assert_array_equal(cache.append(rows(rng, 3)).lengths, [INT_MAX, 3, S + 2])


@BOTH
def test_objects_that_convert_to_arrays(kind: str, rng: np.random.Generator) -> None:
    """An object that has only `__jax_array__` is an array, wherever the caches take one."""
    cache, new = empty(kind, rng, dtype=jnp.float32), rows(rng, 2)
    counts, positions = np.array([1, 0, 2], np.int32), np.zeros((B, 2), np.int32)
    positions[:, 1] = 3
    for got, want in (
        (cache.append(Variable(new)), cache.append(new)),
        (cache.append(Variable(new), Variable(counts)), cache.append(new, counts)),
        (cache.update(Variable(new), Variable(positions)), cache.update(new, positions)),
    ):
        np.testing.assert_array_equal(got.lengths, want.lengths)
        np.testing.assert_array_equal(contents(got), contents(want))
