"""Decoding with caches: it equals the forward pass."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support.compare import assert_matches
from support.decoders import (
    CONFIG,
    SHARING,
    B,
    T,
    attend,
    attention,
    decode,
    decode_in_chunks,
    decoder,
    hidden,
)
from support.marks import slow

from jax_dsa import nn
from jax_dsa.nn.cache import LayerCache
from jax_dsa.serving import pack_records, unpack_records

PAGE = 3


def empty_cache(model, capacity, *, paged, **options):
    """Returns a flat cache, or a paged one whose pages are shuffled."""
    if not paged:
        return model.init_cache(B, capacity, **options)
    cache = model.init_cache(B, capacity, page_size=PAGE, **options)
    table = cache.layers[0].kv.page_table
    order = np.random.default_rng(0).permutation(table.size)
    return cache.with_page_table(jnp.asarray(order, jnp.int32)[table])


@pytest.mark.parametrize(
    ("paged", "index_fp8"), [(True, True), slow(False, False), slow(False, True), slow(True, False)]
)
def test_cached_decode_equals_the_forward_pass(rng, paged, index_fp8):
    config = dataclasses.replace(
        SHARING, attention=dataclasses.replace(CONFIG, index_fp8=index_fp8)
    )
    model = decoder(config)
    tokens = jnp.asarray(rng.integers(0, 11, size=(B, T)), jnp.int32)
    want, _ = jax.jit(lambda t: model(t))(tokens)
    for chunks in ((T,), (9, 1, 1, 1)):
        got, cache = decode_in_chunks(model, tokens, empty_cache(model, T + 2, paged=paged), chunks)
        assert_matches(got, want, 1e-4, str(chunks))
        np.testing.assert_array_equal(cache.layers[0].lengths, [T, T])


@pytest.mark.parametrize("paged", [False, slow(True)])
def test_decode_from_fp8_records_equals_the_forward_pass_over_their_values(rng, paged, monkeypatch):
    wide = dataclasses.replace(CONFIG, kv_rank=512, rope_dim=64)
    model = decoder(dataclasses.replace(SHARING, attention=wide))
    tokens = jnp.asarray(rng.integers(0, 11, size=(B, T)), jnp.int32)
    exact, _ = jax.jit(lambda t: model(t))(tokens)
    cache = empty_cache(model, T + 2, paged=paged, fp8=True)
    got, cache = decode_in_chunks(model, tokens, cache, (9, 1, 1, 1))

    def stored_rows(kv):
        records = kv.pages[kv.page_table].reshape(B, -1, 1, 656) if paged else kv.data
        return unpack_records(records[:, :T], jnp.float32)

    # The forward pass gets the keys of the cache: a key close to the middle of two codes may round
    # to the other code if it is computed again.
    keys, exact_keys = [stored_rows(layer.kv) for layer in cache.layers], []
    project, cached = nn.MLA.project, iter(keys)

    def project_with_cached_keys(self, x, positions):
        p = project(self, x, positions)
        exact_keys.append(p.kv)
        return p._replace(kv=next(cached))

    monkeypatch.setattr(nn.MLA, "project", project_with_cached_keys)
    want, exact_keys = jax.jit(lambda t: (model(t)[0], exact_keys))(tokens)
    assert_matches(got, want, 1e-4)
    assert_matches(keys, exact_keys, 2**-4)  # Half a step of e4m3.
    again = [unpack_records(pack_records(x), x.dtype) for x in exact_keys]
    assert np.mean(np.stack(keys) != np.stack(again)) < 0.01
    assert np.abs(got - exact).max() > 1e-3


def test_paged_cache_shapes():
    cache = empty_cache(decoder(), 7, paged=True).layers[0]
    assert cache.kv.pages.shape == (B * 3, PAGE, 1, 12) and cache.kv.capacity == 9
    assert cache.index_k.shape == (B * 3, PAGE, CONFIG.index_dim)
    assert sorted(np.asarray(cache.kv.page_table).ravel()) == list(range(B * 3))
    with pytest.raises(ValueError, match=r"LayerCache\.empty: argument 'page_size' is 0"):
        LayerCache.empty(CONFIG, B, 7, page_size=0)


@pytest.mark.parametrize(
    "options", [{}, {"page_size": PAGE, "num_pages": 4}], ids=["flat", "paged"]
)
@pytest.mark.parametrize("kind", ["full", "shared"])
def test_a_layer_creates_its_cache(kind, options):
    layer = nn.DSAttention(CONFIG, kind, rngs=nnx.Rngs(0))
    want = LayerCache.empty(CONFIG, B, 7, indexer_type=kind, **options)
    jax.tree.map(np.testing.assert_array_equal, layer.init_cache(B, 7, **options), want)
    wide = dataclasses.replace(CONFIG, kv_rank=512, rope_dim=64)
    layer = nnx.eval_shape(lambda: nn.DSAttention(wide, kind, rngs=nnx.Rngs(0)))
    rows = jax.tree.leaves(layer.init_cache(B, 7, fp8=True, **options).kv)[0]
    assert rows.shape[-1] == 656


@pytest.mark.parametrize("paged", [{}, {"page_size": PAGE, "num_pages": 4}], ids=["flat", "paged"])
def test_misuse_of_init_cache(paged):
    """Messages name `init_cache` and the user's argument, also before the pages are computed."""
    layer, model = attention(), decoder()
    for op, init in (
        ("DSAttention.init_cache", layer.init_cache),
        ("DecoderLM.init_cache", model.init_cache),
        ("LayerCache.empty", functools.partial(LayerCache.empty, CONFIG)),
        ("DecoderCache.empty", functools.partial(nn.DecoderCache.empty, model.config)),
    ):
        for name, value, error in (
            ("batch", 2.0, TypeError),
            ("batch", -1, ValueError),
            ("capacity", "8", TypeError),
            ("capacity", -1, ValueError),
            ("fp8", "yes", TypeError),
        ):
            with pytest.raises(error, match=rf"^{op}: argument '{name}' is {value!r}"):
                init(**{"batch": 2, "capacity": 8, **paged, name: value})
        expected = rf"^{op}: the configuration has kv_rank \+ rope_dim = 12, want 576"
        with pytest.raises(ValueError, match=expected):
            init(2, 8, fp8=True, **paged)


def test_a_module_in_place_of_its_configuration():
    layer, model = attention(), decoder()
    with pytest.raises(TypeError, match=r"LayerCache.empty: .*'config' is DSAttention, want Atte"):
        LayerCache.empty(layer, B, 7)
    with pytest.raises(TypeError, match=r"DecoderCache.empty: .*'config' is DecoderLM, want Deco"):
        nn.DecoderCache.empty(model, B, 7)


def beyond_length(lengths, x):
    """Returns a mask of the tokens of `x` [B, S, ...] that lie beyond the lengths."""
    beyond = jnp.arange(x.shape[1]) >= lengths[:, None]
    return beyond.reshape(*beyond.shape, *(1,) * (x.ndim - 2))


def test_decode_of_requests_of_different_lengths(rng):
    """Each request continues from its own length."""
    model = decoder()
    tokens = jnp.asarray(rng.integers(0, 11, size=(B, T)), jnp.int32)
    want, _ = jax.jit(lambda t: model(t))(tokens)
    short, long = 4, 9
    full, cache = decode_in_chunks(model, tokens, model.init_cache(B, T), (T,))
    assert_matches(full, want, 1e-4)
    # Rows beyond a request's length are never read, so reducing the lengths is equivalent to a
    # shorter prefill. NaN in these rows shows any read.
    cut = jnp.array([short, long], jnp.int32)
    cache = jax.tree.map(
        lambda x: x if x.dtype == jnp.int32 else jnp.where(beyond_length(cut, x), jnp.nan, x),
        cache.with_lengths(cut),
    )
    new = jnp.stack([tokens[0, short : short + 3], tokens[1, long : long + 3]])
    got, cache = decode(model, new, cache)
    assert_matches(got, jnp.stack([want[0, short : short + 3], want[1, long : long + 3]]), 1e-4)
    np.testing.assert_array_equal(cache.layers[-1].lengths, [short + 3, long + 3])


def test_decode_with_a_quantised_indexer(rng):
    module, x = attention(index_fp8=True), hidden(rng)
    want, aux = attend(module, x)
    cache, got = LayerCache.empty(module.config, B, T + 2), []
    assert cache.index_k.dtype == jnp.float8_e4m3fn and cache.index_k_scale.shape == (B, T + 2)
    for chunk in jnp.split(x, 3, axis=1):
        out, cache = decode(module, chunk, cache)
        got.append(out)
    assert_matches(jnp.concatenate(got, 1), want, 1e-4)
    assert_matches(cache.index_k_scale[:, :T], aux.indexer.index_k_scale)


def test_fp8_records_in_a_cache(rng):
    """A record of 656 bytes holds rows of 512 + 64 numbers."""
    module = attention(kv_rank=512, rope_dim=64)
    x = hidden(rng)
    want, _ = attend(module, x)
    got, cache = decode(module, x, LayerCache.empty(module.config, B, T, fp8=True))
    assert cache.kv.data.shape == (B, T, 1, 656) and cache.kv.data.dtype == jnp.uint8
    assert 0 < np.abs(got - want).max() < 0.1 * np.abs(want).max()
    config = dataclasses.replace(SHARING, attention=module.config)
    model = nnx.eval_shape(lambda: nn.DecoderLM(config, rngs=nnx.Rngs(0)))
    for layer, kind in zip(model.init_cache(B, T, fp8=True).layers, SHARING.layers, strict=True):
        assert layer.kv.data.dtype == jnp.uint8 and (layer.index_k is None) == (kind == "shared")


def test_a_full_cache_drops_new_tokens(rng):
    module, x = attention(), hidden(rng)
    got, cache = decode(module, x, LayerCache.empty(CONFIG, B, T - 2))
    np.testing.assert_array_equal(cache.lengths, [T] * B)
    want, exact = decode(module, x[:, : T - 2], LayerCache.empty(CONFIG, B, T - 2))
    assert_matches(got[:, : T - 2], want)
    exact = exact._replace(kv=dataclasses.replace(exact.kv, lengths=cache.lengths))
    assert_matches(cache, exact)


@pytest.mark.parametrize(
    ("page_size", "index_fp8"), [(PAGE, True), slow(None, False), slow(PAGE, False)]
)
def test_rejected_draft_tokens_leave_nothing_behind(rng, page_size, index_fp8):
    """Each request goes back by a number of tokens of its own; the rejected ones were NaN."""
    module, x = attention(index_fp8=index_fp8), hidden(rng)
    lengths = jnp.array([4, 7], jnp.int32)
    cache = LayerCache.empty(module.config, B, T + 2, page_size=page_size)
    _, cache = decode(module, x[:, :4], cache)
    _, cache = decode(module, x[:, 4:8].at[0].set(jnp.nan).at[1, 3:].set(jnp.nan), cache)
    got, _ = decode(module, jnp.stack([x[0, 4:8], x[1, 7:11]]), cache.with_lengths(lengths))
    want, _ = attend(module, x)
    assert_matches(got, jnp.stack([want[0, 4:8], want[1, 7:11]]), 1e-4)
    with pytest.raises(ValueError, match=r"with_lengths: argument 'lengths' has shape \(1,\)"):
        cache.with_lengths(lengths[:1])


@pytest.mark.parametrize("page_size", [None, slow(PAGE)])
def test_tokens_that_fit_into_a_full_cache(rng, page_size):
    """Their outputs are those of a larger cache, also where a layer reads another layer's keys."""
    module, x = attention(), hidden(rng)
    sharing = attention(shares_keys=True)

    @jax.jit
    def both(x, cache, shared):
        out, cache, _ = module.decode(x, cache)
        more, shared, _ = sharing.decode(x, shared, kv=cache.kv)
        return (out, more), cache, shared

    results = []
    for capacity in (T - 3, T):
        cache = LayerCache.empty(CONFIG, B, capacity, page_size=page_size)
        shared = LayerCache.empty(sharing.config, B, capacity)
        _, cache, shared = both(x[:, : T - 5], cache, shared)
        results.append(both(x[:, T - 5 :], cache, shared)[0])
    few, all_tokens = (jax.tree.map(lambda y: y[:, :2], y) for y in results)
    assert_matches(few, all_tokens, 1e-5)


def test_page_tables_of_a_decoder():
    """They become int32, one array per layer, and errors name the argument."""
    cache = decoder().init_cache(B, 8, page_size=4)
    table = np.array([[1, 0], [3, 2]], np.int64)
    tables = [layer.kv.page_table for layer in cache.with_page_table(table).layers]
    assert all(x.dtype == jnp.int32 for x in tables)
    assert len({x.unsafe_buffer_pointer() for x in tables}) == len(tables)
    for wrong, error, message in (
        (table.tolist(), TypeError, "argument 'page_table' is list, want an array"),
        (table.astype(np.float32), TypeError, "argument 'page_table' has dtype float32"),
        (table[0], ValueError, r"'page_table' has shape \(2,\), want \[B, R\] with B=2"),
        (table[:1], ValueError, r"'page_table' has shape \(1, 2\), want \[B, R\] with B=2"),
    ):
        with pytest.raises(error, match=r"DecoderCache\.with_page_table: .*" + message):
            cache.with_page_table(wrong)
    with pytest.raises(ValueError, match=r"DecoderCache\.with_page_table: the cache is flat"):
        decoder().init_cache(B, 8).with_page_table(table)
