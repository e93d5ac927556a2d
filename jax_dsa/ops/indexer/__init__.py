"""The lightning indexer."""

from jax_dsa.ops.indexer.api import indexer_logits, indexer_selected_logits, indexer_topk

__all__ = ["indexer_logits", "indexer_selected_logits", "indexer_topk"]
