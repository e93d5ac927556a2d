"""Inputs that the tests of the indexer share."""

from __future__ import annotations

import ml_dtypes
import numpy as np

FP8 = ml_dtypes.float8_e4m3fn
LAST = 2**31 - 1


def inputs(rng, B=2, T=5, J=3, C=4, S=9, dtype=np.float32):
    """Returns random queries, keys and head weights."""
    q, k = (rng.normal(size=s).astype(dtype) for s in ((B, T, J, C), (B, S, C)))
    return q, k, rng.normal(size=(B, T, J)).astype(np.float32)


def options_of(rng, B=2, T=5, S=9):
    """Returns a scale for every key, and ranges of which some are empty, clipped or reversed."""
    starts, ends = (rng.integers(-2, S + 3, size=(B, T)).astype(np.int32) for _ in range(2))
    starts[0, 0], ends[0, 0] = -(2**31), 2**31 - 1
    k_scale = np.exp(rng.normal(size=(B, S))).astype(np.float32)
    return {"index_k_scale": k_scale, "starts": starts, "ends": ends}


def gathered(logits, indices):
    """Returns the logits at `indices`, -inf where an index is -1."""
    return np.where(indices >= 0, np.take_along_axis(logits, np.maximum(indices, 0), -1), -np.inf)


def paged(rng, k, page, k_scale=None):
    """Puts keys into a pool of pages, in random order, and unmaps some pages.

    Returns:
        The pool, the scales in it or None, the page table, and a mask [B, S] of the mapped keys.
    """
    batch, size, channels = k.shape
    own = size // page
    pages = batch * own + 2
    table = rng.permutation(pages)[: batch * own].reshape(batch, own).astype(np.int32)
    pool, scales = np.full((pages, page, channels), np.nan, k.dtype), np.full((pages, page), np.nan)
    pool[table] = k.reshape(batch, own, page, channels)
    if k_scale is not None:
        scales[table] = k_scale.reshape(batch, own, page)
    hole = rng.random(table.shape) < 0.3
    table[hole] = rng.choice([-1, pages, 2**31 - 1, -(2**31)], hole.sum())
    scales = None if k_scale is None else scales.astype(np.float32)
    return pool, scales, table, np.repeat(~hole, page, axis=1)
