"""`indexer_block_topk` and `block_topk` against loops in float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from support.compare import assert_matches
from support.indexer import inputs, options_of, paged
from support.oracles import indexer as oracle

import jax_dsa
from jax_dsa import (
    FlatCache,
    PagedCache,
    block_topk,
    indexer_block_topk,
    indexer_logits,
    indexer_topk,
)
from jax_dsa.core import streaming
from jax_dsa.ops.indexer import indexer_selected_logits

BLOCKS = [
    {},
    {"local_blocks": 0},
    {"sink_blocks": 1, "local_blocks": 2},
    {"sink_blocks": 9, "local_blocks": 2**31 - 1},
]


@pytest.mark.full_optimization
@pytest.mark.parametrize("forced", BLOCKS, ids=["last", "none", "both", "all"])
@pytest.mark.parametrize("block_size", [1, 3, 2**31 - 1])
def test_selection(block_size, forced, rng):
    """The blocks are those of the logits, and equal those of `block_topk` bit for bit."""
    arrays, ranges = inputs(rng, S=11), options_of(rng, S=11)
    scale = {"index_k_scale": ranges["index_k_scale"]}
    options = {"block_size": block_size, **forced}
    both = {name: ranges[name] for name in ("starts", "ends")}
    for given, top_k in (({}, 13), ({"ends": ranges["ends"]}, 2), (both, 2)):
        indices, logits = indexer_block_topk(*arrays, top_k, **scale, **given, **options)
        exact = oracle.indexer_logits(*arrays, **scale, **given)
        starts = given.get("starts")
        expected, best, _ = oracle.block_topk(exact, top_k, starts=starts, **options)
        np.testing.assert_array_equal(indices, expected)
        assert_matches(logits, best.astype(np.float32), 1e-6)
        whole = indexer_logits(*arrays, **scale, **given)
        np.testing.assert_array_equal(indices, block_topk(whole, top_k, starts=starts, **options))


def test_ranges_of_logits(rng):
    """`block_topk` leaves out the logits that lie outside of `starts` and `ends`."""
    logits, ranges = rng.normal(size=(2, 5, 11)).astype(np.float32), options_of(rng, S=11)
    starts, ends = ranges["starts"], ranges["ends"]
    at = np.arange(11)
    for given in ({"ends": ends}, {"starts": starts}, {"starts": starts, "ends": ends}):
        seen = np.ones_like(logits, bool)
        if "starts" in given:
            seen &= at >= starts[..., None]
        if "ends" in given:
            seen &= at < ends[..., None]
        shown = np.where(seen, logits, -np.inf)
        expected, _, _ = oracle.block_topk(shown, 2, 3, starts=given.get("starts"))
        np.testing.assert_array_equal(block_topk(logits, 2, block_size=3, **given), expected)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_denormals_are_ordered(dtype, rng):
    """`block_topk` compares denormals exactly, which a CPU's float instructions do not."""
    tiny = np.finfo(np.float32) if dtype == np.float32 else ml_dtypes.finfo(dtype)
    ladder = np.arange(-50, 50).astype(dtype) * dtype(tiny.smallest_subnormal)
    logits = rng.permuted(np.tile(ladder, (2, 3, 1)), axis=2)
    logits[0, :, ::7] = np.array([np.nan, -np.nan, np.inf, -np.inf, -0.0], dtype)[np.arange(15) % 5]
    for block_size in (1, 3, 5):
        expected, _, _ = oracle.block_topk(logits.astype(np.float64), 4, block_size)
        np.testing.assert_array_equal(block_topk(logits, 4, block_size=block_size), expected)


@pytest.mark.full_optimization
def test_blocks_of_one_key_are_keys(rng):
    arrays, options = inputs(rng), options_of(rng)
    options["starts"] = np.zeros_like(options["starts"])
    got = indexer_block_topk(*arrays, 4, block_size=1, local_blocks=0, **options)
    jax.tree.map(np.testing.assert_array_equal, got, indexer_topk(*arrays, 4, **options))


@pytest.mark.full_optimization
def test_a_list_for_each_head(rng):
    q, k, _ = inputs(rng, S=14)
    options = {"block_size": 3, "relu": False, "is_causal": True, "query_start": np.array([9, 0])}
    indices, logits = indexer_block_topk(q, k, None, 2, per_head=True, **options)
    assert indices.shape == logits.shape == (2, 5, 3, 2)
    for j in range(3):
        one = indexer_block_topk(q[:, :, j : j + 1], k, None, 2, **options)
        assert_matches((indices[:, :, j], logits[:, :, j]), one, 1e-6)
    single = indexer_block_topk(q[0], k[0], None, 2, per_head=True, **options | {"query_start": 9})
    assert_matches(single, (indices[0], logits[0]), 1e-6)


def test_documents(rng):
    """No block crosses documents, and blocks count from the first key of the document."""
    q, k, weights = inputs(rng, B=1, T=14, S=14)
    ids = np.array([[3] * 5 + [1] * 2 + [3] * 7], np.int32)
    options = {"block_size": 2, "is_causal": True}
    indices, logits = indexer_block_topk(q, k, weights, 3, segment_ids=ids, **options)
    for start, end in ((0, 5), (5, 7), (7, 14)):
        own = slice(start, end)
        one = indexer_block_topk(q[:, own], k[:, own], weights[:, own], 3, **options)
        assert_matches((indices[:, own], logits[:, own]), one, 1e-6)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("block_size", [1, 4, 2**31 - 1])
def test_mean(block_size, dtype, rng):
    q, k, weights = inputs(rng, S=14, dtype=dtype)
    # A rounded mean should not depend on the order of the sum.
    k = np.asarray(rng.integers(-8, 9, k.shape) * np.float32(0.25), dtype)
    ends = rng.integers(-2, 17, size=(2, 5)).astype(np.int32)
    means = oracle.block_means(k, block_size)
    exact = oracle.indexer_logits(q, means, weights)
    for forced in BLOCKS:
        options = {"block_size": block_size, **forced}
        got = indexer_block_topk(q, k, weights, 3, pooling="mean", ends=ends, **options)
        expected = oracle.mean_block_topk(exact, 3, size=14, ends=np.clip(ends, 0, 14), **options)
        np.testing.assert_array_equal(got[0], expected[0])
        assert_matches(got[1], expected[1].astype(np.float32), 1e-5)


@pytest.mark.parametrize("pooling", ["max", "mean"])
def test_later_keys_do_not_change_a_selection(pooling, rng):
    """The last block of a sequence may grow."""
    q, k, weights = inputs(rng, T=10, S=10)
    options = {"block_size": 4, "pooling": pooling, "local_blocks": 0, "is_causal": True}
    whole = indexer_block_topk(q, k, weights, 3, **options)
    for n in (1, 6, 9):
        part = indexer_block_topk(q[:, :n], k[:, :n], weights[:, :n], 3, **options)
        np.testing.assert_array_equal(part[0], whole[0][:, :n])
        assert_matches(part[1], whole[1][:, :n], 1e-5)


def test_forced_blocks_come_before_an_infinite_logit():
    logits = jnp.array([[jnp.inf, 0, jnp.nan, 0, 1, 0]])
    np.testing.assert_array_equal(block_topk(logits, 1, block_size=2), [[2]])
    np.testing.assert_array_equal(block_topk(logits, 3, block_size=2), [[0, 2, -1]])
    np.testing.assert_array_equal(block_topk(logits, 1, block_size=2, local_blocks=0), [[0]])


@pytest.mark.parametrize("pooling", ["max", "mean"])
@pytest.mark.parametrize("per_head", [False, True])
def test_gradients(pooling, per_head, rng):
    """The gradient goes to the best key of a block, or to all keys of its mean."""
    q, k, weights = inputs(rng, T=4, S=10)
    weights = None if per_head else weights
    options = {"block_size": 4, "is_causal": True, "query_start": 5}
    options |= {"per_head": per_head, "pooling": pooling}
    indices, logits = indexer_block_topk(q, k, weights, 3, **options)
    live = np.isfinite(logits)
    g = np.where(live, rng.normal(size=indices.shape), 0).astype(np.float32)

    def loss(*arrays):
        return jnp.sum(jnp.where(live, indexer_block_topk(*arrays, 3, **options)[1], 0) * g)

    arrays = (q, k) if per_head else (q, k, weights)
    argnums = tuple(range(len(arrays)))
    got = jax.grad(lambda *x: loss(*x, *[None] * (3 - len(x))), argnums)(*arrays)

    def plain(q, k, weights):
        """Computes the same loss from the selected keys or blocks."""
        heads = range(3) if per_head else [slice(None)]
        total = 0.0
        for h in heads:
            own_q = q[:, :, h : h + 1] if per_head else q
            own, own_g = (x[:, :, h] if per_head else x for x in (indices, g))
            if pooling == "mean":
                k_pad = jnp.pad(k, ((0, 0), (0, 2), (0, 0))).reshape(2, 3, 4, -1)
                keys, at = k_pad.mean(2), own
            else:
                keys, at = k, np.zeros_like(own)
            z = jax.nn.relu(jnp.einsum("btjc,bsc->btjs", own_q, keys))
            z = z.sum(2) if weights is None else jnp.einsum("btjs,btj->bts", z, weights)
            if pooling == "max":
                seen = np.arange(10) <= 5 + np.arange(4)[:, None]
                blocks = jnp.where(seen, z, -jnp.inf)
                blocks = jnp.pad(blocks, ((0, 0), (0, 0), (0, 2)), constant_values=-jnp.inf)
                blocks = blocks.reshape(2, 4, 3, 4)
                first = np.argmax(blocks, -1) + 4 * np.arange(3)
                at = np.take_along_axis(first, np.maximum(own, 0), -1)
            picked = jnp.take_along_axis(z, np.maximum(at, 0), axis=-1)
            total += jnp.sum(picked * own_g)
        return total

    expected = jax.grad(lambda *x: plain(*x, *[None] * (3 - len(x))), argnums)(*arrays)
    assert_matches(got, expected, 1e-5)


def test_the_first_of_equal_keys_gets_the_gradient():
    q = jnp.ones((1, 1, 1, 2))
    k = jnp.asarray([[[1.0, 0.0], [0.0, 2.0], [2.0, 0.0], [0.0, 1.0]]])

    def loss(k):
        return indexer_block_topk(q, k, None, 1, block_size=4)[1].sum()

    np.testing.assert_array_equal(jax.grad(loss)(k)[0, :, 0], [0, 1, 0, 0])


def test_not_finite(rng):
    """NaN keeps its block from being selected, unless the block is forced; so does -inf."""
    nan, inf = np.nan, np.inf
    logits = np.array([[[1, nan, 3, 4, -inf, -inf, inf, 0, 2, -inf]]], np.float32)
    options = {"block_size": 2, "local_blocks": 0}
    np.testing.assert_array_equal(block_topk(logits, 4, **options)[0, 0], [1, 3, 4, -1])
    forced = block_topk(logits, 2, sink_blocks=1, **options)
    np.testing.assert_array_equal(forced[0, 0], [0, 3])  # An equal score: the first blocks.
    q, k = np.ones((1, 1, 1, 1), np.float32), logits[0, 0][None, :, None]
    indices, values = indexer_block_topk(q, k, None, 4, relu=False, **options)
    np.testing.assert_array_equal(indices[0, 0], [1, 3, 4, -1])
    np.testing.assert_array_equal(values[0, 0], [4, inf, 2, -inf])
    indices, values = indexer_block_topk(q, k, None, 3, relu=False, sink_blocks=1, **options)
    np.testing.assert_array_equal(indices[0, 0], [0, 1, 3])
    np.testing.assert_array_equal(values[0, 0], [nan, 4, inf])


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("pooling", ["max", "mean"])
def test_caches(pooling, is_causal, rng):
    """Rows behind the length do not matter, and queries are the last tokens."""
    q, k, weights = inputs(rng, B=4, T=3, S=24)
    lengths = np.array([24, 2, 9, 99], np.int32)
    held = np.minimum(lengths, 24)[:, None]
    seen = lengths[:, None] - 3 + np.arange(3) + 1 if is_causal else held
    ends = np.minimum(seen, held).astype(np.int32) * np.ones((1, 3), np.int32)
    options = {"block_size": 4, "pooling": pooling}
    expected = indexer_block_topk(q, k, weights, 3, ends=ends, **options)
    dirty = np.where(np.arange(24) < held, 1, np.nan).astype(np.float32)[..., None] * k
    cache = FlatCache(dirty[:, :, None], lengths)
    assert_matches(
        indexer_block_topk(q, cache, weights, 3, is_causal=is_causal, **options), expected, 1e-6
    )
    if pooling == "max":
        pool, _, table, mapped = paged(rng, dirty, 4)
        cache = PagedCache(pool[:, :, None], table, lengths)
        got = indexer_block_topk(q, cache, weights, 3, is_causal=is_causal, **options)
        logits = np.asarray(indexer_logits(q, k, weights, ends=ends))
        expected = oracle.block_topk(np.where(mapped[:, None], logits, -np.inf), 3, 4)
        np.testing.assert_array_equal(got[0], expected[0])


@pytest.mark.full_optimization
@pytest.mark.parametrize("pooling", ["max", "mean"])
def test_workspace_is_bounded(pooling):
    B, T, J, C, S, K = 2, 4096, 4, 8, 8192, 16
    shapes = [(B, T, J, C), (B, S, C)]

    def loss(q, k):
        options = {"block_size": 16, "is_causal": True, "pooling": pooling}
        _, logits = indexer_block_topk(q, k, None, K, **options)
        return jnp.sum(jnp.where(logits > -jnp.inf, logits, 0))

    arrays = [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes]
    compiled = jax.jit(jax.value_and_grad(loss, argnums=(0, 1))).lower(*arrays).compile()
    temporaries = compiled.memory_analysis().temp_size_in_bytes
    assert temporaries < 2 * streaming.BUDGET
    assert temporaries < B * T * S * 4


@pytest.mark.parametrize("pooling", ["max", "mean"])
@pytest.mark.parametrize("empty", ["B", "T", "J", "S"])
def test_empty_axes(empty, pooling, rng):
    arrays = [jnp.asarray(x) for x in inputs(rng, **{empty: 0})]
    options = {"block_size": 2, "pooling": pooling}
    indices, logits = indexer_block_topk(*arrays, 3, **options)
    assert indices.shape == logits.shape == (*arrays[0].shape[:2], 3)
    grads = jax.grad(lambda *a: indexer_block_topk(*a, 3, **options)[1].sum(), argnums=(0, 1, 2))(
        *arrays
    )
    for g, x in zip(grads, arrays, strict=True):
        np.testing.assert_array_equal(g, np.zeros(x.shape))
    whole = jnp.zeros((*arrays[0].shape[:2], arrays[1].shape[1]))
    assert block_topk(whole, 3, block_size=2).shape == indices.shape


def test_weights_of_one(rng):
    """None has the effect of ones."""
    q, k, weights = inputs(rng)
    ones, slots = np.ones_like(weights), np.zeros((2, 5, 1), np.int32)
    attention = np.ones((2, 5, 2, 8), np.float32), np.ones((2, 9, 1, 8), np.float32)
    for call in (
        lambda w: indexer_selected_logits(q, k, w, slots),
        lambda w: jax_dsa.dense_indexer_kl_loss(q, k, w, *attention),
        lambda w: indexer_logits(q, k, w),
        lambda w: indexer_topk(q, k, w, 3),
        lambda w: indexer_block_topk(q, k, w, 2, block_size=3),
    ):
        jax.tree.map(np.testing.assert_array_equal, call(None), call(ones))
    got, expected = (
        jax.grad(lambda q, k, w=w: indexer_topk(q, k, w, 3)[1].sum(), argnums=(0, 1))(q, k)
        for w in (None, ones)
    )
    jax.tree.map(np.testing.assert_array_equal, got, expected)


@pytest.mark.parametrize(
    ("error", "name", "options"),
    [
        (ValueError, "block_size", {"block_size": 0}),
        (TypeError, "block_size", {"block_size": 2.0}),
        (ValueError, "top_k", {"top_k": -1}),
        (ValueError, "sink_blocks", {"sink_blocks": -1}),
        (TypeError, "local_blocks", {"local_blocks": True}),
        (TypeError, "per_head", {"per_head": 1}),
        (ValueError, "index_weights", {"per_head": True}),
        (ValueError, "pooling", {"pooling": "sum"}),
        (ValueError, "starts", {"pooling": "mean", "starts": np.zeros((2, 5), np.int32)}),
        (ValueError, "segment_ids", {"pooling": "mean", "segment_ids": np.zeros((2, 5))}),
        (ValueError, "index_k_scale", {"pooling": "mean", "index_k_scale": np.ones((2, 9))}),
    ],
)
def test_misuse(error, name, options, rng):
    q, k, weights = inputs(rng)
    with pytest.raises(error, match=rf"^indexer_block_topk: argument '{name}' .*want"):
        indexer_block_topk(q, k, weights, **{"top_k": 2, "block_size": 2, **options})


def test_misuse_of_pages(rng):
    q, k, weights = inputs(rng, S=8)
    pool, _, table, _ = paged(rng, k, 4)
    cache = PagedCache(pool[:, :, None], table, np.full(2, 8))
    with pytest.raises(ValueError, match="argument 'index_k' is PagedCache, want an array or a"):
        indexer_block_topk(q, cache, weights, 2, block_size=2, pooling="mean")
    with pytest.raises(NotImplementedError, match="indexer_block_topk: gradients through a page"):
        jax.grad(lambda q: indexer_block_topk(q, cache, weights, 2, block_size=2)[1].sum())(q)
    with pytest.raises(NotImplementedError, match=r"^indexer_block_topk: .*cuda"):
        indexer_block_topk(q, k, weights, 2, block_size=2, implementation="cuda")
    with pytest.raises(
        ValueError, match=r"^block_topk: argument 'logits' has shape .* want \[B, T"
    ):
        block_topk(np.zeros(3), 2, block_size=2)
    with pytest.raises(NotImplementedError, match=r"^block_topk: .*cuda"):
        block_topk(np.zeros((1, 3, 4), np.float16), 2, block_size=2, implementation="cuda")


def test_exported_names():
    assert jax_dsa.block_topk is block_topk
    assert jax_dsa.indexer_block_topk is indexer_block_topk
