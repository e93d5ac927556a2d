"""Bad input that every operator refuses in the same way."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_dsa
from jax_dsa import nn
from jax_dsa.serving import (
    pack_page_records,
    pack_records,
    unpack_page_records,
    unpack_records,
)

if TYPE_CHECKING:
    from collections.abc import Callable

B, T, N, S, D, K = 2, 3, 4, 5, 8, 2
Q, KV = jnp.ones((B, T, N, D)), jnp.ones((B, S, 1, D))
INDICES, LSE = jnp.zeros((B, T, K), jnp.int32), jnp.zeros((B, T, N))
INDEX = jnp.ones((B, T, N, D)), jnp.ones((B, S, D)), jnp.ones((B, T, N))
CODES = jax_dsa.quantize_fp8(Q)


def attend_to_blocks(v: Any = KV, block_size: Any = 4, **options: Any) -> Any:
    return jax_dsa.sparse_attention(Q, KV, v, INDICES, block_size=block_size, **options)


# For "function 'argument'": a call that takes this array, and a valid array.
ARRAYS: dict[str, tuple[Callable[[Any], Any], Any]] = {
    "topk 'x'": (lambda x: jax_dsa.topk(x, 1), Q),
    "sparse_mla 'q'": (lambda x: jax_dsa.sparse_mla(x, KV, INDICES), Q),
    "sparse_mla 'indices'": (lambda x: jax_dsa.sparse_mla(Q, KV, x), INDICES),
    "sparse_attention 'v'": (lambda x: attend_to_blocks(v=x), KV),
    "dsa_attention 'index_k'": (
        lambda x: jax_dsa.dsa_attention(Q, KV, INDEX[0], x, INDEX[2], top_k=1),
        INDEX[1],
    ),
    "mqa_decode 'k'": (lambda x: jax_dsa.mqa_decode(Q, x), KV),
    "masked_attention 'v'": (lambda x: jax_dsa.masked_attention(Q, KV, x), KV),
    "htree_build 'k'": (lambda x: jax_dsa.htree_build(x, KV), KV),
    "quantize_fp8 'x'": (jax_dsa.quantize_fp8, Q),
    "pack_records 'rows'": (pack_records, jnp.zeros((2, 576))),
    "unpack_records 'records'": (
        functools.partial(unpack_records, dtype=jnp.float32),
        jnp.zeros((2, 656), jnp.uint8),
    ),
    "pack_page_records 'rows'": (pack_page_records, jnp.zeros((2, 512))),
    "unpack_page_records 'pages'": (
        functools.partial(unpack_page_records, dtype=jnp.float32),
        jnp.zeros((2, 584), jnp.uint8),
    ),
    "FlatCache.append 'rows'": (jax_dsa.FlatCache.empty(B, S, D).append, KV),
}
NOT_ARRAYS: dict[str, Callable[[Any], Any]] = {
    "masked": lambda x: np.ma.masked_array(x, mask=np.zeros(x.shape, bool)),
    "keys": lambda x: jax.random.split(jax.random.key(0), x.shape),
    "texts": lambda x: np.full(x.shape, "1.0"),
    "objects": lambda x: np.full(x.shape, None),
    "dates": lambda x: np.zeros(x.shape, "datetime64[s]"),
    "records": lambda x: np.zeros(x.shape, [("a", "f4")]),
    "long": lambda x: np.zeros(x.shape, np.longdouble),
    "list": lambda x: np.asarray(x).tolist(),
}


@pytest.mark.parametrize("made", NOT_ARRAYS.values(), ids=NOT_ARRAYS)
@pytest.mark.parametrize("where", ARRAYS)
def test_objects_that_jax_has_no_array_for(where: str, made: Callable) -> None:
    call, good = ARRAYS[where]
    jax.block_until_ready(jax.tree.leaves(call(good)))
    op, name = where.split()
    with pytest.raises(TypeError, match=f"{op}: argument {name} (is|has dtype) .*want "):
        call(made(np.asarray(good)))


ATTENTION: dict[str, Callable[..., Any]] = {
    "sparse_mla": lambda **o: jax_dsa.sparse_mla(Q, KV, INDICES, **o),
    "sparse_attention": attend_to_blocks,
    "sparse_attention_decode": lambda **o: jax_dsa.sparse_attention_decode(
        Q, *[jax_dsa.FlatCache(KV, jnp.full(B, S))] * 2, INDICES, block_size=4, **o
    ),
    "attn_dist": lambda **o: jax_dsa.attn_dist(Q, KV, INDICES, LSE, **o),
    "dsa_attention": lambda **o: jax_dsa.dsa_attention(Q, KV, *INDEX, top_k=1, **o),
    "dense_indexer_kl_loss": lambda **o: jax_dsa.dense_indexer_kl_loss(*INDEX, Q, KV, **o),
    "mqa_decode": lambda **o: jax_dsa.mqa_decode(Q, KV, **o),
    "masked_attention": lambda **o: jax_dsa.masked_attention(Q, KV, KV, **o),
    "htree_attention": lambda **o: jax_dsa.htree_attention(Q, KV[:, :T], KV[:, :T], **o),
}


@pytest.mark.parametrize("op", ATTENTION)
def test_scales_out_of_the_range_of_float32(op: str) -> None:
    for scale in (1e39, np.float64(-1e39), 1e-46, 10**400):
        with pytest.raises(ValueError, match=f"{op}: argument 'scale' is .*float32"):
            ATTENTION[op](scale=scale)
    with pytest.raises(ValueError, match="'scale' is 1e-38, want 0 or a finite normal float32 num"):
        ATTENTION[op](scale=1e-38)
    with pytest.raises(TypeError, match=f"{op}: argument 'scale' is an array key"):
        ATTENTION[op](scale=jax.random.key(0))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(ATTENTION[op](scale=0.0)))


NARROW: dict[str, Callable[..., Any]] = {
    "sparse_mla": lambda q, kv: jax_dsa.sparse_mla(q, kv, INDICES),
    "sparse_mla_decode": lambda q, kv: jax_dsa.sparse_mla_decode(q, cache_of(kv), INDICES),
    "sparse_attention": lambda q, kv: jax_dsa.sparse_attention(q, kv, KV, INDICES, block_size=4),
    "sparse_attention_decode": lambda q, kv: jax_dsa.sparse_attention_decode(
        q, cache_of(kv), cache_of(KV), INDICES, block_size=4
    ),
    "attn_dist": lambda q, kv: jax_dsa.attn_dist(q, kv, INDICES, LSE),
    "attention_probs": lambda q, kv: jax_dsa.attention_probs(q, kv),
    "dsa_attention": lambda q, kv: jax_dsa.dsa_attention(q, kv, *INDEX, top_k=1),
    "dense_indexer_kl_loss": lambda q, kv: jax_dsa.dense_indexer_kl_loss(*INDEX, q, kv),
    "mqa_decode": jax_dsa.mqa_decode,
    "masked_attention": lambda q, kv: jax_dsa.masked_attention(q, kv, KV),
    "htree_attention": lambda q, kv: jax_dsa.htree_attention(q, kv[:, :T], KV[:, :T]),
}


def cache_of(rows: Any) -> jax_dsa.FlatCache:
    return jax_dsa.FlatCache(rows, jnp.full(B, S))


@pytest.mark.parametrize("op", NARROW)
def test_queries_and_keys_without_elements(op: str) -> None:
    with pytest.raises(ValueError, match=f"^{op}: argument 'q' has D=0, want D >= 1"):
        NARROW[op](Q[..., :0], KV[..., :0])


def test_floats_out_of_range() -> None:
    for softcap in (1e38, 1e-31):
        with pytest.raises(ValueError, match=r"masked_attention: argument 'softcap'.*1e-30"):
            ATTENTION["masked_attention"](softcap=softcap)
    with pytest.raises(ValueError, match=r"htree_attention: argument 'rope_base'.*float32"):
        ATTENTION["htree_attention"](rope_base=1e39)


@pytest.mark.parametrize(("name", "value"), [("value_dim", 4), ("scale", 0.5), ("is_causal", True)])
def test_traced_values_of_static_arguments(name: str, value: Any) -> None:
    """The message gives the way out, which works."""
    call = functools.partial(jax_dsa.sparse_mla, Q, KV, INDICES)
    way_out = r"; under jax.jit, pass it by static_argnames or functools.partial"
    with pytest.raises(TypeError, match=rf"argument '{name}' is .*, want a static \w+{way_out}"):
        jax.jit(call)(**{name: value})
    assert jax.jit(call, static_argnames=name)(**{name: value}).shape[:3] == Q.shape[:3]
    with pytest.raises(TypeError, match=f"argument '{name}' is .*, want an? (int|float|bool)$"):
        call(**{name: "no"})


@pytest.mark.parametrize(
    ("call", "question"),
    [
        (lambda: jax_dsa.sparse_mla(Q, KV[:, :, 0], INDICES), "did you mean kv[:, :, None]?"),
        (lambda: jax_dsa.sparse_mla(Q[0], KV[0, :, 0], INDICES[0]), "did you mean kv[:, None]?"),
        (
            lambda: jax_dsa.dsa_attention(Q, KV, INDEX[0], KV, INDEX[2], top_k=1),
            "did you mean index_k[:, :, 0]?",
        ),
        (lambda: jax_dsa.sparse_mla(Q, KV[0], INDICES), None),
        (lambda: jax_dsa.sparse_mla(Q[0], KV, INDICES[0]), None),
    ],
)
def test_an_axis_of_heads_that_is_missing_or_too_many(call: Callable, question: str | None) -> None:
    with pytest.raises(ValueError, match="has shape") as raised:
        call()
    text = str(raised.value)
    assert text.endswith("; " + question) if question else "did you mean" not in text


TOO_LARGE = 2**31
INTEGERS: dict[str, Callable[[Any], Any]] = {
    "topk 'top_k'": lambda n: jax_dsa.topk(Q, n),
    "indexer_topk 'top_k'": lambda n: jax_dsa.indexer_topk(*INDEX, n),
    "indexer_topk 'key_stride'": lambda n: jax_dsa.indexer_topk(*INDEX, 1, key_stride=n),
    "indexer_block_topk 'top_k'": lambda n: jax_dsa.indexer_block_topk(*INDEX, n, block_size=2),
    "indexer_block_topk 'block_size'": lambda n: jax_dsa.indexer_block_topk(
        *INDEX, 1, block_size=n
    ),
    "block_topk 'local_blocks'": lambda n: jax_dsa.block_topk(
        INDEX[2], 1, block_size=2, local_blocks=n
    ),
    "dsa_attention 'top_k'": lambda n: jax_dsa.dsa_attention(Q, KV, *INDEX, top_k=n),
    "topk_mask 'top_k'": lambda n: jax_dsa.topk_mask(Q, n),
    "htree_build 'top_k'": lambda n: jax_dsa.htree_build(KV, KV, top_k=n),
    "htree_build 'compression'": lambda n: jax_dsa.htree_build(KV, KV, compression=n),
    "sparse_mla 'key_stride'": lambda n: ATTENTION["sparse_mla"](is_causal=True, key_stride=n),
    "sparse_attention 'block_size'": lambda n: attend_to_blocks(block_size=n),
    "sparse_attention 'local_blocks'": lambda n: attend_to_blocks(is_causal=True, local_blocks=n),
    "attn_dist 'head_group'": lambda n: ATTENTION["attn_dist"](head_group=n),
    "attn_dist 'block_size'": lambda n: ATTENTION["attn_dist"](block_size=n),
    "block_tokens 'block_size'": lambda n: jax_dsa.block_tokens(INDICES, n),
    "dense_indexer_kl_loss 'block_size'": lambda n: ATTENTION["dense_indexer_kl_loss"](
        block_size=n
    ),
    "mean_pool 'ratio'": lambda n: jax_dsa.mean_pool(Q[0], n),
    "mqa_decode 'num_splits'": lambda n: ATTENTION["mqa_decode"](num_splits=n),
    "quantize_fp8 'block'": lambda n: jax_dsa.quantize_fp8(Q, block=n),
    "make_block_mask 'block_q'": lambda n: jax_dsa.make_block_mask(shape=(1, 1, 8, 8), block_q=n),
    "make_block_mask 'block_k'": lambda n: jax_dsa.make_block_mask(shape=(1, 1, 8, 8), block_k=n),
    "make_block_mask 'shape'": lambda n: jax_dsa.make_block_mask(shape=(0, 1, n, 8)),
    "FlatCache.empty 'capacity'": lambda n: jax_dsa.FlatCache.empty(0, n),
    "FlatCache.empty 'groups'": lambda n: jax_dsa.FlatCache.empty(0, 1, groups=n),
    "PagedCache.empty 'num_pages'": lambda n: jax_dsa.PagedCache.empty(n, 1, 0, 0),
    "PagedCache.empty 'page_size'": lambda n: jax_dsa.PagedCache.empty(0, n, 0, 1),
    "PagedCache.empty 'pages_per_request'": lambda n: jax_dsa.PagedCache.empty(0, 2, 0, n // 2),
    "HTreeCache.empty 'capacity'": lambda n: jax_dsa.HTreeCache.empty(0, n, 4),
}


@pytest.mark.parametrize("where", INTEGERS)
def test_integers_beyond_int32(where: str) -> None:
    op, name = where.split()
    for number in (TOO_LARGE, np.uint64(2**63), 2**70):
        with pytest.raises(ValueError, match=f"{op}: argument {name} is .*, want int in"):
            INTEGERS[where](number)


def test_axes_beyond_int32() -> None:
    rows = np.empty((0, TOO_LARGE), np.float32)
    for call in (
        lambda: jax_dsa.topk(rows, 1),
        lambda: jax_dsa.mqa_decode(Q[:0], rows[..., None, None]),
        lambda: jax_dsa.quantize_fp8(rows),
    ):
        with pytest.raises(ValueError, match=r"has shape \(0, 2147483648.*less than 2\*\*31"):
            call()


def test_small_integers_of_numpy() -> None:
    """Their products would overflow if they were not converted to int."""
    for kind in (np.int8, np.uint8):
        built = jax_dsa.htree_build(KV, KV, compression=kind(16), top_k=kind(16))
        assert [k.shape for k, _ in built] == [KV.shape]
    with pytest.raises(ValueError, match=r"want int in 0\.\.2147483647"):
        jax_dsa.topk(Q, np.uint64(2**63))


DTYPES: dict[str, Callable[[Any], Any]] = {
    "dequantize_fp8": lambda d: jax_dsa.dequantize_fp8(*CODES, dtype=d),
    "fp8_matmul": lambda d: jax_dsa.fp8_matmul(Q, None, Q[0, 0], None, dtype=d),
    "fp8_linear": lambda d: jax_dsa.fp8_linear(Q, Q[0, 0].T, dtype=d),
    "unpack_records": lambda d: unpack_records(jnp.zeros((1, 656), jnp.uint8), d),
    "unpack_page_records": lambda d: unpack_page_records(jnp.zeros((1, 584), jnp.uint8), d),
    "FlatCache.empty": lambda d: jax_dsa.FlatCache.empty(1, 1, dtype=d),
    "PagedCache.empty": lambda d: jax_dsa.PagedCache.empty(1, 1, 1, 1, dtype=d),
    "HTreeCache.empty": lambda d: jax_dsa.HTreeCache.empty(1, 1, 4, dtype=d),
}


@pytest.mark.parametrize("op", DTYPES)
def test_dtypes(op: str) -> None:
    for dtype, error in (("wrong", TypeError), (np.ones(3), TypeError), (jnp.int32, ValueError)):
        with pytest.raises(error, match=f"{op}: argument 'dtype' is .*, want bfloat16 or"):
            DTYPES[op](dtype)
    if op not in ("fp8_matmul", "fp8_linear"):  # None is their default.
        with pytest.raises(TypeError, match=f"{op}: argument 'dtype' is None, want bfloat16 or"):
            DTYPES[op](None)
    assert jax.tree.leaves(DTYPES[op]("bfloat16"))[0].dtype == jnp.bfloat16


@pytest.mark.parametrize(
    "implementation", [np.array(["cuda", "xla"]), jnp.ones(3), ["xla"], b"xla"]
)
def test_implementations(implementation: Any) -> None:
    for op, call in ATTENTION.items():
        with pytest.raises(ValueError, match=f"{op}: argument 'implementation' is .*'xla'"):
            call(implementation=implementation)


def test_value_dim_beside_values() -> None:
    for value_dim, error in ((3, ValueError), (8.0, TypeError), ("8", TypeError), (D, None)):
        call = functools.partial(jax_dsa.mqa_decode, Q, KV, KV, value_dim=value_dim)
        if error is None:
            assert call().shape == Q.shape
            continue
        with pytest.raises(error, match="mqa_decode: argument 'value_dim'"):
            call()


CONFIG = {"model_dim": 8, "num_heads": 2, "q_rank": 4, "kv_rank": 4, "nope_dim": 4, "rope_dim": 2}
CONFIG |= {"v_dim": 4, "index_heads": 2, "index_dim": 4, "index_rope_dim": 2, "top_k": 2}


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        *((name, 0, ValueError) for name in CONFIG if not name.endswith("rope_dim")),
        *((name, -2, ValueError) for name in CONFIG),
        *((name, 2.0, TypeError) for name in CONFIG),
        *(("rope_base", x, ValueError) for x in (0.0, -1.0, np.nan, 1e39)),
        ("norm_eps", -1e-6, ValueError),
        ("rope_layout", "whole", ValueError),
        ("index_rope_layout", ["half"], ValueError),
        ("dtype", jnp.int32, ValueError),
        ("dtype", "wrong", TypeError),
        *((name, x, TypeError) for name in ("gate", "index_fp8", "shares_keys") for x in ("no", 0)),
    ],
)
def test_attention_config(name: str, value: Any, error: type[Exception]) -> None:
    nn.AttentionConfig(**CONFIG)
    with pytest.raises(error, match=f"AttentionConfig: argument '{name}' is"):
        nn.AttentionConfig(**(CONFIG | {name: value}))


@pytest.mark.parametrize("name", ["vocab", "num_layers", "mlp_dim"])
def test_decoder_config(name: str) -> None:
    sizes = {"vocab": 5, "num_layers": 1, "mlp_dim": 8}
    attention = nn.AttentionConfig(**CONFIG)
    assert nn.DecoderConfig(attention, **sizes).layers == ("full",)
    with pytest.raises(ValueError, match=f"DecoderConfig: argument '{name}' is 0"):
        nn.DecoderConfig(attention, **(sizes | {name: 0}))
    with pytest.raises(ValueError, match="DecoderConfig: argument 'norm_eps' is -1"):
        nn.DecoderConfig(attention, **sizes, norm_eps=-1.0)


@pytest.mark.parametrize(
    ("op", "call"),
    [
        ("topk_mask", lambda: jax_dsa.topk_mask(Q, 1)),
        ("topk_indices", lambda: jax_dsa.topk_indices(Q, 1)),
        ("fake_quantize_fp8", lambda: jax_dsa.fake_quantize_fp8(Q)),
        ("pack_records", lambda: pack_records(jnp.zeros((2, 576)))),
        (
            "PagedCache.append",
            lambda: jax_dsa.PagedCache.empty(1, 1, 1, 1, fp8=True).append(
                jnp.zeros((1, 1, 1, 576))
            ),
        ),
    ],
)
def test_errors_name_the_function_that_was_called(
    op: str, call: Callable, monkeypatch: pytest.MonkeyPatch, without_kernels: None
) -> None:
    """The error does not name an operator that the function calls."""
    monkeypatch.setenv("JAX_DSA_IMPL", "cuda")
    with pytest.raises(NotImplementedError, match=f"^{op}: .*a test says so"):
        call()
