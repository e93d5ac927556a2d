"""Draws docs/images from the committed results of the benchmarks: `python docs/plots.py`."""

from __future__ import annotations

import re

import matplotlib
from speed import CEILINGS, ROOT, Results, read

from jax_dsa.bench.cases.masked_attention import EMPTY

matplotlib.use("svg")
import matplotlib.pyplot as plt

IMAGES = ROOT / "docs" / "images"
COLORS = dict(zip(CEILINGS, ("#4477aa", "#228833", "#ccbb44"), strict=True))

# Bars of the first figure from top to bottom: a label, and the case in the results.
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
    """Returns the sizes in a case's name, by letter."""
    return {letter: int(size) for letter, size in re.findall(r"\b([A-Z])(\d+)", name)}


def ceilings(rows: Results) -> plt.Figure:
    """Draws each kernel's fraction of the ceiling that was measured in the same run."""
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
    axes.set_xlabel(f"fraction of the ceiling, {shown[0]['device']}")
    return figure


def lengths(rows: Results) -> plt.Figure:
    """Draws the mean time per query, over the last queries of S tokens, against S."""
    figure, axes = plt.subplots(figsize=(8, 4.2), layout="constrained")
    keys = [8192, 32768, 131072]
    attend = [f"sparse_mla fwd T4096-S{s}-N128-D576-K2048 bf16" for s in keys]
    lasts = (4096, 4096, 8192)
    select = [f"indexer fwd T{t}-S{s}-J64-C128-K2048-topk fp8" for t, s in zip(lasts, keys)]

    def microseconds(name: str) -> float:
        return float(rows[name, "cuda"]["milliseconds"]) * 1e3 / sizes(name)["T"]

    mla, index = ([microseconds(name) for name in names] for names in (attend, select))
    total = [a + b for a, b in zip(mla, index, strict=True)]
    # In multi-head form the last 4096 queries take 2 N (192 + 128) operations per visible key.
    first = rows[attend[0], "cuda"]
    tflops = float(first["tflops"]) / float(first["ratio"])
    dense = [2 * 128 * (192 + 128) * (s - 4095 / 2) / tflops / 1e6 for s in keys]
    axes.plot(keys, dense, "ko--", label="dense attention at the speed of a matmul (by count)")
    axes.plot(keys, total, "o-", color="#aa3377", label="indexer, top-k and sparse MLA (measured)")
    axes.plot(keys, mla, "o-", color="#4477aa", label="sparse MLA alone")
    axes.plot(keys, index, "o-", color="#228833", label="indexer and top-k alone")
    axes.set(xscale="log", yscale="log", xlabel="keys S", ylabel="microseconds per query")
    axes.set_xticks(keys, [str(s) for s in keys])
    axes.set_xticks([], minor=True)
    axes.set_yticks([0.1, 0.3, 1, 3, 10], ["0.1", "0.3", "1", "3", "10"])
    axes.grid(alpha=0.3)
    axes.legend()
    return figure


# Lines of the third figure: a label, the implementation, a function that returns a case's note from
# the percentage of masked keys, and a color.
SPARSITY = (
    ("XLA, block mask", "xla", lambda percent: f"empty{percent}", "#bbbbbb"),
    ("cuDNN, the same mask", "cudnn", lambda percent: f"empty{percent}", "#ee6677"),
    ("block mask", "cuda", lambda percent: f"empty{percent}", "#4477aa"),
    ("kv_indices", "cuda", lambda percent: f"kept{100 - percent}", "#228833"),
)


def sparsity(rows: Results) -> plt.Figure:
    """Draws the time of masked attention against the percentage of masked keys."""
    figure, panels = plt.subplots(1, 2, figsize=(8, 3.8), layout="constrained", sharey=True)
    sizes = "T8192-S8192-N16-D128"
    for axes, step, title in zip(panels, ("fwd", "bwd"), ("forward", "backward")):
        for label, implementation, note, color in SPARSITY:
            names = {
                percent: f"masked_attention {step} {sizes}-{note(percent)} bf16"
                for percent in EMPTY
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
    figure.supxlabel(f"percent of keys masked; 8192 keys, 16 heads of 128, {device}", fontsize=9)
    return figure


# Panels of the fourth figure: the label of the axis, and the requests and keys of the cases.
DECODED = {
    "requests of 8192 keys": [(b, 8192) for b in (1, 8, 64, 128)],
    "keys of each of 8 requests": [(8, s) for s in (2048, 8192, 32768, 131072)],
}


def decode(rows: Results) -> plt.Figure:
    """Draws the time of mqa_decode and of its ceiling against batch size and length."""
    figure, panels = plt.subplots(1, 2, figsize=(8, 3.8), layout="constrained", sharey=True)
    for axes, (counted, cases) in zip(panels, DECODED.items(), strict=True):
        x = [b if counted.startswith("requests") else s for b, s in cases]
        for heads, color in ((128, "#4477aa"), (16, "#228833")):
            shown = [rows[f"mqa_decode fwd B{b}-S{s}-N{heads}-D576 bf16", "cuda"] for b, s in cases]
            times = [float(row["milliseconds"]) * 1e3 for row in shown]
            least = [t * float(row["ratio"]) for t, row in zip(times, shown, strict=True)]
            axes.plot(x, times, "o-", color=color, label=f"{heads} heads")
            axes.plot(x, least, "--", color=color, label=f"ceiling, {heads} heads")
        axes.set(xscale="log", yscale="log", xlabel=counted)
        axes.set_xticks(x, [str(i) for i in x])
        axes.set_xticks([], minor=True)
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("microseconds")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=4)
    figure.supxlabel(f"one query per request, D 576, {shown[0]['device']}", fontsize=9)
    return figure


def by_tokens(
    rows: Results,
    cases: str,
    series: dict[str, tuple[str, str]],
    ticks: dict[int, str],
    sizes_shown: str,
) -> plt.Figure:
    """Draws the time of both passes against the number of tokens.

    Args:
        rows: The results.
        cases: A regular expression that matches the names of the cases, with "STEP" for the pass.
        series: For each implementation in the results, its label and its color.
        ticks: Numbers of tokens and their labels.
        sizes_shown: The sizes of the cases, for the label below the panels.
    """
    figure, panels = plt.subplots(1, 2, figsize=(8, 3.8), layout="constrained", sharey=True)
    for axes, step, title in zip(panels, ("fwd", "bwd"), ("forward", "backward"), strict=True):
        for implementation, (label, color) in series.items():
            times = {
                sizes(name)["T"]: float(row["milliseconds"])
                for (name, measured), row in rows.items()
                if measured == implementation and re.match(cases.replace("STEP", step), name)
            }
            axes.plot(*zip(*sorted(times.items()), strict=True), "o-", color=color, label=label)
        axes.set(xscale="log", yscale="log", title=title)
        axes.set_xticks(list(ticks), list(ticks.values()))
        axes.set_xticks([], minor=True)
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("milliseconds")
    device = next(iter(rows.values()))["device"]
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=2)
    figure.supxlabel(f"tokens; {sizes_shown}, {device}", fontsize=9)
    return figure


def htree(rows: Results) -> plt.Figure:
    """Draws the time of tree attention and of dense attention against the number of tokens."""
    series = {"cudnn": ("dense, cuDNN", "#ee6677"), "cuda": ("tree", "#4477aa")}
    ticks = {2**14: "16K", 2**16: "64K", 2**17: "128K", 2**18: "256K", 2**20: "1M"}
    return by_tokens(rows, "htree STEP T", series, ticks, "16 heads of 128, one KV head")


def sparse_attention(rows: Results) -> plt.Figure:
    """Draws the time of attention to lists of blocks and of dense attention against the tokens."""
    series = {
        "masked_attention": ("dense causal, masked_attention", "#ee6677"),
        "cuda": ("16 blocks of 128 keys per query", "#4477aa"),
    }
    ticks = {2**11: "2K", 2**12: "4K", 2**13: "8K", 2**15: "32K", 2**17: "128K"}
    cases = "sparse_attention STEP T.*-K16-b128-similar"
    return by_tokens(rows, cases, series, ticks, "64 heads of 128, 4 KV heads, similar lists")


def htree_nodes() -> plt.Figure:
    """Draws the nodes that one query reads in a tree of 61 tokens.

    Each node has four children, and the query selects three nodes per layer.
    """
    compression, position = 4, 57
    selected = {2: [0, 2, 3], 1: [2, 9, 14]}  # The last node of each layer contains the query.
    colors = {
        "attended to": "#4477aa",
        "selected: replaced by its children": "#ccbb44",
        "not read": "#eeeeee",
    }
    figure, axes = plt.subplots(figsize=(8, 2.4), layout="constrained")
    above = None
    for layer in (2, 1, 0):
        span = compression**layer
        for node in range(-(-61 // span)):
            candidate = node <= position // span and (above is None or node // compression in above)
            kind = 2 if not candidate else 1 if node in selected.get(layer, []) else 0
            width = min(span, 61 - node * span)
            box = plt.Rectangle(
                (node * span + 0.06, layer + 0.15),
                width - 0.12,
                0.7,
                facecolor=list(colors.values())[kind],
                edgecolor="#888888",
                linewidth=0.5,
            )
            axes.add_patch(box)
        above = selected.get(layer)
    axes.annotate("the query", (position + 0.5, 0.1), (position + 0.5, -0.6), ha="center",
                  arrowprops={"arrowstyle": "->"})  # fmt: skip
    axes.set(xlim=(-0.5, 61.5), ylim=(-0.8, 3), xticks=[], frame_on=False)
    axes.set_yticks([0.5, 1.5, 2.5], ["tokens", "means of 4", "means of 16"])
    axes.tick_params(left=False)
    handles = [
        plt.Rectangle((0, 0), 1, 1, facecolor=c, edgecolor="#888888") for c in colors.values()
    ]
    figure.legend(handles, colors, loc="outside upper center", ncols=3)
    return figure


# The figures, and the file of results that each one shows.
FIGURES = {
    ceilings: "loaded",
    lengths: "loaded",
    sparsity: "masked_attention",
    decode: "mqa_decode",
    htree: "../h100/htree",
    sparse_attention: "../h100/sparse_attention",
}


def main() -> None:
    """Draws the figures whose results exist, and the one that needs no results."""
    # A fixed salt and no date make the files reproducible.
    plt.rcParams["svg.hashsalt"] = "jax_dsa"
    IMAGES.mkdir(exist_ok=True)
    for draw, results in FIGURES.items():
        if rows := read(results):
            path = IMAGES / f"{draw.__name__}.svg"
            draw(rows).savefig(path, metadata={"Date": None})
    htree_nodes().savefig(IMAGES / "htree_nodes.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
