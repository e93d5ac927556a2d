"""Tests attention sinks and the largest logit of `masked_attention` against NumPy float64."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads
from support.compare import assert_matches
from support.masked_attention import B, D, E, G, N, S, T, all_of, normal, qkv
from support.oracles import masked_attention as oracle

from jax_dsa import attention_probs, masked_attention, masked_attention_varlen

CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True, "softcap": 1.5},
    "window": {"local_window_size": (2, 0), "lengths": (S - 3, S)},
    "kept": {"kept": True},
}


def sinks_of(rng: np.random.Generator, dtype: Any = np.float64) -> jax.Array:
    """Returns a sink for each head, among them both infinities and one above most scores."""
    return normal(rng, N, dtype=dtype).at[1:].set([jnp.inf, -jnp.inf, 4.0])


def largest(q: Any, k: Any, bias: Any, count: np.ndarray, softcap: float | None) -> np.ndarray:
    """Returns the largest logit of each query, [B, T, N]."""
    result = np.full(q.shape[:3], -np.inf)
    for b, n, t, s in np.ndindex(*count.shape):
        if count[b, n, t, s]:
            g = n // (N // G)
            x = oracle.logit(q, k, bias, b, n, g, t, s, count.shape, D**-0.5, softcap)
            result[b, t, n] = max(result[b, t, n], x)
    return result


@pytest.mark.parametrize("config", CONFIGS)
def test_against_oracle(config: str, rng: np.random.Generator) -> None:
    options = dict(CONFIGS[config])
    softcap = options.pop("softcap", None)
    if lengths := options.pop("lengths", None):
        options["key_value_seq_lengths"] = np.array(lengths)
    if options.pop("kept", False):
        options["kv_indices"] = rng.integers(-1, S + 1, (B, G, 4)).astype(np.int32)
    mask = rng.random((B, N, T, S)) < 0.6
    mask[0, :, 1] = False  # a query without keys
    with jax.enable_x64(True):
        bias, sinks = normal(rng, 1, G, 1, S, dtype=np.float64), sinks_of(rng)
        arrays = (*qkv(rng, np.float64), bias, sinks)
        dout, dlse = (normal(rng, *shape, dtype=np.float64) for shape in ((B, T, N, E), (B, T, N)))
        both = {"mask": jnp.asarray(mask), "softcap": softcap, **options}

        def fn(q: Any, k: Any, v: Any, bias: Any, sinks: Any) -> tuple:
            own = {"sinks": sinks, **both}
            results = masked_attention(q, k, v, bias, **own, return_lse=True, return_max_logit=True)
            return *results, attention_probs(q, k, bias, **own)

        # The largest logit has no gradient, whatever its cotangent is.
        got, grads = all_of(fn, arrays, (dout, dlse, 7.0, 0.0))
        numbers = [np.asarray(x) for x in arrays]
        count = oracle.counts((B, N, T, S), G, mask=mask, **options)
        call = *numbers[:4], count, D**-0.5, softcap
        out, lse, probs = oracle.attention(*call, numbers[4])
        top = largest(*numbers[:2], numbers[3], count, softcap)
        assert_matches(got, (out, lse, top, probs), 1e-12, "outputs")
        want = oracle.gradients(*call, dout, dlse, numbers[4])
        assert_matches(grads, want, 1e-12, "gradients")
        assert (np.asarray(out[0, 1]) == 0).all() and (top[0, 1] == -np.inf).all()


def test_finite_differences(rng: np.random.Generator) -> None:
    with jax.enable_x64(True):
        arrays = tuple(x[:1, :3] for x in qkv(rng, np.float64))

        def fn(q: Any, k: Any, v: Any, sinks: Any) -> tuple:
            return masked_attention(q, k, v, sinks=sinks, is_causal=True, return_lse=True)

        sinks = normal(rng, N, dtype=np.float64)
        check_grads(fn, (*arrays, sinks), order=1, modes=["rev"], atol=1e-5, rtol=1e-4)


def test_plain_xla_has_the_same_gradients(rng: np.random.Generator) -> None:
    sinks = normal(rng, N)
    arrays = (*qkv(rng), sinks)
    douts = normal(rng, B, T, N, E), normal(rng, B, T, N), normal(rng, B, T, N)

    def fn(q: Any, k: Any, v: Any, sinks: Any) -> tuple:
        options = {"return_lse": True, "return_max_logit": True}
        return masked_attention(q, k, v, sinks=sinks, is_causal=True, **options)

    def plain(*arrays: Any) -> tuple:
        from jax_dsa import plain_xla

        with plain_xla():
            return fn(*arrays)

    assert_matches(all_of(fn, arrays, douts), all_of(plain, arrays, douts), 1e-5)


def test_float16(rng: np.random.Generator) -> None:
    """The gradient of the log-sum-exp survives a sink that takes almost everything."""
    sinks = jnp.asarray([12.0, 30.0, jnp.inf, 0.0])
    low = qkv(rng, np.float16)
    wide = tuple(x.astype(jnp.float32) for x in low)
    douts = normal(rng, B, T, N, E), normal(rng, B, T, N)

    def fn(q: Any, k: Any, v: Any, sinks: Any) -> tuple:
        return masked_attention(q, k, v, sinks=sinks, is_causal=True, return_lse=True)

    got, want = (all_of(fn, (*arrays, sinks), douts) for arrays in (low, wide))
    got = jax.tree.map(lambda x: x.astype(jnp.float32), got)
    assert_matches(got, want, 5e-3)


def test_packed_sequences(rng: np.random.Generator) -> None:
    """Each sequence alone gives the same results, and padding has the largest logit -inf."""
    q = normal(rng, 8, N, D)
    k, v = normal(rng, 8, G, D), normal(rng, 8, G, E)
    sinks, bounds = sinks_of(rng, np.float32), np.array([0, 3, 7], np.int32)
    options = {"is_causal": True, "return_lse": True, "return_max_logit": True}

    def packed(q: Any, k: Any, v: Any, sinks: Any) -> tuple:
        return masked_attention_varlen(q, k, v, bounds, bounds, sinks=sinks, **options)

    def alone(q: Any, k: Any, v: Any, sinks: Any) -> tuple:
        parts = [
            masked_attention(q[a:b], k[a:b], v[a:b], sinks=sinks, **options)
            for a, b in ((0, 3), (3, 7))
        ]
        return tuple(jnp.concatenate(x) for x in zip(*parts, strict=True))

    douts = normal(rng, 8, N, E), normal(rng, 8, N), jnp.zeros((8, N))
    got, grads = all_of(packed, (q, k, v, sinks), douts)
    want, want_grads = all_of(alone, (q, k, v, sinks), tuple(x[:7] for x in douts))
    assert_matches(tuple(x[:7] for x in got), want, 1e-5)
    assert_matches(grads, want_grads, 1e-5)
    assert (np.asarray(got[0][7]) == 0).all() and (np.asarray(got[2][7]) == -np.inf).all()


def test_results_come_in_a_fixed_order(rng: np.random.Generator) -> None:
    q, k, v = qkv(rng)
    out, lse, top = masked_attention(q, k, v, return_lse=True, return_max_logit=True)
    one, alone = masked_attention(q, k, v, return_max_logit=True)
    np.testing.assert_array_equal(alone, top)
    np.testing.assert_array_equal(one, out)
    assert top.dtype == jnp.float32 and (np.asarray(top) <= np.asarray(lse)).all()


def test_checks(rng: np.random.Generator) -> None:
    q, k, v = qkv(rng)
    with pytest.raises(ValueError, match="argument 'sinks' has shape"):
        masked_attention(q, k, v, sinks=jnp.zeros(N + 1))
    with pytest.raises(TypeError, match="'sinks'"):
        masked_attention(q, k, v, sinks=jnp.zeros(N, jnp.bfloat16))
    with pytest.raises(TypeError, match="return_max_logit"):
        masked_attention(q, k, v, return_max_logit=1)  # type: ignore[call-overload]
