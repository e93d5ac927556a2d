"""Writes README's table of speeds from the committed results: `python docs/speed.py`.

They come from two runs of the table's cases, which `python docs/speed.py --cases` prints:

    python -m jax_dsa.bench --only "$(python docs/speed.py --cases)" --seconds 0.05 \\
        --csv benchmarks/results/h200/loaded.csv
    python -m jax_dsa.bench --only "$(python docs/speed.py --cases)" --seconds 0.03 --rest 0.12 \\
        --csv benchmarks/results/h200/rested.csv
"""

from __future__ import annotations

import argparse
import csv
import pathlib
import re
from collections.abc import Sequence

ROOT = pathlib.Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "h200"
BETWEEN = "<!-- docs/speed.py -->\n", "<!-- -->\n"

Row = dict[str, str]
Results = dict[tuple[str, str], Row]  # by name and implementation
CEILINGS = ("bf16-matmul", "fp8-matmul", "copy")

# The table's lines: a label, and the names of what it shows in the results.
LINES = {
    "bf16 matmul / fp8 matmul, 8192 x 8192 x 8192": [
        "bf16-matmul fwd M8192-N8192-K8192 bf16",
        "fp8-matmul fwd M8192-N8192-K8192 fp8",
    ],
    "copy of 1 GiB, bytes read and written": ["copy fwd C268435456 u32"],
    "sparse MLA forward, T4096 N128 D576 K2048, S8192 / S32768 / S131072": [
        f"sparse_mla fwd T4096-S{s}-N128-D576-K2048 bf16" for s in (8192, 32768, 131072)
    ],
    "the same, S8192, N64 / N16": [
        f"sparse_mla fwd T4096-S8192-N{n}-D576-K2048 bf16" for n in (64, 16)
    ],
    "sparse MLA backward, T4096 N128 D576 K2048, S4096 / S8192 / S131072": [
        f"sparse_mla bwd T4096-S{s}-N128-D576-K2048 bf16" for s in (4096, 8192, 131072)
    ],
    "the same, `deterministic=True`, S4096 / S8192": [
        f"sparse_mla bwd-deterministic T4096-S{s}-N128-D576-K2048 bf16" for s in (4096, 8192)
    ],
    "the same, N64, S4096 / S8192": [
        f"sparse_mla bwd T4096-S{s}-N64-D576-K2048 bf16" for s in (4096, 8192)
    ],
    "the same, N16, S4096 / S8192": [
        f"sparse_mla bwd T4096-S{s}-N16-D576-K2048 bf16" for s in (4096, 8192)
    ],
    "attn_dist, T4096 S4096 N128 D576 K2048": ["attn_dist fwd T4096-S4096-N128-D576-K2048 bf16"],
    "decode, T1 N128 D576 K2048, 1 / 8 / 64 / 128 requests": [
        f"sparse_mla fwd B{b}-T1-S8192-N128-D576-K2048-decode bf16" for b in (1, 8, 64, 128)
    ],
    "the same, FP8 records": [
        f"sparse_mla fwd B{b}-T1-S8192-N128-D576-K2048-decode fp8" for b in (1, 8, 64, 128)
    ],
    "the same, N64, 64 / 128 requests": [
        f"sparse_mla fwd B{b}-T1-S8192-N64-D576-K2048-decode fp8" for b in (64, 128)
    ],
    "indexer fp8, T4096 J64 C128, S8192 / S32768": [
        f"indexer fwd T4096-S{s}-J64-C128 fp8" for s in (8192, 32768)
    ],
    "indexer bf16, T8192 S8192 J64 C128": ["indexer fwd T8192-S8192-J64-C128 bf16"],
    "indexer backward bf16, T4096 S8192 J64 C128 K2048": [
        "indexer bwd T4096-S8192-J64-C128-K2048 bf16"
    ],
    "indexer and top-k, fp8 J64 C128 K2048, T4096 S8192 / T4096 S32768 / T8192 S131072": [
        f"indexer fwd T{t}-S{s}-J64-C128-K2048-topk fp8"
        for t, s in ((4096, 8192), (4096, 32768), (8192, 131072))
    ],
    "the same, decode T1 S131072, 1 / 8 / 64 / 128 requests": [
        f"indexer fwd B{b}-T1-S131072-J64-C128-K2048-decode fp8" for b in (1, 8, 64, 128)
    ],
    "top-k, 4096 rows of 8192 / 32768, k 2048": [
        f"topk fwd R4096-S{s}-K2048 f32" for s in (8192, 32768)
    ],
    "top-k, 1024 rows of 131072, k 2048": ["topk fwd R1024-S131072-K2048 f32"],
    "masked attention forward, T16384 N16 D128, dense / causal": [
        f"masked_attention fwd T16384-S16384-N16-D128-{mask} bf16" for mask in ("dense", "causal")
    ],
    "the same, backward": [
        f"masked_attention bwd T16384-S16384-N16-D128-{mask} bf16" for mask in ("dense", "causal")
    ],
    "the same, multi-head form, T8192 N128 D192 E128 causal, forward / backward": [
        f"masked_attention {step} T8192-S8192-N128-D192-E128-causal bf16" for step in ("fwd", "bwd")
    ],
    "the same, T8192 N16 D128, 75 / 90 % of tiles empty, forward": [
        f"masked_attention fwd T8192-S8192-N16-D128-empty{share} bf16" for share in (75, 90)
    ],
    "multi-query decode, S8192 N128 D576, 1 / 8 / 64 / 128 requests": [
        f"mqa_decode fwd B{b}-S8192-N128-D576 bf16" for b in (1, 8, 64, 128)
    ],
    "the same, N16, 64 / 128 requests": [
        f"mqa_decode fwd B{b}-S8192-N16-D576 bf16" for b in (64, 128)
    ],
    "FP8 matmul, M4096 N7168 K2048 / M4096 N4096 K7168 / M8192 N8192 K8192": [
        f"fp8 fwd {case} fp8"
        for case in ("M4096-N7168-K2048", "M4096-N4096-K7168", "M8192-N8192-K8192")
    ],
    "FP8 linear layer with its gradients, quantised as it goes, M8192 N8192 K8192": [
        "fp8 fwd M8192-N8192-K8192-linear-and-gradients bf16"
    ],
    "quantise to FP8, [65536, 7168] bf16": ["fp8 fwd M65536-C7168 bf16"],
    "the indexer's loss over selected keys, T8192 K2048, with its gradient": [
        "losses fwd T8192-K2048-gradient f32"
    ],
    "the indexer's warm-up loss, T4096 N128 D576 J64 C128, with its gradients": [
        "losses fwd T4096-N128-G1-D576-J64-C128-gradients bf16"
    ],
}

# Other implementations in the table: their names in the results, and what stands before their time.
OTHERS = {"lax.top_k": "`lax.top_k` ", "cudnn": "cuDNN ", "bf16": "in bf16 ", "xla": "XLA "}
# Those that XLA runs in a time and in memory that a benchmark has.
IN_XLA = r"sparse_mla fwd T4096-S\d+-N(128|64)-D576-"


def cases() -> str:
    """The table's cases, as `python -m jax_dsa.bench --only` takes them."""
    own = "|".join(re.escape(name) for names in LINES.values() for name in names)
    return rf"^(({own}) (cuda|cudnn|bf16|lax.top_k)$|{IN_XLA}.* xla$)"


def read(file: str) -> Results:
    """The rows of a file, by name and implementation; none where it is not there."""
    rows: Results = {}
    if (path := RESULTS / f"{file}.csv").exists():
        with path.open() as f:
            for row in csv.DictReader(f):
                name = " ".join(row[x] for x in ("operator", "pass", "case", "dtype"))
                rows[name, row["implementation"]] = row
    return rows


def _times(rows: Sequence[Row | None]) -> str:
    times = [row and float(row["milliseconds"]) for row in rows]
    unit, factor = ("ms", 1) if max(x or 0 for x in times) >= 0.4 else ("us", 1000)
    shown = [f"{x * factor:#.3g}".rstrip(".") if x else "-" for x in times]
    return f"{' / '.join(shown)} {unit}"


def _rates(rows: Sequence[Row]) -> str:
    """In the unit of the ceiling; in brackets with the slots that hold no key, where there are."""
    by_bytes = rows[0]["ceiling"].startswith("copy")

    def rate(row: Row) -> str:
        if by_bytes:
            return f"{float(row['gbytes_per_s']) / 1000:.2f}"
        tflops, every = float(row["tflops"]), float(row["tflops_all_slots"] or row["tflops"])
        return f"{tflops:.0f}" + (f" ({every:.0f})" if every > 1.001 * tflops else "")

    return " / ".join(map(rate, rows)) + (" TB/s" if by_bytes else " TFLOPS")


def _shares(rows: Sequence[Row]) -> str:
    (ceiling,) = {row["ceiling"].split("-")[0].split()[0] for row in rows}
    return " / ".join(f"{float(row['ratio']):.2f}" for row in rows) + f" of {ceiling}"


def _elsewhere(rows: Results, names: Sequence[str]) -> str:
    for kind, label in OTHERS.items():
        found = [rows.get((name, kind)) for name in names]
        if any(found):
            return label + _times(found)
    return "-"


def table() -> str:
    """README's table."""
    now, rest = read("loaded"), read("rested")
    lines = [
        "| pass and shape | time | rate | of its ceiling | rested | of its ceiling | elsewhere |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for label, names in LINES.items():
        ceiling = names[0].split()[0] in CEILINGS
        own = "xla" if ceiling else "cuda"
        rows, rows_rested = ([x[name, own] for name in names] for x in (now, rest))
        cells = [
            label,
            _times(rows),
            _rates(rows),
            "-" if ceiling else _shares(rows),
            _rates(rows_rested),
            "-" if ceiling else _shares(rows_rested),
            "-" if ceiling else _elsewhere(now, names),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def renewed(readme: str) -> str:
    """README with the table as the results have it."""
    first, last = map(re.escape, BETWEEN)
    found = re.subn(f"(?<={first}).*?(?={last})", lambda _: table(), readme, flags=re.S)
    if found[1] != 1:
        raise ValueError(f"README has {found[1]} tables between {BETWEEN}, want 1")
    return found[0]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--cases", action="store_true", help="prints the table's cases and stops")
    if parser.parse_args().cases:
        print(cases())
        raise SystemExit
    path = ROOT / "README.md"
    path.write_text(renewed(path.read_text()))
