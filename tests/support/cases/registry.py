"""All cases of all operators."""

from __future__ import annotations

import importlib
import pathlib

from support.cases import TransformCase

OPERATORS = sorted(
    p.stem
    for p in pathlib.Path(__file__).parent.glob("*.py")
    if p.stem not in ("__init__", "registry")
)
CASES: list[TransformCase] = [
    case for op in OPERATORS for case in importlib.import_module(f"support.cases.{op}").CASES
]
