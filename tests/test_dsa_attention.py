"""`dsa_attention` against the loops of its parts, and what its two losses may reach."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from support.compare import Variable, assert_as_good_as, assert_matches, assert_unmoved
from support.oracles.attn_dist import attn_dist
from support.oracles.indexer import indexer_logits
from support.oracles.losses import kl_rows
from support.oracles.sparse_mla import sparse_mla
from support.oracles.topk import topk, values

from jax_dsa import dsa_attention

B, T, S, N, D, E, J, C, K = 2, 5, 9, 4, 6, 4, 2, 3, 4
NAMES = ("q", "kv", "index_q", "index_k", "index_weights")


def inputs(rng, B=B, T=T, S=S, N=N, G=1):
    shapes = (B, T, N, D), (B, S, G, D), (B, T, J, C), (B, S, C), (B, T, J)
    return tuple(rng.normal(size=s).astype(np.float32) for s in shapes)


def oracle(
    q,
    kv,
    index_q,
    index_k,
    index_weights,
    starts,
    ends,
    top_k=K,
    sinks=None,
    k_scale=None,
    scale=D**-0.5,
):
    """out, indices, kl and lse."""
    index = indexer_logits(
        index_q, index_k, index_weights, starts=starts, ends=ends, index_k_scale=k_scale
    )
    indices = topk(index, top_k)
    groups = kv.shape[2]
    shared = np.repeat(indices[:, :, None], groups, axis=2)
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
    more = {"starts": starts, "ends": ends, "sinks": sinks, "index_k_scale": k_scale, "scale": 0.7}
    for causal in (True, False):
        got = dsa_attention(
            *args, top_k=K, value_dim=E, query_start=2, is_causal=causal, deterministic=True, **more
        )
        stop = np.minimum(ends, limits(2)[1]) if causal else ends
        assert_same(got, oracle(*args, starts, stop, sinks=sinks, k_scale=k_scale, scale=0.7))


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
    """Where no step of the difference changes a selection."""
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


def test_the_indexers_fp8_inputs(rng):
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


@pytest.mark.parametrize("G", [1, 2])
def test_a_selection_from_elsewhere(G, rng):
    """What the indexer selects, given in another order: the same results and gradients, and without
    the indexer's inputs those of the attention alone.
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


def with_given(q, kv, index_q, index_k, index_weights, given, starts, ends, k_scale):
    """The oracle's results for given indices, of which those that are not seen are dropped."""
    seen = (given >= np.maximum(starts, 0)[..., None]) & (given < np.minimum(ends, S)[..., None])
    indices = np.where(seen, given, -1)
    shared = np.repeat(indices[:, :, None], kv.shape[2], axis=2)
    out, lse = sparse_mla(q, kv, shared, value_dim=E, scale=D**-0.5)
    teacher = attn_dist(q, kv, shared, lse, scale=D**-0.5, head_group=1).sum(1)
    logits = indexer_logits(index_q, index_k, index_weights, index_k_scale=k_scale)
    kl, _ = kl_rows(values(logits, indices), teacher, indices >= 0)
    return out, indices, kl, lse


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
        assert_same(got, with_given(*args, given, starts, stop, k_scale))


def test_nan_in_keys_that_a_given_selection_drops(rng):
    """Key S - 1 is in every selection, and no query sees it."""
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


@pytest.mark.parametrize("given", [False, True], ids=["selected", "given"])
def test_deterministic_reaches_both_backward_passes(given, rng):
    """Each sorts its slots, and none does without it."""
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
    """They have no output, no gradient, and no part in the KL's mean."""
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


def test_an_empty_selection(rng):
    out, aux = dsa_attention(*inputs(rng), indices=np.zeros((B, T, 0), np.int32), value_dim=E)
    assert (np.asarray(out) == 0).all() and (np.asarray(aux.lse) == -np.inf).all() and aux.kl == 0


PICKS, INDEX_Q = np.zeros((B, T, K), np.int32), np.zeros((B, T, J, C), np.float32)
ALONE = {"top_k": None, "index_q": None, "index_k": None, "index_weights": None, "indices": PICKS}
BAD = [
    ({"q": np.zeros((B, T, N, D), np.int32)}, TypeError, "'q' has dtype int32"),
    ({"q": np.zeros((T, D), np.float32)}, ValueError, "'q' has shape"),
    ({"q": [1.0]}, TypeError, "'q' is list"),
    ({"kv": np.zeros((B, S, 1, D + 1), np.float32)}, ValueError, "'kv' has shape"),
    ({"kv": jnp.zeros((B, S, 1, D), jnp.bfloat16)}, TypeError, "'kv' has dtype bfloat16"),
    (
        {"kv": np.zeros((B, S, 3, D), np.float32)},
        ValueError,
        "'q' has N=4 heads and 'kv' has G=3, want N",
    ),
    ({"index_q": np.zeros((B, T + 1, J, C), np.float32)}, ValueError, "'index_q' has shape"),
    ({"index_k": np.zeros((B, S + 1, C), np.float32)}, ValueError, "'index_k' has shape"),
    ({"index_k": np.zeros((B, S, C), np.float16)}, TypeError, "'index_k' has dtype float16"),
    ({"index_weights": np.zeros((B, T, J + 1), np.float32)}, ValueError, "'index_weights'"),
    ({"index_weights": np.zeros((B, T, J), np.int32)}, TypeError, "'index_weights'"),
    ({"top_k": 0}, ValueError, "'top_k' is 0, want int in 1..2147483647"),
    ({"top_k": 2.0}, TypeError, "'top_k' is 2.0"),
    ({"value_dim": D + 1}, ValueError, "'value_dim' is 7"),
    ({"scale": "big"}, TypeError, "'scale' is 'big'"),
    ({"is_causal": 1}, TypeError, "'is_causal' is 1"),
    ({"query_start": np.zeros(3, np.int32)}, ValueError, "'query_start' has shape"),
    ({"starts": np.zeros((B, T + 1), np.int32)}, ValueError, "'starts' has shape"),
    ({"ends": np.zeros((B, T), np.float32)}, TypeError, "'ends' has dtype float32"),
    ({"index_k_scale": np.zeros((B, S, 1), np.float32)}, ValueError, "'index_k_scale' has shape"),
    ({"sinks": np.zeros(N + 1, np.float32)}, ValueError, "'sinks' has shape"),
    ({"top_k": None}, ValueError, "'top_k' is None, want an int, or 'indices'"),
    ({"indices": PICKS}, ValueError, "'top_k' is 4, want None beside 'indices'"),
    (ALONE | {"indices": None, "top_k": K}, ValueError, "'index_q' is None, want an array, or 'in"),
    (ALONE | {"index_q": INDEX_Q}, ValueError, "'index_k' is None, want an array, or 'indices'"),
    (ALONE | {"index_k_scale": PICKS[:, 0]}, ValueError, "'index_q' is None, want an array"),
    (ALONE | {"indices": PICKS[:, :, None]}, ValueError, "'indices' has shape .*want .B, T, K"),
    (ALONE | {"indices": PICKS[:, 1:]}, ValueError, "'indices' has shape .*T=5"),
    (ALONE | {"indices": PICKS.astype(np.float32)}, TypeError, "'indices' has dtype float32, wa"),
    (ALONE | {"indices": [1]}, TypeError, "'indices' is list"),
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
