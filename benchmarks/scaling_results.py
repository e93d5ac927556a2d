"""The results of `scaling.py`: the CSV file, a table in Markdown, and a plot."""

from __future__ import annotations

import collections
import csv
import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

COLUMNS = (
    *("program", "mesh", "devices", "ms", "tokens_per_second", "peak_gib", "held_gib"),
    *("gathered_mib", "reduced_mib", "other_mib", "link_gb_s", "result", "device", "jax"),
)
"""The columns of the CSV file. Memory and traffic are those of one device: `held_gib` is the memory
of parameters and optimizer states, and the columns in MiB are what a device receives per call.
`link_gb_s` is the rate at which a device receives in a pure gather. `result` is a loss."""


def add(path: Path, row: dict[str, Any]) -> None:
    """Prints a row and appends it to the file."""
    shown = {k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()}
    print(", ".join(f"{k} {v}" for k, v in shown.items()), flush=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        if new:
            writer.writeheader()
        writer.writerow(shown)


def rows(path: Path) -> list[dict[str, str]]:
    """Returns the rows of the file, with two more columns.

    `efficiency` is the tokens per second of one of the devices, divided by those of a single
    device; NaN if a single device was not measured. `product` is, for a mesh of several axes, the
    product of the efficiencies of these axes alone, if they were measured.
    """
    if not path.exists():
        return []
    with path.open(newline="") as file:
        found = list(csv.DictReader(file))
    alone = {row["program"]: row for row in found if row["devices"] == "1"}
    for row in found:
        one = alone.get(row["program"])
        rate = float(row["tokens_per_second"]) / int(row["devices"])
        row["efficiency"] = f"{rate / float(one['tokens_per_second']) if one else math.nan:.3f}"
    single = {(row["program"], row["mesh"]): float(row["efficiency"]) for row in found}
    for row in found:
        by_axis = [single.get((row["program"], axis)) for axis in row["mesh"].split(",")]
        known = [x for x in by_axis if x is not None]
        row["product"] = f"{math.prod(known):.3f}" if len(known) == len(by_axis) > 1 else ""
    return found


def table(found: list[dict[str, str]]) -> str:
    """Returns the results as a Markdown table.

    The table also has the time that the link would need for the exchanged bytes.
    """
    lines = [
        "| program | mesh | ms | speedup | efficiency | product of its axes | peak GiB | "
        "held GiB | received MiB: gathered, reduced, other | ms at the link's rate | loss |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in found:
        mib = [float(row[f"{kind}_mib"]) for kind in ("gathered", "reduced", "other")]
        over = sum(mib) * 2**20 / float(row["link_gb_s"]) / 1e6
        gain = float(row["efficiency"]) * int(row["devices"])
        cells = [
            row["program"],
            row["mesh"],
            row["ms"],
            f"{gain:.2f}",
            row["efficiency"],
            row["product"],
        ]
        cells += [row["peak_gib"], row["held_gib"], ", ".join(f"{x:.3g}" for x in mib)]
        lines.append(f"| {' | '.join([*cells, f'{over:.2f}', row['result']])} |")
    return "\n".join(lines)


def plot(found: list[dict[str, str]], path: Path) -> None:
    """Draws the speedup against the number of devices."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4.5), layout="constrained")
    panel = figure.subplots()
    most = max((int(row["devices"]) for row in found), default=1)
    panel.plot([1, most], [1, most], color="black", lw=0.8, label="ideal")
    lines = collections.defaultdict(list)
    for row in found:
        axes = [axis.split("=")[0] for axis in row["mesh"].split(",")]
        axis = axes[0] if len(axes) == 1 else "every axis"
        gain = float(row["efficiency"]) * int(row["devices"])
        if row["program"] not in ("fsdp", "resume", "v32-step"):
            lines[row["program"], axis].append((int(row["devices"]), gain))
    for (program, axis), points in lines.items():
        if len(points) > 1 or axis == "every axis":
            panel.plot(*zip(*sorted(points), strict=True), "o-", label=f"{program}, {axis}")
    panel.set(xlabel="devices", ylabel="speedup over one device")
    panel.set_title(next((row["device"] for row in found), ""))
    panel.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    print(f"wrote {path}")
