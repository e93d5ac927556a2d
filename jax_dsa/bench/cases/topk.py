"""Benchmark cases of `topk`."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

import jax_dsa
from jax_dsa.bench.case import COPY, Case, normal_rows

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jax_dsa.bench.case import Scale


def topk(size: Scale) -> Iterator[Case]:
    """Yields rows of normal values. The work is the bytes that are read and written."""

    def lax_top_k(k: int, x: jax.Array) -> jax.Array:
        return jax.lax.top_k(x, k)[1]

    for r, s in ((64, 32768), (4096, 8192), (4096, 32768), (1024, 131072), (8192, 131072)):
        dims = size(R=r, S=s, K=2048)
        r, s, k = dims.values()
        yield Case(
            "topk",
            "fwd",
            dims,
            "f32",
            functools.partial(normal_rows, r, s, jnp.float32),
            functools.partial(jax_dsa.topk, top_k=k),
            {COPY: 4 * r * (s + k)},
            peers={"lax.top_k": functools.partial(lax_top_k, k)},
        )
