"""Draws the figures of the guides and of the first page, and writes the tables of Where we lose.

    python docs/first_page.py

Everything is made from the committed results in benchmarks/results.
"""

from __future__ import annotations

import csv
import pathlib
import re
from operator import itemgetter

from matplotlib.ticker import LogLocator, NullLocator
from plots import IMAGES, plt
from speed import ROOT

RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "where-we-lose.md"
BETWEEN = "<!-- docs/first_page.py -->\n", "<!-- -->\n"

# Implementations that are not other libraries.
OWN = "cuda", "xla", "bf16", "mqa_decode"

# Why another library is faster, by a pattern of the case's label.
REASONS = {
    r"sparse_mla .* decode fp8": (
        "The MMA warpgroups also unpack the records. This takes 0.6 us of the 1.7 us of a key "
        "tile. ([Log](design/sparse_mla.md))"
    ),
    r"sparse_mla forward": (
        "A query has few pairs of key tiles, so its start and its end are a large part of the time."
    ),
    r"fp8 forward, M(16|128) ": (
        "With few rows, the kernel is bound by reading the other operand. 7 us at its start and "
        "end do not overlap with reading. ([Log](design/fp8.md))"
    ),
    r"fp8": (
        "A block of 128 along K takes 1400 cycles, of which the tensor cores need 1024. Each tile "
        "takes 2 us in addition to its blocks. ([Log](design/fp8.md))"
    ),
    r"mqa_decode .* N16": (
        "Keys are read at 4.1 TB/s, but 5 us at the start and 3 us for combining the KV splits are "
        "not overlapped. ([Log](design/mqa_decode.md))"
    ),
    r"mqa_decode": (
        "A key tile of 64 keys takes 3060 cycles, of which the tensor cores need 2176. The start "
        "and the end of the kernel take 13 us. ([Log](design/mqa_decode.md))"
    ),
    r"masked_attention forward.* D64": (
        "With 64 dims, the exponentials of a tile take as long as its matrix products: 1024 cycles "
        "each. None of them is computed by a polynomial yet. ([Log](design/masked_attention.md))"
    ),
    r"masked_attention forward": (
        "A tile of 128 queries and 128 keys takes 2500 cycles, of which the tensor cores need "
        "2048. Two warpgroups use the tensor cores alternately, and a longer softmax in one delays "
        "the other. ([Log](design/masked_attention.md))"
    ),
    r"masked_attention backward": (
        "A step of 128 keys and 64 queries takes 3500 cycles, of which shared memory needs 3072 "
        "and the tensor cores 2560. Under sustained load the GPU also lowers its clock. "
        "([Log](design/masked_attention.md))"
    ),
    r"": "Not understood yet.",
}


def table(path: pathlib.Path) -> list[dict[str, str]]:
    """Returns the rows of a CSV file, or no rows if the file does not exist."""
    if not path.exists():
        return []
    with path.open() as f:
        return list(csv.DictReader(f))


def measured() -> list[list[dict[str, str]]]:
    """Returns the rows of `--peers`, one list per GPU."""
    tables = (table(RESULTS / gpu / "peers.csv") for gpu in ("h200", "h100"))
    return [rows for rows in tables if rows]


def strongest(rows: list[dict[str, str]]) -> list[tuple[float, dict[str, str], dict[str, str]]]:
    """Compares each case with the fastest other library.

    Returns:
        The speedup over that library, our row and the library's row, in ascending order of speedup.
    """
    problem = itemgetter("operator", "pass", "case", "dtype")
    found = []
    for ours in rows:
        others = [
            row
            for row in rows
            if problem(row) == problem(ours) and row["implementation"] not in OWN
        ]
        if ours["implementation"] == "cuda" and others:
            best = min(others, key=milliseconds)
            found.append((milliseconds(best) / milliseconds(ours), ours, best))
    return sorted(found, key=itemgetter(0))


def milliseconds(row: dict[str, str]) -> float:
    """Returns the time of one call."""
    return float(row["milliseconds"])


def label(row: dict[str, str]) -> str:
    """Returns the case in words."""
    step = {"fwd": "forward", "bwd": "backward"}[row["pass"]]
    sizes = row["case"].replace("-", " ") + (" fp8" if row["dtype"] == "fp8" else "")
    return f"{row['operator']} {step}, {sizes}"


def library(row: dict[str, str]) -> str:
    """Returns the library's name."""
    return {"cudnn": "cuDNN"}.get(row["implementation"], row["implementation"])


def lost(tables: list[list[dict[str, str]]]) -> str:
    """Returns one table per GPU with the cases in which another library is faster.

    The cases with the largest deficit come first. A numbered list of reasons follows the tables.
    """
    text, reasons = "", []
    for rows in tables:
        text += f"\n### {rows[0]['device']}\n\n"
        lines = [
            "| case | theirs | ours | speed | why |",
            "| --- | --- | --- | --- | --- |",
        ]
        for factor, ours, best in strongest(rows):
            if factor >= 1:
                break
            why = next(why for case, why in REASONS.items() if re.match(case, label(ours)))
            if why not in reasons:
                reasons.append(why)
            theirs = f"{library(best)} {duration(best)}"
            number = f"({reasons.index(why) + 1})"
            cells = label(ours), theirs, duration(ours), f"{factor:.2f}", number
            lines.append(f"| {' | '.join(cells)} |")
        text += "\n".join(lines) + "\n"
    return text + "\n" + "".join(f"{i}. {why}\n" for i, why in enumerate(reasons, 1))


def duration(row: dict[str, str]) -> str:
    """Returns the time of one call as text."""
    time = milliseconds(row)
    return f"{time:.3g} ms" if time >= 1 else f"{1e3 * time:.3g} us"


def peers(rows: list[dict[str, str]]) -> plt.Figure:
    """Draws the speedup over the fastest other library."""
    shown = []
    for factor, ours, best in strongest(rows):
        times = f"{duration(best)} -> {duration(ours)}"
        shown.append((factor, label(ours), f"{times}, {library(best)}"))
    figure, axes = plt.subplots(figsize=(8, 0.8 + 0.16 * len(shown)), layout="constrained")
    for i, (factor, _, said) in enumerate(shown):
        end = min(factor, 3)
        axes.barh(i, end - 1, left=1, color="#4477aa" if factor >= 1 else "#cc3311")
        axes.text(max(end, 1) * 1.015, i, said, va="center", fontsize=6)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_xlim(min(0.7, 0.95 * shown[0][0]), 10)
    axes.set_xticks([1, 2, 3], ["as fast", "twice", "3 times or more"], fontsize=8)
    axes.set_xticks([], minor=True)
    axes.set_yticks(range(len(shown)), [case for _, case, _ in shown], fontsize=6)
    axes.set_ylim(len(shown) - 0.3, -0.7)  # The smallest speedup is at the top.
    axes.set_xlabel(f"speedup over the fastest other library, {rows[0]['device']}", fontsize=8)
    return figure


def context(rows: list[dict[str, str]]) -> plt.Figure:
    """Draws time and memory of a layer against the length of its context."""
    figure, panels = plt.subplots(1, 2, figsize=(8, 3.8), layout="constrained")
    for form, color in (("dense", "black"), ("sparse", "#aa3377")):
        own = [row for row in rows if row["form"] == form]
        keys = [int(row["keys"]) for row in own]
        times = [float(row["milliseconds"]) for row in own]
        needed = [float(row["temporary_bytes"]) / 2**30 for row in own]
        for axes, values in zip(panels, (times, needed), strict=True):
            axes.plot(keys, values, "o-", color=color, label=f"{form} attention")
    queries = int(rows[0]["queries"])
    keys = sorted({int(row["keys"]) for row in rows})
    scores = [4 * queries * s / 2**30 for s in keys]
    panels[1].plot(keys, scores, ":", color="gray", label="one [T, S] array of float32")
    for axes, title in zip(panels, ("milliseconds", "GiB of temporary memory")):
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
    """Draws the curves of the demo."""
    return training(rows, selected=16)


def proof(rows: list[dict[str, str]]) -> plt.Figure:
    """Draws the curves of experiments/proof.py."""
    return training(rows, selected=1024)


def training(rows: list[dict[str, str]], selected: int) -> plt.Figure:
    """Draws the losses, the indexer's KL, and the attention mass that selections hold."""
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
    loss.set(title="validation loss, nats per byte", ylim=(low - 0.2, low + 1.2))
    kl.set(title="the indexer's KL, nats", ylim=(0, None))
    recall.set(title=f"attention mass on {selected} keys", ylim=(0, 1.02))
    stages = {row["stage"]: None for row in rows}
    ends = [max(int(row["step"]) for row in rows if row["stage"] == stage) for stage in stages]
    for axes in (loss, kl, recall):
        for start, end, color in zip([0, *ends], ends, ("#f4f4f4", "#e6f0e6", "#e6ecf6")):
            axes.axvspan(start, end, color=color, zorder=0)
        axes.set(xlim=(0, ends[-1]), xlabel="step: dense, warm-up, sparse")
        axes.legend(fontsize=8)
    return figure


def far(rows: list[dict[str, str]]) -> plt.Figure:
    """Draws the losses of experiments/proof.py by position, and on distant copies."""
    figure, (late, copy) = plt.subplots(
        1, 2, figsize=(9, 3.6), layout="constrained", width_ratios=(2, 1)
    )
    colors = {"dense": "gray", "control": "#ee7733", "sparse": "#4477aa", "last keys": "#cc3311"}
    for model, color in colors.items():
        own = [row for row in rows if (row["measure"], row["model"]) == ("position", model)]
        losses = [float(row["value"]) for row in own]
        late.plot(range(1, len(own) + 1), losses, "o-", color=color, markersize=3, label=model)
    late.set(title="validation loss, nats per byte", xlabel="sixteenth of a sequence of 8192")
    late.legend(fontsize=8)
    copies = {row["model"]: float(row["value"]) for row in rows if row["measure"] == "copy"}
    copy.barh(list(copies), list(copies.values()), color=[colors.get(x, "#bbbbbb") for x in copies])
    copy.set(title="distant copies", xlabel="nats per byte")
    copy.invert_yaxis()
    return figure


def main() -> None:
    """Draws the figures whose results exist, and writes the tables."""
    # A fixed salt and no date make the files reproducible.
    plt.rcParams["svg.hashsalt"] = "jax_dsa"
    figures = {
        peers: table(RESULTS / "h200" / "peers.csv"),
        context: table(RESULTS / "h200" / "lengths.csv"),
        demo: table(RESULTS / "cpu" / "train_lm.csv"),
        proof: table(RESULTS / "h200" / "proof_metrics.csv"),
        far: table(RESULTS / "h200" / "proof.csv"),
    }
    for draw, rows in figures.items():
        if rows:
            draw(rows).savefig(IMAGES / f"{draw.__name__}.svg", metadata={"Date": None})
    text = PAGE.read_text()
    start, end = (text.index(x) for x in BETWEEN)
    if tables := measured():
        PAGE.write_text(text[: start + len(BETWEEN[0])] + lost(tables) + "\n" + text[end:])


if __name__ == "__main__":
    main()
