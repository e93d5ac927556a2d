"""The FP8 linear layer in XLA, and the calls of its kernels."""

from __future__ import annotations

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.compare import assert_matches
from support.fp8 import SCALES, random
from support.oracles import fp8 as oracle

import jax_dsa
from jax_dsa import dequantize_fp8, fp8_linear, quantize_fp8
from jax_dsa.core import ffi
from jax_dsa.ops.fp8_linear import cuda as linear_kernels
from jax_dsa.ops.fp8_linear import spec as linear
from jax_dsa.ops.fp8_linear import xla as linear_xla
from jax_dsa.ops.quantize_fp8 import spec as quantize_fp8_spec
from jax_dsa.ops.quantize_fp8 import xla as quantize_fp8_xla


@pytest.mark.parametrize(
    ("rows", "k", "n"), [((3,), 256, 256), ((2, 75), 130, 200), ((1,), 1, 1)], ids=str
)
@SCALES
def test_linear_matches_oracle(
    rows: tuple, k: int, n: int, power_of_two_scale: bool, rng: np.random.Generator
) -> None:
    x, w, dy = random(rng, *rows, k), random(rng, k, n), random(rng, *rows, n)
    want = oracle.linear(x, w, dy, power_of_two_scale)
    y, vjp = jax.vjp(
        lambda x, w: fp8_linear(x, w, power_of_two_scale=power_of_two_scale, implementation="xla"),
        *map(jnp.asarray, (x, w)),
    )
    for got, values in zip((y, *vjp(jnp.asarray(dy))), want, strict=True):
        assert_matches(got, values.astype(np.float32), 1e-5)


@pytest.mark.parametrize("implementation", ["xla", "plain"])
def test_small_gradients_are_as_precise_as_large_ones(
    implementation: str, rng: np.random.Generator
) -> None:
    """The gradients of a mean over many tokens are small."""
    x, w, dy = (jnp.asarray(random(rng, *s)) for s in ((70, 200), (200, 130), (70, 130)))
    with jax_dsa.plain_xla() if implementation == "plain" else contextlib.nullcontext():
        _, vjp = jax.vjp(lambda x, w: fp8_linear(x, w, implementation="xla"), x, w)
        for large, small in zip(vjp(dy), vjp(dy * 2.0**-40), strict=True):
            np.testing.assert_array_equal(np.asarray(small) * 2.0**40, large)


@pytest.mark.parametrize("w_dtype", [jnp.float32, jnp.bfloat16])
def test_linear_gradients_have_their_operands_dtypes(
    w_dtype: Any, rng: np.random.Generator
) -> None:
    x = jnp.asarray(random(rng, 2, 9, 140), jnp.bfloat16)
    w = jnp.asarray(random(rng, 140, 130), w_dtype)
    y, vjp = jax.vjp(lambda x, w: fp8_linear(x, w), x, w)
    assert y.dtype == jnp.bfloat16 and fp8_linear(x, w, dtype=jnp.float32).dtype == jnp.float32
    dy = jnp.asarray(random(rng, *y.shape), y.dtype)
    dx, dw = vjp(dy)
    assert dx.dtype == x.dtype and dw.dtype == w.dtype
    want = oracle.linear(*(np.asarray(a) for a in (x, w, dy)))
    assert_matches(np.asarray(dx, np.float64), want[1], 1e-2)
    assert_matches(np.asarray(dw, np.float64), want[2], 1e-2 if w_dtype != jnp.float32 else 1e-5)


def test_linear_gradients_of_features_of_different_sizes(rng: np.random.Generator) -> None:
    """Compares with exact products. Columns of dy differ in size by up to 2^11, rows by up to 2^8.

    An element of e4m3 is off by 2.6 % on average, so that a product is off by 3.7 %.
    """
    x, w, dy = (rng.normal(size=s) for s in ((512, 256), (256, 384), (512, 384)))
    dy *= np.exp2(-rng.integers(0, 9, (512, 1)) - np.arange(384) % 12)
    _, vjp = jax.vjp(fp8_linear, *(jnp.asarray(a, jnp.float32) for a in (x, w)))
    dx, dw = vjp(jnp.asarray(dy, jnp.float32))
    for got, want, axis in ((dx, dy @ w.T, 1), (dw, x.T @ dy, 0)):
        error = np.linalg.norm(np.asarray(got) - want, axis=axis) / np.linalg.norm(want, axis=axis)
        assert error.max() < 0.06


def test_linear_on_special_values(rng: np.random.Generator) -> None:
    """A NaN or an infinity reaches the results that its block contributes to, and no others. For dw
    a block of dy has 128 columns.
    """
    x, w, dy = random(rng, 300, 256), random(rng, 256, 256), random(rng, 300, 256)
    x[1, 130], dy[2, 5], x[299], dy[299] = np.nan, np.inf, 0.0, 0.0
    y, vjp = jax.vjp(fp8_linear, *map(jnp.asarray, (x, w)))
    dx, dw = vjp(jnp.asarray(dy))
    for got, bad in ((y, 1), (dx, 2)):
        nans = np.isnan(np.asarray(got))
        assert nans[bad].all() and nans.sum() == 256
        assert not np.asarray(got)[299].any()
    nans = np.zeros((256, 256), bool)
    nans[130], nans[:, :128] = True, True
    np.testing.assert_array_equal(np.isnan(np.asarray(dw)), nans)


@pytest.mark.parametrize("shape", [(0, 5, 7), (4, 0, 7), (4, 5, 0)], ids=str)
def test_linear_on_empty_arrays(shape: tuple) -> None:
    m, k, n = shape
    y, vjp = jax.vjp(fp8_linear, jnp.ones((2, m, k)), jnp.ones((k, n)))
    assert y.shape == (2, m, n) and not y.any()
    dx, dw = vjp(jnp.ones_like(y))
    assert dx.shape == (2, m, k) and dw.shape == (k, n)
    assert not np.asarray(dx).any() or n > 0
    assert not np.asarray(dw).any() or m > 0


def test_linear_calls_the_kernels_along_the_contracted_axes(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks layouts and scales of all three matmuls. XLA replaces the FFI handlers."""

    def call(target: str, operands: Any, avals: Any, **attrs: Any) -> list[jax.Array]:
        if target in ("jax_dsa.quantize_fp8_transpose.v2", "jax_dsa.quantize_fp8_columns.v1"):
            (x,) = operands
            power = bool(attrs["power_of_two_scale"])
            both = target == "jax_dsa.quantize_fp8_transpose.v2"
            turned = x.swapaxes(1, 2)
            blocks = [(x, (1, 128)), (turned, (128, 128))] if both else [(turned, (1, 128))]
            results = []
            for a, block in blocks:
                options = quantize_fp8_spec.Options(block, "", "", power, min_amax=1e-20)
                results += quantize_fp8_xla.quantize_fp8(options, quantize_fp8_spec.Operands(a))
        elif target == "jax_dsa.quantize_fp8_tiles_transpose.v1":
            power, tiles = bool(attrs["power_of_two_scale"]), (128, 128)
            codes, scale = quantize_fp8(
                operands[0], block=tiles, power_of_two_scale=power, implementation="xla"
            )
            results = [codes, codes.swapaxes(1, 2), scale]
        else:
            assert target == "jax_dsa.fp8_matmul.v1"
            a, a_scale, b, b_scale = operands
            assert a.shape[-1] == b.shape[-1] and a.shape[-1] % 16 == 0
            left = dequantize_fp8(a, a_scale, implementation="xla")
            right = dequantize_fp8(b, b_scale, block=(128, 128), implementation="xla")
            (aval,) = avals
            results = [jnp.einsum("b...k,bnk->b...n", left, right).astype(aval.dtype)]
        for y, aval in zip(results, avals, strict=True):
            assert y.shape == aval.shape and y.dtype == aval.dtype
        return results

    monkeypatch.setattr(ffi, "call", call)
    x, w, dy = (
        jnp.asarray(random(rng, *s)) for s in ((2, 3, 50, 150), (2, 150, 210), (2, 3, 50, 210))
    )
    quantization = quantize_fp8_spec.Options
    options = linear.Options(
        dtype=jnp.float32,
        w_dtype=jnp.float32,
        x=quantization((1, 128), "", ""),
        w=quantization((128, 128), "", ""),
        rows="",
        k="",
        k_blocks="",
        n="",
        n_blocks="",
    )
    codes = linear.Codes(*quantize_fp8(x, implementation="xla"))
    values = linear.WeightValues(w)
    _, transposed, scale = weights = linear_xla.fp8_linear_weights(options, values)
    passes = {
        "weights": (values,),
        "fwd": (codes, linear.TransposedWeights(transposed, scale)),
        "bwd": (linear.Inputs(x), linear.Weights(weights.w, scale), linear.Product(dy)),
    }
    for name, operands in passes.items():
        cuda, xla = (
            getattr(module, f"fp8_linear_{name}") for module in (linear_kernels, linear_xla)
        )
        want = xla(options, *operands)
        avals = type(want)(*(jax.ShapeDtypeStruct(y.shape, y.dtype) for y in want))
        assert_matches(cuda(options, avals, *operands), want, 1e-6)
