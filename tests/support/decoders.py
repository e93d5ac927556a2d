"""Small decoders and attention layers, their inputs, and their caches."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jax_dsa import nn

B, T, M = 2, 12, 16
CONFIG = nn.AttentionConfig(
    model_dim=M,
    num_heads=2,
    q_rank=12,
    kv_rank=8,
    nope_dim=6,
    rope_dim=4,
    v_dim=5,
    index_heads=3,
    index_dim=8,
    index_rope_dim=4,
    top_k=5,
)
DECODER = nn.DecoderConfig(CONFIG, vocab=11, num_layers=2, mlp_dim=24)
# Four layers. The first and the last have an indexer.
SHARING = dataclasses.replace(DECODER, num_layers=4, indexer_types=("full", "shared", "shared"))


def hidden(rng, *shape):
    return jnp.asarray(rng.normal(size=shape or (B, T, M)), jnp.float32)


def positions(start=0):
    return jnp.broadcast_to(jnp.arange(start, start + T, dtype=jnp.int32), (B, T))


@functools.cache
def attention(**changes):
    return nn.DSAttention(dataclasses.replace(CONFIG, **changes), rngs=nnx.Rngs(0))


@functools.cache
def decoder(config=DECODER):
    return nn.DecoderLM(config, rngs=nnx.Rngs(0))


def attend(module, x, sparse=True):
    return jax.jit(lambda x: module(x, sparse=sparse))(x)


def decode(module, x, cache):
    """Returns the output for the next tokens, and the cache with these tokens in it."""
    return jax.jit(lambda x, cache: module.decode(x, cache)[:2])(x, cache)


# Documents of two sequences as (segment id, length). Two documents that are not adjacent may have
# the same id.
PACKED = ((7, 5), (2, 1), (7, 6)), ((0, 3), (1, 9))
SEGMENT_IDS = jnp.asarray([np.repeat(*np.transpose(row)) for row in PACKED], jnp.int32)


def documents():
    """Yields each packed document as (sequence, first token, end)."""
    for b, row in enumerate(PACKED):
        ends = np.cumsum([length for _, length in row])
        yield from ((b, int(end) - length, int(end)) for end, (_, length) in zip(ends, row))


def decode_in_chunks(model, tokens, cache, chunks):
    step = jax.jit(lambda tokens, cache: model.decode(tokens, cache))
    logits = []
    for n in chunks:
        out, cache = step(tokens[:, :n], cache)
        tokens = tokens[:, n:]
        logits.append(out)
    return jnp.concatenate(logits, 1), cache
