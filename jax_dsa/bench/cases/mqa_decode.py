"""Benchmark cases of `mqa_decode`."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import jax

import jax_dsa
from jax_dsa.bench.case import BF16, COPY, Case, normal

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jax_dsa.bench.case import Scale


def mqa_decode(size: Scale) -> Iterator[Case]:
    """Yields cases with one query per request, and K and V in one cache."""

    for b, s, n, d in (
        (64, 8192, 64, 576),
        (64, 8192, 64, 512),
        *((b, 8192, n, 576) for n in (128, 16) for b in (1, 8, 64, 128)),
        *((8, s, n, 576) for n in (128, 16) for s in (2048, 32768, 131072)),
        (1, 640, 128, 576),
    ):
        dims = size(B=b, S=s, N=n, D=d)
        s, d = dims["S"], dims["D"]
        e = min(512, d)

        def make(key: jax.Array, b: int = b, s: int = s, n: int = n, d: int = d) -> tuple:
            a, c = jax.random.split(key)
            return normal(a, b, 1, n, d), normal(c, b, s, 1, d)

        # N query heads share one KV head. Below about 128 heads, reading the cache takes longer
        # than the matrix products.
        work = {
            BF16: 2 * b * n * s * (d + e),
            COPY: b * (2 * s * d + 2 * n * (d + e)),
        }
        call = functools.partial(jax_dsa.mqa_decode, value_dim=e)
        yield Case("mqa_decode", "fwd", dims, "bf16", make, call, work)
