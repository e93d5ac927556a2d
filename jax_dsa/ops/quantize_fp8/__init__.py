"""FP8 (e4m3) quantisation with one scale per block."""

from jax_dsa.ops.quantize_fp8.api import dequantize_fp8, fake_quantize_fp8, quantize_fp8

__all__ = ["dequantize_fp8", "fake_quantize_fp8", "quantize_fp8"]
