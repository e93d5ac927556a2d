"""How `mqa_decode` refuses wrong arguments."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.mqa_decode import PAGE, PAGES, B, D, E, G, N, S, T, lengths

from jax_dsa.ops.cache import FlatCache, PagedCache
from jax_dsa.ops.mqa_decode import mqa_decode

ZERO = np.zeros(B, np.int32)
GOOD = {
    "q": np.zeros((B, T, N, D), np.float32),
    "k": np.zeros((B, S, G, D), np.float32),
    "v": np.zeros((B, S, G, E), np.float32),
}
WRONG = {
    "q": ({"q": np.zeros(4, np.float32)}, ValueError, "'q' has shape"),
    "q dtype": ({"q": np.zeros((B, T, N, D), np.int32)}, TypeError, "'q' has dtype int32"),
    "k": ({"k": np.zeros((B, S, G, D + 1), np.float32)}, ValueError, "'k'.*D=10"),
    "k batch": ({"k": np.zeros((1, S, G, D), np.float32)}, ValueError, "'k'.*B=3"),
    "k dtype": ({"k": jnp.zeros((B, S, G, D), jnp.bfloat16)}, TypeError, "'k'.*want float32"),
    "k records": ({"k": np.zeros((B, S, G, 656), np.uint8), "v": None}, TypeError, "'k'.*float32"),
    "cache records": (
        {"k": FlatCache(np.zeros((B, S, G, 656), np.uint8), ZERO), "v": None},
        ValueError,
        "'k'.*D=576",
    ),
    "cache records and v": (
        {
            "q": np.zeros((B, T, N, 576), np.float32),
            "k": FlatCache(np.zeros((B, S, G, 656), np.uint8), ZERO),
        },
        ValueError,
        "'v' is an array .*, want None with FP8 records",
    ),
    "cache": ({"k": FlatCache(np.zeros((B, S, G, D + 1), np.float32), ZERO)}, ValueError, "D=10"),
    "cache dtype": (
        {"k": FlatCache(np.zeros((B, S, G, D), np.float16), ZERO)},
        TypeError,
        r"'k.data'.*float32 or uint8; FlatCache.*; uint8 means FP8 records, .*fp8=True\) makes",
    ),
    "cache lengths": (
        {"k": FlatCache(np.zeros((B, S, G, D), np.float32), ZERO[:2])},
        ValueError,
        "'k.lengths'.*B=3",
    ),
    "cache and lengths": (
        {"k": FlatCache(np.zeros((B, S, G, D), np.float32), ZERO), **lengths(1, 2, 3)},
        ValueError,
        "'key_value_seq_lengths'.*None with a cache",
    ),
    "v of pages": (
        {"k": PagedCache(np.zeros((PAGES, PAGE, G, D), np.float32), np.zeros((B, 4), int), ZERO)},
        ValueError,
        "'v'.*P=9",
    ),
    "heads": ({"k": np.zeros((B, S, 4, D), np.float32)}, ValueError, "N=6.*G=4.*multiple"),
    "v": ({"v": np.zeros((B, S + 1, G, E), np.float32)}, ValueError, "'v'.*S=13"),
    "v dtype": ({"v": np.zeros((B, S, G, E), np.float16)}, TypeError, "'v'.*float32"),
    "value_dim": ({"v": None, "value_dim": D + 1}, ValueError, "'value_dim' is 11"),
    "value_dim type": ({"v": None, "value_dim": 7.0}, TypeError, "'value_dim' is 7.0"),
    "value_dim beside v": ({"value_dim": E - 1}, ValueError, "'value_dim' is 6.*E=7 of 'v'"),
    "lengths": (
        {"key_value_seq_lengths": np.zeros((B, T), np.int32)},
        ValueError,
        "'key_value_seq_lengths'.*B=3",
    ),
    "lengths dtype": (
        {"key_value_seq_lengths": np.zeros(B, np.float32)},
        TypeError,
        "'key_value_seq_lengths'.*int32",
    ),
    "starts": (
        {"starts": np.zeros(2, np.int32)},
        ValueError,
        r"'starts'.*want \[B\] or \[B, T\] with B=3 .*, T=3",
    ),
    "starts of rank 3": (
        {"starts": np.zeros((B, T, 1), np.int32)},
        ValueError,
        r"'starts'.*want \[B\] or \[B, T\] with B=3 .*, T=3",
    ),
    "starts of queries": ({"starts": np.zeros((B, T + 1), np.int32)}, ValueError, "'starts'.*T=3"),
    "window": ({"local_window_size": -1}, ValueError, "'local_window_size' is -1"),
    "window type": ({"local_window_size": 2.5}, TypeError, "'local_window_size' is 2.5"),
    "window pair": ({"local_window_size": (3, 1)}, ValueError, r"is \(3, 1\).*\(left, 0\)"),
    "window of none": ({"local_window_size": ()}, ValueError, r"is \(\), want a static int"),
    "window of three": ({"local_window_size": (3, 0, 0)}, ValueError, r"is \(3, 0, 0\)"),
    "windows": (
        {"local_window_size": np.ones(T + 1, np.int32)},
        ValueError,
        r"has shape \(4,\), want a static int.*\(left, 0\).*array \[B\] with B=3",
    ),
    "windows of queries": (
        {"local_window_size": np.ones((B, T), np.int32)},
        ValueError,
        r"'local_window_size' has shape \(3, 3\), want a static int.*\(left, 0\).*array \[B\] with",
    ),
    "sinks": ({"sinks": np.zeros(G, np.float32)}, ValueError, "'sinks'.*N=6"),
    "page_table": (
        {"k": PagedCache(np.zeros((PAGES, PAGE, G, D), np.float32), np.zeros((2, 4), int), ZERO)},
        ValueError,
        "'k.page_table'.*B=3",
    ),
    "page_table type": (
        {"k": PagedCache(np.zeros((PAGES, PAGE, G, D), np.float32), [[0]], ZERO)},
        TypeError,
        "'k.page_table' is list",
    ),
    "scale": ({"scale": True}, TypeError, "'scale'"),
    "num_splits": ({"num_splits": 0}, ValueError, "'num_splits' is 0"),
    "normalize": ({"normalize": 0}, TypeError, "'normalize'"),
    "sinks unnormalized": (
        {"normalize": False, "sinks": np.zeros(N)},
        ValueError,
        "'sinks'.*normalize",
    ),
    "return_lse": ({"return_lse": 1}, TypeError, "'return_lse' is 1"),
    "return_max_logit": ({"return_max_logit": 1}, TypeError, "'return_max_logit' is 1"),
    "implementation": ({"implementation": "cpu"}, ValueError, "'implementation' is 'cpu'"),
}


@pytest.mark.parametrize(("change", "error", "message"), WRONG.values(), ids=WRONG.keys())
def test_misuse(change: dict, error: type, message: str) -> None:
    with pytest.raises(error, match=f"mqa_decode: .*{message}"):
        mqa_decode(**{**GOOD, **change})


def test_a_traced_window() -> None:
    """Only a window of each request may be traced."""
    call = jax.jit(lambda window: mqa_decode(**GOOD, local_window_size=window))
    with pytest.raises(ValueError, match=r"has shape \(\), want a static int .* or an array \[B\]"):
        call(2)
    assert call(np.ones(B, np.int32)).shape == (B, T, N, E)


@settings(max_examples=12, deadline=None)
@given(st.data())
def test_any_wrong_shape_is_refused(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(GOOD)))
    shape = list(GOOD[name].shape)
    axis = data.draw(st.integers(0, 3))
    shape[axis] = data.draw(st.integers(0, 20).filter(lambda n: n != shape[axis]))
    bad = {**GOOD, name: np.zeros(shape, GOOD[name].dtype)}
    free = (name, axis) in (("q", 1), ("v", 3)) or (name == "q" and axis == 2 and shape[2] % G == 0)
    if free:
        out = jax.eval_shape(mqa_decode, **bad)
        assert out.shape == (*bad["q"].shape[:3], bad["v"].shape[3])
    else:
        with pytest.raises(ValueError, match="mqa_decode: argument"):
            mqa_decode(**bad)
