"""Chunked evaluation, which keeps the XLA implementations within a byte budget."""

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

# A chunk may have at most BUDGET bytes of intermediates, which is enough to keep a GPU's matrix
# units busy. If all chunks together are small, a chunk has less, down to CACHED bytes: a CPU is
# several times faster on chunks that stay in its caches. The platform is not known while tracing.
BUDGET = 128 * 2**20
CACHED = 8 * 2**20
_CHUNKS = 64


def chunk_length(total: int, bytes_per_item: int, *, budget: int | None = None) -> int:
    """Returns the number of items in a chunk, at least 1.

    A divisor of `total` is preferred if it is at least half of what fits, because a remainder chunk
    costs a second compilation. With symbolic sizes (`jax.export`) the length is a formula.

    Args:
        total: the number of items.
        bytes_per_item: bytes of intermediates per item.
        budget: the most bytes of a chunk. Default: BUDGET, or less if all items are small together.
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

    Nothing is padded; a remainder is computed as a shorter chunk. `xs` and `ys` may contain None,
    which stays None. Inside `shard_map` the initial carry must vary over the same mesh axes as the
    carry that the body returns (`compat.match_vary`).

    Args:
        body: takes the carry and one chunk of each of `xs`, returns the new carry and a tuple of
            arrays.
        carry: any pytree.
        xs: pytrees of arrays of equal length along `axis`.
        axis: the axis that is split, in `xs` and in the arrays that `body` returns.
        chunk: items per chunk.

    Returns:
        The last carry, and the results of the chunks concatenated along `axis`.
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
    """Computes `scan_chunks` for symbolic sizes.

    A scan would have to know that it has at least one step. JAX cannot differentiate this loop; the
    operators have their own derivatives.
    """
    total = jax.tree.leaves(xs)[0].shape[axis]
    whole = (total - 1) // chunk  # At least one item is left for the last chunk.

    def step(state: tuple[Carry, Any], start: Any, size: Any) -> tuple[Carry, Any]:
        carry, ys = state
        carry, results = body(carry, *jax.tree.map(lambda x: cut(x, start, size), xs))
        return carry, jax.tree.map(lambda y, result: put(y, result, start), ys, results)

    def cut(x: jax.Array, start: Any, size: Any) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(x, start, size, axis)

    def put(y: jax.Array, result: jax.Array, start: Any) -> jax.Array:
        return jax.lax.dynamic_update_slice_in_dim(y, result, start, axis)

    def first(carry: Carry, *xs: Any) -> Any:
        return body(carry, *jax.tree.map(lambda x: cut(x, 0, chunk), xs))[1]

    shapes = jax.eval_shape(first, carry, *xs)
    ys = jax.tree.map(
        lambda y: jnp.zeros((*y.shape[:axis], total, *y.shape[axis + 1 :]), y.dtype), shapes
    )
    number, length = (jnp.asarray(n, jnp.int32) for n in (whole, chunk))
    state = jax.lax.fori_loop(0, number, lambda i, s: step(s, i * length, chunk), (carry, ys))
    return step(state, number * length, total - whole * chunk)


def entry_by_entry(fn: Callable[[X], Y], x: X) -> Y:
    """Computes `fn` for one batch entry after another.

    If a library multiplies matrices for all entries at once, the order of its sums, and thus the
    last bits of the results, may depend on the number of entries.

    Args:
        fn: takes and returns named tuples of arrays whose first axis is the batch's.
        x: its argument. All entries share an array with a first axis of 1; None stays None.
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

    # Run at least two iterations. XLA would unroll a single one and compile a different program.
    entries = jnp.minimum(jnp.arange(max_dim(size, 2), dtype=jnp.int32), size - 1)
    return jax.tree.map(lambda y: y[:size], jax.lax.map(entry, entries))
