"""How much longer an eager call takes than the same call under `jax.jit`.

    python benchmarks/call_path.py

Prints both times for `sparse_mla` and `dsa_attention` with one query, where Python's share is
largest. tests/test_structure.py bounds the number of function calls and stack frames.
"""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

import jax_dsa

if TYPE_CHECKING:
    from collections.abc import Callable

B, S, N, D, K, J, C = 1, 256, 16, 576, 64, 4, 64


def arguments(queries: int) -> dict[str, tuple[Callable[..., Any], tuple[jax.Array, ...]]]:
    """Returns functions by name, each with arguments that its kernels support."""
    q = jnp.ones((B, queries, N, D), jnp.bfloat16)
    kv = jnp.ones((B, S, 1, D), jnp.bfloat16)
    indices = jnp.zeros((B, queries, 1, K), jnp.int32)
    index_q = jnp.ones((B, queries, J, C), jnp.bfloat16)
    index_k = jnp.ones((B, S, C), jnp.bfloat16)
    index_weights = jnp.ones((B, queries, J))

    def sparse_mla(*args: jax.Array) -> Any:
        return jax_dsa.sparse_mla(*args, is_causal=True, query_start=5)

    def dsa_attention(*args: jax.Array) -> Any:
        return jax_dsa.dsa_attention(*args, top_k=K)

    return {
        "sparse_mla": (sparse_mla, (q, kv, indices)),
        "dsa_attention": (dsa_attention, (q, kv, index_q, index_k, index_weights)),
    }


def milliseconds(fun: Callable[..., Any], args: tuple[jax.Array, ...], times: int = 200) -> float:
    """Returns the median time of a call."""
    samples = []
    for _ in range(times + 5):
        start = time.perf_counter()
        jax.block_until_ready(fun(*args))
        samples.append(time.perf_counter() - start)
    return 1e3 * statistics.median(samples[5:])


def main() -> None:
    """Prints both times of each function."""
    for name, (fun, args) in arguments(1).items():
        eager, jitted = milliseconds(fun, args), milliseconds(jax.jit(fun), args)
        print(f"{name}: {eager:.3f} ms eagerly, {jitted:.3f} ms under jax.jit")


if __name__ == "__main__":
    main()
