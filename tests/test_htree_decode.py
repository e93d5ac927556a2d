"""`htree_build`, `HTreeCache`, and `htree_decode` over it."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads
from support.compare import assert_matches
from support.oracles import htree as oracle

import jax_dsa
from jax_dsa.ops.htree import HTreeCache, htree_attention, htree_build, htree_decode

B, T, N, G, D, E, CAPACITY = 2, 23, 4, 2, 6, 5, 40
TREE = {"compression": 3, "top_k": 2}  # 23 tokens: 23, 8, 3 nodes; 40 tokens: 40, 14, 5


def inputs(rng: np.random.Generator, dtype: Any = np.float32) -> tuple:
    shapes = (B, T, N, D), (B, T, G, D), (B, T, G, E)
    return tuple(rng.normal(size=shape).astype(dtype) for shape in shapes)


def empty(dtype: Any = jnp.float32, **options: Any) -> HTreeCache:
    return HTreeCache.empty(B, CAPACITY, D, E, groups=G, dtype=dtype, **{**TREE, **options})


append = jax.jit(HTreeCache.append)
decode = jax.jit(functools.partial(htree_decode, return_lse=True))


def assert_holds(cache: HTreeCache, k: Any, v: Any, b: int) -> None:
    """Checks that the nodes of request b are those of the tree over its tokens k, v."""
    assert cache.lengths[b] == len(k)
    for nodes, tokens in ((0, k), (1, v)):
        # With top_k=1 the oracle's tree has at least as many layers as the cache.
        want = oracle.layers(tokens, compression=3, top_k=1)
        for layer, y in zip(cache.layers, want, strict=False):
            assert_matches(np.asarray(layer[nodes])[b, : len(y)], y, tol=1e-6)


def test_build(rng: np.random.Generator) -> None:
    _, k, v = inputs(rng)
    layers = htree_build(k, v, **TREE)
    for x, got in ((k, [a for a, _ in layers]), (v, [b for _, b in layers])):
        for b in range(B):
            want = oracle.layers(x[b].astype(np.float64), **TREE)
            assert_matches([y[b] for y in got], [y.astype(np.float32) for y in want], tol=1e-6)
    one = htree_build(k[1], v[1], **TREE)
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x, y[1]), one, layers)
    assert [x.shape for x, _ in htree_build(k[:, :0], v[:, :0], **TREE)] == [(B, 0, G, D)]


def test_build_rounds_once_per_layer(rng: np.random.Generator) -> None:
    x = jnp.asarray(rng.normal(size=(18, 1, 64)), jnp.bfloat16)
    layers = htree_build(x, x, compression=3, top_k=1)
    assert [len(k) for k, _ in layers] == [18, 6, 2]
    for (below, _), (k, v) in itertools.pairwise(layers):
        total = np.asarray(below, np.float32).reshape(-1, 3, 1, 64).sum(1)
        assert k.dtype == jnp.bfloat16
        assert_matches(k, jnp.asarray(total / np.float32(3), jnp.bfloat16), tol=2**-8)
        np.testing.assert_array_equal(k, v)


def test_build_gradients(rng: np.random.Generator) -> None:
    with jax.enable_x64(True):
        _, k, v = (jnp.asarray(x) for x in inputs(rng, np.float64))
        fn = functools.partial(htree_build, **TREE)
        check_grads(fn, (k, v), order=1, modes=["rev"], atol=1e-7, rtol=1e-7)


def test_append_in_several_calls(rng: np.random.Generator) -> None:
    """Appends different counts per request, to a cache with stale contents."""
    _, k, v = inputs(rng)
    dirty = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), (empty().k, empty().v))
    cache = dataclasses.replace(empty(), k=dirty[0], v=dirty[1])
    held = np.zeros(B, int)
    for counts in ([5, 0], [5, 3], [1, 5], [0, 2], [4, 5], [5, 5]):
        at = [slice(n, n + 5) for n in held]
        new = (
            np.stack([np.resize(x[b, at[b]], (5, *x.shape[2:])) for b in range(B)]) for x in (k, v)
        )
        cache = append(cache, *new, jnp.asarray(counts, jnp.int32))
        held += counts
        for b, n in enumerate(held):
            if n:
                assert_holds(cache, k[b, :n], v[b, :n], b)


def test_append_beyond_the_capacity(rng: np.random.Generator) -> None:
    _, k, v = inputs(rng)
    twice = [np.concatenate([x, x], axis=1) for x in (k, v)]
    cache = append(append(empty(), k, v), k, v)
    assert cache.lengths.tolist() == [2 * T] * B
    for b in range(B):
        held = dataclasses.replace(cache, lengths=jnp.full(B, CAPACITY, jnp.int32))
        assert_holds(held, *(x[b, :CAPACITY] for x in twice), b)


def test_queries_of_an_append_that_overflows(rng: np.random.Generator) -> None:
    """Queries keep their positions. Those whose token did not fit see all tokens of the cache."""
    q, k, v = inputs(rng)
    before = append(append(empty(), k, v), k[:, : CAPACITY - T - 2], v[:, : CAPACITY - T - 2])
    got = decode(q[:, :5], append(before, k[:, :5], v[:, :5]))
    fitting = append(before, k[:, :2], v[:, :2])
    want = decode(q[:, :2], fitting)
    assert_matches([x[:, :2] for x in got], want, tol=1e-6)
    last = [decode(q[:, t : t + 1], fitting) for t in (2, 3, 4)]
    want = jax.tree.map(lambda *x: jnp.concatenate(x, axis=1), *last)
    assert_matches([x[:, 2:] for x in got], want, tol=1e-6)


def test_lengths_out_of_range(rng: np.random.Generator) -> None:
    """A length below 0 is 0, and the length above which none grows is the largest int32."""
    q, k, v = inputs(rng)
    full = append(append(empty(), k, v), k, v)
    wrong = dataclasses.replace(full, lengths=jnp.asarray([2**31 - 1, -(2**31)], jnp.int32))
    right = dataclasses.replace(full, lengths=jnp.asarray([CAPACITY + 1, 0], jnp.int32))
    got, want = append(wrong, k, v), append(right, k, v)
    jax.tree.map(np.testing.assert_array_equal, (got.k, got.v), (want.k, want.v))
    assert got.lengths.tolist() == [2**31 - 1, T]
    got, want = decode(q[:, :2], wrong), decode(q[:, :2], right)
    jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.parametrize("capacity", [CAPACITY, 3 * CAPACITY])
def test_decode_is_attention(capacity: int, rng: np.random.Generator) -> None:
    """Holds for any number of layers, and for several queries at once."""
    q, k, v = inputs(rng)
    want = htree_attention(q, k, v, **TREE, return_lse=True)
    cache = HTreeCache.empty(B, capacity, D, E, groups=G, dtype=jnp.float32, **TREE)
    cache = append(cache, k, v)
    assert_matches(decode(q, cache), want, tol=1e-5)
    if capacity == CAPACITY:
        assert_matches(decode(q[:, -2:], cache), [x[:, -2:] for x in want], tol=1e-5)


def test_decode_token_by_token(rng: np.random.Generator) -> None:
    q, k, v = inputs(rng)
    out, lse = htree_attention(q, k, v, **TREE, return_lse=True)
    start = np.array([4, 15])
    cache = append(empty(), k, v, jnp.asarray(start, jnp.int32))
    for step in range(8):
        at = np.arange(B), start + step
        cache = append(cache, k[at][:, None], v[at][:, None])
        got = decode(q[at][:, None], cache)
        assert_matches(got, (out[at][:, None], lse[at][:, None]), tol=1e-5)


def test_decode_without_tokens_and_past_the_end(rng: np.random.Generator) -> None:
    """Queries before the first token see nothing; nodes past the last token are never read."""
    q, k, v = inputs(rng)
    cache = append(empty(), k, v)
    cache = dataclasses.replace(cache, lengths=jnp.asarray([0, 1], jnp.int32))
    poisoned = [x.at[0].set(jnp.nan).at[1, 1:].set(jnp.nan) for x in (cache.k, cache.v)]

    def fn(q: Any, k: Any, v: Any) -> Any:
        return decode(q, dataclasses.replace(cache, k=k, v=v))

    (out, lse), pull = jax.vjp(fn, q[:, :2], *poisoned)
    seen = np.array([[False, False], [False, True]])
    assert np.all(np.asarray(out)[~seen] == 0) and np.all(np.asarray(lse)[~seen] == -np.inf)
    np.testing.assert_allclose(out[1, 1], np.repeat(v[1, 0], N // G, axis=0), rtol=1e-6)
    dq, dk, dv = (np.asarray(x) for x in pull((jnp.ones_like(out), jnp.ones_like(lse))))
    assert np.isfinite(dq).all() and np.all(dq[~seen] == 0)
    assert dk[1, 0].any() and dv[1, 0].any()
    for x in (dk, dv):
        assert np.all(x[0] == 0) and np.all(x[1, 1:] == 0)


def test_queries_without_a_token_have_no_influence(rng: np.random.Generator) -> None:
    """Neither has NaN in their cotangents, as derivatives of functions of lse have it at -inf."""
    q, k, v = inputs(rng)
    cache = dataclasses.replace(append(empty(), k, v), lengths=jnp.asarray([1, 9], jnp.int32))

    def grads(q: Any, dout: float, dlse: float) -> Any:
        run = lambda q, k, v: decode(q, dataclasses.replace(cache, k=k, v=v))  # noqa: E731
        (out, lse), pull = jax.vjp(run, q, cache.k, cache.v)
        return pull((jnp.ones_like(out).at[0, 0].set(dout), jnp.ones_like(lse).at[0, 0].set(dlse)))

    q = jnp.asarray(q[:, :2])
    want = grads(q, 1, 1)
    for got in (
        grads(q.at[0, 0].set(jnp.nan), 1, 1),
        grads(q, np.nan, 1),
        grads(q, 1, -np.inf),
    ):
        jax.tree.map(np.testing.assert_array_equal, got, want)


def test_decode_gradients_are_those_of_plain_autodiff(rng: np.random.Generator) -> None:
    q, k, v = inputs(rng)
    cache = append(empty(), k, v)

    def loss(q: Any, k: Any, v: Any) -> Any:
        out, lse = htree_decode(q, dataclasses.replace(cache, k=k, v=v), return_lse=True)
        return (out * jnp.cos(jnp.arange(E))).sum() + jnp.sin(lse).sum()

    got = jax.jit(jax.grad(loss, (0, 1, 2)))(q[:, -3:], cache.k, cache.v)
    with jax_dsa.plain_xla():
        want = jax.jit(jax.grad(lambda *a: loss(*a), (0, 1, 2)))(q[:, -3:], cache.k, cache.v)
    assert_matches(got, want, tol=1e-5)


def test_without_batch_axis(rng: np.random.Generator) -> None:
    """Tests one request by itself, and requests under vmap."""
    q, k, v = inputs(rng)

    def step(cache: HTreeCache, q: Any, k: Any, v: Any) -> Any:
        cache = cache.append(k, v)
        return cache, htree_decode(q[-1:], cache)

    want_cache = append(empty(), k, v)
    want = decode(q[:, -1:], want_cache)[0]
    one = jax.jit(step)(jax.tree.map(lambda x: x[1], empty()), q[1], k[1], v[1])
    assert_matches(one, jax.tree.map(lambda x: x[1], (want_cache, want)), tol=1e-6)
    assert_matches(jax.jit(jax.vmap(step))(empty(), q, k, v), (want_cache, want), tol=1e-6)


def test_cache_rounds_to_its_dtype(rng: np.random.Generator) -> None:
    q, k, v = inputs(rng)
    cache = append(empty(jnp.bfloat16), k, v)
    exact = append(empty(), *(jnp.asarray(x, jnp.bfloat16).astype(jnp.float32) for x in (k, v)))
    assert cache.k.dtype == jnp.bfloat16
    np.testing.assert_array_equal(cache.layers[0][0].astype(jnp.float32), exact.layers[0][0])
    assert_matches(cache.k.astype(jnp.float32), exact.k, tol=1e-2)
    assert decode(jnp.asarray(q, jnp.bfloat16), cache)[0].dtype == jnp.bfloat16


f32 = np.float32
BUILD = {
    "k": ({"k": np.zeros(3, f32)}, ValueError, "'k' has shape"),
    "k dtype": ({"k": np.zeros((B, T, G, D), int)}, TypeError, "'k' has dtype"),
    "v": ({"v": np.zeros((B, T + 1, G, E), f32)}, ValueError, "'v' has shape.*S=23"),
    "v dtype": ({"v": np.zeros((B, T, G, E), np.float16)}, TypeError, "'v' has dtype float16"),
    "compression": ({"compression": 0}, ValueError, "'compression' is 0"),
    "top_k": ({"top_k": None}, TypeError, "'top_k'"),
    "implementation": ({"implementation": "cuda"}, NotImplementedError, "htree_build_fwd"),
}


@pytest.mark.parametrize(("change", "error", "message"), BUILD.values(), ids=BUILD.keys())
def test_build_misuse(change: dict, error: type, message: str) -> None:
    good = {"k": np.zeros((B, T, G, D), f32), "v": np.zeros((B, T, G, E), f32), **TREE}
    with pytest.raises(error, match=f"htree_build.*{message}" if "fwd" not in message else message):
        htree_build(**{**good, **change})


DECODE = {
    "q": ({"q": np.zeros(3, f32)}, ValueError, "'q' has shape"),
    "q heads": (
        {"q": np.zeros((B, 1, 3, D), f32)},
        ValueError,
        "'q'.*'cache.k' has G=2.*multiple of G",
    ),
    "q dim": ({"q": np.zeros((B, 1, N, 8), f32)}, ValueError, "'cache.k' has shape"),
    "q dtype": (
        {"q": np.zeros((B, 1, N, D), np.float16)},
        TypeError,
        "'cache.k' has dtype float32",
    ),
    "q batch": ({"q": np.zeros((3, 1, N, D), f32)}, ValueError, "'cache.k' has shape"),
    "cache": ({"cache": None}, TypeError, "'cache' is NoneType, expected an HTreeCache"),
    "scale": ({"scale": np.inf}, ValueError, "'scale' is inf"),
    "rope_base": ({"rope_base": -1}, ValueError, "'rope_base' is -1"),
    "return_lse": ({"return_lse": 0}, TypeError, "'return_lse'"),
    "implementation": ({"implementation": 1}, ValueError, "'implementation'"),
}


@pytest.mark.parametrize(("change", "error", "message"), DECODE.values(), ids=DECODE.keys())
def test_decode_misuse(change: dict, error: type, message: str) -> None:
    good = {"q": np.zeros((B, 1, N, D), f32), "cache": empty()}
    with pytest.raises(error, match=f"htree_decode: .*{message}"):
        htree_decode(**{**good, **change})


CACHE = {
    "batch": ({"batch": -1}, ValueError, "'batch' is -1"),
    "capacity": ({"capacity": 0}, ValueError, "'capacity' is 0"),
    "head_dim": ({"head_dim": 6.0}, TypeError, "'head_dim'"),
    "value_dim": ({"value_dim": 0}, ValueError, "'value_dim' is 0"),
    "groups": ({"groups": 0}, ValueError, "'groups' is 0"),
    "dtype": ({"dtype": jnp.int32}, ValueError, "'dtype' is 'int32'"),
    "compression": ({"compression": 1}, ValueError, "'compression' is 1"),
    "top_k": ({"top_k": 0}, ValueError, "'top_k' is 0"),
}


@pytest.mark.parametrize(("change", "error", "message"), CACHE.values(), ids=CACHE.keys())
def test_cache_misuse(change: dict, error: type, message: str) -> None:
    with pytest.raises(error, match=f"HTreeCache.empty: .*{message}"):
        HTreeCache.empty(**{"batch": B, "capacity": CAPACITY, "head_dim": D, **change})


APPEND = {
    "k": ({"k": np.zeros((B, 1, G, D + 2), f32)}, ValueError, "'k' has shape.*D=6"),
    "k dtype": ({"k": np.zeros((B, 1, G, D), int)}, TypeError, "'k' has dtype"),
    "v": ({"v": np.zeros((B, 2, G, E), f32)}, ValueError, "'v' has shape.*T=1"),
    "counts": ({"counts": np.zeros(3, np.int32)}, ValueError, "'counts' has shape.*B=2"),
    "counts dtype": ({"counts": np.zeros(B)}, TypeError, "'counts' has dtype"),
}


@pytest.mark.parametrize(("change", "error", "message"), APPEND.values(), ids=APPEND.keys())
def test_append_misuse(change: dict, error: type, message: str) -> None:
    good = {"k": np.zeros((B, 1, G, D), f32), "v": np.zeros((B, 1, G, E), f32)}
    with pytest.raises(error, match=f"HTreeCache.append: .*{message}"):
        empty().append(**{**good, **change})
