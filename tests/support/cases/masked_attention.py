"""Cases of `masked_attention` and its relatives: bias and mask, kept keys, block mask, packed."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jax_dsa import (
    attention_probs,
    make_block_mask,
    masked_attention,
    masked_attention_varlen,
    relu_mask,
    topk_indices,
    topk_mask,
)
from support.cases import TransformCase

B, T, N, S, D, E, W = 8, 8, 8, 5, 4, 3, 4


def floats(rng: np.random.Generator, *shape: int) -> jnp.ndarray:
    return jnp.asarray(rng.normal(size=shape), jnp.float32)


def integers(rng: np.random.Generator, low: int, high: int, *shape: int) -> jnp.ndarray:
    return jnp.asarray(rng.integers(low, high, size=shape), jnp.int32)


def qkv(rng: np.random.Generator, groups: int) -> tuple:
    k, v = floats(rng, B, S, groups, D), floats(rng, B, S, groups, E)
    return floats(rng, B, T, N, D), k, v


def make_causal_args(rng: np.random.Generator) -> tuple:
    return floats(rng, B, T, N, D), floats(rng, B, T, 2, D), floats(rng, B, T, 2, E)


def make_sinks_args(rng: np.random.Generator) -> tuple:
    return *make_causal_args(rng), floats(rng, 1, N)


def attend_causal(q, k, v, sinks):
    return masked_attention(
        q, k, v, sinks=sinks[0], is_causal=True, return_lse=True, return_max_logit=True
    )


def make_documents(rng: np.random.Generator) -> tuple:
    return *make_causal_args(rng), integers(rng, 0, 2, B, T)


def attend_documents(q, k, v, ids):
    return masked_attention(q, k, v, segment_ids=ids, return_lse=True)


def make_masked_args(rng: np.random.Generator) -> tuple:
    """Makes a bias that heads share and a mask that queries share."""
    mask = jnp.asarray(rng.random((1, N, 1, S)) < 0.8)
    return *qkv(rng, 1), floats(rng, 1, 1, T, S), mask, integers(rng, 0, S + 1, B)


def attend_masked(q, k, v, bias, mask, lengths):
    options = {"is_causal": True, "causal_alignment": "bottom_right", "softcap": 2.0}
    lengths = {"key_value_seq_lengths": lengths, "return_lse": True}
    return masked_attention(q, k, v, bias, mask, **lengths, **options)


def make_kept_args(rng: np.random.Generator) -> tuple:
    kept = integers(rng, -1, S + 1, B, N, W)
    segments = integers(rng, 0, 2, B, T), integers(rng, 0, 2, B, S)
    return *qkv(rng, N), floats(rng, B, N, 1, S), kept, *segments


def attend_kept(q, k, v, bias, kept, q_segments, kv_segments):
    return masked_attention(
        q, k, v, bias, kv_indices=kept, segment_ids=(q_segments, kv_segments), return_lse=True
    )


def make_block_args(rng: np.random.Generator) -> tuple:
    return *qkv(rng, 2), floats(rng, 1, 2, 1, S)


def attend_block(q, k, v, bias):
    block_mask = make_block_mask(
        lambda b, h, t, s: (t + s + h) % 3 != 0, shape=(1, N, T, S), block_q=3, block_k=8
    )
    return masked_attention(q, k, v, bias, block_mask=block_mask)


def make_probs_args(rng: np.random.Generator) -> tuple:
    q, k, _ = qkv(rng, 2)
    return q, k, floats(rng, 1, 2, T, S), integers(rng, 0, S + 1, B)


def probabilities(q, k, bias, lengths):
    return attention_probs(q, k, bias, is_causal=True, key_value_seq_lengths=lengths)


def make_packed_args(rng: np.random.Generator) -> tuple:
    cu_q = jnp.asarray([0, 3, 3, T - 1], jnp.int32)
    cu_k = jnp.asarray([1, 3, 4, S], jnp.int32)
    k, v = floats(rng, S, 2, D), floats(rng, S, 2, E)
    return floats(rng, T, N, D), k, v, cu_q, cu_k, floats(rng, 2, 1, S), floats(rng, 1, N)


def attend_packed(q, k, v, cu_q, cu_k, bias, sinks):
    window = {"local_window_size": (2, 1), "return_lse": True}
    return masked_attention_varlen(q, k, v, cu_q, cu_k, bias=bias, sinks=sinks[0], **window)


def make_mask_args(rng: np.random.Generator) -> tuple:
    mask = jnp.asarray(rng.random((B, N, T, S)) < 0.5)
    return mask, integers(rng, 0, S + 1, B), integers(rng, 0, 2, B, T), integers(rng, 0, 2, B, S)


@jax.jit  # outside of jit the number of slots depends on the mask
def block_masks(mask, lengths, q_segments, kv_segments):
    segments = q_segments, kv_segments
    return jax.tree.leaves(
        make_block_mask(
            mask, key_value_seq_lengths=lengths, segment_ids=segments, block_q=3, block_k=8
        )
    )


def make_bias_args(rng: np.random.Generator) -> tuple:
    return floats(rng, B, N, S), jnp.asarray(rng.random((B, 1, S)) < 0.7)


def masks_from_bias(bias, mask):
    return topk_mask(bias, 3, mask=mask), topk_indices(bias, 3), relu_mask(bias)


batch, query, head = P("x"), P(None, "x"), P(None, None, "x")
CASES = [
    TransformCase(
        "masked_attention-causal",
        attend_causal,
        make_sinks_args,
        (0, 1, 2, 3),
        {
            "batch": (batch, batch, batch, P()),
            "query": (query, P(), P(), P()),
            "head": (head, P(), P(), query),
            "keys": (query, query, query, P()),
        },
        {"keys": {(B, T, 2, D), (B, T, 2, E)}},
    ),
    TransformCase(
        "masked_attention-documents",
        attend_documents,
        make_documents,
        (0, 1, 2),
        {
            "batch": (batch,) * 4,
            "head": (head, P(), P(), P()),
            "keys": (query,) * 4,
        },
        {"keys": {(B, T), (B, T, 2, D), (B, T, 2, E)}},
    ),
    TransformCase(
        "masked_attention",
        attend_masked,
        make_masked_args,
        (0, 1, 2, 3),
        {
            "batch": (batch, batch, batch, P(), P(), batch),
            "query": (query, P(), P(), head, P(), P()),
            "head": (head, P(), P(), P(), query, P()),
        },
    ),
    TransformCase(
        "masked_attention-kept-keys",
        attend_kept,
        make_kept_args,
        (0, 1, 2, 3),
        {
            "batch": (batch,) * 7,
            "query": (query, P(), P(), P(), P(), query, P()),
            "head": (head, head, head, query, query, P(), P()),
        },
    ),
    TransformCase(
        "masked_attention-block-mask",
        attend_block,
        make_block_args,
        (0, 1, 2, 3),
        {
            "batch": (batch, batch, batch, P()),
            "query": (query, P(), P(), P()),
        },
    ),
    TransformCase(
        "attention_probs",
        probabilities,
        make_probs_args,
        (),
        {
            "batch": (batch, batch, P(), batch),
            "query": (query, P(), head, P()),
            "head": (head, P(), P(), P()),
        },
    ),
    TransformCase(
        "make_block_mask",
        block_masks,
        make_mask_args,
        (),
        {"batch": (batch,) * 4, "head": (query, P(), P(), P())},
    ),
    TransformCase(
        "topk_mask",
        masks_from_bias,
        make_bias_args,
        (),
        {"batch": (batch, batch), "head": (query, P())},
    ),
    TransformCase(
        "masked_attention_varlen",
        attend_packed,
        make_packed_args,
        (0, 1, 2, 5, 6),
        {
            "query": (P("x"), P(), P(), P(), P(), P(), P()),
        },
    ),
]
