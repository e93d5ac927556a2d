"""`merge_attention`, which combines the attention to disjoint sets of keys."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads
from support.compare import Variable, assert_matches
from support.mqa_decode import B, E, N, S, T, as_float32, both, inputs, lengths
from support.oracles import mqa_decode as oracle

from jax_dsa.ops.mqa_decode import merge_attention, mqa_decode


@pytest.mark.parametrize("as_list", [False, True])
def test_merge(as_list: bool, rng: np.random.Generator) -> None:
    outs = rng.normal(size=(4, B, T, N, E)).astype(np.float32)
    lses = rng.normal(size=(4, B, T, N)).astype(np.float32)
    lses[0, 0], lses[:, 1, 1] = -np.inf, -np.inf
    outs[0, 0] = np.nan
    want = as_float32(oracle.merge_attention(outs, lses))
    got = merge_attention(list(outs), tuple(lses)) if as_list else merge_attention(outs, lses)
    assert_matches(got, want, tol=1e-5)
    (out, lse), pull = jax.vjp(lambda *a: merge_attention(*a), outs, lses)
    grads = pull((jnp.ones_like(out), jnp.ones_like(lse)))
    assert all(np.isfinite(g).all() for g in grads)
    assert np.all(np.asarray(grads[1])[np.isneginf(lses)] == 0)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_low_precision_is_rounded_once(dtype: Any, rng: np.random.Generator) -> None:
    """The sum is float32, and so are the weights and lse, for sets that are many and uneven."""
    outs = jnp.asarray(rng.normal(size=(16, B, T, N, E)), dtype)
    lses = rng.normal(size=(16, B, T, N), scale=3).astype(np.float32)
    want_out, want_lse = oracle.merge_attention(np.asarray(outs, np.float64), lses)
    out, lse = merge_attention(outs, lses)
    assert (out.dtype, lse.dtype) == (dtype, jnp.float32)
    np.testing.assert_allclose(lse, want_lse, rtol=1e-6)
    unit = float(jnp.finfo(dtype).eps) / 2
    np.testing.assert_allclose(np.asarray(out, np.float64), want_out, rtol=1.01 * unit, atol=1e-6)

    def loss(outs: Any, lses: Any) -> Any:
        out, lse = merge_attention(outs, lses)
        return jnp.sum(out.astype(jnp.float32)) + jnp.sum(lse)

    got = jax.grad(loss, argnums=(0, 1))(outs, lses)
    want = jax.grad(loss, argnums=(0, 1))(outs.astype(jnp.float32), lses)
    assert [x.dtype for x in got] == [dtype, jnp.float32]
    assert_matches(got[0].astype(jnp.float32), want[0], tol=1.01 * unit)
    assert_matches(got[1], want[1], tol=1e-5)


def test_arguments_with_a_jax_array_method(rng: np.random.Generator) -> None:
    outs = rng.normal(size=(2, T, N, E)).astype(np.float32)
    lses = rng.normal(size=(2, T, N)).astype(np.float32)
    want = merge_attention(outs, lses)
    for got in (
        merge_attention(Variable(outs), Variable(lses)),
        merge_attention([Variable(x) for x in outs], [Variable(x) for x in lses]),
    ):
        assert_matches(got, want, tol=0)


def test_combined_sets_equal_the_whole(rng: np.random.Generator) -> None:
    q, k, v = inputs(rng)
    starts = [np.full(B, s, np.int32) for s in (0, 4, 5)]
    ends = [4, 5, 13]

    def split(q: Any, k: Any, v: Any) -> Any:
        # A set has neither the keys before its start nor those beyond its end.
        sets = [
            both(q, k[:, :e], v[:, :e], starts=s, **lengths(S, S, S))
            for s, e in zip(starts, ends, strict=True)
        ]
        return merge_attention(*zip(*sets, strict=True))

    want, pull_want = jax.vjp(both, q, k, v)
    got, pull_got = jax.vjp(split, q, k, v)
    assert_matches(got, want, tol=1e-5)
    cotangent = tuple(jnp.cos(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape) for x in want)
    assert_matches(pull_got(cotangent), pull_want(cotangent), tol=1e-5)


@pytest.mark.parametrize("level", [0.0, -1e9, -3e38])
def test_sums_equal_the_whole(level: float, rng: np.random.Generator) -> None:
    """In (o, m, l), no score is so large that a set loses the number of its keys."""
    q, k, v = inputs(rng)
    if level != 0:
        q[...], k[..., -1] = np.eye(q.shape[-1], dtype=np.float32)[-1], level
        k[0, :2, :, -1] = 1
    starts = [np.full(B, s, np.int32) for s in (0, 4, 5)]
    ends = [4, 5, 13]

    def split(q: Any, k: Any, v: Any) -> Any:
        sets = [
            mqa_decode(q, k[:, :e], v[:, :e], starts=s, normalize=False, **lengths(S, S, S))
            for s, e in zip(starts, ends, strict=True)
        ]
        outs, max_logits, sums = zip(*sets, strict=True)
        o, m, total = merge_attention(outs, max_logits=max_logits, sums=sums)
        return o / total[..., None], m + jnp.log(total)

    want, pull_want = jax.vjp(both, q, k, v)
    got, pull_got = jax.vjp(split, q, k, v)
    assert_matches(got, want, tol=1e-5)
    dout, dlse = (jnp.cos(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape) for x in want)
    _, dk, dv = pull_want((dout, dlse))
    assert_matches(pull_got((dout, dlse))[1:], (dk, dv), tol=1e-5)


def test_sums_of_empty_sets(rng: np.random.Generator) -> None:
    outs = rng.normal(size=(2, 3, E)).astype(np.float32)
    tops = np.array([[-np.inf, 1, -np.inf], [-np.inf, -np.inf, 2]], np.float32)
    sums = np.array([[0, 3, 0], [0, 0, 4]], np.float32)
    outs[tops == -np.inf] = np.nan
    (o, m, total), pull = jax.vjp(lambda *a: merge_sums(*a), outs, tops, sums)
    np.testing.assert_array_equal(m, [-np.inf, 1, 2])
    np.testing.assert_array_equal(total, [0, 3, 4])
    np.testing.assert_array_equal(o, np.stack([np.zeros(E), outs[0, 1], outs[1, 2]]))
    grads = pull((jnp.ones_like(o), jnp.zeros_like(m), jnp.ones_like(total)))
    assert all(np.isfinite(g).all() for g in grads)


def merge_sums(outs: Any, max_logits: Any, sums: Any) -> Any:
    return merge_attention(outs, max_logits=max_logits, sums=sums)


def test_gradients_to_second_order(rng: np.random.Generator) -> None:
    outs, lses = rng.normal(size=(3, 2, 4)), rng.normal(size=(3, 2))
    with jax.enable_x64(True):
        args = jnp.asarray(outs), jnp.asarray(lses)
        check_grads(jax.jit(merge_attention), args, order=2, modes=["rev"])


OUTS, LSES = np.zeros((2, 3, 4), np.float32), np.zeros((2, 3), np.float32)
WRONG = {
    "outs type": (3, LSES, {}, TypeError, "'outs' is int"),
    "outs elements": ([OUTS[0], 1.0], LSES, {}, TypeError, "'outs' is a sequence"),
    "outs shapes": ([OUTS[0], OUTS[0, :2]], LSES, {}, ValueError, "'outs' holds"),
    "outs dtype": (OUTS.astype(np.int32), LSES, {}, TypeError, "'outs' has dtype int32"),
    "no sets": ([], [], {}, ValueError, "'outs' holds nothing"),
    "no stacked sets": (OUTS[:0], LSES[:0], {}, ValueError, "'outs' has shape"),
    "lses shape": (OUTS, LSES[:, :2], {}, ValueError, "'lses' has shape"),
    "lses count": (OUTS, [LSES[0]], {}, ValueError, "'lses' has shape"),
    "lses dtype": (OUTS, LSES.astype(np.float16), {}, TypeError, "'lses' has dtype float16"),
    "neither": (OUTS, None, {}, ValueError, "'max_logits' is None.*'lses'"),
    "no sums": (OUTS, None, {"max_logits": LSES}, ValueError, "'sums' is None"),
    "no maxima": (OUTS, None, {"sums": LSES}, ValueError, "'max_logits' is None"),
    "maxima too": (OUTS, LSES, {"max_logits": LSES}, ValueError, "'lses' is an array.*max_logits"),
    "sums too": (OUTS, LSES, {"sums": LSES}, ValueError, "'sums' is an array"),
    "sums shape": (OUTS, None, {"max_logits": LSES, "sums": OUTS}, ValueError, "'sums' has shape"),
    "implementation": (OUTS, LSES, {"implementation": "best"}, ValueError, "'implementation'"),
    "cuda": (OUTS, LSES, {"implementation": "cuda"}, NotImplementedError, "no CUDA kernel"),
}


@pytest.mark.parametrize(
    ("outs", "lses", "options", "error", "message"), WRONG.values(), ids=WRONG.keys()
)
def test_misuse(outs: Any, lses: Any, options: dict, error: type, message: str) -> None:
    with pytest.raises(error, match=f"merge_attention: .*{message}"):
        merge_attention(outs, lses, **options)
