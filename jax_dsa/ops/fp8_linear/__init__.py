"""Linear layer with FP8 (e4m3) products in the forward and backward pass."""

from jax_dsa.ops.fp8_linear.api import fp8_linear

__all__ = ["fp8_linear"]
