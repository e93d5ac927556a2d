"""Draws docs/images from the committed results of the benchmarks: `python docs/plots.py`."""

from __future__ import annotations

import csv
import pathlib
import re
from collections.abc import Callable

import matplotlib
from speed import CEILINGS, ROOT, Results, loaded, masked

from jax_dsa.bench.masked_attention import EMPTY

matplotlib.use("svg")
import matplotlib.pyplot as plt

IMAGES = ROOT / "docs" / "images"
COLORS = dict(zip(CEILINGS, ("#4477aa", "#228833", "#ccbb44"), strict=True))

# Bars of the first figure, top down: a label, and the kernel's name in the results.
BARS = {
    "sparse MLA forward, S 8192": "sparse_mla fwd T4096-S8192-N128-D576-K2048 bf16",
    "sparse MLA forward, S 131072": "sparse_mla fwd T4096-S131072-N128-D576-K2048 bf16",
    "sparse MLA forward, S 8192, N 16": "sparse_mla fwd T4096-S8192-N16-D576-K2048 bf16",
    "sparse MLA backward, S 8192": "sparse_mla bwd T4096-S8192-N128-D576-K2048 bf16",
    "sparse MLA backward, S 131072": "sparse_mla bwd T4096-S131072-N128-D576-K2048 bf16",
    "attn_dist, S 4096": "attn_dist fwd T4096-S4096-N128-D576-K2048 bf16",
    "indexer bf16, S 8192": "indexer fwd T8192-S8192-J64-C128 bf16",
    "indexer backward bf16, S 8192": "indexer bwd T4096-S8192-J64-C128-K2048 bf16",
    "indexer fp8, S 32768": "indexer fwd T4096-S32768-J64-C128 fp8",
    "indexer and top-k fp8, S 131072": "indexer fwd T8192-S131072-J64-C128-K2048-topk fp8",
    "decode bf16, 128 requests": "sparse_mla fwd B128-T1-S8192-N128-D576-K2048-decode bf16",
    "decode fp8, 128 requests": "sparse_mla fwd B128-T1-S8192-N128-D576-K2048-decode fp8",
    "top-k, 4096 rows of 8192": "topk fwd R4096-S8192-K2048 f32",
    "top-k, 1024 rows of 131072": "topk fwd R1024-S131072-K2048 f32",
    "quantise to FP8, [65536, 7168]": "fp8 fwd M65536-C7168 bf16",
}


def sizes(name: str) -> dict[str, int]:
    """The size of each letter in a case's name."""
    return {letter: int(size) for letter, size in re.findall(r"\b([A-Z])(\d+)", name)}


def ceilings(rows: Results) -> plt.Figure:
    """Each kernel's share of the ceiling that was measured in the same run."""
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    shown = [rows[name, "cuda"] for name in BARS.values()]
    colors = [COLORS[row["ceiling"].split()[0]] for row in shown]
    axes.barh(list(BARS), [float(row["ratio"]) for row in shown], color=colors)
    for i, row in enumerate(shown):
        axes.text(1.02, i, f"{float(row['milliseconds']):.3g} ms", va="center", fontsize=8)
    axes.invert_yaxis()
    axes.axvline(1, color="black", linewidth=0.8)
    handles = [plt.Rectangle((0, 0), 1, 1, color=color) for color in COLORS.values()]
    names = ["bf16 matmul", "fp8 matmul", "copy of memory"]
    figure.legend(handles, names, loc="outside upper center", ncols=3, title="ceiling")
    axes.set_xlim(0, 1.16)
    axes.set_xlabel(f"share of the ceiling, {shown[0]['device']}")
    return figure


def lengths(rows: Results) -> plt.Figure:
    """Time of a query, the mean of the last ones of S tokens, against S."""
    figure, axes = plt.subplots(figsize=(8, 4.2), layout="constrained")
    keys = [8192, 32768, 131072]
    attend = [f"sparse_mla fwd T4096-S{s}-N128-D576-K2048 bf16" for s in keys]
    lasts = (4096, 4096, 8192)
    select = [f"indexer fwd T{t}-S{s}-J64-C128-K2048-topk fp8" for t, s in zip(lasts, keys)]

    def microseconds(name: str) -> float:
        return float(rows[name, "cuda"]["milliseconds"]) * 1e3 / sizes(name)["T"]

    mla, index = ([microseconds(name) for name in names] for names in (attend, select))
    total = [a + b for a, b in zip(mla, index, strict=True)]
    # The last 4096 queries take 2 N (192 + 128) operations a visible key in multi-head form.
    first = rows[attend[0], "cuda"]
    tflops = float(first["tflops"]) / float(first["ratio"])
    dense = [2 * 128 * (192 + 128) * (s - 4095 / 2) / tflops / 1e6 for s in keys]
    axes.plot(keys, dense, "ko--", label="dense attention at the speed of a matmul (by count)")
    axes.plot(keys, total, "o-", color="#aa3377", label="indexer, top-k and sparse MLA (measured)")
    axes.plot(keys, mla, "o-", color="#4477aa", label="sparse MLA alone")
    axes.plot(keys, index, "o-", color="#228833", label="indexer and top-k alone")
    axes.set(xscale="log", yscale="log", xlabel="keys S", ylabel="microseconds a query")
    axes.set_xticks(keys, [str(s) for s in keys])
    axes.set_xticks([], minor=True)
    axes.set_yticks([0.1, 0.3, 1, 3, 10], ["0.1", "0.3", "1", "3", "10"])
    axes.grid(alpha=0.3)
    axes.legend()
    return figure


# Lines of the third figure: a label, the implementation, what the cases' notes say for a share of
# hidden keys, and a color.
SPARSITY = (
    ("XLA, block mask", "xla", lambda share: f"empty{share}", "#bbbbbb"),
    ("cuDNN, the same mask", "cudnn", lambda share: f"empty{share}", "#ee6677"),
    ("block mask", "cuda", lambda share: f"empty{share}", "#4477aa"),
    ("kv_indices", "cuda", lambda share: f"kept{100 - share}", "#228833"),
)


def sparsity(rows: Results) -> plt.Figure:
    """Time of masked attention against the share of keys that the mask hides."""
    figure, panels = plt.subplots(1, 2, figsize=(8, 3.8), layout="constrained", sharey=True)
    sizes = "T8192-S8192-N16-D128"
    for axes, step, title in zip(panels, ("fwd", "bwd"), ("forward", "backward")):
        for label, implementation, note, color in SPARSITY:
            names = {
                share: f"masked_attention {step} {sizes}-{note(share)} bf16" for share in EMPTY
            }
            found = {x: rows.get((name, implementation)) for x, name in names.items()}
            times = {x: float(row["milliseconds"]) for x, row in found.items() if row}
            axes.plot(times.keys(), times.values(), "o-", color=color, label=label)
        axes.set(yscale="log", title=title)
        axes.set_xticks(EMPTY)
        axes.tick_params(axis="x", labelsize=8)
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("milliseconds")
    device = next(iter(rows.values()))["device"]
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=4)
    figure.supxlabel(f"percent of keys hidden; 8192 keys, 16 heads of 128, {device}", fontsize=9)
    return figure


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
    for row in table(ROOT / "benchmarks" / "results" / "h200" / "peers.csv"):
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
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("{x:g}")
        axes.tick_params(axis="y", which="both", labelsize=8)
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


RESULTS = ROOT / "benchmarks" / "results"
FIGURES: dict[Callable[..., plt.Figure], Callable[[], object]] = {
    ceilings: loaded,
    lengths: loaded,
    sparsity: masked,
    peers: masked,
    context: lambda: table(RESULTS / "h200" / "lengths.csv"),
    demo: lambda: table(RESULTS / "cpu" / "train_lm.csv"),
}


def main() -> None:
    """Writes each figure whose results there are."""
    # Fixed identifiers and no date, so that the same results make the same files.
    plt.rcParams["svg.hashsalt"] = "jax_dsa"
    IMAGES.mkdir(exist_ok=True)
    for draw, results in FIGURES.items():
        if rows := results():
            path = IMAGES / f"{draw.__name__}.svg"
            draw(rows).savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main()
