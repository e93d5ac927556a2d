"""Rotary position embedding, its YaRN frequencies, and the Hadamard transform."""

from __future__ import annotations

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
        assert_matches(near, far, 1e-3)


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
