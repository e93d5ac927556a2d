"""Latent attention of every query to the keys that its indices select."""

from jax_dsa.ops.sparse_mla.api import sparse_mla, sparse_mla_decode

__all__ = ["sparse_mla", "sparse_mla_decode"]
