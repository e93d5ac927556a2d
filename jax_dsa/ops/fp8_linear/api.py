"""Linear layer whose forward product and both gradients are FP8 (e4m3) matmuls."""

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
    weights,
)

WEIGHTS = Pass(
    "fp8_linear_weights",
    xla.fp8_linear_weights,
    shardable="b i j",
    kernel=Kernel(
        cuda.fp8_linear_weights, cuda.supports, limits="any shape", portable=cuda.supports
    ),
)
# As in fp8_matmul, F is not sharded in the forward pass.
FWD = Pass(
    "fp8_linear_fwd",
    xla.fp8_linear_fwd,
    shardable=f"{SHARDED_ROWS} j",
    kernel=Kernel(cuda.fp8_linear_fwd, cuda.supports, limits="any shape", portable=cuda.supports),
)
BWD = Pass(
    "fp8_linear_bwd",
    xla.fp8_linear_bwd,
    shardable=f"{SHARDED_ROWS} i j",
    kernel=Kernel(cuda.fp8_linear_bwd, cuda.supports, limits="any shape", portable=cuda.supports),
)


def _fwd(call: Call, options: Options, x: Operands) -> Results:
    if call.implementation == "plain":
        return _plain(options, x)
    codes = QUANTIZE(call.auxiliary, options.x, quantize.Operands(x.x))
    w, w_transposed, w_scale = WEIGHTS(call, options, WeightValues(x.w))
    (out,) = FWD(call, options, Codes(*codes), TransposedWeights(w_transposed, w_scale))
    return Results(out, w, w_scale)


def _plain(options: Options, x: Operands) -> Results:
    """Returns the product as plain JAX code with the same gradients as `_bwd`.

    The result is the product of the quantised operands, plus one term per operand. A term is zero
    but depends on its operand, and contains the other operand as it is quantised for that gradient.
    `quantized_cotangent` quantises the cotangents of these terms.
    """
    row, column, tile = (1, BLOCK), (BLOCK, 1), (BLOCK, BLOCK)

    def zero(value: Array) -> Array:  # with the gradient of `value`
        return (value - jax.lax.stop_gradient(value)).astype(jnp.float32)

    def quantized_cotangent(value: Array, block: tuple[int, int]) -> Array:
        identity, transpose = (lambda _, y: y), (lambda _, dy: xla.rounded_back(options, dy, block))
        return linear_call(identity, transpose, (), value)

    fixed = Operands(*jax.lax.stop_gradient(tuple(x)))
    w = xla.rounded(options, fixed.w, tile)
    out = xla.matmul(xla.rounded(options, fixed.x, row), w)
    x_term = quantized_cotangent(xla.matmul(zero(x.x), w), row)
    flat = xla.matmul(xla.rounded_back(options, flat_rows(fixed.x), column), zero(x.w))
    w_term = quantized_cotangent(flat, tile).reshape(out.shape)
    return Results((out + x_term + w_term).astype(options.dtype), x.w, x.w)


def _bwd(call: Call, options: Options, x: Inputs, w: Weights, dy: Results) -> Gradients:
    return BWD(call, options, x, w, Product(dy.out))


# The operator without argument checks.
fp8_linear_op = differentiable(
    "fp8_linear",
    _fwd,
    _bwd,
    residuals=lambda x, y: (Inputs(x.x), Weights(y.w, y.w_scale)),
)


def fp8_linear(
    x: Float[Array, "... F"],
    w: Float[Array, "F O"],
    *,
    power_of_two_scale: bool = False,
    dtype: Any = None,
    implementation: Implementation | None = None,
) -> Float[Array, "... O"]:
    """Returns `x @ w`, where the product and both of its gradients are FP8 matmuls.

    This is the training recipe of DeepSeek-V3 (arXiv:2412.19437, section 3.3). Each of the three
    matmuls multiplies e4m3 codes and accumulates in float32:

        y  = x @ w       x has blocks of 1x128 along F, w of 128x128
        dx = dy @ w.T    dy has blocks of 1x128 along O; w has the same codes
        dw = x.T @ dy    x has blocks of 128x1 along the rows, dy of 128x128

    The rows are all leading axes together. The paper has blocks of 128x1 of dy in dw too; larger
    ones make this product as fast as the others. `quantize_fp8` describes the quantisation of a
    block.
    For both gradients the smallest scale is 1e-20 / 448 instead of 1e-4 / 448, because gradients
    may be small.

    Args:
        x: Input of shape [..., F]; bfloat16, float16 or float32.
        w: Weights of shape [F, O]; bfloat16, float16 or float32, not necessarily x's dtype. The
            gradient is rounded only once, to w's dtype, so float32 master weights get the float32
            sum.
        power_of_two_scale: Whether all scales are rounded up to powers of two.
        dtype: Dtype of the result: bfloat16, float16 or float32. Default: x's dtype.
        implementation: None (the CUDA kernels if available, else XLA), "cuda" or "xla".

    Returns:
        The product, of shape [..., O] and dtype `dtype`.

    Raises:
        TypeError: If an argument has the wrong type or dtype.
        ValueError: If an argument has the wrong shape or value.
        NotImplementedError: If `implementation="cuda"` cannot run this call.

    Examples:
        >>> import jax, jax.numpy as jnp, jax_dsa
        >>> x = jax.random.normal(jax.random.key(0), (4, 256), jnp.bfloat16)
        >>> w = jax.random.normal(jax.random.key(1), (256, 8))
        >>> dw = jax.grad(lambda w: jax_dsa.fp8_linear(x, w).sum())(w)
        >>> dw.shape, dw.dtype.name
        ((256, 8), 'float32')
    """
    rows = leading_dims(x, "F")
    args = Args("fp8_linear", "x", x, rows)
    call = args.call(implementation)
    x = args.array("x", x, rows, INPUTS)
    w = weights(args, "w", w, "F O", INPUTS)
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
