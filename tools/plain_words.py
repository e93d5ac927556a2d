"""Rejects words that were replaced by the field's terms: `python tools/plain_words.py`.

The check reads identifiers, comments and text of every tracked source file, and prints file, line,
the word and its replacement. docs/conventions.md has the glossary.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = (".py", ".cu", ".cuh", ".h", ".cc")

# A pattern of the replaced word, and what to write instead. Words that also have a common meaning
# are listed only as the identifiers that they were.
REPLACED = {
    r"\bkMostProcessors\b": "kMaxSms",
    r"\bprocessors\b": "num_sms, SMs",
    r"\blaunch_behind\b": "launch_pdl",
    r"\blet_next_begin\b": "launch_dependents",
    r"\bwait_for_previous\b": "grid_dependency_wait",
    r"\bhidden_one\b": "opaque_one",
    r"\bwhy_not\b": "unsupported_reason",
    r"\bqueries_first\b": "prefer_query_sharding",
    r"\bcompass\b": "device_order_probe",
    r"\bneedle\b": "probe",
    r"\btorn\b": "partial",
    r"\b_deal\b": "_assign_axes",
    r"\b_give\b": "_assign_idle_axis",
    r"\bcore\.later\b": "core.deferred",
}
# This file lists the words.
EXEMPT = {"tools/plain_words.py"}


def found(path: str, text: str) -> list[str]:
    """Returns one line for each replaced word in a file's text."""
    lines = []
    for number, line in enumerate(text.splitlines(), 1):
        for pattern, better in REPLACED.items():
            for match in re.finditer(pattern, line):
                lines.append(f"{path}:{number}: '{match[0]}' was replaced by: {better}")
    return lines


def main() -> int:
    """Checks every tracked source file."""
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    wrong = []
    for path in listed:
        if path.endswith(SOURCES) and path not in EXEMPT and (ROOT / path).exists():
            wrong += found(path, (ROOT / path).read_text())
    print("\n".join(wrong), end="\n" if wrong else "")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
