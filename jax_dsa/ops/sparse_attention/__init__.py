"""Attention of every query to the blocks of keys that its group of heads lists."""

from jax_dsa.ops.sparse_attention.api import sparse_attention, sparse_attention_varlen
from jax_dsa.ops.sparse_attention.decode import sparse_attention_decode

__all__ = ["sparse_attention", "sparse_attention_decode", "sparse_attention_varlen"]
