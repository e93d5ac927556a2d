"""Exact, deterministic top-k."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Literal, NoReturn, overload

import jax
import jax.numpy as jnp

from jax_dsa.core import compat
from jax_dsa.core.arguments import key_ranges
from jax_dsa.core.checks import FLOATS, INT32, Args, as_array
from jax_dsa.core.ffi import Kernel
from jax_dsa.core.op import Pass, differentiable
from jax_dsa.core.typing import Array, Float, Implementation, Int
from jax_dsa.ops.topk import cuda, xla
from jax_dsa.ops.topk.spec import (
    BlockOperands,
    BlockResults,
    Blocks,
    Gradients,
    Operands,
    Options,
    Results,
    Selected,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from jax_dsa.core.call import Call

FWD = Pass(
    "topk_fwd",
    xla.topk_fwd,
    shardable="b t",
    kernel=Kernel(
        cuda.topk_fwd,
        cuda.supports,
        limits=f"float32 rows; top_k up to {cuda.MAX_SELECTED}",
        portable=cuda.supports,
    ),
)
BWD = Pass("topk_bwd", xla.topk_bwd, shardable="b t")


def _bwd(call: Call, options: Options, x: Selected, dy: Results) -> Gradients:
    # The backward pass only scatters values; it has no kernel and needs none.
    return BWD(call.auxiliary, options, x, dy)


# The operator without checks of its arguments.
topk_op = differentiable("topk", FWD, _bwd, residuals=lambda x, y: (Selected(y.indices),))

BLOCK_FWD = Pass(
    "block_topk_fwd",
    xla.block_topk_fwd,
    shardable="b t",
    kernel=Kernel(
        cuda.block_topk_fwd,
        cuda.block_supports,
        limits=f"float32; up to {cuda.MAX_BLOCKS} blocks",
        portable=cuda.block_supports,
    ),
)


def _no_block_gradient(call: Call, options: Blocks, dy: BlockResults) -> NoReturn:
    raise AssertionError("block_topk returns integers only")


block_topk_op = differentiable(
    "block_topk", BLOCK_FWD, _no_block_gradient, residuals=lambda x, y: ()
)

IndicesValues = tuple[Int[Array, "... K"], Float[Array, "... K"]]


@overload
def topk(
    x: Float[Array, "... S"],
    top_k: int,
    *,
    starts: Int[Array, "..."] | None = None,
    ends: Int[Array, "..."] | None = None,
    return_values: Literal[False] = False,
    implementation: Implementation | None = None,
) -> Int[Array, "... K"]: ...
@overload
def topk(
    x: Float[Array, "... S"],
    top_k: int,
    *,
    starts: Int[Array, "..."] | None = None,
    ends: Int[Array, "..."] | None = None,
    return_values: Literal[True],
    implementation: Implementation | None = None,
) -> IndicesValues: ...
def topk(
    x: Float[Array, "... S"],
    top_k: int,
    *,
    starts: Int[Array, "..."] | None = None,
    ends: Int[Array, "..."] | None = None,
    return_values: bool = False,
    implementation: Implementation | None = None,
) -> Int[Array, "... K"] | IndicesValues:
    """Returns the indices of the `top_k` largest values of each row, in ascending index order.

    The selection is exact and the same on every run, device and implementation: larger values come
    first, and among equal values smaller indices come first. NaN and -inf are never selected, and
    +0 equals -0. If a row has fewer than `top_k` candidates, the remaining entries are -1.

    Args:
        x: Values; bfloat16, float16 or float32 (float64 if JAX has it enabled), with any number of
            leading axes.
        top_k: Number of indices per row, >= 0; may exceed S. At most 4096 on the CUDA kernel.
        starts: First candidate of each row, int32, clipped to 0..S. Default: 0.
        ends: Exclusive end of the candidates of each row, int32, clipped to 0..S. Default: S. A row
            with end <= start has no candidates.
        return_values: Whether to return the selected values, too. They are differentiable.
        implementation: None (the CUDA kernel if it supports the call, else XLA), "cuda" or "xla".

    Returns:
        Indices of shape [..., K], int32. With `return_values`, a tuple (indices, values), where the
        values have shape [..., K] and the dtype of x, and are -inf where the index is -1.

    Raises:
        TypeError, ValueError: If an argument has the wrong type, shape or range.
        NotImplementedError: If `implementation="cuda"` and the kernel does not support the call.

    Examples:
        >>> import jax.numpy as jnp, jax_dsa
        >>> x = jnp.array([[3.0, 1.0, 4.0, 1.0, 5.0], [2.0, jnp.nan, 2.0, 2.0, -jnp.inf]])
        >>> jax_dsa.topk(x, 2)
        Array([[2, 4],
               [0, 2]], dtype=int32)
    """
    return topk_of("topk", "x", x, top_k, starts, ends, return_values, implementation)


def topk_of(
    op: str,
    name: str,
    x: Any,
    top_k: Any,
    starts: Any = None,
    ends: Any = None,
    return_values: Any = False,
    implementation: Any = None,
) -> Any:
    """Runs `topk` for the public function `op`, whose argument `name` holds the rows."""
    rank = getattr(as_array(x), "ndim", 1)
    leading = ["B", "T", *(f"T{i}" for i in range(2, rank))][: max(1, rank - 1)]
    rows = " ".join(leading)
    args = Args(op, name, x, f"{rows} S")
    call = args.call(implementation)
    x = args.array(name, x, f"{rows} S", FLOATS)
    options = Options(
        top_k=args.integer("top_k", top_k, 0),
        size=x.shape[-1],
        return_values=args.flag("return_values", return_values),
    )
    flat = x.shape[:-1] if x.ndim > 2 else (*x.shape[:-1], 1)

    def bound(name: str, given: Array | None, default: int) -> Array:
        if given is None:
            return jnp.full(flat, default, jnp.int32)
        return jnp.clip(args.array(name, given, rows, INT32), 0, options.size).reshape(flat)

    ranges = bound("starts", starts, 0), bound("ends", ends, options.size)
    if len(flat) > 2:  # vmap needs operands with the same sharding.
        ranges = compat.shard_as(ranges[0], x), compat.shard_as(ranges[1], x)
    starts, ends = ranges
    operands = Operands(x=x.reshape(*flat, options.size), starts=starts, ends=ends)
    select: Callable[[Operands], Results] = functools.partial(topk_op, call, options)
    # One reshape to two leading axes would gather axes that are sharded.
    for _ in range(len(flat) - 2):
        select = jax.vmap(select)
    shape = (*x.shape[:-1], options.top_k)
    indices, values = jax.tree.map(lambda y: y.reshape(shape), select(operands))
    return args.restore(indices) if values is None else args.restore((indices, values))


def blocks_of(
    args: Args, top_k: Any, block_size: Any, sink_blocks: Any, local_blocks: Any
) -> Blocks:
    """Returns the checked arguments of these names."""
    return Blocks(
        top_k=args.integer("top_k", top_k, 0),
        block_size=args.integer("block_size", block_size, 1),
        sink_blocks=args.integer("sink_blocks", sink_blocks, 0),
        local_blocks=args.integer("local_blocks", local_blocks, 0),
    )


def block_topk(
    logits: Float[Array, "B T S"],
    top_k: int,
    *,
    block_size: int,
    sink_blocks: int = 0,
    local_blocks: int = 1,
    starts: Int[Array, "B T"] | None = None,
    ends: Int[Array, "B T"] | None = None,
    implementation: Implementation | None = None,
) -> Int[Array, "B T K"]:
    """Returns the numbers of the `top_k` blocks of keys with the largest logits for every query.

    A block's score is the largest logit of its keys in the query's range. The selection equals that
    of `indexer_block_topk` for the same logits. A layer that selects keys of its own and publishes
    blocks for other layers computes the logits once, with `indexer_logits`. The batch axis may be
    absent from all arguments.

    Args:
        logits: Logits of all keys; bfloat16, float16 or float32. A logit of -inf means that the
            query does not see the key. NaN makes the score of its block NaN.
        top_k: Number of blocks K to select per query, forced blocks included, >= 0.
        block_size: Number of keys per block. The last block of a query may have fewer.
        sink_blocks: As in `indexer_block_topk`.
        local_blocks: As in `indexer_block_topk`.
        starts: First key of each query, int32, from which its blocks count. Default: 0.
        ends: Exclusive end of the keys of each query, int32. Default: S.
        implementation: As in `topk`.

    Returns:
        Numbers of the selected blocks, [B, T, K], int32: ascending, then -1.

    Raises:
        TypeError, ValueError: If an argument has the wrong type, shape or range.
        NotImplementedError: If `implementation="cuda"` and the kernel does not support the call.

    Examples:
        >>> import jax.numpy as jnp, jax_dsa
        >>> logits = jnp.array([[3.0, 1.0, 4.0, 1.0, 5.0, 2.0, -jnp.inf]])  # blocks: 3, 4, 5, -
        >>> jax_dsa.block_topk(logits, 2, block_size=2, local_blocks=0)
        Array([[1, 2]], dtype=int32)
        >>> jax_dsa.block_topk(logits, 2, block_size=2, sink_blocks=1)
        Array([[0, 2]], dtype=int32)
    """
    args = Args("block_topk", "logits", logits, "B T S")
    call = args.call(implementation)
    logits = args.array("logits", logits, "B T S", FLOATS)
    options = blocks_of(args, top_k, block_size, sink_blocks, local_blocks)
    first, ends = key_ranges(args, starts, ends)
    x = BlockOperands(logits=logits, starts=None if starts is None else first, ends=ends)
    return args.restore(block_topk_op(call, options, x)).indices
