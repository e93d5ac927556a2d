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


def fold(
    args: Sequence[jax.Array], lead_rank: int, shared: frozenset[int]
) -> tuple[tuple[int, ...], int, list[jax.Array]]:
    """`args` with the `lead_rank` axes in front folded into the batch axis; sizes of 1 broadcast.

    Args:
        args: arrays [*lead, b, ...].
        lead_rank: how many axes lead.
        shared: arguments whose batch axis of 1 stays, if no axis leads.

    Returns:
        The leading sizes, the batch size, and the folded arguments.
    """
    lead = jnp.broadcast_shapes(*(x.shape[:lead_rank] for x in args)) if lead_rank else ()
    batch = 1
    for x in args:
        batch = batch if x.shape[lead_rank] == 1 else x.shape[lead_rank]
    rows = math.prod(lead) * batch
    out = []
    for i, x in enumerate(args):
        own, tail = x.shape[: lead_rank + 1], x.shape[lead_rank + 1 :]
        if own != (*lead, batch) and (lead or i not in shared):
            x = jnp.broadcast_to(x, (*lead, batch, *tail))
        out.append(x.reshape(rows, *tail) if lead else x)
    return lead, batch, out


def unfold(y: jax.Array, lead: tuple[int, ...], batch: int, own: int | None) -> jax.Array:
    """Returns a result of folded arguments with the leading axes restored.

    Args:
        y: the result, with a folded batch axis.
        lead: the sizes of the leading axes.
        batch: the batch size of the arguments.
        own: the length that the batch axis of this result has; None for `batch`.
    """
    y = y.reshape(*lead, batch, *y.shape[1:])
    if own is not None and own != batch:
        y = y.sum(len(lead), keepdims=True, dtype=y.dtype)
    return y


def batched(fun: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """`fun`, which takes any number of leading axes, with a vmap that hands it one more."""
    op = custom_vmap(fun)

    @op.def_vmap
    def _(size: int, in_batched: Sequence[bool], *args: jax.Array) -> tuple[Any, Any]:
        # Not broadcast to `size` here: an operand that no axis maps may stay one copy until it is
        # folded. The rule calls `op`, not `fun`, or nested vmap finds no rule.
        outs = op(*(x if b else x[None] for x, b in zip(args, in_batched, strict=True)))
        return outs, jax.tree.map(lambda _: True, outs)

    return op
