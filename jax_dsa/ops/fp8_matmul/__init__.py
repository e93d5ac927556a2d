"""Matmul of FP8 (e4m3) operands with one scale per block."""

from jax_dsa.ops.fp8_matmul.api import fp8_matmul

__all__ = ["fp8_matmul"]
