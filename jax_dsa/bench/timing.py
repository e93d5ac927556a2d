"""Device time of a function, free of what Python takes to dispatch it."""

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

# Several times the largest L2 cache: inputs that fit are drawn anew until they add up to this, and
# taken in turn.
ROTATION_BYTES = 256 * 2**20
MAX_ROTATION = 16
# A round of the loop has calls for so long, if MAX_ROTATION are enough: its own cost, some 10 us in
# which the device waits for the host, is then little of them.
ROUND_SECONDS = 4e-3


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


def _clock(fn: Callable[..., Any], sets: Sequence[tuple]) -> Callable[[int, int, float], float]:
    """A function of rounds, repeats and rest: the median time of so many rounds, each after a
    rest.
    """
    run = jax.jit(functools.partial(_loop, fn), static_argnums=0)

    def wall(rounds: int, rest: float) -> float:
        time.sleep(rest)
        start = time.perf_counter()
        run(rounds, sets).block_until_ready()
        return time.perf_counter() - start

    def median(rounds: int, repeats: int, rest: float) -> float:
        wall(rounds, 0.0)  # compiles
        return statistics.median(wall(rounds, rest) for _ in range(repeats))

    return median


def _seconds_a_call(
    fn: Callable[..., Any], sets: Sequence[tuple], budget: float, rest: float = 0.0
) -> float:
    """With what the loop adds."""
    median = _clock(fn, sets)
    roughly = median(1, 1, 0.0)
    times = math.ceil(min(MAX_ROTATION / len(sets), ROUND_SECONDS / roughly))
    if times > 1:
        sets = [*sets] * times
        median = _clock(fn, sets)
    once = median(1, 3, rest)
    calls = len(sets)
    if once > 10 * budget:  # what it takes to launch the program does not show
        return once / calls
    rounds = max(3, min(1000, round(budget / once)))
    total = median(rounds, 5, rest)
    # The difference of two counts, so that launching the program and waiting for it drop out. On a
    # busy host it can be all noise.
    if total > once:
        return (total - once) / ((rounds - 1) * calls)
    return total / (rounds * calls)


@functools.cache
def _overhead() -> float:
    """What the loop adds to each call of a full round: its own cost, and what chains a result to
    the next call. To those of a shorter round, which are long, it adds more, which does not show.

    A call of one product takes it once, and a call of two, one after the other, takes it once.
    Products keep the device busy, so that it is not the host's launches that are measured: beside
    an operator's kernels those do not show.
    """
    x, w = (jax.random.normal(key, (512, 512)) for key in jax.random.split(jax.random.key(0)))

    def seconds(products: int) -> float:
        def fn(x: jax.Array, w: jax.Array) -> jax.Array:
            return functools.reduce(jnp.matmul, [w] * products, x)

        return _seconds_a_call(fn, [(x, w)] * MAX_ROTATION, 0.02)

    return max(0.0, 2 * seconds(1) - seconds(2))


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
