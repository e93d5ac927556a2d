"""Measures what training gains from more devices: time, memory, and what the devices exchange.

    python benchmarks/scaling.py                 # every program on 1, 2, 4, ... devices
    python benchmarks/scaling.py layer-131072    # one program
    python benchmarks/scaling.py step data=2     # one program on one mesh, in this process

    step          a sparse step of the preset h200, with the same number of rows on each device
    layer-131072  DeepSeek-V3.2's layer, T = S = 131072, forward and backward, queries sharded
    layer-524288  the same with T = S = 524288 on 8 devices
    layer-32768   the same with T = S = 32768 and sharded heads
    v32-step      a sparse step of the preset v32 with 131072 tokens, on one device
    fsdp          preset h200: memory of parameters and optimizer states; leaves a checkpoint
    resume        restores that checkpoint on 2 devices; the loss must be the same

Each process measures one mesh, because JAX reports the peak memory of the process. Rows are written
to a CSV file one by one. Rows that the file already has are not measured again, so an interrupted
run can be resumed. A table and a plot follow at the end. `--small` uses sizes for host devices. At
131072 tokens the compiler spends most of its time (a minute) on autotuning matrix products;
XLA_FLAGS=--xla_gpu_autotune_level=0 turns this off.
"""

from __future__ import annotations

import argparse
import collections
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
from scaling_results import add, plot, rows, table

from jax_dsa import nn
from jax_dsa.training.checkpoint import Checkpoints
from jax_dsa.training.config import PRESETS, TrainConfig
from jax_dsa.training.mesh import AXES, BATCH, annotate, fitted, make_mesh, shardings
from jax_dsa.training.steps import Program

if TYPE_CHECKING:
    from collections.abc import Callable

    from jax.sharding import Mesh

Sizes = dict[str, int]
"""Sizes of mesh axes, by name."""

REPEATS = 3
EVERY_AXIS = {"data": 2, "context": 2, "tensor": 2}


class Run(NamedTuple):
    """A program to measure.

    Attributes:
        lowered: The lowered program. It donates its arguments.
        arguments: Returns the arguments of the first call.
        following: Returns the arguments of the next call, from those of the last call and its
            outputs.
        result: Returns the loss from the outputs.
    """

    lowered: Any
    arguments: Callable[[], tuple]
    following: Callable[[tuple, Any], tuple]
    result: Callable[[Any], Any]


def main(argv: list[str] | None = None) -> list[dict[str, str]]:
    """Measures the missing cases.

    Args:
        argv: The command line's arguments. Default: `sys.argv[1:]`.

    Returns:
        All rows of the CSV file.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("program", nargs="?", choices=MESHES)
    parser.add_argument(
        "mesh", nargs="?", help="axis=size,... (default: all meshes of the program)"
    )
    parser.add_argument("--devices", type=int, help="largest number of devices (default: all)")
    parser.add_argument("--small", action="store_true", help="use sizes for host devices")
    parser.add_argument(
        "--chunked", action="store_true", help="process a layer's queries in the preset's chunks"
    )
    parser.add_argument("--csv", type=Path, default="benchmarks/results/scaling.csv")
    parser.add_argument("--plot", type=Path, help="(default: next to the CSV file)")
    args = parser.parse_args(argv)
    if args.mesh:
        add(args.csv, measure(args.program, axes(args.mesh), args))
        return rows(args.csv)
    devices = args.devices or device_count()
    programs = [args.program] if args.program else list(MESHES)
    measured = {(row["program"], row["mesh"]) for row in rows(args.csv)}
    cases = [(name, mesh_name(mesh)) for name in programs for mesh in MESHES[name](devices)]
    missing = [case for case in cases if case not in measured]
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
    """Counts the devices in another process.

    This process must not initialize JAX, or it would reserve memory that the measurements need.
    """
    count = [sys.executable, "-c", "import jax; print(jax.device_count())"]
    return int(subprocess.run(count, check=True, capture_output=True, text=True).stdout)


def by(axis: str, devices: int) -> list[Sizes]:
    """Returns meshes with 1, 2, 4, ... devices on one axis."""
    return [{axis: 2**i} for i in range(devices.bit_length())]


def on_every_axis(devices: int, *others: str) -> list[Sizes]:
    """Returns meshes with two devices on each of `others`, and one with two on each of three axes.

    Returns no meshes if there are fewer than eight devices.
    """
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
"""The meshes of each program for a number of devices, smallest first."""


def axes(name: str) -> Sizes:
    """Parses a mesh such as "data=2,tensor=4"."""
    sizes = {axis: int(size) for axis, size in (entry.split("=") for entry in name.split(","))}
    if not sizes.keys() <= set(AXES):
        raise SystemExit(f"scaling.py: mesh is {name}, expected axes among {', '.join(AXES)}")
    return sizes


def mesh_name(sizes: Sizes) -> str:
    """Returns the mesh as on the command line."""
    return ",".join(f"{axis}={size}" for axis, size in sizes.items())


def measure(name: str, sizes: Sizes, args: argparse.Namespace) -> dict[str, Any]:
    """Measures one program on one mesh, and returns the row."""
    mesh = make_mesh({"data": 1, **sizes})
    device = {"device": jax.devices()[0].device_kind, "jax": jax.__version__}
    row = {"program": name, "mesh": mesh_name(sizes), "devices": mesh.size, **device}
    config = preset("v32" if name.startswith(("layer", "v32")) else "h200", args.small)
    if name.startswith("layer") and not args.small:
        # Without --chunked all queries are processed at once. `exchanged` counts the collectives of
        # one chunk only.
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
    """Measures what a device holds of the initial state, and writes a checkpoint of that state."""
    state = Program(config, mesh).init()
    checkpoints = Checkpoints(folder, keep=1)
    if checkpoints.latest() is None:
        checkpoints.save(state, {})
    checkpoints.close()
    arrays = jax.tree.leaves((state.backbone, state.indexer, state.control))
    return {"held_gib": sum(x.addressable_shards[0].data.nbytes for x in arrays) / 2**30}


def preset(name: str, small: bool) -> TrainConfig:
    """Returns a preset, or a small variant of it for host devices."""
    config = PRESETS[name]()
    if small:
        cpu = PRESETS["cpu"]()
        attention = dataclasses.replace(cpu.model.attention, num_heads=8)
        model = dataclasses.replace(cpu.model, attention=attention, num_layers=1)
        config = dataclasses.replace(config, model=model, seq_len=64)
    return config


def sparse_step(config: TrainConfig, mesh: Mesh, checkpoints: Path | None = None) -> Run:
    """Returns a step of the sparse stage.

    Two rows of tokens are repeated to fill the batch, so that the loss is the same on every mesh.

    Args:
        config: The run.
        mesh: The mesh.
        checkpoints: Folder of the checkpoint to start from, or None.
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
    """Returns `nn.DSAttention` with its indexer's loss and all gradients for a random cotangent."""
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
    """Returns the median seconds of several calls after the first, and the result of the first."""
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
    """Returns the peak memory of a device in GiB; NaN if the device does not report it."""
    return (device.memory_stats() or {}).get("peak_bytes_in_use", np.nan) / 2**30


def exchanged(text: str, devices: int) -> dict[str, float]:
    """Returns the MiB that a device receives in one call of a compiled program.

    It is assumed that every collective operation runs once.
    """
    received: collections.Counter[str] = collections.Counter()
    for exchange in collectives(text, devices):
        name, size, group = exchange.name, exchange.bytes, exchange.devices
        from_others = (group - 1) / group
        factors = {
            "reduce-scatter": group - 1,
            "all-reduce": 2 * from_others,
            "collective-permute": 1,
        }
        kind = {"all-gather": "gathered", "all-reduce": "reduced", "reduce-scatter": "reduced"}
        received[kind.get(name, "other")] += size * factors.get(name, from_others)
    return {f"{kind}_mib": received[kind] / 2**20 for kind in ("gathered", "reduced", "other")}


def link(mesh: Mesh, small: bool) -> float:
    """Measures the GB/s that each device receives in a gather over all devices; NaN for one."""
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


if __name__ == "__main__":
    main()
