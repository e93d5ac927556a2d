"""The indexer's gradients, its low-precision dtypes, and its treatment of NaN."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads
from support.compare import assert_as_good_as, assert_matches, assert_unmoved
from support.indexer import FP8, inputs, options_of
from support.oracles import indexer as oracle

import jax_dsa
from jax_dsa import indexer_logits, indexer_topk
from jax_dsa.ops.indexer import indexer_selected_logits


@pytest.mark.parametrize("relu", [True, False])
def test_gradients_against_finite_differences(relu, rng):
    with jax.enable_x64(True):
        q, k, weights = (jnp.asarray(x, jnp.float64) for x in inputs(rng, B=1, T=3, S=5))
        chosen = options_of(rng, B=1, T=3, S=5)
        scale = jnp.asarray(chosen.pop("index_k_scale"), jnp.float64)
        g = jnp.asarray(rng.normal(size=(1, 3, 5)))

        def dense(q, k, weights, scale):
            logits = indexer_logits(q, k, weights, index_k_scale=scale, relu=relu, **chosen)
            return jnp.sum(jnp.where(jnp.isfinite(logits), jnp.sin(logits), 0) * g)

        def sparse(q, k, weights, scale):
            logits = indexer_topk(q, k, weights, 2, index_k_scale=scale, relu=relu, **chosen)[1]
            return jnp.sum(jnp.where(jnp.isfinite(logits), jnp.sin(logits), 0) * g[..., :2])

        for fn in (dense, sparse):
            check_grads(jax.jit(fn), (q, k, weights, scale), 1, ["rev"], eps=1e-7, rtol=1e-5)


def test_deterministic_gradients(rng):
    """Deterministic gradients sort the slots and equal the others up to rounding."""
    arrays, options = inputs(rng, T=9, S=20), options_of(rng, T=9, S=20)

    def gradients(deterministic):
        def loss(*arrays):
            logits = indexer_topk(*arrays, 6, deterministic=deterministic, **options)[1]
            return jnp.sum(jnp.where(jnp.isfinite(logits), jnp.sin(logits), 0))

        lowered = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(*arrays)
        assert ("stablehlo.sort" in lowered.as_text()) == deterministic
        return lowered.compile()(*arrays)

    assert_matches(gradients(True), gradients(False), 1e-6)


def test_relu_has_no_gradient_at_zero():
    q, k = np.zeros((1, 1, 1, 2), np.float32), np.ones((1, 1, 2), np.float32)
    weights = np.ones((1, 1, 1), np.float32)
    for fn in (indexer_logits, lambda *a: indexer_topk(*a, 1)[1]):
        grads = jax.grad(lambda *a, fn=fn: fn(*a).sum(), argnums=(0, 1, 2))(q, k, weights)
        assert all((np.asarray(g) == 0).all() for g in grads)


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_keys_out_of_range_do_not_matter(poison, rng):
    """NaN in keys outside the ranges changes no bit of results or gradients."""
    q, k, weights = inputs(rng, S=12)
    starts, ends = np.full((2, 5), 2, np.int32), np.full((2, 5), 9, np.int32)
    poisoned = k.copy()
    poisoned[:, :2] = poisoned[:, 9:] = poison
    scale = np.ones((2, 12), np.float32)
    bad_scale = np.where(np.isfinite(poisoned[..., 0]), scale, np.nan)

    def dense(q, k, weights, scale):
        logits = indexer_logits(q, k, weights, index_k_scale=scale, starts=starts, ends=ends)
        return jnp.sum(jnp.where(jnp.isfinite(logits), logits, 0)), logits

    def sparse(q, k, weights, scale):
        out = indexer_topk(q, k, weights, 9, index_k_scale=scale, starts=starts, ends=ends)
        return jnp.sum(jnp.where(out[0] >= 0, out[1], 0)), out

    for fn in (dense, sparse):
        run = jax.jit(jax.value_and_grad(fn, argnums=(0, 1, 2, 3), has_aux=True))
        assert_unmoved(run(q, k, weights, scale), run(q, poisoned, weights, bad_scale))


@pytest.mark.parametrize("name", ["logits", "selection", "loss"])
def test_a_query_without_keys_affects_no_gradient(name, rng):
    q, k, weights = inputs(rng)
    main = [rng.normal(size=s).astype(np.float32) for s in ((2, 5, 2, 4), (2, 9, 1, 4))]
    seen = {"starts": np.full((2, 5), 2, np.int32), "ends": np.array([[9, 2, 9, 9, 9]] * 2)}
    fn = {
        "logits": lambda *a: indexer_logits(*a, **seen),
        "selection": lambda *a: indexer_topk(*a, 3, **seen)[1],
        "loss": lambda *a: jax_dsa.dense_indexer_kl_loss(*a, *main, is_causal=False, **seen),
    }[name]

    def grads(*args):
        y, pull = jax.vjp(fn, *args)
        return pull(jnp.ones_like(y))

    expected = grads(q, k, weights)
    for i in (0, 2):
        bad = [q.copy(), k, weights.copy()]
        bad[i][:, 1] = np.nan
        jax.tree.map(np.testing.assert_array_equal, grads(*bad), expected)


def test_a_nan_key_in_range_stays_in_its_column(rng):
    q, k, weights = inputs(rng)
    k[:, 4] = np.nan
    logits = np.asarray(indexer_logits(q, k, weights))
    assert np.isnan(logits[..., 4]).all()
    assert np.isfinite(np.delete(logits, 4, axis=-1)).all()
    assert not (np.asarray(indexer_topk(q, k, weights, 9)[0]) == 4).any()


def test_bfloat16(rng):
    q, k, weights = inputs(rng, J=8, C=32, S=20)
    q16, k16 = (jnp.asarray(x, jnp.bfloat16) for x in (q, k))
    g = rng.normal(size=(2, 5, 20)).astype(np.float32)

    def plain(q, k, weights):
        x = jnp.maximum(jnp.einsum("btjc,bsc->btjs", q, k), 0)
        return jnp.einsum("btjs,btj->bts", x, weights.astype(x.dtype))

    def grads(fn, *args):
        return jax.jit(jax.grad(lambda *a: (fn(*a) * g).sum(), argnums=(0, 1, 2)))(*args)

    exact = (np.asarray(q16, np.float32), np.asarray(k16, np.float32), weights)
    got, low = indexer_logits(q16, k16, weights), plain(q16, k16, weights)
    assert got.dtype == jnp.float32
    assert_as_good_as(got, low, plain(*exact))
    for name, a, b, c in zip(
        ("dq", "dk", "dw"),
        grads(indexer_logits, q16, k16, weights),
        grads(plain, q16, k16, weights),
        grads(plain, *exact),
        strict=True,
    ):
        assert a.dtype == b.dtype
        assert_as_good_as(a, b, c, 4.0, name)


def test_float8(rng):
    """FP8 logits are nearly exact, and gradients are saturated FP8 values."""
    q, k, weights = inputs(rng, dtype=FP8)
    scale = np.exp(rng.normal(size=(2, 9))).astype(np.float32)
    got = indexer_logits(q, k, weights, index_k_scale=scale)
    expected = oracle.indexer_logits(q, k, weights, index_k_scale=scale)
    # XLA may use the FP8 tensor cores of a GPU, whose sums have fewer bits than float32.
    tol = 1e-6 if jax.default_backend() == "cpu" else 1e-4
    assert_matches(got, expected.astype(np.float32), tol)

    def loss(q, k, weights):
        return 1e4 * jnp.sum(indexer_topk(q, k, weights, 3, index_k_scale=scale)[1])

    dq, dk, dw = jax.grad(loss, argnums=(0, 1, 2))(*(jnp.asarray(x) for x in (q, k, weights)))
    assert dq.dtype == dk.dtype == FP8 and dw.dtype == jnp.float32
    for x in (dq, dk):
        assert np.abs(np.asarray(x, np.float32)).max() == 448
        assert np.isfinite(np.asarray(x, np.float32)).all()


def test_no_key_to_select():
    arrays = [jnp.ones((1, 2, 1, 3)), jnp.ones((1, 4, 3)), jnp.ones((1, 2, 1))]
    ends = jnp.zeros((1, 2), jnp.int32)
    indices, logits = indexer_topk(*arrays, 2, ends=ends)
    assert (np.asarray(indices) == -1).all() and (np.asarray(logits) == -np.inf).all()
    loss = lambda *a: jnp.sum(jnp.exp(indexer_topk(*a, 2, ends=ends)[1]))  # noqa: E731
    for g in jax.grad(loss, argnums=(0, 1, 2))(*arrays):
        assert (np.asarray(g) == 0).all()
    assert indexer_topk(*arrays, 0)[0].shape == (1, 2, 0)


def test_weights_of_low_precision(rng):
    q, k, weights = inputs(rng)
    low = weights.astype(jnp.bfloat16)

    def fn(weights):
        logits = indexer_logits(q, k, weights)
        return logits, indexer_topk(q, k, weights, 3)[1]

    got, pull = jax.vjp(fn, low)
    expected, pull_wide = jax.vjp(fn, low.astype(jnp.float32))
    jax.tree.map(np.testing.assert_array_equal, got, expected)
    (grad,), (wide,) = pull(got), pull_wide(got)
    assert grad.dtype == jnp.bfloat16
    assert_matches(grad, wide.astype(jnp.bfloat16), tol=2**-7)  # The gradient is rounded twice.


@pytest.mark.parametrize("relu", [True, False])
def test_logits_of_selected_keys(rng, relu):
    """`indexer_selected_logits` equals `indexer_topk` for the same keys, with its gradients."""
    arrays, options = inputs(rng, T=7, S=40), options_of(rng, T=7, S=40)
    k_scale = options.pop("index_k_scale")
    indices, _ = indexer_topk(*arrays, 5, index_k_scale=k_scale, relu=relu, **options)
    weights = rng.normal(size=indices.shape).astype(np.float32)

    def loss(logits):
        return jnp.sum(jnp.where(indices >= 0, weights * logits, 0))

    def by_topk(q, k, w, scale):
        _, logits = indexer_topk(q, k, w, 5, index_k_scale=scale, relu=relu, **options)
        return loss(logits), logits

    def by_indices(q, k, w, scale):
        logits = indexer_selected_logits(q, k, w, indices, index_k_scale=scale, relu=relu)
        return loss(logits), logits

    expected, got = (
        jax.jit(jax.value_and_grad(fn, (0, 1, 2, 3), has_aux=True))(*arrays, k_scale)
        for fn in (by_topk, by_indices)
    )
    assert_matches(got, expected, 1e-5)


def test_logits_of_empty_slots_and_a_missing_batch_axis(rng):
    q, k, weights = inputs(rng, B=1)
    indices = np.array([[[3, -1, 9, 2**31 - 1]] * 5], np.int32)
    got = np.asarray(indexer_selected_logits(q, k, weights, indices))
    assert np.isfinite(got[..., 0]).all() and (got[..., 1:] == -np.inf).all()
    alone = indexer_selected_logits(q[0], k[0], weights[0], indices[0])
    np.testing.assert_array_equal(alone, got[0])
    with pytest.raises(ValueError, match=r"indexer_selected_logits: argument 'indices' has shape"):
        indexer_selected_logits(q, k, weights, indices[0])
