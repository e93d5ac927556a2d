"""Benchmark cases of `make_block_mask`'s classification of tiles."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jax_dsa.bench.case import COPY, Case
from jax_dsa.core.call import Call
from jax_dsa.ops.block_mask.api import CLASSIFY
from jax_dsa.ops.block_mask.spec import Operands, Options

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jax_dsa.bench.case import Dims, Scale


def block_mask(size: Scale) -> Iterator[Case]:
    """Yields the classification of a random mask's tiles, which is bound by reading the mask."""

    def make(dims: Dims, key: jax.Array) -> tuple:
        return (jax.random.bernoulli(key, shape=(1, 1, dims["T"], dims["S"])),)

    def classify(mask: jax.Array, implementation: Any) -> Any:
        queries, keys = mask.shape[2:]
        x = Operands(mask, None, jnp.full((1, queries), keys, jnp.int32), None, None)
        return CLASSIFY(
            Call("make_block_mask", implementation), Options(queries, keys, 128, 128), x
        )

    dims = size(T=32768, S=32768)
    work = {COPY: dims["T"] * dims["S"]}
    yield Case("block_mask", "fwd", dims, "bool", functools.partial(make, dims), classify, work)
