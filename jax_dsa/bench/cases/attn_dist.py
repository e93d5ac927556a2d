"""Benchmark cases of `attn_dist`."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

import jax_dsa
from jax_dsa.bench.case import BF16, Case, causal_selection, normal, selected_pairs
from jax_dsa.bench.cases.sparse_attention import block_lists, listed_pairs

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jax_dsa.bench.case import Dims, Scale


def attn_dist(size: Scale) -> Iterator[Case]:
    """Yields causal cases of the teacher's probabilities.

    The first has the heads of latent attention in groups of 64, and a random selection. The second
    has the grouped heads of MiniMax-M3, and the tokens of K blocks of b keys that neighbouring
    queries share (see `sparse_attention`), a list for each KV head.
    """
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

    yield _grouped_case(size(T=8192, N=64, G=4, D=128, K=16) | {"b": 128})


def _grouped_case(dims: Dims) -> Case:
    t, n, g, d, k, b = (dims[x] for x in "TNGDKb")

    def make(key: jax.Array) -> tuple:
        q_key, k_key, list_key = jax.random.split(key, 3)
        tokens = jax_dsa.block_tokens(block_lists(list_key, dims, False, g, similar=True), b)
        lse = jnp.full((1, t, n), jnp.log(k * b), jnp.float32)
        return normal(q_key, 1, t, n, d), normal(k_key, 1, t, g, d), tokens, lse

    call = functools.partial(jax_dsa.attn_dist, head_group=n // g, is_causal=True)
    work, all_slots = 2 * n * d * listed_pairs(dims, False), 2 * n * d * t * k * b
    return Case(
        *("attn_dist", "fwd", dims, "bf16", make, call, {BF16: work}),
        note="blocks",
        all_slots=all_slots,
    )
