"""Pooling of blocks of tokens."""

from jax_dsa.ops.gated_pool.api import gated_pool

__all__ = ["gated_pool"]
