"""Latent attention over selected keys."""

from jax_dsa.ops.sparse_mla.api import sparse_mla, sparse_mla_decode

__all__ = ["sparse_mla", "sparse_mla_decode"]
