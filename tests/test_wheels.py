"""`make wheel` tries its tools before it builds anything."""

from __future__ import annotations

import pathlib
import sys
from typing import TYPE_CHECKING

import pytest
from support.scripts import load_script

if TYPE_CHECKING:
    from types import ModuleType

VERSION = f"{sys.version_info[0]}.{sys.version_info[1]}"


@pytest.fixture(name="wheels")
def fixture_wheels(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return load_script("tools/wheels.py", monkeypatch)


@pytest.fixture(name="tools")
def fixture_tools(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """A PATH with an nvcc and the Pythons that the build needs, in place of the machine's own."""
    for version in ("3.11", "3.12"):
        write(tmp_path / f"python{version}", f"echo {version}")
    write(tmp_path / "nvcc", "echo release 13.0")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDACXX", raising=False)
    return tmp_path


def write(path: pathlib.Path, command: str) -> None:
    path.write_text(f"#!/bin/sh\n{command}\n")
    path.chmod(0o755)


def test_tools_that_run(wheels: ModuleType, tools: pathlib.Path) -> None:
    wheels.check_tools(wheels.PYTHONS, compiles=True)
    (tools / "nvcc").rename(tools / "another")
    wheels.check_tools(wheels.PYTHONS, compiles=False)


def test_the_running_python_passes(wheels: ModuleType, tools: pathlib.Path) -> None:
    (tools / f"python{VERSION}").unlink(missing_ok=True)
    write(tools / f"python{VERSION}", f'exec "{sys.executable}" "$@"')
    wheels.check_tools([VERSION], compiles=False)


@pytest.mark.parametrize(
    ("tool", "command", "problem"),
    [
        ("python3.12", "echo no such version >&2; exit 127", "exit status 127: no such version"),
        ("python3.12", "exit 1", "exit status 1: it printed nothing"),
        ("python3.12", "echo 3.13", "is Python 3.13"),
        ("python3.11", None, "not found on PATH"),
        ("nvcc", "exit 2", "exit status 2"),
        ("nvcc", None, "not found on PATH"),
    ],
)
def test_a_tool_that_does_not_run_stops_the_build_at_once(
    wheels: ModuleType,
    tools: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    tool: str,
    command: str | None,
    problem: str,
) -> None:
    (tools / tool).unlink()
    if command is not None:
        write(tools / tool, command)
    monkeypatch.setattr(sys, "argv", ["wheels.py"])
    monkeypatch.setattr(wheels, "DIST", tools / "dist")
    (tools / "dist").mkdir()
    with pytest.raises(SystemExit, match=f"{tool}: {problem}"):
        wheels.main()
    assert (tools / "dist").exists()  # The wheels of an earlier build are kept.


def test_a_file_that_is_no_program(wheels: ModuleType, tools: pathlib.Path) -> None:
    (tools / "python3.12").write_bytes(b"\x7fELF")
    with pytest.raises(SystemExit, match=r"python3.12: does not run"):
        wheels.check_tools(wheels.PYTHONS, compiles=True)
