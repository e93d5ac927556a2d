"""A hook of `mkdocs build` that makes the tutorial a notebook and runs it.

The page docs/tutorial.md is the only source. Its blocks of Python become code cells, and the text
between them becomes Markdown cells. The notebook holds what its own run printed, so the page's
blocks of expected output are left out. If a cell raises an error, the build fails.
"""

from __future__ import annotations

import functools
import json
import pathlib
import re
from typing import Any

ROOT = pathlib.Path(__file__).parent.parent
PAGE = ROOT / "docs" / "tutorial.md"


def notebook(page: str) -> dict[str, Any]:
    """Returns the notebook of a page, in the format of nbformat 4."""
    cells: list[dict[str, Any]] = []
    # Links to other pages lead nowhere outside of the site.
    page = re.sub(r"\[([^\]]*)\]\((?!http)[^)]*\)", r"\1", page)
    page = re.sub(r"```text\n.*?```\n", "", page, flags=re.S)
    for i, part in enumerate(re.split(r"```python\n(.*?)```", page, flags=re.S)):
        if part := part.strip("\n"):
            cell = {"cell_type": "markdown", "id": str(len(cells)), "metadata": {}, "source": part}
            if i % 2:
                cell |= {"cell_type": "code", "execution_count": None, "outputs": []}
            cells.append(cell)
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}


@functools.cache
def executed(page: str) -> str:
    """Returns the notebook of a page as JSON, with the results of its cells.

    Raises:
        CellExecutionError: If a cell raises an error.
    """
    import nbformat
    from nbclient import NotebookClient
    from traitlets.config import Config

    node = nbformat.from_dict(notebook(page))
    no_ports = Config(KernelManager={"transport": "ipc"})
    place = {"metadata": {"path": str(ROOT)}}
    NotebookClient(node, config=no_ports, timeout=600, resources=place).execute()
    for cell in node.cells:
        cell.metadata.pop("execution", None)  # Times of day.
        if cell.cell_type == "code":
            cell.outputs = [x for x in cell.outputs if x.get("name") != "stderr"]
    nbformat.validate(node)
    return json.dumps(node, indent=1)


def on_files(files: Any, config: Any) -> Any:
    """Adds the notebook to the files of the site."""
    from mkdocs.structure.files import File

    content = executed(PAGE.read_text())
    files.append(File.generated(config, "tutorial.ipynb", content=content))
    return files
