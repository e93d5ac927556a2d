"""Errors that name the extra which brings a missing optional dependency."""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys
import tomllib

import pytest

ROOT = pathlib.Path(__file__).parent.parent
PROGRAM = """
import sys

class Hide:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == {hidden!r}:
            raise ModuleNotFoundError(f"No module named '{{name}}'", name=name)

sys.meta_path.insert(0, Hide())
import jax_dsa
try:
    {statement}
except ModuleNotFoundError as error:
    print(type(error.__cause__).__name__, error.name, error)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("statement", "hidden", "message"),
    [
        ("jax_dsa.nn", "flax", "jax_dsa.nn needs 'flax', which the extra 'flax' brings"),
        ("import jax_dsa.nn", "flax", "jax_dsa.nn needs 'flax', which the extra 'flax' brings"),
        ("jax_dsa.training", "flax", "jax_dsa.training needs 'flax', which the extra 'flax'"),
        (
            "import jax_dsa.training",
            "optax",
            "jax_dsa.training needs 'optax', which the extra 'flax'",
        ),
        (
            "import jax_dsa.bench.__main__",
            "tqdm",
            "jax_dsa.bench needs 'tqdm', which the extra 'be",
        ),
        (
            "from jax_dsa.bench import report; report.write_plot([], None)",
            "matplotlib",
            "jax_dsa.bench --plot needs 'matplotlib', which the extra 'bench' brings",
        ),
        (
            "from jax_dsa.training import trainer; from pathlib import Path; "
            "trainer.Log(Path('x'), tensorboard=Path('x'))",
            "tensorboardX",
            "--tensorboard needs 'tensorboardX', which the extra 'tensorboard' brings",
        ),
        (
            "import jax_dsa.training.cli",
            "orbax",
            "jax_dsa.training.cli needs 'orbax', which the extra 'examples' brings",
        ),
    ],
)
def test_a_missing_extra_is_named(statement, hidden, message):
    program = PROGRAM.format(statement=statement, hidden=hidden)
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith(f"ModuleNotFoundError {hidden}") and message in run.stdout
    assert "pip install 'jax_dsa[" in run.stdout


def test_the_quickstart_lists_the_extras():
    page = (ROOT / "docs" / "quickstart.md").read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    rows = dict(re.findall(r"^\| (`.*?`) \| .* \| (.*) \|$", page, re.M))
    listed = {name: cell for names, cell in rows.items() for name in re.findall(r"\w+", names)}
    assert listed.keys() == extras.keys()
    for name in extras.keys() - {"cuda12", "cuda13", "dev"}:
        packages = [re.match(r"[\w-]+", requirement)[0] for requirement in extras[name]]
        assert re.findall(r"`([\w-]+)", listed[name]) == packages
