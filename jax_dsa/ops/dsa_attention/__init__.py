"""DeepSeek Sparse Attention as one function."""

from jax_dsa.ops.dsa_attention.api import DSAAux, dsa_attention

__all__ = ["DSAAux", "dsa_attention"]
