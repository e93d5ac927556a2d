"""Exact, deterministic top-k."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Literal, overload

import jax
import jax.numpy as jnp

from jax_dsa.core import compat
from jax_dsa.core.checks import FLOATS, INT32, Args, as_array
from jax_dsa.core.ffi import Kernel
from jax_dsa.core.op import Pass, differentiable
from jax_dsa.core.typing import Array, Float, Implementation, Int
from jax_dsa.ops.topk import cuda, xla
from jax_dsa.ops.topk.spec import Operands, Options, Results, Selected

if TYPE_CHECKING:
    from collections.abc import Callable

FWD = Pass(
    "topk_fwd",
    xla.topk_fwd,
    shardable="b t",
    kernel=Kernel(
        cuda.topk_fwd, cuda.supports, limits=f"float32 rows; top_k up to {cuda.MAX_SELECTED}"
    ),
)
BWD = Pass("topk_bwd", xla.topk_bwd, shardable="b t")

# The operator without its checks.
topk_op = differentiable("topk", FWD, BWD, residuals=lambda x, y: (Selected(y.indices),))

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
    """The positions of the `top_k` largest values of every row, in ascending order.

    The set is the `top_k` largest by (value descending, index ascending): exact, and the same bit
    for bit on every run, device and implementation. NaN and -inf are never selected, and +0 equals
    -0. A row with fewer than `top_k` candidates gives all of them, then -1.

    Args:
        x: rows of bfloat16, float16 or float32 values (float64 where JAX has it enabled), with any
            leading axes or none.
        top_k: how many to select, >= 0; may exceed S.
        starts: int32, each row's first candidate; default 0. Clipped to 0..S.
        ends: int32, one past each row's last candidate; default S. Clipped to 0..S; a row with end
            <= start is empty.
        return_values: also return the values at the positions, -inf where there is none. They are
            differentiable.
        implementation: None (the kernel where there is one, else XLA), "cuda" or "xla".

    Returns:
        int32 positions, or (positions, values of x's dtype).

    Raises:
        TypeError, ValueError: an argument has the wrong type, shape or range.
        NotImplementedError: `implementation="cuda"` cannot run this call here.

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
    """`topk` as part of the public function `op`, whose argument `name` the rows are."""
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
    if len(flat) > 2:  # what vmap maps has to lie alike
        ranges = compat.shard_as(ranges[0], x), compat.shard_as(ranges[1], x)
    operands = Operands(x.reshape(*flat, options.size), *ranges)
    select: Callable[[Operands], Results] = functools.partial(topk_op, call, options)
    for _ in range(len(flat) - 2):  # not one reshape, which would gather axes that are sharded
        select = jax.vmap(select)
    shape = (*x.shape[:-1], options.top_k)
    indices, values = jax.tree.map(lambda y: y.reshape(shape), select(operands))
    return args.restore(indices) if values is None else args.restore((indices, values))
