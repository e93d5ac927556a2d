"""All cases of all operators, and which of them `make test` runs."""

from __future__ import annotations

import importlib
import pathlib
from typing import TYPE_CHECKING, Any

import pytest

from support.cases import TransformCase

if TYPE_CHECKING:
    from collections.abc import Iterable

FILES = sorted(
    p.stem
    for p in pathlib.Path(__file__).parent.glob("*.py")
    if p.stem not in ("__init__", "registry")
)
CASES: list[TransformCase] = [
    case for file in FILES for case in importlib.import_module(f"support.cases.{file}").CASES
]


def one_fast(cases: Iterable[TransformCase]) -> list[Any]:
    """Returns test parameters for the cases; all but the first of each operator are slow."""
    seen: set[str] = set()
    params = []
    for case in cases:
        operator = case.name.split("-")[0]
        marks = [pytest.mark.slow] if operator in seen else []
        seen.add(operator)
        params.append(pytest.param(case, id=case.name, marks=marks))
    return params
