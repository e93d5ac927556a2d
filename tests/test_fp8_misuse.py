"""How the FP8 operators refuse wrong arguments."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from jax_dsa import dequantize_fp8, fake_quantize_fp8, fp8_linear, fp8_matmul, nn, quantize_fp8

X = np.zeros((4, 256), np.float32)
CODES = np.zeros((4, 256), ml_dtypes.float8_e4m3fn)
SCALE = np.zeros((4, 2), np.float32)
W = np.zeros((8, 256), np.float32)
LAYER = nn.Fp8Linear(256, 8, rngs=nnx.Rngs(0))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: quantize_fp8([1.0]), TypeError, "quantize_fp8: argument 'x' is list"),
        (lambda: quantize_fp8(np.float32(1)), ValueError, "'x' has shape \\(\\)"),
        (lambda: quantize_fp8(X.astype(np.int32)), TypeError, "'x' has dtype int32, want bfloat16"),
        (lambda: quantize_fp8(CODES), TypeError, "'x' has dtype float8_e4m3fn"),
        (lambda: quantize_fp8(X, block=0), ValueError, "'block' is 0, want .*int in 1"),
        (lambda: quantize_fp8(X, block=1.5), TypeError, "'block' is 1.5"),
        (lambda: quantize_fp8(X, block=(1, 2, 3)), ValueError, "'block' is .*pair"),
        (lambda: quantize_fp8(X, block=(0, 2)), ValueError, "'block' is 0"),
        (lambda: quantize_fp8(X[0], block=(2, 2)), ValueError, "'x' has shape .256,., want .R, F"),
        (lambda: quantize_fp8(X, power_of_two_scale=1), TypeError, "'power_of_two_scale' is 1"),
        (lambda: quantize_fp8(X, implementation="gpu"), ValueError, "'implementation' is 'gpu'"),
        (
            lambda: quantize_fp8(X, block=64, implementation="cuda"),
            NotImplementedError,
            "quantize_fp8: implementation='cuda' is not available here.*'xla'",
        ),
        (lambda: dequantize_fp8(X, SCALE), TypeError, "dequantize_fp8: argument 'x'.*float8_e4m3"),
        (
            lambda: dequantize_fp8(CODES, SCALE[:, :1]),
            ValueError,
            "'scale'.*J=2 .*block=128",
        ),
        (
            lambda: dequantize_fp8(CODES, SCALE, block=64),
            ValueError,
            "'scale'.*J=4 .*block=64",
        ),
        (lambda: dequantize_fp8(CODES, SCALE.astype(np.float16)), TypeError, "'scale'.*float32"),
        (lambda: dequantize_fp8(CODES, SCALE, dtype=jnp.int8), ValueError, "'dtype' is 'int8'"),
        (
            lambda: dequantize_fp8(CODES, SCALE, block=(2, 128), implementation="cuda"),
            ValueError,
            r"'scale'.*want .I, J. with I=2 .from 'x' and block=.2, 128",
        ),
        (
            lambda: dequantize_fp8(CODES, SCALE[:2], block=(2, 128), implementation="cuda"),
            NotImplementedError,
            "dequantize_fp8: implementation='cuda' is not available here.*'xla'",
        ),
        (lambda: fake_quantize_fp8(CODES), TypeError, "fake_quantize_fp8: argument 'x'"),
        (lambda: fp8_matmul(CODES, None, W, None), TypeError, "fp8_matmul: argument 'a'.*bfloat16"),
        (lambda: fp8_matmul(X, SCALE, W, None), TypeError, "'a' has dtype float32, want float8"),
        (
            lambda: fp8_matmul(CODES, None, W, None),
            TypeError,
            "'a' has .*float32 without 'a_scale'",
        ),
        (
            lambda: fp8_matmul(X, None, CODES, None),
            TypeError,
            "'b' has .*float32 without 'b_scale'",
        ),
        (lambda: fp8_matmul(X, SCALE, W, None), TypeError, "'a' has .*e4m3fn beside 'a_scale'"),
        (lambda: fp8_matmul(X, None, W, SCALE), TypeError, "'b' has .*e4m3fn beside 'b_scale'"),
        (lambda: fp8_matmul(X, None, W.T, None), ValueError, r"'b' .*; did you pass \[F, O\]\?"),
        (lambda: fp8_matmul(X, None, W[:, :5], None), ValueError, r"F=256 \(from 'a'\)$"),
        (lambda: fp8_linear(X, W), ValueError, r"'w' has .*; did you pass \[O, F\]\?"),
        (lambda: LAYER([[1.0]]), TypeError, "Fp8Linear: argument 'inputs' is list, want an array"),
        (lambda: LAYER(X[:, :5]), ValueError, r"Fp8Linear: .*'inputs' has shape .4, 5.*F=256"),
        (lambda: LAYER(X[0, 0]), ValueError, r"Fp8Linear: .*'inputs' has shape \(\), want"),
        (lambda: fp8_matmul(CODES, SCALE[:3], W, None), ValueError, "'a_scale'.*B=4 .from 'a'"),
        (lambda: fp8_matmul(X, None, W[:, :5], None), ValueError, "'b' has shape .8, 5.*F=256"),
        (lambda: fp8_matmul(X, None, W[None], None), ValueError, "'b' has shape .1, 8, 256"),
        (lambda: fp8_matmul(X, None, CODES, SCALE), ValueError, "'b_scale'.*I=1 .from O in blocks"),
        (lambda: fp8_matmul(X, None, W, SCALE), TypeError, "'b' has dtype float32"),
        (lambda: fp8_matmul(X, None, W, None, dtype=np.int32), ValueError, "'dtype' is 'int32'"),
        (lambda: fp8_linear(CODES, W.T), TypeError, "fp8_linear: argument 'x'.*bfloat16"),
        (lambda: fp8_linear(X, W), ValueError, "'w' has shape .8, 256.*F=256"),
        (lambda: fp8_linear(X, W.T, dtype=np.int32), ValueError, "'dtype' is 'int32'"),
        (lambda: fp8_linear(X, W.T, power_of_two_scale=0), TypeError, "'power_of_two_scale' is 0"),
        (
            lambda: fp8_linear(X, W.T, implementation="cuda"),
            NotImplementedError,
            "fp8_linear: implementation='cuda' is not available here.*'xla'",
        ),
        (
            lambda: jax.grad(lambda x: fp8_matmul(x, None, W, None, implementation="cuda").sum())(
                X
            ),
            NotImplementedError,
            "fp8_matmul: implementation='cuda' is not available here.*'xla'",
        ),
    ],
)
def test_wrong_arguments_are_refused(
    call: Any, error: Any, message: str, without_kernels: None
) -> None:
    with pytest.raises(error, match=message):
        call()


def test_a_gradient_through_the_codes_is_refused() -> None:
    x = jnp.ones((2, 4))
    through = lambda x: dequantize_fp8(*quantize_fp8(x)).sum()  # noqa: E731
    with pytest.raises(TypeError, match=r"quantize_fp8.*fake_quantize_fp8.*stop_gradient"):
        jax.grad(through)(x)
    with pytest.raises(TypeError, match="quantize_fp8"):
        jax.grad(lambda x: quantize_fp8(x)[1].sum())(x)
    frozen = jax.grad(lambda x: (x * through(jax.lax.stop_gradient(x))).sum())(x)
    np.testing.assert_array_equal(np.asarray(frozen), np.full((2, 4), 8.0))
    unused = jax.grad(lambda x: ((x * x).sum(), quantize_fp8(x)), has_aux=True)(x)[0]
    np.testing.assert_array_equal(np.asarray(unused), 2 * np.asarray(x))
