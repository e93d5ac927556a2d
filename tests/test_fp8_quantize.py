"""FP8 quantisation, dequantisation and fake quantisation in XLA."""

from __future__ import annotations

from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from support.compare import Variable, assert_matches
from support.fp8 import (
    DTYPES,
    EXACT_DTYPES,
    SCALES,
    assert_same,
    bits,
    every_quotient,
    random,
)
from support.oracles import fp8 as oracle

import jax_dsa
from jax_dsa import dequantize_fp8, fake_quantize_fp8, fp8_matmul, quantize_fp8

E4M3_HALF_STEP = 2.0**-4  # half the distance of two codes, relative to the smaller one


@DTYPES
@SCALES
@pytest.mark.parametrize("cols", [1, 7, 128, 213, 384])
def test_quantize_matches_oracle(
    dtype: Any, power_of_two_scale: bool, cols: int, rng: np.random.Generator
) -> None:
    x = random(rng, 5, 3, cols, dtype=dtype)
    got = quantize_fp8(jnp.asarray(x), power_of_two_scale=power_of_two_scale)
    assert got[0].dtype == jnp.float8_e4m3fn and got[0].shape == x.shape
    assert_same(got, oracle.quantize(x, 128, power_of_two_scale))


@EXACT_DTYPES
@SCALES
def test_every_quotient_rounds_as_ieee_division(dtype: Any, power_of_two_scale: bool) -> None:
    x = every_quotient(dtype)
    want = oracle.quantize(x, 128, power_of_two_scale)
    assert_same(quantize_fp8(jnp.asarray(x), power_of_two_scale=power_of_two_scale), want)
    # Each block appears twice, as a block of two rows. In this case XLA would multiply by the
    # reciprocal of the scale.
    twice = jnp.stack([x, x], axis=1)
    codes, scales = jax.jit(
        lambda x: quantize_fp8(x, block=(2, 128), power_of_two_scale=power_of_two_scale)
    )(twice)
    for row in range(2):
        assert_same((codes[:, row], scales[:, 0]), want)


@pytest.mark.parametrize("block", [1, 3, 16, 500])
def test_other_block_sizes(block: int, rng: np.random.Generator) -> None:
    x = random(rng, 4, 50)
    assert_same(quantize_fp8(jnp.asarray(x), block=block), oracle.quantize(x, block))


@pytest.mark.parametrize("shape", [(256, 128), (130, 200), (3, 5)])
def test_blocks_of_128_rows(shape: tuple, rng: np.random.Generator) -> None:
    x = random(rng, *shape)
    got = quantize_fp8(jnp.asarray(x), block=(128, 128))
    assert_same(got, oracle.quantize_tiles(x, 128, 128))
    stacked = quantize_fp8(jnp.asarray(x)[None], block=(128, 128))
    assert_same((stacked[0][0], stacked[1][0]), got)


@pytest.mark.parametrize("power_of_two_scale", [False, True])
def test_special_values(power_of_two_scale: bool) -> None:
    x = np.zeros((5, 300), np.float32)
    x[0, :4] = [-0.0, 1e-40, -1e-40, 2e-5]  # smaller than the minimum of amax
    x[1, 130] = np.nan
    x[2, 5] = -np.inf
    x[3, :2] = [3.4e38, -3.4e38]
    x[:, 299] = 1.0
    codes, scales = quantize_fp8(jnp.asarray(x), power_of_two_scale=power_of_two_scale)
    nans = np.zeros((5, 300), bool)
    nans[1, 128:256] = nans[2, :128] = True
    np.testing.assert_array_equal(np.isnan(np.asarray(codes, np.float32)), nans)
    np.testing.assert_array_equal(np.isnan(scales), nans[:, [0, 128, 256]])
    finite = [0, 3, 4]
    want = oracle.quantize(x[finite], power_of_two_scale=power_of_two_scale)
    assert_same((np.asarray(codes)[finite], np.asarray(scales)[finite]), want)
    assert bits(codes)[0, 0] == 0x80  # -0 stays -0


def test_nan_in_wide_rows(rng: np.random.Generator) -> None:
    """On some CPUs, XLA's own maximum of floats ignores NaN in rows as wide as these."""
    x = random(rng, 62, 7168)
    x[5, 1000] = np.nan
    _, scale = quantize_fp8(jnp.asarray(x), implementation="xla")
    np.testing.assert_array_equal(np.argwhere(np.isnan(np.asarray(scale))), [[5, 1000 // 128]])


@pytest.mark.parametrize("shape", [(0,), (0, 128), (4, 0), (2, 0, 7)])
def test_empty_arrays(shape: tuple) -> None:
    codes, scales = quantize_fp8(jnp.zeros(shape, jnp.bfloat16))
    assert codes.shape == shape
    assert scales.shape == (*shape[:-1], -(-shape[-1] // 128))
    assert dequantize_fp8(codes, scales).shape == shape
    w = jnp.zeros((6, shape[-1]), jnp.bfloat16)
    out = fp8_matmul(codes, scales, w, None)
    assert out.shape == (*shape[:-1], 6) and not np.asarray(out, np.float32).any()


def test_result_is_independent_of_rank(rng: np.random.Generator) -> None:
    x = jnp.asarray(random(rng, 24, 150))
    codes, scales = quantize_fp8(x)
    one = quantize_fp8(x[0])
    assert_same(one, (codes[0], scales[0]))
    many = quantize_fp8(x.reshape(2, 3, 1, 4, 150))
    assert_same((many[0].reshape(24, 150), many[1].reshape(24, 2)), (codes, scales))


@hypothesis.given(
    shape=st.tuples(st.integers(1, 4), st.integers(1, 40)),
    block=st.integers(1, 50),
    power_of_two_scale=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
@hypothesis.settings(max_examples=8, deadline=None)
def test_round_trip_is_within_half_a_step(
    shape: tuple, block: int, power_of_two_scale: bool, seed: int
) -> None:
    x = random(np.random.default_rng(seed), *shape)
    codes, scales = quantize_fp8(jnp.asarray(x), block=block, power_of_two_scale=power_of_two_scale)
    back = dequantize_fp8(codes, scales, block=block)
    # The distance of subnormal codes is 2^-9 times the scale.
    step = np.maximum(
        E4M3_HALF_STEP * np.abs(x), 2.0**-10 * np.repeat(scales, block, 1)[:, : shape[1]]
    )
    assert (np.abs(np.asarray(back) - x) <= step * 1.0001).all()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_dequantize(dtype: Any, rng: np.random.Generator) -> None:
    x = random(rng, 70, 300)
    codes, scales = quantize_fp8(jnp.asarray(x), block=(64, 128), power_of_two_scale=True)
    got = dequantize_fp8(codes, scales, block=(64, 128), dtype=dtype)
    assert got.dtype == dtype
    want = oracle.dequantize(np.asarray(codes), np.asarray(scales), 64, 128)
    np.testing.assert_array_equal(np.asarray(got, np.float64), want)  # also exact in bfloat16


def test_gradient_of_the_scales(rng: np.random.Generator) -> None:
    codes, scales = quantize_fp8(jnp.asarray(random(rng, 3, 20)), block=8)
    weights = jnp.asarray(random(rng, 3, 20))
    got = jax.grad(lambda s: (dequantize_fp8(codes, s, block=8) * weights).sum())(scales)
    product = np.asarray(codes, np.float64) * np.asarray(weights)
    want = np.stack([product[:, j : j + 8].sum(1) for j in (0, 8, 16)], axis=1)
    assert_matches(got, want.astype(np.float32))


@DTYPES
def test_fake_quantize(dtype: Any, rng: np.random.Generator) -> None:
    x = jnp.asarray(random(rng, 6, 200, dtype=dtype))
    want = dequantize_fp8(*quantize_fp8(x), dtype=x.dtype)
    y, vjp = jax.vjp(fake_quantize_fp8, x)
    np.testing.assert_array_equal(np.asarray(y), np.asarray(want))
    ct = jnp.asarray(random(rng, 6, 200, dtype=dtype))
    np.testing.assert_array_equal(np.asarray(vjp(ct)[0]), np.asarray(ct))


def test_fake_quantize_under_transforms(rng: np.random.Generator) -> None:
    x = jnp.asarray(random(rng, 3, 4, 40))
    value = lambda x: fake_quantize_fp8(x, block=16)  # noqa: E731
    loss = lambda x: (value(x) ** 3).sum()  # noqa: E731
    want = 3 * np.asarray(value(x)) ** 2
    assert_matches(jax.jit(jax.vmap(jax.grad(loss)))(x), want)
    assert_matches(jax.grad(lambda x: jax.vmap(loss)(x).sum())(x), want)
    assert_matches(jax.grad(jax.checkpoint(loss))(x), want)
    total = lambda x: jax.lax.scan(lambda c, y: (c + loss(y), None), 0.0, x)[0]  # noqa: E731
    assert_matches(jax.grad(total)(x), want)
    with pytest.raises(NotImplementedError, match="plain_xla"):
        jax.grad(lambda x: jax.grad(loss)(x).sum())(x)
    with jax_dsa.plain_xla():
        assert_matches(jax.grad(loss)(x), want)
        second = jax.grad(lambda x: jax.grad(loss)(x).sum())(x)
        assert_matches(second, 6 * np.asarray(value(x)))


def test_array_like_arguments(rng: np.random.Generator) -> None:
    x, w = random(rng, 2, 3, 20), random(rng, 5, 20)
    want = quantize_fp8(x, block=(2, 8))
    assert_same(quantize_fp8(Variable(x), block=(2, 8)), want)
    got = dequantize_fp8(*map(Variable, want), block=(2, 8))
    np.testing.assert_array_equal(got, dequantize_fp8(*want, block=(2, 8)))
    np.testing.assert_array_equal(fake_quantize_fp8(Variable(x)), fake_quantize_fp8(x))
    got = fp8_matmul(*map(Variable, quantize_fp8(x)), Variable(w), None)
    np.testing.assert_array_equal(got, fp8_matmul(*quantize_fp8(x), w, None))
