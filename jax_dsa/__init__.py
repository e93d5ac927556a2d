"""DeepSeek Sparse Attention for JAX. INTERIM: lazy until every operator file exists."""

import importlib

_WHERE = {
    "indexer": ["indexer_logits", "indexer_topk"],
    "topk": ["topk"],
    "losses": ["indexer_kl_loss", "dense_indexer_kl_loss"],
    "sparse_mla": ["sparse_mla", "sparse_mla_decode"],
    "attn_dist": ["attn_dist"],
    "mqa_decode": ["mqa_decode", "merge_attention"],
    "htree": ["htree_attention", "htree_build", "htree_select"],
    "htree_decode": ["htree_decode"],
    "masked_attention": ["masked_attention", "masked_attention_varlen"],
    "block_mask": ["BlockMask", "make_block_mask", "topk_mask", "relu_mask", "topk_indices"],
    "fp8": ["quantize_fp8", "dequantize_fp8", "fp8_matmul"],
    "dsa_attention": ["dsa_attention"],
}
_NAMES = {n: m for m, ns in _WHERE.items() for n in ns}


def __getattr__(name):
    if name == "plain_xla":
        return importlib.import_module("jax_dsa.core.derivative").plain_xla
    if name == "capabilities":
        return importlib.import_module("jax_dsa.core.capabilities").capabilities
    if name in _NAMES:
        return getattr(importlib.import_module(f"jax_dsa.ops.{_NAMES[name]}"), name)
    raise AttributeError(name)
