"""Random calls of the FP8 operators. Quantisation is compared bit for bit."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from fuzz.draw import Call, Draw, bf16, e4m3, f16, f32
from support.oracles import fp8 as oracle

from jax_dsa import dequantize_fp8, fake_quantize_fp8, fp8_linear, fp8_matmul, quantize_fp8


def draw_block(c: Draw) -> Any:
    if c.kernel:
        return c.one(128, (128, 128))
    return c.one(c.integer(4), c.integer(1), 128, (1, 4), (c.integer(2), 3), [2, 4], (4, 1))


def block_shape(block: Any) -> tuple[int, int]:
    """Returns the rows and columns of a block."""
    rows, cols = block if isinstance(block, tuple | list) else (1, block)
    return int(rows), int(cols)


def draw_values(c: Draw, r: Draw, *shape: int) -> np.ndarray:
    """Draws an array whose rows have very different magnitudes.

    Hostile draws contain NaN, infinities, zeros and denormals.
    """
    x = r.rng.normal(size=shape) * 10.0 ** r.rng.integers(-6, 4, size=(*shape[:-1], 1))
    if r.hostile and r.chance(0.3):
        special = r.rng.choice([np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-40], shape)
        x = np.where(r.rng.random(shape) < 0.1, special, x)
    return x.astype(c.one(f32, f32, bf16, f16))


def draw_shape(c: Draw, block: Any) -> tuple[int, ...]:
    """Draws a shape: leading axes, rows if blocks span several, and columns."""
    *leading, rows, cols = c.dims({"R": (3, 130), "C": (128, 200)}, A=2, B=3, R=5, C=9)
    if block_shape(block)[0] == 1:
        return (*[*leading, rows][c.one(0, 1, 2, 3) :], cols)
    return (*leading[c.one(0, 1, 2) :], rows, cols)


def quantized(x: np.ndarray, block: Any, power_of_two_scale: Any) -> tuple[np.ndarray, np.ndarray]:
    """Returns codes and scales."""
    rows, cols = block_shape(block)
    if rows == 1:
        return oracle.quantize(x, cols, bool(power_of_two_scale))
    (R, C), lead = x.shape[-2:], x.shape[:-2]
    codes = np.zeros(x.shape, e4m3)
    scales = np.zeros((*lead, -(-R // rows), -(-C // cols)), np.float32)
    for i in np.ndindex(*lead):
        codes[i], scales[i] = oracle.quantize_tiles(x[i], rows, cols, bool(power_of_two_scale))
    return codes, scales


def dequantized(codes: np.ndarray, scales: np.ndarray, block: Any) -> np.ndarray:
    """Returns the codes times the scales of their blocks, in float64."""
    rows, cols = block_shape(block)
    scales = np.repeat(np.asarray(scales, np.float64), cols, -1)[..., : codes.shape[-1]]
    if rows > 1:
        scales = np.repeat(scales, rows, -2)[..., : codes.shape[-2], :]
    return np.asarray(codes, np.float64) * scales


def draw_quantize(c: Draw, r: Draw) -> Call:
    block = draw_block(c)
    kwargs = {
        "x": draw_values(c, r, *draw_shape(c, block)),
        "block": block,
        "power_of_two_scale": c.flag(),
    }
    return Call(quantize_fp8, kwargs, lambda **x: quantized(**x), (e4m3, f32), exact=True)


def draw_dequantize(c: Draw, r: Draw) -> Call:
    block, dtype = draw_block(c), c.one(f32, f32, bf16, f16)
    codes, scales = quantized(draw_values(c, r, *draw_shape(c, block)), block, c.flag())

    def expected(x: Any, scale: Any, block: Any, dtype: Any) -> list[np.ndarray]:
        return [dequantized(x, scale, block)]

    kwargs = {"x": codes, "scale": scales, "block": block, "dtype": c.one(dtype, dtype.type)}
    return Call(dequantize_fp8, kwargs, expected, (dtype,), diff=("scale",))


def draw_fake_quantize(c: Draw, r: Draw) -> Call:
    block = draw_block(c)
    x = draw_values(c, r, *draw_shape(c, block))
    kwargs = {"x": x, "block": block, "power_of_two_scale": c.flag()}

    def hold(x: Any, **options: Any) -> dict[str, Any]:
        y = dequantized(*quantized(x, **options), options["block"])
        return {"offset": y - np.asarray(x, np.float64)}

    def expected(x: Any, offset: Any, **_: Any) -> list[np.ndarray]:
        return [np.asarray(x, np.float64) + offset]

    return Call(fake_quantize_fp8, kwargs, expected, (x.dtype,), diff=("x",), hold=hold)


def draw_fp8_matmul(c: Draw, r: Draw) -> Call:
    *leading, K, N = c.dims({"K": (128, 300), "N": (40, 300)}, A=2, B=3, K=140, N=140)
    wide = [] if c.kernel else [f32]  # tensor cores add with fewer bits than float32 has
    a = r.floats(c.one(*wide, bf16, f16), *leading[c.one(0, 1, 2) :], K)
    b = r.floats(c.one(a.dtype, *wide, bf16), N, K)
    power = c.flag()
    kwargs = {
        **{"a": a, "a_scale": None, "b": b, "b_scale": None},
        "power_of_two_scale": power,
        "dtype": c.one(None, *wide, bf16, np.float16),
    }
    for name, block in (("a", 128), ("b", (128, 128))):
        if c.chance():
            codes, scales = quantized(kwargs[name], block, power)
            kwargs |= {name: codes, f"{name}_scale": scales}
    diff = tuple(n for n in "ab" if kwargs[f"{n}_scale"] is None)
    dtype = kwargs["dtype"]
    if dtype is None:
        dtype = a.dtype if "a" in diff else bf16

    def operand(x: Any, scale: Any, block: Any, power: Any) -> np.ndarray:
        return dequantized(
            *((x, scale) if scale is not None else quantized(x, block, power)), block
        )

    def hold(a: Any, a_scale: Any, b: Any, b_scale: Any, **x: Any) -> dict[str, Any]:
        power = x["power_of_two_scale"]
        left, right = operand(a, a_scale, 128, power), operand(b, b_scale, (128, 128), power)
        return {"left": left, "right": right, "a0": a, "b0": b}

    def expected(
        a: Any, b: Any, left: Any, right: Any, a0: Any, b0: Any, **_: Any
    ) -> list[np.ndarray]:
        # The gradient of an operand passes straight through its quantisation. The other operand
        # has its quantised value.
        changes = (
            np.asarray(x, np.float64) - np.asarray(y, np.float64) for x, y in ((a, a0), (b, b0))
        )
        da, db = (np.nan_to_num(x) for x in changes)
        return [left @ right.T + da @ right.T + left @ db.T]

    dtype = np.dtype(dtype)
    # Gradients are matmuls in the result's dtype. Tensor cores keep about half of float32's bits
    # when they add FP8 products.
    low = np.dtype(f16) if c.kernel and dtype == f32 else dtype
    return Call(fp8_matmul, kwargs, expected, (dtype,), diff=diff, hold=hold, peak=30.0, low=low)


def draw_fp8_linear(c: Draw, r: Draw) -> Call:
    on_kernel = {"R": (1, 140, 300), "K": (128, 300), "N": (40, 300)}
    *leading, K, N = c.dims(on_kernel, A=2, R=140, K=140, N=140)
    wide = [] if c.kernel else [f32] * 3
    x = r.floats(c.one(*wide, bf16, f16), *leading[c.one(0, 1, 2) :], K)
    x *= 2.0 ** r.rng.integers(-3, 4, (*x.shape[:-1], 1))  # so that scales differ between rows
    w = r.floats(c.one(x.dtype, *wide, bf16), K, N)
    dtype = c.one(None, None, *wide, bf16, np.float16)
    kwargs = {"x": x, "w": w, "power_of_two_scale": c.flag(), "dtype": dtype}

    def rounded(x: Any, block: Any, power: Any) -> np.ndarray:
        return dequantized(*quantized(x, block, power), block)

    def hold(x: Any, w: Any, power_of_two_scale: Any, **_: Any) -> dict[str, Any]:
        flat = np.asarray(x).reshape(math.prod(x.shape[:-1]), K)
        columns = rounded(np.ascontiguousarray(flat.T), 128, power_of_two_scale).T
        return {
            "rows": rounded(x, 128, power_of_two_scale),
            "columns": np.nan_to_num(columns).reshape(x.shape),
            "weights": rounded(w, (128, 128), power_of_two_scale),
            **{"x0": x, "w0": w},
        }

    def expected(
        x: Any, w: Any, rows: Any, columns: Any, weights: Any, x0: Any, w0: Any, **_: Any
    ) -> list[np.ndarray]:
        # The gradient of an operand passes straight through its quantisation. The other operand is
        # quantised as for that gradient.
        dx, dw = (
            np.nan_to_num(np.asarray(a, np.float64) - np.asarray(b, np.float64))
            for a, b in ((x, x0), (w, w0))
        )
        return [rows @ weights + dx @ weights + columns @ dw]

    low = np.dtype(dtype or x.dtype)
    return Call(
        fp8_linear, kwargs, expected, (low,), ("x", "w"), hold=hold, peak=30.0, low=low, signs=True
    )


GENERATORS = {
    "quantize_fp8": draw_quantize,
    "dequantize_fp8": draw_dequantize,
    "fake_quantize_fp8": draw_fake_quantize,
    "fp8_matmul": draw_fp8_matmul,
    "fp8_linear": draw_fp8_linear,
}
