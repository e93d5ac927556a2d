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


def one_fast(cases: Iterable[TransformCase], operators: tuple[str, ...] | None = None) -> list[Any]:
    """Returns test parameters for the cases, all but one of each operator marked slow.

    Args:
        cases: Those of an operator's variants begin with its name and "-". The first is fast.
        operators: The operators that have a fast case. Default: all.
    """
    seen: set[str] = set()
    params = []
    for case in cases:
        operator = case.name.split("-")[0]
        fast = operator not in seen and (operators is None or operator in operators)
        seen.add(operator)
        params.append(pytest.param(case, id=case.name, marks=[] if fast else [pytest.mark.slow]))
    return params
