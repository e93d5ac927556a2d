"""Selections that a caller gives to the layers of a decoder."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from support.compare import assert_matches
from support.decoders import SHARING, B, T, decoder


def test_layers_of_a_decoder_attend_to_given_selections(rng):
    """A layer without a selection of its own takes that of the layer before it."""
    model, tokens = decoder(SHARING), jnp.asarray(rng.integers(0, 11, size=(B, T)), jnp.int32)
    first = jnp.broadcast_to(jnp.arange(2, dtype=jnp.int32), (B, T, 2))
    given = [None, first, None, first + 1]

    @jax.jit
    def run(tokens):
        x, found = model.embed(tokens), []
        for block, indices in zip(model.blocks, given):
            if indices is None and found:
                indices = found[-1]
            x, aux = block(x, indices=indices)
            found.append(aux.indices)
        return model.head(model.norm(x)), found, model(tokens, indices=given)

    want, selections, (logits, layers) = run(tokens)
    assert_matches(logits, want)
    for i, aux in enumerate(layers):
        np.testing.assert_array_equal(aux.indices, selections[i], f"layer {i}")
    # The first tokens do not see all of these keys.
    for i, keys in ((1, {-1, 0, 1}), (2, {-1, 0, 1}), (3, {-1, 1, 2})):
        assert set(np.asarray(layers[i].indices).ravel()) == keys
