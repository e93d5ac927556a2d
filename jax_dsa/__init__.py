"""DeepSeek Sparse Attention for JAX.

The operators run inside `jax.jit`, and support gradients, `vmap` and meshes. `capabilities()`
returns which of them have a CUDA kernel on this machine. Each letter has the same meaning in all
shapes: B batch, T query positions, S key positions, N query heads, G KV heads, D query and key
dimension, E value dimension, K selected keys, J indexer heads, C indexer dimension.

`jax_dsa.nn`, `jax_dsa.training` and `jax_dsa.serving` are imported when they are first used.
"""

from typing import TYPE_CHECKING, Any

from jax_dsa.core.call import plain_xla
from jax_dsa.core.capabilities import capabilities
from jax_dsa.core.ffi import export_checks
from jax_dsa.core.rows import block_tokens
from jax_dsa.ops.attention_probs import attention_probs
from jax_dsa.ops.attn_dist import attn_dist
from jax_dsa.ops.block_mask import BlockMask, make_block_mask, relu_mask, topk_indices, topk_mask
from jax_dsa.ops.cache import FlatCache, PagedCache
from jax_dsa.ops.dsa_attention import DSAAux, dsa_attention
from jax_dsa.ops.fp8_linear import fp8_linear
from jax_dsa.ops.fp8_matmul import fp8_matmul
from jax_dsa.ops.gated_pool import gated_pool, mean_pool
from jax_dsa.ops.htree import (
    HTreeCache,
    HTreeSelection,
    htree_attention,
    htree_build,
    htree_decode,
    htree_select,
)
from jax_dsa.ops.indexer import indexer_block_topk, indexer_logits, indexer_topk
from jax_dsa.ops.losses import dense_indexer_kl_loss, indexer_kl_loss
from jax_dsa.ops.masked_attention import masked_attention, masked_attention_varlen
from jax_dsa.ops.mqa_decode import MqaDecodePlan, merge_attention, mqa_decode, mqa_decode_plan
from jax_dsa.ops.quantize_fp8 import dequantize_fp8, fake_quantize_fp8, quantize_fp8
from jax_dsa.ops.sparse_attention import (
    sparse_attention,
    sparse_attention_decode,
    sparse_attention_varlen,
)
from jax_dsa.ops.sparse_mla import sparse_mla, sparse_mla_decode
from jax_dsa.ops.topk import block_topk, topk
from jax_dsa.version import __version__

if TYPE_CHECKING:
    from jax_dsa import nn, serving, training

__all__ = [
    "BlockMask",
    "DSAAux",
    "FlatCache",
    "HTreeCache",
    "HTreeSelection",
    "MqaDecodePlan",
    "PagedCache",
    "__version__",
    "attention_probs",
    "attn_dist",
    "block_tokens",
    "block_topk",
    "capabilities",
    "dense_indexer_kl_loss",
    "dequantize_fp8",
    "dsa_attention",
    "export_checks",
    "fake_quantize_fp8",
    "fp8_linear",
    "fp8_matmul",
    "gated_pool",
    "htree_attention",
    "htree_build",
    "htree_decode",
    "htree_select",
    "indexer_block_topk",
    "indexer_kl_loss",
    "indexer_logits",
    "indexer_topk",
    "make_block_mask",
    "masked_attention",
    "masked_attention_varlen",
    "mean_pool",
    "merge_attention",
    "mqa_decode",
    "mqa_decode_plan",
    "nn",
    "plain_xla",
    "quantize_fp8",
    "relu_mask",
    "serving",
    "sparse_attention",
    "sparse_attention_decode",
    "sparse_attention_varlen",
    "sparse_mla",
    "sparse_mla_decode",
    "topk",
    "topk_indices",
    "topk_mask",
    "training",
]


def __getattr__(name: str) -> Any:
    if name not in ("nn", "serving", "training"):
        raise AttributeError(f"module 'jax_dsa' has no attribute '{name}'")
    import importlib

    return importlib.import_module(f"jax_dsa.{name}")


def __dir__() -> list[str]:
    return sorted(__all__)
