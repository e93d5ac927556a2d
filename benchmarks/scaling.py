"""What training gains from more devices: times, memory, and what the devices exchange.

    python benchmarks/scaling.py                 # every program on 1, 2, 4, ... devices
    python benchmarks/scaling.py layer-131072    # one program
    python benchmarks/scaling.py step data=2     # one program on one mesh, in this process

    step          H200 preset, sparse step; "data" has as many rows on each device as one has alone
    layer-131072  DeepSeek-V3.2's layer, T = S = 131072, forward and backward, queries sharded
    layer-524288  the same on 8 devices
    layer-32768   the same layer, heads sharded
    v32-step      V3.2 preset, T 131072: a sparse step on one device
    fsdp          H200 preset: bytes of parameters and optimisers; leaves a checkpoint
    resume        that checkpoint on 2 devices: the same loss

A process measures one mesh, since the peak of memory is the process's own. Rows go to a CSV file as
they come; what it has is left out, so a run that was stopped goes on. At the end come the table and
the plot. `--small` has sizes for host devices. At 131072 tokens most of the compiler's time is its
choice of matmuls (a minute): XLA_FLAGS=--xla_gpu_autotune_level=0 leaves that out.
"""

from __future__ import annotations

import argparse
import collections
import csv
import dataclasses
import functools
import math
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from dsa_layer import collectives
from flax import nnx
from jax.sharding import PartitionSpec

from jax_dsa import nn
from jax_dsa.training.checkpoint import Checkpoints
from jax_dsa.training.config import PRESETS, TrainConfig
from jax_dsa.training.mesh import AXES, BATCH, annotate, fitted, make_mesh, shardings
from jax_dsa.training.steps import Program

if TYPE_CHECKING:
    from collections.abc import Callable

    from jax.sharding import Mesh

Sizes = dict[str, int]
"""Of a mesh's axes."""

COLUMNS = (
    *("program", "mesh", "devices", "ms", "tokens_per_second", "peak_gib", "held_gib"),
    *("gathered_mib", "reduced_mib", "other_mib", "link_gb_s", "result", "device", "jax"),
)
"""Of one device: `held_gib` are parameters and optimisers, the MiB what it receives in a call.
`link_gb_s` is what a gather of nothing else receives. `result` is a loss."""
REPEATS = 3
EVERY_AXIS = {"data": 2, "context": 2, "tensor": 2}


class Run(NamedTuple):
    """A compiled program, which takes its arguments' place in memory, and how to call it again."""

    lowered: Any
    arguments: Callable[[], tuple]
    following: Callable[[tuple, Any], tuple]
    """The next call's arguments, of the last one's and its results."""
    result: Callable[[Any], Any]


def main(argv: list[str] | None = None) -> list[dict[str, str]]:
    """Measures what is asked for, and says what there is."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("program", nargs="?", choices=MESHES)
    parser.add_argument("mesh", nargs="?", help="axis=size,..., default every one of the program")
    parser.add_argument("--devices", type=int, help="at most; default all")
    parser.add_argument("--small", action="store_true")
    parser.add_argument(
        "--chunked", action="store_true", help="a layer's queries in chunks, as in the preset"
    )
    parser.add_argument("--csv", type=Path, default="benchmarks/results/scaling.csv")
    parser.add_argument("--plot", type=Path, help="default beside the CSV file")
    args = parser.parse_args(argv)
    if args.mesh:
        add(args.csv, measured(args.program, axes(args.mesh), args))
        return rows(args.csv)
    devices = args.devices or device_count()
    programs = [args.program] if args.program else list(MESHES)
    there = {(row["program"], row["mesh"]) for row in rows(args.csv)}
    wanted = [(name, mesh_name(mesh)) for name in programs for mesh in MESHES[name](devices)]
    missing = [case for case in wanted if case not in there]
    for i, (name, mesh) in enumerate(missing):
        print(f"[{i + 1}/{len(missing)}] {name} {mesh}", flush=True)
        command = [sys.executable, __file__, name, mesh, "--csv", str(args.csv)]
        command += ["--small"] * args.small + ["--chunked"] * args.chunked
        if subprocess.run(command, check=False).returncode:
            print(f"{name} {mesh} FAILED", flush=True)
    found = rows(args.csv)
    print(table(found))
    plot(found, args.plot or args.csv.with_suffix(".svg"))
    return found


def device_count() -> int:
    """Of a process of its own: this one is to leave the devices' memory to those that measure."""
    count = [sys.executable, "-c", "import jax; print(jax.device_count())"]
    return int(subprocess.run(count, check=True, capture_output=True, text=True).stdout)


def by(axis: str, devices: int) -> list[Sizes]:
    """1, 2, 4, ... devices on an axis."""
    return [{axis: 2**i} for i in range(devices.bit_length())]


def on_every_axis(devices: int, *others: str) -> list[Sizes]:
    """Two devices on each of three axes, and on the `others` alone."""
    return (
        [*({axis: 2} for axis in others), EVERY_AXIS]
        if devices >= math.prod(EVERY_AXIS.values())
        else []
    )


MESHES: dict[str, Callable[[int], list[Sizes]]] = {
    "step": lambda n: by("data", n) + on_every_axis(n, "context", "tensor"),
    "layer-131072": lambda n: by("context", n),
    "layer-524288": lambda n: [{"context": 8}] if n >= 8 else [],
    "layer-32768": lambda n: by("tensor", n) + on_every_axis(n, "data", "context"),
    "v32-step": lambda n: [{"data": 1}],
    "fsdp": lambda n: by("fsdp", n),
    "resume": lambda n: [{"fsdp": 2}] if n >= 2 else [],
}
"""Those that so many devices allow, one device first."""


def axes(name: str) -> Sizes:
    """The sizes that `mesh_name` names."""
    found = {axis: int(size) for axis, size in (part.split("=") for part in name.split(","))}
    if not found.keys() <= set(AXES):
        raise SystemExit(f"scaling.py: mesh is {name}, want axes of {', '.join(AXES)}")
    return found


def mesh_name(sizes: Sizes) -> str:
    """As on the command line."""
    return ",".join(f"{axis}={size}" for axis, size in sizes.items())


def measured(name: str, sizes: Sizes, args: argparse.Namespace) -> dict[str, Any]:
    """One row."""
    mesh = make_mesh({"data": 1, **sizes})
    device = {"device": jax.devices()[0].device_kind, "jax": jax.__version__}
    row = {"program": name, "mesh": mesh_name(sizes), "devices": mesh.size, **device}
    config = preset("v32" if name.startswith(("layer", "v32")) else "h200", args.small)
    if name.startswith("layer") and not args.small:
        # All queries at once: `exchanged` counts what a chunk exchanges as if there were only one.
        chunk = config.model.attention.query_chunk if args.chunked else None
        attention = dataclasses.replace(config.model.attention, query_chunk=chunk)
        model = dataclasses.replace(config.model, attention=attention)
        config = dataclasses.replace(config, model=model, seq_len=int(name.split("-")[1]))
    rows = 8 if name in ("fsdp", "resume") else config.batch_size * mesh.shape["data"]
    config = dataclasses.replace(config, batch_size=rows)
    tokens = rows * config.seq_len
    checkpoints = args.csv.parent / "scaling_checkpoints"
    if name == "fsdp":
        row |= held(config, mesh, checkpoints)
    if name.startswith("layer"):
        run = layer(config, mesh)
    else:
        run = sparse_step(config, mesh, checkpoints if name in ("fsdp", "resume") else None)
    program = run.lowered.compile()
    seconds, result = timed(run, program)
    row |= {"ms": 1e3 * seconds, "tokens_per_second": tokens / seconds, "result": float(result)}
    row |= exchanged(program.as_text(), mesh.size)
    row |= {"peak_gib": peak(jax.devices()[mesh.size - 1]), "link_gb_s": link(mesh, args.small)}
    return row


def held(config: TrainConfig, mesh: Mesh, folder: Path) -> dict[str, float]:
    """What a device holds of the state before the first step, of which a checkpoint stays."""
    state = Program(config, mesh).init()
    checkpoints = Checkpoints(folder, keep=1)
    if checkpoints.latest() is None:
        checkpoints.save(state, {})
    checkpoints.close()
    arrays = jax.tree.leaves((state.backbone, state.indexer, state.control))
    return {"held_gib": sum(x.addressable_shards[0].data.nbytes for x in arrays) / 2**30}


def preset(name: str, small: bool) -> TrainConfig:
    """A preset, or one of its kind for host devices."""
    config = PRESETS[name]()
    if small:
        cpu = PRESETS["cpu"]()
        attention = dataclasses.replace(cpu.model.attention, num_heads=8)
        model = dataclasses.replace(cpu.model, attention=attention, num_layers=1)
        config = dataclasses.replace(config, model=model, seq_len=64)
    return config


def sparse_step(config: TrainConfig, mesh: Mesh, checkpoints: Path | None = None) -> Run:
    """A step of the sparse stage, from a checkpoint if there is one. The rows of a batch are two in
    turn, so that every mesh has the same loss.
    """
    program = Program(config, mesh)
    two = np.random.default_rng(0).integers(0, 255, (2, config.seq_len + 1), np.int32)
    tokens = np.resize(two, (config.batch_size, config.seq_len + 1))
    state = jax.eval_shape(program._initial_state)
    places = shardings(state, mesh)
    learners = jax.tree.map(
        lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
        (state.backbone, state.indexer),
        (places.backbone, places.indexer),
    )
    batch, rates = program.place(tokens, mesh.shape["context"]), program._rates(config.sparse_start)
    with jax.set_mesh(mesh):
        lowered = program._sparse.lower(*learners, batch, rates)

    def arguments() -> tuple:
        state = program.init()
        if checkpoints is not None:
            saved = Checkpoints(checkpoints)
            state = saved.restore(saved.latest() or 0, state)
            saved.close()
        return state.backbone, state.indexer, batch, rates

    return Run(lowered, arguments, lambda args, out: (*out[:2], *args[2:]), lambda out: out[2])


def layer(config: TrainConfig, mesh: Mesh) -> Run:
    """`nn.DSAttention`, its indexer's loss, and all gradients, by a random cotangent."""
    attention = config.model.attention
    stripes = mesh.shape["context"]
    shape = (config.batch_size, config.seq_len, attention.model_dim)

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


def exchanged(text: str, devices: int) -> dict[str, float]:
    """MiB that a device receives by a call of a compiled program, of which every collective runs
    once.
    """
    received: collections.Counter[str] = collections.Counter()
    for exchange in collectives(text, devices):
        name, size, group = exchange.name, exchange.bytes, exchange.devices
        share = (group - 1) / group
        parts = {"reduce-scatter": group - 1, "all-reduce": 2 * share, "collective-permute": 1}
        kind = {"all-gather": "gathered", "all-reduce": "reduced", "reduce-scatter": "reduced"}
        received[kind.get(name, "other")] += size * parts.get(name, share)
    return {f"{kind}_mib": received[kind] / 2**20 for kind in ("gathered", "reduced", "other")}


def link(mesh: Mesh, small: bool) -> float:
    """GB/s that each device receives by a gather over all of them; NaN for one."""
    if mesh.size == 1:
        return math.nan
    spec = PartitionSpec(tuple(mesh.shape))
    number = mesh.size * (2**16 if small else 2**26)
    with jax.set_mesh(mesh):
        x = jax.jit(lambda: jnp.ones(number, jnp.float32), out_shardings=spec)()
        gather = jax.jit(lambda x: jax.lax.with_sharding_constraint(x, PartitionSpec()))
        run = Run(None, lambda: (x,), lambda args, out: args, lambda out: None)
        seconds, _ = timed(run, gather)
    return x.nbytes * (1 - 1 / mesh.size) / seconds / 1e9


def add(path: Path, row: dict[str, Any]) -> None:
    """Prints a row and adds it to the file."""
    shown = {k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()}
    print(", ".join(f"{k} {v}" for k, v in shown.items()), flush=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        if new:
            writer.writeheader()
        writer.writerow(shown)


def rows(path: Path) -> list[dict[str, str]]:
    """What the file has, with the `efficiency` of each mesh: a device's tokens a second, as a share
    of those that one device alone has. NaN where one device is not measured. Of a mesh of several
    axes also the `product` of the efficiencies of each by itself, if they are there.
    """
    if not path.exists():
        return []
    with path.open(newline="") as file:
        found = list(csv.DictReader(file))
    alone = {row["program"]: row for row in found if row["devices"] == "1"}
    for row in found:
        one = alone.get(row["program"])
        rate = float(row["tokens_per_second"]) / int(row["devices"])
        row["efficiency"] = f"{rate / float(one['tokens_per_second']) if one else math.nan:.3f}"
    single = {(row["program"], row["mesh"]): float(row["efficiency"]) for row in found}
    for row in found:
        parts = [single.get((row["program"], part)) for part in row["mesh"].split(",")]
        several = [x for x in parts if x is not None]
        row["product"] = f"{math.prod(several):.3f}" if len(several) == len(parts) > 1 else ""
    return found


def table(found: list[dict[str, str]]) -> str:
    """In Markdown: what was measured and exchanged, and the time that the link takes for it."""
    lines = [
        "| program | mesh | ms | times one device | efficiency | of its axes | peak GiB | "
        "held GiB | received MiB: gathered, reduced, other | ms at the link's rate | loss |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in found:
        mib = [float(row[f"{kind}_mib"]) for kind in ("gathered", "reduced", "other")]
        over = sum(mib) * 2**20 / float(row["link_gb_s"]) / 1e6
        gain = float(row["efficiency"]) * int(row["devices"])
        cells = [
            row["program"],
            row["mesh"],
            row["ms"],
            f"{gain:.2f}",
            row["efficiency"],
            row["product"],
        ]
        cells += [row["peak_gib"], row["held_gib"], ", ".join(f"{x:.3g}" for x in mib)]
        lines.append(f"| {' | '.join([*cells, f'{over:.2f}', row['result']])} |")
    return "\n".join(lines)


def plot(found: list[dict[str, str]], path: Path) -> None:
    """How many times one device the devices are."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4.5), layout="constrained")
    panel = figure.subplots()
    most = max((int(row["devices"]) for row in found), default=1)
    panel.plot([1, most], [1, most], color="black", lw=0.8, label="ideal")
    lines = collections.defaultdict(list)
    for row in found:
        own = [part.split("=")[0] for part in row["mesh"].split(",")]
        axis = own[0] if len(own) == 1 else "every axis"
        gain = float(row["efficiency"]) * int(row["devices"])
        if row["program"] not in ("fsdp", "resume", "v32-step"):
            lines[row["program"], axis].append((int(row["devices"]), gain))
    for (program, axis), points in lines.items():
        if len(points) > 1 or axis == "every axis":
            panel.plot(*zip(*sorted(points), strict=True), "o-", label=f"{program}, {axis}")
    panel.set(xlabel="devices", ylabel="times one device")
    panel.set_title(next((row["device"] for row in found), ""))
    panel.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
