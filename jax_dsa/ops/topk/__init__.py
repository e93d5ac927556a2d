"""Exact, deterministic top-k."""

from jax_dsa.ops.topk.api import block_topk, topk

__all__ = ["block_topk", "topk"]
