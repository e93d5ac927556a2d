"""Pooling, which turns each block of tokens into one key."""

from jax_dsa.ops.gated_pool.api import gated_pool, gated_pool_for_norm, mean_pool

__all__ = ["gated_pool", "gated_pool_for_norm", "mean_pool"]
