"""The indexer's error messages."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.indexer import inputs

from jax_dsa import FlatCache, PagedCache, indexer_block_topk, indexer_logits, indexer_topk


def test_misuse_of_query_start(rng):
    arrays = inputs(rng)
    for call in (indexer_logits, lambda *a, **o: indexer_topk(*a, 3, **o)):
        for error, start in ((ValueError, 2**31), (TypeError, 0.5), (ValueError, np.zeros(3, int))):
            with pytest.raises(error, match=r"^indexer_(logits|topk): argument 'query_start' .*w"):
                call(*arrays, is_causal=True, query_start=start)
        with pytest.raises(TypeError, match="argument 'is_causal' is 1"):
            call(*arrays, is_causal=1)


def test_misuse_of_caches(rng):
    q, k, weights = inputs(rng)
    flat = FlatCache(k[:, :, None], np.array([9, 6], np.int32))
    paged = PagedCache(np.zeros((4, 3, 1, 4), np.float32), np.zeros((2, 3), np.int32), flat.lengths)
    records = FlatCache(np.zeros((2, 9, 1, 4), np.uint8), flat.lengths)
    groups = FlatCache(np.zeros((2, 9, 2, 4), np.float32), flat.lengths)
    for error, message, cache, options in (
        (ValueError, "'query_start' is 1, want 0 with a cache", flat, {"query_start": 1}),
        (
            TypeError,
            "'query_start' is an array .*, want 0 with",
            flat,
            {"query_start": flat.lengths},
        ),
        (TypeError, r"'query_start' is 0.5 \(float\), want 0 with a", paged, {"query_start": 0.5}),
        (ValueError, "'index_k_scale' has shape", flat, {"index_k_scale": k[:, :3, 0]}),
        (ValueError, "'index_k_scale' has shape", paged, {"index_k_scale": k[..., 0]}),
        (
            TypeError,
            r"'index_k\.data' has dtype uint8, want float32; .*'index_k_scale'$",
            records,
            {},
        ),
        (ValueError, r"'index_k\.data' has shape .* want \[B, S, 1, C\]", groups, {}),
        (ValueError, "'ends' has shape", paged, {"ends": np.zeros((2, 4), np.int32)}),
    ):
        with pytest.raises(error, match=rf"^indexer_topk: argument {message}"):
            indexer_topk(q, cache, weights, 3, **options)
    with pytest.raises(TypeError, match="indexer_logits: argument 'index_k' is FlatCache"):
        indexer_logits(q, flat, weights)


def test_a_traced_query_start_beside_a_cache(rng):
    q, k, weights = inputs(rng)
    flat = FlatCache(k[:, :, None], np.array([9, 6], np.int32))
    call = functools.partial(indexer_topk, q, flat, weights, 3)
    with pytest.raises(
        TypeError, match=r"'query_start' is an array .*, want 0 with a cache, whose"
    ):
        jax.jit(lambda start: call(query_start=start))(0)


def test_means_over_a_paged_cache(rng):
    q, _, weights = inputs(rng)
    paged = PagedCache.empty(4, 3, len(q), 3, 4, dtype=q.dtype)
    with pytest.raises(ValueError, match="'index_k' is PagedCache, want an array or a FlatCache"):
        indexer_block_topk(q, paged, weights, 2, block_size=2, pooling="mean")


Q, K_, W = (
    np.zeros((2, 3, 2, 4), np.float32),
    np.zeros((2, 5, 4), np.float32),
    np.zeros((2, 3, 2), np.float32),
)

ROWS = np.zeros((2, 3), np.int32)

NAMES = ("index_q", "index_k", "index_weights", "index_k_scale", "starts", "ends")


@pytest.mark.parametrize(
    "call", [indexer_logits, lambda *a, **o: indexer_topk(*a, 2, **o)], ids=["logits", "topk"]
)
@pytest.mark.parametrize(
    ("error", "name", "args", "options"),
    [
        (TypeError, "index_q", ([0.0], K_, W), {}),
        (ValueError, "index_q", (Q[0, 0], K_, W), {}),
        (TypeError, "index_q", (Q.astype(np.int32), K_, W), {}),
        (TypeError, "index_k", (Q, K_.astype(np.float16), W), {}),
        (ValueError, "index_k", (Q, K_[:1], W), {}),
        (ValueError, "index_k", (Q, K_[..., :3], W), {}),
        (ValueError, "index_k", (Q[0], K_, W), {}),
        (TypeError, "index_weights", (Q, K_, W.astype(np.int32)), {}),
        (ValueError, "index_weights", (Q, K_, W[..., :1]), {}),
        (TypeError, "index_k_scale", (Q, K_, W), {"index_k_scale": 1.0}),
        (ValueError, "index_k_scale", (Q, K_, W), {"index_k_scale": W[..., 0]}),
        (TypeError, "starts", (Q, K_, W), {"starts": W[..., 0]}),
        (ValueError, "starts", (Q, K_, W), {"starts": ROWS[:, :2]}),
        (ValueError, "ends", (Q, K_, W), {"ends": ROWS[0]}),
        (TypeError, "relu", (Q, K_, W), {"relu": 1}),
        (ValueError, "implementation", (Q, K_, W), {"implementation": "jnp"}),
    ],
)
def test_misuse(call, error, name, args, options):
    with pytest.raises(error, match=rf"^indexer_(logits|topk): argument '{name}' .*want"):
        call(*args, **options)


@pytest.mark.parametrize(
    ("error", "top_k"), [(ValueError, -1), (TypeError, 2.0), (TypeError, None)]
)
def test_misuse_of_top_k(error, top_k):
    with pytest.raises(error, match=r"^indexer_topk: argument 'top_k' .*want"):
        indexer_topk(Q, K_, W, top_k)


def test_requested_kernel_that_is_not_available():
    with pytest.raises(NotImplementedError, match=r"indexer_logits.*implementation='xla'"):
        indexer_logits(Q, K_, W, implementation="cuda")


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_one_wrong_axis_is_named(data):
    """If any axis of any argument is one too long, the error names an argument."""
    arrays = dict(zip(NAMES, (Q, K_, W, K_[..., 0], ROWS, ROWS), strict=True))
    name = data.draw(st.sampled_from(sorted(arrays)))
    axis = data.draw(st.integers(0, arrays[name].ndim - 1))
    # T of index_q and S of index_k are free. If they change, the error names another argument.
    shape = list(arrays[name].shape)
    shape[axis] += 1
    arrays[name] = np.zeros(shape, arrays[name].dtype)
    with pytest.raises(ValueError, match=r"^indexer_logits: argument '\w+' has shape"):
        indexer_logits(**arrays)
