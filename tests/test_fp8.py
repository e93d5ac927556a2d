"""FP8 quantisation, its inverse, its straight-through form, and the matmul."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from support.compare import Variable, assert_matches
from support.oracles import fp8 as oracle

import jax_dsa
from jax_dsa import dequantize_fp8, fake_quantize_fp8, fp8_linear, fp8_matmul, quantize_fp8
from jax_dsa.core import ffi
from jax_dsa.ops.fp8_linear import cuda as linear_kernels
from jax_dsa.ops.fp8_linear import spec as linear
from jax_dsa.ops.fp8_linear import xla as linear_xla
from jax_dsa.ops.fp8_matmul import cuda as matmul_kernels
from jax_dsa.ops.fp8_matmul.spec import Operands, Product
from jax_dsa.ops.quantize_fp8 import spec as quantize_fp8_spec
from jax_dsa.ops.quantize_fp8 import xla as quantize_fp8_xla

DTYPES = pytest.mark.parametrize(
    "dtype", [ml_dtypes.bfloat16, np.float16, np.float32], ids=["bf16", "f16", "f32"]
)
MODES = pytest.mark.parametrize("power_of_two_scale", [False, True], ids=["any", "pow2"])
E4M3_STEP = 2.0**-4  # half a step between codes, relative to the lower one
# Of the sum of magnitudes: Hopper cuts each of 32 products off 13 bits below the largest.
TENSOR_CORE = 1.5e-3


def random(rng: np.random.Generator, *shape: int, dtype: Any = np.float32) -> np.ndarray:
    """Rows of very different sizes."""
    size = np.exp(2 * rng.normal(size=(*shape[:-1], 1)))
    return (rng.normal(size=shape) * size).clip(-6e4, 6e4).astype(dtype)


def bits(codes: Any) -> np.ndarray:
    """Codes as integers; a NaN's sign does not matter."""
    raw = np.asarray(codes).view(np.uint8)
    return np.where(raw & 0x7F == 0x7F, 0x7F, raw)


def assert_same(got: tuple, want: tuple) -> None:
    np.testing.assert_array_equal(np.asarray(got[1]), np.asarray(want[1]))
    np.testing.assert_array_equal(bits(got[0]), bits(want[0]))


@DTYPES
@MODES
@pytest.mark.parametrize("cols", [1, 7, 128, 213, 384])
def test_matches_oracle(
    dtype: Any, power_of_two_scale: bool, cols: int, rng: np.random.Generator
) -> None:
    x = random(rng, 5, 3, cols, dtype=dtype)
    got = quantize_fp8(jnp.asarray(x), power_of_two_scale=power_of_two_scale)
    assert got[0].dtype == jnp.float8_e4m3fn and got[0].shape == x.shape
    assert_same(got, oracle.quantize(x, 128, power_of_two_scale))


def every_quotient(dtype: Any) -> np.ndarray:
    """Blocks that divide every significand by the scale of every amax significand, up to powers of
    two: amax first, then up to 127 others.
    """
    count = 128 if dtype == ml_dtypes.bfloat16 else 1024
    significands = 1 + np.arange(count) / count
    rows = np.resize(significands / 2, (-(-count // 127), 127))
    blocks = np.stack([np.insert(rows, 0, amax, axis=1) for amax in significands])
    return blocks.reshape(-1, 128).astype(dtype)


EXACT = pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16], ids=["bf16", "f16"])


@EXACT
@MODES
def test_every_quotient_rounds_as_ieee_division(dtype: Any, power_of_two_scale: bool) -> None:
    x = every_quotient(dtype)
    want = oracle.quantize(x, 128, power_of_two_scale)
    assert_same(quantize_fp8(jnp.asarray(x), power_of_two_scale=power_of_two_scale), want)
    # Each block twice, as a tile of two rows: there XLA multiplies by the scale's reciprocal.
    twice = jnp.stack([x, x], axis=1)
    codes, scales = jax.jit(
        lambda x: quantize_fp8(x, block=(2, 128), power_of_two_scale=power_of_two_scale)
    )(twice)
    for row in range(2):
        assert_same((codes[:, row], scales[:, 0]), want)


@pytest.mark.parametrize("block", [1, 3, 16, 500])
def test_other_blocks(block: int, rng: np.random.Generator) -> None:
    x = random(rng, 4, 50)
    assert_same(quantize_fp8(jnp.asarray(x), block=block), oracle.quantize(x, block))


@pytest.mark.parametrize("shape", [(256, 128), (130, 200), (3, 5)])
def test_tiles(shape: tuple, rng: np.random.Generator) -> None:
    x = random(rng, *shape)
    got = quantize_fp8(jnp.asarray(x), block=(128, 128))
    assert_same(got, oracle.quantize_tiles(x, 128, 128))
    stacked = quantize_fp8(jnp.asarray(x)[None], block=(128, 128))
    assert_same((stacked[0][0], stacked[1][0]), got)


@pytest.mark.parametrize("power_of_two_scale", [False, True])
def test_special_values(power_of_two_scale: bool) -> None:
    x = np.zeros((5, 300), np.float32)
    x[0, :4] = [-0.0, 1e-40, -1e-40, 2e-5]  # smaller than the smallest amax
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


@pytest.mark.parametrize("shape", [(0,), (0, 128), (4, 0), (2, 0, 7)])
def test_empty(shape: tuple) -> None:
    codes, scales = quantize_fp8(jnp.zeros(shape, jnp.bfloat16))
    assert codes.shape == shape
    assert scales.shape == (*shape[:-1], -(-shape[-1] // 128))
    assert dequantize_fp8(codes, scales).shape == shape
    w = jnp.zeros((6, shape[-1]), jnp.bfloat16)
    out = fp8_matmul(codes, scales, w, None)
    assert out.shape == (*shape[:-1], 6) and not np.asarray(out, np.float32).any()


def test_rank_does_not_matter(rng: np.random.Generator) -> None:
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
    # Subnormal codes are 2^-9 of the scale apart.
    step = np.maximum(E4M3_STEP * np.abs(x), 2.0**-10 * np.repeat(scales, block, 1)[:, : shape[1]])
    assert (np.abs(np.asarray(back) - x) <= step * 1.0001).all()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_dequantize(dtype: Any, rng: np.random.Generator) -> None:
    x = random(rng, 70, 300)
    codes, scales = quantize_fp8(jnp.asarray(x), block=(64, 128), power_of_two_scale=True)
    got = dequantize_fp8(codes, scales, block=(64, 128), dtype=dtype)
    assert got.dtype == dtype
    want = oracle.dequantize(np.asarray(codes), np.asarray(scales), 64, 128)
    np.testing.assert_array_equal(np.asarray(got, np.float64), want)  # exact in bf16 too


def test_dequantize_gradient_of_the_scales(rng: np.random.Generator) -> None:
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


def test_codes_on_an_explicit_mesh_are_constants(
    rng: np.random.Generator, cpus: list[jax.Device]
) -> None:
    """Their gradient is zero, and lies where they do."""
    w = jnp.asarray(rng.normal(size=(8, 256)), jnp.float32)
    mesh = jax.make_mesh((8,), ("x",), devices=cpus)
    with jax.set_mesh(mesh):
        x = jax.device_put(
            rng.normal(size=(8, 256)).astype(np.float32), NamedSharding(mesh, P("x"))
        )
        codes, scale = quantize_fp8(x)

        def total(codes: jax.Array) -> jax.Array:
            product = fp8_matmul(codes, scale, w, None, dtype=jnp.float32)
            return product.sum() + dequantize_fp8(codes, scale).sum()

        grad = jax.jit(jax.grad(total))(codes)
        assert grad.sharding == codes.sharding and grad.dtype == codes.dtype
        assert not np.asarray(grad, np.float32).any()


@pytest.mark.parametrize(("m", "n", "k"), [(3, 256, 256), (5, 130, 300), (1, 1, 1)])
def test_matmul_matches_oracle(m: int, n: int, k: int, rng: np.random.Generator) -> None:
    a, b = random(rng, m, k), random(rng, n, k)
    a_codes, a_scales = quantize_fp8(jnp.asarray(a))
    b_codes, b_scales = quantize_fp8(jnp.asarray(b), block=(128, 128))
    quantised = (a_codes, a_scales, b_codes, b_scales)
    want = oracle.matmul(*(np.asarray(x) for x in quantised)).astype(np.float32)
    matmul = functools.partial(fp8_matmul, implementation="xla")
    assert_matches(matmul(*quantised, dtype=jnp.float32), want, 1e-5)
    assert matmul(*quantised).dtype == jnp.bfloat16
    assert_matches(matmul(jnp.asarray(a), None, jnp.asarray(b), None), want, 1e-5)
    mixed = matmul(jnp.asarray(a)[None], None, b_codes, b_scales)
    assert_matches(mixed, want[None], 1e-5)


@pytest.mark.parametrize("k", [128, 130, 300, 1])
def test_rows_reach_the_matmul_kernel_as_tma_wants_them(
    k: int, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their length is a multiple of 16 bytes, and the product is the same."""
    a, b = (jnp.asarray(random(rng, n, k)) for n in (3, 5))
    quantised = (*quantize_fp8(a), *quantize_fp8(b, block=(128, 128)))

    def call(target: str, operands: Any, avals: Any) -> list[jax.Array]:
        a, a_scale, b, b_scale = (x[0] for x in operands)
        assert a.shape[-1] == b.shape[-1] == -(-k // 16) * 16
        out = fp8_matmul(a, a_scale, b, b_scale, dtype=avals.out.dtype, implementation="xla")
        return [out[None]]

    monkeypatch.setattr(ffi, "call", call)
    operands = Operands(*(x[None] for x in quantised))
    avals = Product(jax.ShapeDtypeStruct((1, 3, 5), jnp.float32))
    got = matmul_kernels.fp8_matmul_fwd(None, avals, operands)
    want = fp8_matmul(*quantised, dtype=jnp.float32, implementation="xla")
    assert_matches(got.out[0], want, 1e-6)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_matmul_gradients(dtype: Any, rng: np.random.Generator) -> None:
    a = jnp.asarray(random(rng, 2, 5, 150), dtype)
    b = jnp.asarray(random(rng, 140, 150), dtype)
    ct = jnp.asarray(rng.normal(size=(2, 5, 140)), dtype)
    da, db = jax.vjp(lambda a, b: fp8_matmul(a, None, b, None), a, b)[1](ct)
    assert da.dtype == db.dtype == dtype
    a_hat = np.asarray(dequantize_fp8(*quantize_fp8(a)), np.float64)
    codes = quantize_fp8(b, block=(128, 128))
    b_hat = np.asarray(dequantize_fp8(*codes, block=(128, 128)), np.float64)
    g = np.asarray(ct, np.float64)
    tol = 1e-5 if dtype == jnp.float32 else 1e-2
    assert_matches(np.asarray(da, np.float64), np.einsum("umn,nk->umk", g, b_hat), tol)
    assert_matches(np.asarray(db, np.float64), np.einsum("umn,umk->nk", g, a_hat), tol)
    # What comes quantised is constant; the other operand has the same gradient as before.
    only_a = jax.grad(lambda a: (fp8_matmul(a, None, *codes) * ct).astype(jnp.float32).sum())(a)
    assert_matches(only_a, da, tol)


LINEAR_SHAPES = pytest.mark.parametrize(
    ("rows", "k", "n"), [((3,), 256, 256), ((2, 75), 130, 200), ((1,), 1, 1)], ids=str
)


@LINEAR_SHAPES
@MODES
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
def test_linear_gradients_of_any_size(implementation: str, rng: np.random.Generator) -> None:
    """A mean over many tokens has small gradients; they keep the precision of large ones."""
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


def test_linear_on_special_values(rng: np.random.Generator) -> None:
    """A NaN or an infinity is in the results that its block goes into, and in no others."""
    x, w, dy = random(rng, 300, 256), random(rng, 256, 256), random(rng, 300, 256)
    x[1, 130], dy[2, 5], x[299], dy[299] = np.nan, np.inf, 0.0, 0.0
    y, vjp = jax.vjp(fp8_linear, *map(jnp.asarray, (x, w)))
    dx, dw = vjp(jnp.asarray(dy))
    for got, bad in ((y, 1), (dx, 2)):
        nans = np.isnan(np.asarray(got))
        assert nans[bad].all() and nans.sum() == 256
        assert not np.asarray(got)[299].any()
    nans = np.zeros((256, 256), bool)
    nans[130], nans[:, 5] = True, True
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
    """The handlers' part, played by XLA: layouts and scales of all three products."""

    def call(target: str, operands: Any, avals: Any, **attrs: Any) -> list[jax.Array]:
        if target in ("jax_dsa.quantize_fp8_transpose.v1", "jax_dsa.quantize_fp8_columns.v1"):
            (x,) = operands
            power = bool(attrs["power_of_two_scale"])
            both = target == "jax_dsa.quantize_fp8_transpose.v1"
            how = quantize_fp8_spec.Options((1, 128), "", "", power, min_amax=1e-20)
            results = [
                y
                for a in ((x, x.swapaxes(1, 2)) if both else (x.swapaxes(1, 2),))
                for y in quantize_fp8_xla.quantize_fp8(how, quantize_fp8_spec.Operands(a))
            ]
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
            rows = b_scale.shape[1] == b.shape[1]
            left = dequantize_fp8(a, a_scale, implementation="xla")
            block = (1 if rows else 128, 128)
            right = dequantize_fp8(b, b_scale, block=block, implementation="xla")
            (aval,) = avals
            results = [jnp.einsum("b...k,bnk->b...n", left, right).astype(aval.dtype)]
        for y, aval in zip(results, avals, strict=True):
            assert y.shape == aval.shape and y.dtype == aval.dtype
        return results

    monkeypatch.setattr(ffi, "call", call)
    x, w, dy = (
        jnp.asarray(random(rng, *s)) for s in ((2, 3, 50, 150), (2, 150, 210), (2, 3, 50, 210))
    )
    q = quantize_fp8_spec.Options
    options = linear.Options(
        dtype=jnp.float32,
        w_dtype=jnp.float32,
        x=q((1, 128), "", ""),
        w=q((128, 128), "", ""),
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
        cuda, xla = (getattr(room, f"fp8_linear_{name}") for room in (linear_kernels, linear_xla))
        want = xla(options, *operands)
        avals = type(want)(*(jax.ShapeDtypeStruct(y.shape, y.dtype) for y in want))
        assert_matches(cuda(options, avals, *operands), want, 1e-6)


X = np.zeros((4, 256), np.float32)
CODES = np.zeros((4, 256), ml_dtypes.float8_e4m3fn)
SCALE = np.zeros((4, 2), np.float32)
W = np.zeros((8, 256), np.float32)


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
        (lambda: quantize_fp8(X[0], block=(2, 2)), ValueError, "'x' has shape .256,., want .R, C"),
        (lambda: quantize_fp8(X, power_of_two_scale=1), TypeError, "'power_of_two_scale' is 1"),
        (lambda: quantize_fp8(X, implementation="gpu"), ValueError, "'implementation' is 'gpu'"),
        (
            lambda: quantize_fp8(X, block=64, implementation="cuda"),
            NotImplementedError,
            "quantize_fp8: implementation='cuda' is not available here.*'xla'",
        ),
        (lambda: dequantize_fp8(X, SCALE), TypeError, "dequantize_fp8: argument 'x'.*float8_e4m3"),
        (lambda: dequantize_fp8(CODES, SCALE[:, :1]), ValueError, "'scale'.*want .4, 2"),
        (lambda: dequantize_fp8(CODES, SCALE, block=64), ValueError, "'scale'.*want .4, 4"),
        (lambda: dequantize_fp8(CODES, SCALE.astype(np.float16)), TypeError, "'scale'.*float32"),
        (lambda: dequantize_fp8(CODES, SCALE, dtype=jnp.int8), ValueError, "'dtype' is 'int8'"),
        (
            lambda: dequantize_fp8(CODES, SCALE, block=(2, 128), implementation="cuda"),
            ValueError,
            "'scale'.*want .2, 2",
        ),
        (
            lambda: dequantize_fp8(CODES, SCALE[:2], block=(2, 128), implementation="cuda"),
            NotImplementedError,
            "dequantize_fp8: implementation='cuda' is not available here.*'xla'",
        ),
        (lambda: fake_quantize_fp8(CODES), TypeError, "fake_quantize_fp8: argument 'x'"),
        (lambda: fp8_matmul(CODES, None, W, None), TypeError, "fp8_matmul: argument 'a'.*bfloat16"),
        (lambda: fp8_matmul(X, SCALE, W, None), TypeError, "'a' has dtype float32, want float8"),
        (lambda: fp8_matmul(CODES, SCALE[:3], W, None), ValueError, "'a_scale'.*want .4, 2"),
        (lambda: fp8_matmul(X, None, W[:, :5], None), ValueError, "'b' has shape .8, 5.*K=256"),
        (lambda: fp8_matmul(X, None, W[None], None), ValueError, "'b' has shape .1, 8, 256"),
        (lambda: fp8_matmul(X, None, CODES, SCALE), ValueError, "'b_scale'.*want .1, 2"),
        (lambda: fp8_matmul(X, None, W, SCALE), TypeError, "'b' has dtype float32"),
        (lambda: fp8_matmul(X, None, W, None, dtype=np.int32), ValueError, "'dtype' is 'int32'"),
        (lambda: fp8_linear(CODES, W.T), TypeError, "fp8_linear: argument 'x'.*bfloat16"),
        (lambda: fp8_linear(X, W), ValueError, "'w' has shape .8, 256.*K=256"),
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
def test_messages(call: Any, error: Any, message: str, without_kernels: None) -> None:
    with pytest.raises(error, match=message):
        call()


def test_variables(rng: np.random.Generator) -> None:
    x, w = random(rng, 2, 3, 20), random(rng, 5, 20)
    want = quantize_fp8(x, block=(2, 8))
    assert_same(quantize_fp8(Variable(x), block=(2, 8)), want)
    got = dequantize_fp8(*map(Variable, want), block=(2, 8))
    np.testing.assert_array_equal(got, dequantize_fp8(*want, block=(2, 8)))
    np.testing.assert_array_equal(fake_quantize_fp8(Variable(x)), fake_quantize_fp8(x))
    got = fp8_matmul(*map(Variable, quantize_fp8(x)), Variable(w), None)
    np.testing.assert_array_equal(got, fp8_matmul(*quantize_fp8(x), w, None))


def test_nan_in_wide_rows(rng: np.random.Generator) -> None:
    """XLA's own maximum of floats drops NaN from rows as wide as these on some CPUs."""
    x = random(rng, 62, 7168)
    x[5, 1000] = np.nan
    _, scale = quantize_fp8(jnp.asarray(x), implementation="xla")
    np.testing.assert_array_equal(np.argwhere(np.isnan(np.asarray(scale))), [[5, 1000 // 128]])


# The kernel, against the XLA implementation on the host and on the GPU.


def on_cpu(x: np.ndarray, **options: Any) -> tuple:
    with jax.default_device(jax.devices("cpu")[0]):
        return quantize_fp8(jnp.asarray(x), implementation="xla", **options)


@pytest.mark.gpu
@DTYPES
@MODES
@pytest.mark.parametrize(
    "shape",
    [(1, 128), (62, 7168), (213, 576), (65, 136), (33, 129), (7, 5), (1, 1), (2, 3, 4, 1000)],
    ids=str,
)
def test_kernel_equals_xla(
    dtype: Any, power_of_two_scale: bool, shape: tuple, rng: np.random.Generator
) -> None:
    x = random(rng, *shape, dtype=dtype)
    x.reshape(-1)[rng.integers(0, x.size, 3)] = [np.nan, np.inf, -0.0]
    options = {"power_of_two_scale": power_of_two_scale}
    got = quantize_fp8(jnp.asarray(x), implementation="cuda", **options)
    assert_same(got, on_cpu(x, **options))
    assert_same(quantize_fp8(jnp.asarray(x), implementation="xla", **options), got)


@pytest.mark.gpu
@EXACT
@MODES
def test_kernel_rounds_every_quotient_as_ieee_division(
    dtype: Any, power_of_two_scale: bool
) -> None:
    x = every_quotient(dtype)
    for implementation in ("cuda", "xla"):
        got = quantize_fp8(
            jnp.asarray(x), power_of_two_scale=power_of_two_scale, implementation=implementation
        )
        assert_same(got, oracle.quantize(x, 128, power_of_two_scale))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(0,), (0, 128), (4, 0)])
def test_kernel_on_empty_arrays(shape: tuple) -> None:
    codes, scales = quantize_fp8(jnp.zeros(shape, jnp.bfloat16), implementation="cuda")
    assert codes.shape == shape and scales.shape == (*shape[:-1], -(-shape[-1] // 128))


@pytest.mark.gpu
def test_kernel_is_what_runs_by_default(rng: np.random.Generator) -> None:
    x = jnp.asarray(random(rng, 8, 300))
    assert "jax_dsa.quantize_fp8.v1" in jax.jit(quantize_fp8).lower(x).compile().as_text()
    assert "jax_dsa.quantize_fp8.v1" not in (
        jax.jit(lambda x: quantize_fp8(x, block=64)).lower(x).compile().as_text()
    )


@pytest.mark.gpu
def test_kernel_under_vmap_and_on_meshes(rng: np.random.Generator) -> None:
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


@pytest.mark.gpu
def test_kernel_past_two_to_the_31_elements() -> None:
    rows = 2**31 // 7168 + 1000
    x = jax.random.normal(jax.random.key(0), (rows, 7168), jnp.bfloat16)
    codes, scales = jax.jit(lambda x: quantize_fp8(x, implementation="cuda"))(x)
    tail = slice(rows - 500, rows)
    assert_same((codes[tail], scales[tail]), on_cpu(np.asarray(x[tail])))


TILED = pytest.mark.parametrize(
    "shape", [(256, 384), (130, 200), (77, 131), (3, 5), (1, 1), (2, 3, 300, 136)], ids=str
)


@pytest.mark.gpu
@DTYPES
@MODES
@TILED
def test_kernel_of_tiles_equals_xla(
    dtype: Any, power_of_two_scale: bool, shape: tuple, rng: np.random.Generator
) -> None:
    x = random(rng, *shape, dtype=dtype)
    x.reshape(-1)[rng.integers(0, x.size, 3)] = [np.nan, np.inf, -0.0]
    options = {"block": (128, 128), "power_of_two_scale": power_of_two_scale}
    got = quantize_fp8(jnp.asarray(x), implementation="cuda", **options)
    assert_same(got, on_cpu(x, **options))


@pytest.mark.gpu
@DTYPES
@TILED
@pytest.mark.parametrize("block", [(1, 128), (128, 128)], ids=str)
def test_kernel_of_dequantisation_equals_xla(
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


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(0, 128), (4, 0), (2, 0, 7)], ids=str)
def test_other_kernels_on_empty_arrays(shape: tuple) -> None:
    for block in ((1, 128), (128, 128)):
        codes = quantize_fp8(jnp.zeros(shape, jnp.bfloat16), block=block)
        assert dequantize_fp8(*codes, block=block, implementation="cuda").shape == shape
    w = jnp.zeros((6, shape[-1]), jnp.bfloat16)
    out = fp8_matmul(jnp.ones(shape, jnp.bfloat16), None, w, None, implementation="cuda")
    assert out.shape == (*shape[:-1], 6) and not np.asarray(out, np.float32).any()


def product(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of the values that are multiplied, in float64, and the sums of the terms' magnitudes."""
    a = np.asarray(dequantize_fp8(*quantize_fp8(jnp.asarray(a))), np.float64)
    tiles = (128, 128)
    b_codes = quantize_fp8(jnp.asarray(b), block=tiles)
    b = np.asarray(dequantize_fp8(*b_codes, block=tiles), np.float64)
    return a @ b.swapaxes(-1, -2), np.abs(a) @ np.abs(b).swapaxes(-1, -2)


@pytest.mark.gpu
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
def test_matmul_kernel(dtype: Any, shape: tuple, rng: np.random.Generator) -> None:
    m, n, k = shape
    small = 1e-2 if dtype == np.float16 else 1.0  # or products are too large for float16
    a, b = (random(rng, m, k) * small).astype(dtype), (random(rng, n, k) * small)
    if m > 4 and n > 4:
        a[2, k // 2] = b[3, 0] = np.nan  # in a block of a's, and in a tile of b's
    want, size = product(a, b)
    a, b = jnp.asarray(a), jnp.asarray(b)
    got = fp8_matmul(a, None, b, None, implementation="cuda")
    assert got.dtype == dtype
    got = np.asarray(got, np.float64)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    # The tensor cores add products in less than float32.
    allowed = TENSOR_CORE * size + float(jnp.finfo(dtype).eps) * np.abs(want) + 1e-6
    assert (np.abs(got - want) <= allowed)[~np.isnan(want)].all()
    again = fp8_matmul(a, None, b, None, implementation="cuda")
    np.testing.assert_array_equal(np.asarray(again, np.float64), got)


@pytest.mark.gpu
def test_matmul_kernel_under_vmap_and_on_meshes(rng: np.random.Generator) -> None:
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


@pytest.mark.gpu
def test_kernels_of_the_matmul_run_by_default(rng: np.random.Generator) -> None:
    x, w = (jnp.asarray(random(rng, n, 300)) for n in (8, 16))
    text = jax.jit(lambda x, w: fp8_matmul(x, None, w, None)).lower(x, w).compile().as_text()
    for target in ("quantize_fp8", "quantize_fp8_tiles", "fp8_matmul"):
        assert f"jax_dsa.{target}.v1" in text


@pytest.mark.gpu
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
def test_linear_kernels(rows: tuple, k: int, n: int, dtype: Any, rng: np.random.Generator) -> None:
    """Against float64 of the same codes: the tensor cores add products in less than float32."""
    x, dy = (jnp.asarray(random(rng, *rows, size), dtype) for size in (k, n))
    w = jnp.asarray(random(rng, k, n))
    y, vjp = jax.vjp(lambda x, w: fp8_linear(x, w, implementation="cuda"), x, w)
    got = (y, *vjp(dy))
    operands = oracle.linear_operands(*(np.asarray(a) for a in (x, w, dy)))
    for out, (a, b) in zip(got, operands, strict=True):
        want, size = (a @ b).reshape(out.shape), (np.abs(a) @ np.abs(b)).reshape(out.shape)
        allowed = TENSOR_CORE * size + float(jnp.finfo(out.dtype).eps) * np.abs(want) + 1e-6
        assert (np.abs(np.asarray(out, np.float64) - want) <= allowed).all()
    again = vjp(dy)
    for first, second in zip(got[1:], again, strict=True):
        np.testing.assert_array_equal(np.asarray(first), np.asarray(second))


@pytest.mark.gpu
def test_kernels_of_the_linear_layer_run_by_default(rng: np.random.Generator) -> None:
    x, w = (jnp.asarray(random(rng, *s)) for s in ((8, 300), (300, 16)))
    total = lambda x, w: (fp8_linear(x, w) ** 2).sum()  # noqa: E731
    text = jax.jit(jax.grad(total, (0, 1))).lower(x, w).compile().as_text()
    ways = ("", "_tiles_transpose", "_transpose", "_columns")
    for target in ("fp8_matmul", *(f"quantize_fp8{way}" for way in ways)):
        assert f"jax_dsa.{target}.v1" in text
