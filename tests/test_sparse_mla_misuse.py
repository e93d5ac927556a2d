"""How `sparse_mla` refuses wrong arguments."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.sparse_mla import B, D, E, G, K, N, S, T

from jax_dsa import sparse_mla

GOOD = {
    "q": np.zeros((B, T, N, D), np.float32),
    "kv": np.zeros((B, S, G, D), np.float32),
    "indices": np.zeros((B, T, G, K), np.int32),
}
WRONG = {
    "q rank": ({"q": np.zeros(4, np.float32)}, ValueError, "'q' has shape"),
    "q dtype": ({"q": np.zeros((B, T, N, D), np.int32)}, TypeError, "'q' has dtype int32"),
    "q type": ({"q": [1.0]}, TypeError, "'q' is list"),
    "kv shape": ({"kv": np.zeros((B, S, G, D + 1), np.float32)}, ValueError, "'kv'.*D=10"),
    "kv batch": ({"kv": np.zeros((1, S, G, D), np.float32)}, ValueError, "'kv'.*B=2"),
    "kv dtype": ({"kv": jnp.zeros((B, S, G, D), jnp.bfloat16)}, TypeError, "'kv'.*float32"),
    "heads": ({"kv": np.zeros((B, S, 4, D), np.float32)}, ValueError, "N=6.*G=4.*multiple"),
    "no groups": ({"kv": np.zeros((B, S, 0, D), np.float32)}, ValueError, "N=6.*G=0.*multiple"),
    "indices shape": (
        {"indices": np.zeros((B, T), np.int32)},
        ValueError,
        r"\[B, T, G, K\] or \[B, T, K\]",
    ),
    "indices of all": ({"indices": np.zeros((B, 1, K), np.int32)}, ValueError, "'indices'.*T=7"),
    "indices group": ({"indices": np.zeros((B, T, 1, K), np.int32)}, ValueError, "'indices'.*G=2"),
    "indices dtype": ({"indices": np.zeros((B, T, G, K))}, TypeError, "'indices'.*int32"),
    "value_dim": ({"value_dim": D + 1}, ValueError, "'value_dim' is 11, want.* int in 1..10"),
    "value_dim default": ({"value_dim": 512}, ValueError, "'value_dim' is 512"),
    "value_dim type": ({"value_dim": 2.0}, TypeError, "'value_dim'.*want an int"),
    "scale": ({"scale": np.nan}, ValueError, "'scale' is nan"),
    "scale type": ({"scale": "1"}, TypeError, "'scale'"),
    "is_causal": ({"is_causal": 1}, TypeError, "'is_causal'.*want a bool"),
    "query_start": ({"query_start": np.zeros(3, np.int32)}, ValueError, "'query_start'"),
    "query_start type": ({"query_start": 0.5}, TypeError, "'query_start'"),
    "key_stride": ({"key_stride": 0}, ValueError, "'key_stride' is 0"),
    "topk_length": ({"topk_length": np.zeros((B, 1), np.int32)}, ValueError, "'topk_length'.*T=7"),
    "topk_length type": ({"topk_length": 3}, TypeError, "'topk_length' is int, want an array"),
    "sinks": ({"sinks": np.zeros(5, np.float32)}, ValueError, "'sinks'.*N=6"),
    "sinks dtype": ({"sinks": jnp.zeros(N, jnp.bfloat16)}, TypeError, "'sinks'.*float32"),
    "deterministic": ({"deterministic": None}, TypeError, "'deterministic'"),
    "return_lse": ({"return_lse": "yes"}, TypeError, "'return_lse'"),
    "implementation": ({"implementation": "gpu"}, ValueError, "'implementation' is 'gpu'"),
}


@pytest.mark.parametrize(("change", "error", "message"), WRONG.values(), ids=WRONG.keys())
def test_misuse(change: dict, error: type, message: str) -> None:
    with pytest.raises(error, match=f"sparse_mla: .*{message}"):
        sparse_mla(**{**GOOD, "value_dim": E, **change})


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_any_wrong_shape_is_refused(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(GOOD)))
    shape = list(GOOD[name].shape)
    axis = data.draw(st.integers(0, 3))
    free = {"q": (), "kv": (1,), "indices": (3,)}[name]
    shape[axis] = data.draw(st.integers(0, 20).filter(lambda n: n != shape[axis]))
    allowed = axis in free or (name == "q" and axis == 2 and shape[2] % G == 0)
    bad = {**GOOD, name: np.zeros(shape, GOOD[name].dtype)}
    if allowed:
        assert sparse_mla(**bad, value_dim=E).shape == (*bad["q"].shape[:3], E)
    else:
        with pytest.raises(ValueError, match="sparse_mla: argument"):
            sparse_mla(**bad, value_dim=E)
