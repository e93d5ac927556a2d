"""Attention probabilities, for inspection."""

from jax_dsa.ops.attention_probs.api import attention_probs

__all__ = ["attention_probs"]
