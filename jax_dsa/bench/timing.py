"""Measures the device time of a function, without the time that Python takes to dispatch it."""

from __future__ import annotations

import functools
import math
import statistics
import time
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

# Inputs are drawn in several sets, which the calls use in turn, until the sets together exceed the
# L2 cache of any GPU several times. Otherwise the inputs of small cases would stay in the cache.
ROTATION_BYTES = 256 * 2**20
MAX_ROTATION = 16
# A round of the loop costs about 10 us, in which the device waits for the host. A round therefore
# has calls for at least this time, if MAX_ROTATION calls are enough.
ROUND_SECONDS = 4e-3


def tree_bytes(tree: Any) -> int:
    """Returns the number of bytes of all arrays in a tree."""
    return sum(getattr(x, "nbytes", 0) for x in jax.tree.leaves(tree))


def rotation(nbytes: int) -> int:
    """Returns how many sets of inputs to draw if one set has `nbytes` bytes."""
    return max(1, min(MAX_ROTATION, -(-ROTATION_BYTES // max(1, nbytes))))


def _loop(fn: Callable[..., Any], count: int, sets: Sequence[tuple]) -> jax.Array:
    """Runs `count` rounds of `fn` over all input sets, in one program."""

    def call(token: jax.Array, args: tuple) -> jax.Array:
        # The barriers keep XLA from hoisting the call out of the loop, and from computing only the
        # one element of each result that is used.
        args, token = jax.lax.optimization_barrier((args, token))
        outs = jax.lax.optimization_barrier(fn(*args))
        used = [x.reshape(-1)[0].astype(jnp.float32) for x in jax.tree.leaves(outs) if x.size]
        return token + sum(used)

    return jax.lax.fori_loop(
        0, count, lambda _, token: functools.reduce(call, sets, token), jnp.float32(0)
    )


def _clock(fn: Callable[..., Any], sets: Sequence[tuple]) -> Callable[[int, int, float], float]:
    """Returns a function `median(rounds, repeats, rest)` that measures `fn`.

    It returns the median wall time of `rounds` rounds over `repeats` repetitions. The device is
    idle for `rest` seconds before each repetition.
    """
    run = jax.jit(functools.partial(_loop, fn), static_argnums=0)

    def wall(rounds: int, rest: float) -> float:
        time.sleep(rest)
        start = time.perf_counter()
        run(rounds, sets).block_until_ready()
        return time.perf_counter() - start

    def median(rounds: int, repeats: int, rest: float) -> float:
        wall(rounds, 0.0)  # The first call compiles.
        return statistics.median(wall(rounds, rest) for _ in range(repeats))

    return median


def _seconds_per_call(
    fn: Callable[..., Any], sets: Sequence[tuple], budget: float, rest: float = 0.0
) -> float:
    """Returns the seconds per call, including the overhead of the loop."""
    median = _clock(fn, sets)
    roughly = median(1, 1, 0.0)
    times = math.ceil(min(MAX_ROTATION / len(sets), ROUND_SECONDS / roughly))
    if times > 1:
        sets = [*sets] * times
        median = _clock(fn, sets)
    once = median(1, 3, rest)
    calls = len(sets)
    if once > 10 * budget:  # The time to launch the program is negligible.
        return once / calls
    rounds = max(3, min(1000, round(budget / once)))
    total = median(rounds, 5, rest)
    # The difference of two round counts excludes launching the program and waiting for it. On a
    # busy host the difference can be all noise.
    if total > once:
        return (total - once) / ((rounds - 1) * calls)
    return total / (rounds * calls)


@functools.cache
def _overhead() -> float:
    """Returns the seconds that the loop adds to each call of a full round.

    The overhead is the loop's own cost and the operations that chain a result to the next call. In
    a shorter round the loop adds more per call, but such calls are long, so it is negligible there.

    The function times one matrix product per call, and two consecutive products per call. Both
    include the overhead once. Matrix products keep the device busy, so that the host's launches are
    not measured: next to an operator's kernels they are hidden.
    """
    x, w = (jax.random.normal(key, (512, 512)) for key in jax.random.split(jax.random.key(0)))

    def seconds(products: int) -> float:
        def fn(x: jax.Array, w: jax.Array) -> jax.Array:
            return functools.reduce(jnp.matmul, [w] * products, x)

        return _seconds_per_call(fn, [(x, w)] * MAX_ROTATION, 0.02)

    return max(0.0, 2 * seconds(1) - seconds(2))


def device_seconds(
    fn: Callable[..., Any], sets: Sequence[tuple], budget: float = 0.3, rest: float = 0.0
) -> float:
    """Returns the seconds that one call of a function takes on the device.

    Args:
        fn: Function of the arrays of one input set, which returns arrays. JAX traces it.
        sets: Input sets, which the calls use in turn.
        budget: Seconds to spend on one measurement. There are five measurements.
        rest: Seconds to leave the device idle before each measurement.
    """
    raw = _seconds_per_call(fn, sets, budget, rest)
    return raw - min(_overhead(), raw / 2)
