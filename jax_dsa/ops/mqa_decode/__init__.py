"""Decode attention to all keys of a cache."""

from jax_dsa.ops.mqa_decode.api import mqa_decode
from jax_dsa.ops.mqa_decode.merge import merge_attention

__all__ = ["merge_attention", "mqa_decode"]
