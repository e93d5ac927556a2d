"""Writes benchmark results as a table, as CSV files and as a plot."""

from __future__ import annotations

import csv
import dataclasses
import pathlib
import subprocess
from typing import TYPE_CHECKING

import jax

from jax_dsa.bench.case import COPY
from jax_dsa.core.extras import needs_extra

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from jax_dsa.bench.case import Case


@dataclasses.dataclass(frozen=True)
class Row:
    """One measurement.

    The fields are the columns of the CSV file, in which `step` is called `pass`.
    `tflops_all_slots` counts empty slots of a selection too, as some libraries do. `ceiling` is the
    one that bounds the case, and `ratio` is the time at that ceiling divided by the measured time.
    """

    operator: str
    step: str
    case: str
    dtype: str
    implementation: str
    milliseconds: float
    tflops: float | None
    tflops_all_slots: float | None
    gbytes_per_s: float | None
    ceiling: str
    ratio: float | None
    device: str
    jax: str
    commit: str


COLUMNS = ["pass" if f.name == "step" else f.name for f in dataclasses.fields(Row)]


def row(
    case: Case, implementation: str, seconds: float, rates: Mapping[str, float], commit: str
) -> Row:
    """Returns the row of one measurement.

    Args:
        case: The case.
        implementation: Name of the implementation.
        seconds: Time of one call.
        rates: Measured rates of the ceilings, in operations or bytes per second.
        commit: The commit that was measured.
    """
    operations = [n for ceiling, n in case.work.items() if ceiling != COPY]
    bound = max(
        (x for x in case.work if x in rates), key=lambda x: case.work[x] / rates[x], default=None
    )
    return Row(
        case.operator,
        case.step,
        case.name,
        case.dtype,
        implementation,
        seconds * 1e3,
        operations[0] / seconds / 1e12 if operations else None,
        case.all_slots / seconds / 1e12 if case.all_slots else None,
        case.work[COPY] / seconds / 1e9 if COPY in case.work else None,
        f"{bound} {_in_unit(bound, rates[bound])}" if bound else "",
        case.work[bound] / rates[bound] / seconds if bound else None,
        jax.devices()[0].device_kind,
        jax.__version__,
        commit,
    )


def _in_unit(ceiling: str, rate: float) -> str:
    return f"{rate / 1e9:.4g} GB/s" if ceiling == COPY else f"{rate / 1e12:.4g} TFLOPS"


def _cells(r: Row) -> list[str]:
    return [
        "" if v is None else f"{v:.5g}" if isinstance(v, float) else str(v)
        for v in dataclasses.astuple(r)
    ]


_SHOWN = COLUMNS[: COLUMNS.index("device")]


class Table:
    """Formats results as aligned lines, without the columns that are the same in all rows.

    Args:
        cases: All cases that will be measured. Their names determine the widths.
        implementations: The names of all implementations.
    """

    def __init__(self, cases: Sequence[Case], implementations: Sequence[str]) -> None:
        wide = {
            "operator": [c.operator for c in cases],
            "case": [c.name for c in cases],
            "pass": [c.step for c in cases],
            "implementation": list(implementations),
            "ceiling": [f"{ceiling} 1234.5 TFLOPS" for c in cases for ceiling in c.work],
        }
        self._widths = [max(len(x) for x in (name, *wide.get(name, ()))) for name in _SHOWN]

    def header(self) -> str:
        """Returns the line with the names of the columns."""
        return self._aligned(_SHOWN)

    def line(self, row: Row) -> str:
        """Returns the line of one row."""
        return self._aligned(_cells(row)[: len(_SHOWN)])

    def _aligned(self, cells: Sequence[str]) -> str:
        return "  ".join(f"{c:<{w}}" for c, w in zip(cells, self._widths, strict=True)).rstrip()


class CSV:
    """Writes results to CSV files, row by row.

    Args:
        path: A file that ends with ".csv", or a folder that gets one file per operator.
    """

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path
        self.files: list[pathlib.Path] = []

    def add(self, row: Row) -> None:
        """Appends a row. The first row of a file replaces the file's previous contents."""
        own = self.path if self.path.suffix == ".csv" else self.path / f"{row.operator}.csv"
        fresh = own not in self.files
        if fresh:
            own.parent.mkdir(parents=True, exist_ok=True)
            self.files.append(own)
        with own.open("w" if fresh else "a", newline="") as f:
            writer = csv.writer(f, lineterminator="\n")
            if fresh:
                writer.writerow(COLUMNS)
            writer.writerow(_cells(row))


def speed_ups(rows: Sequence[Row]) -> str:
    """Compares the kernels with other implementations.

    Returns:
        One line for each case that has both, which says how many times as fast the kernel is. The
        cases in which the kernel does worst come first.
    """
    lines = []
    for own in rows:
        others = {
            r.implementation: r.milliseconds / own.milliseconds
            for r in rows
            if own.implementation == "cuda" != r.implementation and _problem(r) == _problem(own)
        }
        if others:
            shown = ", ".join(f"{x:.3g} times as fast as {name}" for name, x in others.items())
            case = f"{own.operator} {own.step} {own.case} {own.dtype}"
            lines.append((min(others.values()), f"{case}: {shown}"))
    return "\n".join(line for _, line in sorted(lines))


def _problem(r: Row) -> tuple[str, str, str, str]:
    return r.operator, r.step, r.case, r.dtype


def write_plot(rows: Sequence[Row], path: pathlib.Path) -> None:
    """Draws a bar chart of each case's fraction of its ceiling, by implementation."""
    with needs_extra("bench", "jax_dsa.bench --plot"):
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt

    def label(r: Row) -> str:
        return f"{r.operator} {r.step} {r.dtype}\n{r.case}"

    rows = [r for r in rows if r.ratio is not None]
    labels = list(dict.fromkeys(map(label, rows)))
    names = list(dict.fromkeys(r.implementation for r in rows))
    height = 0.8 / max(1, len(names))
    figure, axes = plt.subplots(figsize=(10, 1.5 + 0.55 * len(labels)), layout="constrained")
    for i, name in enumerate(names):
        own = [r for r in rows if r.implementation == name]
        at = [labels.index(label(r)) + i * height for r in own]
        bars = axes.barh(at, [r.ratio or 0.0 for r in own], height, label=name)
        axes.bar_label(bars, [f"{r.milliseconds:.3g} ms" for r in own], padding=3, fontsize=7)
    axes.set_yticks([y + 0.4 - height / 2 for y in range(len(labels))], labels, fontsize=7)
    axes.invert_yaxis()
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xlabel("fraction of the ceiling measured in the same run")
    axes.set_title(f"{jax.devices()[0].device_kind}, JAX {jax.__version__}")
    axes.legend()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def commit() -> str:
    """Returns the commit that is measured.

    It ends with "-dirty" if files have changed since, and is "unknown" outside a repository.
    """
    command = ["git", "describe", "--always", "--dirty", "--exclude", "*"]
    try:
        here = pathlib.Path(__file__).parent
        return subprocess.run(
            command, cwd=here, capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
