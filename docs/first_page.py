"""Draws the plots of the first page from committed results: `python docs/first_page.py`."""

from __future__ import annotations

import csv
import pathlib

from matplotlib.ticker import LogLocator, NullLocator
from plots import IMAGES, plt
from speed import ROOT, Results, read

RESULTS = ROOT / "benchmarks" / "results"

# What is compared with cuDNN through `jax.nn` in the results of masked attention.
ATTENTION = {
    "dense": "T16384-S16384-N16-D128-dense",
    "causal": "T16384-S16384-N16-D128-causal",
    "causal, D192 E128": "T8192-S8192-N128-D192-E128-causal",
    "causal, 8 groups": "T8192-S8192-N32-G8-D128-causal",
    "causal, D64": "T8192-S8192-N32-D64-causal",
    "window of 4096": "T131072-S131072-W4096-N16-D128-window",
}


def table(path: pathlib.Path) -> list[dict[str, str]]:
    """The rows of a file of results; none if there is no such file."""
    if not path.exists():
        return []
    with path.open() as f:
        return list(csv.DictReader(f))


def peers(rows: Results) -> plt.Figure:
    """How many times as fast as other libraries. `rows` are those of masked attention."""
    shown = []
    for row in table(RESULTS / "h200" / "peers.csv"):
        theirs, ours = float(row["theirs"]), float(row["ours"])
        factor = ours / theirs if row["unit"] == "TFLOPS" else theirs / ours
        said = f"{row['theirs']} -> {row['ours']} {row['unit']}, {row['peer']}"
        shown.append((factor, row["case"], said))
    for step, title in (("fwd", "forward"), ("bwd", "backward")):
        for label, case in ATTENTION.items():
            name = f"masked_attention {step} {case} bf16"
            theirs, ours = (float(rows[name, x]["milliseconds"]) for x in ("cudnn", "cuda"))
            said = f"{theirs:.3g} -> {ours:.3g} ms, cuDNN"
            shown.append((theirs / ours, f"attention {title}, {label}", said))
    shown.sort()
    figure, axes = plt.subplots(figsize=(8, 8), layout="constrained")
    for i, (factor, _, said) in enumerate(shown):
        axes.barh(i, factor - 1, left=1, color="#4477aa" if factor >= 1 else "#cc3311")
        axes.text(max(factor, 1) * 1.015, i, said, va="center", fontsize=7.5)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_xlim(0.45, 6)
    axes.set_xticks([0.5, 1, 2, 3], ["half", "as fast", "twice", "three times"])
    axes.set_xticks([], minor=True)
    axes.set_yticks(range(len(shown)), [case for _, case, _ in shown], fontsize=8)
    axes.set_ylim(-0.7, len(shown) - 0.3)
    axes.set_xlabel("jax_dsa's speed over the other library's, NVIDIA H200 (logarithmic)")
    return figure


def context(rows: list[dict[str, str]]) -> plt.Figure:
    """Time and memory of a layer against the length of its context."""
    figure, panels = plt.subplots(1, 2, figsize=(8, 3.8), layout="constrained")
    for form, color in (("dense", "black"), ("sparse", "#aa3377")):
        mine = [row for row in rows if row["form"] == form]
        keys = [int(row["keys"]) for row in mine]
        times = [float(row["milliseconds"]) for row in mine]
        needed = [float(row["temporary_bytes"]) / 2**30 for row in mine]
        for axes, values in zip(panels, (times, needed), strict=True):
            axes.plot(keys, values, "o-", color=color, label=f"{form} attention")
    queries = int(rows[0]["queries"])
    keys = sorted({int(row["keys"]) for row in rows})
    scores = [4 * queries * s / 2**30 for s in keys]
    panels[1].plot(keys, scores, ":", color="gray", label="one [T, S] array of float32")
    for axes, title in zip(panels, ("milliseconds", "GiB beside arguments and results")):
        axes.set(xscale="log", yscale="log", title=title)
        axes.set_xticks(keys, [f"{s // 1024}K" for s in keys])
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter("{x:g}")
        axes.tick_params(axis="y", labelsize=8)
        axes.set_xticks([], minor=True)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.supxlabel(
        f"keys; forward and backward of {queries} queries, {rows[0]['device']}", fontsize=9
    )
    return figure


def demo(rows: list[dict[str, str]]) -> plt.Figure:
    """The demo's losses, its indexer's KL, and the attention mass that selections hold."""
    figure, (loss, kl, recall) = plt.subplots(1, 3, figsize=(11, 3.6), layout="constrained")

    def draw(axes: plt.Axes, column: str, style: str, color: str, label: str) -> None:
        kept = [row for row in rows if row[column]]
        x, y = ([float(row[name]) for row in kept] for name in ("step", column))
        axes.plot(x, y, style, color=color, markersize=3, linewidth=1.3, label=label)

    draw(loss, "validation_dense", "o-", "gray", "dense attention, same model")
    draw(loss, "validation_control", "^--", "#ee7733", "dense throughout (control)")
    draw(loss, "validation_sparse", "s-", "#4477aa", "sparse attention")
    draw(kl, "validation_kl", "o-", "#228833", "validation")
    for name, color, label in (
        ("best", "gray", "best possible"),
        ("indexer", "#4477aa", "indexer"),
        ("recency", "#ee7733", "latest keys"),
        ("random", "#cc3311", "random keys"),
    ):
        draw(recall, f"recall_{name}", "o-", color, label)
    low = min(float(row["validation_dense"]) for row in rows if row["validation_dense"])
    loss.set(title="validation loss, nats a byte", ylim=(low - 0.2, low + 1.2))
    kl.set(title="the indexer's KL, nats", ylim=(0, None))
    recall.set(title="attention mass on 16 keys", ylim=(0, 1.02))
    stages = {row["stage"]: None for row in rows}
    ends = [max(int(row["step"]) for row in rows if row["stage"] == stage) for stage in stages]
    for axes in (loss, kl, recall):
        for start, end, color in zip([0, *ends], ends, ("#f4f4f4", "#e6f0e6", "#e6ecf6")):
            axes.axvspan(start, end, color=color, zorder=0)
        axes.set(xlim=(0, ends[-1]), xlabel="step: dense, warm-up, sparse")
        axes.legend(fontsize=8)
    return figure


def main() -> None:
    """Writes each figure whose results there are."""
    # As in plots.py: the same results make the same files.
    plt.rcParams["svg.hashsalt"] = "jax_dsa"
    figures = {
        peers: read("masked_attention"),
        context: table(RESULTS / "h200" / "lengths.csv"),
        demo: table(RESULTS / "cpu" / "train_lm.csv"),
    }
    for draw, rows in figures.items():
        if rows:
            draw(rows).savefig(IMAGES / f"{draw.__name__}.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
