"""Attention with compressed keys where sequences are empty or shorter than a block."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.compare import assert_matches
from support.marks import slow
from support.published_layers import COMPRESSED, M, hidden, layer

from jax_dsa import nn


@pytest.mark.parametrize("shape", [(2, 3), slow((2, 0)), slow((0, 5))])
def test_packed_sequences_without_a_compressed_key(shape: tuple[int, int]) -> None:
    """Such a layer attends to the window only."""
    rng = np.random.default_rng(0)
    module = layer(rng, COMPRESSED)
    x, ids = hidden(rng, *shape, M), jnp.zeros(shape, jnp.int32)
    forward = jax.jit(module.__call__)
    y, aux = forward(x, segment_ids=ids)
    assert y.shape == x.shape and isinstance(aux, nn.CompressedAux)
    assert_matches(y, forward(x)[0], tol=1e-5)
    assert (np.asarray(aux.indices) == -1).all()
