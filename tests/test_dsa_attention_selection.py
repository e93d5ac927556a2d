"""`dsa_attention` with a selection that is given as `indices`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from support.compare import assert_matches, assert_unmoved
from support.dsa_attention import B, E, K, S, T, assert_same, inputs, limits, oracle_of_selection

from jax_dsa import dsa_attention


@pytest.mark.parametrize("G", [1, 2])
def test_a_selection_from_elsewhere(G, rng):
    """The indexer's own selection, given in another order, leads to the same results and gradients.

    Without the indexer's inputs, the results are those of the attention alone.
    """
    args = inputs(rng, G=G)
    options = {"value_dim": E, "query_start": S - T}
    _, chosen = dsa_attention(*args, top_k=K, **options)
    order = rng.permuted(np.tile(np.arange(K), (B, T, 1)), axis=-1)
    indices = np.take_along_axis(np.asarray(chosen.indices), order, -1)

    def run(args, **selection):
        def total(*args):
            out, aux = dsa_attention(*args, **selection, **options)
            return jnp.sin(out).sum() + jnp.cos(aux.lse).sum() + aux.kl, (out, aux)

        numbers = tuple(range(len(args)))
        grads, results = jax.jit(jax.grad(total, argnums=numbers, has_aux=True))(*args)
        return results, grads

    (out, aux), grads = run(args, top_k=K)
    (again, same), same_grads = run(args, indices=indices)
    np.testing.assert_array_equal(same.indices, indices)
    assert_matches((again, same.lse, same.kl, same_grads), (out, aux.lse, aux.kl, grads), 1e-5)
    (again, alone), own_grads = run(args[:2], indices=indices.astype(np.int64))
    np.testing.assert_array_equal(alone.indices, indices)
    assert alone.kl == 0 and alone.kl.dtype == jnp.float32
    assert_matches((again, alone.lse, own_grads), (out, aux.lse, grads[:2]), 1e-5)


@pytest.mark.parametrize("G", [1, 2])
def test_slots_that_a_query_does_not_see_are_dropped(G, rng):
    args = inputs(rng, G=G)
    given = rng.integers(-3, S + 3, size=(B, T, 7)).astype(np.int32)
    given[:, :, 0] = rng.choice([-(2**31), 2**31 - 1, S, -1, 0], size=(B, T))
    given[1, 2] = -1
    starts = rng.integers(-2, 4, size=(B, T)).astype(np.int32)
    ends = rng.integers(2, S + 3, size=(B, T)).astype(np.int32)
    k_scale = np.exp(rng.normal(size=(B, S))).astype(np.float32)
    more = {"starts": starts, "ends": ends, "index_k_scale": k_scale}
    for causal in (True, False):
        stop = np.minimum(ends, limits(2)[1]) if causal else ends
        got = dsa_attention(
            *args, indices=given, value_dim=E, query_start=2, is_causal=causal, **more
        )
        assert_same(got, oracle_of_selection(*args, given, starts, stop, k_scale))


def test_nan_in_keys_that_a_given_selection_drops(rng):
    """Every selection contains key S - 1, which no query sees."""
    args = inputs(rng)
    given = rng.integers(0, S, size=(B, T, K)).astype(np.int32)
    given[:, :, 0] = S - 1

    @jax.jit
    def run(args):
        def total(*args):
            out, aux = dsa_attention(*args, indices=given, value_dim=E, query_start=S - T - 1)
            return jnp.sin(out).sum() + aux.kl

        return jax.value_and_grad(total, argnums=tuple(range(5)))(*args)

    poisoned = [x.copy() for x in args]
    for i in (1, 3):
        poisoned[i][:, S - 1] = np.nan
    got, want = run(poisoned), run(args)
    assert np.isfinite(want[0])
    assert_unmoved(got, want)


def test_a_given_selection_under_vmap_and_on_a_mesh(rng, cpus):
    args = [jnp.asarray(x) for x in inputs(rng, B=4, T=6)]
    given = jnp.asarray(rng.integers(-1, S, size=(4, 6, K)), jnp.int32)
    options = {"value_dim": E, "is_causal": False}

    @jax.jit
    def run(*args):
        def total(*args):
            out, aux = dsa_attention(*args, indices=given_, **options)
            return jnp.sin(out).sum() + aux.kl, (out, aux)

        *args, given_ = args
        return jax.grad(total, argnums=tuple(range(5)), has_aux=True)(*args)

    each = [run(*(x[i] for x in args), given[i]) for i in range(4)]
    each = jax.tree.map(lambda *x: np.stack(x), *each)
    assert_matches(jax.vmap(run)(*args, given), each, 1e-5)

    want = run(*args, given)
    queries = P(None, "x")
    for axis_type, specs in (
        (AxisType.Auto, (P("x"),) * 6),
        (AxisType.Explicit, (queries, P(), queries, P(), queries, queries)),
    ):
        mesh = jax.make_mesh((2,), ("x",), devices=cpus[:2], axis_types=(axis_type,))
        with jax.set_mesh(mesh):
            sharded = [
                jax.device_put(x, NamedSharding(mesh, spec))
                for x, spec in zip((*args, given), specs, strict=True)
            ]
            compiled = run.lower(*sharded).compile()
            assert "all-gather" not in compiled.as_text()
            assert_matches(compiled(*sharded), want, 1e-5)


def test_an_empty_selection(rng):
    out, aux = dsa_attention(*inputs(rng), indices=np.zeros((B, T, 0), np.int32), value_dim=E)
    assert (np.asarray(out) == 0).all() and (np.asarray(aux.lse) == -np.inf).all() and aux.kl == 0
