"""Block masks, and masks of the keys of largest bias, for masked attention."""

from jax_dsa.ops.block_mask.api import make_block_mask, relu_mask, topk_indices, topk_mask
from jax_dsa.ops.block_mask.spec import BlockMask

__all__ = ["BlockMask", "make_block_mask", "relu_mask", "topk_indices", "topk_mask"]
