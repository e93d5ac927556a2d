"""Measures time and memory of one layer for several lengths of the context, on one GPU.

    python benchmarks/lengths.py > benchmarks/results/h200/lengths.csv

The forward and backward passes of the last 8192 queries are measured, with DeepSeek-V3.2's sizes
(`dsa_layer.py`). "sparse" is `dsa_attention` with its indexer loss. "dense" is `masked_attention`
in multi-head form (D 192, E 128), which computes keys and values of every head from the same
latents. The memory is what the compiled program needs in addition to its arguments and results.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from dsa_layer import DIM, HEADS, INDEX_DIM, INDEX_HEADS, TOP_K

import jax_dsa

if TYPE_CHECKING:
    from collections.abc import Callable

QUERIES = 8192
KEYS = tuple(8192 * 2**i for i in range(5))
NOPE, ROPE, VALUES = 128, 64, 128
LATENT = DIM - ROPE

BF16, F32 = jnp.bfloat16, jnp.float32


def sparse(keys: int) -> tuple[Callable[..., jax.Array], list[jax.ShapeDtypeStruct]]:
    """Returns a loss of the sparse layer's operands, and their shapes."""

    def loss(*operands: jax.Array) -> jax.Array:
        out, aux = jax_dsa.dsa_attention(*operands, top_k=TOP_K, query_start=keys - QUERIES)
        return jnp.square(out.astype(F32)).mean() + aux.kl

    shapes: list[tuple[tuple[int, ...], jnp.dtype]] = [
        ((1, QUERIES, HEADS, DIM), BF16),
        ((1, keys, 1, DIM), BF16),
        ((1, QUERIES, INDEX_HEADS, INDEX_DIM), BF16),
        ((1, keys, INDEX_DIM), BF16),
        ((1, QUERIES, INDEX_HEADS), F32),
    ]
    return loss, [jax.ShapeDtypeStruct(*x) for x in shapes]


def dense(keys: int) -> tuple[Callable[..., jax.Array], list[jax.ShapeDtypeStruct]]:
    """Returns a loss of the dense layer's operands, and their shapes."""

    def loss(q: jax.Array, latent: jax.Array, rope: jax.Array, up: jax.Array) -> jax.Array:
        both = jnp.einsum("bsr,rnd->bsnd", latent, up)
        shared = jnp.broadcast_to(rope[:, :, None], (*both.shape[:3], ROPE))
        k = jnp.concatenate([both[..., :NOPE], shared], axis=-1)
        out = jax_dsa.masked_attention(
            q, k, both[..., NOPE:], is_causal=True, causal_alignment="bottom_right"
        )
        return jnp.square(out.astype(F32)).mean()

    shapes = [
        (1, QUERIES, HEADS, NOPE + ROPE),
        (1, keys, LATENT),
        (1, keys, ROPE),
        (LATENT, HEADS, NOPE + VALUES),
    ]
    return loss, [jax.ShapeDtypeStruct(x, BF16) for x in shapes]


def main() -> None:
    """Prints one line of CSV per form and length."""
    print("form,queries,keys,milliseconds,temporary_bytes,device,jax", flush=True)
    for form in (sparse, dense):
        for keys in KEYS:
            loss, shapes = form(keys)
            program = jax.jit(jax.grad(loss, tuple(range(len(shapes))))).lower(*shapes).compile()
            operands = [
                jax.random.normal(jax.random.key(i), x.shape, x.dtype) / x.shape[-1] ** 0.25
                for i, x in enumerate(shapes)
            ]
            jax.block_until_ready(program(*operands))
            seconds = []
            for _ in range(3):
                start = time.perf_counter()
                jax.block_until_ready(program(*operands))
                seconds.append(time.perf_counter() - start)
            needed = program.memory_analysis().temp_size_in_bytes
            values = (form.__name__, QUERIES, keys, f"{1e3 * sorted(seconds)[1]:.4g}", needed)
            print(*values, jax.devices()[0].device_kind, jax.__version__, sep=",", flush=True)


if __name__ == "__main__":
    main()
