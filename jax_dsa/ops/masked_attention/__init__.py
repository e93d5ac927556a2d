"""Attention under dynamic masks."""

from jax_dsa.ops.masked_attention.api import masked_attention, masked_attention_varlen

__all__ = ["masked_attention", "masked_attention_varlen"]
