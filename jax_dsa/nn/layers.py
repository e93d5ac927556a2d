"""The attention layer that a configuration describes."""

from __future__ import annotations

from typing import TYPE_CHECKING, overload

from jax_dsa.nn.attention import DSAttention
from jax_dsa.nn.compressed import CompressedAttention
from jax_dsa.nn.compressed_config import CompressedConfig
from jax_dsa.nn.config import AttentionConfig
from jax_dsa.nn.grouped import GroupedAttention
from jax_dsa.nn.grouped_config import GroupedConfig

if TYPE_CHECKING:
    from flax import nnx

    from jax_dsa.nn.config import IndexerType


@overload
def attention_layer(
    config: AttentionConfig, indexer_type: IndexerType = "full", *, rngs: nnx.Rngs
) -> DSAttention: ...
@overload
def attention_layer(
    config: CompressedConfig, indexer_type: IndexerType = "full", *, rngs: nnx.Rngs
) -> CompressedAttention: ...
@overload
def attention_layer(
    config: GroupedConfig, indexer_type: IndexerType = "full", *, rngs: nnx.Rngs
) -> GroupedAttention: ...
def attention_layer(
    config: AttentionConfig | CompressedConfig | GroupedConfig,
    indexer_type: IndexerType = "full",
    *,
    rngs: nnx.Rngs,
) -> DSAttention | CompressedAttention | GroupedAttention:
    """Returns a new attention layer: the module that belongs to the configuration's class.

    Args:
        config: The layer's configuration, for example that of an `HFLayer`.
        indexer_type: "full", or "shared" for a layer that attends to another layer's selection. A
            `CompressedAttention` is always "full".
        rngs: Random streams that initialise the parameters.

    Raises:
        TypeError: If `config` is none of these configurations, or `rngs` has the wrong type.
        ValueError: If there is no such layer with this indexer type.

    Examples:
        >>> from flax import nnx
        >>> from jax_dsa import nn
        >>> config = nn.GroupedConfig(
        ...     model_dim=16, num_heads=4, kv_heads=2, head_dim=8, rope_dim=4, indexer="max",
        ...     block_size=4, top_k=2, index_heads=2, index_dim=8,
        ... )
        >>> type(nn.attention_layer(config, rngs=nnx.Rngs(0))).__name__
        'GroupedAttention'
    """
    if isinstance(config, AttentionConfig):
        return DSAttention(config, indexer_type, rngs=rngs)
    if isinstance(config, GroupedConfig):
        return GroupedAttention(config, indexer_type, rngs=rngs)
    if not isinstance(config, CompressedConfig):
        raise TypeError(
            f"attention_layer: argument 'config' is {type(config).__name__}, expected an "
            f"AttentionConfig, a CompressedConfig or a GroupedConfig; from_hf gives None to layers "
            f"whose attention is not covered"
        )
    if indexer_type != "full":
        raise ValueError(
            f"attention_layer: argument 'indexer_type' is {indexer_type!r}, expected 'full' with a "
            f"CompressedConfig"
        )
    return CompressedAttention(config, rngs=rngs)
