"""Writes the table of GPUs into docs/which.md: `python docs/gpus.py`."""

from __future__ import annotations

import re
from pathlib import Path

import jax_dsa  # noqa: F401, which defines all passes
from jax_dsa.core.op import passes

PAGE = Path(__file__).parent / "which.md"
# The columns with portable kernels, and the least compute capability of their GPUs.
PORTABLE = {"A100, A10, RTX 30": (8, 0), "L40S, RTX 40 and 50, B200": (8, 9)}


def table() -> str:
    """Returns the table."""
    columns = ["pass", "H100, H200", *PORTABLE]
    rows = [columns, ["---"] * len(columns)]
    for p in passes():
        if p.kernel is None:
            continue
        cells = [f"`{p.name}`", "kernel"]
        for gpu in PORTABLE.values():
            has = p.kernel.portable is not None and gpu >= p.kernel.portable_since
            cells.append("kernel" if has else "XLA")
        rows.append(cells)
    return "".join(f"| {' | '.join(cells)} |\n" for cells in rows)


def renewed(page: str) -> str:
    """Returns the page with a new table."""
    return re.sub(r"^\| pass \|.*\n(\|.*\n)+", table(), page, count=1, flags=re.M)


if __name__ == "__main__":
    PAGE.write_text(renewed(PAGE.read_text()))
