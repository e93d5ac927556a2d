"""Ranges and segments: the conditions on visible keys that need no mask array."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp
from jax.core import min_dim

from jax_dsa.core import compat
from jax_dsa.core.arguments import segments, window_ranges, window_reach
from jax_dsa.core.checks import INT32, Args
from jax_dsa.core.typing import Array, Int

if TYPE_CHECKING:
    from typing import Self


class Visible(NamedTuple):
    """The keys that each query may see, before any mask. None means no condition.

    Attributes:
        starts, ends: The half-open range of keys of each query.
        q_segments, kv_segments: Numbers. A query sees the keys that have its own number.
    """

    starts: Int[Array, "1|B T"] | None = None
    ends: Int[Array, "1|B T"] | None = None
    q_segments: Int[Array, "B T"] | None = None
    kv_segments: Int[Array, "B S"] | None = None

    @classmethod
    def from_arguments(
        cls,
        args: Args,
        is_causal: Any,
        causal_alignment: Any,
        local_window_size: Any,
        key_value_seq_lengths: Any,
        segment_ids: Any,
    ) -> Self:
        """Checks the public arguments of these names and returns what they mean."""
        ranges = window_ranges(
            args, is_causal, causal_alignment, local_window_size, key_value_seq_lengths
        )
        return cls(*ranges, *segments(args, segment_ids))

    @classmethod
    def from_packed(
        cls,
        args: Args,
        cu_seqlens_q: Any,
        cu_seqlens_k: Any,
        is_causal: Any,
        causal_alignment: Any,
        local_window_size: Any,
    ) -> Self:
        """Checks the public arguments of these names and returns what they mean for packed rows."""
        cu_q, cu_k = packed_bounds(args, cu_seqlens_q, cu_seqlens_k)
        left, right = window_reach(args, is_causal, causal_alignment, local_window_size)
        ranges = functools.partial(
            _packed_ranges,
            args.sizes["T"],
            args.sizes["S"],
            bottom_right=causal_alignment == "bottom_right",
            left=left,
            right=right,
        )
        # Under vmap, jnp.searchsorted fails if the mesh of its arguments is not the current one.
        starts, ends = compat.on_mesh_of_types(ranges)(cu_q, cu_k)
        return cls(starts=starts[None], ends=ends[None])


def packed_bounds(
    args: Args, cu_seqlens_q: Any, cu_seqlens_k: Any
) -> tuple[Int[Array, "R+1"], Int[Array, "R+1"]]:
    """Returns the checked arguments of these names."""
    cu_q = args.array("cu_seqlens_q", cu_seqlens_q, "R+1", INT32)
    cu_k = args.array("cu_seqlens_k", cu_seqlens_k, "R+1", INT32)
    want = "[R+1] with a number R, no symbol: export once for each size"
    args.shape("cu_seqlens_q", cu_q, isinstance(cu_q.size, int), want)
    args.shape("cu_seqlens_q", cu_q, cu_q.size > 1, "[R+1] with R >= 1 sequences")
    return cu_q, cu_k


class PackedRows(NamedTuple):
    """Where each packed query stands; int32 [T].

    Attributes:
        first, stop: The half-open range of packed keys of the query's sequence. It is not clipped,
            and it is empty for a query outside of all sequences.
        position: The position of the query among its sequence's keys, whose first has position 0.
    """

    first: Int[Array, "T"]
    stop: Int[Array, "T"]
    position: Int[Array, "T"]


def packed_rows(
    queries: int, cu_q: Int[Array, "R+1"], cu_k: Int[Array, "R+1"], *, bottom_right: bool
) -> PackedRows:
    """Returns where each of the packed queries stands."""
    row = jnp.arange(queries, dtype=jnp.int32)
    sequence = jnp.searchsorted(cu_q, row, side="right", method="sort") - 1
    inside = (sequence >= 0) & (sequence < cu_q.size - 1)
    sequence = jnp.clip(sequence, 0, cu_q.size - 2)
    q_first, q_stop = cu_q[sequence], cu_q[sequence + 1]
    first, stop = cu_k[sequence], cu_k[sequence + 1]
    position = row - q_first
    if bottom_right:
        position += (stop - first) - (q_stop - q_first)
    return PackedRows(first, jnp.where(inside, stop, first), position)


def _packed_ranges(
    queries: int,
    keys: int,
    cu_q: Int[Array, "R+1"],
    cu_k: Int[Array, "R+1"],
    *,
    bottom_right: bool,
    left: int | None,
    right: int | None,
) -> tuple[Int[Array, "T"], Int[Array, "T"]]:
    """Returns the half-open range of packed keys that each packed query may see."""
    first, stop, position = packed_rows(queries, cu_q, cu_k, bottom_right=bottom_right)
    position += first
    starts = first if left is None else jnp.maximum(first, position - min_dim(left, keys + queries))
    ends = stop
    if right is not None:
        ends = jnp.minimum(stop, position + min_dim(right, keys + queries) + 1)
    return jnp.clip(starts, 0, keys), jnp.where(stop > first, jnp.clip(ends, 0, keys), 0)
