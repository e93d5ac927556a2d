"""Wrong arguments of `dsa_attention`."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.dsa_attention import NAMES, B, C, D, E, J, K, N, S, T, inputs

from jax_dsa import dsa_attention

PICKS, INDEX_Q = np.zeros((B, T, K), np.int32), np.zeros((B, T, J, C), np.float32)


ALONE = {"top_k": None, "index_q": None, "index_k": None, "index_weights": None, "indices": PICKS}


BAD = [
    ({"q": np.zeros((B, T, N, D), np.int32)}, TypeError, "'q' has dtype int32"),
    ({"q": np.zeros((T, D), np.float32)}, ValueError, "'q' has shape"),
    ({"q": [1.0]}, TypeError, "'q' is list"),
    ({"kv": np.zeros((B, S, 1, D + 1), np.float32)}, ValueError, "'kv' has shape"),
    ({"kv": jnp.zeros((B, S, 1, D), jnp.bfloat16)}, TypeError, "'kv' has dtype bfloat16"),
    (
        {"kv": np.zeros((B, S, 3, D), np.float32)},
        ValueError,
        "'q' has N=4 heads and 'kv' has G=3, want N",
    ),
    ({"index_q": np.zeros((B, T + 1, J, C), np.float32)}, ValueError, "'index_q' has shape"),
    ({"index_k": np.zeros((B, S + 1, C), np.float32)}, ValueError, "'index_k' has shape"),
    ({"index_k": np.zeros((B, S, C), np.float16)}, TypeError, "'index_k' has dtype float16"),
    ({"index_weights": np.zeros((B, T, J + 1), np.float32)}, ValueError, "'index_weights'"),
    ({"index_weights": np.zeros((B, T, J), np.int32)}, TypeError, "'index_weights'"),
    ({"top_k": 0}, ValueError, "'top_k' is 0, want int in 1..2147483647"),
    ({"top_k": 2.0}, TypeError, "'top_k' is 2.0"),
    ({"value_dim": D + 1}, ValueError, "'value_dim' is 7"),
    ({"scale": "big"}, TypeError, "'scale' is 'big'"),
    ({"is_causal": 1}, TypeError, "'is_causal' is 1"),
    ({"query_start": np.zeros(3, np.int32)}, ValueError, "'query_start' has shape"),
    ({"starts": np.zeros((B, T + 1), np.int32)}, ValueError, "'starts' has shape"),
    ({"ends": np.zeros((B, T), np.float32)}, TypeError, "'ends' has dtype float32"),
    ({"index_k_scale": np.zeros((B, S, 1), np.float32)}, ValueError, "'index_k_scale' has shape"),
    ({"sinks": np.zeros(N + 1, np.float32)}, ValueError, "'sinks' has shape"),
    ({"top_k": None}, ValueError, "'top_k' is None, want an int, or 'indices'"),
    ({"indices": PICKS}, ValueError, "'top_k' is 4, want None beside 'indices'"),
    (ALONE | {"indices": None, "top_k": K}, ValueError, "'index_q' is None, want an array, or 'in"),
    (ALONE | {"index_q": INDEX_Q}, ValueError, "'index_k' is None, want an array, or 'indices'"),
    (ALONE | {"index_k_scale": PICKS[:, 0]}, ValueError, "'index_q' is None, want an array"),
    (ALONE | {"indices": PICKS[:, :, None]}, ValueError, "'indices' has shape .*want .B, T, K"),
    (ALONE | {"indices": PICKS[:, 1:]}, ValueError, "'indices' has shape .*T=5"),
    (ALONE | {"indices": PICKS.astype(np.float32)}, TypeError, "'indices' has dtype float32, wa"),
    (ALONE | {"indices": [1]}, TypeError, "'indices' is list"),
    ({"deterministic": None}, TypeError, "'deterministic' is None"),
    ({"implementation": "tpu"}, ValueError, "'implementation' is 'tpu'"),
    ({"implementation": "cuda"}, NotImplementedError, "implementation='cuda' is not available"),
]


@pytest.mark.parametrize(("change", "error", "message"), BAD)
def test_misuse(rng, change, error, message):
    given = dict(zip(NAMES, inputs(rng), strict=True)) | {"top_k": K, "value_dim": E} | change
    with pytest.raises(error, match=message) as raised:
        dsa_attention(**given)
    if error is not NotImplementedError:
        assert str(raised.value).startswith("dsa_attention: ")


@settings(max_examples=20, deadline=None)
@given(st.sampled_from(NAMES), st.lists(st.integers(0, 3), max_size=5))
def test_wrong_shapes_raise(name, shape):
    given_ = dict(zip(NAMES, inputs(np.random.default_rng(0)), strict=True))
    if list(given_[name].shape) == shape:
        return
    given_[name] = np.zeros(shape, np.float32)
    with pytest.raises(ValueError, match=r"dsa_attention: argument '\w+' "):
        dsa_attention(**given_, top_k=K, value_dim=E)
