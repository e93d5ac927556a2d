"""Linear layer in FP8."""

from jax_dsa.ops.fp8_linear.api import fp8_linear

__all__ = ["fp8_linear"]
