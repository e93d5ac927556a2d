"""Writes docs/benchmarks.md's tables and README's headline figures: `python docs/speed.py`.

The tables come from two runs of the same cases, which `python docs/speed.py --cases` prints:

    python -m jax_dsa.bench --only "$(python docs/speed.py --cases)" --seconds 0.05 \\
        --csv benchmarks/results/h200/loaded.csv
    python -m jax_dsa.bench --only "$(python docs/speed.py --cases)" --seconds 0.03 --rest 0.12 \\
        --csv benchmarks/results/h200/unthrottled.csv

The headline figures come from `python -m jax_dsa.bench --peers`, whose results are in
benchmarks/results/h200/peers.csv.
"""

from __future__ import annotations

import argparse
import csv
import pathlib
import re

ROOT = pathlib.Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "h200"
BETWEEN = "<!-- docs/speed.py -->\n", "<!-- -->\n"

Row = dict[str, str]
Results = dict[tuple[str, str], Row]  # by case name and implementation
CEILINGS = ("bf16-matmul", "fp8-matmul", "copy")

# The headings of the tables, and for each the names of its rows' cases in the results.
TABLES = {
    "Ceilings": [
        "bf16-matmul fwd M8192-N8192-K8192 bf16",
        "fp8-matmul fwd M8192-N8192-K8192 fp8",
        "copy fwd C268435456 u32",
    ],
    "Sparse MLA, forward": [
        *(f"sparse_mla fwd T4096-S{s}-N128-D576-K2048 bf16" for s in (8192, 32768, 131072)),
        *(f"sparse_mla fwd T4096-S8192-N{n}-D576-K2048 bf16" for n in (64, 16)),
    ],
    "Sparse MLA, backward": [
        *(f"sparse_mla bwd T4096-S{s}-N128-D576-K2048 bf16" for s in (4096, 8192, 131072)),
        *(f"sparse_mla bwd T4096-S{s}-N64-D576-K2048 bf16" for s in (4096, 8192)),
        *(f"sparse_mla bwd T4096-S{s}-N16-D576-K2048 bf16" for s in (4096, 8192)),
    ],
    "Sparse MLA, backward with `deterministic=True`": [
        f"sparse_mla bwd-deterministic T4096-S{s}-N128-D576-K2048 bf16" for s in (4096, 8192)
    ],
    "Sparse MLA, decode from a bfloat16 cache": [
        f"sparse_mla fwd B{b}-T1-S8192-N128-D576-K2048-decode bf16" for b in (1, 8, 64, 128)
    ],
    "Sparse MLA, decode from FP8 records": [
        *(f"sparse_mla fwd B{b}-T1-S8192-N128-D576-K2048-decode fp8" for b in (1, 8, 64, 128)),
        *(f"sparse_mla fwd B{b}-T1-S8192-N64-D576-K2048-decode fp8" for b in (64, 128)),
    ],
    "`attn_dist`": ["attn_dist fwd T4096-S4096-N128-D576-K2048 bf16"],
    "Indexer logits, forward": [
        *(f"indexer fwd T4096-S{s}-J64-C128 fp8" for s in (8192, 32768)),
        "indexer fwd T8192-S8192-J64-C128 bf16",
    ],
    "Indexer, backward over selected keys": ["indexer bwd T4096-S8192-J64-C128-K2048 bf16"],
    "`indexer_topk`: indexer and top-k in one call": [
        f"indexer fwd T{t}-S{s}-J64-C128-K2048-topk fp8"
        for t, s in ((4096, 8192), (4096, 32768), (8192, 131072))
    ],
    "`indexer_topk`, decode": [
        f"indexer fwd B{b}-T1-S131072-J64-C128-K2048-decode fp8" for b in (1, 8, 64, 128)
    ],
    "Top-k": [
        *(f"topk fwd R4096-S{s}-K2048 f32" for s in (8192, 32768)),
        "topk fwd R1024-S131072-K2048 f32",
    ],
    "Masked attention, forward": [
        *(
            f"masked_attention fwd T16384-S16384-N16-D128-{mask} bf16"
            for mask in ("dense", "causal")
        ),
        "masked_attention fwd T8192-S8192-N128-D192-E128-causal bf16",
        *(f"masked_attention fwd T8192-S8192-N16-D128-empty{x} bf16" for x in (75, 90)),
    ],
    "Masked attention, backward": [
        *(
            f"masked_attention bwd T16384-S16384-N16-D128-{mask} bf16"
            for mask in ("dense", "causal")
        ),
        "masked_attention bwd T8192-S8192-N128-D192-E128-causal bf16",
    ],
    "Multi-query decode": [
        *(f"mqa_decode fwd B{b}-S8192-N128-D576 bf16" for b in (1, 8, 64, 128)),
        *(f"mqa_decode fwd B{b}-S8192-N16-D576 bf16" for b in (64, 128)),
    ],
    "FP8 matmul": [
        f"fp8 fwd {case} fp8"
        for case in ("M4096-N7168-K2048", "M4096-N4096-K7168", "M8192-N8192-K8192")
    ],
    "FP8 linear layer with its gradients, including quantisation": [
        "fp8 fwd M8192-N8192-K8192-linear-and-gradients bf16"
    ],
    "Quantisation to FP8": ["fp8 fwd M65536-C7168 bf16"],
    "`indexer_kl_loss` with its gradient": ["losses fwd T8192-K2048-gradient f32"],
    "`dense_indexer_kl_loss` with its gradients": [
        "losses fwd T4096-N128-G1-D576-J64-C128-gradients bf16"
    ],
}

# Other implementations in these results, and how the tables name them.
OTHERS = {"lax.top_k": "`lax.top_k`", "cudnn": "cuDNN", "bf16": "the layer in bf16", "xla": "XLA"}
# Cases that are small enough for the XLA implementation to be measured.
IN_XLA = r"sparse_mla fwd T4096-S\d+-N(128|64)-D576-"

# README's table: a label, the case, and the peer.
HEADLINES = [
    (
        "sparse MLA forward, T 4096, S 32768, 128 heads, K 2048",
        "sparse_mla fwd T4096-S32768-N128-D576-K2048 bf16",
        "FlashMLA",
    ),
    (
        "sparse MLA backward, T 4096, S 4096, 128 heads, K 2048",
        "sparse_mla bwd T4096-S4096-N128-D576-K2048 bf16",
        "jax-linear-attention",
    ),
    (
        "lightning indexer in FP8, T 8192, S 131072, 64 heads",
        "indexer fwd T8192-S131072-J64-C128 fp8",
        "DeepGEMM",
    ),
    ("top-k, 64 rows of 32768, k 2048", "topk fwd R64-S32768-K2048 f32", "PyTorch"),
    (
        "causal attention forward, T 16384, 16 heads of 128",
        "masked_attention fwd T16384-S16384-N16-D128-causal bf16",
        "cudnn",
    ),
    (
        "causal attention backward, T 16384, 16 heads of 128",
        "masked_attention bwd T16384-S16384-N16-D128-causal bf16",
        "flash-attn3-jax",
    ),
]


def cases() -> str:
    """Returns the tables' cases as a pattern that `python -m jax_dsa.bench --only` takes."""
    own = "|".join(re.escape(name) for names in TABLES.values() for name in names)
    return rf"^(({own}) (cuda|cudnn|bf16|lax.top_k)$|{IN_XLA}.* xla$)"


def read(file: str) -> Results:
    """Returns a file's rows by case name and implementation, or no rows without the file."""
    rows: Results = {}
    if (path := RESULTS / f"{file}.csv").exists():
        with path.open() as f:
            for row in csv.DictReader(f):
                name = " ".join(row[x] for x in ("operator", "pass", "case", "dtype"))
                rows[name, row["implementation"]] = row
    return rows


def milliseconds(row: Row | None) -> str:
    """Returns the time of one call with three significant digits, or a dash without a row."""
    if row is None:
        return "-"
    x = float(row["milliseconds"])
    return f"{x:.0f}" if x >= 100 else f"{x:#.3g}"


def rate(row: Row) -> tuple[str, str]:
    """Returns the rate and its unit, which is the unit of the case's ceiling."""
    if row["ceiling"].startswith("copy"):
        return f"{float(row['gbytes_per_s']) / 1000:.2f}", "TB/s"
    return f"{float(row['tflops']):.0f}", "TFLOPS"


def shape(name: str) -> str:
    """Returns the end `T4096-S8192-causal bf16` of a name as `T 4096, S 8192, causal, bf16`."""
    case, dtype = name.split()[2:]
    words = [re.sub(r"^([A-Z])(\d+)$", r"\1 \2", word) for word in case.split("-")]
    words = [re.sub(r"^empty(\d+)$", r"\1 % of tiles empty", word) for word in words]
    return ", ".join([*words, dtype]).replace(", and, ", " and ")


def table(names: list[str], loaded: Results, unthrottled: Results) -> str:
    """Returns one table, with a shape per row and a number per cell."""
    ceilings = names[0].split()[0] in CEILINGS
    own = "xla" if ceilings else "cuda"
    others = [x for x in OTHERS if not ceilings and any((n, x) in loaded for n in names)]
    all_slots = any(loaded[n, own]["tflops_all_slots"] for n in names) and any(
        float(loaded[n, own]["tflops_all_slots"] or 0) > 1.001 * float(loaded[n, own]["tflops"])
        for n in names
    )
    units = {rate(loaded[n, own])[1] for n in names}
    head = ["operation" if ceilings else "shape", "ms", "rate", "unit"]
    head += ["rate, all slots"] if all_slots else []
    head += [] if ceilings else ["of ceiling"]
    head += ["rate, unthrottled"] + ([] if ceilings else ["of ceiling, unthrottled"])
    head += [f"{OTHERS[x]}, ms" for x in others]
    assert units <= {"TFLOPS", "TB/s"}
    lines = [f"| {' | '.join(head)} |", "| --- |" + " ---: |" * (len(head) - 1)]
    for name in names:
        row, calm = loaded[name, own], unthrottled[name, own]
        cells = [shape(name) if not ceilings else f"{name.split()[0]}, {shape(name)}"]
        cells += [milliseconds(row), *rate(row)]
        cells += [f"{float(row['tflops_all_slots'] or row['tflops']):.0f}"] if all_slots else []
        cells += [] if ceilings else [f"{float(row['ratio']):.2f}"]
        cells += [rate(calm)[0]] + ([] if ceilings else [f"{float(calm['ratio']):.2f}"])
        cells += [milliseconds(loaded.get((name, x))) for x in others]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def tables() -> str:
    """Returns all tables of docs/benchmarks.md."""
    loaded, unthrottled = read("loaded"), read("unthrottled")
    return "\n".join(
        f"### {title}\n\n{table(names, loaded, unthrottled)}" for title, names in TABLES.items()
    )


def headlines() -> str:
    """Returns README's table of six cases."""
    peers = read("peers")
    lines = [
        "| case | jax_dsa, ms | peer | peer, ms | speedup |",
        "| --- | ---: | --- | ---: | ---: |",
    ]
    for label, name, peer in HEADLINES:
        ours, theirs = peers[name, "cuda"], peers[name, peer]
        factor = float(theirs["milliseconds"]) / float(ours["milliseconds"])
        cells = [label, milliseconds(ours), OTHERS.get(peer, peer), milliseconds(theirs)]
        lines.append(f"| {' | '.join([*cells, f'{factor:.2f}'])} |")
    return "\n".join(lines) + "\n"


PAGES = {"README.md": headlines, "docs/benchmarks.md": tables}


def renewed(page: str) -> str:
    """Returns a page's text with its tables renewed from the results."""
    text = (ROOT / page).read_text()
    first, last = map(re.escape, BETWEEN)
    found = re.subn(f"(?<={first}).*?(?={last})", lambda _: PAGES[page](), text, flags=re.S)
    if found[1] != 1:
        raise ValueError(f"{page} has {found[1]} tables between {BETWEEN}, expected 1")
    return found[0]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--cases", action="store_true", help="print the tables' cases and stop")
    if parser.parse_args().cases:
        print(cases())
        raise SystemExit
    for page in PAGES:
        text = renewed(page)
        (ROOT / page).write_text(text)
