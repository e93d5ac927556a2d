"""Device time of a function, free of what Python takes to dispatch it."""

from __future__ import annotations

import functools
import statistics
import time
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

# Several times the largest L2 cache: inputs that fit are drawn anew until they add up to this, and
# taken in turn.
ROTATION_BYTES = 256 * 2**20
MAX_ROTATION = 16


def tree_bytes(tree: Any) -> int:
    """Bytes of all arrays in `tree`."""
    return sum(getattr(x, "nbytes", 0) for x in jax.tree.leaves(tree))


def rotation(nbytes: int) -> int:
    """How many sets of inputs of `nbytes` to draw."""
    return max(1, min(MAX_ROTATION, -(-ROTATION_BYTES // max(1, nbytes))))


def _loop(fn: Callable[..., Any], count: int, sets: Sequence[tuple]) -> jax.Array:
    """`count` rounds of `fn` over all input sets, in one program."""

    def call(token: jax.Array, args: tuple) -> jax.Array:
        # The barriers keep XLA from hoisting the call out of the loop, and from computing only that
        # element of the results that is used.
        args, token = jax.lax.optimization_barrier((args, token))
        outs = jax.lax.optimization_barrier(fn(*args))
        used = [x.reshape(-1)[0].astype(jnp.float32) for x in jax.tree.leaves(outs) if x.size]
        return token + sum(used)

    return jax.lax.fori_loop(
        0, count, lambda _, token: functools.reduce(call, sets, token), jnp.float32(0)
    )


def _seconds_a_call(
    fn: Callable[..., Any], sets: Sequence[tuple], budget: float, rest: float = 0.0
) -> float:
    run = jax.jit(functools.partial(_loop, fn), static_argnums=0)

    def wall(count: int) -> float:
        time.sleep(rest)
        start = time.perf_counter()
        run(count, sets).block_until_ready()
        return time.perf_counter() - start

    def median(count: int, repeats: int) -> float:
        wall(count)  # compiles
        return statistics.median(wall(count) for _ in range(repeats))

    once = median(1, 3)
    if once > 10 * budget:  # what it takes to launch the program does not show
        return once / len(sets)
    count = max(3, min(1000, round(budget / once)))
    total = median(count, 5)
    # The difference of two counts, so that launching the program and waiting for it drop out. On a
    # busy host it can be all noise.
    if total > once:
        return (total - once) / ((count - 1) * len(sets))
    return total / (count * len(sets))


@functools.cache
def _overhead() -> float:
    """What the loop itself costs a call: the chaining of one result into the next call."""
    return _seconds_a_call(lambda x: x, [(jnp.zeros(8),)], 0.02)


def device_seconds(
    fn: Callable[..., Any], sets: Sequence[tuple], budget: float = 0.3, rest: float = 0.0
) -> float:
    """Seconds that one call of `fn` takes on the device.

    Args:
        fn: takes the arrays of one of `sets`, returns arrays. Traced with JAX.
        sets: inputs that the calls take in turn.
        budget: seconds to spend on one measurement, of which there are five.
        rest: seconds to leave the device idle before each measurement.
    """
    raw = _seconds_a_call(fn, sets, budget, rest)
    return raw - min(_overhead(), raw / 2)
