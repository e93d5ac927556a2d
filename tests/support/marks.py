"""Marks of single test parameters."""

from __future__ import annotations

from typing import Any

import pytest


def slow(*values: Any, id: str | None = None) -> Any:
    """Returns a test parameter that `make test` leaves out."""
    return pytest.param(*values, id=id, marks=pytest.mark.slow)
