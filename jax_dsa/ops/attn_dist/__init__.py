"""Attention probabilities over the selected keys, summed over heads."""

from jax_dsa.ops.attn_dist.api import attn_dist

__all__ = ["attn_dist"]
