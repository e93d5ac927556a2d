"""Decode attention to all keys of a cache."""

from jax_dsa.ops.mqa_decode.api import merge_attention, mqa_decode

__all__ = ["merge_attention", "mqa_decode"]
