"""vmap of one operator pass: the mapped axes are folded into the batch axis, so that one kernel
launch serves them all.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def folded(
    fun: Callable[..., tuple[Any, ...]],
    ranks: Sequence[int],
    shared: Sequence[int],
    mirrors: Sequence[int | None],
) -> Callable[..., tuple[Any, ...]]:
    """`fun` for operands with any number of axes before the batch axis: they become part of it, a
    size of 1 broadcasts.

    Args:
        fun: takes arrays, returns a tuple of arrays and Nones.
        ranks: each operand's rank, the batch axis included.
        shared: operands whose batch axis of one `fun` broadcasts itself; the others' is broadcast
            before the call.
        mirrors: for each result the shared operand whose batch axis it has (a gradient), or None.
    """

    def call(*args: jax.Array) -> tuple[Any, ...]:
        lead_rank = args[0].ndim - ranks[0]
        lead = jnp.broadcast_shapes(*(x.shape[:lead_rank] for x in args))
        own = [x.shape[lead_rank] for x in args]
        batch = next((b for b in own if b != 1), 1)

        def fold(i: int, x: jax.Array) -> jax.Array:
            if not lead and i in shared:
                return x
            full = (*lead, batch, *x.shape[lead_rank + 1 :])
            return jnp.broadcast_to(x, full).reshape(
                math.prod(lead) * batch, *full[lead_rank + 1 :]
            )

        outs = fun(*(fold(i, x) for i, x in enumerate(args)))
        if not lead:
            return outs

        def unfold(y: jax.Array | None, mirror: int | None) -> jax.Array | None:
            if y is None:
                return None
            y = y.reshape(*lead, batch, *y.shape[1:])
            if mirror is not None and own[mirror] != batch:
                y = y.sum(lead_rank, keepdims=True, dtype=y.dtype)
            return y

        return tuple(unfold(y, m) for y, m in zip(outs, mirrors, strict=True))

    return call


def batched(fun: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
    """`fun`, which is `folded`, with a vmap that hands it the mapped axis as a leading axis."""
    op = custom_vmap(fun)

    @op.def_vmap
    def _(size: int, in_batched: Sequence[bool], *args: jax.Array) -> tuple[Any, Any]:
        # Not broadcast to `size` here: an operand that no axis maps may stay one copy until it is
        # folded. The rule calls `op`, not `fun`, or nested vmap finds no rule.
        outs = op(*(x if b else x[None] for x, b in zip(args, in_batched, strict=True)))
        return outs, jax.tree.map(lambda _: True, outs)

    return op
