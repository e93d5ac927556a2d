"""Sequences that are stored in stripes give the results of sequences in order."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support.compare import assert_matches
from support.marks import slow
from support.training import ATTENTION

from jax_dsa import nn


def test_each_device_has_early_and_late_tokens(rng):
    np.testing.assert_array_equal(nn.striped(np.arange(12)[None], 3)[0, :5], [0, 3, 6, 9, 1])
    x = rng.normal(size=(2, 12, 3))
    np.testing.assert_array_equal(nn.unstriped(nn.striped(x, 4), 4), x)
    seen = nn.striped(np.arange(1, 4097)[None], 8).reshape(8, -1).sum(1)  # Keys per device.
    assert seen.max() / seen.mean() < 1.002 and np.arange(3585, 4097).sum() / seen.mean() > 1.8


@pytest.mark.parametrize("sparse", [True, slow(False)])
@pytest.mark.parametrize("packed", [True, slow(False)])
def test_attention_in_stripes(rng, sparse, packed):
    """Checks values, loss, selection, and gradients of inputs and parameters."""
    stripes, shape = 4, (2, 24)
    module = nn.DSAttention(ATTENTION, rngs=nnx.Rngs(0))
    graph, params = nnx.split(module)
    x = rng.normal(size=(*shape, ATTENTION.model_dim)).astype(np.float32)
    weight = rng.normal(size=x.shape).astype(np.float32)
    ids = np.sort(rng.integers(0, 3, shape), axis=1).astype(np.int32) if packed else None

    def loss(params, x, weight, ids, stripes):
        y, aux = nnx.merge(graph, params)(x, segment_ids=ids, stripes=stripes, sparse=sparse)
        return (y * weight).sum() + aux.kl, (y, aux.lse, aux.indices, aux.kl)

    run = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True), static_argnums=4)
    (_, want), want_grads = run(params, x, weight, ids, 1)
    stored = jax.tree.map(lambda a: nn.striped(a, stripes), (x, weight, ids))
    (_, got), (got_params, got_x) = run(params, *stored, stripes)
    *rows, kl = got
    assert_matches((*(nn.unstriped(a, stripes) for a in rows if a is not None), kl), want, 1e-5)
    assert_matches((got_params, nn.unstriped(got_x, stripes)), want_grads, 1e-5)


def test_the_number_of_stripes_must_divide_the_sequence():
    module = nn.DSAttention(ATTENTION, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="'stripes' is 5, want a divisor of T = 24"):
        module(jnp.zeros((1, 24, ATTENTION.model_dim)), stripes=5)
