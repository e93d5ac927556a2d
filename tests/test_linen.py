"""`DSAttention` as a Flax Linen module."""

from __future__ import annotations

import functools

import jax
import numpy as np
from flax import nnx
from support.compare import assert_matches
from support.decoders import CONFIG, B, T, attend, attention, hidden

from jax_dsa import nn
from jax_dsa.nn.cache import LayerCache


def test_linen_bridge(rng):
    x = hidden(rng)
    linen = nn.linen_dsattention(CONFIG)
    variables = jax.jit(linen.init)(jax.random.key(0), x)
    assert set(variables) == {"params"}
    run = jax.jit(functools.partial(linen.apply, mutable=False))
    y, aux = run(variables, x)
    twin = nnx.clone(attention())
    state = nnx.to_pure_dict(nnx.state(twin, nnx.Param))
    nnx.update(twin, jax.tree.map(lambda _, p: p, state, variables["params"]))
    want, want_aux = attend(twin, x)
    assert_matches((y, aux.kl), (want, want_aux.kl))
    decoding = jax.jit(functools.partial(linen.apply, nnx_method="decode"))
    decoded, *_ = decoding(variables, x, LayerCache.empty(CONFIG, B, T))
    assert_matches(decoded, want, 1e-4)

    shared = jax.eval_shape(
        nn.linen_dsattention(CONFIG, "shared").init, jax.random.key(0), x, indices=aux.indices
    )
    assert (
        "indexer" not in shared["params"] and shared["params"].keys() < variables["params"].keys()
    )
    grads = jax.grad(lambda variables: run(variables, x)[1].kl)(variables)["params"]
    assert any((np.asarray(g) != 0).any() for g in jax.tree.leaves(grads["indexer"]))
    assert all((np.asarray(g) == 0).all() for g in jax.tree.leaves(grads["mla"]))
