"""Matmul of operands that are quantised to FP8 (e4m3) with one scale per block."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jax_dsa.core.call import Call
from jax_dsa.core.checks import Args
from jax_dsa.core.ffi import Kernel
from jax_dsa.core.op import Pass, differentiable
from jax_dsa.core.typing import Array, Float, Implementation
from jax_dsa.ops.fp8_matmul import cuda, xla
from jax_dsa.ops.fp8_matmul.spec import (
    A,
    B,
    Gradients,
    Operands,
    Options,
    Product,
    Results,
    RowProduct,
)
from jax_dsa.ops.quantize_fp8 import spec as quantize
from jax_dsa.ops.quantize_fp8.api import DEQUANTIZE_FWD, QUANTIZE, fake_quantize_fp8_op
from jax_dsa.ops.quantize_fp8.spec import (
    BLOCK,
    E4M3,
    INPUTS,
    SCALES,
    SHARDED_ROWS,
    column_axis,
    leading_axes,
    leading_dims,
    row_axis,
    weights,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

# The contracted axis is not sharded in the forward pass, because the sum is rounded only once.
FWD = Pass(
    "fp8_matmul_fwd",
    xla.fp8_matmul_fwd,
    shardable=f"{SHARDED_ROWS} i",
    kernel=Kernel(
        cuda.fp8_matmul_fwd,
        cuda.supports,
        limits="any shape; the gradients are XLA's",
        portable=cuda.supports,
    ),
)
BWD_A = Pass("fp8_matmul_bwd_a", xla.fp8_matmul_bwd_a, shardable=f"{SHARDED_ROWS} i j")
BWD_B = Pass("fp8_matmul_bwd_b", xla.fp8_matmul_bwd_b, shardable=f"{SHARDED_ROWS} i j")


def _fwd(call: Call, options: Options, x: Operands) -> Results:
    if call.implementation == "plain":
        return _plain(call, options, x)
    (a, a_scale, b, b_scale) = x
    if a_scale is None:
        a, a_scale = QUANTIZE(call.auxiliary, options.a, quantize.Operands(a))
    if b_scale is None:
        b, b_scale = QUANTIZE(call.auxiliary, options.b, quantize.Operands(b))
    (out,) = FWD(call, options, Operands(a, a_scale, b, b_scale))
    return Results(out, a, a_scale, b, b_scale)


def _plain(call: Call, options: Options, x: Operands) -> Results:
    """Returns the product as plain JAX code with the same gradient as `_bwd`."""

    def value(options: quantize.Options, x: Array, scale: Array | None) -> Array:
        if scale is None:
            operand = quantize.Operands(x.astype(jnp.float32))
            return fake_quantize_fp8_op(call, options, operand).x
        return DEQUANTIZE_FWD(call, options, quantize.Codes(x, jax.lax.stop_gradient(scale))).x

    a, b = value(options.a, x.a, x.a_scale), value(options.b, x.b, x.b_scale)
    out = xla.matmul(a, b).astype(options.dtype)
    return Results(out, *x)  # type: ignore[arg-type]


def _bwd(call: Call, options: Options, a: A, b: B, dy: Results) -> Gradients:
    da = db = None
    if not options.quantized[0]:
        (da,) = BWD_A(call, options, Product(dy.out), b)
    if not options.quantized[1]:
        (db,) = BWD_B(call, options, RowProduct(dy.out), a)
    return Gradients(da, db)


@contextlib.contextmanager
def _naming_scale(name: str, scale: Any) -> Iterator[None]:
    """Adds to the error about an operand's dtype whether the operand has a scale."""
    try:
        yield
    except TypeError as error:
        given = "without" if scale is None else "beside"
        raise TypeError(f"{error} {given} '{name}_scale'") from None


# The operator without argument checks.
fp8_matmul_op = differentiable(
    "fp8_matmul",
    _fwd,
    _bwd,
    residuals=lambda x, y: (A(y.a, y.a_scale), B(y.b, y.b_scale)),
)


def fp8_matmul(
    a: Float[Array, "... F"],
    a_scale: Float[Array, "... J"] | None,
    b: Float[Array, "O F"],
    b_scale: Float[Array, "I J"] | None,
    *,
    power_of_two_scale: bool = False,
    dtype: Any = None,
    implementation: Implementation | None = None,
) -> Float[Array, "... O"]:
    """Returns `a @ b.T` for operands that are quantised to FP8.

    Blocks of a, the activations, are 1x128. Blocks of b, the weights, are 128x128:

        out[r, o] = sum over blocks j of F of
            a_scale[r, j] * b_scale[o // 128, j] * (sum over f in block j of a[r, f] * b[o, f])

    The sum over blocks is accumulated in float32 and rounded once.

    An operand without a scale is quantised by this function and has a gradient. The gradient passes
    straight through the quantisation. It is a matmul, in the result's dtype, with the dequantised
    values of the other operand. The backward pass keeps the codes, not the operand. An operand with
    a scale is a constant.

    Args:
        a: First operand of shape [..., F]. With `a_scale` float8_e4m3fn codes, else bfloat16,
            float16 or float32.
        a_scale: Scales of shape [..., ceil(F / 128)], float32, or None.
        b: Second operand of shape [O, F]. With `b_scale` float8_e4m3fn codes, else bfloat16,
            float16 or float32.
        b_scale: Scales of shape [ceil(O / 128), ceil(F / 128)], float32, or None.
        power_of_two_scale: Whether scales of operands that are quantised here are rounded up to
            powers of two.
        dtype: Dtype of the result: bfloat16, float16 or float32. Default: a's dtype, or bfloat16 if
            `a` holds codes.
        implementation: None (the CUDA kernels if available, else XLA), "cuda" or "xla". The kernels
            promote partial sums to float32 after each block of 128 features. XLA multiplies in
            float32, which is TF32 on a GPU unless `jax.default_matmul_precision` is set. Gradients
            always run in XLA, so with "cuda" they raise.

    Returns:
        The product, of shape [..., O] and dtype `dtype`.

    Raises:
        TypeError: If an argument has the wrong type or dtype.
        ValueError: If an argument has the wrong shape or value.
        NotImplementedError: If `implementation="cuda"` cannot run this call.

    Examples:
        >>> import jax, jax.numpy as jnp, jax_dsa
        >>> a = jax.random.normal(jax.random.key(0), (4, 256), jnp.bfloat16)
        >>> b = jax.random.normal(jax.random.key(1), (8, 256), jnp.bfloat16)
        >>> weights = jax_dsa.quantize_fp8(b, block=(128, 128))
        >>> jax_dsa.fp8_matmul(a, None, *weights).shape
        (4, 8)
    """
    rows = leading_dims(a, "F")
    args = Args("fp8_matmul", "a", a, rows)
    call = args.call(implementation)
    with _naming_scale("a", a_scale):
        a = args.array("a", a, rows, INPUTS if a_scale is None else E4M3)
    with _naming_scale("b", b_scale):
        b = weights(args, "b", b, "O F", INPUTS if b_scale is None else E4M3)
    for letter, axis in (("I", "O"), ("J", "F")):
        args.bind(letter, -(-args.sizes[axis] // BLOCK), f"{axis} in blocks of {BLOCK}")
    if a_scale is not None:
        a_scale = args.array("a_scale", a_scale, leading_dims(a, "J"), SCALES)[None]
    if b_scale is not None:
        b_scale = args.array("b_scale", b_scale, "I J", SCALES)[None]
    power = args.flag("power_of_two_scale", power_of_two_scale)
    if dtype is None:
        dtype = jnp.bfloat16 if a_scale is not None else a.dtype

    # Under jax_dsa.plain_xla() the operands are dequantised to float32.
    plain = {"power_of_two_scale": power, "dtype": jnp.float32}
    (n, n_blocks), (k, k_blocks) = row_axis(b.shape[0], BLOCK), column_axis(b.shape[1], BLOCK)
    options = Options(
        dtype=args.dtype("dtype", dtype, INPUTS),
        quantized=(a_scale is not None, b_scale is not None),
        a=quantize.Options.of(a.shape, (1, BLOCK), **plain),
        b=quantize.Options.of(b.shape, (BLOCK, BLOCK), **plain),
        rows=leading_axes(a.ndim - 1),
        n=n,
        n_blocks=n_blocks,
        k=k,
        k_blocks=k_blocks,
    )
    return fp8_matmul_op(call, options, Operands(a[None], a_scale, b[None], b_scale)).out[0]
