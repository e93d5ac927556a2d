"""Small layers with the features of published models, and their inputs."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jax_dsa import nn

B, T, M = 2, 29, 16
# This layer has queries without a latent, biases, sinks, a gate, scaling by position, and YaRN.
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
# This layer has no position, and its indexer selects 3 pools of 4 tokens.
POOLED = nn.AttentionConfig(
    model_dim=M,
    num_heads=2,
    q_rank=12,
    kv_rank=8,
    nope_dim=6,
    rope_dim=0,
    v_dim=7,
    index_heads=3,
    index_dim=8,
    index_rope_dim=0,
    top_k=12,
    index_pool=4,
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
# Blocks of 4 keys, of which each KV head selects 3 by their best key.
GROUPED = nn.GroupedConfig(
    model_dim=M,
    num_heads=4,
    kv_heads=2,
    head_dim=8,
    rope_dim=4,
    indexer="max",
    block_size=4,
    top_k=3,
    index_heads=2,
    index_dim=6,
)
LAYERS = {
    "latent": VARIANT,
    "pooled": POOLED,
    "selected": COMPRESSED,
    "all": dataclasses.replace(COMPRESSED, ratio=3, overlap=False, top_k=None),
    "window": dataclasses.replace(COMPRESSED, ratio=None, overlap=False, top_k=None),
    "best key": GROUPED,
    "mean key": dataclasses.replace(GROUPED, indexer="mean", index_heads=3, gate=True, bias=True),
    "grouped": dataclasses.replace(GROUPED, indexer=None),
}
# Documents of two sequences as (segment id, length). They are shorter than a block, whole blocks,
# or blocks with a remainder. Two documents that are not adjacent have the same id.
PACKED = ((7, 13), (2, 1), (7, 4), (1, 11)), ((0, 8), (3, 2), (1, 19))
SEGMENT_IDS = jnp.asarray([np.repeat(*np.transpose(row)) for row in PACKED], jnp.int32)


def hidden(rng, *shape):
    return jnp.asarray(rng.normal(size=shape or (B, T, M)), jnp.float32)


def layer(rng, config):
    """Returns a layer with random parameters, unlike those of an initialiser."""
    module = nn.attention_layer(config, rngs=nnx.Rngs(0))
    params = nnx.to_pure_dict(nnx.state(module, nnx.Param))
    nnx.update(
        module,
        jax.tree.map(
            lambda x: x + jnp.asarray(rng.normal(size=x.shape, scale=0.3), x.dtype), params
        ),
    )
    return module
