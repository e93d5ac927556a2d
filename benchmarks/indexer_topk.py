"""Compares `indexer_topk` with `indexer_logits` followed by `topk`, on one GPU.

    python benchmarks/indexer_topk.py --queries 8192 --keys 131072

The sizes are J 64, C 128, K 2048 in FP8, with the queries at the end of the context. The three
functions are timed alternately, because a device slows down as it warms up. The separate functions
need an array of [T, S] logits.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import jax
import jax.numpy as jnp

import jax_dsa
from jax_dsa.bench.timing import device_seconds

HEADS, CHANNELS, TOP_K = 64, 128, 2048


def main() -> None:
    """Prints one line per function, and one line that compares them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--queries", type=int, default=8192)
    parser.add_argument("--keys", type=int, default=131072)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    t, s = args.queries, args.keys

    @jax.jit
    def inputs(key: jax.Array) -> tuple[jax.Array, ...]:
        a, b, c = jax.random.split(key, 3)
        q = jax_dsa.quantize_fp8(jax.random.normal(a, (1, t, HEADS, CHANNELS), jnp.bfloat16))
        k = jax_dsa.quantize_fp8(jax.random.normal(b, (1, s, CHANNELS), jnp.bfloat16))
        weights = jax.random.normal(c, (1, t, HEADS)) * q[1][..., 0]
        return q[0], k[0], weights, k[1][..., 0], (s - t + 1 + jnp.arange(t, dtype=jnp.int32))[None]

    def logits(q: Any, k: Any, weights: Any, k_scale: Any, ends: Any) -> jax.Array:
        return jax_dsa.indexer_logits(q, k, weights, index_k_scale=k_scale, ends=ends)

    def selected(x: Any, ends: Any) -> Any:
        return jax_dsa.topk(x, TOP_K, ends=ends, return_values=True)

    def both(q: Any, k: Any, weights: Any, k_scale: Any, ends: Any) -> Any:
        return jax_dsa.indexer_topk(q, k, weights, TOP_K, index_k_scale=k_scale, ends=ends)

    operands = inputs(jax.random.key(0))
    given = jax.jit(logits)(*operands), operands[-1]
    calls = {
        "indexer_logits": (logits, operands),
        "topk": (selected, given),
        "indexer_topk": (both, operands),
    }
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(args.rounds):
        for name, (call, arguments) in calls.items():
            times[name].append(device_seconds(call, [arguments], 0.05))
    median = {name: statistics.median(x) for name, x in times.items()}
    for name, x in times.items():
        print(f"{name:15} {median[name] * 1e3:7.3f} ms ({min(x) * 1e3:.3f} to {max(x) * 1e3:.3f})")
    apart = median["indexer_logits"] + median["topk"]
    ratio = median["indexer_topk"] / apart
    device = jax.devices()[0].device_kind
    print(f"T{t} S{s}: {ratio:.4f} of the two steps' {apart * 1e3:.3f} ms; {device}")


if __name__ == "__main__":
    main()
