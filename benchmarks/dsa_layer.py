"""Measures time and peak memory of one DSA layer, forward and backward.

    python benchmarks/dsa_layer.py --queries 8192 --keys 8192 [--forward] [--implementation xla]
    python benchmarks/dsa_layer.py --keys 131072 --shard heads

The layer is `dsa_attention` with its indexer loss: N 128, D 576, K 2048, J 64, C 128 in bfloat16,
with the queries at the end of the context. JAX reports the peak memory of the process, so each process
measures one layer. `--shard` uses all GPUs and prints what they exchange. The memory is then that
of the first GPU.
"""

from __future__ import annotations

import argparse
import math
import re
import time
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_dsa

if TYPE_CHECKING:
    from collections.abc import Iterator

SHARDINGS = {
    "heads": (P(None, None, "x"), P(), P(), P(), P()),
    "queries": (P(None, "x"), P(), P(None, "x"), P(), P(None, "x")),
    "keys": (P(None, "x"),) * 5,
}
HEADS, DIM, VALUE_DIM, TOP_K, INDEX_HEADS, INDEX_DIM = 128, 576, 512, 2048, 64, 128


def main() -> None:
    """Measures one layer, and prints one line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--queries", type=int, default=8192)
    parser.add_argument("--keys", type=int, default=8192)
    parser.add_argument(
        "--implementation", choices=["cuda", "xla"], help="(default: jax_dsa chooses)"
    )
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--forward", action="store_true", help="without the backward pass")
    parser.add_argument("--shard", choices=SHARDINGS, help="over all GPUs")
    args = parser.parse_args()
    t, s = args.queries, args.keys
    device = jax.devices()[0]

    @jax.jit
    def inputs(key: jax.Array) -> tuple[jax.Array, ...]:
        a, b, c, d, e = jax.random.split(key, 5)
        return (
            jax.random.normal(a, (1, t, HEADS, DIM), jnp.bfloat16),
            jax.random.normal(b, (1, s, 1, DIM), jnp.bfloat16),
            jax.random.normal(c, (1, t, INDEX_HEADS, INDEX_DIM), jnp.bfloat16),
            jax.random.normal(d, (1, s, INDEX_DIM), jnp.bfloat16),
            jax.random.normal(e, (1, t, INDEX_HEADS)) / 64,
        )

    def layer(*operands: jax.Array) -> tuple[jax.Array, jax.Array]:
        out, aux = jax_dsa.dsa_attention(
            *operands,
            top_k=TOP_K,
            query_start=s - t,
            deterministic=args.deterministic,
            implementation=args.implementation,
        )
        return out, aux.kl

    def gradients(cotangent: jax.Array, *operands: jax.Array) -> tuple[jax.Array, ...]:
        def loss(*operands: jax.Array) -> jax.Array:
            out, kl = layer(*operands)
            return jnp.sum(out.astype(jnp.float32) * cotangent.astype(jnp.float32)) + kl

        return jax.grad(loss, argnums=tuple(range(5)))(*operands)

    operands = inputs(jax.random.key(0))
    if not args.forward:
        cotangent = jax.random.normal(jax.random.key(1), (1, t, HEADS, VALUE_DIM), jnp.bfloat16)
        operands = (cotangent, *operands)
    given = sum(x.nbytes for x in operands)
    if args.shard:
        specs = SHARDINGS[args.shard]
        specs = specs if args.forward else (specs[0], *specs)
        mesh = jax.make_mesh((jax.device_count(),), ("x",))
        operands = tuple(
            jax.device_put(x, NamedSharding(mesh, spec))
            for x, spec in zip(operands, specs, strict=True)
        )
        jax.set_mesh(mesh)
    program = jax.jit(layer if args.forward else gradients).lower(*operands).compile()
    for exchange in sorted(collectives(program.as_text(), jax.device_count())):
        print(f"  {exchange.name} {exchange.shapes}")
    jax.block_until_ready(program(*operands))
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        jax.block_until_ready(program(*operands))
        seconds.append(time.perf_counter() - start)
    peak = (device.memory_stats() or {}).get("peak_bytes_in_use", 0)
    print(
        f"T{t} S{s} {args.implementation or 'default'}{' deterministic' * args.deterministic}"
        f"{' forward' * args.forward}"
        f"{f' {args.shard} on {jax.device_count()} GPUs' if args.shard else ''}: "
        f"{1e3 * sorted(seconds)[2]:.1f} ms; peak {peak / 2**30:.2f} GiB, of which inputs "
        f"{given / 2**30:.2f} GiB; one [T, S] float32 array would be {4 * t * s / 2**30:.2f} GiB; "
        f"{device.device_kind}, JAX {jax.__version__}"
    )


class Exchange(NamedTuple):
    """A collective operation of a compiled program."""

    name: str
    shapes: str
    bytes: int
    """Bytes of the results on one device."""
    devices: int
    """Number of devices that take part in one instance of the operation."""


def collectives(text: str, devices: int) -> Iterator[Exchange]:
    """Yields the collective operations of a compiled program.

    Args:
        text: The program's HLO text.
        devices: The number of devices.
    """
    names = r"all-gather|all-reduce|all-to-all|reduce-scatter|collective-permute"
    for line in text.splitlines():
        found = re.search(rf"= (\S.*?) ({names})(-start)?\(", line)
        if not found:
            continue
        shapes = re.findall(r"([a-z]+(\d*)(?:e\w+)?\[([\d,]*)\])", found[1])
        if found[3] and found[2] != "all-reduce":  # Such tuples begin with the operands.
            shapes = shapes[len(shapes) // 2 :]
        size = sum(
            int(bits or 8) // 8 * math.prod(int(n) for n in dims.split(",") if n)
            for _, bits, dims in shapes
        )
        groups = re.search(r"replica_groups=(?:\{\{([\d,]+)\}|\[\d+,(\d+)\])", line)
        group = (int(groups[2]) if groups[2] else groups[1].count(",") + 1) if groups else devices
        yield Exchange(found[2], ", ".join(shape for shape, *_ in shapes), size, group)


if __name__ == "__main__":
    main()
