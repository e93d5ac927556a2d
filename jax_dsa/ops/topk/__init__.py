"""Exact, deterministic top-k."""

from jax_dsa.ops.topk.api import topk

__all__ = ["topk"]
