"""`dsa_attention` against the oracles of its steps, and which inputs its two losses reach."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.compare import Variable, assert_as_good_as, assert_matches, assert_unmoved
from support.dsa_attention import NAMES, B, D, E, K, N, S, T, assert_same, inputs, limits, oracle

from jax_dsa import dsa_attention


@pytest.mark.parametrize("query_start", [0, 3, -2, np.array([0, 4], np.int32)])
def test_matches_its_steps(rng, query_start):
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
    more = {"starts": starts, "ends": ends, "sinks": sinks, "index_k_scale": k_scale, "scale": 0.7}
    for causal in (True, False):
        got = dsa_attention(
            *args, top_k=K, value_dim=E, query_start=2, is_causal=causal, deterministic=True, **more
        )
        stop = np.minimum(ends, limits(2)[1]) if causal else ends
        assert_same(got, oracle(*args, starts, stop, sinks=sinks, k_scale=k_scale, scale=0.7))


def test_the_scale_of_the_indexers_logits(rng):
    """The operator applies none. With that of the documentation, the loss is small at first."""
    J, C, T = 16, 64, 64
    shapes = (1, T, N, D), (1, T, 1, D), (1, T, J, C), (1, T, C), (1, T, J)
    *args, weights = (rng.normal(size=s).astype(np.float32) for s in shapes)
    scaled, whole = (
        dsa_attention(*args, w, top_k=16, value_dim=E)[1]
        for w in (weights * (J * C) ** -0.5, weights)
    )
    np.testing.assert_array_equal(scaled.indices, whole.indices)
    assert scaled.kl < 0.5 and whole.kl > 5


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
    """Returns a loss of the attention's results and the indexer's loss."""
    out, aux = dsa_attention(*args, top_k=K, value_dim=E, query_start=S - T, **options)
    return jnp.sin(out).sum() + jnp.cos(aux.lse).sum(), aux.kl


def test_the_losses_reach_exactly_their_own_inputs(rng):
    @jax.jit
    def gradients(*args):
        _, back = jax.vjp(lambda *a: losses(*a[:5], sinks=a[5]), *args)
        return back((1.0, 0.0)), back((0.0, 1.0))

    of_each = gradients(*inputs(rng), jnp.zeros(N))
    owners = ("q", "kv", "sinks"), ("index_q", "index_k", "index_weights")
    for which, (own, grads) in enumerate(zip(owners, of_each, strict=True)):
        for name, grad in zip((*NAMES, "sinks"), grads, strict=True):
            assert np.isfinite(grad).all()
            assert bool((np.asarray(grad) != 0).any()) == (name in own), (which, name)
    assert (np.asarray(of_each[0][5]) != 0).all()


def test_one_backward_pass_gives_both_gradients(rng):
    @jax.jit
    def gradients(*args):
        both = jax.grad(lambda *a: sum(losses(*a)), argnums=tuple(range(5)))(*args)
        lm = jax.grad(lambda *a: losses(*a)[0], argnums=(0, 1))(*args)
        kl = jax.grad(lambda *a: losses(*a)[1], argnums=(2, 3, 4))(*args)
        return both, (*lm, *kl)

    assert_matches(*gradients(*inputs(rng)), 1e-6)


def test_a_loss_that_is_not_used_costs_nothing(rng):
    q, kv, *index = inputs(rng)
    selection = jnp.asarray(rng.integers(0, S, (B, T, K)), jnp.int32)

    def flops(call, *args):
        return jax.jit(call).lower(*args).compile().cost_analysis()["flops"]

    def losses(*index):
        return dsa_attention(q, kv, *index, indices=selection)

    without = flops(lambda *x: dsa_attention(*x, indices=selection)[0], q, kv)
    assert flops(lambda *x: losses(*x)[0], *index) <= without < flops(losses, *index)


def test_gradients_against_finite_differences(rng):
    """The steps of the difference change no selection."""
    with jax.enable_x64(True):
        args = [x.astype(np.float64) for x in inputs(rng, B=1, T=3, S=5, N=2)]

        @jax.jit
        def both(*args):
            out, aux = dsa_attention(*args, top_k=2, value_dim=E, query_start=2)
            return jnp.sin(out).sum() + jnp.cos(aux.lse).sum(), aux.kl, aux.indices

        _, _, chosen = both(*args)
        step = 1e-6
        for which, mine in ((0, (0, 1)), (1, (2, 3, 4))):
            grads = jax.jit(jax.grad(lambda *a, i=which: both(*a)[i], argnums=mine))(*args)
            for i, grad in zip(mine, grads, strict=True):
                direction = rng.normal(size=args[i].shape)
                ends = [[*args[:i], args[i] + s * direction, *args[i + 1 :]] for s in (step, -step)]
                up, down = (both(*a) for a in ends)
                for side in (up, down):
                    np.testing.assert_array_equal(side[2], chosen)
                slope = (up[which] - down[which]) / (2 * step)
                np.testing.assert_allclose((grad * direction).sum(), slope, rtol=1e-5, atol=1e-9)


def test_fp8_inputs_of_the_indexer(rng):
    q, kv, index_q, index_k, weights = inputs(rng)
    q8, k8 = (jnp.asarray(x).astype(jnp.float8_e4m3fn) for x in (index_q, index_k))
    got = dsa_attention(q, kv, q8, k8, weights, top_k=K, value_dim=E)
    back = (np.asarray(x.astype(jnp.float32)) for x in (q8, k8))
    assert_same(got, oracle(q, kv, *back, weights, *limits()))


def test_nan_in_keys_that_no_query_sees(rng):
    args = inputs(rng)
    ends = np.full((B, T), S - 2, np.int32)

    @jax.jit
    def run(args):
        fn = lambda *a: sum(losses(*a, is_causal=False, ends=ends))  # noqa: E731
        return jax.value_and_grad(fn, argnums=tuple(range(5)))(*args)

    poisoned = [x.copy() for x in args]
    for i in (1, 3):
        poisoned[i][:, S - 2 :] = np.nan
    want, want_grads = run(args)
    got, got_grads = run(poisoned)
    assert_unmoved((got, got_grads), (want, want_grads))


@pytest.mark.parametrize("given", [False, True], ids=["selected", "given"])
def test_deterministic_reaches_both_backward_passes(given, rng):
    """Each backward pass sorts its slots if, and only if, it must be deterministic."""
    args = inputs(rng)
    more = {"indices": np.zeros((B, T, K), np.int32)} if given else {"top_k": K}

    def sorts(which, argument, deterministic):
        def loss(*args):
            out, aux = dsa_attention(*args, value_dim=E, deterministic=deterministic, **more)
            return (jnp.sin(out).sum(), aux.kl)[which]

        text = jax.jit(jax.grad(loss, argnums=argument)).lower(*args).as_text()
        return "stablehlo.sort" in text

    for which, name in enumerate(("kv", "index_k")):
        for deterministic in (True, False):
            assert sorts(which, NAMES.index(name), deterministic) == deterministic, name


def test_variables_and_wide_integers(rng):
    args = inputs(rng)
    starts = rng.integers(-2, 4, size=(B, T))
    ends = rng.integers(4, S + 3, size=(B, T))
    ends[0, 0] = 2**40
    more = {"starts": starts, "ends": ends, "query_start": np.array([3, 2**31 - 1])}
    narrow = {n: np.minimum(x, 2**31 - 1).astype(np.int32) for n, x in more.items()}
    want = dsa_attention(*args, top_k=K, value_dim=E, **narrow)
    more = {n: Variable(np.minimum(x, 2**31 - 1)) for n, x in more.items()}
    got = dsa_attention(*map(Variable, args), top_k=np.int64(K), value_dim=np.int16(E), **more)
    jax.tree.map(np.testing.assert_array_equal, got, want)
    given = Variable(np.asarray(want[1].indices))
    again = dsa_attention(*map(Variable, args), indices=given, value_dim=E, **more)
    assert_matches(again, want, 1e-5)


def test_queries_without_keys(rng):
    """Such queries have no output and no gradient, and the mean of the KL leaves them out."""
    args, ends = inputs(rng), limits(S - T)[1]
    ends[:, 1] = 0

    def run(*args):
        out, aux = dsa_attention(*args, top_k=K, value_dim=E, is_causal=False, ends=ends)
        return jnp.sin(out).sum() + aux.kl, (out, aux)

    grads, got = jax.jit(jax.grad(run, argnums=(0, 1, 2, 3, 4), has_aux=True))(*args)
    assert_same(got, oracle(*args, np.zeros_like(ends), ends))
    out, aux = got
    assert (np.asarray(out[:, 1]) == 0).all() and (np.asarray(aux.lse[:, 1]) == -np.inf).all()
    assert (np.asarray(aux.indices[:, 1]) == -1).all()
    for i, grad in enumerate(grads):
        assert np.isfinite(grad).all()
        assert i in (1, 3) or (np.asarray(grad[:, 1]) == 0).all()


@pytest.mark.parametrize(("b", "t"), [(0, T), (B, 0)])
def test_empty(rng, b, t):
    args = inputs(rng, B=b, T=t)
    out, aux = dsa_attention(*args, top_k=K, value_dim=E)
    assert out.shape == (b, t, N, E) and aux.indices.shape == (b, t, K) and aux.kl == 0
    again, same = dsa_attention(*args, indices=aux.indices, value_dim=E)
    assert again.shape == out.shape and same.indices.shape == (b, t, K) and same.kl == 0


def test_no_heads(rng):
    q, *others = inputs(rng)

    def fn(*args):
        out, aux = dsa_attention(*args, top_k=K, value_dim=E)
        return out, aux.lse, aux.kl

    results, pull = jax.vjp(fn, q[:, :, :0], *others)
    assert [y.shape for y in results] == [(B, T, 0, E), (B, T, 0), ()] and results[2] == 0
    grads = pull(jax.tree.map(jnp.ones_like, results))
    assert [g.shape for g in grads] == [(B, T, 0, D), *(x.shape for x in others)]
    assert not any(np.asarray(g).any() for g in grads)
