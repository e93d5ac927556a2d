"""The lightning indexer."""

from jax_dsa.ops.indexer.api import indexer_logits, indexer_selected_logits, indexer_topk
from jax_dsa.ops.indexer.block_topk import indexer_block_topk

__all__ = ["indexer_block_topk", "indexer_logits", "indexer_selected_logits", "indexer_topk"]
