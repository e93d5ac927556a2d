"""The losses that train the indexer."""

from jax_dsa.ops.losses.api import dense_indexer_kl_loss, indexer_kl_loss

__all__ = ["dense_indexer_kl_loss", "indexer_kl_loss"]
