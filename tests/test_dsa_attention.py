"""`dsa_attention` against the loops of its parts, and what its two losses may reach."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compare import assert_as_good_as, assert_matches, assert_unmoved
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.attn_dist import attn_dist
from oracles.indexer import indexer_logits
from oracles.losses import kl_rows
from oracles.sparse_mla import sparse_mla
from oracles.topk import topk, values
from quick import compile_quickly  # noqa: F401

from jax_dsa import dsa_attention

B, T, S, N, D, E, J, C, K = 2, 5, 9, 4, 6, 4, 2, 3, 4
NAMES = ("q", "kv", "index_q", "index_k", "index_weights")


def inputs(rng, B=B, T=T, S=S, N=N, G=1):
    shapes = (B, T, N, D), (B, S, G, D), (B, T, J, C), (B, S, C), (B, T, J)
    return tuple(rng.normal(size=s).astype(np.float32) for s in shapes)


def oracle(q, kv, index_q, index_k, index_weights, starts, ends, top_k=K, sinks=None, k_scale=None):
    """out, indices, kl and lse."""
    index = indexer_logits(
        index_q, index_k, index_weights, starts=starts, ends=ends, k_scale=k_scale
    )
    indices = topk(index, top_k)
    groups = kv.shape[2]
    shared = np.repeat(indices[:, :, None], groups, axis=2)
    scale = q.shape[3] ** -0.5
    out, lse = sparse_mla(q, kv, shared, value_dim=E, scale=scale, sinks=sinks)
    teacher = attn_dist(q, kv, shared, lse, scale=scale, head_group=1).sum(1)
    kl, _ = kl_rows(values(index, indices), teacher, indices >= 0)
    return out, indices, kl, lse


def limits(query_start=0, B=B, T=T, S=S):
    """starts and ends of causal queries."""
    start = np.broadcast_to(np.reshape(query_start, (-1, 1)), (B, 1))
    return np.zeros((B, T), np.int32), np.clip(start + np.arange(T) + 1, 0, S).astype(np.int32)


def assert_same(got, want, tol=1e-4):
    (out, (indices, kl, lse)), (want_out, want_indices, want_kl, want_lse) = got, want
    np.testing.assert_array_equal(indices, want_indices)
    assert indices.dtype == jnp.int32 and kl.shape == () and kl.dtype == lse.dtype == jnp.float32
    assert_matches(out, want_out.astype(np.float32), tol, "out")
    assert_matches(lse, want_lse.astype(np.float32), tol, "lse")
    np.testing.assert_allclose(kl, want_kl, rtol=tol, atol=1e-6)


@pytest.mark.parametrize("query_start", [0, 3, -2, np.array([0, 4], np.int32)])
def test_matches_its_parts(rng, query_start):
    args = inputs(rng)
    got = dsa_attention(*args, top_k=K, value_dim=E, query_start=query_start)
    assert_same(got, oracle(*args, *limits(query_start)))


@pytest.mark.parametrize("top_k", [1, S, S + 5])
def test_any_number_of_keys(rng, top_k):
    args = inputs(rng)
    got = dsa_attention(*args, top_k=top_k, value_dim=E, query_start=S - T)
    assert_same(got, oracle(*args, *limits(S - T), top_k=top_k))


def test_options(rng):
    args = inputs(rng)
    starts = rng.integers(-2, 4, size=(B, T)).astype(np.int32)
    ends = rng.integers(0, S + 3, size=(B, T)).astype(np.int32)
    sinks = rng.normal(size=N).astype(np.float32)
    k_scale = np.exp(rng.normal(size=(B, S))).astype(np.float32)
    more = {"starts": starts, "ends": ends, "sinks": sinks, "index_k_scale": k_scale}
    for causal in (True, False):
        got = dsa_attention(
            *args, top_k=K, value_dim=E, query_start=2, is_causal=causal, deterministic=True, **more
        )
        stop = np.minimum(ends, limits(2)[1]) if causal else ends
        assert_same(got, oracle(*args, starts, stop, sinks=sinks, k_scale=k_scale))


def test_groups_share_the_selection(rng):
    args = inputs(rng, G=2)
    got = dsa_attention(*args, top_k=K, value_dim=E)
    assert_same(got, oracle(*args, *limits()))


def test_all_keys_selected_is_dense_attention(rng):
    q, kv, *index = inputs(rng, S=T)
    out, _ = dsa_attention(q, kv, *index, top_k=T, value_dim=E)
    k = jnp.repeat(jnp.asarray(kv), N, axis=2)
    want = jax.nn.dot_product_attention(q, k, k, is_causal=True)[..., :E]
    assert_matches(out, want, 1e-5)


def test_without_batch_axis(rng):
    args = inputs(rng, B=1)
    out, aux = dsa_attention(*args, top_k=K, value_dim=E)
    single, single_aux = dsa_attention(*(x[0] for x in args), top_k=K, value_dim=E)
    assert_matches(
        (single, single_aux.indices, single_aux.lse), (out[0], aux.indices[0], aux.lse[0])
    )
    assert_matches(single_aux.kl, aux.kl)


def test_low_precision(rng):
    exact = [jnp.asarray(x, jnp.bfloat16).astype(jnp.float32) for x in inputs(rng)]
    low = [x.astype(jnp.bfloat16) for x in exact[:4]]
    got, aux = dsa_attention(*low, exact[4], top_k=K, value_dim=E)
    want, want_aux = dsa_attention(*exact, top_k=K, value_dim=E)
    np.testing.assert_array_equal(aux.indices, want_aux.indices)
    keys = jnp.take_along_axis(low[1], jnp.maximum(aux.indices, 0).reshape(B, -1, 1, 1), 1)
    keys = keys.reshape(B, T, K, D)
    scores = jnp.einsum("btnd,btkd->btnk", low[0], keys) * D**-0.5
    scores = jnp.where(aux.indices[:, :, None] >= 0, scores, -jnp.inf)
    plain = jnp.einsum("btnk,btke->btne", jax.nn.softmax(scores), keys[..., :E])
    assert got.dtype == jnp.bfloat16
    assert_as_good_as(got, plain, want)


def losses(*args, **options):
    """Two losses, one of the attention's results and the indexer's."""
    out, aux = dsa_attention(*args, top_k=K, value_dim=E, query_start=S - T, **options)
    return jnp.sin(out).sum() + jnp.cos(aux.lse).sum(), aux.kl


def test_the_losses_reach_exactly_their_own_inputs(rng):
    args = inputs(rng)
    for which, own in ((0, ("q", "kv")), (1, ("index_q", "index_k", "index_weights"))):
        grads = jax.grad(lambda *a, i=which: losses(*a)[i], argnums=tuple(range(5)))(*args)
        for name, grad in zip(NAMES, grads, strict=True):
            assert np.isfinite(grad).all()
            assert bool((np.asarray(grad) != 0).any()) == (name in own), (which, name)
    sinks = jnp.zeros(N)
    grads = [jax.grad(lambda s, i=i: losses(*args, sinks=s)[i])(sinks) for i in range(2)]
    assert (np.asarray(grads[0]) != 0).all() and (np.asarray(grads[1]) == 0).all()


def test_one_backward_pass_gives_both_gradients(rng):
    args = inputs(rng)
    both = jax.grad(lambda *a: sum(losses(*a)), argnums=tuple(range(5)))(*args)
    lm = jax.grad(lambda *a: losses(*a)[0], argnums=(0, 1))(*args)
    kl = jax.grad(lambda *a: losses(*a)[1], argnums=(2, 3, 4))(*args)
    assert_matches(both, (*lm, *kl), 1e-6)


def test_gradients_against_finite_differences(rng):
    """Where no step of the difference changes a selection."""
    with jax.enable_x64(True):
        args = [x.astype(np.float64) for x in inputs(rng, B=1, T=3, S=5, N=2)]

        def both(*args):
            out, aux = dsa_attention(*args, top_k=2, value_dim=E, query_start=2)
            return jnp.sin(out).sum() + jnp.cos(aux.lse).sum(), aux.kl, aux.indices

        _, _, chosen = both(*args)
        step = 1e-6
        for which, mine in ((0, (0, 1)), (1, (2, 3, 4))):
            grads = jax.grad(lambda *a, i=which: both(*a)[i], argnums=mine)(*args)
            for i, grad in zip(mine, grads, strict=True):
                direction = rng.normal(size=args[i].shape)
                ends = [[*args[:i], args[i] + s * direction, *args[i + 1 :]] for s in (step, -step)]
                up, down = (both(*a) for a in ends)
                for side in (up, down):
                    np.testing.assert_array_equal(side[2], chosen)
                slope = (up[which] - down[which]) / (2 * step)
                np.testing.assert_allclose((grad * direction).sum(), slope, rtol=1e-5, atol=1e-9)


def test_the_indexers_fp8_inputs(rng):
    q, kv, index_q, index_k, weights = inputs(rng)
    q8, k8 = (jnp.asarray(x).astype(jnp.float8_e4m3fn) for x in (index_q, index_k))
    got = dsa_attention(q, kv, q8, k8, weights, top_k=K, value_dim=E)
    back = (np.asarray(x.astype(jnp.float32)) for x in (q8, k8))
    assert_same(got, oracle(q, kv, *back, weights, *limits()))


def test_nan_in_keys_that_no_query_sees(rng):
    args = inputs(rng)
    ends = np.full((B, T), S - 2, np.int32)

    def run(args):
        fn = lambda *a: sum(losses(*a, is_causal=False, ends=ends))  # noqa: E731
        return jax.value_and_grad(fn, argnums=tuple(range(5)))(*args)

    poisoned = [x.copy() for x in args]
    for i in (1, 3):
        poisoned[i][:, S - 2 :] = np.nan
    want, want_grads = run(args)
    got, got_grads = run(poisoned)
    assert_unmoved((got, got_grads), (want, want_grads))


def test_queries_without_keys(rng):
    """They have no output, no gradient, and no part in the KL's mean."""
    args, ends = inputs(rng), limits(S - T)[1]
    ends[:, 1] = 0

    def run(*args):
        out, aux = dsa_attention(*args, top_k=K, value_dim=E, is_causal=False, ends=ends)
        return jnp.sin(out).sum() + aux.kl, (out, aux)

    grads, got = jax.grad(run, argnums=(0, 1, 2, 3, 4), has_aux=True)(*args)
    assert_same(got, oracle(*args, np.zeros_like(ends), ends))
    out, aux = got
    assert (np.asarray(out[:, 1]) == 0).all() and (np.asarray(aux.lse[:, 1]) == -np.inf).all()
    assert (np.asarray(aux.indices[:, 1]) == -1).all()
    for i, grad in enumerate(grads):
        assert np.isfinite(grad).all()
        assert i in (1, 3) or (np.asarray(grad[:, 1]) == 0).all()


@pytest.mark.parametrize(("b", "t"), [(0, T), (B, 0)])
def test_empty(rng, b, t):
    out, aux = dsa_attention(*inputs(rng, B=b, T=t), top_k=K, value_dim=E)
    assert out.shape == (b, t, N, E) and aux.indices.shape == (b, t, K) and aux.kl == 0


BAD = [
    ({"q": np.zeros((B, T, N, D), np.int32)}, TypeError, "'q' has dtype int32"),
    ({"q": np.zeros((T, D), np.float32)}, ValueError, "'q' has shape"),
    ({"q": [1.0]}, TypeError, "'q' is list"),
    ({"kv": np.zeros((B, S, 1, D + 1), np.float32)}, ValueError, "'kv' has shape"),
    ({"kv": jnp.zeros((B, S, 1, D), jnp.bfloat16)}, TypeError, "'kv' has dtype bfloat16"),
    ({"kv": np.zeros((B, S, 3, D), np.float32)}, ValueError, "'kv' is 3, want G that divides N=4"),
    ({"index_q": np.zeros((B, T + 1, J, C), np.float32)}, ValueError, "'index_q' has shape"),
    ({"index_k": np.zeros((B, S + 1, C), np.float32)}, ValueError, "'index_k' has shape"),
    ({"index_k": np.zeros((B, S, C), np.float16)}, TypeError, "'index_k' has dtype float16"),
    ({"index_weights": np.zeros((B, T, J + 1), np.float32)}, ValueError, "'index_weights'"),
    ({"index_weights": jnp.zeros((B, T, J), jnp.bfloat16)}, TypeError, "'index_weights'"),
    ({"top_k": 0}, ValueError, "'top_k' is 0, want int >= 1"),
    ({"top_k": 2.0}, TypeError, "'top_k' is 2.0"),
    ({"value_dim": D + 1}, ValueError, "'value_dim' is 7"),
    ({"scale": "big"}, TypeError, "'scale' is 'big'"),
    ({"is_causal": 1}, TypeError, "'is_causal' is 1"),
    ({"query_start": np.zeros(3, np.int32)}, ValueError, "'query_start' has shape"),
    ({"starts": np.zeros((B, T + 1), np.int32)}, ValueError, "'starts' has shape"),
    ({"ends": np.zeros((B, T), np.float32)}, TypeError, "'ends' has dtype float32"),
    ({"index_k_scale": np.zeros((B, S, 1), np.float32)}, ValueError, "'index_k_scale' has shape"),
    ({"sinks": np.zeros(N + 1, np.float32)}, ValueError, "'sinks' has shape"),
    ({"deterministic": None}, TypeError, "'deterministic' is None"),
    ({"implementation": "tpu"}, ValueError, "'implementation' is 'tpu'"),
    ({"implementation": "cuda"}, NotImplementedError, "implementation='cuda' is not available"),
]


@pytest.mark.parametrize(("change", "error", "message"), BAD)
def test_misuse(rng, change, error, message):
    given = dict(zip(NAMES, inputs(rng), strict=True)) | {"top_k": K, "value_dim": E} | change
    with pytest.raises(error, match=message) as raised:
        dsa_attention(**given)
    if error is not NotImplementedError:
        assert str(raised.value).startswith("dsa_attention: ")


@settings(max_examples=20, deadline=None)
@given(st.sampled_from(NAMES), st.lists(st.integers(0, 3), max_size=5))
def test_wrong_shapes_raise(name, shape):
    given_ = dict(zip(NAMES, inputs(np.random.default_rng(0)), strict=True))
    if list(given_[name].shape) == shape:
        return
    given_[name] = np.zeros(shape, np.float32)
    with pytest.raises(ValueError, match=r"dsa_attention: argument '\w+' "):
        dsa_attention(**given_, top_k=K, value_dim=E)
