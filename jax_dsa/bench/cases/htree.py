"""Benchmark cases of tree attention."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

import jax_dsa
from jax_dsa.bench.case import Case, cudnn, normal

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jax_dsa.bench.case import Dims, Scale


def htree(size: Scale) -> Iterator[Case]:
    """Yields prefill and decode cases, compared with dense attention.

    The work depends on how many nodes queries share, so none is counted.
    """

    def make(dims: Dims, key: jax.Array) -> tuple:
        heads = (dims["N"], dims["G"], dims["G"])
        return tuple(
            normal(k, 1, dims["T"], h, dims["D"])
            for k, h in zip(jax.random.split(key, 3), heads, strict=True)
        )

    def make_cache(dims: Dims, key: jax.Array) -> tuple:
        b, s, n, g, d = (dims[x] for x in "BSNGD")
        x, y, z = jax.random.split(key, 3)
        cache = jax_dsa.HTreeCache.empty(b, s, d, groups=g)
        k, v = (normal(key, *cache.k.shape) for key in (y, z))
        lengths = jnp.full(b, s, jnp.int32)
        return normal(x, b, 1, n, d), dataclasses.replace(cache, k=k, v=v, lengths=lengths)

    def dense(q: Any, cache: jax_dsa.HTreeCache) -> Any:
        return jax_dsa.mqa_decode(q, cache.k, cache.v, key_value_seq_lengths=cache.lengths)

    for t in (16384, 65536, 131072, 262144, 1048576):
        dims = size(T=t, N=16, G=1, D=128)
        build = functools.partial(make, dims)
        short = t <= 262144  # Dense attention over a million tokens takes seconds.
        peers: dict[str, Any] = {"cudnn": functools.partial(cudnn, True)} if short else {}
        for step, diff in (("fwd", ()), ("bwd", (0, 1, 2))):
            call = jax_dsa.htree_attention
            if step == "fwd" or short:
                yield Case("htree", step, dims, "bf16", build, call, {}, diff, peers)
    for b, s in itertools.product((1, 32), (16384, 131072, 1048576)):
        dims = size(B=b, S=s, N=16, G=1, D=128)
        yield Case(
            "htree",
            "fwd",
            dims,
            "bf16",
            functools.partial(make_cache, dims),
            jax_dsa.htree_decode,
            {},
            peers={"mqa_decode": dense},
            note="decode",
        )
