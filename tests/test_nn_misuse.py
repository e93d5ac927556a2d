"""Modules check their arguments as operators do, and name themselves and the argument."""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support import decoders
from support.compare import Variable, assert_matches

import jax_dsa
from jax_dsa import nn

if TYPE_CHECKING:
    from collections.abc import Callable

CONFIG = dataclasses.replace(decoders.CONFIG, q_rank=None)
COMPRESSED = nn.CompressedConfig(
    model_dim=16,
    num_heads=2,
    q_rank=8,
    head_dim=8,
    rope_dim=4,
    out_groups=1,
    out_rank=8,
    window=4,
    ratio=2,
    top_k=3,
    index_dim=8,
)
GROUPED = nn.GroupedConfig(
    model_dim=16,
    num_heads=4,
    kv_heads=2,
    head_dim=8,
    rope_dim=4,
    indexer="mean",
    block_size=4,
    top_k=2,
    index_dim=8,
)
DECODER = nn.DecoderConfig(CONFIG, vocab=11, num_layers=1, mlp_dim=32)
RNGS = nnx.Rngs(0)
LAYER, LM = nn.DSAttention(CONFIG, rngs=RNGS), nn.DecoderLM(DECODER, rngs=RNGS)
SHARED = nn.DSAttention(CONFIG, "shared", rngs=RNGS)
SHARING = nn.DSAttention(dataclasses.replace(CONFIG, shares_keys=True), rngs=RNGS)
CLAYER = nn.CompressedAttention(COMPRESSED, rngs=RNGS)
GLAYER = nn.GroupedAttention(GROUPED, rngs=RNGS)

B, T, M = 2, 3, 16
X, POSITIONS = jnp.ones((B, T, M)), jnp.zeros((B, T), jnp.int32)
TOKENS, INDICES = jnp.zeros((B, T), jnp.int32), jnp.zeros((B, T, 2), jnp.int32)
CACHE, MODEL_CACHE = nn.LayerCache.empty(CONFIG, B, 8), LM.init_cache(B, 8)
FLAT, CCACHE = jax_dsa.FlatCache.empty(B, 8, 12), CLAYER.init_cache(B, 8)

# By the function's name in messages: a call with these hidden states.
HIDDEN: dict[str, Callable[[Any], Any]] = {
    "DSAttention": LAYER,
    "DSAttention.decode": lambda x: LAYER.decode(x, CACHE),
    "MLA.project": lambda x: LAYER.mla.project(x, POSITIONS),
    "LightningIndexer": lambda x: LAYER.indexer(x, X, POSITIONS),
    "CompressedAttention": CLAYER,
    "CompressedAttention.decode": lambda x: CLAYER.decode(x, CCACHE),
    "Compressor": lambda x: CLAYER.compressor(x, POSITIONS, None),
    "GroupedAttention": GLAYER,
    "GroupedAttention.decode": lambda x: GLAYER.decode(x, GLAYER.init_cache(B, 8)),
    "Block": LM.blocks[0],
    "Block.decode": lambda x: LM.blocks[0].decode(x, CACHE),
    "SwiGLU": LM.blocks[0].mlp,
}


@pytest.mark.parametrize("op", HIDDEN)
def test_hidden_states(op: str) -> None:
    call = HIDDEN[op]
    for wrong in (X[0], X[None], X[..., :15], X[..., None]):
        shape = re.escape(str(wrong.shape))
        want = rf"{op}: argument 'x' has shape {shape}, want \[B, T, M\] with .*M=16"
        with pytest.raises(ValueError, match=want):
            call(wrong)
    with pytest.raises(TypeError, match=f"{op}: argument 'x' has dtype int32, want "):
        call(X.astype(jnp.int32))
    with pytest.raises(TypeError, match=f"{op}: argument 'x' is list, want "):
        call(np.asarray(X).tolist())


@pytest.mark.parametrize("op", ["DSAttention", "CompressedAttention.decode", "SwiGLU"])
def test_hidden_states_that_convert_to_arrays(op: str) -> None:
    assert_matches(*(jax.tree.leaves(HIDDEN[op](x)) for x in (Variable(X), X)), tol=0)


CALLS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "indices": (
        lambda: LAYER(X, indices=INDICES[:, :2]),
        ValueError,
        r"DSAttention: argument 'indices' has shape \(2, 2, 2\), want \[B, T, K\] with .*T=3",
    ),
    "indices-dtype": (
        lambda: CLAYER(X, indices=INDICES.astype(jnp.float32)),
        TypeError,
        "CompressedAttention: argument 'indices' has dtype float32, want int32",
    ),
    "indices-rank": (
        lambda: CLAYER.decode(X, CCACHE, indices=INDICES[0]),
        ValueError,
        "CompressedAttention.decode: argument 'indices' has shape",
    ),
    "indices-decode": (
        lambda: LAYER.decode(X, CACHE, indices=INDICES[:1]),
        ValueError,
        "DSAttention.decode: argument 'indices' has shape",
    ),
    "positions": (
        lambda: LAYER.mla.project(X, POSITIONS[:, :2]),
        ValueError,
        r"MLA.project: argument 'positions' has shape \(2, 2\), want \[B, T\]",
    ),
    "positions-dtype": (
        lambda: CLAYER.compressor(X, POSITIONS.astype(jnp.float32), None),
        TypeError,
        "Compressor: argument 'positions' has dtype float32, want int32",
    ),
    "q_latent": (
        lambda: LAYER.indexer(X, X[..., :8], POSITIONS),
        ValueError,
        "LightningIndexer: argument 'q_latent' has shape",
    ),
    "batch": (
        lambda: LAYER.decode(jnp.ones((3, 1, M)), CACHE),
        ValueError,
        r"DSAttention.decode: argument 'cache.kv.lengths' has shape \(2,\), want \[B\] with B=3",
    ),
    "batch-compressed": (
        lambda: CLAYER.decode(jnp.ones((3, 1, M)), CCACHE),
        ValueError,
        r"CompressedAttention.decode: argument 'cache.lengths' has shape \(2,\), want .*B=3",
    ),
    "batch-model": (
        lambda: LM.decode(TOKENS[:1], MODEL_CACHE),
        ValueError,
        r"decode: argument 'cache.*lengths' has shape \(2,\), want \[B\] with B=1",
    ),
    "cache-flat": (
        lambda: LAYER.decode(X, FLAT),
        TypeError,
        "DSAttention.decode: argument 'cache' is FlatCache, want LayerCache",
    ),
    "cache-none": (lambda: LAYER.decode(X, None), TypeError, "'cache' is NoneType, want LayerCa"),
    "cache-model": (lambda: LAYER.decode(X, MODEL_CACHE), TypeError, "'cache' is DecoderCache"),
    "cache-compressed": (
        lambda: CLAYER.decode(X, CACHE),
        TypeError,
        "CompressedAttention.decode: argument 'cache' is LayerCache, want CompressedCache",
    ),
    "cache-without-index": (
        lambda: LAYER.decode(X, nn.LayerCache.empty(CONFIG, B, 8, indexer_type="shared")),
        ValueError,
        "DSAttention.decode: argument 'cache.index_k' is 'None', want given in this layer",
    ),
    "cache-with-index": (
        lambda: SHARED.decode(X, CACHE, indices=INDICES),
        ValueError,
        "DSAttention.decode: argument 'cache.index_k' is 'given', want None in this layer",
    ),
    "cache-of-model-flat": (
        lambda: LM.decode(TOKENS, FLAT),
        TypeError,
        "DecoderLM.decode: argument 'cache' is FlatCache, want DecoderCache",
    ),
    "cache-of-model-short": (
        lambda: LM.decode(TOKENS, nn.DecoderCache(())),
        ValueError,
        "DecoderLM.decode: argument 'cache.layers' is '0 caches', want one for each of 1 layers",
    ),
    "tokens-rank": (lambda: LM(TOKENS[0]), ValueError, r"DecoderLM: argument 'tokens' has shape"),
    "tokens-dtype": (lambda: LM(X[..., 0]), TypeError, "DecoderLM: argument 'tokens' has dtype fl"),
    "tokens-list": (lambda: LM([[1, 2]]), TypeError, "DecoderLM: argument 'tokens' is list, want"),
    "tokens-decode": (
        lambda: LM.decode(X, MODEL_CACHE),
        TypeError,
        "DecoderLM.decode: argument 'tokens' has dtype float32",
    ),
    "return_indices": (
        lambda: LM.decode(TOKENS, MODEL_CACHE, return_indices="no"),
        TypeError,
        "DecoderLM.decode: argument 'return_indices' is 'no' .*, want a bool",
    ),
    "remat-name": (
        lambda: LM(TOKENS, remat_policy="attention"),
        TypeError,
        "^DecoderLM: argument 'remat_policy' is 'attention', want None or a policy, such as "
        r'jax_dsa.training.remat_policy\("attention"\) or one of jax.checkpoint_policies',
    ),
    "remat-flag": (
        lambda: LM(TOKENS, remat_policy=True),
        TypeError,
        r"^DecoderLM: argument 'remat_policy' is True, .*remat_policy\(\"selection\"\)",
    ),
    "selections": (
        lambda: LM(TOKENS, indices=[]),
        ValueError,
        "DecoderLM: argument 'indices' is '0 selections', want one for each of 1 layers",
    ),
}
WIDE, NARROW = (dataclasses.replace(CONFIG, kv_rank=16), dataclasses.replace(CONFIG, index_dim=4))
ROUNDED, IN_FP8 = (
    dataclasses.replace(CONFIG, dtype=jnp.bfloat16),
    dataclasses.replace(CONFIG, index_fp8=True),
)
HALF_STREAM = CCACHE.compressed._replace(gates=CCACHE.compressed.gates.astype(jnp.float16))


def other_cache(config: nn.AttentionConfig, **options: Any) -> nn.LayerCache:
    return nn.LayerCache.empty(config, B, 8, **options)


# Caches of a layer with another configuration, or with another dtype.
CALLS |= {
    "rows-width": (
        lambda: LAYER.decode(X, other_cache(WIDE)),
        ValueError,
        r"^DSAttention.decode: argument 'cache.kv.data' has shape \(2, 8, 1, 20\), want .*, 12\]",
    ),
    "rows-dtype": (
        lambda: LAYER.decode(X, other_cache(ROUNDED)),
        TypeError,
        "^DSAttention.decode: argument 'cache.kv.data' has dtype bfloat16, want float32",
    ),
    "pages-dtype": (
        lambda: LAYER.decode(X, other_cache(ROUNDED, page_size=4)),
        TypeError,
        "^DSAttention.decode: argument 'cache.kv.pages' has dtype bfloat16, want float32",
    ),
    "rows-of-another-layer": (
        lambda: SHARING.decode(X, other_cache(SHARING.config), kv=other_cache(ROUNDED).kv),
        TypeError,
        "^DSAttention.decode: argument 'kv.data' has dtype bfloat16, want float32",
    ),
    "records": (
        lambda: LAYER.decode(X, CACHE._replace(kv=jax_dsa.FlatCache.empty(B, 8, fp8=True))),
        TypeError,
        "^DSAttention.decode: argument 'cache.kv.data' has dtype uint8, want float32",
    ),
    "index-width": (
        lambda: LAYER.decode(X, other_cache(NARROW)),
        ValueError,
        r"^DSAttention.decode: argument 'cache.index_k' has shape \(2, 8, 4\), want .*S, 8\]",
    ),
    "index-dtype": (
        lambda: LAYER.decode(X, CACHE._replace(index_k=CACHE.index_k.astype(jnp.bfloat16))),
        TypeError,
        "^DSAttention.decode: argument 'cache.index_k' has dtype bfloat16, want float32",
    ),
    "index-fp8": (
        lambda: LAYER.decode(X, other_cache(IN_FP8)),
        ValueError,
        "^DSAttention.decode: argument 'cache.index_k_scale' is 'given', want None in this layer",
    ),
    "block-dtype": (
        lambda: LM.blocks[0].decode(X, other_cache(ROUNDED)),
        TypeError,
        "^Block.decode: argument 'cache.kv.data' has dtype bfloat16, want float32",
    ),
    "model-dtype": (
        lambda: LM.decode(TOKENS, nn.DecoderCache((other_cache(ROUNDED),))),
        TypeError,
        r"^DecoderLM.decode: argument 'cache.layers\[0\].kv.data' has dtype bfloat16, want float32",
    ),
    "model-layer": (
        lambda: LM.decode(TOKENS, nn.DecoderCache((FLAT,))),
        TypeError,
        r"^DecoderLM.decode: argument 'cache.layers\[0\]' is FlatCache, want LayerCache",
    ),
    "compressed-width": (
        lambda: CLAYER.decode(X, CCACHE._replace(recent=CCACHE.recent[..., :4])),
        ValueError,
        r"^CompressedAttention.decode: argument 'cache.recent' has shape .*, want \[B, R, 8\]",
    ),
    "compressed-window": (
        lambda: CLAYER.decode(X, CCACHE._replace(recent=CCACHE.recent[:, :2])),
        ValueError,
        "^CompressedAttention.decode: argument 'cache.recent' .* R of at least window - 1 = 3",
    ),
    "compressed-stream": (
        lambda: CLAYER.decode(X, CCACHE._replace(compressed=HALF_STREAM)),
        TypeError,
        "^CompressedAttention.decode: argument 'cache.compressed.gates' has dtype float16, want fl",
    ),
    "compressed-index": (
        lambda: CLAYER.decode(X, CCACHE._replace(index_keys=None)),
        ValueError,
        "^CompressedAttention.decode: argument 'cache.index_keys' is 'None', want given",
    ),
}


@pytest.mark.parametrize("case", CALLS)
def test_other_arguments(case: str) -> None:
    call, error, message = CALLS[case]
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize(
    "op", ["DSAttention", "CompressedAttention", "GroupedAttention", "Block", "DecoderLM"]
)
def test_sparse_is_a_static_bool(op: str) -> None:
    calls = {"Block": LM.blocks[0], "DecoderLM": LM}
    call, given = calls.get(op) or HIDDEN[op], TOKENS if op == "DecoderLM" else X
    message = f"^{op}: argument 'sparse' is .*, want a (static )?bool"
    for wrong in ("no", 0, None, jnp.bool_(False)):
        with pytest.raises(TypeError, match=message):
            call(given, sparse=wrong)
    with pytest.raises(TypeError, match=message):
        jax.jit(lambda x, sparse: call(x, sparse=sparse))(given, True)


CONSTRUCTORS: dict[str, tuple[Callable[..., Any], Any, Any]] = {
    "DSAttention": (nn.DSAttention, CONFIG, COMPRESSED),
    "MLA": (nn.MLA, CONFIG, DECODER),
    "LightningIndexer": (nn.LightningIndexer, CONFIG, None),
    "DecoderLM": (nn.DecoderLM, DECODER, CONFIG),
    "Block": (nn.Block, DECODER, CONFIG),
    "SwiGLU": (nn.SwiGLU, DECODER, CONFIG),
    "CompressedAttention": (nn.CompressedAttention, COMPRESSED, CONFIG),
    "GroupedAttention": (nn.GroupedAttention, GROUPED, CONFIG),
    "Compressor": (lambda c, rngs: nn.Compressor(c, 8, rngs=rngs), COMPRESSED, CONFIG),
}


@pytest.mark.parametrize("op", CONSTRUCTORS)
def test_constructors(op: str) -> None:
    make, config, wrong = CONSTRUCTORS[op]
    for rngs in (jax.random.key(0), 0, None):
        with pytest.raises(TypeError, match=rf"{op}: argument 'rngs' is .*, want Rngs, such as nn"):
            make(config, rngs=rngs)
    expected = type(config).__name__
    with pytest.raises(TypeError, match=f"{op}: argument 'config' is .*, want {expected}"):
        make(wrong, rngs=RNGS)


def test_tokens_outside_of_the_vocabulary():
    """As the page on troubleshooting says; the lookup is that of `nnx.Embed`."""
    vocab = LM.config.vocab
    tokens = jnp.array([[0, vocab], [0, -1], [0, vocab - 1]])
    logits = jax.jit(lambda tokens: LM(tokens)[0])(tokens)
    large, negative, last = logits[:, 1]
    assert jnp.isnan(large).all() and (negative == last).all()
