"""Benchmark cases of `mqa_decode`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

import jax_dsa
from jax_dsa.bench.case import BF16, COPY, Case, normal

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jax_dsa.bench.case import Scale


def mqa_decode(size: Scale) -> Iterator[Case]:
    """Yields cases with one query per request, and K and V in one cache.

    The time of cases with the note "plan" does not include making the plan.
    """

    def case(b: int, s: int, n: int, d: int, planned: bool = False) -> Case:
        dims = size(B=b, S=s, N=n, D=d)
        s, d = dims["S"], dims["D"]
        e = min(512, d)

        def make(key: jax.Array) -> tuple:
            a, c = jax.random.split(key)
            arrays = normal(a, b, 1, n, d), normal(c, b, s, 1, d)
            if not planned:
                return arrays
            lengths = jnp.full(b, s, jnp.int32)
            return *arrays, jax_dsa.mqa_decode_plan(lengths, num_heads=n, dim=d)

        def call(q: jax.Array, kv: jax.Array, plan: Any = None, **options: Any) -> jax.Array:
            return jax_dsa.mqa_decode(q, kv, value_dim=e, plan=plan, **options)

        # N query heads share one KV head. Below about 128 heads, reading the cache takes longer
        # than the matrix products.
        work = {
            BF16: 2 * b * n * s * (d + e),
            COPY: b * (2 * s * d + 2 * n * (d + e)),
        }
        note = "plan" if planned else ""
        return Case("mqa_decode", "fwd", dims, "bf16", make, call, work, note=note)

    for b, s, n, d in (
        (64, 8192, 64, 576),
        (64, 8192, 64, 512),
        *((b, 8192, n, 576) for n in (128, 16) for b in (1, 8, 64, 128)),
        *((8, s, n, 576) for n in (128, 16) for s in (2048, 32768, 131072)),
        (1, 640, 128, 576),
        (1, 640, 16, 576),
    ):
        yield case(b, s, n, d)
    for n in (128, 16):
        for b in (8, 64, 128):
            yield case(b, 8192, n, 576, planned=True)
