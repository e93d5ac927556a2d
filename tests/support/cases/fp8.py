"""Cases of the FP8 operators for the tests of transforms and sharding.

The route "head" shards the last axis of the result.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jax_dsa import dequantize_fp8, fake_quantize_fp8, fp8_linear, fp8_matmul, quantize_fp8
from support.cases import TransformCase

B, T, C, N, K = 8, 8, 128, 2048, 8
BLOCK = 16


def make_x(rng: np.random.Generator, *shape: int) -> jnp.ndarray:
    scale = np.exp(rng.normal(size=(*shape[:-1], 1)))
    return jnp.asarray(rng.normal(size=shape) * scale, jnp.float32)


def make_codes(rng: np.random.Generator) -> tuple:
    return quantize_fp8(make_x(rng, B, T, C), block=BLOCK)


def quantize(x, power_of_two_scale):
    return quantize_fp8(x, block=BLOCK, power_of_two_scale=power_of_two_scale)


# The square makes the second derivative nonzero, so that JAX computes it.
def fake_quantize(x):
    return fake_quantize_fp8(x, block=(4, BLOCK)) ** 2


def matmul(a, b):
    return fp8_matmul(a, None, b, None, power_of_two_scale=True)


# On a mesh, blocks along the rows are those of each device. With power-of-two scales the results
# hardly depend on that.
def linear(x, w):
    return fp8_linear(x, w, power_of_two_scale=True)


def quantized_matmul(a, a_scale, b, b_scale):
    return fp8_matmul(a, a_scale, b, b_scale, dtype=jnp.float32)


def make_quantized_operands(rng: np.random.Generator) -> tuple:
    weights = quantize_fp8(make_x(rng, N, K), block=(128, 128))
    return *quantize_fp8(make_x(rng, B, T, K)), *weights


def routes(arrays: int) -> dict:
    specs = {"batch": P("x"), "query": P(None, "x"), "head": P(None, None, "x")}
    return {route: (spec,) * arrays for route, spec in specs.items()}


CASES = [
    TransformCase(
        "quantize_fp8",
        functools.partial(quantize, power_of_two_scale=False),
        lambda rng: (make_x(rng, B, T, C),),
        (),
        routes(1),
    ),
    TransformCase(
        "quantize_fp8-power-of-two-ragged",
        functools.partial(quantize, power_of_two_scale=True),
        lambda rng: (make_x(rng, B, T, C - 3),),
        (),
        {route: specs for route, specs in routes(1).items() if route != "head"},
    ),
    TransformCase(
        "dequantize_fp8",
        functools.partial(dequantize_fp8, block=BLOCK),
        make_codes,
        (1,),
        routes(2),
    ),
    TransformCase(
        "fake_quantize_fp8",
        fake_quantize,
        lambda rng: (make_x(rng, B, 4 * T, C),),
        (0,),
        routes(1),
    ),
    TransformCase(
        "fp8_matmul",
        matmul,
        lambda rng: (make_x(rng, B, T, K), make_x(rng, N, K)),
        (0, 1),
        {
            "batch": (P("x"), P()),
            "query": (P(None, "x"), P()),
            "head": (P(), P("x")),
        },
    ),
    TransformCase(
        "fp8_linear",
        linear,
        lambda rng: (make_x(rng, B, T, 2 * K), make_x(rng, 2 * K, N)),
        (0, 1),
        {
            "batch": (P("x"), P()),
            "query": (P(None, "x"), P()),
            "head": (P(), P(None, "x")),
        },
    ),
    TransformCase(
        "fp8_matmul-quantized",
        quantized_matmul,
        make_quantized_operands,
        (),
        {
            "batch": (P("x"), P("x"), P(), P()),
            "query": (P(None, "x"), P(None, "x"), P(), P()),
            "head": (P(), P(), P("x"), P("x")),
        },
    ),
]
