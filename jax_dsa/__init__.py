"""DeepSeek Sparse Attention for JAX.

Operators that run inside `jax.jit`, differentiate, vmap and shard; the letters in their shapes are
those of docs/index.md. `capabilities()` says which of them have a CUDA kernel here.
"""

from jax_dsa.core.capabilities import capabilities
from jax_dsa.core.derivative import plain_xla
from jax_dsa.ops.attn_dist import attn_dist
from jax_dsa.ops.block_mask import (
    BlockMask,
    make_block_mask,
    relu_mask,
    topk_indices,
    topk_mask,
)
from jax_dsa.ops.dsa_attention import dsa_attention
from jax_dsa.ops.fp8 import dequantize_fp8, fake_quantize_fp8, fp8_matmul, quantize_fp8
from jax_dsa.ops.htree import HTreeSelection, htree_attention, htree_build, htree_select
from jax_dsa.ops.htree_decode import HTreeCache, htree_decode
from jax_dsa.ops.indexer import indexer_logits, indexer_topk
from jax_dsa.ops.losses import dense_indexer_kl_loss, indexer_kl_loss
from jax_dsa.ops.masked_attention import masked_attention, masked_attention_varlen
from jax_dsa.ops.mqa_decode import merge_attention, mqa_decode
from jax_dsa.ops.sparse_mla import sparse_mla, sparse_mla_decode
from jax_dsa.ops.topk import topk
from jax_dsa.version import __version__

__all__ = [
    "BlockMask",
    "HTreeCache",
    "HTreeSelection",
    "__version__",
    "attn_dist",
    "capabilities",
    "dense_indexer_kl_loss",
    "dequantize_fp8",
    "dsa_attention",
    "fake_quantize_fp8",
    "fp8_matmul",
    "htree_attention",
    "htree_build",
    "htree_decode",
    "htree_select",
    "indexer_kl_loss",
    "indexer_logits",
    "indexer_topk",
    "make_block_mask",
    "masked_attention",
    "masked_attention_varlen",
    "merge_attention",
    "mqa_decode",
    "plain_xla",
    "quantize_fp8",
    "relu_mask",
    "sparse_mla",
    "sparse_mla_decode",
    "topk",
    "topk_indices",
    "topk_mask",
]
