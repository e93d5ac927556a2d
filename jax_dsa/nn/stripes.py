"""Sequences stored in stripes, so that each device of a mesh axis has as much causal work.

Cut into contiguous parts, a causal sequence gives its last part almost twice the mean work. Here
token t lies in stripe t % n, and stripe after stripe is stored: every part has early and late
tokens. Where a mesh has an Auto axis "context", both functions' results are sharded over it: over n
devices each of them is one all-to-all.

Source: Striped Attention (Brandon et al., 2023).
"""

from __future__ import annotations

from typing import TypeVar

import jax
import numpy as np
from jax.sharding import PartitionSpec

A = TypeVar("A", jax.Array, np.ndarray)


def striped(x: A, stripes: int) -> A:
    """`x` [B, T, ...] with its sequence stored in stripes."""
    return _swapped(x, (x.shape[1] // stripes, stripes))


def unstriped(x: A, stripes: int) -> A:
    """`x` [B, T, ...], stored in stripes, as a sequence."""
    return _swapped(x, (stripes, x.shape[1] // stripes))


def _swapped(x: A, cut: tuple[int, int]) -> A:
    if 1 in cut:
        return x
    batch, length, *rest = x.shape
    x = x.reshape(batch, *cut, *rest).swapaxes(1, 2).reshape(batch, length, *rest)
    if isinstance(x, np.ndarray) or "context" not in jax.sharding.get_abstract_mesh().auto_axes:
        return x
    free = PartitionSpec.UNCONSTRAINED
    spec = PartitionSpec(free, "context", *[free] * len(rest))
    return jax.lax.with_sharding_constraint(x, spec)
