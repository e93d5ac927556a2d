"""FP8 (e4m3) quantisation with one scale per block, and dequantisation."""

from __future__ import annotations

from typing import Any, NoReturn

import jax
import jax.numpy as jnp

from jax_dsa.core.arguments import NO_SYMBOL
from jax_dsa.core.call import Call
from jax_dsa.core.checks import Args
from jax_dsa.core.ffi import Kernel
from jax_dsa.core.op import Pass, differentiable
from jax_dsa.core.typing import Array, Float, Implementation
from jax_dsa.ops.quantize_fp8 import cuda, xla
from jax_dsa.ops.quantize_fp8.spec import (
    BLOCK,
    E4M3,
    INPUTS,
    SCALES,
    SHARDED_ROWS,
    Codes,
    Gradients,
    OnlyCodes,
    Operands,
    Options,
    ScaleGradients,
    Values,
    leading_dims,
)

Block = int | tuple[int, int]

_LIMITS = "bfloat16, float16 and float32; blocks of 1x128 and 128x128"

QUANTIZE = Pass(
    "quantize_fp8",
    xla.quantize_fp8,
    shardable=f"{SHARDED_ROWS} i j",
    kernel=Kernel(cuda.quantize_fp8, cuda.supports, limits=_LIMITS, portable=cuda.supports),
)
DEQUANTIZE_FWD = Pass(
    "dequantize_fp8_fwd",
    xla.dequantize_fp8_fwd,
    shardable=f"{SHARDED_ROWS} i j",
    kernel=Kernel(cuda.dequantize_fp8_fwd, cuda.supports, limits=_LIMITS, portable=cuda.supports),
)
DEQUANTIZE_BWD = Pass("dequantize_fp8_bwd", xla.dequantize_fp8_bwd, shardable=f"{SHARDED_ROWS} i j")


def _quantize_fwd(call: Call, options: Options, x: Operands) -> Codes:
    return QUANTIZE(call, options, jax.lax.stop_gradient(x))


def _quantize_bwd(call: Call, *_: Any) -> NoReturn:
    raise TypeError(
        f"{call.op}: the results have no gradient, because JAX would round their cotangents to "
        "e4m3. Use fake_quantize_fp8, or pass the unquantised array to fp8_matmul: both pass "
        "gradients straight through. If no gradient is wanted, quantise jax.lax.stop_gradient(x)"
    )


def _fake_quantize_fwd(call: Call, options: Options, x: Operands) -> Values:
    codes = QUANTIZE(call, options, jax.lax.stop_gradient(x))
    y = DEQUANTIZE_FWD(call.auxiliary, options, codes).x
    if call.implementation == "plain":
        # JAX differentiates this code. The added term is zero, and its gradient is that of x.
        y = y + (x.x - jax.lax.stop_gradient(x.x)).astype(y.dtype)
    return Values(y)


def _fake_quantize_bwd(call: Call, options: Options, dy: Values) -> Gradients:
    return Gradients(dy.x)


def _dequantize_bwd(call: Call, options: Options, x: OnlyCodes, dy: Values) -> ScaleGradients:
    # Nothing but a sum per block, which XLA computes as fast as a kernel would.
    return DEQUANTIZE_BWD(call.auxiliary, options, x, dy)


# The operators without argument checks.
quantize_fp8_op = differentiable(
    "quantize_fp8", _quantize_fwd, _quantize_bwd, residuals=lambda x, y: ()
)
dequantize_fp8_op = differentiable(
    "dequantize_fp8",
    DEQUANTIZE_FWD,
    _dequantize_bwd,
    residuals=lambda x, y: (OnlyCodes(x.codes),),
)
fake_quantize_fp8_op = differentiable(
    "fake_quantize_fp8", _fake_quantize_fwd, _fake_quantize_bwd, residuals=lambda x, y: ()
)


def _check_block(args: Args, block: Any) -> tuple[int, int]:
    """Returns the rows and columns of a block."""
    if not isinstance(block, tuple | list):
        return 1, args.integer("block", block, 1)
    args.option("block", block, len(block) == 2, "an int >= 1, or a pair of them: rows, columns")
    return args.integer("block", block[0], 1), args.integer("block", block[1], 1)


def _check_x(op: str, x: Any, block: Any, dtypes: Any) -> tuple[Args, Any, tuple[int, int]]:
    """Returns the checks of the call, the checked array, and the rows and columns of a block."""
    dims = leading_dims(x, "F")
    args = Args(op, "x", x, dims)
    rows, cols = _check_block(args, block)
    if rows != 1 and dims == "F":
        dims = "R F"
    x = args.array("x", x, dims, dtypes)
    blocked = x.shape[-1:] if rows == 1 else x.shape[-2:]
    args.shape("x", x, all(isinstance(n, int) for n in blocked), f"blocks of {NO_SYMBOL}")
    return args, x, (rows, cols)


def quantize_fp8(
    x: Float[Array, "... F"],
    *,
    block: Block = BLOCK,
    power_of_two_scale: bool = False,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "... F"], Float[Array, "... J"]]:
    """Quantises an array to float8_e4m3fn with one scale per block of elements.

    For each block, `scale = max(max|x|, 1e-4) / 448` and `q = e4m3(x / scale)`. Both divisions are
    correctly rounded, and the conversion rounds to nearest with ties to even. Results are the same
    bits on every device and with every implementation. This is the quantisation of DeepSeek-V3
    (arXiv:2412.19437, section 3.3), which uses blocks of 1x128 for activations and of 128x128 for
    weights.

    If a block contains a NaN or an infinity, its scale and all its codes are NaN. Other blocks are
    not affected.

    Args:
        x: Array of shape [..., F] or [..., R, F]; bfloat16, float16 or float32.
        block: Number of elements of the last axis that share a scale, or a pair (rows, columns) of
            sizes along the last two axes. The last block of an axis may be shorter.
        power_of_two_scale: Whether to round each scale up to a power of two. Division by the scale
            is then exact.
        implementation: None (the CUDA kernel if it supports the call, else XLA), "cuda" or "xla".
            The kernels support blocks of 1x128 and 128x128.

    Returns:
        The codes, float8_e4m3fn, of the shape of `x`, and the scales, float32. The last axis of the
        scales has length ceil(F / block). With a pair, the last two axes have lengths
        ceil(R / rows) and ceil(F / columns).

    Raises:
        TypeError: If an argument has the wrong type or dtype, or if a gradient reaches the results.
            Use `fake_quantize_fp8` for gradients.
        ValueError: If an argument has the wrong shape or value.
        NotImplementedError: If `implementation="cuda"` cannot run this call.

    Examples:
        >>> import jax.numpy as jnp, jax_dsa
        >>> codes, scale = jax_dsa.quantize_fp8(jnp.arange(256.0))
        >>> codes.dtype.name, (scale * 448).round()  # the largest value of each block of 128
        ('float8_e4m3fn', Array([127., 255.], dtype=float32))
    """
    args, x, block = _check_x("quantize_fp8", x, block, INPUTS)
    call = args.call(implementation)
    power = args.flag("power_of_two_scale", power_of_two_scale)
    options = Options.of(x.shape, block, power_of_two_scale=power)
    codes, scale = quantize_fp8_op(call, options, Operands(x[None]))
    return codes[0], scale[0]


def dequantize_fp8(
    x: Float[Array, "... F"],
    scale: Float[Array, "... J"],
    *,
    block: Block = BLOCK,
    dtype: Any = jnp.float32,
    implementation: Implementation | None = None,
) -> Float[Array, "... F"]:
    """Returns each code times the scale of its block, which inverts `quantize_fp8`.

    The result is differentiable with respect to the scales. The codes are constants.

    Args:
        x: Codes of shape [..., F] or [..., R, F]; float8_e4m3fn.
        scale: Scales of the blocks, of the shape that `quantize_fp8` returns; float32.
        block: The `block` that was passed to `quantize_fp8`.
        dtype: Dtype of the result: float32, bfloat16 or float16. With power-of-two scales the
            result is exact in each of them (in float16 within its range).
        implementation: None (the CUDA kernel if it supports the call, else XLA), "cuda" or "xla".
            The kernels support blocks of 1x128 and 128x128. The gradient always runs in XLA.

    Returns:
        The values, of the shape of `x` and of dtype `dtype`.

    Raises:
        TypeError: If an argument has the wrong type or dtype.
        ValueError: If an argument has the wrong shape or value.
        NotImplementedError: If `implementation="cuda"` cannot run this call.

    Examples:
        >>> import jax.numpy as jnp, jax_dsa
        >>> x = jnp.array([1.0, 2.0, 4.0])
        >>> jax_dsa.dequantize_fp8(*jax_dsa.quantize_fp8(x, power_of_two_scale=True))
        Array([1., 2., 4.], dtype=float32)
    """
    given = block
    args, x, block = _check_x("dequantize_fp8", x, block, E4M3)
    call = args.call(implementation)
    options = Options.of(x.shape, block, dtype=args.dtype("dtype", dtype, INPUTS))
    dims = leading_dims(x, "J").split()
    args.bind("J", -(-x.shape[-1] // block[1]), f"'x' and block={given}")
    if block[0] != 1:
        dims[-2] = "I"
        args.bind("I", -(-x.shape[-2] // block[0]), f"'x' and block={given}")
    scale = args.array("scale", scale, " ".join(dims), SCALES)
    return dequantize_fp8_op(call, options, Codes(x[None], scale[None])).x[0]


def fake_quantize_fp8(
    x: Float[Array, "... F"],
    *,
    block: Block = BLOCK,
    power_of_two_scale: bool = False,
    implementation: Implementation | None = None,
) -> Float[Array, "... F"]:
    """Quantises `x` to FP8 and dequantises it again, with a straight-through gradient.

    The result is `dequantize_fp8(*quantize_fp8(x))` in x's dtype. Its gradient with respect to `x`
    is the cotangent, unchanged. This is for training a model that will run on quantised values.

    Args:
        x: Array of shape [..., F] or [..., R, F]; bfloat16, float16 or float32.
        block: As in `quantize_fp8`.
        power_of_two_scale: As in `quantize_fp8`.
        implementation: As in `quantize_fp8`.

    Returns:
        The rounded values, of the shape and dtype of `x`.

    Raises:
        TypeError: If an argument has the wrong type or dtype.
        ValueError: If an argument has the wrong shape or value.
        NotImplementedError: If `implementation="cuda"` cannot run this call.

    Examples:
        >>> import jax, jax.numpy as jnp, jax_dsa
        >>> jax.grad(lambda x: jax_dsa.fake_quantize_fp8(x).sum())(jnp.arange(3.0))
        Array([1., 1., 1.], dtype=float32)
    """
    args, x, block = _check_x("fake_quantize_fp8", x, block, INPUTS)
    call = args.call(implementation)
    power = args.flag("power_of_two_scale", power_of_two_scale)
    options = Options.of(x.shape, block, power_of_two_scale=power, dtype=x.dtype)
    return fake_quantize_fp8_op(call, options, Operands(x[None])).x[0]
