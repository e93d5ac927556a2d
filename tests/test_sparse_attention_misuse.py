"""How `sparse_attention` and its variants refuse wrong arguments."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_dsa import (
    FlatCache,
    PagedCache,
    sparse_attention,
    sparse_attention_decode,
    sparse_attention_varlen,
)

B, T, S, N, G, D, E, K = 2, 3, 9, 4, 2, 6, 5, 2
f32 = np.float32
GOOD: dict[str, Any] = {
    "q": np.zeros((B, T, N, D), f32),
    "k": np.zeros((B, S, G, D), f32),
    "v": np.zeros((B, S, G, E), f32),
    "indices": np.zeros((B, T, G, K), np.int32),
    "block_size": 4,
}
WRONG = {
    "q dim": ({"q": np.zeros((B, T, N, 0), f32), "k": np.zeros((B, S, G, 0), f32)}, "'q'.*D >= 1"),
    "heads": ({"q": np.zeros((B, T, 3, D), f32)}, "'q' has N=3 heads and 'k' has G=2.*multiple"),
    "k dim": ({"k": np.zeros((B, S, G, D + 1), f32)}, "'k'.*D=6"),
    "v keys": ({"v": np.zeros((B, S - 1, G, E), f32)}, "'v'.*S=9"),
    "v heads": ({"v": np.zeros((B, S, 1, E), f32)}, "'v'.*G=2"),
    "v batch": ({"v": np.zeros((1, S, G, E), f32)}, "'v'.*B=2"),
    "indices": ({"indices": np.zeros((B, T, 1, K), np.int32)}, "'indices'.*G=2"),
    "block size 0": ({"block_size": 0}, "'block_size' is 0, want int in 1"),
    "block size 8": ({"block_size": 8}, r"'block_size' is 8, want one of \(1, 4, 16, 32, 64, 128"),
    "negative count": ({"sink_blocks": -1, "is_causal": True}, "'sink_blocks' is -1, want int in"),
    "local": ({"local_blocks": 1}, "'local_blocks' is 1, want 0 or False without is_causal=True"),
    "sink blocks": ({"sink_blocks": 2}, "'sink_blocks' is 2.*is_causal=True"),
    "tail": ({"tail_block": True}, "'tail_block' is True.*is_causal=True"),
    "lengths": ({"key_value_seq_lengths": np.zeros(3, np.int32)}, "'key_value_seq_lengths'.*B=2"),
    "topk_length": ({"topk_length": np.zeros((B, 1), np.int32)}, "'topk_length'.*T=3"),
    "query_start": ({"query_start": np.zeros(3, np.int32)}, r"'query_start' has shape \(3,\)"),
    "documents": (
        {"segment_ids": np.zeros((B, T), np.int32)},
        "'segment_ids' has shape.*T=3.*; sparse_attention_varlen takes such",
    ),
    "documents and query_start": (
        {"segment_ids": np.zeros((B, S), np.int32), "q": np.zeros((B, S, N, D), f32)}
        | {"indices": np.zeros((B, S, K), np.int32), "query_start": 1},
        "'query_start' is 1, want 0 beside 'segment_ids'",
    ),
    "sinks": ({"sinks": np.zeros(3, f32)}, "'sinks'.*N=4"),
    "implementation": ({"implementation": "triton"}, "'implementation' is 'triton'"),
}
WRONG_TYPES = {
    "k dtype": ({"k": jnp.zeros((B, S, G, D), jnp.bfloat16)}, "'k' has dtype bfloat16"),
    "v list": ({"v": [0.0]}, "'v' is list"),
    "indices": ({"indices": np.zeros((B, T, K), f32)}, "'indices' has dtype float32"),
    "block size": ({"block_size": 4.0}, r"'block_size' is 4.0 \(float\), want an int"),
    "count": ({"local_blocks": True, "is_causal": True}, "'local_blocks' is True"),
    "tail": ({"tail_block": 1, "is_causal": True}, "'tail_block' is 1.*want a bool"),
    "sinks": ({"sinks": np.zeros(N, np.int32)}, "'sinks' has dtype int32"),
    "return_lse": ({"return_lse": 1}, "'return_lse' is 1"),
    "return_max_logit": ({"return_max_logit": "no"}, "'return_max_logit' is 'no'"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_values(name: str) -> None:
    change, message = WRONG[name]
    with pytest.raises(ValueError, match=f"^sparse_attention: argument {message}"):
        sparse_attention(**GOOD | change)


@pytest.mark.parametrize("name", WRONG_TYPES)
def test_wrong_types(name: str) -> None:
    change, message = WRONG_TYPES[name]
    with pytest.raises(TypeError, match=f"^sparse_attention: argument {message}"):
        sparse_attention(**GOOD | change)


def test_traced_counts() -> None:
    def call(count: Any) -> Any:
        return sparse_attention(**GOOD, is_causal=True, local_blocks=count)

    with pytest.raises(TypeError, match=r"'local_blocks' is .*want a static int; under jax\.jit"):
        jax.jit(call)(1)


def test_packed_sequences() -> None:
    cu = np.array([0, 3], np.int32)
    packed = {n: x[0] if isinstance(x, np.ndarray) else x for n, x in GOOD.items()}
    op = "sparse_attention_varlen: argument"
    with pytest.raises(ValueError, match=f"{op} 'q' has shape .*without a batch axis"):
        sparse_attention_varlen(**GOOD, cu_seqlens_q=cu, cu_seqlens_k=cu)
    with pytest.raises(ValueError, match=f"{op} 'cu_seqlens_k' has shape"):
        sparse_attention_varlen(**packed, cu_seqlens_q=cu, cu_seqlens_k=cu[:1])
    with pytest.raises(ValueError, match=f"{op} 'cu_seqlens_q' has shape .*R >= 1 sequences$"):
        sparse_attention_varlen(**packed, cu_seqlens_q=cu[:1], cu_seqlens_k=cu[:1])
    with pytest.raises(ValueError, match=f"{op} 'causal_alignment' is 'left'"):
        sparse_attention_varlen(**packed, cu_seqlens_q=cu, cu_seqlens_k=cu, causal_alignment="left")
    with pytest.raises(ValueError, match=f"{op} 'local_blocks' is 1.*is_causal=True"):
        sparse_attention_varlen(**packed, cu_seqlens_q=cu, cu_seqlens_k=cu, local_blocks=1)
    bad = np.array([-3, 100], np.int32)
    out = sparse_attention_varlen(**packed, cu_seqlens_q=cu, cu_seqlens_k=bad)
    assert np.isfinite(out).all()


@pytest.mark.parametrize("empty", ["B", "T", "S", "K"])
def test_empty_arrays(empty: str) -> None:
    size = {"B": B, "T": T, "S": S, "K": K, empty: 0}
    q = jnp.ones((size["B"], size["T"], N, D))
    k, v = (jnp.ones((size["B"], size["S"], G, d)) for d in (D, E))
    indices = jnp.zeros((size["B"], size["T"], size["K"]), jnp.int32)

    def total(q: Any, k: Any, v: Any) -> Any:
        out, lse = sparse_attention(q, k, v, indices, block_size=4, return_lse=True)
        assert out.shape == (*q.shape[:3], E) and lse.shape == q.shape[:3]
        return out.sum()

    for gradient in jax.grad(total, (0, 1, 2))(q, k, v):
        assert not gradient.any()


LENGTHS = np.zeros(B, np.int32)
TABLE = np.zeros((B, 3), np.int32)
FLAT = [FlatCache(np.zeros((B, S, G, d), f32), LENGTHS) for d in (D, E)]
PAGED = [PagedCache(np.zeros((5, 4, G, d), f32), TABLE, LENGTHS) for d in (D, E)]
FP8 = [FlatCache(jnp.zeros(x.data.shape, jnp.float8_e4m3fn), LENGTHS) for x in FLAT]
SCALE = np.ones((B, S, G), f32)


def changed(cache: Any, **fields: Any) -> Any:
    return dataclasses.replace(cache, **fields)


def pair(k: Any, v: Any, **others: Any) -> dict[str, Any]:
    return {"k_cache": k, "v_cache": v, **others}


WRONG_CACHES: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "array": ({"k_cache": GOOD["k"]}, TypeError, "'k_cache' is an array float32.*want a Fl"),
    "v array": ({"v_cache": GOOD["v"]}, TypeError, "'v_cache' is an array float32.*, like 'k"),
    "kinds": (pair(FLAT[0], PAGED[1]), TypeError, "'v_cache' is PagedCache, want FlatCache, like"),
    "dtypes": (
        pair(FLAT[0], changed(FLAT[1], data=FLAT[1].data.astype(np.float16))),
        TypeError,
        r"'v_cache.data' has dtype float16, want float32; FlatCache.empty\(",
    ),
    "records": (
        pair(FlatCache(np.zeros((B, S, G, 656), np.uint8), LENGTHS), FLAT[1]),
        TypeError,
        "'k_cache.data' has dtype uint8, want float32 or float8_e4m3fn; .* takes no FP8 records; "
        "pass caches in float8_e4m3fn, with 'k_scale' and 'v_scale'$",
    ),
    "dim": (
        pair(changed(FLAT[0], data=np.zeros((B, S, G, D + 1), f32)), FLAT[1]),
        ValueError,
        "'k_cache.data' has shape.*D=6",
    ),
    "heads": (
        {"q": np.zeros((B, T, 3, D), f32)},
        ValueError,
        "'q' has N=3 heads and 'k_cache' has",
    ),
    "v heads": (
        pair(FLAT[0], changed(FLAT[1], data=np.zeros((B, S, 1, E), f32))),
        ValueError,
        "'v_cache.data' has shape.*G=2",
    ),
    "capacities": (
        pair(FLAT[0], changed(FLAT[1], data=np.zeros((B, S + 1, G, E), f32))),
        ValueError,
        "'v_cache.data' has shape.*S=9",
    ),
    "pages": (
        pair(PAGED[0], changed(PAGED[1], pages=np.zeros((6, 4, G, E), f32))),
        ValueError,
        "'v_cache.pages' has shape.*P=5",
    ),
    "page size": (
        pair(PAGED[0], changed(PAGED[1], pages=np.zeros((5, 2, G, E), f32))),
        ValueError,
        "'v_cache.pages' has shape.*L=4",
    ),
    "tables": (
        pair(PAGED[0], changed(PAGED[1], page_table=TABLE[:, :2])),
        ValueError,
        "'v_cache.page_table' has shape.*R=3",
    ),
    "lengths": (
        pair(FLAT[0], changed(FLAT[1], lengths=LENGTHS[:1])),
        ValueError,
        "'v_cache.lengths' has shape.*B=2",
    ),
    "forced": ({"local_blocks": 1}, ValueError, "'local_blocks' is 1.*is_causal=True"),
    "block size": ({"block_size": 8}, ValueError, "'block_size' is 8, want one of"),
    "scale of floats": (
        {"k_scale": SCALE},
        ValueError,
        "'k_scale' is.*None with caches of float32",
    ),
    "scale": (
        pair(*FP8, v_scale=SCALE[..., :1]),
        ValueError,
        "'v_scale' has shape.*G=2",
    ),
    "scale dtype": (
        pair(*FP8, v_scale=SCALE.astype(np.int32)),
        TypeError,
        "'v_scale' has dtype int32",
    ),
    "batch_invariant": ({"batch_invariant": 1}, TypeError, "'batch_invariant' is 1.*want a bool"),
}


@pytest.mark.parametrize("name", WRONG_CACHES)
def test_caches(name: str) -> None:
    good = {"q": GOOD["q"], "indices": GOOD["indices"], "block_size": 4, **pair(*FLAT)}
    change, error, message = WRONG_CACHES[name]
    with pytest.raises(error, match=f"^sparse_attention_decode: argument {message}"):
        sparse_attention_decode(**good | change)
