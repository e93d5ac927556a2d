"""Inputs that the tests of `mqa_decode` share."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from jax_dsa.ops.mqa_decode import mqa_decode
from support.oracles import mqa_decode as oracle

B, T, S, N, G, D, E = 3, 3, 13, 6, 2, 10, 7
PAGES, PAGE = 9, 4


def inputs(rng: np.random.Generator, dtype: Any = np.float32, t: int = T, g: int = G) -> tuple:
    shapes = (B, t, N, D), (B, S, g, D), (B, S, g, E)
    return tuple(rng.normal(size=shape).astype(dtype) for shape in shapes)


both = functools.partial(mqa_decode, return_lse=True)


def as_float32(xs: Any) -> tuple:
    return tuple(x.astype(np.float32) for x in xs)


def lengths(*numbers: int) -> dict[str, np.ndarray]:
    return {"key_value_seq_lengths": np.array(numbers, np.int32)}


def paged(rng: np.random.Generator) -> tuple:
    """Returns pages, a table in which some pages are shared and some missing, and the flat rows."""
    k = rng.normal(size=(PAGES, PAGE, G, D)).astype(np.float32)
    v = rng.normal(size=(PAGES, PAGE, G, E)).astype(np.float32)
    table = rng.integers(0, PAGES, size=(B, 5)).astype(np.int32)
    table[0, 1], table[1, 0], table[2, 3] = -1, PAGES, -(2**31)
    flat_k, mapped = oracle.unpaged(k, table)
    flat_v, _ = oracle.unpaged(v, table)
    return k, v, table, flat_k, flat_v, mapped
