"""`htree_attention` and `htree_select` against the float64 oracle. Trees: test_htree_decode.py."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.extend.core import jaxprs_in_params
from jax.test_util import check_grads
from support.compare import assert_as_good_as, assert_matches, assert_unmoved
from support.oracles import htree as oracle

import jax_dsa
from jax_dsa.core import streaming
from jax_dsa.ops.htree import (
    HTreeCache,
    cuda,
    htree_attention,
    htree_build,
    htree_select,
    tree,
    xla,
)
from jax_dsa.ops.htree.spec import Operands, Options, Results

B, T, N, G, D, E = 2, 62, 4, 2, 6, 5
TREE = {"compression": 3, "top_k": 3}  # layers of 62, 21 and 7 nodes


def inputs(rng: np.random.Generator, dtype: Any = np.float32, t: int = T) -> tuple:
    shapes = (B, t, N, D), (B, t, G, D), (B, t, G, E)
    return tuple(rng.normal(size=shape).astype(dtype) for shape in shapes)


def both(q: Any, k: Any, v: Any, **options: Any) -> tuple[jax.Array, jax.Array]:
    return htree_attention(q, k, v, return_lse=True, **{**TREE, **options})


@functools.partial(jax.jit, static_argnums=3)
def grads(args: tuple, dout: Any, dlse: Any, options: tuple = ()) -> tuple:
    return jax.vjp(lambda *args: both(*args, **dict(options)), *args)[1]((dout, dlse))


def cotangents(rng: np.random.Generator, t: int = T) -> tuple:
    shapes = (B, t, N, E), (B, t, N)
    return tuple(rng.normal(size=shape).astype(np.float32) for shape in shapes)


def listed(indices: Any) -> list[int]:
    """An inspected row without its -1, which come last."""
    row = np.asarray(indices)
    count = (row >= 0).sum()
    assert np.all(row[:count] >= 0) and np.all(np.diff(row[:count]) > 0)
    return row[:count].tolist()


def test_oracle_on_a_case_done_by_hand() -> None:
    k, v = np.zeros((1, 4, 1, 2)), np.array([1.0, 3.0, 10.0, 20.0]).reshape(1, 4, 1, 1)
    q = np.ones((1, 4, 1, 2))
    out, lse, seen = oracle.attention(q, k, v, compression=2, top_k=1)
    # The last query takes tokens 2 and 3 themselves, and the mean of the first two.
    np.testing.assert_allclose(out[0, :, 0, 0], [1, 2, (2 + 10) / 2, (2 + 10 + 20) / 3])
    np.testing.assert_allclose(lse[0, :, 0], np.log([1, 2, 2, 3]))
    assert seen[0, 3, 0] == [[[2, 3], [0, 1]], [[], [1]]]
    turned = oracle.rope(np.array([1.0, 1.0, 0.0, 0.0]), 3, base=100.0)
    np.testing.assert_allclose(turned, [np.cos(3), np.cos(0.3), np.sin(3), np.sin(0.3)])


def test_defaults(rng: np.random.Generator) -> None:
    """16 children a node, 512 nodes selected: one layer up to 8192 tokens, the dense attention."""
    small = inputs(rng, t=20)
    assert_matches(htree_attention(*small), oracle.dense(*small).astype(np.float32), tol=1e-5)
    q, k = (jax.ShapeDtypeStruct((1, 8193, heads, D), jnp.float32) for heads in (N, G))
    assert [x.shape[1] for x, _ in jax.eval_shape(htree_build, k, k)] == [8193, 513]
    tokens, top = jax.eval_shape(htree_select, q, k)
    assert tokens.candidates.shape[3] == 8192 and top.selected.shape[3] == 512
    cache = jax.eval_shape(lambda: HTreeCache.empty(1, 8193, D))
    assert [x.shape[1] for x, _ in jax.eval_shape(lambda c: c.layers, cache)] == [8193, 513]
    assert cache.v.shape == cache.k.shape and cache.k.dtype == jnp.bfloat16


CASES = {
    "three layers": (T, {}),
    "one selected": (7, {"compression": 2, "top_k": 1, "scale": 0.9, "rope_base": 50.0}),
    "one layer": (9, {}),
    "one token more": (10, {}),
    "one token": (1, {}),
}


@pytest.mark.parametrize(("t", "options"), CASES.values(), ids=CASES.keys())
def test_forward_and_selection(t: int, options: dict, rng: np.random.Generator) -> None:
    args = inputs(rng, t=t)
    out, lse, seen = oracle.attention(*args, **{**TREE, **options})
    assert_matches(both(*args, **options), (out.astype(np.float32), lse.astype(np.float32)), 1e-5)
    layers = htree_select(*args[:2], **{**TREE, **options})
    assert layers[0].selected.shape == (B, t, G, 0)
    for (b, t, g), (candidates, selected) in seen.items():
        for level, layer in enumerate(layers):
            assert listed(layer.candidates[b, t, g]) == candidates[level]
            assert listed(layer.selected[b, t, g]) == selected[level]


def test_accumulated_nodes_are_a_partition(rng: np.random.Generator) -> None:
    q, k, _ = inputs(rng)
    layers = jax.tree.map(np.asarray, htree_select(q, k, **TREE))
    for b, t, g in np.ndindex(B, T, G):
        times = np.zeros(T, int)
        for level, layer in enumerate(layers):
            span = TREE["compression"] ** level
            for node in set(listed(layer.candidates[b, t, g])) - set(
                listed(layer.selected[b, t, g])
            ):
                times[node * span : (node + 1) * span] += 1
        np.testing.assert_array_equal(times, np.arange(T) <= t)


def at_some_tokens(q: Any, k: Any, positions: Any, **options: Any) -> np.ndarray:
    """Ordinals [queries, layers - 1, K] that queries at these tokens select."""
    operands = Operands(jnp.asarray(q), jnp.asarray(k), jnp.asarray(k), jnp.asarray(positions))
    return np.asarray(jax.jit(xla.htree_fwd, static_argnums=0)(Options(**options), operands)[2])[
        0, :, 0
    ]


@pytest.mark.parametrize("options", [(16, 512), (8, 100), (32, 7)], ids=str)
def test_accumulated_nodes_are_a_partition_of_many_tokens(
    options: tuple[int, int], rng: np.random.Generator
) -> None:
    sizes = {"compression": options[0], "top_k": options[1]}
    tokens = int(rng.integers(100_000, 300_001))
    positions = np.append(rng.integers(0, tokens, 5), tokens - 1).astype(np.int32)
    q, k = (rng.normal(size=(1, n, 1, 2)).astype(np.float32) for n in (6, tokens))
    selected = at_some_tokens(q, k, positions[None], **sizes)
    layers = [layer.size for layer in tree.tree_layers(tokens, *options)]
    oracle.assert_partition(selected, positions, tokens, layers, **sizes)


def test_selection_is_exact_with_many_ties(rng: np.random.Generator) -> None:
    """Of 1000 queries, in two layers."""
    tokens, sizes = 20_000, {"compression": 16, "top_k": 32}
    q, k = oracle.exact_problem(rng, tokens, 2, 16, 16)
    positions = rng.integers(0, tokens, 1000).astype(np.int32)
    selected = at_some_tokens(
        q[:, positions].astype(np.float32),
        k.astype(np.float32),
        positions[None],
        rope_base=1e38,
        scale=0.125,
        **sizes,
    )
    for got, position in zip(selected, positions, strict=True):
        want = oracle.exact_selection(q[0, position, 0], k[0, :, 0], position, **sizes)
        for row, ordinals in zip(got, want, strict=True):
            np.testing.assert_array_equal(row[row >= 0], ordinals)


@pytest.mark.parametrize("top_k", [16, 512])
def test_up_to_the_budget_it_is_dense_attention(top_k: int, rng: np.random.Generator) -> None:
    """With as many tokens as there is room for, and with fewer."""
    args = inputs(rng, t=64)
    got = htree_attention(*args, compression=4, top_k=top_k)
    assert_matches(got, oracle.dense(*args).astype(np.float32), tol=1e-5)


def test_later_tokens_do_not_matter(rng: np.random.Generator) -> None:
    """The same from a tree of three layers, of two, and of one."""
    args = inputs(rng)
    whole = both(*args)
    for t in (7, 20):
        part = both(*(x[:, :t] for x in args))
        assert_matches(part, tuple(x[:, :t] for x in whole), tol=1e-5)


@pytest.mark.parametrize("t", [T, 9], ids=["three layers", "one layer"])
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_poisoned_future(t: int, poison: float, rng: np.random.Generator) -> None:
    """Not a bit changes for queries 0..last, and what they send back to the inputs."""
    last = t // 2
    args, (dout, dlse) = inputs(rng, t=t), cotangents(rng, t)
    dout[:, last + 1 :], dlse[:, last + 1 :] = 0, 0
    bad = [x.copy() for x in args]
    for x in bad:
        x[:, last + 1 :] = poison
    for clean, dirty in zip(both(*args), both(*bad), strict=True):
        np.testing.assert_array_equal(clean[:, : last + 1], dirty[:, : last + 1])
        assert not np.isfinite(dirty[:, last + 1 :]).any()
    clean, dirty = grads(args, dout, dlse), grads(tuple(bad), dout, dlse)
    assert_unmoved(clean, dirty)
    for b in dirty:
        assert np.all(np.asarray(b)[:, last + 1 :] == 0)
        assert np.asarray(b)[:, : last + 1].any()


@pytest.mark.parametrize("t", [T, 9], ids=["three layers", "one layer"])
def test_poison_that_is_visible_shows(t: int, rng: np.random.Generator) -> None:
    q, k, v = inputs(rng, t=t)
    v[0, 5, 1, 2] = np.nan
    k[1, 3, 0, 4] = np.nan
    out, lse = (np.asarray(x) for x in both(q, k, v))
    hit = np.zeros(out.shape, bool)
    hit[0, 5:, N // G :, 2] = True
    hit[1, 3:, : N // G] = True
    np.testing.assert_array_equal(np.isnan(out), hit)
    np.testing.assert_array_equal(np.isnan(lse), hit.all(-1))


def test_large_score_gaps(rng: np.random.Generator) -> None:
    """Selected and other nodes lie tens of nats apart, one way and the other."""
    q, k, v = inputs(rng)
    q *= 40
    out, lse, _ = oracle.attention(q, k, v, **TREE)
    assert np.ptp(lse) > 40
    got = both(q, k, v)
    assert_matches(got, (out.astype(np.float32), lse.astype(np.float32)), tol=1e-4)
    dout, dlse = cotangents(rng)
    assert all(np.isfinite(x).all() for x in grads((q, k, v), dout, dlse))


def test_ties_go_to_the_lower_ordinal(rng: np.random.Generator) -> None:
    q, k, _ = inputs(rng)
    layers = htree_select(np.zeros_like(q), k, **TREE)
    for b, t, g in np.ndindex(B, T, G):
        for level in (1, 2):
            nodes = listed(layers[level].candidates[b, t, g])
            want = nodes[:2] + nodes[-1:] if len(nodes) > 3 else nodes
            assert listed(layers[level].selected[b, t, g]) == want


def test_importance_is_over_all_heads_of_a_group() -> None:
    """Node 1 is the best for each of the heads, node 0 has the best single score, and node 1 wins
    by the sum; by the largest score node 0 would.
    """
    q = np.zeros((1, 8, 2, 2), np.float32)
    q[0, 7] = [[30.0, 0.0], [0.0, 30.0]]
    k = np.zeros((1, 8, 1, 2), np.float32)
    k[0, 0:2, 0], k[0, 2:4, 0] = [1.0, -10.0], [0.95, 0.95]
    # The query stands at place 3 of the upper layer: turned so, keys meet it as they are.
    for t in range(8):
        k[0, t, 0] = oracle.rope(k[0, t, 0], 3 - t // 2, 1.0)
    upper = htree_select(q, k, compression=2, top_k=2, scale=0.05)[1]
    assert listed(upper.selected[0, 7, 0]) == [1, 3]


@pytest.mark.parametrize("t", [T, 9], ids=["three layers", "one layer"])
def test_gradients_are_those_of_plain_autodiff(t: int, rng: np.random.Generator) -> None:
    """Of both results, and of each alone."""
    args, (dout, dlse) = inputs(rng, t=t), cotangents(rng, t)
    plain = jax.jit(lambda args, cts: jax.vjp(both, *args)[1](cts))
    for cts in ((dout, dlse), (dout, 0 * dlse), (0 * dout, dlse)):
        with jax_dsa.plain_xla():
            want = plain(args, cts)
        assert_matches(grads(args, *cts), want, tol=1e-5)


def test_gradients_against_finite_differences(rng: np.random.Generator) -> None:
    with jax.enable_x64(True):
        args = tuple(jnp.asarray(x) for x in inputs(rng, np.float64, t=7))
        fn = jax.jit(functools.partial(both, compression=2, top_k=2))
        assert fn(*args)[0].dtype == jnp.float64
        check_grads(fn, args, order=1, modes=["rev"], atol=1e-6, rtol=1e-6, eps=1e-6)


def dense(q: Any, k: Any, v: Any) -> jax.Array:
    """Causal attention with RoPE in the dtype of its operands."""
    t = q.shape[1]
    angle = np.arange(t)[:, None] * 10000.0 ** -(np.arange(D // 2) / (D // 2))
    cos, sin = (f(angle)[:, None].astype(np.float32) for f in (np.cos, np.sin))

    def turn(x: Any) -> Any:
        a, b = jnp.split(x, 2, axis=-1)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)

    k, v = (jnp.repeat(x, N // G, axis=2) for x in (turn(k), v))
    s = jnp.einsum("btnd,bsnd->bnts", turn(q), k) * jnp.asarray(D**-0.5, q.dtype)
    s = jnp.where(np.tri(t, dtype=bool), s, -jnp.inf)
    return jnp.einsum("bnts,bsne->btne", jax.nn.softmax(s), v)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_low_precision_of_one_layer(dtype: Any, rng: np.random.Generator) -> None:
    args = [jnp.asarray(x, dtype) for x in inputs(rng, t=9)]
    dout = jnp.asarray(rng.normal(size=(B, 9, N, E)), dtype)

    @functools.partial(jax.jit, static_argnums=0)
    def run(fn: Any, args: Any) -> tuple:
        out, pull = jax.vjp(fn, *args)
        return out, *pull(dout.astype(out.dtype))

    ours = run(functools.partial(htree_attention, **TREE), args)
    low, exact = (run(dense, [x.astype(d) for x in args]) for d in (dtype, np.float32))
    for name, got, lo, ex in zip(("out", "dq", "dk", "dv"), ours, low, exact, strict=True):
        assert got.dtype == dtype
        assert_as_good_as(got, lo, ex, factor=3 if name == "out" else 4, what=name)


def test_low_precision_of_a_tree(rng: np.random.Generator) -> None:
    """Against the oracle that is given the selection, which rounding may decide."""
    t = 20
    args = [jnp.asarray(x, jnp.bfloat16) for x in inputs(rng, t=t)]
    layers = jax.tree.map(np.asarray, htree_select(*args[:2], **TREE))
    choice = {
        (b, t, g): [listed(layer.selected[b, t, g]) for layer in layers]
        for b, t, g in np.ndindex(B, t, G)
    }
    out, lse, _ = oracle.attention(*args, **TREE, choice=choice)
    got = both(*args)
    assert got[0].dtype == jnp.bfloat16 and got[1].dtype == jnp.float32
    assert_matches(got[0].astype(np.float32), out.astype(np.float32), tol=1e-2)
    assert_matches(got[1], lse.astype(np.float32), tol=1e-2)


def passes(args: tuple, cts: tuple, options: Options) -> Any:
    """Both passes of the XLA implementation, traced anew."""

    def run(q: Any, k: Any, v: Any, dout: Any, dlse: Any) -> tuple:
        positions = jnp.broadcast_to(jnp.arange(q.shape[1], dtype=jnp.int32), q.shape[:2])
        x = Operands(q, k, v, positions)
        y = xla.htree_fwd(options, x)
        return *y, *xla.htree_bwd(options, x, y, Results(dout, dlse, None))

    return jax.jit(run), (*args, *cts)


def test_chunks(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few queries at a time, and whole rows of the batch, give what one chunk does."""
    t, options = 22, Options(**TREE, scale=0.4)
    args = tuple(jnp.asarray(x) for x in inputs(rng, t=t))
    run, operands = passes(args, cotangents(rng, t), options)
    whole = run(*operands)
    for queries in (11, t):
        monkeypatch.setattr(streaming, "BUDGET", queries * xla.query_bytes(options, *args))
        run, operands = passes(args, operands[3:], options)
        assert_matches(run(*operands), whole, tol=1e-5)


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """No array of either pass is larger than the inputs or a chunk of 4 queries."""
    t, n, d, tree = 256, 4, 16, Options(compression=4, top_k=8)
    q, k = jnp.zeros((1, t, n, d)), jnp.zeros((1, t, 1, d))
    monkeypatch.setattr(streaming, "BUDGET", 4 * xla.query_bytes(tree, q, k, k))

    def sizes(jaxpr: Any) -> Any:
        for eqn in jaxpr.eqns:
            yield from (v.aval.size for v in eqn.outvars if hasattr(v.aval, "size"))
            for sub in jaxprs_in_params(eqn.params):
                yield from sizes(sub)

    run, operands = passes((q, k, k), (q, q[..., 0]), tree)
    assert max(sizes(jax.make_jaxpr(run)(*operands).jaxpr)) <= max(t * n * d, 4 * 32 * d * n)


@pytest.mark.parametrize("shape", [(0, 12), (2, 0)])
def test_empty(shape: tuple) -> None:
    q, k, v = (jnp.zeros((*shape, heads, dim)) for heads, dim in ((N, D), (G, D), (G, E)))
    out, lse = both(q, k, v)
    assert out.shape == (*shape, N, E) and lse.shape == (*shape, N)
    assert jax.grad(lambda k: both(q, k, v)[0].sum())(k).shape == k.shape


def test_without_batch_axis(rng: np.random.Generator) -> None:
    q, k, v = inputs(rng, t=20)
    assert_matches(both(q[0], k[0], v[0]), tuple(x[0] for x in both(q, k, v)), tol=1e-5)
    one, all_ = htree_select(q[1], k[1], **TREE), htree_select(q, k, **TREE)
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x, y[1]), one, all_)


GOOD = {name: jnp.zeros(s) for name, s in zip("qkv", ((B, 7, N, D), (B, 7, G, D), (B, 7, G, E)))}
f32 = np.float32
WRONG = {
    "q rank": ({"q": np.zeros(4, f32)}, ValueError, "'q' has shape"),
    "q dtype": ({"q": np.zeros((B, 7, N, D), int)}, TypeError, "'q' has dtype int"),
    "q type": ({"q": [1.0]}, TypeError, "'q' is list"),
    "q odd": (
        {"q": np.zeros((B, 7, N, 5), f32), "k": np.zeros((B, 7, G, 5), f32)},
        ValueError,
        "even",
    ),
    "heads": ({"q": np.zeros((B, 7, 3, D), f32)}, ValueError, "'q'.*N=3.*G=2.*multiple of G"),
    "no groups": (
        {"k": np.zeros((B, 7, 0, D), f32), "v": np.zeros((B, 7, 0, E), f32)},
        ValueError,
        "G=0",
    ),
    "k tokens": ({"k": np.zeros((B, 8, G, D), f32)}, ValueError, "'k' has shape.*T=7"),
    "k dtype": ({"k": jnp.zeros((B, 7, G, D), jnp.bfloat16)}, TypeError, "'k'.*want float32"),
    "k dim": ({"k": np.zeros((B, 7, G, 8), f32)}, ValueError, "'k' has shape.*D=6"),
    "v groups": ({"v": np.zeros((B, 7, 1, E), f32)}, ValueError, "'v' has shape.*G=2"),
    "v type": ({"v": None}, TypeError, "'v' is NoneType"),
    "compression": ({"compression": 1}, ValueError, "'compression' is 1, want int in 2"),
    "compression type": ({"compression": 2.0}, TypeError, "'compression'.*want an int"),
    "top_k": ({"top_k": 0}, ValueError, "'top_k' is 0, want int in 1"),
    "top_k type": ({"top_k": np.float32(3)}, TypeError, "'top_k'.*want an int"),
    "scale": ({"scale": np.nan}, ValueError, "'scale' is nan"),
    "scale type": ({"scale": "1"}, TypeError, "'scale'"),
    "rope_base": ({"rope_base": 0.0}, ValueError, "'rope_base' is 0.0, want a positive"),
    "rope_base type": ({"rope_base": None}, TypeError, "'rope_base'"),
    "return_lse": ({"return_lse": 1}, TypeError, "'return_lse'.*want a bool"),
    "implementation": ({"implementation": "gpu"}, ValueError, "'implementation' is 'gpu'"),
}


@pytest.mark.parametrize(("change", "error", "message"), WRONG.values(), ids=WRONG.keys())
def test_misuse(change: dict, error: type, message: str) -> None:
    with pytest.raises(error, match=f"htree_attention: .*{message}"):
        htree_attention(**{**GOOD, **TREE, **change})
    if not {"v", "return_lse"} & change.keys():
        arguments = {**GOOD, **TREE, **change}
        del arguments["v"]
        with pytest.raises(error, match=f"htree_select: .*{message}"):
            htree_select(**arguments)


def test_calls_that_the_kernels_do_not_cover() -> None:
    with pytest.raises(NotImplementedError, match=r"htree_fwd.*implementation='xla'"):
        htree_attention(**GOOD, **TREE, implementation="cuda")


NOT_COVERED = {
    "queries": ({"capacity": 100}, {}),
    "bfloat16": ({}, {"dtype": jnp.float16}),
    "D=256": ({}, {"d": 256}),
    "E=32": ({}, {"e": 32}),
    "compression": ({"compression": 4}, {}),
    "top_k": ({"top_k": 1025}, {}),
    "heads": ({}, {"n": 400}),
}


@pytest.mark.parametrize(("why", "case"), NOT_COVERED.items(), ids=NOT_COVERED.keys())
def test_kernels_say_what_they_do_not_cover(why: str, case: Any) -> None:
    def supports(options: dict, shapes: dict) -> str | None:
        s = {"n": 8, "d": 64, "e": 64, "dtype": jnp.bfloat16, **shapes}
        rows = ((s["n"], s["d"]), (2, s["d"]), (2, s["e"]))
        q, k, v = (jax.ShapeDtypeStruct((1, 100, *row), s["dtype"]) for row in rows)
        positions = jax.ShapeDtypeStruct((1, 100), jnp.int32)
        chosen = Options(**{"compression": 16, "top_k": 512, **options})
        return cuda.supports(chosen, Operands(q, k, v, positions))

    assert supports({}, {}) is None
    assert why in (supports(*case) or "")


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_any_wrong_shape_is_refused(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from("qkv"))
    shape = list(GOOD[name].shape)
    axis = data.draw(st.sampled_from((0, 1, 3) if name == "q" else (0, 1, 2)))
    shape[axis] = data.draw(st.integers(0, 20).filter(lambda n: n != shape[axis]))
    with pytest.raises(ValueError, match="htree_attention: argument"):
        htree_attention(**{**GOOD, name: np.zeros(shape, f32)}, **TREE)
