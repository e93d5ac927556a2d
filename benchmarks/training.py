"""What training gains from all devices that JAX finds against one of them, and its longest context.

    python benchmarks/training.py data     # H200 preset, sparse step: as many rows on each device
    python benchmarks/training.py context  # DeepSeek-V3.2's layer, T = S = 131072: queries sharded
    python benchmarks/training.py tensor   # the same layer, T = S = 32768: heads sharded
    python benchmarks/training.py fsdp     # H200 preset: bytes of parameters and optimisers
    python benchmarks/training.py step     # V3.2 preset, T 131072: a sparse step on one device

One process measures one row, since the peak of memory is the process's own, prints it with what the
compiled program exchanges, and adds it to a CSV file. `--small` has sizes for host devices. At
131072 tokens most of the compiler's time is its choice of matmuls (a minute):
XLA_FLAGS=--xla_gpu_autotune_level=0 leaves that out.
"""

from __future__ import annotations

import argparse
import collections
import csv
import dataclasses
import functools
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from dsa_layer import collectives
from flax import nnx

from jax_dsa import nn
from jax_dsa.training.config import PRESETS, TrainConfig
from jax_dsa.training.mesh import BATCH, annotate, fitted, make_mesh, shardings
from jax_dsa.training.steps import Program

if TYPE_CHECKING:
    from collections.abc import Callable

    from jax.sharding import Mesh

COLUMNS = (
    *("row", "case", "devices", "ms_one", "ms", "gain"),
    *("peak_gib_one", "peak_gib", "tokens_per_second", "result_one", "result", "device", "jax"),
)
"""`gain` is how many devices' work the devices do; of `fsdp`, how much of one's bytes each holds.
`result` is a loss, which has to be `result_one`'s."""
REPEATS = 3


class Run(NamedTuple):
    """A compiled program, which takes its arguments' place in memory, and how to call it again."""

    lowered: Any
    arguments: Callable[[], tuple]
    following: Callable[[tuple, Any], tuple]
    """The next call's arguments, of the last one's and its results."""
    result: Callable[[Any], Any]


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Measures one row."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("row", choices=ROWS)
    parser.add_argument("--devices", type=int, default=jax.device_count())
    parser.add_argument("--length", type=int, help="of a sequence, in place of the row's own")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--csv", type=Path, default="benchmarks/results/training.csv")
    args = parser.parse_args(argv)
    found = ROWS[args.row](args)
    device = jax.devices()[0].device_kind
    row = {"row": args.row, **found, "device": device, "jax": jax.__version__}
    shown = {k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()}
    print(", ".join(f"{k} {v}" for k, v in shown.items()), flush=True)
    args.csv.parent.mkdir(parents=True, exist_ok=True)
    new = not args.csv.exists()
    with args.csv.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        if new:
            writer.writeheader()
        writer.writerow(shown)
    return row


def data(args: argparse.Namespace) -> dict[str, Any]:
    """As many rows on each device as one has alone."""
    config, n = preset("h200", args), args.devices
    rows = config.batch_size
    runs = [
        sparse_step(dataclasses.replace(config, batch_size=rows * size), make_mesh({"data": size}))
        for size in (n, 1)
    ]
    case = f"{rows} rows a device, T{config.seq_len}"
    found = compared(runs, n, case, tokens=n * rows * config.seq_len)
    return found | {"gain": n * found["ms_one"] / found["ms"]}


def context(args: argparse.Namespace) -> dict[str, Any]:
    """One sequence's queries, in stripes; the keys are gathered."""
    config = preset("v32", args)
    n, length = args.devices, config.seq_len
    runs = [layer(config, make_mesh({"data": 1, "context": size})) for size in (n, 1)]
    return compared(runs, n, f"layer, T=S={length}", tokens=length)


def tensor(args: argparse.Namespace) -> dict[str, Any]:
    """The attention's heads; selections are computed once, each device those of a part of T."""
    config = preset("v32", args)
    length = args.length or (config.seq_len if args.small else 32768)
    config = dataclasses.replace(config, seq_len=length)
    n = args.devices
    runs = [layer(config, make_mesh({"data": 1, "tensor": size})) for size in (n, 1)]
    return compared(runs, n, f"layer, T=S={length}", tokens=length)


def fsdp(args: argparse.Namespace) -> dict[str, Any]:
    """What a device holds of the state before the first step, and its peak while that is made."""
    config, n = preset("h200", args), args.devices
    held, peaks = [], []
    for size, device in ((n, jax.devices()[n - 1]), (1, jax.devices()[0])):
        mesh = make_mesh({"data": 1, "fsdp": size})
        batch = config.batch_size * size
        state = Program(dataclasses.replace(config, batch_size=batch), mesh).init()
        jax.block_until_ready(state)
        arrays = jax.tree.leaves((state.backbone, state.indexer, state.control))
        held.append(sum(x.addressable_shards[0].data.nbytes for x in arrays))
        peaks.append(peak(device))
        del state, arrays
    return {
        "case": f"parameters and optimisers, {held[1] / 2**30:.4f} GiB on one device",
        "devices": n,
        "gain": held[0] / held[1],
        "peak_gib_one": peaks[1],
        "peak_gib": peaks[0],
    }


def step(args: argparse.Namespace) -> dict[str, Any]:
    """Of the sparse stage, without its control: both losses, gradients, and AdamW."""
    config = preset("v32", args)
    length = config.seq_len
    run = sparse_step(config, make_mesh({"data": 1}))
    return compared([run], 1, f"{config.model.num_layers} layers, T={length}", tokens=length)


ROWS = {"data": data, "context": context, "tensor": tensor, "fsdp": fsdp, "step": step}


def preset(name: str, args: argparse.Namespace) -> TrainConfig:
    """A preset as the command line changes it."""
    config = PRESETS[name]()
    if args.small:
        small = PRESETS["cpu"]()
        attention = dataclasses.replace(small.model.attention, num_heads=8)
        model = dataclasses.replace(small.model, attention=attention, num_layers=1)
        config = dataclasses.replace(config, model=model, seq_len=64)
    return dataclasses.replace(config, seq_len=args.length or config.seq_len)


def sparse_step(config: TrainConfig, mesh: Mesh) -> Run:
    """A step of the sparse stage on batches of one token."""
    program = Program(config, mesh)
    tokens = np.full((config.batch_size, config.seq_len + 1), 1, np.int32)
    state = jax.eval_shape(program._first_state)
    places = shardings(state, mesh)
    learners = jax.tree.map(
        lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
        (state.backbone, state.indexer),
        (places.backbone, places.indexer),
    )
    batch, rates = program.place(tokens, mesh.shape["context"]), program._rates(0)
    with jax.set_mesh(mesh):
        lowered = program._sparse.lower(*learners, batch, rates)

    def arguments() -> tuple:
        state = program.init()
        return state.backbone, state.indexer, batch, rates

    return Run(lowered, arguments, lambda args, out: (*out[:2], *args[2:]), lambda out: out[2])


def layer(config: TrainConfig, mesh: Mesh) -> Run:
    """`nn.DSAttention`, its indexer's loss, and all gradients, by a random cotangent."""
    attention = config.model.attention
    stripes = mesh.shape["context"]
    shape = (1, config.seq_len, attention.model_dim)

    def first() -> nn.DSAttention:
        module = nn.DSAttention(attention, rngs=nnx.Rngs(0))
        annotate(module)
        return module

    graph, abstract = nnx.split(nnx.eval_shape(first))
    places = shardings(abstract, mesh)
    hidden = fitted(mesh, BATCH, shape)

    @functools.partial(jax.jit, out_shardings=(places, hidden, hidden))
    def inputs() -> tuple:
        x, cotangent = (
            jax.random.normal(key, shape, attention.dtype)
            for key in jax.random.split(jax.random.key(0))
        )
        return nnx.state(first()), nn.striped(x, stripes), nn.striped(cotangent, stripes)

    @functools.partial(jax.jit, out_shardings=(None, places, hidden))
    def gradients(params: Any, x: jax.Array, cotangent: jax.Array) -> tuple:
        def outputs(params: Any, x: jax.Array) -> tuple[jax.Array, jax.Array]:
            y, aux = nnx.merge(graph, params)(x, stripes=stripes)
            return y, aux.kl

        (_, kl), pull = jax.vjp(outputs, params, x)
        return kl, *pull((cotangent, jnp.ones_like(kl)))

    def placed(x: Any, place: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)

    with jax.set_mesh(mesh):
        given = jax.tree.map(placed, jax.eval_shape(inputs), (places, hidden, hidden))
        lowered = gradients.lower(*given)

    def arguments() -> tuple:
        with jax.set_mesh(mesh):
            return inputs()

    return Run(lowered, arguments, lambda args, out: args, lambda out: out[0])


def compared(runs: list[Run], n: int, case: str, tokens: int) -> dict[str, Any]:
    """Times of the program on n devices and, if there is another, of the one on one.

    The n devices come first: the last one's peak is then theirs, the first one's that of one.
    """
    with ThreadPoolExecutor() as pool:
        programs = list(pool.map(lambda run: run.lowered.compile(), runs))
    for exchanged, count in sorted(collections.Counter(collectives(programs[0].as_text())).items()):
        print(f"  {count} x {exchanged}", flush=True)
    found: dict[str, Any] = {"case": case, "devices": n}
    places = ("", n - 1), ("_one", 0)
    for run, program, (suffix, device) in zip(runs, programs, places):
        seconds, result = timed(run, program)
        found |= {
            f"ms{suffix}": 1e3 * seconds,
            f"result{suffix}": float(result),
            f"peak_gib{suffix}": peak(jax.devices()[device]),
        }
        print(f"  {suffix or 'all'}: {1e3 * seconds:.1f} ms", flush=True)
    found["tokens_per_second"] = 1e3 * tokens / found["ms"]
    if len(runs) > 1:
        found["gain"] = found["ms_one"] / found["ms"]
    return found


def timed(run: Run, program: Any) -> tuple[float, Any]:
    """Seconds of a call, the median of some after the first, and the first one's result."""
    args = run.arguments()
    out = jax.block_until_ready(program(*args))
    first, seconds = run.result(out), []
    for _ in range(REPEATS):
        args, out = run.following(args, out), None
        start = time.perf_counter()
        out = jax.block_until_ready(program(*args))
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds), first


def peak(device: jax.Device) -> float:
    """GiB at most in use on a device since the process began; NaN where nobody counts."""
    return (device.memory_stats() or {}).get("peak_bytes_in_use", np.nan) / 2**30


if __name__ == "__main__":
    main()
