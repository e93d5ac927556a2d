"""The linear layer whose three products are in FP8 (e4m3)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import linear_call

from jax_dsa.core.call import Call
from jax_dsa.core.checks import Args
from jax_dsa.core.ffi import Kernel
from jax_dsa.core.op import Pass, differentiable
from jax_dsa.core.typing import Array, Float, Implementation
from jax_dsa.ops.fp8_linear import cuda, xla
from jax_dsa.ops.fp8_linear.spec import (
    Codes,
    Gradients,
    Inputs,
    Operands,
    Options,
    Product,
    Results,
    TransposedWeights,
    Weights,
    WeightValues,
    flat_rows,
)
from jax_dsa.ops.quantize_fp8 import spec as quantize
from jax_dsa.ops.quantize_fp8.api import QUANTIZE
from jax_dsa.ops.quantize_fp8.spec import (
    BLOCK,
    INPUTS,
    SHARDED_ROWS,
    column_axis,
    leading_axes,
    leading_dims,
    row_axis,
)

WEIGHTS = Pass(
    "fp8_linear_weights",
    xla.fp8_linear_weights,
    shardable="b i j",
    kernel=Kernel(cuda.fp8_linear_weights, cuda.supports, limits="any shape"),
)
# As of fp8_matmul: K stays whole in the forward pass.
FWD = Pass(
    "fp8_linear_fwd",
    xla.fp8_linear_fwd,
    shardable=f"{SHARDED_ROWS} j",
    kernel=Kernel(cuda.fp8_linear_fwd, cuda.supports, limits="any shape"),
)
BWD = Pass(
    "fp8_linear_bwd",
    xla.fp8_linear_bwd,
    shardable=f"{SHARDED_ROWS} i j",
    kernel=Kernel(cuda.fp8_linear_bwd, cuda.supports, limits="any shape"),
)


def _fwd(call: Call, options: Options, x: Operands) -> Results:
    if call.implementation == "plain":
        return _plain(options, x)
    codes = QUANTIZE(call.auxiliary, options.x, quantize.Operands(x.x))
    w, w_transposed, w_scale = WEIGHTS(call, options, WeightValues(x.w))
    (out,) = FWD(call, options, Codes(*codes), TransposedWeights(w_transposed, w_scale))
    return Results(out, w, w_scale)


def _plain(options: Options, x: Operands) -> Results:
    """The product in terms that JAX differentiates as `_bwd` does: each operand moves as itself
    while the other stays as it is quantised for that product, and cotangents are rounded.
    """
    row, column, tile = (1, BLOCK), (BLOCK, 1), (BLOCK, BLOCK)

    def moving(value: Array) -> Array:
        return (value - jax.lax.stop_gradient(value)).astype(jnp.float32)

    def cotangent(value: Array, block: tuple[int, int]) -> Array:
        identity, rounds = (lambda _, y: y), (lambda _, dy: xla.rounded_back(options, dy, block))
        return linear_call(identity, rounds, (), value)

    fixed = Operands(*jax.lax.stop_gradient(tuple(x)))
    w = xla.rounded(options, fixed.w, tile)
    out = xla.matmul(xla.rounded(options, fixed.x, row), w)
    of_x = cotangent(xla.matmul(moving(x.x), w), row)
    flat = xla.matmul(xla.rounded_back(options, flat_rows(fixed.x), column), moving(x.w))
    of_w = cotangent(flat, column).reshape(out.shape)
    return Results((out + of_x + of_w).astype(options.dtype), x.w, x.w)


def _bwd(call: Call, options: Options, x: Inputs, w: Weights, dy: Results) -> Gradients:
    return BWD(call, options, x, w, Product(dy.out))


# The operator without its checks.
fp8_linear_op = differentiable(
    "fp8_linear",
    _fwd,
    _bwd,
    residuals=lambda x, y: (Inputs(x.x), Weights(y.w, y.w_scale)),
)


def fp8_linear(
    x: Float[Array, "... K"],
    w: Float[Array, "K N"],
    *,
    power_of_two_scale: bool = False,
    dtype: Any = None,
    implementation: Implementation | None = None,
) -> Float[Array, "... N"]:
    """`x @ w` for training, with forward pass, input gradient and weight gradient all in FP8.

    The recipe of DeepSeek-V3 (arXiv:2412.19437, section 3.3). Each of the three products
    multiplies e4m3 codes and accumulates in float32:

        y  = x @ w       x in blocks of 1x128 along K, w of 128x128
        dx = dy @ w.T    dy in blocks of 1x128 along N, the same codes of w
        dw = x.T @ dy    both in blocks of 128 rows, along which they are contracted

    `quantize_fp8` says how a block is quantised; for both gradients the least scale is 1e-20 / 448
    in place of 1e-4 / 448, since a gradient may be small. All leading axes together are the rows.

    Args:
        x: bfloat16, float16 or float32, with any leading axes.
        w: bfloat16, float16 or float32; not necessarily x's dtype. Its gradient is rounded once,
            to w's dtype: float32 master weights get the float32 sum.
        power_of_two_scale: of all quantisations.
        dtype: of the result, bfloat16, float16 or float32; default x's.
        implementation: None (the kernels where they are, else XLA), "cuda" or "xla".

    Raises:
        TypeError, ValueError: an argument has the wrong type, shape or range.
        NotImplementedError: `implementation="cuda"` cannot run this call here.

    Examples:
        >>> import jax, jax.numpy as jnp, jax_dsa
        >>> x = jax.random.normal(jax.random.key(0), (4, 256), jnp.bfloat16)
        >>> w = jax.random.normal(jax.random.key(1), (256, 8))
        >>> dw = jax.grad(lambda w: jax_dsa.fp8_linear(x, w).sum())(w)
        >>> dw.shape, dw.dtype.name
        ((256, 8), 'float32')
    """
    rows = leading_dims(x, "K")
    args = Args("fp8_linear", "x", x, rows)
    call = args.call(implementation)
    x = args.array("x", x, rows, INPUTS)
    w = args.array("w", w, "K N", INPUTS)
    power = args.flag("power_of_two_scale", power_of_two_scale)
    (k, k_blocks), (n, n_blocks) = row_axis(w.shape[0], BLOCK), column_axis(w.shape[1], BLOCK)
    options = Options(
        dtype=args.dtype("dtype", x.dtype if dtype is None else dtype, INPUTS),
        w_dtype=w.dtype,
        x=quantize.Options.of(x.shape, (1, BLOCK), power_of_two_scale=power),
        w=quantize.Options.of(w.shape, (BLOCK, BLOCK), power_of_two_scale=power),
        rows=leading_axes(x.ndim - 1),
        k=k,
        k_blocks=k_blocks,
        n=n,
        n_blocks=n_blocks,
    )
    return fp8_linear_op(call, options, Operands(x[None], w[None])).out[0]
