"""Lists of blocks and comparisons for the tests of the sparse attention kernels on a GPU."""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_dsa import sparse_attention
from support import masked_attention_kernel
from support.masked_attention_kernel import INT_MAX, INT_MIN, Arrays

compare = functools.partial(masked_attention_kernel.compare, call=sparse_attention)
run = functools.partial(masked_attention_kernel.run, call=sparse_attention)

CAUSAL = {"is_causal": True}

FORCED = {"is_causal": True, "sink_blocks": 1, "local_blocks": 2}

TAIL = {"is_causal": True, "tail_block": True}


def lists(
    rng: np.random.Generator, arrays: Arrays, size: int, slots: int, kind: str = "random"
) -> dict[str, Any]:
    """Returns the argument `indices`, a list for each query and KV head.

    Args:
        rng: The source of random numbers.
        arrays: q, k and v.
        size: The number of keys in a block.
        slots: The length of a list.
        kind: "random", with invalid indices and repeated blocks; "similar", where a list keeps most
            blocks of the list before it; "distinct", without repeated blocks; "empty".
    """
    (b, t), (s, g) = arrays[0].shape[:2], arrays[1].shape[1:3]
    blocks = -(-s // size)
    shape = (b, t, g, slots)
    bad = rng.choice([INT_MIN, -1, blocks, INT_MAX], shape)
    indices = rng.integers(0, max(blocks, 1), shape)
    if kind == "empty":
        indices = bad
    elif kind == "distinct":
        count = max(blocks, slots)
        numbers = np.broadcast_to(np.arange(count), (b, t, g, count))
        indices = rng.permuted(numbers, axis=3)[..., :slots]
    elif kind == "similar":
        drawn = rng.random(shape) < 1 / 16
        for i in range(1, t):
            indices[:, i] = np.where(drawn[:, i], indices[:, i], indices[:, i - 1])
    else:
        indices = np.where(rng.random(shape) < 0.2, bad, indices)
        indices[:, t // 2] = bad[:, t // 2]
    return {"indices": jnp.asarray(indices, jnp.int32)}
