"""Benchmark cases of the indexer's losses."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

import jax_dsa
from jax_dsa.bench.case import BF16, COPY, Case, normal, visible_pairs

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jax_dsa.bench.case import Dims, Scale


def losses(size: Scale) -> Iterator[Case]:
    """Yields the indexer's losses with their gradients, over selected keys and over all keys."""

    def sparse(logits: jax.Array, teacher: jax.Array, **kwargs: Any) -> Any:
        loss = functools.partial(jax_dsa.indexer_kl_loss, **kwargs)
        return jax.value_and_grad(loss)(logits, teacher)

    def dense(*args: jax.Array, **kwargs: Any) -> Any:
        loss = functools.partial(jax_dsa.dense_indexer_kl_loss, **kwargs)
        return jax.value_and_grad(loss, argnums=(0, 1, 2))(*args)

    def make_sparse(dims: Dims, key: jax.Array) -> tuple:
        a, b = jax.random.split(key)
        shape = (1, dims["T"], dims["K"])
        return normal(a, *shape, dtype=jnp.float32), jax.random.uniform(b, shape)

    def make_dense(dims: Dims, key: jax.Array) -> tuple:
        t, n, g, d, j, c = (dims[x] for x in "TNGDJC")
        keys = jax.random.split(key, 5)
        weights = normal(keys[2], 1, t, j, dtype=jnp.float32)
        index = normal(keys[0], 1, t, j, c), normal(keys[1], 1, t, c), weights
        return *index, normal(keys[3], 1, t, n, d), normal(keys[4], 1, t, g, d)

    dims = size(T=8192, K=2048)
    work: dict[str, float] = {COPY: 12 * dims["T"] * dims["K"]}
    build = functools.partial(make_sparse, dims)
    yield Case("losses", "fwd", dims, "f32", build, sparse, work, note="gradient")
    for t, g, d in ((4096, 1, 576), (32768, 1, 576), (4096, 128, 192)):
        dims = size(T=t, N=128, G=g, D=d, J=64, C=128)
        t, n, d, j, c = (dims[x] for x in "TNDJC")
        work = {BF16: visible_pairs(t, t) * (4 * n * d + 6 * j * c)}
        build = functools.partial(make_dense, dims)
        yield Case("losses", "fwd", dims, "bf16", build, dense, work, note="gradients")
