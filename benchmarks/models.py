"""Time and memory of the attention layers of published models, on the GPU that JAX finds.

    python benchmarks/models.py --csv benchmarks/results/h200/models.csv
    python benchmarks/models.py --only "V4-Flash" --tokens 8192

The layers have their published sizes, bfloat16 and random weights, and run on one sequence. "N/8"
has an eighth of the heads, as under tensor parallelism. The step "fwd+bwd" computes the gradients
of all parameters and of the input, including those of the indexer's loss. Operations count the keys
that a query attends to or that its indexer scores, the projections, and the scores that the
backward pass recomputes. The ceiling is a matmul, or for the compressor a copy, measured in the
same run. The memory is the program's: arguments, results and temporaries.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import functools
import pathlib
import re
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx
from tqdm import tqdm

import jax_dsa
from jax_dsa import nn
from jax_dsa.bench import report, timing
from jax_dsa.bench.case import BF16, COPY, causal_selection, normal, selected_pairs, visible_pairs
from jax_dsa.bench.ceilings import ceilings

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

FLASH = nn.CompressedConfig(
    model_dim=4096,
    num_heads=64,
    q_rank=1024,
    head_dim=512,
    rope_dim=64,
    out_groups=8,
    out_rank=1024,
    window=128,
    ratio=4,
    overlap=True,
    top_k=512,
    index_heads=64,
    index_dim=128,
    dtype=jnp.bfloat16,
)
PRO = dataclasses.replace(
    FLASH, model_dim=7168, num_heads=128, q_rank=1536, out_groups=16, top_k=1024
)
ALL = {"ratio": 128, "overlap": False, "top_k": None}
GLM = nn.AttentionConfig(
    model_dim=6144,
    num_heads=64,
    q_rank=2048,
    kv_rank=512,
    nope_dim=192,
    rope_dim=64,
    v_dim=256,
    index_heads=32,
    index_dim=128,
    index_rope_dim=64,
    top_k=2048,
    dtype=jnp.bfloat16,
)
HY = dataclasses.replace(
    GLM, model_dim=2816, num_heads=32, q_rank=1536, index_heads=16, sinks=True, gate=True
)
MISTRAL = dataclasses.replace(GLM, q_rank=None, nope_dim=64, v_dim=128, log_scaling=True)
GLM_FLASH = dataclasses.replace(
    GLM, model_dim=4096, q_rank=1536, nope_dim=256, rope_dim=0, index_rope_dim=0, index_pool=4
)
# The loss of a query of MiniMax-M3 has 8192 numbers in each of several arrays.
MINIMAX = nn.GroupedConfig(
    model_dim=6144,
    num_heads=64,
    kv_heads=4,
    head_dim=128,
    rope_dim=64,
    indexer="max",
    block_size=128,
    top_k=16,
    index_heads=4,
    index_dim=128,
    query_chunk=4096,
    dtype=jnp.bfloat16,
)
QWEN = dataclasses.replace(
    MINIMAX,
    **{"model_dim": 2560, "num_heads": 24, "kv_heads": 2, "head_dim": 256, "gate": True},
    **{"indexer": "mean", "block_size": 4, "top_k": 512, "query_chunk": None},
)
LATENT = {"GLM-5": GLM, "GLM-5.3-Flash": GLM_FLASH, "Hy4": HY, "Mistral-Large-4": MISTRAL}

# The programs of one group are compiled together before any of them is measured. The most important
# group comes first.
GROUPS: tuple[dict[str, Any], ...] = (
    {"V4-Flash ratio 4": FLASH, "V4-Pro ratio 4": PRO},
    LATENT,
    {
        f"{name} N/8": dataclasses.replace(config, num_heads=config.num_heads // 8)
        for name, config in LATENT.items()
    },
    {
        "V4-Flash ratio 128": dataclasses.replace(FLASH, **ALL),
        "V4-Pro ratio 128": dataclasses.replace(PRO, **ALL),
    },
    {"MiniMax-M3": MINIMAX, "Qwen3.8": QWEN},
)
STEPS = "fwd", "fwd+bwd"
# Heads and slots for which FlashMLA has published figures.
PEERS = (64, 512), (128, 1024)


@dataclasses.dataclass(frozen=True)
class Row:
    """One measurement; `ratio` is the rate relative to the ceiling."""

    layer: str
    step: str
    case: str
    milliseconds: float
    tflops: float | None
    gbytes_per_s: float | None
    ceiling: str
    ratio: float
    gib: float | None
    device: str
    jax: str
    commit: str


class Layer:
    """A layer and its steps."""

    def __init__(self, config: Any, tokens: int) -> None:
        self.config, self.tokens = config, tokens
        module = nnx.eval_shape(lambda: nn.attention_layer(config, rngs=nnx.Rngs(0)))
        self.kind = type(module)
        self.graph, self.shapes = nnx.split(module)
        self.x = jax.ShapeDtypeStruct((1, tokens, config.model_dim), config.dtype)

    def make(self, key: jax.Array) -> tuple[Any, jax.Array]:
        """Returns random weights and hidden states."""

        def weight(shape: Any) -> jax.Array:
            if len(shape.shape) < 2:
                return jnp.ones(shape.shape, shape.dtype)
            return jax.random.normal(key, shape.shape, shape.dtype) * shape.shape[-2] ** -0.5

        return jax.tree.map(weight, self.shapes), jax.random.normal(key, self.x.shape, self.x.dtype)

    def fwd(self, params: Any, x: jax.Array) -> jax.Array:
        """Returns the layer's output."""
        return nnx.merge(self.graph, params)(x)[0]

    def loss(self, params: Any, x: jax.Array) -> jax.Array:
        """Returns the sum of the output plus the indexer's loss."""
        y, aux = nnx.merge(self.graph, params)(x)
        return jnp.sum(jnp.sin(y.astype(jnp.float32))) + (0 if aux.kl is None else aux.kl)

    def compiled(self, step: str) -> Any:
        """Returns the compiled program of a step, a function of weights and hidden states."""
        fn = self.fwd if step == "fwd" else jax.grad(self.loss, (0, 1))
        return jax.jit(fn).lower(self.shapes, self.x).compile()

    def operations(self, step: str) -> float:
        """Returns the operations that a step needs; a multiply-add counts as two."""
        c, t = self.config, self.tokens
        sizes, pool = {"main": 0, "indexer": 0}, 1
        for path, leaf in nnx.to_flat_state(self.shapes):
            owner = "indexer" if path[0] == "indexer" else "main"
            sizes[owner] += leaf.size if len(leaf.shape) > 1 else 0
        if self.kind is nn.CompressedAttention:
            dims = value = c.head_dim
            ends = [(i + 1) // c.ratio for i in range(t)]
            visible = sum(ends)
            chosen = visible if c.top_k is None else sum(min(end, c.top_k) for end in ends)
            slots = chosen + selected_pairs(t, t, c.window)
        elif self.kind is nn.GroupedAttention and c.indexer == "max":
            dims = value = c.head_dim
            visible, size = visible_pairs(t, t), c.block_size
            # The newest block is selected, and it ends with the query's own key.
            slots = sum(size * min(i // size, c.top_k - 1) + i % size + 1 for i in range(t))
            chosen = slots
        else:
            if self.kind is nn.GroupedAttention:
                dims, value, pool, selected = c.head_dim, c.head_dim, c.block_size, c.top_k
            else:
                dims, value = c.kv_rank + c.rope_dim, c.kv_rank
                pool, selected = c.index_pool or 1, c.selected
            ends = [(i + 1) // pool for i in range(t)]
            visible, chosen = sum(ends), sum(min(end, selected) for end in ends)
            has_tail = self.kind is nn.GroupedAttention or c.index_tail
            tail = visible_pairs(t, t) - pool * visible if has_tail else 0
            slots = pool * chosen + tail
        index = c.index_heads * c.index_dim if sizes["indexer"] else 0
        total = t * (sizes["main"] + sizes["indexer"])
        total += c.num_heads * (dims + value) * slots + index * visible
        if step != "fwd":
            total += t * (2 * sizes["main"] + sizes["indexer"])
            total += c.num_heads * (3 * dims + 2 * value) * slots
            total += (c.num_heads * dims * pool + 3 * index) * chosen if index else 0
        return 2.0 * total


def seconds(program: Any, *args: Any) -> float:
    """Returns the median time of a call that is long enough for the host's clock."""
    jax.block_until_ready(program(*args))
    times: list[float] = []
    while len(times) < 3 or (len(times) < 9 and sum(times) < 0.3):
        start = time.perf_counter()
        jax.block_until_ready(program(*args))
        times.append(time.perf_counter() - start)
    return statistics.median(times)


class Run:
    """Measurements, and the ceilings that they are compared with."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.commit = report.commit()
        device = jax.devices()[0]
        self.device = device.device_kind
        self.rates = {}
        limits = ceilings(1 if device.platform == "gpu" else 64)
        for name in (BF16, COPY):
            case = limits[name]
            fn = functools.partial(case.call, implementation="xla")
            args = case.make(jax.random.key(0))
            self.rates[name] = case.work[name] / timing.device_seconds(fn, [args], 0.1)

    def row(self, layer: str, step: str, case: str, time: float, **work: Any) -> Row:
        """Returns a row of a step that takes `time` seconds.

        `work` has the number of `operations` or of `moved` bytes and, optionally, the memory `gib`.
        """
        operations, moved = work.get("operations"), work.get("moved")
        name, amount = (BF16, operations) if operations else (COPY, moved)
        rate = self.rates[name]
        unit = f"{rate / 1e9:.4g} GB/s" if moved else f"{rate / 1e12:.4g} TFLOPS"
        return Row(
            *(layer, step, case, time * 1e3),
            operations / time / 1e12 if operations else None,
            moved / time / 1e9 if moved else None,
            *(f"{name} {unit}", amount / rate / time, work.get("gib")),
            *(self.device, jax.__version__, self.commit),
        )

    def layers(self, group: dict[str, Any], steps: list[tuple[str, str]]) -> Iterator[Row]:
        """Yields the measured steps of a group's layers, which are compiled in parallel."""
        layers = {name: Layer(group[name], self.tokens) for name, _ in steps}
        with ThreadPoolExecutor() as pool:
            makers = {
                name: pool.submit(lambda x=x: jax.jit(x.make).lower(jax.random.key(0)).compile())
                for name, x in layers.items()
            }
            programs = [pool.submit(layers[name].compiled, step) for name, step in steps]
        args: Any = None
        for i, ((name, step), program) in enumerate(zip(steps, programs, strict=True)):
            if i == 0 or name != steps[i - 1][0]:
                args = None  # Frees the memory of the layer before.
                args = makers[name].result()(jax.random.key(0))
            memory = program.result().memory_analysis()
            size = memory.argument_size_in_bytes + memory.output_size_in_bytes
            size += memory.temp_size_in_bytes - memory.alias_size_in_bytes
            yield self.row(
                *(name, step, f"T{self.tokens}-N{group[name].num_heads}"),
                seconds(program.result(), *args),
                operations=layers[name].operations(step),
                gib=size / 2**30,
            )

    def compressor(self, step: str) -> Row:
        """Measures V4-Flash's pooling of projected tokens, with norm and rotation of the keys.

        The forward pass reads values and gates and writes keys. The backward pass reads values,
        gates and the keys' cotangent, and writes the gradients of values, gates and parameters. The
        projections are not part of either.
        """
        module = nn.Compressor(FLASH, FLASH.head_dim, rngs=nnx.Rngs(0))
        is_projection = nnx.Any(nnx.PathContains("wkv"), nnx.PathContains("wg"))
        graph, projections, params = nnx.split(module, is_projection, ...)
        keys = jax.random.split(jax.random.key(0))
        shape = 1, self.tokens, module.position_bias.shape[1]
        values, gates = (normal(key, *shape) for key in keys)
        positions = jnp.arange(0, self.tokens, module.ratio, dtype=jnp.int32)[None]

        def pool(params: Any, values: jax.Array, gates: jax.Array) -> jax.Array:
            return nnx.merge(graph, projections, params).pool(values, gates, positions, None)

        out = jax.eval_shape(pool, params, values, gates)
        moved = out.size * out.dtype.itemsize + (1 if step == "fwd" else 2) * 2 * values.nbytes
        if step == "fwd":
            took = timing.device_seconds(pool, [(params, values, gates)], 0.1)
        else:
            pull = jax.jit(lambda *args: jax.vjp(pool, *args)[1])(params, values, gates)
            ct = normal(keys[0], *out.shape)
            took = timing.device_seconds(lambda pull, ct: pull(ct), [(pull, ct)], 0.1)
        return self.row("compressor", step, f"T{self.tokens}-D512-ratio4", took, moved=moved)

    def core(self, heads: int, slots: int, sink: bool) -> Row:
        """Measures sparse MLA alone, for a shape for which FlashMLA has published figures."""
        queries, keys = 4096, 8192
        a, b, c = jax.random.split(jax.random.key(0), 3)
        args = (
            normal(a, 1, queries, heads, 512),
            normal(b, 1, keys, 1, 512),
            causal_selection(c, queries, keys, slots)[None, :, None],
        )
        sinks = jnp.zeros(heads) if sink else None
        fn = functools.partial(jax_dsa.sparse_mla, value_dim=512, sinks=sinks)
        took = timing.device_seconds(fn, [args], 0.1)
        case = f"T{queries}-S{keys}-N{heads}-D512-K{slots}{'-sink' * sink}"
        work = 2.0 * heads * 1024 * selected_pairs(queries, keys, slots)
        return self.row("sparse_mla", "fwd", case, took, operations=work)


def rows(tokens: int, only: str) -> Iterable[Row]:
    """Yields rows as they are measured."""
    run = Run(tokens)
    for i, group in enumerate(GROUPS):
        steps = [(n, s) for n in group for s in STEPS if re.search(only, f"{n} {s}")]
        if steps:
            yield from run.layers(group, steps)
        if i == 0 and re.search(only, "compressor"):
            yield from map(run.compressor, ("fwd", "bwd"))
        if i == 0 and re.search(only, "sparse_mla"):
            yield from (run.core(*peer, sink) for peer in PEERS for sink in (True, False))


def main(argv: list[str] | None = None) -> None:
    """Prints and writes each row as soon as it is measured."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--only", default="", metavar="REGEX", help='such as "GLM-5.*fwd$"')
    parser.add_argument("--csv", type=pathlib.Path)
    args = parser.parse_args(argv)
    if args.csv:
        args.csv.write_text(",".join(f.name for f in dataclasses.fields(Row)) + "\n")
    for row in tqdm(rows(args.tokens, args.only), unit="row", disable=None):
        rate = f"{row.tflops:.0f} TFLOPS" if row.tflops else f"{row.gbytes_per_s:.0f} GB/s"
        memory = "" if row.gib is None else f", {row.gib:.2f} GiB"
        tqdm.write(
            f"{row.layer} {row.step} {row.case}: {row.milliseconds:.4g} ms, {rate}, "
            f"{row.ratio:.3f} of the {row.ceiling}{memory}"
        )
        if args.csv:
            with args.csv.open("a", newline="") as f:
                cells = [
                    f"{x:.5g}" if isinstance(x, float) else "" if x is None else x
                    for x in dataclasses.astuple(row)
                ]
                csv.writer(f, lineterminator="\n").writerow(cells)


if __name__ == "__main__":
    main()
