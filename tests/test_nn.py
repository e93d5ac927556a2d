"""Rotary functions, `DSAttention` and `DecoderLM`."""

from __future__ import annotations

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support.compare import assert_matches
from support.models import ATTENTION, DECODER
from support.oracles import nn as oracle

import jax_dsa
from jax_dsa import nn, training
from jax_dsa.nn.cache import LayerCache
from jax_dsa.serving import pack_records, unpack_records
from jax_dsa.training.remat import RESIDUALS, SELECTION, remat_policy

B, T, M = 2, 12, ATTENTION.model_dim
CONFIG = ATTENTION
# Four layers. The first and the last have an indexer.
SHARING = dataclasses.replace(DECODER, num_layers=4, indexer_types=("full", "shared", "shared"))


def hidden(rng, *shape):
    return jnp.asarray(rng.normal(size=shape or (B, T, M)), jnp.float32)


def positions(start=0):
    return jnp.broadcast_to(jnp.arange(start, start + T, dtype=jnp.int32), (B, T))


@functools.cache
def attention(**changes):
    return nn.DSAttention(dataclasses.replace(CONFIG, **changes), rngs=nnx.Rngs(0))


@functools.cache
def decoder(config=DECODER):
    return nn.DecoderLM(config, rngs=nnx.Rngs(0))


def attend(module, x, sparse=True):
    return jax.jit(lambda x: module(x, sparse=sparse))(x)


def decode(module, x, cache):
    """Returns the output for the next tokens, and the cache with these tokens in it."""
    return jax.jit(lambda x, cache: module.decode(x, cache)[:2])(x, cache)


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_rope_rotates_complex_numbers(rng, layout):
    x = rng.normal(size=(B, T, 3, 8)).astype(np.float32)
    first, second = (x[..., :4], x[..., 4:]) if layout == "half" else (x[..., ::2], x[..., 1::2])
    rotation = np.exp(1j * np.arange(5, 5 + T)[:, None, None] * 100.0 ** (-np.arange(4) / 4))
    z = (first + 1j * second) * rotation
    got = np.asarray(nn.rope(x, positions(5), base=100.0, layout=layout))
    got = (got[..., :4], got[..., 4:]) if layout == "half" else (got[..., ::2], got[..., 1::2])
    np.testing.assert_allclose(got[0] + 1j * got[1], z, atol=1e-5)


def test_rope_layouts_differ_by_a_permutation_only(rng):
    x = hidden(rng, B, T, 8)
    order = np.array([0, 4, 1, 5, 2, 6, 3, 7])  # Pairs of "half" become neighbours.
    half = nn.rope(x, positions(), layout="half")
    assert_matches(half[..., order], nn.rope(x[..., order], positions(), layout="interleaved"))
    assert np.abs(half - nn.rope(x, positions(), layout="interleaved")).max() > 0.1


def test_rope_scores_depend_only_on_distance(rng):
    q, k = hidden(rng, B, T, 8), hidden(rng, B, T, 8)
    for layout in ("half", "interleaved"):
        near, far = (
            jnp.einsum("btc,bsc->bts", *(nn.rope(x, positions(p), layout=layout) for x in (q, k)))
            for p in (0, 1000)
        )
        assert_matches(near, far, 1e-3)


def test_hadamard_is_orthogonal():
    h = np.asarray(nn.hadamard(jnp.eye(16)))
    np.testing.assert_allclose(h @ h.T, np.eye(16), atol=1e-6)
    np.testing.assert_allclose(np.abs(h), 0.25, rtol=1e-6)


def test_invalid_arguments_raise():
    x = jnp.zeros((B, T, 6))
    with pytest.raises(
        ValueError, match="'layout' is 'whole', expected one of \\('half', 'interleaved'"
    ):
        nn.rope(x, positions(), layout="whole")
    with pytest.raises(ValueError, match="expected an even last axis"):
        nn.rope(x[..., :5], positions())
    with pytest.raises(ValueError, match="expected a power of two as the last axis"):
        nn.hadamard(x)
    with pytest.raises(ValueError, match="rope_dim is 3, expected even"):
        dataclasses.replace(CONFIG, rope_dim=3)
    with pytest.raises(ValueError, match="index_rope_dim is 10, expected at most index_dim = 8"):
        dataclasses.replace(CONFIG, index_rope_dim=10)
    with pytest.raises(ValueError, match="index_dim is 6, expected a power of two"):
        dataclasses.replace(CONFIG, index_dim=6, index_hadamard=True)
    for types in ((), ("shared", "full"), ("full", "none"), "full", ["full"]):
        with pytest.raises(ValueError, match="expected a tuple of 'full' and 'shared' that"):
            dataclasses.replace(DECODER, indexer_types=types)
    x = jnp.zeros((B, T, M))
    for name in ("positions", "segment_ids"):
        with pytest.raises(ValueError, match=rf"DSAttention: argument '{name}' has shape \(12,\)"):
            attention()(x, **{name: jnp.zeros(T, jnp.int32)})
    with pytest.raises(ValueError, match="'indices' is given, expected None with sparse=False"):
        attention()(x, indices=jnp.zeros((B, T, 1), jnp.int32), sparse=False)
    shared = nn.DSAttention(CONFIG, "shared", rngs=nnx.Rngs(0))
    cache = LayerCache.empty(CONFIG, B, T, indexer_type="shared")
    for run in (lambda: shared(x), lambda: shared.decode(x, cache)):
        with pytest.raises(ValueError, match="'indices' is None, expected a selection"):
            run()
    with pytest.raises(ValueError, match="'indexer_type' is 'none', expected 'full' or 'shared'"):
        nn.DSAttention(CONFIG, "none", rngs=nnx.Rngs(0))


def index_logits(module, x):
    @jax.jit
    def run(x):
        p = module.mla.project(x, positions())
        index = module.indexer(x, p.q_latent, positions())
        return jax_dsa.indexer_logits(**index._asdict())

    return run(x)


def test_hadamard_and_fp8_keep_the_indexer_scores(rng):
    x = hidden(rng)
    plain, transformed = (attention(index_hadamard=h) for h in (False, True))
    want = index_logits(plain, x)
    assert_matches(index_logits(transformed, x), want, 1e-4)
    got = index_logits(attention(index_fp8=True, index_hadamard=True), x)
    assert 0 < np.abs(got - want).max() < 0.1 * np.abs(want).max()


def test_the_indexer_passes_no_gradient_to_its_inputs(rng):
    module, x = attention(), hidden(rng)
    latent = hidden(rng, B, T, CONFIG.q_rank)

    @jax.jit
    def total(x, latent):
        index = module.indexer(x, latent, positions())
        return sum(jnp.sin(y).sum() for y in index if y is not None)

    for grad in jax.grad(total, argnums=(0, 1))(x, latent):
        assert (np.asarray(grad) == 0).all()


def test_with_all_keys_selected_both_forms_agree(rng):
    x = hidden(rng)
    module = attention(top_k=T)
    (sparse, aux), (dense, dense_aux) = attend(module, x), attend(module, x, sparse=False)
    assert_matches(sparse, dense, 1e-4)
    assert_matches(aux.lse, dense_aux.lse, 1e-4)
    assert_matches(aux.kl, dense_aux.kl, 1e-4)
    assert dense_aux.indices is None and aux.indices.shape == (B, T, T)


def test_values_wider_than_keys(rng):
    x = hidden(rng)
    module = attention(top_k=T, v_dim=14)
    assert_matches(attend(module, x)[0], attend(module, x, sparse=False)[0], 1e-4)


def selection_mask(indices):
    """Returns the mask [B, T, T] of selected keys."""
    return (np.asarray(indices)[..., None] == np.arange(T)).any(-2)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {
            "rope_base": 100.0,
            "rope_layout": "half",
            "index_rope_layout": "interleaved",
            "norm_eps": 0.1,
        },
        {"index_hadamard": True, "index_rope_dim": 8},
    ],
    ids=["defaults", "changed", "hadamard"],
)
@pytest.mark.parametrize("sparse", [True, False])
def test_decoder_matches_numpy(rng, changes, sparse):
    """The parameters are random, so that norms have scales and biases other than 1 and 0."""
    config = dataclasses.replace(
        DECODER,
        attention=dataclasses.replace(CONFIG, **changes),
        num_layers=3,
        indexer_types=("full", "full", "shared"),
    )
    model = nn.DecoderLM(config, rngs=nnx.Rngs(0))
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    params = jax.tree.map(
        lambda x: x + jnp.asarray(rng.normal(size=x.shape, scale=0.3), x.dtype), params
    )
    nnx.update(model, params)
    tokens = rng.integers(0, 11, size=(B, T)).astype(np.int32)
    logits, layers = jax.jit(lambda t: model(t, sparse=sparse))(tokens)
    exact = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    want, masks, losses = oracle.decoder(exact, config, tokens, sparse=sparse)
    for aux, mask, kl in zip(layers, masks, losses, strict=True):
        assert (aux.kl is None) == (kl is None)
        if kl is not None:
            np.testing.assert_allclose(aux.kl, kl, rtol=1e-3)
        if sparse:
            np.testing.assert_array_equal(selection_mask(aux.indices), mask)
    assert_matches(logits, want.astype(np.float32), 1e-3)


@pytest.mark.parametrize("shape", [(0, T), (B, 0)])
def test_empty_batches_and_sequences(shape):
    model, tokens = decoder(SHARING), jnp.zeros(shape, jnp.int32)
    module, x = attention(), jnp.zeros((*shape, M))
    for sparse in (True, False):
        y, aux = module(x, segment_ids=tokens, sparse=sparse)
        assert y.shape == x.shape and aux.kl == 0
        gradient = jax.grad(lambda x, s=sparse: sum(jnp.sum(y) for y in module(x, sparse=s)[1][:2]))
        assert gradient(x).shape == x.shape
        assert model(tokens, sparse=sparse)[0].shape == (*shape, DECODER.vocab)
    logits, cache = model.decode(tokens, model.init_cache(shape[0], 4))
    assert logits.shape == (*shape, DECODER.vocab) and (cache.layers[0].lengths == 0).all()


def test_attention_is_causal(rng):
    module, x = attention(), hidden(rng)
    later = x.at[:, 7:].add(1.0)
    for sparse in (True, False):
        run = jax.jit(lambda x, sparse=sparse: module(x, sparse=sparse)[0])
        before, after = run(x), run(later)
        np.testing.assert_array_equal(before[:, :7], after[:, :7])
        assert (np.asarray(before[:, 7:]) != np.asarray(after[:, 7:])).any()


def test_layers_attend_to_a_given_selection(rng):
    """The layer that selected it and a layer without an indexer give the same output."""
    x, full = hidden(rng), attention()
    shared = nn.DSAttention(CONFIG, "shared", rngs=nnx.Rngs(1))
    nnx.update(shared.mla, nnx.state(full.mla))
    want, aux = attend(full, x)
    run = jax.jit(lambda module, x, indices: module(x, indices=indices))
    for module in (full, shared):
        got, again = run(module, x, aux.indices)
        assert_matches((got, again.lse), (want, aux.lse))
        np.testing.assert_array_equal(again.indices, aux.indices)
    assert again.kl is None and again.indexer is None
    assert_matches(run(full, x, aux.indices)[1].kl, aux.kl)
    # A given selection replaces that of the layer's own indexer.
    first = jnp.broadcast_to(jnp.arange(2, dtype=jnp.int32), (B, T, 2))
    got, again = run(full, x, first)
    assert np.abs(got - want).max() > 1e-3 and set(np.asarray(again.indices).ravel()) == {-1, 0, 1}
    cached, cache, indices = jax.jit(lambda x, c: full.decode(x, c, indices=first))(
        x, LayerCache.empty(CONFIG, B, T)
    )
    assert_matches(cached, got, 1e-4)
    np.testing.assert_array_equal(indices, again.indices)
    assert_matches(cache.index_k, again.indexer.index_k)


def test_shared_layers_reuse_a_selection(rng):
    model = decoder(SHARING)
    assert SHARING.layers == ("full", "shared", "shared", "full")
    tokens = jnp.asarray(rng.integers(0, 11, size=(B, T)), jnp.int32)
    logits, layers = jax.jit(lambda t: model(t))(tokens)
    _, dense = jax.jit(lambda t: model(t, sparse=False))(tokens)
    for found in (layers, dense):
        assert [aux.kl is None for aux in found] == [False, True, True, False]
        assert_matches(training.indexer_loss(found), found[0].kl + found[3].kl)
    assert all(aux.indices is None for aux in dense)
    for i, same in ((1, True), (2, True), (3, False)):
        assert np.array_equal(layers[i].indices, layers[0].indices) == same
    paths = [path for path, _ in nnx.to_flat_state(nnx.state(model, nnx.Param))]
    assert {path[1] for path in paths if "indexer" in path} == {0, 3}

    got, cache = decode_in_chunks(model, tokens, model.init_cache(B, T + 2), (9, 1, 1, 1))
    assert_matches(got, logits, 1e-4)
    assert [c.index_k is None for c in cache.layers] == [False, True, True, False]


def test_remat_of_shared_layers(rng):
    tokens = jnp.asarray(rng.integers(0, 11, size=(B, T)), jnp.int32)
    graph, params = nnx.split(decoder(SHARING))

    def gradients(policy):
        def loss(params):
            logits, layers = nnx.merge(graph, params)(tokens, remat_policy=remat_policy(policy))
            return jnp.sin(logits).sum() + training.indexer_loss(layers)

        return jax.jit(jax.grad(loss))(params)

    assert_matches(gradients("full"), gradients("none"), 1e-5)


# Documents of two sequences as (segment id, length). Two documents that are not adjacent may have
# the same id.
PACKED = ((7, 5), (2, 1), (7, 6)), ((0, 3), (1, 9))
SEGMENT_IDS = jnp.asarray([np.repeat(*np.transpose(row)) for row in PACKED], jnp.int32)


def documents():
    """Yields each packed document as (sequence, first token, end)."""
    for b, row in enumerate(PACKED):
        ends = np.cumsum([length for _, length in row])
        yield from ((b, int(end) - length, int(end)) for end, (_, length) in zip(ends, row))


@pytest.mark.parametrize("sparse", [True, False])
def test_packed_documents_do_not_see_each_other(rng, sparse):
    graph, params = nnx.split(attention())
    x = hidden(rng)

    def packed(params, x):
        y, aux = nnx.merge(graph, params)(x, segment_ids=SEGMENT_IDS, sparse=sparse)
        return (jnp.sin(y) ** 2).sum() + x.shape[0] * T * aux.kl, (y, aux)

    def alone(params, x):
        module, total, found = nnx.merge(graph, params), 0.0, []
        for b, start, end in documents():
            y, aux = module(x[b : b + 1, start:end], sparse=sparse)
            total += (jnp.sin(y) ** 2).sum() + (end - start) * aux.kl
            found.append((y, aux))
        return total, found

    (loss, (y, aux)), grads = jax.jit(jax.value_and_grad(packed, (0, 1), has_aux=True))(params, x)
    (want, found), want_grads = jax.jit(jax.value_and_grad(alone, (0, 1), has_aux=True))(params, x)
    assert_matches(loss, want, 1e-5)
    kl = [(end - start) * own.kl for (_, start, end), (_, own) in zip(documents(), found)]
    assert_matches(aux.kl, sum(kl) / (B * T), 1e-5)
    assert_matches(grads, want_grads, 1e-4)
    assert np.abs(np.asarray(grads[1])).max() > 1e-2
    for (b, start, end), (own, own_aux) in zip(documents(), found, strict=True):
        where = np.s_[b, start:end]
        assert_matches(y[where], own[0], 1e-5)
        assert_matches((aux.lse[where], aux.kv[where]), (own_aux.lse[0], own_aux.kv[0]), 1e-5)
        if sparse:
            indices = np.asarray(aux.indices[where])
            np.testing.assert_array_equal(
                np.where(indices < 0, -1, indices - start), own_aux.indices[0]
            )


@pytest.mark.parametrize("sparse", [True, False])
def test_decoder_with_packed_documents(rng, sparse):
    model = decoder(SHARING)
    tokens = jnp.asarray(rng.integers(0, 11, size=(B, T)), jnp.int32)
    got, _ = jax.jit(lambda t: model(t, segment_ids=SEGMENT_IDS, sparse=sparse))(tokens)
    run = jax.jit(lambda t: model(t, sparse=sparse)[0])
    for b, start, end in documents():
        assert_matches(got[b, start:end], run(tokens[b : b + 1, start:end])[0], 1e-4)


def test_positions_affect_only_rotary_elements(rng):
    module, x = attention(), hidden(rng)
    run = jax.jit(lambda x, places: module(x, positions=places))
    want, aux = attend(module, x)
    assert_matches(run(x, positions())[0], want)
    far, far_aux = run(x, positions(40))
    assert_matches(far, want, 1e-4)  # Scores depend only on distance.
    assert_matches(far_aux.kv[..., : CONFIG.kv_rank], aux.kv[..., : CONFIG.kv_rank])
    assert np.abs(far_aux.kv - aux.kv).max() > 0.1
    for rotated, plain in zip(far_aux.indexer[:2], aux.indexer[:2], strict=True):
        assert np.abs(rotated - plain).max() > 0.1
    assert np.abs(run(x, 3 * positions())[0] - want).max() > 1e-3


PAGE = 3


def empty_cache(model, capacity, *, paged, **options):
    """Returns a flat cache, or a paged one whose pages are shuffled."""
    if not paged:
        return model.init_cache(B, capacity, **options)
    cache = model.init_cache(B, capacity, page_size=PAGE, **options)
    table = cache.layers[0].kv.page_table
    order = np.random.default_rng(0).permutation(table.size)
    return cache.with_page_table(jnp.asarray(order, jnp.int32)[table])


def decode_in_chunks(model, tokens, cache, chunks):
    step = jax.jit(lambda tokens, cache: model.decode(tokens, cache))
    logits = []
    for n in chunks:
        out, cache = step(tokens[:, :n], cache)
        tokens = tokens[:, n:]
        logits.append(out)
    return jnp.concatenate(logits, 1), cache


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("index_fp8", [False, True])
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


@pytest.mark.parametrize("paged", [False, True])
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
    layers = [c._replace(kv=dataclasses.replace(c.kv, lengths=cut)) for c in cache.layers]
    cache = jax.tree.map(
        lambda x: x if x.dtype == jnp.int32 else jnp.where(beyond_length(cut, x), jnp.nan, x),
        nn.DecoderCache(tuple(layers)),
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
    _, cache = decode(module, x, LayerCache.empty(CONFIG, B, T - 2))
    np.testing.assert_array_equal(cache.lengths, [T - 2] * B)
    _, exact = decode(module, x[:, : T - 2], LayerCache.empty(CONFIG, B, T - 2))
    assert_matches(cache, exact)


def test_linen_bridge(rng):
    x = hidden(rng)
    linen = nn.linen_dsattention(CONFIG)
    variables = jax.jit(linen.init)(jax.random.key(0), x)
    assert set(variables) == {"params"}
    run = jax.jit(functools.partial(linen.apply, mutable=False))
    y, aux = run(variables, x)
    twin = nnx.clone(attention())
    state = nnx.to_pure_dict(nnx.state(twin, nnx.Param))
    nnx.update(twin, jax.tree.map(lambda _, p: p, state, variables["params"]))
    want, want_aux = attend(twin, x)
    assert_matches((y, aux.kl), (want, want_aux.kl))
    decoding = jax.jit(functools.partial(linen.apply, nnx_method="decode"))
    decoded, *_ = decoding(variables, x, LayerCache.empty(CONFIG, B, T))
    assert_matches(decoded, want, 1e-4)

    shared = jax.eval_shape(
        nn.linen_dsattention(CONFIG, "shared").init, jax.random.key(0), x, indices=aux.indices
    )
    assert (
        "indexer" not in shared["params"] and shared["params"].keys() < variables["params"].keys()
    )
    grads = jax.grad(lambda variables: run(variables, x)[1].kl)(variables)["params"]
    assert any((np.asarray(g) != 0).any() for g in jax.tree.leaves(grads["indexer"]))
    assert all((np.asarray(g) == 0).all() for g in jax.tree.leaves(grads["mla"]))


def test_remat_policies_keep_gradients_and_selection(rng):
    module, x = attention(), hidden(rng)
    graph, params = nnx.split(module)

    def run(params, x):
        y, aux = nnx.merge(graph, params)(jnp.sin(x))
        return jnp.sin(y).sum() + aux.kl, aux.indices

    def differentiated(policy):
        fn = run if policy == "none" else jax.checkpoint(run, policy=remat_policy(policy))
        return jax.jit(jax.grad(fn, argnums=(0, 1), has_aux=True))(params, x)

    want, indices = differentiated("none")
    for policy in ("full", "selection"):
        got, again = differentiated(policy)
        assert_matches(got, want, 1e-5, policy)
        np.testing.assert_array_equal(again, indices)
    with pytest.raises(ValueError, match="'name' is 'some', want one of"):
        remat_policy("some")


def test_decoder_rematerialises_each_block():
    tokens = jnp.zeros((B, T), jnp.int32)
    graph, params = nnx.split(decoder())

    def blocks(policy):
        def loss(params):
            model = nnx.merge(graph, params)
            return model(tokens, remat_policy=remat_policy(policy))[0].sum()

        return str(jax.make_jaxpr(jax.grad(loss))(params)).count("prevent_cse=True")

    assert blocks("none") == 0 and blocks("selection") == DECODER.num_layers


def test_barriers_order_the_gradients_of_blocks():
    tokens = jnp.zeros((B, T), jnp.int32)
    graph, params = nnx.split(decoder(dataclasses.replace(DECODER, num_layers=3)))

    def loss(params):
        return nnx.merge(graph, params)(tokens)[0].sum()

    one = len(jax.tree.leaves(params["blocks"][0])) + 1  # Parameters and hidden states.
    text = jax.jit(jax.grad(loss)).lower(params).as_text()
    barriers = re.findall(r"= stablehlo.optimization_barrier (.*) :", text)
    # There is a barrier in each pass between every two of the three blocks.
    assert [line.count("%") for line in barriers].count(one) == 2 * 2


@pytest.mark.parametrize("changes", [{}, {"sinks": True, "gate": True, "log_scaling": True}])
@pytest.mark.parametrize("stripes", [1, 2])
def test_queries_in_chunks(rng, changes, stripes):
    x, ids = hidden(rng), nn.striped(SEGMENT_IDS, stripes)

    def run(**more):
        graph, params = nnx.split(attention(**changes, **more))

        @jax.jit
        @functools.partial(jax.grad, argnums=(0, 1), has_aux=True)
        def gradients(params, x, indices):
            module = nnx.merge(graph, params)
            y, aux = module(x, segment_ids=ids, stripes=stripes, indices=indices)
            return jnp.sin(y).sum() + 3 * aux.kl, (y, aux)

        fresh, (y, aux) = gradients(params, x, None)
        given, again = gradients(params, x, aux.indices[..., ::-1])
        return (y, aux, again), (fresh, given)

    want, want_grads = run()
    for chunk in (T // stripes // 3, T // stripes // 2, T // stripes, 5 * T):
        got, grads = run(query_chunk=chunk)
        assert_matches(got, want, 1e-5, f"chunks of {chunk}")
        assert_matches(grads, want_grads, 1e-4, f"gradients, chunks of {chunk}")


def test_query_chunks_must_divide_the_sequence(rng):
    with pytest.raises(ValueError, match=r"'x' has shape \[2, 12, 16\], expected T .*chunk = 5"):
        attention(query_chunk=5)(hidden(rng))
    with pytest.raises(ValueError, match=r"expected T / 2 stripes to be a multiple of .* = 4"):
        attention(query_chunk=4)(hidden(rng), stripes=2)


def test_query_chunks_reduce_memory():
    tokens = jnp.zeros((1, 512), jnp.int32)

    def temporary_bytes(chunk):
        wide = dataclasses.replace(CONFIG, num_heads=16, kv_rank=64, query_chunk=chunk)
        config = dataclasses.replace(DECODER, attention=wide, num_layers=1)
        graph, params = nnx.split(decoder(config))

        def loss(params):
            logits, layers = nnx.merge(graph, params)(
                tokens, remat_policy=remat_policy("selection")
            )
            return logits.sum() + layers[0].kl

        return jax.jit(jax.grad(loss)).lower(params).compile().memory_analysis().temp_size_in_bytes

    # The queries, the outputs and their gradients. A chunk has an eighth of them.
    numbers = 512 * 16 * (2 * (64 + 4) + 2 * 64)
    assert temporary_bytes(None) - temporary_bytes(64) > 4 * numbers / 2


@pytest.mark.parametrize(
    ("policy", "once"), [("full", ()), ("selection", SELECTION), ("attention", RESIDUALS)]
)
@pytest.mark.parametrize("chunk", [None, 4])
def test_values_that_remat_policies_save(rng, policy, once, chunk):
    module, x = attention(query_chunk=chunk), hidden(rng)
    graph, params = nnx.split(module)

    @functools.partial(jax.checkpoint, policy=remat_policy(policy))
    def run(params):
        y, aux = nnx.merge(graph, params)(jnp.sin(x))
        return jnp.sin(y).sum() + aux.kl

    program = str(jax.make_jaxpr(jax.grad(run))(params))
    for name in RESIDUALS:
        # A policy that saves nothing recomputes the block and then each chunk.
        times = (1,) if name in once else (2, 3) if chunk and not once else (2,)
        assert program.count(f"name[name={name}]") in times, name


@pytest.mark.parametrize("use_bias", [False, True])
def test_fp8_linear_approximates_nnx_linear(rng, use_bias):
    options = {"use_bias": use_bias, "dtype": jnp.bfloat16, "rngs": nnx.Rngs(0)}
    plain, fp8 = nnx.Linear(40, 24, **options), nn.Fp8Linear(40, 24, **options)
    nnx.update(fp8, nnx.state(plain))
    if use_bias:
        plain.bias[...] = fp8.bias[...] = hidden(rng, 24)
    x = hidden(rng, B, T, 40)
    y, exact = fp8(x), plain(x)
    assert y.dtype == exact.dtype == jnp.bfloat16
    assert 0 < np.linalg.norm(y - exact) < 0.05 * np.linalg.norm(exact)
    want = jax_dsa.fp8_linear(x.astype(jnp.bfloat16), fp8.kernel[...])
    want = want + fp8.bias[...].astype(jnp.bfloat16) if use_bias else want
    np.testing.assert_array_equal(np.asarray(y), np.asarray(want))
    assert nn.Fp8Linear(40, 24, rngs=nnx.Rngs(0))(x).dtype == jnp.float32
    gradient = jax.grad(lambda x: fp8(x).astype(jnp.float32).sum())(x)
    assert gradient.shape == x.shape and gradient.dtype == x.dtype


def test_decoder_in_fp8(rng):
    """All projections are FP8 layers, and the logits are close to those without FP8."""
    config = dataclasses.replace(DECODER, attention=dataclasses.replace(CONFIG, fp8=True))
    fp8, plain = decoder(config), decoder()
    kinds = {
        "/".join(map(str, path)): type(module)
        for path, module in nnx.iter_modules(fp8)
        if isinstance(module, nnx.Linear)
    }
    others = {name for name, kind in kinds.items() if kind is nnx.Linear}
    assert others == {"head", *(f"blocks/{i}/attention/indexer/weights" for i in range(2))}
    assert len(kinds) == len(others) + 2 * (4 + 2 + 2)
    tokens = jnp.asarray(rng.integers(0, 11, size=(B, T)), jnp.int32)
    got, want = (jax.jit(lambda t, m=m: m(t, sparse=False)[0])(tokens) for m in (fp8, plain))
    assert 0 < np.linalg.norm(got - want) < 0.3 * np.linalg.norm(want)


@pytest.mark.parametrize(("policy", "times"), [("selection", 2), ("attention", 1)])
def test_how_often_remat_computes_the_warm_up_loss(rng, policy, times):
    module, x = attention(), hidden(rng)
    graph, params = nnx.split(module)

    @functools.partial(jax.checkpoint, policy=remat_policy(policy))
    def run(params):
        return nnx.merge(graph, params)(jnp.sin(x), sparse=False)[1].kl

    program = str(jax.make_jaxpr(jax.grad(run))(params))
    # The name marks four values: the three gradients, and the number of rows with a loss.
    assert program.count("name[name=dsa_kl_grads]") == 4 * times


def exact_attention(q, k, v, *, scale, is_causal, segment_ids, return_lse):
    """Computes the case of `masked_attention` that the model uses, by the formula."""
    assert is_causal and return_lse
    s = scale * jnp.einsum("btnd,bsnd->bnts", q, k)
    seen = jnp.tril(jnp.ones((T, T), bool))[None, None]
    if segment_ids is not None:
        seen = seen & (segment_ids[:, None, :, None] == segment_ids[:, None, None])
    s = jnp.where(seen, s, -jnp.inf)
    out = jnp.einsum("bnts,bsne->btne", jax.nn.softmax(s), v)
    return out, jax.nn.logsumexp(s, axis=-1).swapaxes(1, 2)


@pytest.mark.parametrize("packed", [False, True])
def test_dense_attention_matches_the_formula(rng, packed, monkeypatch):
    graph, params = nnx.split(attention())
    x = hidden(rng)

    def loss(params, x):
        ids = SEGMENT_IDS if packed else None
        y, aux = nnx.merge(graph, params)(x, segment_ids=ids, sparse=False)
        return jnp.sin(y).sum() + jnp.cos(aux.lse).sum(), (y, aux.lse)

    run = jax.value_and_grad(loss, (0, 1), has_aux=True)
    got = jax.jit(run)(params, x)
    monkeypatch.setattr("jax_dsa.nn.mla.masked_attention", exact_attention)
    assert_matches(got, jax.jit(lambda *args: run(*args))(params, x), 1e-5)


def test_bfloat16(rng):
    module = attention(dtype=jnp.bfloat16)
    x = hidden(rng).astype(jnp.bfloat16)
    y, aux = attend(module, x)
    assert y.dtype == aux.q.dtype == aux.kv.dtype == jnp.bfloat16
    assert aux.lse.dtype == aux.kl.dtype == aux.indexer.index_weights.dtype == jnp.float32
    assert all(p.dtype == jnp.float32 for p in jax.tree.leaves(nnx.state(module, nnx.Param)))
    want, _ = attend(attention(), x.astype(jnp.float32))
    assert np.abs(y.astype(jnp.float32) - want).mean() < 0.1 * np.abs(want).mean()


def test_sparse_mla_is_a_deprecated_name_of_mla() -> None:
    with pytest.warns(DeprecationWarning, match="use nn.MLA"):
        assert nn.SparseMLA is nn.MLA
    with pytest.raises(AttributeError, match=r"'jax_dsa\.nn' has no attribute 'nothing'"):
        nn.nothing  # noqa: B018
