"""Tests that every wrong argument of `masked_attention` raises an error that names it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_dsa.ops.block_mask import make_block_mask
from jax_dsa.ops.masked_attention import masked_attention, masked_attention_varlen

B, T, S, N, G, D = 2, 5, 7, 4, 2, 8
CU_Q, CU_K = np.array([0, 2, 5], np.int32), np.array([1, 5, 7], np.int32)


def valid_arguments() -> dict[str, Any]:
    q, k = jnp.ones((B, T, N, D)), jnp.ones((B, S, G, D))
    return {
        "q": q,
        "k": k,
        "v": k,
        "bias": jnp.ones((1, G, 1, S)),
        "mask": jnp.ones((B, 1, T, S), bool),
    }


f32, i32 = np.float32, np.int32
ERRORS = [
    ("q", [1.0], TypeError, "argument 'q' is list, want an array"),
    ("q", np.ones((T, D), f32), ValueError, "argument 'q' has shape"),
    ("q", np.ones((B, T, N, D), i32), TypeError, "argument 'q' has dtype int32"),
    ("q", np.ones((B, T, N, 0), f32), ValueError, "argument 'k' has shape.*D=0"),
    ("q", np.ones((B, T, 3, D), f32), ValueError, "argument 'q' has N=3.*G=2.*multiple of G"),
    ("k", np.ones((B, S, G, D), np.float16), TypeError, "argument 'k' has dtype float16"),
    ("k", np.ones((B, S, G, D + 1), f32), ValueError, "argument 'k' has shape.*D=8"),
    ("k", np.ones((B, S, 0, D), f32), ValueError, "argument 'q' has N=4.*'k' has G=0"),
    ("v", np.ones((B, S + 1, G, D), f32), ValueError, "argument 'v' has shape.*S=7"),
    ("v", None, TypeError, "argument 'v' is NoneType"),
    ("bias", np.ones((B, G, T, S), np.float16), TypeError, "argument 'bias' has dtype float16"),
    ("bias", np.ones((B, 3, T, S), f32), ValueError, "argument 'bias' has shape"),
    ("bias", np.ones((G, T, S), f32), ValueError, r"argument 'bias' has shape.*\[1\|2, 1\|2\|4,"),
    ("mask", np.ones((B, 1, T, 1), bool), ValueError, "argument 'mask' has shape"),
    ("mask", np.ones((B, 1, T, S), i32), TypeError, "argument 'mask' has dtype int32, want bool"),
    ("scale", "1", TypeError, "argument 'scale'"),
    ("scale", np.inf, ValueError, "argument 'scale' is inf"),
    ("is_causal", 1, TypeError, "argument 'is_causal'"),
    ("causal_alignment", "top", ValueError, "argument 'causal_alignment' is 'top'"),
    ("local_window_size", -1, ValueError, "argument 'local_window_size' is -1"),
    ("local_window_size", 2.0, TypeError, "argument 'local_window_size' is 2.0"),
    (
        "local_window_size",
        np.ones(T, i32),
        TypeError,
        r"'local_window_size' is an array int32\[5\].*or a pair \(left, right\)",
    ),
    ("local_window_size", (1, 2, 3), ValueError, r"argument 'local_window_size' is \(1, 2, 3\)"),
    ("segment_ids", np.ones((B, T), i32), ValueError, "argument 'segment_ids' has shape.*S=7"),
    ("segment_ids", (np.ones((B, T), i32),), ValueError, "'segment_ids' is a tuple of 1, want"),
    (
        "segment_ids",
        (np.ones((B, T), i32), np.ones((B, S))),
        TypeError,
        r"'segment_ids\[1\]' has dtype",
    ),
    ("segment_ids", (np.ones((B, S), i32),) * 2, ValueError, r"'segment_ids\[0\]' has.*T=5"),
    ("segment_ids", (np.ones((B, T), i32),) * 2, ValueError, r"'segment_ids\[1\]' has.*S=7"),
    ("key_value_seq_lengths", 3, TypeError, "argument 'key_value_seq_lengths' is int"),
    (
        "key_value_seq_lengths",
        np.ones(B + 1, i32),
        ValueError,
        "argument 'key_value_seq_lengths' has shape",
    ),
    ("softcap", 0.0, ValueError, "argument 'softcap' is 0.0"),
    ("softcap", True, TypeError, "argument 'softcap'"),
    ("block_mask", np.ones((1, 1, 1, 1)), TypeError, "argument 'block_mask' is an array float64"),
    ("kv_indices", np.ones((B, N, 3), i32), ValueError, "argument 'kv_indices' has shape"),
    ("kv_indices", np.ones((B, G, 3), f32), TypeError, "argument 'kv_indices' has dtype"),
    ("deterministic", None, TypeError, "argument 'deterministic'"),
    ("return_lse", "yes", TypeError, "argument 'return_lse'"),
    ("implementation", "triton", ValueError, "argument 'implementation' is 'triton'"),
    ("implementation", "cuda", NotImplementedError, "implementation='xla'"),
]


@pytest.mark.parametrize(
    ("name", "value", "error", "message"), ERRORS, ids=[f"{e[0]}-{i}" for i, e in enumerate(ERRORS)]
)
def test_misuse(name: str, value: Any, error: type[Exception], message: str) -> None:
    arguments = {**valid_arguments(), name: value}
    with pytest.raises(
        error, match="masked_attention.*" + message.removeprefix("masked_attention.*")
    ):
        masked_attention(**arguments)


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        (lambda x: x[..., None], ValueError),
        (lambda x: x.astype(np.float32), TypeError),
        (lambda x: "text", TypeError),
        (lambda x: None, TypeError),
    ],
    ids=["axes", "dtype", "text", "none"],
)
@pytest.mark.parametrize(
    "leaf", ["tiles", "bits", "num_kv_tiles", "kv_tiles", "num_q_tiles", "q_tiles"]
)
def test_wrong_fields_of_a_block_mask(
    leaf: str, wrong: Callable[[np.ndarray], Any], error: type[Exception]
) -> None:
    arguments = valid_arguments()
    blocks = make_block_mask(arguments.pop("mask"), block_q=2, block_k=8)
    blocks = dataclasses.replace(blocks, **{leaf: wrong(np.asarray(getattr(blocks, leaf)))})
    with pytest.raises(error, match=rf"masked_attention: argument 'block_mask\.{leaf}'"):
        masked_attention(**arguments, block_mask=blocks)


def test_block_mask_with_inconsistent_fields() -> None:
    arguments = valid_arguments()
    mask = arguments.pop("mask")
    blocks, other = (make_block_mask(mask, block_q=n, block_k=8) for n in (2, 5))
    mixed = dataclasses.replace(blocks, kv_tiles=other.kv_tiles)
    with pytest.raises(
        ValueError, match=r"argument 'block_mask.kv_tiles' has shape \(2, 1, 1, 1\)"
    ):
        masked_attention(**arguments, block_mask=mixed)


def test_misuse_of_combined_arguments() -> None:
    arguments = valid_arguments()
    blocks = make_block_mask(arguments["mask"])
    with pytest.raises(
        ValueError, match="'block_mask' is BlockMask, want None beside 'kv_indices'"
    ):
        kept = np.zeros((B, G, 2), np.int32)
        masked_attention(**arguments, block_mask=blocks, kv_indices=kept)
    other = make_block_mask(lambda b, h, t, s: t >= s, shape=(1, 3, T, S))
    with pytest.raises(ValueError, match=r"'block_mask' has shape \(1, 3, 5, 7\)"):
        masked_attention(**arguments, block_mask=other)
    with pytest.raises(ValueError, match="masked_attention_varlen: argument 'q' has shape"):
        masked_attention_varlen(arguments["q"], arguments["k"], arguments["v"], CU_Q, CU_K)
    one = [arguments[name][0] for name in "qkv"]
    with pytest.raises(ValueError, match="'cu_seqlens_k' has shape"):
        masked_attention_varlen(*one, CU_Q, CU_K[1:])
    for length in (0, 1):
        with pytest.raises(ValueError, match=r"'cu_seqlens_q' has shape.*R >= 1 sequences$"):
            masked_attention_varlen(*one, CU_Q[:length], CU_K[:length])
    with pytest.raises(TypeError, match="'cu_seqlens_q' has dtype float32"):
        masked_attention_varlen(*one, CU_Q.astype(f32), CU_K)


@settings(deadline=None, max_examples=30)
@given(
    name=st.sampled_from(["q", "k", "v", "bias", "mask"]),
    axis=st.integers(0, 3),
    change=st.sampled_from([-1, 1, 2, 5]),
    rank=st.booleans(),
)
def test_any_wrong_shape_is_named(name: str, axis: int, change: int, rank: bool) -> None:
    """An axis of another size or an additional axis raises an error unless the shape is legal."""
    arguments = valid_arguments()
    shape = list(arguments[name].shape)
    legal = False
    if rank:
        shape.insert(axis, 1)
    else:
        shape[axis] += change
        allowed = [(1, B), (1, G, N), (1, T), (S,)][axis]
        legal = name in ("bias", "mask") and shape[axis] in allowed
        legal |= name == "q" and axis == 2 and shape[2] % G == 0
        legal |= name == "v" and axis == 3
    arguments[name] = jnp.zeros(shape, arguments[name].dtype)
    if legal:
        out = jax.eval_shape(masked_attention, **arguments)
        assert out.shape == (*arguments["q"].shape[:3], arguments["v"].shape[3])
        return
    with pytest.raises(ValueError, match=r"masked_attention: argument '[qkvbm]"):
        masked_attention(**arguments)
