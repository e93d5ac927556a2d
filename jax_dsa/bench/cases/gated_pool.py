"""Benchmark cases of `gated_pool` and `mean_pool`."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

import jax_dsa
from jax_dsa.bench.case import COPY, Case, normal

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jax_dsa.bench.case import Dims, Scale


def gated_pool(size: Scale) -> Iterator[Case]:
    """Yields cases of both passes. The work is the bytes that are read and written.

    The note "mean" stands for `mean_pool`. The cases are the keys and the index keys of
    DeepSeek-V4, and the index keys of GLM-5.3-Flash and of Qwen3.8-Flash-Next.
    """

    def make(dims: Dims, key: jax.Array) -> tuple:
        a, b, c = jax.random.split(key, 3)
        b_, s, r, h, d = (dims[x] for x in "BSRHD")
        values, gates = normal(a, b_, s, h, d), normal(b, b_, s, h, d)
        return values, gates, normal(c, r, h, d, dtype=jnp.float32)

    def make_mean(dims: Dims, key: jax.Array) -> tuple[jax.Array]:
        return (normal(key, *(dims[x] for x in "BSD")),)

    def mean(ratio: int, values: Any, **kwargs: Any) -> Any:
        return jax_dsa.mean_pool(values, ratio, **kwargs)

    for b, h, d in ((1, 2, 512), (1, 2, 128), (1, 1, 128), (8, 1, 128)):
        dims = size(B=b, S=131072, R=4, H=h, D=d)
        n, keys = 2 * b * dims["S"] * h * d, 2 * b * (dims["S"] // 4) * d
        build = functools.partial(make, dims)
        for step, arrays, diff in (("fwd", 2, ()), ("bwd", 4, (0, 1, 2))):
            work = {COPY: arrays * n + keys}
            yield Case("gated_pool", step, dims, "bf16", build, jax_dsa.gated_pool, work, diff)

    for b in (1, 8):
        dims = size(B=b, S=131072, R=4, D=128)
        work = {COPY: 2 * b * (dims["S"] + dims["S"] // 4) * 128}
        build, call = functools.partial(make_mean, dims), functools.partial(mean, 4)
        yield Case("gated_pool", "fwd", dims, "bf16", build, call, work, note="mean")
        yield Case("gated_pool", "bwd", dims, "bf16", build, call, work, diff=(0,), note="mean")
