"""One indexer that learns the mean attention of all layers that attend to its selection."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support.compare import assert_matches
from support.decoders import CONFIG, DECODER, SEGMENT_IDS, B, T, attention, decoder, hidden
from support.dsa_attention import inputs as attention_inputs
from support.marks import slow

from jax_dsa import attn_dist, dsa_attention, indexer_kl_loss, nn, training
from jax_dsa.ops.indexer import indexer_selected_logits
from jax_dsa.training.remat import remat_policy

# Three layers. The first and the last have an indexer.
SHARING = dataclasses.replace(DECODER, num_layers=3, indexer_types=("full", "shared"))
SHARED = dataclasses.replace(SHARING, shared_teacher=True)
GROUPS = (0, 1), (2,)  # the layers that attend to one selection


@pytest.fixture
def tokens(rng: np.random.Generator) -> jax.Array:
    return jnp.asarray(rng.integers(0, 11, size=(B, T)), jnp.int32)


def mean_of_teachers(layers: list[nn.AttentionAux], scale: float) -> jax.Array:
    """Returns the mean over layers of the distributions that their heads have on average."""
    teachers = []
    for aux in layers:
        assert aux.indices is not None
        dist = attn_dist(aux.q, aux.kv, aux.indices, aux.lse, scale=scale)
        teachers.append(dist / dist.sum(-1, keepdims=True))
    return jnp.stack(teachers).mean(0)


def expected_losses(layers: list[nn.AttentionAux], scale: float) -> list[jax.Array]:
    """Returns the loss of each group, as a plain formula that JAX differentiates."""
    losses = []
    for group in GROUPS:
        first = layers[group[0]]
        assert first.indexer is not None and first.indices is not None
        p = jax.lax.stop_gradient(mean_of_teachers([layers[i] for i in group], scale))
        z = indexer_selected_logits(**first.indexer._asdict(), indices=first.indices)
        log_q = jax.nn.log_softmax(z, axis=-1)
        terms = jnp.where(first.indices >= 0, p * (jnp.log(jnp.maximum(p, 1e-30)) - log_q), 0)
        losses.append(terms.sum(-1).mean())
    return losses


def split(config: nn.DecoderConfig) -> tuple[Any, Any]:
    """Returns a decoder's graph and parameters, which are the same for all configurations here."""
    return nnx.split(decoder(config))


def run(
    graph: Any, params: Any, tokens: jax.Array, **options: Any
) -> tuple[jax.Array, list[nn.AttentionAux]]:
    return nnx.merge(graph, params)(tokens, **options)


def test_teachers_of_the_operator(rng: np.random.Generator) -> None:
    q, kv, *index = attention_inputs(rng)
    options = {"value_dim": 4, "query_start": 3}

    def both(*index: Any) -> Any:
        _, aux = dsa_attention(q, kv, *index, top_k=4, **options)
        return aux.kl, aux

    def apart(*index: Any) -> Any:
        _, aux = dsa_attention(q, kv, *index, top_k=4, return_teacher=True, **options)
        return indexer_kl_loss(aux.logits, aux.teacher, aux.indices >= 0), aux

    (want, old), want_grads = jax.value_and_grad(both, (0, 1, 2), has_aux=True)(*index)
    (got, aux), grads = jax.value_and_grad(apart, (0, 1, 2), has_aux=True)(*index)
    assert aux.kl == 0 and old.logits is None and old.teacher is None
    assert_matches((got, grads), (want, want_grads), 1e-5)
    _, shared = dsa_attention(q, kv, indices=aux.indices, return_teacher=True, **options)
    assert shared.logits is None
    assert_matches(shared.teacher, aux.teacher, 1e-6)
    single = [x[0] for x in (q, kv, *index)]
    _, first = dsa_attention(*single, top_k=4, return_teacher=True, **options)
    assert_matches((first.logits, first.teacher), (aux.logits[0], aux.teacher[0]), 1e-6)
    dkv = jax.grad(lambda kv: apart_teacher(q, kv, aux.indices, options).sum())(kv)
    assert not np.any(np.asarray(dkv))
    with pytest.raises(TypeError, match="dsa_attention: argument 'return_teacher' is 'yes'"):
        dsa_attention(q, kv, *index, top_k=4, return_teacher="yes", **options)


def apart_teacher(q: Any, kv: Any, indices: Any, options: dict[str, Any]) -> jax.Array:
    aux = dsa_attention(q, kv, indices=indices, return_teacher=True, **options)[1]
    assert aux.teacher is not None
    return aux.teacher


@pytest.mark.parametrize("packed", [slow(False), True])
def test_the_loss_and_its_gradients(packed: bool, tokens: jax.Array) -> None:
    options = {"segment_ids": SEGMENT_IDS if packed else None}
    (graph, params), (alone, _) = split(SHARED), split(SHARING)

    def loss(params: Any) -> Any:
        logits, layers = run(graph, params, tokens, **options)
        return training.indexer_loss(layers), (logits, [aux.kl for aux in layers])

    def plain(params: Any) -> Any:
        logits, layers = run(alone, params, tokens, **options)
        losses = expected_losses(layers, CONFIG.scale)
        return sum(losses), (logits, losses)

    (total, (logits, kl)), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    (_, (want_logits, want)), want_grads = jax.jit(jax.value_and_grad(plain, has_aux=True))(params)
    assert [x is None for x in kl] == [False, True, False]
    assert_matches([kl[0], kl[2]], want, 1e-5)
    assert_matches(total, sum(want), 1e-5)
    assert_matches(logits, want_logits, 1e-6)
    indexers, others = nnx.split_state(grads, training.INDEXER, ...)
    assert not any(np.any(np.asarray(x)) for x in jax.tree.leaves(others))
    assert_matches(indexers, nnx.split_state(want_grads, training.INDEXER, ...)[0], 1e-4)


def test_the_loss_depends_on_every_layer(tokens: jax.Array) -> None:
    """A layer alone teaches its indexer something else."""
    _, alone = run(*split(SHARING), tokens)
    _, together = run(*split(SHARED), tokens)
    assert not np.allclose(alone[0].kl, together[0].kl, rtol=1e-3)
    assert_matches(alone[2].kl, together[2].kl, 1e-5)
    first = together[0]
    assert first.teacher is not None and first.indices is not None
    mass = np.where(first.indices >= 0, first.teacher, 0).sum(-1)
    np.testing.assert_allclose(mass, 2 * CONFIG.num_heads, rtol=1e-5)


@pytest.mark.parametrize("policy", [slow("full"), slow("selection"), "attention"])
@pytest.mark.slow
def test_remat(policy: str, tokens: jax.Array) -> None:
    graph, params = split(SHARED)

    @functools.partial(jax.jit, static_argnums=1)
    @jax.value_and_grad
    def step(params: Any, policy: str) -> jax.Array:
        logits, layers = run(graph, params, tokens, remat_policy=remat_policy(policy))
        return jnp.sin(logits).sum() + training.indexer_loss(layers)

    assert_matches(step(params, policy), step(params, "none"), 1e-5)


@pytest.mark.parametrize(("chunk", "stripes"), [slow(4, 1), (3, 2)])
@pytest.mark.slow
def test_chunks_and_stripes(chunk: int, stripes: int, tokens: jax.Array) -> None:
    chunked = dataclasses.replace(SHARED, attention=dataclasses.replace(CONFIG, query_chunk=chunk))
    (graph, params), (in_chunks, _) = split(SHARED), split(chunked)

    @functools.partial(jax.jit, static_argnums=(1, 3))
    @jax.value_and_grad
    def step(params: Any, graph: Any, tokens: jax.Array, stripes: int) -> jax.Array:
        return training.indexer_loss(run(graph, params, tokens, stripes=stripes)[1])

    want = step(params, graph, tokens, 1)
    assert_matches(step(params, in_chunks, nn.striped(tokens, stripes), stripes), want, 1e-5)


def test_replayed_selections(tokens: jax.Array) -> None:
    _, layers = run(*split(SHARED), tokens)
    indices = [aux.indices for aux in layers]
    for replayed in (indices, [x if i in (0, 2) else None for i, x in enumerate(indices)]):
        _, again = run(*split(SHARED), tokens, indices=replayed)
        assert_matches([x.kl for x in again], [x.kl for x in layers], 1e-5)
    # Layer 1 attends to the same keys in another order, which has the same keys in some slots.
    assert indices[1] is not None
    _, again = run(*split(SHARED), tokens, indices=[None, indices[1][..., ::-1], None])
    same = indices[1] == indices[1][..., ::-1]
    assert layers[0].teacher is not None and again[0].teacher is not None
    assert layers[1].teacher is not None
    want = layers[0].teacher - jnp.where(same, 0, layers[1].teacher)
    assert_matches(again[0].teacher, want, 1e-4)


def test_dense_attention_teaches_each_layer_alone(tokens: jax.Array) -> None:
    _, want = run(*split(SHARING), tokens, sparse=False)
    _, layers = run(*split(SHARED), tokens, sparse=False)
    assert_matches([x.kl for x in layers], [x.kl for x in want], 1e-6)


def test_teachers_of_a_layer(rng: np.random.Generator) -> None:
    x = hidden(rng)
    _, want = attention()(x)
    _, aux = attention()(x, return_teacher=True)
    assert aux.kl is None and aux.indices is not None and aux.logits is not None
    np.testing.assert_array_equal(aux.indices, want.indices)
    dist = attn_dist(aux.q, aux.kv, aux.indices, aux.lse, scale=CONFIG.scale)
    assert_matches(aux.teacher, dist, 1e-5)
    assert want.indexer is not None
    logits = indexer_selected_logits(**want.indexer._asdict(), indices=aux.indices)
    assert_matches(aux.logits, logits, 1e-5)
    shared = nn.DSAttention(CONFIG, "shared", rngs=nnx.Rngs(0))
    _, aux = shared(x, indices=aux.indices, return_teacher=True)
    assert aux.logits is None and aux.teacher is not None and aux.teacher.shape == (B, T, 5)
    expected = "argument 'return_teacher' is True, want False with sparse=False"
    with pytest.raises(ValueError, match=f"DSAttention: {expected}"):
        attention()(x, sparse=False, return_teacher=True)
    with pytest.raises(TypeError, match="DSAttention: argument 'return_teacher' is 1"):
        attention()(x, return_teacher=1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="DecoderConfig: argument 'shared_teacher' is 1"):
        dataclasses.replace(SHARING, shared_teacher=1)  # type: ignore[arg-type]


def test_teachers_of_pools(rng: np.random.Generator) -> None:
    """The teacher of a pool is the sum over its tokens, and the loss is that of the layer."""
    x, module = hidden(rng), attention(index_pool=2, top_k=6, rope_dim=0, index_rope_dim=0)
    _, want = module(x)
    _, aux = module(x, return_teacher=True)
    assert aux.kl is None and aux.indices is not None
    assert aux.logits is not None and aux.teacher is not None
    assert aux.teacher.shape == aux.indices.shape == (B, T, 3)
    assert_matches(indexer_kl_loss(aux.logits, aux.teacher, aux.indices >= 0), want.kl, 1e-5)
