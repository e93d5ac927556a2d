"""Gradients at the ends of the range of float32."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_dsa
from jax_dsa import FlatCache
from jax_dsa.core.softmax import logistic
from jax_dsa.ops.gated_pool import gated_pool

if TYPE_CHECKING:
    from collections.abc import Callable

B, T, N, S, D, K = 1, 4, 2, 9, 64, 5
f32 = jnp.float32


def arrays(rng: np.random.Generator) -> tuple[Any, Any, Any]:
    q, kv = (jnp.asarray(rng.normal(size=s), f32) for s in ((B, T, N, D), (B, S, 1, D)))
    return q, kv, jnp.asarray(rng.integers(0, S, (B, T, K)), jnp.int32)


# Each takes q, kv, indices and the keyword arguments that all operators have.
ATTENTION: dict[str, Callable[..., Any]] = {
    "sparse_mla": jax_dsa.sparse_mla,
    "sparse_attention": lambda q, kv, i, **o: jax_dsa.sparse_attention(
        q, kv, kv, i, block_size=1, **o
    ),
    "sparse_attention_decode": lambda q, kv, i, **o: jax_dsa.sparse_attention_decode(
        q, *[FlatCache(kv, jnp.full(B, S))] * 2, i, block_size=1, **o
    ),
    "sparse_mla_decode": lambda q, kv, i, **o: jax_dsa.sparse_mla_decode(
        q, FlatCache(kv, jnp.full(B, S)), i, **o
    ),
    "mqa_decode": lambda q, kv, i, **o: jax_dsa.mqa_decode(q, kv, **o),
    "dsa_attention": lambda q, kv, i, **o: jax_dsa.dsa_attention(
        q, kv, q, kv[:, :, 0], q[..., 0], indices=i, is_causal=False, **o
    )[0],
}
WITHOUT_SINKS: dict[str, Callable[..., Any]] = {
    "masked_attention": lambda q, kv, i, **o: jax_dsa.masked_attention(q, kv, kv, **o),
    "htree_attention": lambda q, kv, i, **o: jax_dsa.htree_attention(
        q, kv[:, :T], kv[:, :T], compression=2, top_k=2, **o
    ),
}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("name", ATTENTION | WITHOUT_SINKS)
def test_gradients_near_the_largest_number(name: str, dtype: Any, rng: np.random.Generator) -> None:
    """The queries' gradients are linear in the cotangent, up to the largest numbers."""
    call = (ATTENTION | WITHOUT_SINKS)[name]
    q, kv, indices = arrays(rng)
    q, kv = q.astype(dtype), kv.astype(dtype)
    out, pull = jax.vjp(lambda q, kv: call(q, kv, indices), q, kv)
    dout = jnp.asarray(rng.normal(size=out.shape), dtype)
    small = [np.asarray(g, np.float64) for g in pull(dout)]
    # The sums dout . v are larger than the gradients of the queries, and too large for float32.
    factor = 2.0 ** math.floor(math.log2(5e37 / np.abs(small[0]).max()))
    dq, _ = (np.asarray(g, np.float64) for g in pull(dout * factor))
    np.testing.assert_allclose(dq, small[0] * factor, rtol=1e-2, atol=1e35)
    assert np.abs(dq).max() > 2e37


@pytest.mark.parametrize("share", [1e-3, 1e-9, 1e-20, 1e-30])
@pytest.mark.parametrize("plain", [False, True], ids=["operator", "plain"])
@pytest.mark.parametrize("name", [*ATTENTION, "attn_dist"])
def test_gradients_of_sinks_with_a_small_share(
    name: str, plain: bool, share: float, rng: np.random.Generator
) -> None:
    q, kv, indices = arrays(rng)
    weights = rng.normal(size=(B, T, N, D)).astype(np.float32)

    def loss(sinks: Any) -> Any:
        if name == "attn_dist":
            dist = jax_dsa.attn_dist(q, kv, indices, lse, sinks=sinks, head_group=1)
            return (dist * weights[..., :K].swapaxes(1, 2)).sum()
        return (ATTENTION[name](q, kv, indices, sinks=sinks) * weights).sum()

    lse = jax_dsa.sparse_mla(q, kv, indices, return_lse=True)[1]
    if name == "mqa_decode":
        lse = jax_dsa.mqa_decode(q, kv, return_lse=True)[1]
    low = jnp.full(N, -jnp.inf)
    if name == "attn_dist":
        dist = jax_dsa.attn_dist(q, kv, indices, lse, head_group=1)
        slope = (np.asarray(dist.swapaxes(1, 2), np.float64) * weights[..., :K]).sum(-1)
    else:
        out = ATTENTION[name](q, kv, indices, sinks=low)
        slope = (np.asarray(out, np.float64) * weights).sum(-1)
    sinks = np.float32(np.log(share)) + np.asarray(lse).min((0, 1))
    odds = np.exp(sinks.astype(np.float64) - np.asarray(lse, np.float64))
    want = -(slope * odds / (1 + odds) ** 2).sum((0, 1))
    if plain:
        with jax_dsa.plain_xla():
            got = jax.grad(loss)(jnp.asarray(sinks))
    else:
        got = jax.grad(loss)(jnp.asarray(sinks))
    np.testing.assert_allclose(got, want, rtol=2e-4)


def test_the_derivative_of_the_logistic_function() -> None:
    x = jnp.array([-jnp.inf, -80.0, -1.0, 0.0, 30.0, 80.0, jnp.inf])
    exact = np.asarray(x, np.float64)
    y = 1 / (1 + np.exp(-np.abs(exact)))
    want = y * np.exp(-np.abs(exact)) * y
    first = jax.vmap(jax.grad(logistic))
    np.testing.assert_allclose(first(x), want, rtol=1e-5)
    second = jax.vmap(jax.grad(jax.grad(logistic)))(x[1:-1])
    np.testing.assert_allclose(
        second, (want * np.sign(-exact) * (2 * y - 1))[1:-1], rtol=1e-4, atol=1e-38
    )


@pytest.mark.parametrize("halves", [1, 2])
def test_gradients_of_saturated_gates(halves: int, rng: np.random.Generator) -> None:
    """One gate of each key has almost all the weight. The gradients of all gates add up to 0."""
    ratio, dim = 3, 4
    shape = (2, 4 * ratio, halves, dim)
    values, gates = rng.normal(size=shape), rng.normal(size=shape)
    winner = rng.integers(0, ratio, (2, 4, 1, 1, dim))
    wins = np.arange(ratio)[:, None, None] == winner
    gates += 32 * wins.reshape(2, -1, 1, dim) * (np.arange(halves)[:, None] == halves - 1)
    bias = np.zeros((ratio, halves, dim), np.float32)
    dkeys = rng.normal(size=(2, 4, dim))

    def exact(gates: np.ndarray) -> np.ndarray:
        """The gradient in differences of values, which lose no digits."""
        pooled = values.reshape(2, 4, ratio, halves, dim), gates.reshape(2, 4, ratio, halves, dim)
        v, g = pooled[0][:, :, :, -1], pooled[1][:, :, :, -1]
        if halves == 2:
            before = (np.roll(x[:, :, :, 0], 1, axis=1) for x in pooled)
            v, g = (np.concatenate(x, axis=2) for x in zip(before, (v, g), strict=True))
            g[:, 0, :ratio] = -np.inf
        w = np.exp(g - g.max(2, keepdims=True))
        w /= w.sum(2, keepdims=True)
        difference = v[:, :, :, None] - v[:, :, None]
        return (w[:, :, :, None] * w[:, :, None] * difference).sum(3) * dkeys[:, :, None]

    want = exact(gates)[:, :, -ratio:].reshape(2, -1, dim)

    def pooled(gates: Any) -> Any:
        return (gated_pool(jnp.asarray(values, f32), gates, bias) * dkeys).sum()

    got = jax.grad(pooled)(jnp.asarray(gates, f32))[:, :, -1]
    assert np.abs(want).max() < 1e-10
    np.testing.assert_allclose(got, want, rtol=2e-3, atol=1e-19)
