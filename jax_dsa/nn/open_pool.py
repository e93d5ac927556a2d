"""The tokens of each request's incomplete pool, while decoding.

A pool is a run of `size` tokens whose keys an indexer scores as one key. Pool i of a request has
its tokens from i size on.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp

from jax_dsa.core.checks import INT32, LARGEST
from jax_dsa.core.export import exportable
from jax_dsa.core.typing import Array, Bool, Float, Int
from jax_dsa.nn.arguments import check_presence, check_type
from jax_dsa.nn.ring import put_in_ring, rows_of_ring_and_new

if TYPE_CHECKING:
    from typing import Any

    from jax_dsa.core.checks import Args


class NewPools(NamedTuple):
    """The pools that the new tokens of some requests may complete.

    Attributes:
        numbers: Number of each pool in its request, int32; -1 if it is not complete.
        values: The pools' tokens, `size` for each pool. Those of incomplete pools are arbitrary.
        gates: Their gates; None where pools have none.
        is_valid: Whether the rings had all tokens that the request's first pool needs.
    """

    numbers: Int[Array, "B W"]
    values: Float[Array, "B W*size C"]
    gates: Float[Array, "B W*size C"] | None
    is_valid: Bool[Array, "B"]


@exportable
class OpenPool(NamedTuple):
    """The last tokens of some requests, before their keys are pooled.

    The rings have R = size - 1 + max_rollback rows. A request may be set back to fewer tokens if
    the rings still have all tokens of its pool that is then incomplete. That is so for the last
    `max_rollback` tokens, and for every multiple of `size` tokens, where no pool is incomplete.
    Afterwards the request continues from there. If the rings lack a token, the request is not valid
    until its number of tokens is set to 0.

    Attributes:
        values: The last tokens' keys before the pooling, in a ring buffer; see `nn.ring`.
        gates: The last tokens' gates, in a ring buffer; None where pools have none.
        first: The position from which on the rings have had the request's tokens, int32.
        longest: The largest number of tokens that the request has had since, int32.
    """

    values: Float[Array, "B R C"]
    gates: Float[Array, "B R C"] | None
    first: Int[Array, "B"]
    longest: Int[Array, "B"]

    @classmethod
    def empty(
        cls, batch: int, size: int, dim: int, max_rollback: int, dtype: Any, *, has_gates: bool
    ) -> OpenPool:
        """Returns the state of `batch` requests without tokens."""
        rings = (jnp.zeros((batch, size - 1 + max_rollback, dim), dtype) for _ in range(2))
        first, longest = (jnp.zeros(batch, jnp.int32) for _ in range(2))
        return cls(next(rings), next(rings) if has_gates else None, first, longest)

    def extended(
        self,
        size: int,
        values: Float[Array, "B T C"],
        gates: Float[Array, "B T C"] | None,
        lengths: Int[Array, "B"],
        counts: Int[Array, "B"],
    ) -> tuple[OpenPool, NewPools]:
        """Returns the state with more tokens of each request, and the pools that they complete.

        Args:
            size: Tokens of a pool.
            values: The new tokens' keys before the pooling.
            gates: The new tokens' gates.
            lengths: Number of tokens before the new ones in each request, int32.
            counts: Number of new tokens of each request, int32, 0 to T. The rest is padding.
        """
        begin = lengths - lengths % size  # of the incomplete pool
        oldest = jnp.maximum(self.first, self.longest - self.values.shape[1])
        is_held = (begin >= oldest) & (lengths <= self.longest)
        needs_none = (lengths == begin) & (lengths > 0) & (self.longest < LARGEST)
        is_valid = (lengths == 0) | is_held | needs_none
        continues = is_held & (lengths > 0)
        longest = jnp.maximum(jnp.where(continues, self.longest, 0), lengths + counts)

        count = (values.shape[1] + size - 1) // size
        numbers = lengths[:, None] // size + jnp.arange(count, dtype=jnp.int32)
        is_complete = (numbers + 1) * size <= (lengths + counts)[:, None]
        rows = begin[:, None] + jnp.arange(count * size, dtype=jnp.int32)
        rings, tokens = (self.values, self.gates), (values, gates)
        of_pools = functools.partial(rows_of_ring_and_new, positions=rows, lengths=lengths)
        put = functools.partial(put_in_ring, lengths=lengths, counts=counts)
        pooled, pooled_gates = jax.tree.map(of_pools, rings, tokens)
        numbers = jnp.where(is_complete & is_valid[:, None], numbers, -1)
        first = jnp.where(is_valid, jnp.where(continues, self.first, lengths), LARGEST)
        longest = jnp.where(is_valid, longest, LARGEST)
        last, last_gates = jax.tree.map(put, rings, tokens)
        state = OpenPool(last, last_gates, first, longest)
        return state, NewPools(numbers, pooled, pooled_gates, is_valid)


def check_open_pool(
    args: Args, name: str, pool: OpenPool, size: int, dim: int, dtype: Any, *, has_gates: bool
) -> None:
    """Raises unless the argument `name` is the state of such pools, for the call's requests."""
    check_type(args.op, name, pool, OpenPool)
    dtypes = (jnp.dtype(dtype),)
    values = args.array(f"{name}.values", pool.values, f"B R {dim}", dtypes)
    want = f"[B, R, {dim}] with R of at least size - 1 = {size - 1}"
    args.shape(f"{name}.values", values, values.shape[1] >= size - 1, want)
    check_presence(args, f"{name}.gates", pool.gates, has_gates)
    if has_gates:
        args.array(f"{name}.gates", pool.gates, f"B R {dim}", dtypes)
    args.array(f"{name}.first", pool.first, "B", INT32)
    args.array(f"{name}.longest", pool.longest, "B", INT32)
