"""Attention of every query to the blocks of keys that its group of heads lists."""

from jax_dsa.ops.sparse_attention.api import sparse_attention, sparse_attention_varlen

__all__ = ["sparse_attention", "sparse_attention_varlen"]
