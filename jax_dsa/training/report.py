"""What a finished run shows: a table, checks of what it claims, a sample, and the curves."""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from jax_dsa.training.data import BOS, VOCAB, decoded
from jax_dsa.training.evaluate import SELECTIONS
from jax_dsa.training.sampling import generate

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from jax_dsa.training.trainer import Trainer

TOLERANCE = 1.02
"""Sparse attention's validation loss may be this much of dense attention's."""


@dataclasses.dataclass(frozen=True)
class Results:
    """Measured on the validation files, over all evaluation sequences."""

    dense: float
    """Loss of the trained model with dense attention in place of the sparse one."""
    sparse: float
    """Loss of the trained model."""
    control: float
    """Loss of the backbone trained on the same batches with dense attention throughout; NaN without
    a sparse stage, in which they part."""
    recall: dict[str, np.ndarray]
    """Of each selection, per layer."""
    warmup_kl: tuple[float, float]
    """Before and after the warm-up, on the probe sequences; NaN where no stage ended."""
    tokens_per_second: dict[str, float]
    """Median of each stage."""

    def checks(self) -> list[tuple[bool, str]]:
        """What the run is to show, and whether it did."""
        before, after = self.warmup_kl
        recall = {name: float(layers.mean()) for name, layers in self.recall.items()}

        def missed_less(other: str) -> tuple[bool, str]:
            missed, reference = 1 - recall["indexer"], 1 - recall[other]
            return missed < reference / 2, (
                f"the indexer misses less than half the attention mass that {other} keys miss: "
                f"{missed:.3f} < {reference:.3f} / 2"
            )

        def within(name: str, loss: float) -> tuple[bool, str]:
            return self.sparse <= TOLERANCE * loss, (
                f"sparse validation loss within 2 % of {name}: {self.sparse:.4f} against "
                f"{loss:.4f} ({self.sparse / loss - 1:+.2%})"
            )

        return [
            (after < before / 2, f"warm-up KL more than halved: {before:.3f} to {after:.3f}"),
            missed_less("random"),
            missed_less("recency"),
            within("the same model with dense attention", self.dense),
            within("the model trained with dense attention throughout", self.control),
        ]


def evaluate(trainer: Trainer) -> Results:
    """Evaluates a finished run."""
    state, config = trainer.state, trainer.config
    batches = trainer.validation(config.eval_sequences)
    backbone, indexer = state.backbone.params, state.indexer.params
    loss = trainer.evaluator.loss
    rows = trainer.log.rows()
    kl = {int(r["step"]): float(r["validation_kl"]) for r in rows if r["validation_kl"]}
    rates = {
        stage: [
            float(r["tokens_per_second"])
            for r in rows
            if r["stage"] == stage and r["tokens_per_second"]
        ]
        for stage in ("dense", "warmup", "sparse")
    }
    return Results(
        dense=loss(backbone, indexer, batches, sparse=False),
        sparse=loss(backbone, indexer, batches, sparse=True),
        control=loss(state.control.params, indexer, batches, sparse=False)
        if config.sparse_steps
        else math.nan,
        recall={
            k: v for k, v in trainer.evaluator.selection(state, batches).items() if k in SELECTIONS
        },
        warmup_kl=(
            kl.get(config.dense_steps, math.nan),
            kl.get(config.sparse_start, math.nan),
        ),
        tokens_per_second={k: statistics.median(v) if v else math.nan for k, v in rates.items()},
    )


def table(results: Results, trainer: Trainer) -> str:
    """The results as text."""
    config = trainer.config
    top_k, length = config.model.attention.top_k, config.seq_len
    bits = 1 / (math.log(2) * trainer.corpus.bytes_per_token)

    def loss(name: str, value: float) -> tuple[str, str, str]:
        return name, f"{value:.4f}", f"{value * bits:.4f}"

    losses = [
        ("validation loss", f"nats/{_unit(trainer)}", "bits/byte"),
        loss(f"sparse attention, top {top_k} of up to {length} keys", results.sparse),
        loss("same model, dense attention", results.dense),
        loss("control: dense attention throughout", results.control),
    ]
    layers = [f"layer {i}" for i in range(config.model.num_layers)]
    names = {
        "indexer": "trained indexer",
        "recency": f"last {top_k} keys",
        "random": "random keys",
        "best": "best possible",
    }
    recalls = [("top-k mass recall", "mean", *layers)] + [
        (title, *(f"{x:.3f}" for x in (results.recall[key].mean(), *results.recall[key])))
        for key, title in names.items()
    ]
    rates = [
        ("tokens/s", *results.tokens_per_second),
        ("median", *(f"{x:,.0f}" for x in results.tokens_per_second.values())),
    ]
    checks = [f"{'PASS' if ok else 'FAIL'}  {text}" for ok, text in results.checks()]
    return "\n\n".join([grid(losses), grid(recalls), grid(rates), "\n".join(checks)])


def _unit(trainer: Trainer) -> str:
    return "byte" if trainer.corpus.vocab == VOCAB else "token"


def grid(rows: Sequence[tuple[str, ...]]) -> str:
    """A table of text, whose first row is its head."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]

    def line(row: tuple[str, ...]) -> str:
        cells = [row[0].ljust(widths[0])] + [c.rjust(w) for c, w in zip(row[1:], widths[1:])]
        return "  ".join(cells)

    head, *body = rows
    return "\n".join([line(head), "-" * len(line(head)), *map(line, body)])


def sample(trainer: Trainer) -> tuple[str, str]:
    """Validation text, and the model's continuation of it. In Python's sources the text ends before
    the name of a method.

    Together no longer than the sequences of training: the model knows no position beyond.
    """
    config, tokens = trainer.config, trainer.corpus.validation[:1_000_000]
    length = min(300, config.seq_len // 3)
    steps = min(config.sample_tokens, config.seq_len - length)
    mark = b"\n    def "
    is_bytes = trainer.corpus.vocab == VOCAB
    found = tokens.astype(np.uint8).tobytes().find(mark, length) if is_bytes else -1
    end = found + len(mark) if found >= 0 else length
    prompt = tokens[end - length : end].astype(np.int32)
    state = trainer.state
    key = jax.random.fold_in(jax.random.wrap_key_data(state.rng), config.total_steps)

    @functools.partial(jax.jit, out_shardings=NamedSharding(trainer.program.mesh, PartitionSpec()))
    def decode(backbone: Any, indexer: Any, prompt: jax.Array) -> jax.Array:
        model = trainer.program.model(backbone, indexer)
        return generate(model, prompt, steps, key, temperature=0.8)

    with jax.set_mesh(trainer.program.mesh):
        out = decode(state.backbone.params, state.indexer.params, prompt[None])
    bos, tokenizer = trainer.corpus.bos, trainer.corpus.tokenizer
    return text(prompt, bos, tokenizer), text(np.asarray(out[0]), bos, tokenizer)


def text(tokens: np.ndarray, bos: int = BOS, tokenizer: Path | None = None) -> str:
    """Up to the end of the file, printable."""
    body = tokens[1:] if len(tokens) and tokens[0] == bos else tokens
    ends = np.flatnonzero(body == bos)
    body = body[: ends[0]] if len(ends) else body
    return "".join(c if c.isprintable() or c in "\n\t" else "�" for c in decoded(body, tokenizer))


STAGES = {
    "dense": ("#f2f2f2", "dense attention"),
    "warmup": ("#fdf0d5", "indexer warm-up"),
    "sparse": ("#e3eefa", "sparse attention"),
}
BLUE, ORANGE, GREEN, RED, GREY = "#1f5fa8", "#d9730d", "#2c7a4b", "#a33b3b", "#777777"


def plot(trainer: Trainer, results: Results, path: Path) -> None:
    """Draws the run's curves."""
    config, rows = trainer.config, trainer.log.rows()
    bounds = (0, config.dense_steps, config.sparse_start, config.total_steps)
    top_k = config.model.attention.top_k
    names = {
        "best": ("best possible", GREY),
        "indexer": ("indexer", BLUE),
        "recency": (f"last {top_k} keys", ORANGE),
        "random": ("random keys", RED),
    }

    def series(column: str, stage: str | None = None) -> tuple[np.ndarray, np.ndarray]:
        kept = [r for r in rows if r[column] and stage in (None, r["stage"])]
        return np.array([int(r["step"]) for r in kept]), np.array([float(r[column]) for r in kept])

    def draw_batches(axis: Any, column: str, color: str) -> None:
        """Training batches, stage by stage, and their moving average."""
        for stage in STAGES:
            steps, values = series(column, stage)
            if len(values):
                label = "training batches, smoothed" if stage == "warmup" else None
                axis.plot(steps, values, color=color, alpha=0.15, lw=1)
                axis.plot(steps, smooth(values), color=color, alpha=0.6, lw=1.2, label=label)

    def draw_layers(axis: Any, column: str, color: str) -> None:
        """Each layer's own curve, thin."""
        for name in trainer.log.columns:
            if name.startswith(f"{column}_layer_"):
                axis.plot(*series(name), color=color, alpha=0.25, lw=0.8)

    figure = Figure(figsize=(17, 8.4), layout="constrained")
    (loss, kl, rate), (recall, layers, share) = figure.subplots(2, 3)

    draw_batches(loss, "lm_loss", BLUE)
    dense, sparse = series("validation_dense"), series("validation_sparse")
    loss.plot(*dense, "o-", color=GREY, ms=4, label="validation, dense attention")
    loss.plot(*sparse, "s-", color=BLUE, ms=4, label="validation, sparse attention")
    control = series("validation_control")
    loss.plot(*control, "^--", color=ORANGE, ms=4, label="validation, dense control")
    low = min(dense[1].min(initial=results.dense), results.sparse)
    loss.set(
        title="Language model loss",
        ylabel=f"nats per {_unit(trainer)}",
        ylim=(low - 0.25, low + 1.5),
    )

    draw_batches(kl, "kl", GREEN)
    draw_layers(kl, "validation_kl", GREEN)
    kl.plot(*series("validation_kl"), "o-", color=GREEN, ms=4, label="validation, all keys")
    kl.set(title="Indexer KL, mean of the layers (thin: each)", ylabel="nats", ylim=(0, None))

    for name, (label, color) in names.items():
        line = "--" if name == "best" else "o-"
        recall.plot(*series(f"recall_{name}"), line, color=color, ms=4, label=label)
    draw_layers(recall, "recall_indexer", BLUE)
    title = f"Share of dense attention's mass on {top_k} selected keys"
    recall.set(title=title, ylabel="recall, mean of the layers (thin: each)", ylim=(0, 1.02))

    for stage in STAGES:
        rate.plot(*series("tokens_per_second", stage), color=BLUE)
        steps, values = series("matmul_share", stage)
        share.plot(steps, 100 * values, color=BLUE)
    rate.set(title="Throughput", ylabel="tokens a second", ylim=(0, None))
    memory = series("memory_gib")[1]
    held = f"; peak memory {memory.max():.1f} GiB a device" if len(memory) else ""
    share.set(title=f"Share of the matmul's peak{held}", ylabel="%", ylim=(0, None))

    for axis in (loss, kl, rate, recall, share):
        for start, end, (color, _) in zip(bounds, bounds[1:], STAGES.values(), strict=False):
            axis.axvspan(start, end, color=color, lw=0, zorder=0)
        axis.set(xlabel="step", xlim=(0, max(config.total_steps, 1)))
    for axis in (loss, kl, recall):
        axis.legend(frameon=False, fontsize=9)

    for i, (name, (label, color)) in enumerate(names.items()):
        places = np.arange(config.model.num_layers) + 0.2 * (i - 1.5)
        layers.bar(places, results.recall[name], 0.18, color=color, label=label)
    ticks = np.arange(config.model.num_layers)
    layers.set(title="The same by layer, at the end", ylabel="recall", ylim=(0, 1.25))
    layers.set_yticks(np.linspace(0, 1, 6))
    layers.set_xticks(ticks, [f"layer {i}" for i in ticks])
    layers.legend(frameon=False, fontsize=9, ncols=4, loc="upper center")

    for axis in figure.axes:
        axis.spines[["top", "right"]].set_visible(False)
    patches = [Patch(color=color, label=label) for color, label in STAGES.values()]
    figure.legend(handles=patches, loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(path, dpi=130)


def smooth(values: np.ndarray, width: int = 7) -> np.ndarray:
    """Mean over the neighbours, fewer of them near the ends."""
    half = width // 2
    return np.array([values[max(0, i - half) : i + half + 1].mean() for i in range(len(values))])
