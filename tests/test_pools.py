"""Attention layers whose indexer selects pools of tokens, as in GLM-5.3-Flash."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support.compare import assert_matches
from support.marks import slow
from support.oracles import pools as oracle
from support.published_layers import (
    PACKED,
    POOLED,
    SEGMENT_IDS,
    VARIANT,
    B,
    M,
    T,
    hidden,
    layer,
)

from jax_dsa import nn

SIZE = POOLED.index_pool


def exact(module):
    """Returns a layer's parameters in float64."""
    params = nnx.to_pure_dict(nnx.state(module, nnx.Param))
    return jax.tree.map(lambda x: np.asarray(x, np.float64), params)


def documents():
    """Yields each packed document as (sequence, first token, end)."""
    for b, row in enumerate(PACKED):
        ends = np.cumsum([length for _, length in row])
        yield from ((b, int(end) - length, int(end)) for end, (_, length) in zip(ends, row))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"index_tail": False, "index_norm_eps": 0.1},
        {"index_pool": 1, "top_k": 5},
        {"index_pool": 3, "top_k": 6, "query_chunk": 1},
        {"index_pool": 40, "top_k": 40},
    ],
    ids=["defaults", "without tail", "of one token", "of three tokens", "longer than a sequence"],
)
def test_a_layer_matches_the_oracle(rng, changes, packed):
    """Also in the loss, which is the mean over queries that see a complete pool."""
    config = dataclasses.replace(POOLED, **changes)
    module, x = layer(rng, config), hidden(rng)
    ids = SEGMENT_IDS if packed else None
    y, aux = jax.jit(lambda x: module(x, segment_ids=ids))(x)
    p, losses = exact(module), []
    for b, start, end in documents() if packed else ((b, 0, T) for b in range(B)):
        want = oracle.attention(p, config, np.asarray(x[b, start:end], np.float64))
        assert_matches(y[b, start:end], want.out.astype(np.float32), 1e-4)
        first = start // config.index_pool
        for t, pools in enumerate(want.pools):
            found = np.asarray(aux.indices[b, start + t])
            assert found[found >= 0].tolist() == [first + i for i in pools]
        losses += want.kl
    np.testing.assert_allclose(aux.kl, np.mean(losses) if losses else 0, rtol=1e-4)


@pytest.mark.parametrize("packed", [slow(False), True])
def test_the_warm_up_equals_the_sparse_stage_with_all_pools(rng, packed):
    """Attention is dense in both. The gradients are those of the output and of the loss."""
    module, x = layer(rng, dataclasses.replace(POOLED, top_k=32)), hidden(rng)
    graph, params = nnx.split(module)

    @functools.partial(jax.jit, static_argnames="sparse")
    def run(params, x, sparse):
        def loss(params, x):
            ids = SEGMENT_IDS if packed else None
            y, aux = nnx.merge(graph, params)(x, segment_ids=ids, sparse=sparse)
            return jnp.sin(y).sum() + aux.kl, (y, aux.lse, aux.kl)

        return jax.value_and_grad(loss, (0, 1), has_aux=True)(params, x)

    assert_matches(run(params, x, sparse=False), run(params, x, sparse=True), 1e-4)
    assert module(x, sparse=False)[1].indices is None


def test_the_loss_has_the_gradients_of_finite_differences(rng):
    """Each parameter of the indexer is moved along a random direction."""
    module, x = layer(rng, POOLED), hidden(rng)
    graph, params = nnx.split(module)
    grads = jax.jit(jax.grad(lambda p: nnx.merge(graph, p)(x, segment_ids=SEGMENT_IDS)[1].kl))(
        params
    )
    grads = nnx.to_pure_dict(grads)
    assert all(not np.any(leaf) for leaf in jax.tree.leaves(grads["mla"]))
    p = exact(module)

    def loss():
        losses = []
        for b, start, end in documents():
            losses += oracle.attention(p, POOLED, np.asarray(x[b, start:end], np.float64)).kl
        return np.mean(losses)

    index = p["indexer"]
    places = [(index, "position_bias", grads["indexer"]["position_bias"])]
    places += [(index[n], "kernel", grads["indexer"][n]["kernel"]) for n in ("wk", "wg", "wq")]
    places += [(index["weights"], "kernel", grads["indexer"]["weights"]["kernel"])]
    places += [(index["k_norm"], n, grads["indexer"]["k_norm"][n]) for n in ("scale", "bias")]
    for where, name, gradient in places:
        old, direction = where[name], rng.normal(size=where[name].shape)
        moved = []
        for step in (1e-6, -1e-6):
            where[name] = old + step * direction
            moved.append(loss())
        where[name] = old
        want = (moved[0] - moved[1]) / 2e-6
        got = float((np.asarray(gradient, np.float64) * direction).sum())
        np.testing.assert_allclose(got, want, rtol=2e-3, atol=1e-5, err_msg=name)


def test_without_the_tail_the_first_queries_attend_to_nothing(rng):
    module, x = layer(rng, dataclasses.replace(POOLED, index_tail=False)), hidden(rng)
    y, aux = module(x)
    assert not np.any(y[:, : SIZE - 1]) and np.all(np.any(np.asarray(y[:, SIZE - 1 :]), -1))
    assert np.all(aux.indices[:, : SIZE - 1] == -1) and np.all(aux.indices[:, SIZE - 1, 0] == 0)
    assert np.all(np.isneginf(aux.lse[:, : SIZE - 1]))
    gradient = jax.grad(lambda x: jnp.sum(jnp.sin(module(x)[0])))(x)
    assert np.isfinite(gradient).all()


def test_a_shared_layer_takes_pools(rng):
    """It expands them to its own tokens. Pools that a query does not see are empty slots."""
    full = layer(rng, POOLED)
    shared = nn.DSAttention(POOLED, "shared", rngs=nnx.Rngs(1))
    nnx.update(shared.mla, nnx.state(full.mla))
    x = hidden(rng)
    want, aux = full(x, segment_ids=SEGMENT_IDS)
    got, again = shared(x, indices=aux.indices, segment_ids=SEGMENT_IDS)
    assert_matches(got, want, 1e-5)
    assert again.kl is None and again.indexer is None
    everything = jnp.broadcast_to(jnp.arange(-1, T // SIZE + 3, dtype=jnp.int32), (B, T, 11))
    _, aux = shared(x, indices=everything)
    for t in range(T):
        found = np.asarray(aux.indices[0, t])
        assert found[found >= 0].tolist() == list(range((t + 1) // SIZE))


def test_documents_share_no_pool(rng):
    """A document whose tokens are NaN changes nothing for the others."""
    module, x = layer(rng, POOLED), hidden(rng)
    want, _ = module(x, segment_ids=SEGMENT_IDS)
    for b, start, end in documents():
        got, _ = module(x.at[b, start:end].set(jnp.nan), segment_ids=SEGMENT_IDS)
        kept = np.ones((B, T), bool)
        kept[b, start:end] = False
        np.testing.assert_array_equal(got[kept], want[kept])


def test_a_key_of_nan_stays_in_its_pool(rng):
    """It is seen by queries of its own pool only, because NaN is never selected."""
    module, x = layer(rng, POOLED), hidden(rng)
    bad = 9
    want, got = module(x)[0], module(x.at[:, bad].set(jnp.nan))[0]
    np.testing.assert_array_equal(got[:, :bad], want[:, :bad])
    assert np.isnan(got[:, bad:11]).all() and np.isfinite(got[:, 11:]).all()


@pytest.mark.parametrize("page", [slow(None), 4, slow(8)])
@pytest.mark.parametrize("seed", [0, slow(1)])
def test_steps_with_padding_rollback_and_new_requests(seed, page):
    """Checks random schedules against the forward pass over the tokens that each request kept.

    Each step appends some tokens and padding, and then sets each length back, sometimes to 0 or to
    any multiple of the pool. The padding and the tokens that are dropped are NaN, so that any later
    read of them shows.
    """
    rng = np.random.default_rng(seed)
    batch, length, capacity, most = 4, 6, 48, 5
    module = layer(rng, POOLED)
    forward = jax.jit(lambda x: module(x)[0])
    step = jax.jit(lambda x, cache, counts: module.decode(x, cache, counts=counts))
    cache = module.init_cache(batch, capacity, max_rollback=most, page_size=page)
    lengths, longest = np.zeros((2, batch), int)
    kept = np.zeros((batch, capacity, M), np.float32)
    for _ in range(14):
        counts = rng.integers(0, length + 1, batch)
        longest = np.maximum(np.where(lengths, longest, 0), lengths + counts)
        after = rng.integers(np.maximum(0, longest - most), lengths + counts + 1)
        far = rng.integers(0, lengths + counts + 1) // SIZE * SIZE
        after = np.where(rng.random(batch) < 0.2, far, after)
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
            assert np.all(indices[b, counts[b] :] == -1)
        # After a jump, the rings begin at the new length.
        longest = np.where(after < longest - most, after, longest)
        lengths = after
        cache = cache.with_lengths(jnp.asarray(lengths))


def test_an_unsupported_length_gives_nan_until_a_new_request(rng):
    module, x = layer(rng, POOLED), hidden(rng, 6, 14, M)
    step = jax.jit(lambda x, cache: module.decode(x, cache))
    cache = module.init_cache(6, 64, max_rollback=3)
    want, cache, _ = step(x, cache)
    # Back by 3 tokens, to a pool's end, by 9 tokens, forward by 1 token, and below 0.
    cache = cache.with_lengths(jnp.array([11, 4, 5, 15, -1, -4]))
    wrong = [False, False, True, True, True, True]
    for _ in range(2):  # The lengths of the second step have other remainders.
        y, cache, _ = step(x, cache)
        np.testing.assert_array_equal(np.isnan(y).any((1, 2)), wrong)
        np.testing.assert_array_equal(np.isnan(y).all((1, 2)), wrong)
    cache = cache.with_lengths(jnp.array([0, 0, 0, 16, 8, 0]))
    y, cache, _ = step(x, cache)
    np.testing.assert_array_equal(np.isnan(y).any((1, 2)), [False] * 3 + [True] * 2 + [False])
    assert_matches(y[:3], want[:3], 1e-5)


@pytest.mark.slow
def test_tokens_that_lacked_a_page_come_again(rng):
    """They did not count, so the open pool does not have them."""
    module, x = layer(rng, POOLED), hidden(rng, 1, 30, M)
    want, _ = module(x)
    cache = module.init_cache(1, 32, page_size=4, num_pages=8, max_rollback=0)
    table = np.full((1, 8), -1, np.int32)
    table[0, :3] = 5, 0, 3
    paged = lambda cache: nn.DecoderCache((cache,)).with_page_table(table).layers[0]  # noqa: E731
    first, cache, _ = module.decode(x[:, :10], paged(cache))
    _, cache, _ = module.decode(x[:, 10:], cache)
    assert cache.lengths.tolist() == [12]
    table[0, 3:] = 1, 2, 4, 6, 7
    rest, _, _ = module.decode(x[:, 12:], paged(cache))
    assert_matches(first, want[:, :10], 1e-4)
    assert_matches(rest, want[:, 12:], 1e-4)


@pytest.mark.slow
def test_a_request_may_begin_on_pages_of_another_one(rng):
    """A shared prefix of whole pools needs no token before the pooling."""
    module, x = layer(rng, POOLED), hidden(rng, 1, T, M)
    want, _ = module(x)
    cache = module.init_cache(2, 32, page_size=4)
    rows = jnp.concatenate([x, jnp.full_like(x, jnp.nan)])
    _, cache, _ = module.decode(rows, cache, counts=jnp.array([T, 0], jnp.int32))
    table = np.array(cache.kv.page_table)
    table[1, :2] = table[0, :2]
    cache = nn.DecoderCache((cache,)).with_page_table(table).with_lengths(np.array([0, 8]))
    rest = jnp.broadcast_to(x[:, 8:], (2, T - 8, M))
    y, _, _ = module.decode(rest, cache.layers[0], counts=jnp.array([0, T - 8], jnp.int32))
    assert_matches(y[1], want[0, 8:], 1e-4)


@pytest.mark.parametrize(
    "changes",
    [
        {"index_hadamard": True},
        {"index_fp8": True, "index_hadamard": True},
        slow({"dtype": jnp.bfloat16}),
        slow({"sinks": True, "gate": True, "q_rank": None, "bias": True, "log_scaling": True}),
        slow({"rope_dim": 4}),
    ],
    ids=str,
)
def test_variants_decode_what_they_compute_at_once(rng, changes):
    module, x = layer(rng, dataclasses.replace(POOLED, **changes)), hidden(rng)
    x = x.astype(module.config.dtype)
    want, aux = jax.jit(lambda x: module(x))(x)
    step = jax.jit(lambda x, cache: module.decode(x, cache))
    cache, found, selections, start = module.init_cache(B, T), [], [], 0
    for n in (7, 1, 2, 1, T - 11):
        y, cache, indices = step(x[:, start : start + n], cache)
        found.append(y)
        selections.append(indices)
        start += n
    tolerance = 0.05 if module.config.dtype == jnp.bfloat16 else 1e-4
    assert_matches(jnp.concatenate(found, 1), want, tolerance)
    if tolerance < 0.01:
        np.testing.assert_array_equal(jnp.concatenate(selections, 1), aux.indices)


def test_hadamard_changes_no_score(rng):
    plain, x = layer(rng, POOLED), hidden(rng)
    other = nn.DSAttention(dataclasses.replace(POOLED, index_hadamard=True), rngs=nnx.Rngs(0))
    nnx.update(other, nnx.state(plain))
    assert_matches(other(x)[1].kl, plain(x)[1].kl, 1e-4)


def test_caches_store_one_key_per_pool():
    flat = nn.LayerCache.empty(POOLED, 2, 30, max_rollback=7)
    assert flat.index_k.shape == (2, 7, 8) and flat.open_pool.values.shape == (2, 10, 8)
    paged = nn.LayerCache.empty(POOLED, 2, 30, page_size=8)
    assert paged.index_k.shape == (8, 2, 8) and paged.kv.pages.shape[:2] == (8, 8)
    assert nn.LayerCache.empty(POOLED, 2, 30, indexer_type="shared").open_pool is None
    assert nn.LayerCache.empty(VARIANT, 2, 30).open_pool is None


@pytest.mark.slow
def test_a_decoder_generates_with_pools(rng):
    config = nn.DecoderConfig(
        POOLED, vocab=11, num_layers=3, mlp_dim=24, indexer_types=("full", "shared", "full")
    )
    model = nn.DecoderLM(config, rngs=nnx.Rngs(0))
    tokens = jnp.asarray(rng.integers(0, 11, size=(B, T)), jnp.int32)
    want, found = jax.jit(lambda t: model(t))(tokens)
    step = jax.jit(lambda t, cache: model.decode(t, cache, return_indices=True))
    cache, start, logits = model.init_cache(B, 32, page_size=4, max_rollback=2), 0, []
    for n in (10, 1, 1, 5, T - 17):
        out, cache, _ = step(tokens[:, start : start + n], cache)
        # Two rejected draft tokens.
        _, drafted, _ = step(tokens[:, :2], cache)
        cache = drafted.with_lengths(cache.lengths)
        logits.append(out)
        start += n
    assert_matches(jnp.concatenate(logits, 1), want, 1e-4)
    again, replayed = jax.jit(lambda t, s: model(t, indices=s))(tokens, [a.indices for a in found])
    assert_matches(again, want, 1e-5)
    assert [aux.kl is None for aux in replayed] == [False, True, False]


def test_invalid_arguments_raise(rng):
    for changes, message in (
        ({"index_pool": 5}, "index_pool is 5, expected a divisor of top_k = 12"),
        ({"index_rope_dim": 4}, "index_rope_dim is 4, expected 0 with index_pool = 4"),
        ({"index_pool": 0}, "'index_pool' is 0, want int in 1"),
    ):
        with pytest.raises(ValueError, match=f"AttentionConfig: .*{message}"):
            dataclasses.replace(POOLED, **changes)
    for changes in ({"index_pool": 2.0}, {"index_pool": True}, {"index_tail": 1}):
        with pytest.raises(TypeError, match=r"AttentionConfig: argument 'index_.* is "):
            dataclasses.replace(POOLED, **changes)
    module, x = layer(rng, POOLED), hidden(rng)
    message = r"DSAttention.init_cache: argument 'page_size' is 6, want a multiple of .* = 4"
    with pytest.raises(ValueError, match=message):
        module.init_cache(B, 32, page_size=6)
    with pytest.raises(ValueError, match="init_cache: argument 'max_rollback' is -1, want int in"):
        module.init_cache(B, 32, max_rollback=-1)
    cache, plain = module.init_cache(B, 32), nn.LayerCache.empty(VARIANT, B, 32)
    for wrong, error, message in (
        (cache._replace(open_pool=None), ValueError, "'cache.open_pool' is 'None', want given"),
        (cache._replace(open_pool=plain), TypeError, "'cache.open_pool' is LayerCache, want Open"),
        (cache._replace(index_k=plain.index_k), ValueError, r"'cache.index_k' has .*W=8 \(from "),
        (
            cache._replace(open_pool=cache.open_pool._replace(gates=None)),
            ValueError,
            "'cache.open_pool.gates' is 'None', want given in this layer",
        ),
        (
            cache._replace(open_pool=cache.open_pool._replace(longest=jnp.zeros(3, jnp.int32))),
            ValueError,
            r"'cache.open_pool.longest' has shape \(3,\), want \[B\] with B=2",
        ),
        (
            cache._replace(
                open_pool=cache.open_pool._replace(
                    values=jnp.zeros((B, 2, 8)), gates=jnp.zeros((B, 2, 8))
                )
            ),
            ValueError,
            r"'cache.open_pool.values' has shape \(2, 2, 8\), want \[B, R, 8\] with R of at least",
        ),
    ):
        with pytest.raises(error, match=f"DSAttention.decode: argument {message}"):
            module.decode(x, wrong)
