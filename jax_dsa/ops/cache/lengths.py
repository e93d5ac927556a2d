"""The lengths and page tables of caches."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jax_dsa.core.checks import INT32, LARGEST, Args, as_array
from jax_dsa.core.typing import Array, Int


def checked_copy(op: str, name: str, x: Any, dims: str, lengths: Any) -> Int[Array, "*dims"]:
    """Returns a checked int32 copy of an array of integers that replaces one of a cache.

    It is a copy because a buffer that several caches share cannot be donated.

    Args:
        op: The method, for messages.
        name: The argument's name.
        x: The argument.
        dims: Its dims, where B is the number of requests.
        lengths: The cache's lengths.
    """
    args = Args(op, "cache.lengths", lengths, "B")
    args.array("cache.lengths", lengths, "B", INT32)
    return args.restore(args.array(name, x, dims, INT32)).copy()


def extended(start: Int[Array, "B"], new: Int[Array, "B"] | int) -> Int[Array, "B"]:
    """Returns `start + new` for start >= 0, at most the largest int32."""
    return jnp.minimum(start, LARGEST - new) + new


def in_dtype_of(old: Any, lengths: Int[Array, "*B"]) -> Int[Array, "*B"]:
    """Returns int32 lengths in the dtype of the old ones, so that a scan can carry them.

    They stay int32 if that dtype cannot hold every length.
    """
    dtype = jax.dtypes.canonicalize_dtype(as_array(old).dtype)  # type: ignore[union-attr]
    return lengths.astype(dtype) if jnp.iinfo(dtype).max >= LARGEST else lengths
