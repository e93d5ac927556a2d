"""A plugin of pytest that writes every result to a file as soon as it is known.

    pytest -p pytest_results --results FILE -n 4

Each line of the file is a JSON object: the number of tests that were selected, or a test with its
outcome and the reason. So the results survive if pytest is killed. With pytest-xdist only the
controlling process writes. tools/gpu_tests.py uses the plugin.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest


class _Writer:
    """The hooks that see results."""

    def __init__(self, path: Path) -> None:
        self.file = path.open("w", buffering=1)

    def write(self, **record: Any) -> None:
        self.file.write(json.dumps(record) + "\n")

    def pytest_xdist_node_collection_finished(self, ids: Sequence[str]) -> None:
        """Writes how many tests a worker selected. All workers select the same tests."""
        self.write(selected=len(ids))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Writes an outcome. Setup and teardown count only if they fail or skip."""
        if report.passed and report.when != "call":
            return
        reason = report.longrepr
        if report.skipped:  # the place and the reason, or the exception of a failure that must be
            reason = reason[2] if isinstance(reason, tuple) else "expected failure"
        self.write(test=report.nodeid, outcome=report.outcome, reason=str(reason or ""))


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the option --results."""
    parser.addoption("--results", type=Path, help="file to write every result to, as JSON")


def pytest_configure(config: pytest.Config) -> None:
    """Registers the hooks, except in the workers of pytest-xdist."""
    if config.option.results is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Writer(config.option.results))
