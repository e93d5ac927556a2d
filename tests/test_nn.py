"""`DSAttention` and `DecoderLM`: outputs, selections, packed documents and precision."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support.compare import assert_matches
from support.decoders import (
    CONFIG,
    DECODER,
    SEGMENT_IDS,
    SHARING,
    B,
    M,
    T,
    attend,
    attention,
    decode_in_chunks,
    decoder,
    documents,
    hidden,
    positions,
)
from support.marks import slow
from support.oracles import nn as oracle

import jax_dsa
from jax_dsa import nn, training
from jax_dsa.nn.cache import LayerCache


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
        norm_eps=0.3 if "norm_eps" in changes else None,
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


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(0, T), slow((B, 0))])
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


@pytest.mark.slow
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


@pytest.mark.parametrize("sparse", [True, slow(False)])
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
    others = {name for name, kind in kinds.items() if kind is not nn.Fp8Linear}
    assert others == {"head", *(f"blocks/{i}/attention/indexer/weights" for i in range(2))}
    assert len(kinds) == len(others) + 2 * (4 + 2 + 2)
    tokens = jnp.asarray(rng.integers(0, 11, size=(B, T)), jnp.int32)
    got, want = (jax.jit(lambda t, m=m: m(t, sparse=False)[0])(tokens) for m in (fp8, plain))
    assert 0 < np.linalg.norm(got - want) < 0.3 * np.linalg.norm(want)


def exact_attention(q, k, v, *, scale, is_causal, segment_ids, sinks, return_lse):
    """Computes the case of `masked_attention` that the model uses, by the formula."""
    assert is_causal and return_lse and sinks is None
    s = scale * jnp.einsum("btnd,bsnd->bnts", q, k)
    seen = jnp.tril(jnp.ones((T, T), bool))[None, None]
    if segment_ids is not None:
        of_queries, of_keys = segment_ids
        seen = seen & (of_queries[:, None, :, None] == of_keys[:, None, None])
    s = jnp.where(seen, s, -jnp.inf)
    out = jnp.einsum("bnts,bsne->btne", jax.nn.softmax(s), v)
    return out, jax.nn.logsumexp(s, axis=-1).swapaxes(1, 2)


@pytest.mark.parametrize("packed", [slow(False), True])
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


@pytest.mark.parametrize("given", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_dtypes_of_results(dtype, given):
    """A layer returns its own dtype. A block adds to its input, so it returns the wider one."""
    config = dataclasses.replace(DECODER, attention=dataclasses.replace(CONFIG, dtype=dtype))
    block = nn.Block(config, rngs=nnx.Rngs(0))
    x = jnp.ones((1, 4, CONFIG.model_dim), given)

    def results(x):
        y, aux = block.attention(x)
        dense, _ = block.attention(x, sparse=False)
        cache = nn.LayerCache.empty(config.attention, 1, 8)
        decoded, cache, _ = block.attention.decode(x, cache)
        own = y, dense, decoded, cache.kv.data, aux.q, aux.kv, block.mlp(x)
        return own, (aux.lse, aux.kl), block(x)[0]

    own, exact, wider = jax.eval_shape(results, x)
    assert {a.dtype for a in own} == {jnp.dtype(dtype)}
    assert {a.dtype for a in exact} == {jnp.dtype(jnp.float32)}
    assert wider.dtype == jnp.promote_types(dtype, given)
