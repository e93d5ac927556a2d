"""Small configurations of attention layers and decoders, and layers with random parameters."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jax_dsa import nn

ATTENTION = nn.AttentionConfig(
    model_dim=16,
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
DECODER = nn.DecoderConfig(ATTENTION, vocab=11, num_layers=2, mlp_dim=24)

B, T, M = 2, 29, 16
# The options that DeepSeek-V3.2 does not use: queries without a latent, biases, sinks, a gate,
# scaling by position, YaRN.
VARIANT = nn.AttentionConfig(
    model_dim=M,
    num_heads=2,
    q_rank=None,
    kv_rank=8,
    nope_dim=6,
    rope_dim=4,
    v_dim=7,
    index_heads=3,
    index_dim=8,
    index_rope_dim=4,
    top_k=5,
    rope_frequencies=nn.yarn_frequencies(4, base=1e4, factor=4.0, original_length=8),
    rope_factor=1.1,
    scale_factor=1.2,
    bias=True,
    sinks=True,
    gate=True,
    log_scaling=True,
    index_rope_last=True,
)
COMPRESSED = nn.CompressedConfig(
    model_dim=M,
    num_heads=4,
    q_rank=12,
    head_dim=8,
    rope_dim=4,
    out_groups=2,
    out_rank=6,
    window=6,
    ratio=4,
    overlap=True,
    top_k=3,
    index_heads=3,
    index_dim=8,
)
# Documents shorter than a block, of whole blocks, and of more; the same number twice.
PACKED = ((7, 13), (2, 1), (7, 4), (1, 11)), ((0, 8), (3, 2), (1, 19))
SEGMENT_IDS = jnp.asarray([np.repeat(*np.transpose(row)) for row in PACKED], jnp.int32)


def hidden(rng, *shape):
    """Returns random hidden states, by default of shape [B, T, M]."""
    return jnp.asarray(rng.normal(size=shape or (B, T, M)), jnp.float32)


def layer(rng, config):
    """Returns a layer whose parameters differ from what the initialisers give."""
    kind = nn.CompressedAttention if isinstance(config, nn.CompressedConfig) else nn.DSAttention
    module = kind(config, rngs=nnx.Rngs(0))
    params = nnx.to_pure_dict(nnx.state(module, nnx.Param))
    nnx.update(
        module,
        jax.tree.map(
            lambda x: x + jnp.asarray(rng.normal(size=x.shape, scale=0.3), x.dtype), params
        ),
    )
    return module
