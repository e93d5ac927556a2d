"""Arguments that `htree_attention` and `htree_select` reject."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_dsa.ops.htree import cuda, htree_attention, htree_select
from jax_dsa.ops.htree.spec import Operands, Options

B, N, G, D, E = 2, 4, 2, 6, 5
TREE = {"compression": 3, "top_k": 3}

GOOD = {name: jnp.zeros(s) for name, s in zip("qkv", ((B, 7, N, D), (B, 7, G, D), (B, 7, G, E)))}
f32 = np.float32
WRONG = {
    "q rank": ({"q": np.zeros(4, f32)}, ValueError, "'q' has shape"),
    "q dtype": ({"q": np.zeros((B, 7, N, D), int)}, TypeError, "'q' has dtype int"),
    "q type": ({"q": [1.0]}, TypeError, "'q' is list"),
    "q odd": (
        {"q": np.zeros((B, 7, N, 5), f32), "k": np.zeros((B, 7, G, 5), f32)},
        ValueError,
        "even",
    ),
    "heads": ({"q": np.zeros((B, 7, 3, D), f32)}, ValueError, "'q'.*N=3.*G=2.*multiple of G"),
    "no groups": (
        {"k": np.zeros((B, 7, 0, D), f32), "v": np.zeros((B, 7, 0, E), f32)},
        ValueError,
        "G=0",
    ),
    "k tokens": ({"k": np.zeros((B, 8, G, D), f32)}, ValueError, "'k' has shape.*T=7"),
    "k dtype": ({"k": jnp.zeros((B, 7, G, D), jnp.bfloat16)}, TypeError, "'k'.*want float32"),
    "k dim": ({"k": np.zeros((B, 7, G, 8), f32)}, ValueError, "'k' has shape.*D=6"),
    "v groups": ({"v": np.zeros((B, 7, 1, E), f32)}, ValueError, "'v' has shape.*G=2"),
    "v type": ({"v": None}, TypeError, "'v' is NoneType"),
    "compression": ({"compression": 1}, ValueError, "'compression' is 1, want int in 2"),
    "compression type": ({"compression": 2.0}, TypeError, "'compression'.*want an int"),
    "top_k": ({"top_k": 0}, ValueError, "'top_k' is 0, want int in 1"),
    "top_k type": ({"top_k": np.float32(3)}, TypeError, "'top_k'.*want an int"),
    "scale": ({"scale": np.nan}, ValueError, "'scale' is nan"),
    "scale type": ({"scale": "1"}, TypeError, "'scale'"),
    "rope_base": ({"rope_base": 0.0}, ValueError, "'rope_base' is 0.0, want a positive"),
    "rope_base type": ({"rope_base": None}, TypeError, "'rope_base'"),
    "return_lse": ({"return_lse": 1}, TypeError, "'return_lse'.*want a bool"),
    "implementation": ({"implementation": "gpu"}, ValueError, "'implementation' is 'gpu'"),
}


@pytest.mark.parametrize(("change", "error", "message"), WRONG.values(), ids=WRONG.keys())
def test_misuse(change: dict, error: type, message: str) -> None:
    with pytest.raises(error, match=f"htree_attention: .*{message}"):
        htree_attention(**{**GOOD, **TREE, **change})
    if not {"v", "return_lse"} & change.keys():
        arguments = {**GOOD, **TREE, **change}
        del arguments["v"]
        with pytest.raises(error, match=f"htree_select: .*{message}"):
            htree_select(**arguments)


def test_cuda_implementation_rejects_unsupported_calls() -> None:
    with pytest.raises(NotImplementedError, match=r"htree_fwd.*implementation='xla'"):
        htree_attention(**GOOD, **TREE, implementation="cuda")


UNSUPPORTED = {
    "queries": ({"capacity": 100}, {}),
    "bfloat16": ({}, {"dtype": jnp.float16}),
    "D=256": ({}, {"d": 256}),
    "E=32": ({}, {"e": 32}),
    "compression": ({"compression": 4}, {}),
    "top_k": ({"top_k": 1025}, {}),
    "heads": ({}, {"n": 400}),
}


@pytest.mark.parametrize(("reason", "case"), UNSUPPORTED.items(), ids=UNSUPPORTED.keys())
def test_kernels_report_the_reason(reason: str, case: Any) -> None:
    def supports(options: dict, shapes: dict) -> str | None:
        s = {"n": 8, "d": 64, "e": 64, "dtype": jnp.bfloat16, **shapes}
        rows = ((s["n"], s["d"]), (2, s["d"]), (2, s["e"]))
        q, k, v = (jax.ShapeDtypeStruct((1, 100, *row), s["dtype"]) for row in rows)
        positions = jax.ShapeDtypeStruct((1, 100), jnp.int32)
        chosen = Options(**{"compression": 16, "top_k": 512, **options})
        return cuda.supports(chosen, Operands(q, k, v, positions))

    assert supports({}, {}) is None
    assert reason in (supports(*case) or "")


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_any_wrong_shape_is_rejected(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from("qkv"))
    shape = list(GOOD[name].shape)
    axis = data.draw(st.sampled_from((0, 1, 3) if name == "q" else (0, 1, 2)))
    shape[axis] = data.draw(st.integers(0, 20).filter(lambda n: n != shape[axis]))
    with pytest.raises(ValueError, match="htree_attention: argument"):
        htree_attention(**{**GOOD, name: np.zeros(shape, f32)}, **TREE)
