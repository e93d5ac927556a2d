"""The FP8 kernels against the XLA implementations, on the CPU and on the GPU."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from support.fp8 import DTYPES, EXACT_DTYPES, SCALES, assert_same, every_quotient, random
from support.oracles import fp8 as oracle

from jax_dsa import dequantize_fp8, fp8_linear, fp8_matmul, quantize_fp8

pytestmark = pytest.mark.gpu

# The error of the tensor cores' sums, relative to the sum of the terms' magnitudes. Hopper
# truncates each of 32 products 13 bits below the largest.
TENSOR_CORE_ERROR = 1.5e-3


def on_cpu(x: np.ndarray, **options: Any) -> tuple:
    """Quantises in XLA on the CPU."""
    with jax.default_device(jax.devices("cpu")[0]):
        return quantize_fp8(jnp.asarray(x), implementation="xla", **options)


@DTYPES
@SCALES
@pytest.mark.parametrize(
    "shape",
    [(1, 128), (62, 7168), (213, 576), (65, 136), (33, 129), (7, 5), (1, 1), (2, 3, 4, 1000)],
    ids=str,
)
def test_quantize_equals_xla(
    dtype: Any, power_of_two_scale: bool, shape: tuple, rng: np.random.Generator
) -> None:
    x = random(rng, *shape, dtype=dtype)
    x.reshape(-1)[rng.integers(0, x.size, 3)] = [np.nan, np.inf, -0.0]
    options = {"power_of_two_scale": power_of_two_scale}
    got = quantize_fp8(jnp.asarray(x), implementation="cuda", **options)
    assert_same(got, on_cpu(x, **options))
    assert_same(quantize_fp8(jnp.asarray(x), implementation="xla", **options), got)


@EXACT_DTYPES
@SCALES
def test_every_quotient_rounds_as_ieee_division(dtype: Any, power_of_two_scale: bool) -> None:
    x = every_quotient(dtype)
    for implementation in ("cuda", "xla"):
        got = quantize_fp8(
            jnp.asarray(x), power_of_two_scale=power_of_two_scale, implementation=implementation
        )
        assert_same(got, oracle.quantize(x, 128, power_of_two_scale))


@pytest.mark.parametrize("shape", [(0,), (0, 128), (4, 0)])
def test_quantize_empty_arrays(shape: tuple) -> None:
    codes, scales = quantize_fp8(jnp.zeros(shape, jnp.bfloat16), implementation="cuda")
    assert codes.shape == shape and scales.shape == (*shape[:-1], -(-shape[-1] // 128))


def test_quantize_runs_its_kernel_by_default(rng: np.random.Generator) -> None:
    x = jnp.asarray(random(rng, 8, 300))
    assert "jax_dsa.quantize_fp8.v1" in jax.jit(quantize_fp8).lower(x).compile().as_text()
    assert "jax_dsa.quantize_fp8.v1" not in (
        jax.jit(lambda x: quantize_fp8(x, block=64)).lower(x).compile().as_text()
    )


@pytest.mark.several_gpus
def test_quantize_under_vmap_and_on_meshes(rng: np.random.Generator) -> None:
    x = random(rng, 8, 6, 300, dtype=ml_dtypes.bfloat16)
    want = on_cpu(x)
    kernel = lambda x: quantize_fp8(x, implementation="cuda")  # noqa: E731
    assert_same(jax.vmap(jax.vmap(kernel))(jnp.asarray(x)), want)
    assert_same(jax.jit(jax.vmap(kernel, in_axes=1, out_axes=1))(jnp.asarray(x)), want)
    gpus = jax.devices()
    count = max(n for n in (1, 2, 4, 8) if n <= len(gpus))
    for axis_type in (AxisType.Auto, AxisType.Explicit):
        mesh = jax.make_mesh((count,), ("x",), axis_types=(axis_type,), devices=gpus[:count])
        with jax.set_mesh(mesh):
            sharded = jax.device_put(x, NamedSharding(mesh, P("x")))
            assert_same(jax.jit(kernel)(sharded), want)
            mapped = jax.shard_map(kernel, mesh=mesh, in_specs=P("x"), out_specs=P("x"))
            assert_same(jax.jit(mapped)(sharded), want)


def test_quantize_more_than_two_to_the_31_elements() -> None:
    rows = 2**31 // 7168 + 1000
    x = jax.random.normal(jax.random.key(0), (rows, 7168), jnp.bfloat16)
    codes, scales = jax.jit(lambda x: quantize_fp8(x, implementation="cuda"))(x)
    tail = slice(rows - 500, rows)
    assert_same((codes[tail], scales[tail]), on_cpu(np.asarray(x[tail])))


SHAPES_2D = pytest.mark.parametrize(
    "shape", [(256, 384), (130, 200), (77, 131), (3, 5), (1, 1), (2, 3, 300, 136)], ids=str
)


@DTYPES
@SCALES
@SHAPES_2D
def test_quantize_tiles_equals_xla(
    dtype: Any, power_of_two_scale: bool, shape: tuple, rng: np.random.Generator
) -> None:
    x = random(rng, *shape, dtype=dtype)
    x.reshape(-1)[rng.integers(0, x.size, 3)] = [np.nan, np.inf, -0.0]
    options = {"block": (128, 128), "power_of_two_scale": power_of_two_scale}
    got = quantize_fp8(jnp.asarray(x), implementation="cuda", **options)
    assert_same(got, on_cpu(x, **options))


@DTYPES
@SHAPES_2D
@pytest.mark.parametrize("block", [(1, 128), (128, 128)], ids=str)
def test_dequantize_equals_xla(
    dtype: Any, shape: tuple, block: tuple, rng: np.random.Generator
) -> None:
    x = random(rng, *shape)
    x.reshape(-1)[rng.integers(0, x.size)] = np.nan
    codes = quantize_fp8(jnp.asarray(x), block=block)
    got, want = (
        dequantize_fp8(*codes, block=block, dtype=dtype, implementation=i) for i in ("cuda", "xla")
    )
    assert got.dtype == dtype
    np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(want, np.float32))


@pytest.mark.parametrize("shape", [(0, 128), (4, 0), (2, 0, 7)], ids=str)
def test_dequantize_and_matmul_empty_arrays(shape: tuple) -> None:
    for block in ((1, 128), (128, 128)):
        codes = quantize_fp8(jnp.zeros(shape, jnp.bfloat16), block=block)
        assert dequantize_fp8(*codes, block=block, implementation="cuda").shape == shape
    w = jnp.zeros((6, shape[-1]), jnp.bfloat16)
    out = fp8_matmul(jnp.ones(shape, jnp.bfloat16), None, w, None, implementation="cuda")
    assert out.shape == (*shape[:-1], 6) and not np.asarray(out, np.float32).any()


def product(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the product of the quantised operands in float64, and the sums of the magnitudes."""
    a = np.asarray(dequantize_fp8(*quantize_fp8(jnp.asarray(a))), np.float64)
    tiles = (128, 128)
    b_codes = quantize_fp8(jnp.asarray(b), block=tiles)
    b = np.asarray(dequantize_fp8(*b_codes, block=tiles), np.float64)
    return a @ b.swapaxes(-1, -2), np.abs(a) @ np.abs(b).swapaxes(-1, -2)


@DTYPES
@pytest.mark.parametrize(
    "shape",
    [
        (3, 256, 256),
        (5, 130, 300),
        (1, 1, 1),
        (16, 2112, 7168),
        (30, 300, 1039),
        (61, 500, 1000),
        (128, 300, 1000),
        (300, 400, 656),
        (1000, 1500, 520),
        (700, 2049, 1039),
    ],
    ids=str,
)
def test_matmul(dtype: Any, shape: tuple, rng: np.random.Generator) -> None:
    m, n, k = shape
    small = 1e-2 if dtype == np.float16 else 1.0  # otherwise products exceed float16
    a, b = (random(rng, m, k) * small).astype(dtype), (random(rng, n, k) * small)
    if m > 4 and n > 4:
        a[2, k // 2] = b[3, 0] = np.nan  # in one block of each operand
    want, size = product(a, b)
    a, b = jnp.asarray(a), jnp.asarray(b)
    got = fp8_matmul(a, None, b, None, implementation="cuda")
    assert got.dtype == dtype
    got = np.asarray(got, np.float64)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    allowed = TENSOR_CORE_ERROR * size + float(jnp.finfo(dtype).eps) * np.abs(want) + 1e-6
    assert (np.abs(got - want) <= allowed)[~np.isnan(want)].all()
    again = fp8_matmul(a, None, b, None, implementation="cuda")
    np.testing.assert_array_equal(np.asarray(again, np.float64), got)


@pytest.mark.several_gpus
def test_matmul_under_vmap_and_on_meshes(rng: np.random.Generator) -> None:
    a, b = random(rng, 8, 40, 300), random(rng, 8, 256, 300)
    want, size = product(a, b)

    def check(got: jax.Array) -> None:
        assert (np.abs(np.asarray(got, np.float64) - want) <= 3e-4 * size + 1e-6).all()

    kernel = lambda a, b: fp8_matmul(a, None, b, None, implementation="cuda")  # noqa: E731
    check(jax.vmap(kernel)(jnp.asarray(a), jnp.asarray(b)))
    gpus = jax.devices()
    count = max(n for n in (1, 2) if n <= len(gpus))
    want, size = product(a, b[0])
    for axis_type in (AxisType.Auto, AxisType.Explicit):
        mesh = jax.make_mesh((count,), ("x",), axis_types=(axis_type,), devices=gpus[:count])
        with jax.set_mesh(mesh):
            for specs in ((P("x"), P()), (P(), P("x"))):
                placed = (
                    jax.device_put(x, NamedSharding(mesh, p))
                    for x, p in zip((a, b[0]), specs, strict=True)
                )
                check(jax.jit(kernel)(*placed))


def test_matmul_runs_its_kernels_by_default(rng: np.random.Generator) -> None:
    x, w = (jnp.asarray(random(rng, n, 300)) for n in (8, 16))
    text = jax.jit(lambda x, w: fp8_matmul(x, None, w, None)).lower(x, w).compile().as_text()
    for target in ("quantize_fp8", "quantize_fp8_tiles", "fp8_matmul"):
        assert f"jax_dsa.{target}.v1" in text


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize(
    ("rows", "k", "n"),
    [
        ((3,), 256, 256),
        ((2, 75), 130, 200),
        ((1,), 1, 1),
        ((4, 300), 1000, 520),
        ((2048,), 512, 257),
    ],
    ids=str,
)
def test_linear(rows: tuple, k: int, n: int, dtype: Any, rng: np.random.Generator) -> None:
    """Compares with the product of the same codes in float64."""
    x, dy = (jnp.asarray(random(rng, *rows, size), dtype) for size in (k, n))
    w = jnp.asarray(random(rng, k, n))
    y, vjp = jax.vjp(lambda x, w: fp8_linear(x, w, implementation="cuda"), x, w)
    got = (y, *vjp(dy))
    operands = oracle.linear_operands(*(np.asarray(a) for a in (x, w, dy)))
    for out, (a, b) in zip(got, operands, strict=True):
        want, size = (a @ b).reshape(out.shape), (np.abs(a) @ np.abs(b)).reshape(out.shape)
        allowed = TENSOR_CORE_ERROR * size + float(jnp.finfo(out.dtype).eps) * np.abs(want) + 1e-6
        assert (np.abs(np.asarray(out, np.float64) - want) <= allowed).all()
    again = vjp(dy)
    for first, second in zip(got[1:], again, strict=True):
        np.testing.assert_array_equal(np.asarray(first), np.asarray(second))


def test_linear_runs_its_kernels_by_default(rng: np.random.Generator) -> None:
    x, w = (jnp.asarray(random(rng, *s)) for s in ((8, 300), (300, 16)))
    total = lambda x, w: (fp8_linear(x, w) ** 2).sum()  # noqa: E731
    text = jax.jit(jax.grad(total, (0, 1))).lower(x, w).compile().as_text()
    variants = (".v1", "_tiles_transpose.v1", "_transpose.v2", "_columns.v1")
    for target in ("fp8_matmul.v1", *(f"quantize_fp8{variant}" for variant in variants)):
        assert f"jax_dsa.{target}" in text
