"""FP8 (e4m3) block quantisation, its inverse, and the matmul of its results."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from jax_dsa.core.checks import Args
from jax_dsa.core.derivative import in_plain_xla
from jax_dsa.core.ffi import Kernel
from jax_dsa.core.op import Pass, differentiable
from jax_dsa.reference import fp8 as reference

if TYPE_CHECKING:
    from jaxtyping import Array, Float

    from jax_dsa.core.checks import Implementation

    Block = int | tuple[int, int]

BLOCK = 128  # of activations (1x128), of weights (128x128), and of the matmul's accumulation
E4M3 = (jnp.float8_e4m3fn,)
INPUTS = (jnp.bfloat16, jnp.float16, jnp.float32)
SCALES = (jnp.float32,)
SHARDED_ROWS = "b l0 l1 l2 l3 l4 l5 l6 l7"


@dataclasses.dataclass(frozen=True)
class QuantizeOptions:
    """Static options of quantisation and its inverse. The dims leave out the batch axis."""

    block: tuple[int, int]
    dims: str
    scale_dims: str
    power_of_two_scale: bool = False
    dtype: Any = None  # of what dequantisation returns


@dataclasses.dataclass(frozen=True)
class MatmulOptions:
    """Static options of the matmul. The dims leave out the batch axis; K is the contracted axis."""

    dtype: Any
    quantized: tuple[bool, bool]  # whether a and b come quantised; else they have gradients
    a: QuantizeOptions
    b: QuantizeOptions
    rows: str
    n: tuple[str, str]  # dims of the axis and of its axis of blocks
    k: tuple[str, str]
    block: int = BLOCK


# Dims of an axis and of its axis of blocks. An axis of whole blocks is sharded by blocks; one whose
# last block is shorter cannot be split where its blocks are, so its letters are not shardable ones.
def _row_axis(size: int, block: int) -> tuple[str, str]:
    return ("(i p)", "i") if size % block == 0 else ("r", "y")


def _col_axis(size: int, block: int) -> tuple[str, str]:
    return ("(j q)", "j") if size % block == 0 else ("c", "z")


def _rows(count: int) -> str:
    return " ".join(f"l{i}" for i in range(count))


def _quantize_options(
    shape: tuple[int, ...], block: tuple[int, int], **kwargs: Any
) -> QuantizeOptions:
    """The options for an array of `shape`."""
    axes = [_col_axis(shape[-1], block[1])]
    if block[0] != 1:
        axes.insert(0, _row_axis(shape[-2], block[0]))
    rows = _rows(len(shape) - len(axes))
    dims, scale_dims = (" ".join([rows, *tokens]) for tokens in zip(*axes, strict=True))
    return QuantizeOptions(block, dims, scale_dims, **kwargs)


def _kernel_supports(options: QuantizeOptions, x: Any) -> str | None:
    if options.block != (1, BLOCK):
        return f"it has blocks of 1x{BLOCK}, got {options.block[0]}x{options.block[1]}"
    if x.dtype not in [jnp.dtype(d) for d in INPUTS]:
        return f"it takes bfloat16, float16 and float32, got {x.dtype}"
    return None


QUANTIZE = Pass(
    "quantize_fp8",
    lambda o: f"b {o.dims} -> b {o.dims}, b {o.scale_dims}",
    reference.quantize,
    shardable=f"{SHARDED_ROWS} i j",
    kernel=Kernel(
        target="jax_dsa.quantize_fp8.v1",
        limits="bfloat16, float16 and float32; blocks of 1x128",
        supported=_kernel_supports,
        attrs=lambda o, _: {"power_of_two_scale": np.bool_(o.power_of_two_scale)},
    ),
)
DEQUANTIZE_FWD = Pass(
    "dequantize_fp8_fwd",
    lambda o: f"b {o.dims}, b {o.scale_dims} -> b {o.dims}",
    reference.dequantize_fwd,
    shardable=f"{SHARDED_ROWS} i j",
)
DEQUANTIZE_BWD = Pass(
    "dequantize_fp8_bwd",
    lambda o: f"b {o.dims}, b {o.dims} -> b {o.scale_dims}",
    reference.dequantize_bwd,
    shardable=f"{SHARDED_ROWS} i j",
)


def _matmul_fwd_dims(o: MatmulOptions) -> str:
    (n, n_blocks), (k, k_blocks) = o.n, o.k
    a, b = f"b {o.rows} {k}, b {o.rows} {k_blocks}", f"b {n} {k}, b {n_blocks} {k_blocks}"
    return f"{a}, {b} -> b {o.rows} {n}"


def _matmul_bwd_a_dims(o: MatmulOptions) -> str:
    (n, n_blocks), (k, k_blocks) = o.n, o.k
    return f"b {o.rows} {n}, b {n} {k}, b {n_blocks} {k_blocks} -> b {o.rows} {k}"


def _matmul_bwd_b_dims(o: MatmulOptions) -> str:
    k, k_blocks = o.k
    return f"b {o.rows} i, b {o.rows} {k}, b {o.rows} {k_blocks} -> b i {k}"


# The contracted axis stays whole in the forward pass, whose sum is rounded once, at the end.
MATMUL_FWD = Pass(
    "fp8_matmul_fwd", _matmul_fwd_dims, reference.matmul_fwd, shardable=f"{SHARDED_ROWS} i"
)
MATMUL_BWD_A = Pass(
    "fp8_matmul_bwd_a", _matmul_bwd_a_dims, reference.matmul_bwd_a, shardable=f"{SHARDED_ROWS} i j"
)
MATMUL_BWD_B = Pass(
    "fp8_matmul_bwd_b", _matmul_bwd_b_dims, reference.matmul_bwd_b, shardable=f"{SHARDED_ROWS} i j"
)


def _quantize_fwd(options: QuantizeOptions, implementation: Any, x: Any) -> Any:
    x = jax.lax.stop_gradient(x) if in_plain_xla() else x
    return QUANTIZE(options, x, implementation=implementation), None


def _quantize_bwd(*_: Any) -> NoReturn:
    raise TypeError(
        "quantize_fp8: its results have no gradient (JAX would round their cotangents to e4m3). "
        "Use fake_quantize_fp8, or give fp8_matmul the unquantised array: both pass gradients "
        "straight through. Where no gradient is meant, quantise jax.lax.stop_gradient(x)"
    )


def _dequantize_fwd(options: QuantizeOptions, implementation: Any, q: Any, scale: Any) -> Any:
    return DEQUANTIZE_FWD(options, q, scale, implementation=implementation), (q,)


def _dequantize_bwd(options: QuantizeOptions, implementation: Any, residuals: Any, cts: Any) -> Any:
    (dscale,) = DEQUANTIZE_BWD(options, *residuals, *cts, implementation=implementation)
    return None, dscale


def _unless_cuda(implementation: Any) -> Any:
    """For a step that the caller's choice of a kernel does not speak of."""
    return None if implementation == "cuda" else implementation


def _straight_through(y: Any, x: Any) -> Any:
    """y, with the gradient of x."""
    return y + (x - jax.lax.stop_gradient(x)).astype(y.dtype)


def _fake_quantize_fwd(options: QuantizeOptions, implementation: Any, x: Any) -> Any:
    codes = QUANTIZE(options, jax.lax.stop_gradient(x), implementation=implementation)
    (y,) = DEQUANTIZE_FWD(options, *codes, implementation=_unless_cuda(implementation))
    return (_straight_through(y, x) if in_plain_xla() else y,), None


def _fake_quantize_bwd(_options: Any, _implementation: Any, _residuals: Any, cts: Any) -> Any:
    return cts


def _matmul_fwd(
    options: MatmulOptions, implementation: Any, a: Any, a_scale: Any, b: Any, b_scale: Any
) -> Any:
    if in_plain_xla():
        return (_plain_matmul(options, a, a_scale, b, b_scale),), None
    if a_scale is None:
        a, a_scale = QUANTIZE(options.a, a, implementation=_unless_cuda(implementation))
    if b_scale is None:
        b, b_scale = QUANTIZE(options.b, b, implementation=_unless_cuda(implementation))
    operands = (a, a_scale, b, b_scale)
    return MATMUL_FWD(options, *operands, implementation=implementation), operands


def _plain_matmul(options: MatmulOptions, a: Any, a_scale: Any, b: Any, b_scale: Any) -> Any:
    """The product in terms that JAX differentiates as `_matmul_bwd` does."""

    def value(options: QuantizeOptions, x: Any, scale: Any) -> Any:
        if scale is None:
            return _fake_quantize_fwd(options, "xla", x.astype(jnp.float32))[0][0]
        return DEQUANTIZE_FWD(options, x, jax.lax.stop_gradient(scale))[0]

    a, b = value(options.a, a, a_scale), value(options.b, b, b_scale)
    return reference.matmul(a, b).astype(options.dtype)


def _matmul_bwd(options: MatmulOptions, implementation: Any, residuals: Any, cts: Any) -> Any:
    a, a_scale, b, b_scale = residuals
    da = db = None
    if not options.quantized[0]:
        (da,) = MATMUL_BWD_A(options, *cts, b, b_scale, implementation=implementation)
    if not options.quantized[1]:
        (db,) = MATMUL_BWD_B(options, *cts, a, a_scale, implementation=implementation)
    return da, None, db, None


_quantize = differentiable("quantize_fp8", _quantize_fwd, _quantize_bwd)
_dequantize = differentiable("dequantize_fp8", _dequantize_fwd, _dequantize_bwd)
_fake_quantize = differentiable("fake_quantize_fp8", _fake_quantize_fwd, _fake_quantize_bwd)
_matmul = differentiable("fp8_matmul", _matmul_fwd, _matmul_bwd)


def _leading(x: Any, last: str) -> str:
    """Dims of `x` for messages: any leading axes, then `last`."""
    extra = max(0, getattr(x, "ndim", 0) - len(last.split()))
    return " ".join([*(["B", "T", *(f"T{i}" for i in range(2, extra))][:extra]), last])


def _check_block(args: Args, block: Any) -> tuple[int, int]:
    if not isinstance(block, tuple | list):
        return 1, args.integer("block", block, 1)
    args.option("block", block, len(block) == 2, "an int >= 1, or a pair of them: rows, columns")
    return args.integer("block", block[0], 1), args.integer("block", block[1], 1)


def _check_dtype(args: Args, dtype: Any) -> Any:
    names = [jnp.dtype(d).name for d in INPUTS]
    name = jnp.dtype(dtype).name
    args.option("dtype", name, name in names, " or ".join(names))
    return jnp.dtype(dtype)


def _check_x(op: str, x: Any, block: Any, dtypes: Any) -> tuple[Args, Any, tuple[int, int]]:
    """The array to quantise or to dequantise, and its blocks."""
    dims = _leading(x, "C")
    args = Args(op, "x", x, dims)
    rows, cols = _check_block(args, block)
    if rows != 1 and x.ndim < 2:
        dims = "R C"
    return args, args.array("x", x, dims, dtypes), (rows, cols)


def quantize_fp8(
    x: Float[Array, "... C"],
    *,
    block: Block = BLOCK,
    power_of_two_scale: bool = False,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "... C"], Float[Array, "... J"]]:
    """Quantises to float8_e4m3fn with one scale for every block of elements.

    For every block, `scale = max(max|x|, 1e-4) / 448` and `q = e4m3(x / scale)`, both divisions
    correctly rounded and the conversion to the nearest code, ties to even: the same bits on every
    device and implementation. This is the quantisation of DeepSeek-V3 (arXiv:2412.19437, section
    3.3): blocks of 1x128 for activations and 128x128 for weights.

    A block that holds a NaN or an infinity has NaN for its scale and in all its codes; other blocks
    are not affected.

    Args:
        x: bfloat16, float16 or float32, with any leading axes or none.
        block: elements of the last axis that share a scale; or a pair, rows and columns of the last
            two axes. The last block of an axis may be shorter.
        power_of_two_scale: round every scale up to a power of two, so that dividing by it is exact.
        implementation: None (the kernel where there is one, else XLA), "cuda" or "xla". The kernel
            has blocks of 1x128.

    Returns:
        The codes, float8_e4m3fn of x's shape, and the scales, float32, with ceil(C / block) for C
        (and ceil(R / rows) for R).

    Raises:
        TypeError, ValueError: an argument has the wrong type, shape or range. A TypeError also if a
            gradient reaches the results: see `fake_quantize_fp8`.
        NotImplementedError: `implementation="cuda"` cannot run this call here.
    """
    args, x, block = _check_x("quantize_fp8", x, block, INPUTS)
    power = args.flag("power_of_two_scale", power_of_two_scale)
    options = _quantize_options(x.shape, block, power_of_two_scale=power)
    q, scale = _quantize(options, args.implementation(implementation), x[None])
    return q[0], scale[0]


def dequantize_fp8(
    x: Float[Array, "... C"],
    scale: Float[Array, "... J"],
    *,
    block: Block = BLOCK,
    dtype: Any = jnp.float32,
    implementation: Implementation | None = None,
) -> Float[Array, "... C"]:
    """The inverse of `quantize_fp8`: every code times its block's scale.

    Differentiable in the scales. The codes are constants.

    Args:
        x: float8_e4m3fn codes.
        scale: float32, the blocks' scales as `quantize_fp8` returns them.
        block: that of the quantisation.
        dtype: of the result: float32, bfloat16 or float16. With power-of-two scales all of them are
            exact (float16 within its range).
        implementation: None or "xla"; there is no kernel.

    Raises:
        TypeError, ValueError: an argument has the wrong type, shape or range.
        NotImplementedError: `implementation="cuda"`.
    """
    args, x, block = _check_x("dequantize_fp8", x, block, E4M3)
    options = _quantize_options(x.shape, block, dtype=_check_dtype(args, dtype))
    shape = [*x.shape[:-1], -(-x.shape[-1] // block[1])]
    if block[0] != 1:
        shape[-2] = -(-shape[-2] // block[0])
    scale = args.array("scale", scale, " ".join(map(str, shape)), SCALES)
    (y,) = _dequantize(options, args.implementation(implementation), x[None], scale[None])
    return y[0]


def fake_quantize_fp8(
    x: Float[Array, "... C"],
    *,
    block: Block = BLOCK,
    power_of_two_scale: bool = False,
    implementation: Implementation | None = None,
) -> Float[Array, "... C"]:
    """`x` rounded to what its FP8 quantisation holds, in x's dtype, with the gradient of `x`.

    `dequantize_fp8(*quantize_fp8(x))` with a straight-through gradient: for training a model that
    will run on quantised values. Arguments, limits and errors are those of `quantize_fp8`.
    """
    args, x, block = _check_x("fake_quantize_fp8", x, block, INPUTS)
    power = args.flag("power_of_two_scale", power_of_two_scale)
    options = _quantize_options(x.shape, block, power_of_two_scale=power, dtype=x.dtype)
    (y,) = _fake_quantize(options, args.implementation(implementation), x[None])
    return y[0]


def fp8_matmul(
    a: Float[Array, "... K"],
    a_scale: Float[Array, "... J"] | None,
    b: Float[Array, "N K"],
    b_scale: Float[Array, "I J"] | None,
    *,
    power_of_two_scale: bool = False,
    dtype: Any = None,
    implementation: Implementation | None = None,
) -> Float[Array, "... N"]:
    """`a @ b.T` of block-quantised operands: activations by 1x128, weights by 128x128.

    `out[m, n] = sum over blocks j of K: a_scale[m, j] * b_scale[n // 128, j] * sum over k in j:
    a[m, k] * b[n, k]`, accumulated in float32 and rounded once.

    An operand given without its scale is quantised here, and then has a gradient: straight through
    its quantisation, from a matmul in the result's dtype (bf16 for bf16 models) with the other
    operand's dequantised values. The backward pass keeps the codes, not the operand. Operands that
    come quantised are constants.

    Args:
        a: float8_e4m3fn codes if `a_scale` is given, else bfloat16, float16 or float32; any leading
            axes.
        a_scale: float32, one for every 1x128 block of a; or None.
        b: likewise; codes or not.
        b_scale: float32, one for every 128x128 block of b; or None.
        power_of_two_scale: for the operands that are quantised here.
        dtype: of the result, bfloat16, float16 or float32; default a's, bfloat16 if a is codes.
        implementation: None or "xla"; there is no kernel yet. XLA multiplies float32, on a GPU in
            TF32 unless `jax.default_matmul_precision` says otherwise.

    Raises:
        TypeError, ValueError: an argument has the wrong type, shape or range.
        NotImplementedError: `implementation="cuda"`.
    """
    rows = _leading(a, "K")
    args = Args("fp8_matmul", "a", a, rows)
    a = args.array("a", a, rows, INPUTS if a_scale is None else E4M3)
    b = args.array("b", b, "N K", INPUTS if b_scale is None else E4M3)
    blocks_n, blocks_k = (-(-n // BLOCK) for n in b.shape)
    if a_scale is not None:
        want = " ".join(map(str, (*a.shape[:-1], blocks_k)))
        a_scale = args.array("a_scale", a_scale, want, SCALES)[None]
    if b_scale is not None:
        b_scale = args.array("b_scale", b_scale, f"{blocks_n} {blocks_k}", SCALES)[None]
    power = args.flag("power_of_two_scale", power_of_two_scale)
    if dtype is None:
        dtype = jnp.bfloat16 if a_scale is not None else a.dtype

    # In the plain XLA route the operands are dequantised to float32.
    plain = {"power_of_two_scale": power, "dtype": jnp.float32}
    options = MatmulOptions(
        dtype=_check_dtype(args, dtype),
        quantized=(a_scale is not None, b_scale is not None),
        a=_quantize_options(a.shape, (1, BLOCK), **plain),
        b=_quantize_options(b.shape, (BLOCK, BLOCK), **plain),
        rows=_rows(a.ndim - 1),
        n=_row_axis(b.shape[0], BLOCK),
        k=_col_axis(b.shape[1], BLOCK),
    )
    implementation = args.implementation(implementation)
    (out,) = _matmul(options, implementation, a[None], a_scale, b[None], b_scale)
    return out[0]
