"""Rows of `masked_attention` whose scores are huge and equal, or beside ordinary ones.

In float32, -1e9 + log(100) is -1e9, so the log-sum-exp cannot tell how many keys share a row.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.compare import assert_matches

from jax_dsa import attention_probs, masked_attention, plain_xla

LEVELS = {"-1e9": -1e9, "-3e38": -3e38, "lowest": float(np.finfo(np.float32).min)}
COUNTS = (1, 2, 100)
IMPLEMENTATIONS = ["xla", pytest.param("cuda", marks=pytest.mark.gpu)]
N, G, S = 4, 2, 104


class Problem(NamedTuple):
    """Rows with 1, 2 and 100 keys at a level, alone and beside three ordinary keys."""

    arrays: tuple[Any, ...]  # q, k, v and the bias
    mask: np.ndarray  # [1, 1, T, S]
    douts: tuple[Any, ...]


def problem(rng: np.random.Generator, level: float, dtype: Any, dim: int = 8) -> Problem:
    rows = [(count, ordinary) for count in COUNTS for ordinary in (0, 3)] + [(0, 3)]
    T = len(rows)
    bias = np.zeros((1, 1, T, S))
    mask = np.zeros(bias.shape, bool)
    for t, (count, ordinary) in enumerate(rows):
        places = rng.permutation(S)[: count + ordinary]
        mask[0, 0, t, places] = True
        bias[0, 0, t, places[:count]] = max(level, float(jnp.finfo(dtype).min))
    shapes = (1, T, N, dim), (1, S, G, dim), (1, S, G, dim)
    arrays = tuple(jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes)
    dout = jnp.asarray(rng.normal(size=(1, T, N, dim)), dtype)
    dlse = jnp.asarray(rng.normal(size=(1, T, N)), jnp.float32)
    return Problem((*arrays, jnp.asarray(bias, dtype)), mask, (dout, dlse))


def expected(x: Problem) -> tuple[tuple, tuple]:
    """Returns out and lse, and the gradients, in float64 from the scores rounded to float32."""
    q, k, v, bias, dout, dlse = (np.asarray(a, np.float64) for a in (*x.arrays, *x.douts))
    k, v = (np.repeat(a, N // G, axis=2) for a in (k, v))
    scale = q.shape[-1] ** -0.5
    s = (scale * np.einsum("btnd,bsnd->bnts", q, k) + bias).astype(np.float32).astype(np.float64)
    s = np.where(x.mask, s, -np.inf)
    top = s.max(-1, keepdims=True)
    p = np.exp(s - top)
    total = p.sum(-1, keepdims=True)
    p /= total
    out = np.einsum("bnts,bsnd->btnd", p, v)
    lse = np.swapaxes((top + np.log(total))[..., 0], 1, 2)
    rows = (dout * out).sum(-1) - dlse
    ds = p * (np.einsum("btnd,bsnd->bnts", dout, v) - np.swapaxes(rows, 1, 2)[..., None])
    fold = lambda a: a.reshape(*a.shape[:2], G, N // G, -1).sum(3)  # noqa: E731
    dq = scale * np.einsum("bnts,bsnd->btnd", ds, k)
    dk = fold(scale * np.einsum("bnts,btnd->bsnd", ds, q))
    dv = fold(np.einsum("bnts,btnd->bsnd", p, dout))
    return (out, lse), (dq, dk, dv, ds.sum(1, keepdims=True))


def results(x: Problem, **options: Any) -> tuple[tuple, tuple]:
    call = functools.partial(masked_attention, mask=x.mask, return_lse=True, **options)
    outs, pull = jax.vjp(call, *x.arrays)
    return outs, pull(x.douts)


def check(got: Any, want: Any, tol: float) -> None:
    """Asserts that results match the expected float64 numbers."""
    assert_matches(jax.tree.map(lambda a: np.asarray(a, np.float64), got), want, tol)


def check_all(got: tuple[tuple, tuple], want: tuple[tuple, tuple], tol: float) -> None:
    """Checks out, lse, which may be huge, and the gradients."""
    (out, lse), grads = got
    np.testing.assert_allclose(lse, want[0][1], rtol=1e-6, atol=tol)
    check((out, grads), (want[0][0], want[1]), tol)


@pytest.mark.parametrize("plain", [False, True], ids=["operator", "plain"])
@pytest.mark.parametrize("level", LEVELS.values(), ids=LEVELS)
def test_gradients(level: float, plain: bool, rng: np.random.Generator) -> None:
    x = problem(rng, level, jnp.float32)
    if plain:
        with plain_xla():
            got = results(x)
    else:
        got = results(x, implementation="xla")
    check_all(got, expected(x), 1e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dim", [64, 192, 256])
@pytest.mark.parametrize("level", LEVELS.values(), ids=LEVELS)
def test_bfloat16(level: float, dim: int, implementation: str, rng: np.random.Generator) -> None:
    x = problem(rng, level, jnp.bfloat16, dim)
    got = results(x, implementation=implementation)
    check_all(got, expected(x), 3e-2)


@pytest.mark.parametrize("level", LEVELS.values(), ids=LEVELS)
def test_probabilities_sum_to_one(level: float, rng: np.random.Generator) -> None:
    """The gradient of the log-sum-exp for a bias is the probability."""
    q, k, v, bias = (x := problem(rng, level, jnp.float32)).arrays
    bias = jnp.broadcast_to(bias, (1, N, *bias.shape[2:]))

    def lse(bias: Any) -> jax.Array:
        return masked_attention(q, k, v, bias, x.mask, return_lse=True)[1].sum()

    p = jax.grad(lse)(bias)
    np.testing.assert_allclose(p.sum(-1), 1, rtol=1e-6)
    np.testing.assert_allclose(p, attention_probs(q, k, bias, x.mask), atol=1e-6)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("scale", [0.3, 1 / 3, 1.7])
def test_products_are_rounded_before_the_largest_is_subtracted(
    scale: float, masked: bool, rng: np.random.Generator
) -> None:
    """Neighbouring float32 keys of -1e9. Many of their products with the scale are equal."""
    T, D = 16, 8
    q, k = np.zeros((1, T, 1, D), np.float32), np.zeros((1, S, 1, D), np.float32)
    q[..., -1], k[..., -1] = (
        rng.uniform(0.5, 1, (1, T, 1)),
        -1e9 - 64 * rng.integers(0, 3, (1, S, 1)),
    )
    v, dout = rng.normal(size=k.shape), rng.normal(size=q.shape)
    mask = jnp.ones((1, 1, 1, S), bool) if masked else None
    call = functools.partial(masked_attention, mask=mask, scale=scale, return_lse=True)
    low = [jnp.asarray(a, jnp.float32) for a in (q, k, v)]
    (out, _), pull = jax.vjp(jax.jit(call), *low)
    _, _, dv = pull((jnp.asarray(dout, jnp.float32), jnp.ones((1, T, 1))))
    s = (np.float32(scale) * (q[0, :, 0, -1:] * k[0, :, 0, -1])).astype(np.float64)
    p = np.exp(s - s.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    check(out[0, :, 0], p @ v[0, :, 0], 1e-5)
    check(dv[0, :, 0], p.T @ dout[0, :, 0], 1e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("level", LEVELS.values(), ids=LEVELS)
def test_products_without_a_bias(
    level: float, implementation: str, rng: np.random.Generator
) -> None:
    """The last dimension alone makes the scores. bfloat16 holds a level exactly after rounding."""
    level = float(jnp.asarray(max(level, float(jnp.finfo(jnp.bfloat16).min)), jnp.bfloat16))
    T, D = len(COUNTS), 64
    k = rng.normal(size=(1, S, 1, D))
    k[..., -1] = level
    q = np.zeros((1, T, N, D))
    q[..., -1] = 1
    v, dout = rng.normal(size=(1, S, 1, D)), rng.normal(size=(1, T, N, D))
    q, k, v, dout = (jnp.asarray(a, jnp.bfloat16) for a in (q, k, v, dout))
    mask = np.arange(S) < np.array(COUNTS)[:, None]

    def call(q: Any, k: Any, v: Any) -> Any:
        return masked_attention(
            q, k, v, mask=mask[None, None], scale=1.0, implementation=implementation,
            return_lse=True, return_max_logit=True,
        )  # fmt: skip

    (out, _, top), pull = jax.vjp(call, q, k, v)
    dq, dk, dv = pull((dout, jnp.ones((1, T, N)), jnp.zeros((1, T, N))))
    p = mask / np.array(COUNTS)[:, None]
    values, dout = (np.asarray(a, np.float64)[0] for a in (v, dout))
    want = np.einsum("ts,sd->td", p, values[:, 0])[None, :, None]
    np.testing.assert_array_equal(top, level)
    check(out, np.broadcast_to(want, out.shape), 2e-2)
    check(dv[0, :, 0], np.einsum("ts,tnd->sd", p, dout), 3e-2)
    # The gradient of the log-sum-exp for a key is its probability in the last dimension.
    ds = np.einsum("tnd,sd->nts", dout, values[:, 0])
    ds = p * (ds - np.einsum("tnd,td->nt", dout, want[0, :, 0])[..., None] + 1)
    check(dk[0, :, 0, -1], ds.sum((0, 1)), 5e-2)
    del dq  # It sums huge numbers.


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("dim", "value_dim"), [(64, 64), (128, 128), (192, 128), (256, 256)])
def test_a_saturated_softcap_has_no_gradient(
    dim: int, value_dim: int, implementation: str, rng: np.random.Generator
) -> None:
    shapes = (1, 5, N, dim), (1, 20, G, dim), (1, 20, G, value_dim)
    q, k, v = (jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for shape in shapes)
    call = functools.partial(
        masked_attention, softcap=2.0, scale=100.0, implementation=implementation
    )
    out, pull = jax.vjp(call, abs(q), abs(k), v)
    dq, dk, dv = pull(out)
    assert abs(dq).max() < 1e-3 and abs(dk).max() < 1e-3 < abs(dv).max()
