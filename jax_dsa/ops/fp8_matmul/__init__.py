"""FP8 matmul."""

from jax_dsa.ops.fp8_matmul.api import fp8_matmul

__all__ = ["fp8_matmul"]
