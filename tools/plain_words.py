"""Rejects words that were replaced by the field's terms: `python tools/plain_words.py`.

The check reads identifiers, comments and text of every tracked source file and Markdown page, and
prints file, line, the word and its replacement. docs/conventions.md has the glossary.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
SOURCES = (".py", ".cu", ".cuh", ".h", ".cc")
# The changelog and the history of the kernels may name what was replaced.
LOGS = ("CHANGELOG.md", "docs/design/history/")

# Expressions for the paths in which a word is replaced.
ANYWHERE = ""
CODE = r"\.(py|cu|cuh|h|cc)$"
PYTHON = r"\.py$"
KERNELS = r"^(cuda|ffi|tests/kernels)/"
LATENT_ATTENTION = r"^cuda/(mla/|mqa_decode/|sparse_mla/(?!bwd))"


class Replaced(NamedTuple):
    """A word that was replaced, by a pattern."""

    pattern: str
    better: str  # what to write instead
    where: str = ANYWHERE  # the word is replaced in paths in which this expression is found
    allowed: tuple[str, ...] = ()  # files and folders that may have the word all the same


# A word that also has a common meaning is listed only as the identifier that it was, or only for
# the folders in which it had another meaning.
REPLACED = (
    # Names of functions and constants of the kernels.
    Replaced(r"\bkMostProcessors\b", "kMaxSms"),
    Replaced(r"\bprocessors\b", "num_sms, SMs", CODE),
    Replaced(r"\blaunch_behind\b", "launch_pdl"),
    Replaced(r"\blet_next_begin\b", "launch_dependents"),
    Replaced(r"\bwait_for_previous\b", "grid_dependency_wait"),
    Replaced(r"\bhidden_one\b", "opaque_one"),
    # Words of the kernels' scheduling. The expressions also match a word inside an identifier.
    Replaced(
        r"(?<![A-Za-z])tickets?(?![a-z])|Tickets?(?![a-z])",
        "tile index",
        KERNELS,
    ),
    Replaced(
        r"(?<![A-Za-z])teams?(?![a-z])|Teams?(?![a-z])",
        "CTA group, thread group",
        KERNELS,
    ),
    Replaced(r"\bShareFinder\b|\bShare\b", "WorkRange", KERNELS),
    Replaced(r"\b(item_count|first_item)\b", "work tile", KERNELS),
    Replaced(r"_parts?\b", "split", LATENT_ATTENTION),
    Replaced(r"\bgates\b", "relu_mask", r"^(cuda|ffi)/indexer"),
    Replaced(r"\bmerge(_kernel|_parts|\.cuh)", "combine", KERNELS),
    Replaced(r"\brested\b", "unthrottled", r"^(README\.md|docs/[^/]*)$"),
    # Names in Python.
    Replaced(r"\bwhy_not\b", "unsupported_reason"),
    Replaced(r"\bqueries_first\b", "prefer_query_sharding"),
    Replaced(r"\bcompass\b", "device_order_probe", CODE),
    Replaced(r"\bneedle\b", "probe", CODE),
    Replaced(r"\btorn\b", "partial", CODE),
    Replaced(r"\b_deal\b", "_assign_axes"),
    Replaced(r"\b_give\b", "_assign_idle_axis"),
    Replaced(r"\bcore[./]later\b", "core.deferred"),
    Replaced(r"\bclass Later\b|\bLater[\[(]", "Deferred", PYTHON),
    Replaced(r"(?<!\.)\bresolved\(", "materialize", PYTHON),
    Replaced(r"\b(ROOMS|DOORS|FLOORS|HOUSE)\b", "MODULES, LAYERS", PYTHON),
    # Public names that are deprecated.
    Replaced(
        r"\bcaches?\.room\b|Cache\.room\b|\bdef room\b",
        "free_tokens",
        allowed=("jax_dsa/ops/cache/api.py", "jax_dsa/ops/htree/cache.py", "tests/test_caches.py"),
    ),
    Replaced(r"\bSparseMLA\b", "MLA", allowed=("jax_dsa/nn/__init__.py", "tests/test_nn.py")),
)
# These files list the words.
LISTS = {"tools/plain_words.py", "tests/test_plain_words.py"}


def is_checked(path: str) -> bool:
    """Returns whether the check reads a file."""
    if path in LISTS:
        return False
    return path.endswith(SOURCES) or (path.endswith(".md") and not path.startswith(LOGS))


def found(path: str, text: str) -> list[str]:
    """Returns one line for each replaced word in a file's text."""
    words = [
        word
        for word in REPLACED
        if re.search(word.where, path) and not path.startswith(word.allowed)
    ]
    return [
        f"{path}:{number}: '{match[0]}' was replaced by: {word.better}"
        for number, line in enumerate(text.splitlines(), 1)
        for word in words
        for match in re.finditer(word.pattern, line)
    ]


def main() -> int:
    """Checks every tracked file and returns the exit status."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split("\0")
    wrong = []
    for path in listed:
        if is_checked(path) and (ROOT / path).exists():
            wrong += found(path, (ROOT / path).read_text())
    print("\n".join(wrong), end="\n" if wrong else "")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
