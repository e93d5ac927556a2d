"""Exact, deterministic top-k."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from jax_dsa.core.checks import FLOATS, INT32, Args
from jax_dsa.core.ffi import Kernel
from jax_dsa.core.op import Pass, differentiable
from jax_dsa.reference import topk as reference

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int

    from jax_dsa.core.checks import Implementation


@dataclasses.dataclass(frozen=True)
class TopkOptions:
    """Static options of `topk`."""

    k: int
    size: int  # S, which the gradient's arguments do not show
    return_values: bool


# The kernel's limits, as cuda/topk/topk.h has them.
_KERNEL_SELECTED = 4096
_KERNEL_SIZE = 2**31 - 1 - 2**16


def kernel_supports(options: TopkOptions, x: Any, *_: Any) -> str | None:
    """None, or why the kernel does not select from rows like those of `x`."""
    if x.dtype != jnp.float32:
        return f"it takes float32, got {x.dtype}"
    selected = min(options.k, options.size)
    if selected > _KERNEL_SELECTED:
        return f"it selects at most {_KERNEL_SELECTED} values of a row, want {selected}"
    if options.size > _KERNEL_SIZE:
        return f"it takes rows of at most {_KERNEL_SIZE} values, got {options.size}"
    return None


FWD = Pass(
    "topk_fwd",
    lambda o: "b t s, b t, b t -> " + ("b t k, b t k" if o.return_values else "b t k"),
    reference.topk_fwd,
    shardable="b t",
    kernel=Kernel(
        target="jax_dsa.topk_fwd.v1",
        limits=f"float32 rows; k up to {_KERNEL_SELECTED}",
        supported=kernel_supports,
    ),
)
BWD = Pass("topk_bwd", "b t k, b t k -> b t s", reference.topk_bwd, shardable="b t")


def _fwd(options: TopkOptions, implementation: Any, x: Any, starts: Any, ends: Any) -> Any:
    outs = FWD(options, x, starts, ends, implementation=implementation)
    return outs, outs[0]


def _bwd(options: TopkOptions, implementation: Any, indices: Any, cotangents: Any) -> Any:
    if not options.return_values:
        return None, None, None
    (dx,) = BWD(options, indices, cotangents[1], implementation=implementation)
    return dx, None, None


_topk = differentiable("topk", _fwd, _bwd)


def topk(
    x: Float[Array, "... S"],
    k: int,
    *,
    starts: Int[Array, "..."] | None = None,
    ends: Int[Array, "..."] | None = None,
    return_values: bool = False,
    implementation: Implementation | None = None,
) -> Int[Array, "... K"] | tuple[Int[Array, "... K"], Float[Array, "... K"]]:
    """The positions of the k largest values of every row, in ascending order.

    The set is the k largest by (value descending, index ascending): exact, and the same bit for bit
    on every run, device and implementation. NaN and -inf are never selected, and +0 equals -0. A
    row with fewer than k candidates gives all of them, then -1.

    Args:
        x: rows of bfloat16, float16 or float32 values (float64 where JAX has it enabled), with any
            leading axes or none.
        k: how many to select, >= 0; may exceed S.
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
    """
    leading = ["B", "T", *(f"T{i}" for i in range(2, getattr(x, "ndim", 0)))]
    rows = " ".join(leading[: max(1, getattr(x, "ndim", 0) - 1)])
    args = Args("topk", "x", x, f"{rows} S")
    x = args.array("x", x, f"{rows} S", FLOATS)
    starts, ends = key_ranges(args, starts, ends, rows)
    options = TopkOptions(
        k=args.integer("k", k, 0),
        size=x.shape[-1],
        return_values=args.flag("return_values", return_values),
    )
    implementation = args.implementation(implementation)

    shape = x.shape[:-1]
    flat = (shape[0], math.prod(shape[1:]))
    outs = _topk(
        options,
        implementation,
        x.reshape(*flat, options.size),
        starts.reshape(flat),
        ends.reshape(flat),
    )
    return args.restore(*(y.reshape(*shape, options.k) for y in outs))


def key_ranges(
    args: Args, starts: Any, ends: Any, rows: str = "B T"
) -> tuple[Int[Array, "B T"], Int[Array, "B T"]]:
    """The arguments `starts` and `ends` of an operator, for every row, clipped to 0..S."""
    size = args.sizes["S"]
    shape = [args.sizes.get(letter, 1) for letter in rows.split()]

    def bound(name: str, given: Any, default: int) -> Array:
        if given is None:
            return jnp.full(shape, default, jnp.int32)
        return jnp.clip(args.array(name, given, rows, INT32), 0, size)

    return bound("starts", starts, 0), bound("ends", ends, size)
