"""Times both ways to add up the keys' gradients in sparse MLA's backward pass, on one GPU.

    python benchmarks/backward_routes.py [--batch 4 --queries 1024] [--heads 16]

One way uses atomic float32 reductions. The other sorts the gradient rows by key and adds them in
order; `deterministic=True` always uses it, and the time of the sort counts. The two are timed
alternately. The last lines list the sizes of the float32 sums at which sorted rows are faster.
`ROWS_FROM` in `jax_dsa/ops/sparse_mla/cuda.py` is such a size.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import statistics
import time
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jax_dsa.bench.case import causal_selection, normal, selected_pairs
from jax_dsa.ops.sparse_mla import cuda
from jax_dsa.ops.sparse_mla.spec import Gradients, Operands, Options, Results

if TYPE_CHECKING:
    from collections.abc import Callable

DIM, VALUE_DIM = 576, 512
CALLS, REPEATS = 3, 3


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def query_operands(b: int, t: int, n: int) -> tuple[jax.Array, Results, Results]:
    """Returns random queries, plausible results of the forward pass, and cotangents."""
    w, x, y, z = jax.random.split(jax.random.key(0), 4)
    out, dout = normal(x, b, t, n, VALUE_DIM), normal(y, b, t, n, VALUE_DIM)
    lse, dlse = jnp.full((b, t, n), 8.0), jax.random.normal(z, (b, t, n))
    return normal(w, b, t, n, DIM), Results(out, lse), Results(dout, dlse)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def selection(b: int, t: int, s: int, k: int) -> jax.Array:
    """Returns random visible keys in ascending order; the queries are the last positions."""
    keys = jax.random.split(jax.random.key(1), b)
    return jax.vmap(lambda key: causal_selection(key, t, s, k))(keys)[:, :, None]


def route(deterministic: bool, *operands: Any) -> Callable[[], Any]:
    """Returns the compiled backward pass as a function without arguments."""
    options = Options(DIM**-0.5, VALUE_DIM, deterministic=deterministic)

    def gradients(x: Operands, y: Results, dy: Results) -> Gradients:
        dkv: Any = jax.ShapeDtypeStruct(x.kv.shape, jnp.float32)
        return cuda.sparse_mla_bwd(options, Gradients(x.q, dkv, None), x, y, dy)

    program = jax.jit(gradients).lower(*operands).compile()
    jax.block_until_ready(program(*operands))
    return functools.partial(program, *operands)


def seconds(call: Callable[[], Any]) -> float:
    """Returns the seconds per call of several calls in a row."""
    start = time.perf_counter()
    jax.block_until_ready([call() for _ in range(CALLS)][-1])
    return (time.perf_counter() - start) / CALLS


def main() -> None:
    """Prints one line per shape, and then the sizes at which sorted rows are faster."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--queries", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--heads", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--top-k", type=int, default=2048)
    parser.add_argument(
        "--keys", type=int, nargs="+", default=[8192, 16384, 24576, 32768, 65536, 131072]
    )
    parser.add_argument(
        "--rows-budget",
        type=int,
        default=cuda.ROWS_BUDGET >> 20,
        metavar="MiB",
        help="memory for the rows that are stored at a time",
    )
    args = parser.parse_args()
    # Otherwise the call with reductions would switch to sorted rows at large sizes.
    cuda.ROWS_FROM = 2**62
    cuda.ROWS_BUDGET = args.rows_budget << 20
    b, k = args.batch, args.top_k
    print(f"{jax.devices()[0].device_kind}, B{b} D{DIM} K{k}")
    wins: dict[tuple[int, int], list[int]] = {}
    for n, t in itertools.product(args.heads, args.queries):
        q, y, dy = query_operands(b, t, n)
        wins[n, t] = []
        for s in args.keys:
            if s < t:
                continue
            x = Operands(q, normal(jax.random.key(2), b, s, 1, DIM), selection(b, t, s, k))
            routes = [route(False, x, y, dy), route(True, x, y, dy)]
            times = [[seconds(call) for call in routes] for _ in range(REPEATS)]
            reductions, rows = (statistics.median(x) for x in zip(*times, strict=True))
            work = 2 * b * n * selected_pairs(t, s, k) * (3 * DIM + 2 * VALUE_DIM) * 1e-12
            size = s * DIM * 4 >> 20
            if rows < reductions:
                wins[n, t].append(size)
            print(
                f"N{n} T{t} S{s}, sums of {size} MiB: reductions {reductions * 1e3:.2f} ms "
                f"({work / reductions:.0f} TFLOPS), rows {rows * 1e3:.2f} ms "
                f"({work / rows:.0f} TFLOPS), {reductions / rows:.2f} times as fast",
                flush=True,
            )
    for (n, t), sizes in wins.items():
        print(f"N{n} T{t}: sorted rows are faster at {sizes or 'no size'} MiB")


if __name__ == "__main__":
    main()
