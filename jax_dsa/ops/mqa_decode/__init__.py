"""Decode attention to all keys of a cache."""

from jax_dsa.ops.mqa_decode.api import mqa_decode
from jax_dsa.ops.mqa_decode.merge import merge_attention
from jax_dsa.ops.mqa_decode.plan import mqa_decode_plan
from jax_dsa.ops.mqa_decode.spec import MqaDecodePlan

__all__ = ["MqaDecodePlan", "merge_attention", "mqa_decode", "mqa_decode_plan"]
