"""Chunked evaluation: what keeps the XLA implementations inside a byte budget."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import jax
import jax.numpy as jnp
from jax.core import max_dim, min_dim

if TYPE_CHECKING:
    from collections.abc import Callable

Carry = TypeVar("Carry")
X = TypeVar("X")
Y = TypeVar("Y")

# Bytes of intermediates that one chunk may hold: at most BUDGET, which keeps a GPU's matrix units
# busy; less where the whole is small, since a CPU is several times faster on chunks that stay in
# its caches, down to CACHED. The platform is not known while tracing.
BUDGET = 128 * 2**20
CACHED = 8 * 2**20
_CHUNKS = 64


def chunk_length(total: int, bytes_per_item: int, *, budget: int | None = None) -> int:
    """How many of `total` items, each needing `bytes_per_item` of intermediates, make a chunk.

    At least one. Prefers a divisor of `total` no smaller than half of what fits, since a remainder
    chunk costs a second compilation. A chunk has at most `budget` bytes: by default BUDGET, or less
    where the whole is small. Where `jax.export` has symbols for sizes, the length is a formula.
    """
    if not (isinstance(total, int) and isinstance(bytes_per_item, int)):
        fits = (budget or BUDGET) // max_dim(1, bytes_per_item)
        return min_dim(total, max_dim(1, fits))
    if budget is None:
        budget = min(BUDGET, max(CACHED, total * bytes_per_item // _CHUNKS))
    fits = max(1, budget // max(1, bytes_per_item))
    if fits >= total:
        return max(1, total)
    return next((c for c in range(fits, fits // 2, -1) if total % c == 0), fits)


def scan_chunks(
    body: Callable[..., tuple[Carry, tuple[Any, ...]]],
    carry: Carry,
    xs: tuple[Any, ...],
    *,
    axis: int = 1,
    chunk: int,
) -> tuple[Carry, tuple[Any, ...]]:
    """Runs `carry, ys = body(carry, *chunks)` over consecutive chunks of `xs` along `axis`.

    Nothing is padded: a remainder runs as a shorter chunk of its own. `xs` and `ys` may hold None,
    which stays None. Inside `shard_map` the starting carry must vary as the body's does
    (`compat.match_vary`).

    Args:
        body: takes the carry and one chunk of each of `xs`, returns the new carry and a tuple of
            arrays.
        carry: any pytree.
        xs: pytrees of arrays of equal length along `axis`.
        axis: the axis that is split, in `xs` and in the arrays that `body` returns.
        chunk: items per chunk.

    Returns:
        The last carry, and the chunks' results concatenated along `axis`.
    """
    total = jax.tree.leaves(xs)[0].shape[axis]
    if not (isinstance(total, int) and isinstance(chunk, int)):
        return _loop_over_chunks(body, carry, xs, axis, chunk)
    whole = total // chunk
    if total <= chunk or whole == 0:
        return body(carry, *xs)

    def split(x: jax.Array) -> jax.Array:
        x = jax.lax.slice_in_dim(x, 0, whole * chunk, axis=axis)
        x = x.reshape(*x.shape[:axis], whole, chunk, *x.shape[axis + 1 :])
        return jnp.moveaxis(x, axis, 0)

    def join(y: jax.Array) -> jax.Array:
        y = jnp.moveaxis(y, 0, axis)
        return y.reshape(*y.shape[:axis], whole * chunk, *y.shape[axis + 2 :])

    carry, ys = jax.lax.scan(lambda c, x: body(c, *x), carry, jax.tree.map(split, xs))
    ys = jax.tree.map(join, ys)
    if whole * chunk < total:
        rest = jax.tree.map(lambda x: jax.lax.slice_in_dim(x, whole * chunk, total, axis=axis), xs)
        carry, tail = body(carry, *rest)
        ys = jax.tree.map(lambda y, t: jnp.concatenate([y, t], axis=axis), ys, tail)
    return carry, ys


def _loop_over_chunks(
    body: Callable[..., tuple[Carry, tuple[Any, ...]]],
    carry: Carry,
    xs: tuple[Any, ...],
    axis: int,
    chunk: Any,
) -> tuple[Carry, tuple[Any, ...]]:
    """`scan_chunks` where sizes are symbolic: a scan would want to know that it has a step. JAX has
    no derivative of this loop; the operators have their own.
    """
    total = jax.tree.leaves(xs)[0].shape[axis]
    whole = (total - 1) // chunk  # leaves at least one for the last chunk

    def step(state: tuple[Carry, Any], start: Any, size: Any) -> tuple[Carry, Any]:
        carry, ys = state
        carry, parts = body(carry, *jax.tree.map(lambda x: cut(x, start, size), xs))
        return carry, jax.tree.map(lambda y, part: put(y, part, start), ys, parts)

    def cut(x: jax.Array, start: Any, size: Any) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(x, start, size, axis)

    def put(y: jax.Array, part: jax.Array, start: Any) -> jax.Array:
        return jax.lax.dynamic_update_slice_in_dim(y, part, start, axis)

    def first(carry: Carry, *xs: Any) -> Any:
        return body(carry, *jax.tree.map(lambda x: cut(x, 0, chunk), xs))[1]

    parts = jax.eval_shape(first, carry, *xs)
    ys = jax.tree.map(
        lambda y: jnp.zeros((*y.shape[:axis], total, *y.shape[axis + 1 :]), y.dtype), parts
    )
    number, length = (jnp.asarray(n, jnp.int32) for n in (whole, chunk))
    state = jax.lax.fori_loop(0, number, lambda i, s: step(s, i * length, chunk), (carry, ys))
    return step(state, number * length, total - whole * chunk)


def entry_by_entry(fn: Callable[[X], Y], x: X) -> Y:
    """`fn` of one batch entry after the other.

    All at once, how a library's products add up, and so the last bits, may depend on how many
    entries there are.

    Args:
        fn: takes and returns named tuples of arrays whose first axis is the batch's.
        x: its argument; an array with a first axis of 1 is shared, None stays None.
    """
    arrays: Any = x
    size = arrays[0].shape[0]
    if size == 0:
        return fn(x)

    def entry(b: jax.Array) -> Any:
        own = [
            a if a is None or a.shape[0] == 1 else jax.lax.dynamic_slice_in_dim(a, b, 1)
            for a in arrays
        ]
        return jax.tree.map(lambda y: y[0], fn(type(x)(*own)))

    # Two turns at least: XLA unrolls a loop of one, and makes another program of it.
    turns = jnp.minimum(jnp.arange(max(size, 2), dtype=jnp.int32), size - 1)
    return jax.tree.map(lambda y: y[:size], jax.lax.map(entry, turns))
