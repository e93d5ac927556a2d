"""Flax NNX modules with DeepSeek sparse attention; needs the extra `flax`."""

import warnings
from typing import Any

from jax_dsa.core.extras import needs_extra

with needs_extra("flax", __name__):
    from jax_dsa.nn.attention import AttentionAux, DSAttention
    from jax_dsa.nn.cache import DecoderCache, LayerCache
    from jax_dsa.nn.compressed import CompressedAttention, CompressedAux
    from jax_dsa.nn.compressed_cache import CompressedCache
    from jax_dsa.nn.compressed_config import CompressedConfig
    from jax_dsa.nn.compressor import Compressor
    from jax_dsa.nn.config import AttentionConfig, DecoderConfig, IndexerType
    from jax_dsa.nn.decoder import Block, DecoderLM, SwiGLU
    from jax_dsa.nn.fp4 import fake_quantize_fp4
    from jax_dsa.nn.grouped import GroupedAttention, GroupedAux
    from jax_dsa.nn.grouped_cache import GroupedCache
    from jax_dsa.nn.grouped_config import GroupedConfig
    from jax_dsa.nn.hf import load_hf, save_hf
    from jax_dsa.nn.hf_config import HFLayer, from_hf
    from jax_dsa.nn.hf_dense import sparse_from_hf, sparse_hf_config
    from jax_dsa.nn.indexer import IndexerInputs, LightningIndexer
    from jax_dsa.nn.layers import attention_layer
    from jax_dsa.nn.linear import Fp8Linear
    from jax_dsa.nn.linen import linen_dsattention
    from jax_dsa.nn.mla import MLA, MLAProjections
    from jax_dsa.nn.rotary import RopeLayout, hadamard, rope, yarn_frequencies
    from jax_dsa.nn.safetensors import SafeTensors
    from jax_dsa.nn.stripes import striped, unstriped

__all__ = [
    "MLA",
    "AttentionAux",
    "AttentionConfig",
    "Block",
    "CompressedAttention",
    "CompressedAux",
    "CompressedCache",
    "CompressedConfig",
    "Compressor",
    "DSAttention",
    "DecoderCache",
    "DecoderConfig",
    "DecoderLM",
    "Fp8Linear",
    "GroupedAttention",
    "GroupedAux",
    "GroupedCache",
    "GroupedConfig",
    "HFLayer",
    "IndexerInputs",
    "IndexerType",
    "LayerCache",
    "LightningIndexer",
    "MLAProjections",
    "RopeLayout",
    "SafeTensors",
    "SwiGLU",
    "attention_layer",
    "fake_quantize_fp4",
    "from_hf",
    "hadamard",
    "linen_dsattention",
    "load_hf",
    "rope",
    "save_hf",
    "sparse_from_hf",
    "sparse_hf_config",
    "striped",
    "unstriped",
    "yarn_frequencies",
]


def __getattr__(name: str) -> Any:
    """Serves the deprecated names of the package."""
    if name == "SparseMLA":
        warnings.warn("nn.SparseMLA is deprecated, use nn.MLA", DeprecationWarning, stacklevel=2)
        return MLA
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
