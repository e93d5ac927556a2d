"""Tests what NaN, infinities and huge scores affect in `masked_attention`."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from support.compare import assert_matches
from support.masked_attention import EXTREMES, B, E, G, N, S, T, all_of, normal, qkv

from jax_dsa.ops.attention_probs import attention_probs
from jax_dsa.ops.masked_attention import masked_attention


def test_nan_that_no_query_sees(rng: np.random.Generator) -> None:
    """NaN in unseen keys, values and biases, and in queries that see no key, has no effect."""
    clean = (*qkv(rng), normal(rng, B, N, T, S))
    mask = jnp.ones((B, 1, T, S), bool).at[:, :, :, 2].set(False).at[:, :, 1].set(False)
    lengths = jnp.asarray([S - 2, S], jnp.int32)
    seen = mask & (jnp.arange(S) < lengths[:, None, None, None])
    q, k, v, bias = clean
    bad = jnp.where(seen.any((1, 2))[..., None, None], 0, jnp.nan)
    dirty = (q.at[:, 1].set(jnp.inf), k + bad, v - bad, jnp.where(seen, bias, jnp.nan))
    douts = normal(rng, B, T, N, E), normal(rng, B, T, N)

    def fn(*arrays: Any) -> tuple:
        return masked_attention(
            *arrays, mask, key_value_seq_lengths=lengths, softcap=4.0, return_lse=True
        )

    outs, grads = all_of(fn, dirty, douts)
    assert_matches((outs, grads), all_of(fn, clean, douts), 0.0)
    out, lse = outs
    assert np.all(np.asarray(out[:, 1]) == 0) and np.all(np.asarray(lse[:, 1]) == -np.inf)
    assert np.all(np.asarray(grads[0][:, 1]) == 0)
    assert np.all(np.asarray(grads[3])[~np.broadcast_to(seen, bias.shape)] == 0)


def test_nan_that_a_query_sees_shows(rng: np.random.Generator) -> None:
    """NaN in a query shows in all its results and its gradient, and nowhere else."""
    q, k, v = qkv(rng)
    dirty = q.at[0, 2].set(jnp.nan)
    out, lse, peak = masked_attention(dirty, k, v, return_lse=True, return_max_logit=True)
    probs = attention_probs(dirty, k)
    dq = jax.grad(lambda q: masked_attention(q, k, v).sum())(dirty)
    for y in (out, lse, peak, probs.swapaxes(1, 2), dq):
        rows = np.isnan(np.asarray(y)).reshape(B, T, -1)
        assert rows[0, 2].all() and rows.sum() == rows[0, 2].size


def test_huge_scores(rng: np.random.Generator) -> None:
    """Probabilities stay in 0..1 if rounding errors of scores exceed the range of the exponent."""
    q, k, v = qkv(rng)

    def fn(q: jax.Array) -> jax.Array:
        return masked_attention(q, k, v, scale=1e30)

    out, pull = jax.vjp(jax.jit(fn), q)
    (dq,) = pull(jnp.ones_like(out))
    probs = jax.jit(functools.partial(attention_probs, scale=1e30))(q, k)
    assert np.all(np.isfinite(out)) and np.all(np.isfinite(dq))
    assert np.all((np.asarray(probs) >= 0) & (np.asarray(probs) <= 1))


def test_nan_in_keys_that_are_not_kept(rng: np.random.Generator) -> None:
    arrays = qkv(rng)
    kept = jnp.asarray(np.broadcast_to([3, 1, -1, 3, *EXTREMES], (B, G, 8)), jnp.int32)
    other = jnp.asarray([s not in (1, 3) for s in range(S)])[:, None, None]
    dirty = (arrays[0], *(jnp.where(other, jnp.nan, x) for x in arrays[1:]))
    douts = normal(rng, B, T, N, E), normal(rng, B, T, N)

    def fn(*arrays: Any) -> tuple:
        return masked_attention(*arrays, kv_indices=kept, return_lse=True)

    got = all_of(fn, dirty, douts)
    assert_matches(got, all_of(fn, arrays, douts), 0.0)
    # Key 3 is listed twice, which is equivalent to a bias of log 2.
    bias = jnp.where(other[:, 0, 0], -jnp.inf, jnp.log(jnp.asarray([1, 1, 1, 2, 1, 1, 1.0])))
    same = all_of(
        lambda *a: masked_attention(*a, bias[None, None, None], return_lse=True), arrays, douts
    )
    assert_matches(got, same, 1e-5)
