"""Flax Linen bridge: the attention module for models written in Linen."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flax import nnx

from jax_dsa.nn.attention import DSAttention

if TYPE_CHECKING:
    from flax import linen

    from jax_dsa.nn.config import AttentionConfig, IndexerType


def linen_dsattention(
    config: AttentionConfig, indexer_type: IndexerType = "full", *, name: str | None = None
) -> linen.Module:
    """`DSAttention` as a Linen module: same call, same results, parameters in the collection
    "params".

    For `DSAttention.decode` pass `nnx_method="decode"` in the call.
    """
    return nnx.bridge.to_linen(DSAttention, config, indexer_type, name=name)
