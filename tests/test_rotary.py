"""Rotary position embedding, its YaRN frequencies, and the Hadamard transform."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.compare import assert_matches
from support.decoders import B, T, hidden, positions

from jax_dsa import nn


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_rope_rotates_complex_numbers(rng, layout):
    x = rng.normal(size=(B, T, 3, 8)).astype(np.float32)
    first, second = (x[..., :4], x[..., 4:]) if layout == "half" else (x[..., ::2], x[..., 1::2])
    rotation = np.exp(1j * np.arange(5, 5 + T)[:, None, None] * 100.0 ** (-np.arange(4) / 4))
    z = (first + 1j * second) * rotation
    got = np.asarray(nn.rope(x, positions(5), base=100.0, layout=layout))
    got = (got[..., :4], got[..., 4:]) if layout == "half" else (got[..., ::2], got[..., 1::2])
    np.testing.assert_allclose(got[0] + 1j * got[1], z, atol=1e-5)


@pytest.mark.parametrize("start", [0, 2**20 - 2, 2**31 - 1 - T, -(2**20), -(2**31)])
@pytest.mark.parametrize("base", [10000.0, 5e6, None])
@pytest.mark.parametrize("traced", [False, True], ids=["eager", "jit"])
def test_rope_is_exact_at_any_position(start: int, base: float | None, traced: bool, rng) -> None:
    """Angles are as exact far into a sequence as at its beginning."""
    x = rng.normal(size=(B, T, 64)).astype(np.float32)
    frequencies = rng.uniform(0, 4, 32) if base is None else base ** (-np.arange(32) / 32)
    where = start + np.arange(T)
    given = {"frequencies": tuple(frequencies)} if base is None else {"base": base}
    rope = lambda x, p: nn.rope(x, p, **given)  # noqa: E731
    rope = jax.jit(rope) if traced else rope
    got = np.asarray(rope(x, jnp.broadcast_to(jnp.asarray(where, jnp.int32), (B, T))))
    angle = where[:, None].astype(np.longdouble) * frequencies
    rotation = np.exp(1j * (angle % (2 * np.longdouble(np.pi))).astype(np.float64))
    z = (x[..., :32] + 1j * x[..., 32:]) * rotation
    np.testing.assert_allclose(got[..., :32] + 1j * got[..., 32:], z, atol=5e-6)


def test_small_angles_of_rope_keep_their_relative_precision():
    frequencies = (1e-3, 1e-6, 1e-9, 1e-12)
    x = jnp.repeat(jnp.array([1.0, 0.0]), 4)[None, None]
    got = nn.rope(x, jnp.full((1, 1), 7, jnp.int32), frequencies=frequencies)[0, 0, 4:]
    np.testing.assert_allclose(got, 7 * np.array(frequencies), rtol=1e-5)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda x, p: nn.rope(x[0], p), ValueError, r"rope: argument 'positions' has shape \(2,"),
        (lambda x, p: nn.rope(x, p[:, 1:]), ValueError, "rope: argument 'positions' has shape"),
        (lambda x, p: nn.rope(x.astype(int), p), TypeError, "rope: argument 'x' has dtype int32"),
        (lambda x, p: nn.rope(x, p * 1.0), TypeError, "rope: argument 'positions' has dtype float"),
        (lambda x, p: nn.rope(x, p, base=0.0), ValueError, "rope: argument 'base' is 0.0, want a"),
        (
            lambda x, p: nn.rope(x, p, frequencies=[np.nan] * 4),
            ValueError,
            "rope: argument 'frequencies' is nan, want 0 or a finite normal float32",
        ),
        (lambda x, p: nn.hadamard(x.astype(int)), TypeError, "hadamard: argument 'x' has dtype in"),
    ],
)
def test_misuse(call, error, message):
    with pytest.raises(error, match=message):
        call(jnp.ones((B, T, 8)), positions())


def test_rope_layouts_differ_by_a_permutation_only(rng):
    x = hidden(rng, B, T, 8)
    order = np.array([0, 4, 1, 5, 2, 6, 3, 7])  # Pairs of "half" become neighbours.
    half = nn.rope(x, positions(), layout="half")
    assert_matches(half[..., order], nn.rope(x[..., order], positions(), layout="interleaved"))
    assert np.abs(half - nn.rope(x, positions(), layout="interleaved")).max() > 0.1


def test_rope_scores_depend_only_on_distance(rng):
    q, k = hidden(rng, B, T, 8), hidden(rng, B, T, 8)
    for layout in ("half", "interleaved"):
        near, far = (
            jnp.einsum("btc,bsc->bts", *(nn.rope(x, positions(p), layout=layout) for x in (q, k)))
            for p in (0, 1000)
        )
        assert_matches(near, far, 1e-5)


def test_hadamard_is_orthogonal():
    h = np.asarray(nn.hadamard(jnp.eye(16)))
    np.testing.assert_allclose(h @ h.T, np.eye(16), atol=1e-6)
    np.testing.assert_allclose(np.abs(h), 0.25, rtol=1e-6)


def test_yarn_frequencies():
    plain = 1e4 ** (-np.arange(0, 64, 2) / 64)
    got = np.array(nn.yarn_frequencies(64, base=1e4, factor=40.0, original_length=4096))
    turns = 4096 * plain / (2 * np.pi)
    np.testing.assert_allclose(got[turns > 40], plain[turns > 40])
    np.testing.assert_allclose(got[turns < 0.7], plain[turns < 0.7] / 40)
    between = got[(turns < 30) & (turns > 1.1)] / plain[(turns < 30) & (turns > 1.1)]
    assert (np.diff(between) < 0).all() and between.max() < 1 and between.min() > 1 / 40
    same = nn.yarn_frequencies(64, base=1e4, factor=1.0, original_length=4096)
    np.testing.assert_allclose(same, plain)


@pytest.mark.parametrize(
    ("original_length", "want"),
    [
        (4096, [0.05623413, 0.008334509, 7.905694e-4, 1.874735e-5, 4.445698e-6, 3.333804e-6]),
        # Pairs 20 to 33 are interpolated, although the last pair is number 31.
        (65536, [0.05623413, 0.01333521, 3.162278e-3, 4.686839e-4, 4.445699e-5, 2.333662e-5]),
    ],
)
def test_yarn_frequencies_by_number(original_length, want):
    """The numbers were computed by `transformers`."""
    got = nn.yarn_frequencies(64, base=1e4, factor=40.0, original_length=original_length)
    np.testing.assert_allclose([got[i] for i in (10, 15, 20, 25, 30, 31)], want, rtol=1e-6)
