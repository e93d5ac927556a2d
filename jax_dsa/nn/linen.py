"""The attention module for models that are written in Flax Linen."""

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
    """Returns `DSAttention` as a Linen module, with parameters in the collection "params".

    Arguments and results of a call are those of `DSAttention`. To call `DSAttention.decode`, pass
    `nnx_method="decode"`.

    Args:
        config: Sizes and switches of the layer.
        indexer_type: "full" or "shared", as in `DSAttention`.
        name: Name of the Linen module.
    """
    return nnx.bridge.to_linen(DSAttention, config, indexer_type, name=name)
