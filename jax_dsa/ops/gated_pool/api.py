"""`gated_pool` and `mean_pool`, which pool each block of tokens into one key."""

from __future__ import annotations

import jax

from jax_dsa.core.arguments import NO_SYMBOL
from jax_dsa.core.checks import FLOATS, INT32, WIDE_FLOATS, Args
from jax_dsa.core.ffi import Kernel
from jax_dsa.core.op import Pass, differentiable
from jax_dsa.core.typing import Array, Float, Implementation, Int
from jax_dsa.ops.gated_pool import cuda, xla
from jax_dsa.ops.gated_pool.spec import Operands, Options, Results

_LIMITS = (
    f"bfloat16, float16 and float32; R H to {cuda.MAX_POOLED}; D a multiple of {cuda.DIM_MULTIPLE}"
)

FWD = Pass(
    "gated_pool_fwd",
    xla.gated_pool_fwd,
    shardable="b d",
    kernel=Kernel(cuda.gated_pool_fwd, cuda.supports, limits=_LIMITS, portable=cuda.supports),
)
BWD = Pass(
    "gated_pool_bwd",
    xla.gated_pool_bwd,
    shardable="b d",
    kernel=Kernel(cuda.gated_pool_bwd, cuda.supports, limits=_LIMITS, portable=cuda.supports),
)

# The operator without the checks of its arguments.
gated_pool_op = differentiable("gated_pool", FWD, BWD, residuals=lambda x, y: (x,))


def gated_pool(
    values: Float[Array, "B S H D"],
    gates: Float[Array, "B S H D"],
    bias: Float[Array, "R H D"],
    starts: Int[Array, "B S"] | None = None,
    *,
    implementation: Implementation | None = None,
) -> Float[Array, "B S/R D"]:
    """Pools each block of R tokens into a key, with a softmax over gates in each channel.

        key[b, w] = sum over contributions i of softmax_i(gate_i + bias_i) * value_i

    With H = 1, the tokens of a block contribute to the key of their block. With H = 2, their second
    halves contribute to that key and their first halves to the key of the next block, so that each
    key is pooled from 2 R contributions. The batch axis may be absent from all arguments.

    Args:
        values: Values of the tokens; bfloat16, float16 or float32.
        gates: Gates of the values, in the dtype of `values`.
        bias: Bias that is added to the gates, by the token's position in its block; float32.
        starts: First row of each token's document, if a sequence holds several documents. The
            blocks of a document begin at its first row: block i of a document that begins at row s
            has the slot s // R + i. Default: one document, from row 0 on.
        implementation: None (the kernel where there is one, else XLA), "cuda" or "xla".

    Returns:
        The keys [B, S // R, D] in the dtype of `values`, with gradients for values, gates and bias.
        Slots without a block are zero. Fewer than R tokens at the end of a document form no block.

    Raises:
        TypeError, ValueError: If an argument has the wrong type or shape.
        NotImplementedError: For forward mode, gradients of gradients, or `implementation="cuda"`
            where the kernel does not cover the arguments.

    Examples:
        >>> import jax.numpy as jnp, jax_dsa
        >>> values = jnp.arange(8.0).reshape(1, 8, 1, 1)
        >>> gates, bias = jnp.zeros_like(values), jnp.zeros((4, 1, 1))
        >>> jax_dsa.gated_pool(values, gates, bias)[0, :, 0].tolist()
        [1.5, 5.5]

    Source: The compressor of keys of DeepSeek-V4 (2026). With H = 1, the function also pools the
    index keys of GLM-5.3-Flash (2026), whose `index_kpool_compress_ape` [R, D] is `bias[:, 0]`.
    """
    return _pooled(values, gates, bias, starts, None, implementation).keys


def mean_pool(
    values: Float[Array, "B S D"],
    ratio: int,
    starts: Int[Array, "B S"] | None = None,
    *,
    implementation: Implementation | None = None,
) -> Float[Array, "B S/R D"]:
    """Returns the mean of each block of R tokens.

    The values of a block are added in float32 (float64 for float64) in the order of the tokens,
    multiplied by 1/R, and rounded once to their dtype. The batch axis may be absent from all
    arguments.

    Args:
        values: Values of the tokens; bfloat16, float16 or float32.
        ratio: R, the number of tokens in a block.
        starts: First row of each token's document, as in `gated_pool`.
        implementation: None (the kernel where there is one, else XLA), "cuda" or "xla".

    Returns:
        The means [B, S // R, D] in the dtype of `values`, in the slots of `gated_pool`, with
        gradients for the values. Slots without a block are zero.

    Raises:
        TypeError, ValueError: If an argument has the wrong type, shape or range.
        NotImplementedError: For forward mode, gradients of gradients, or `implementation="cuda"`
            where the kernel does not cover the arguments.

    Examples:
        >>> import jax.numpy as jnp, jax_dsa
        >>> jax_dsa.mean_pool(jnp.arange(8.0).reshape(1, 8, 1), 4)[0, :, 0].tolist()
        [1.5, 5.5]

    Source: The index keys of Qwen3.8-Flash-Next (2026).
    """
    args = Args("mean_pool", "values", values, "B S D")
    call = args.call(implementation)
    values = args.array("values", values, "B S D", FLOATS)
    options = Options(args.integer("ratio", ratio, 1))
    starts = _starts(args, starts)
    operands = Operands(values[:, :, None], None, None, starts, None)
    return args.restore(gated_pool_op(call, options, operands)).keys


def gated_pool_for_norm(
    values: Float[Array, "B S H D"],
    gates: Float[Array, "B S H D"],
    bias: Float[Array, "R H D"],
    scale: Float[Array, "D"],
    starts: Int[Array, "B S"] | None = None,
    *,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "B S/R D"], Float[Array, "B S/R"]]:
    """Pools every R tokens into a key that an RMS norm follows.

    The norm of a key needs only these two results: it is `scaled_key * rsqrt(squares / D + eps)`.
    The kernel's backward pass then covers the norm's, except for one sum per key.

    Args:
        values: As in `gated_pool`.
        gates: As in `gated_pool`.
        bias: As in `gated_pool`.
        scale: The norm's scale of each element, float32.
        starts: As in `gated_pool`.
        implementation: None (the kernel where there is one, else XLA), "cuda" or "xla".

    Returns:
        keys: The keys times `scale`, in the dtype of `values`.
        squares: The sum of the squares of each key's elements before the scale, float32.

        Both have gradients for values, gates, bias and scale.

    Raises:
        TypeError, ValueError: If an argument has the wrong type or shape.
        NotImplementedError: For forward mode, gradients of gradients, or `implementation="cuda"`
            where the kernel does not cover the arguments.

    Examples:
        >>> import jax.numpy as jnp
        >>> from jax_dsa.ops.gated_pool import gated_pool_for_norm
        >>> values = jnp.arange(8.0).reshape(1, 8, 1, 1)
        >>> gates, bias = jnp.zeros_like(values), jnp.zeros((4, 1, 1))
        >>> keys, squares = gated_pool_for_norm(values, gates, bias, jnp.full(1, 2.0))
        >>> keys[0, :, 0].tolist(), squares[0].tolist()
        ([3.0, 11.0], [2.25, 30.25])
    """
    results = _pooled(values, gates, bias, starts, scale, implementation)
    assert results.squares is not None
    return results.keys, results.squares


def _pooled(
    values: Array,
    gates: Array,
    bias: Array,
    starts: Array | None,
    scale: Array | None,
    implementation: Implementation | None,
) -> Results:
    """Checks the arguments and runs the operator, with a scale or without."""
    args = Args("gated_pool", "values", values, "B S H D")
    call = args.call(implementation)
    values = args.array("values", values, "B S H D", FLOATS)
    gates = args.array("gates", gates, "B S H D", (values.dtype,))
    args.shape("values", values, values.shape[2] in (1, 2), "H of 1 or 2")
    bias = args.array("bias", bias, "R H D", WIDE_FLOATS)
    ratio = bias.shape[0]
    args.shape("bias", bias, isinstance(ratio, int), NO_SYMBOL)
    args.shape("bias", bias, ratio > 0, "R >= 1")
    starts = _starts(args, starts)
    if scale is not None:
        scale = args.array("scale", scale, "D", WIDE_FLOATS)[None]
    operands = Operands(values, gates, bias[None], starts, scale)
    return args.restore(gated_pool_op(call, Options(ratio), operands))


def _starts(args: Args, starts: Array | None) -> Int[Array, "B S"] | None:
    """Returns the checked argument 'starts'."""
    if starts is None:
        return None
    return jax.lax.stop_gradient(args.array("starts", starts, "B S", INT32))
