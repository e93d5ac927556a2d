"""Sequences stored in stripes, so that all devices of a mesh axis have equal causal work.

If a causal sequence is cut into contiguous shards, the last shard has almost twice the mean work.
In stripes, token t belongs to stripe t % n, and the stripes are stored one after the other, so
every shard has early and late tokens. If a mesh has an Auto axis "context", the results of both
functions are sharded over it. On Explicit axes, a result is sharded like its operand. On n devices,
each function is then one all-to-all.

Source: Striped Attention (Brandon et al., 2023).
"""

from __future__ import annotations

from typing import TypeVar

import jax
import numpy as np
from jax.sharding import PartitionSpec

from jax_dsa.core import compat

A = TypeVar("A", jax.Array, np.ndarray)


def striped(x: A, stripes: int) -> A:
    """Returns `x` with its sequence stored in stripes.

    Args:
        x: JAX or NumPy array [B, T, ...] in the order of the sequence.
        stripes: Number of stripes, a divisor of T.
    """
    return _transposed(x, (x.shape[1] // stripes, stripes))


def unstriped(x: A, stripes: int) -> A:
    """Returns `x` with its sequence in order; the inverse of `striped`.

    Args:
        x: JAX or NumPy array [B, T, ...] that is stored in stripes.
        stripes: Number of stripes, a divisor of T.
    """
    return _transposed(x, (stripes, x.shape[1] // stripes))


def _transposed(x: A, shape: tuple[int, int]) -> A:
    """Returns `x` with its sequence read as an array of this shape and transposed."""
    if 1 in shape:
        return x
    batch, length, *rest = x.shape

    def transposed(x: A) -> A:
        return x.reshape(batch, *shape, *rest).swapaxes(1, 2).reshape(batch, length, *rest)

    if isinstance(x, np.ndarray):
        return transposed(x)
    x = compat.left_to_compiler(transposed, x)(x)
    if "context" not in jax.sharding.get_abstract_mesh().auto_axes:
        return x
    free = PartitionSpec.UNCONSTRAINED
    spec = PartitionSpec(free, "context", *[free] * len(rest))
    return jax.lax.with_sharding_constraint(x, spec)
