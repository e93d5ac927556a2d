"""Loads a script of this repository, which is in no package, so that a test can run it."""

from __future__ import annotations

import importlib.util
import pathlib
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import ModuleType

    import pytest

ROOT = pathlib.Path(__file__).parent.parent.parent


def load_script(path: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Returns the script's module, which can import its neighbours.

    Args:
        path: The script's path in the repository.
        monkeypatch: Forgets the module at the end of the test.
    """
    script = ROOT / path
    spec = importlib.util.spec_from_file_location(f"script_{script.stem}", script)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.syspath_prepend(str(script.parent))
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module
