"""Benchmark cases of `attn_dist`."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

import jax_dsa
from jax_dsa.bench.case import BF16, Case, causal_selection, normal, selected_pairs

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jax_dsa.bench.case import Scale


def attn_dist(size: Scale) -> Iterator[Case]:
    """Yields one case with a causal random selection and the heads in groups of 64."""
    dims = size(T=4096, S=4096, N=128, D=576, K=2048)
    t, s, n, d, k = (dims[x] for x in "TSNDK")

    def make(key: jax.Array) -> tuple:
        a, b, c = jax.random.split(key, 3)
        picks = causal_selection(c, t, s, k)[None, :, None]
        lse = jnp.full((1, t, n), jnp.log(k), jnp.float32)
        return normal(a, 1, t, n, d), normal(b, 1, s, 1, d), picks, lse

    call = functools.partial(jax_dsa.attn_dist, head_group=64)
    work, all_slots = 2 * n * d * selected_pairs(t, s, k), 2 * n * d * t * k
    yield Case("attn_dist", "fwd", dims, "bf16", make, call, {BF16: work}, all_slots=all_slots)
