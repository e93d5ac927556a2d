"""The figure of a finished run, and the colors and smoothing that experiments share with it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from jax_dsa.training.summary import token_unit

if TYPE_CHECKING:
    from pathlib import Path

    from jax_dsa.training.summary import Results
    from jax_dsa.training.trainer import Trainer

STAGES = {
    "dense": ("#f2f2f2", "dense attention"),
    "warmup": ("#fdf0d5", "indexer warm-up"),
    "sparse": ("#e3eefa", "sparse attention"),
}
"""The background color and the label of each stage."""
BLUE, ORANGE, GREEN, RED, GREY = "#1f5fa8", "#d9730d", "#2c7a4b", "#a33b3b", "#777777"


def plot(trainer: Trainer, results: Results, path: Path) -> None:
    """Draws the curves of a run.

    Args:
        trainer: The finished run.
        results: Its results.
        path: The image file to write.
    """
    config, rows = trainer.config, trainer.log.rows()
    bounds = (0, config.dense_steps, config.sparse_start, config.total_steps)
    keys = config.model.attention.attended
    names = {
        "best": ("best possible", GREY),
        "indexer": ("indexer", BLUE),
        "recency": (f"last {keys} keys", ORANGE),
        "random": ("random keys", RED),
    }

    def series(column: str, stage: str | None = None) -> tuple[np.ndarray, np.ndarray]:
        kept = [r for r in rows if r[column] and stage in (None, r["stage"])]
        return np.array([int(r["step"]) for r in kept]), np.array([float(r[column]) for r in kept])

    def draw_batches(axis: Any, column: str, color: str) -> None:
        """Draws the values of the training batches, stage by stage, and their moving average."""
        for stage in STAGES:
            steps, values = series(column, stage)
            if len(values):
                label = "training batches, smoothed" if stage == "warmup" else None
                axis.plot(steps, values, color=color, alpha=0.15, lw=1)
                axis.plot(steps, smooth(values), color=color, alpha=0.6, lw=1.2, label=label)

    def draw_layers(axis: Any, column: str, color: str) -> None:
        """Draws a thin curve for each layer."""
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
        ylabel=f"nats per {token_unit(trainer)}",
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
    title = f"Fraction of dense attention's mass on {keys} selected keys"
    recall.set(title=title, ylabel="recall, mean of the layers (thin: each)", ylim=(0, 1.02))

    for stage in STAGES:
        rate.plot(*series("tokens_per_second", stage), color=BLUE)
        steps, values = series("matmul_share", stage)
        share.plot(steps, 100 * values, color=BLUE)
    rate.set(title="Throughput", ylabel="tokens per second", ylim=(0, None))
    memory = series("memory_gib")[1]
    peak = f"; peak memory {memory.max():.1f} GiB per device" if len(memory) else ""
    share.set(title=f"Percent of the matmul rate{peak}", ylabel="%", ylim=(0, None))

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
    """Returns the moving average over `width` values; near the ends over fewer."""
    half = width // 2
    return np.array([values[max(0, i - half) : i + half + 1].mean() for i in range(len(values))])
