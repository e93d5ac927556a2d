"""The examples in docstrings, README and the guides run, and the pages agree with their sources."""

from __future__ import annotations

import doctest
import importlib
import inspect
import pathlib
import re
import runpy
from typing import Any

import pytest
from support.marks import slow

import jax_dsa
from jax_dsa import nn, serving
from jax_dsa.core import ffi
from jax_dsa.ops.gated_pool import gated_pool_for_norm
from jax_dsa.ops.indexer import indexer_selected_logits

ROOT = pathlib.Path(__file__).parent.parent
# Classes that functions return. The examples of these functions show them.
RESULTS = ("BlockMask", "DSAAux", "HTreeSelection", "MqaDecodePlan")
PUBLIC = [
    getattr(jax_dsa, name)
    for name in jax_dsa.__all__
    if callable(getattr(jax_dsa, name)) and name not in RESULTS
] + [
    indexer_selected_logits,
    gated_pool_for_norm,
    nn.CompressedAttention,
    nn.DSAttention,
    nn.DecoderLM,
    nn.GroupedAttention,
    nn.fake_quantize_fp4,
    nn.from_hf,
    nn.load_hf,
    nn.rope,
    nn.sparse_from_hf,
    nn.sparse_hf_config,
    serving.PageAllocator,
]


@pytest.mark.parametrize("public", PUBLIC, ids=lambda x: x.__name__)
def test_docstring_example(public: Any) -> None:
    finder = doctest.DocTestFinder(recurse=False)
    text = inspect.getdoc(public) or ""
    (example,) = finder.find(inspect.unwrap(public), public.__name__, globs={}) or [None]
    assert example is not None and example.examples, f"{public.__name__} has no example: {text}"
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    runner.run(example)
    assert runner.failures == 0


PAGES = [
    "README.md",
    "docs/quickstart.md",
    slow("docs/tutorial.md"),
    slow("docs/training.md"),
    slow("docs/profiles.md"),
    slow("docs/dense_to_sparse.md"),
    slow("docs/meshes.md"),
    slow("docs/models.md"),
    slow("docs/serving.md"),
    *(slow(f"docs/ops/{path.name}") for path in sorted((ROOT / "docs" / "ops").glob("*.md"))),
]


@pytest.mark.parametrize("page", PAGES)
def test_page(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The Python blocks of the page run, one after the other.

    A block of text that follows one is what it prints. Numbers may differ by 0.1 or by 20%.
    """
    text = (ROOT / page).read_text()
    blocks = re.findall(r"```python\n(.*?)```(?:\n+```text\n(.*?)```)?", text, re.S)
    assert blocks
    names: dict[str, Any] = {}
    for code, output in blocks:
        exec(compile(code, page, "exec"), names)
        printed = capsys.readouterr().out
        if output:
            number = r"\d+\.\d+"
            assert re.sub(number, "", printed) == re.sub(number, "", output)
            got, want = ([float(x) for x in re.findall(number, t)] for t in (printed, output))
            assert got == pytest.approx(want, rel=0.2, abs=0.1), printed


def test_the_page_on_conversion_has_the_functions_of_the_example() -> None:
    page = (ROOT / "docs" / "dense_to_sparse.md").read_text()
    example = (ROOT / "examples" / "dense_to_sparse.py").read_text()
    functions = re.findall(r"^def .*?(?=\n\n\n)", example, re.M | re.S)
    shared = [
        f for f in functions if re.match(r"def (decoder|rest_of|load_rest|weights_of|save)", f)
    ]
    assert len(shared) == 5 and all(function in page for function in shared)


def test_the_notebook_has_the_code_of_the_tutorial() -> None:
    page = (ROOT / "docs" / "tutorial.md").read_text()
    cells = runpy.run_path(str(ROOT / "docs" / "notebook.py"))["notebook"](page)["cells"]
    code = [cell["source"] + "\n" for cell in cells if cell["cell_type"] == "code"]
    assert code == re.findall(r"```python\n(.*?)```", page, re.S)
    text = "".join(cell["source"] for cell in cells if cell["cell_type"] == "markdown")
    assert text.startswith("# Tutorial") and "```" not in text and "](" not in text


def test_the_first_page_links_every_page() -> None:
    """Pages about how the kernels were built are linked from the operators' pages."""
    docs = ROOT / "docs"
    pages = {path.name for path in docs.glob("*.md")} - {"index.md"}
    pages |= {f"ops/{path.name}" for path in (docs / "ops").glob("*.md")}
    links = re.findall(r"\]\(([\w/-]+\.md)\)", (docs / "index.md").read_text())
    assert pages == set(links)


def one_line(text: str) -> str:
    return " ".join(text.split())


def test_troubleshooting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each block of code raises the error below it. The page also has the messages about a missing
    or an incompatible extension.
    """
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    (setup,) = re.findall(r"```python\n(import.*?)```", page, re.S)
    errors = re.findall(r"```python\n(?!import)(.*?)```\s+```text\n(.*?)```", page, re.S)
    assert len(errors) == page.count("```python") - 1

    def missing(name: str) -> None:
        raise ModuleNotFoundError(name)

    with monkeypatch.context() as patch:
        patch.setattr(importlib, "import_module", missing)
        without = ffi._load()
    monkeypatch.setattr(ffi, "status", lambda: without)
    names: dict[str, Any] = {}
    exec(setup, names)
    for code, message in errors:
        kinds = TypeError, ValueError, NotImplementedError, serving.OutOfPagesError
        with pytest.raises(kinds) as raised:
            exec(code, names)
        assert f"{raised.type.__name__}: {raised.value}" == one_line(message)
    monkeypatch.undo()

    known = {
        "compute_capabilities": lambda: {(7, 5)},
        "cuda_versions": lambda: (13000, 13000),
        "tiers": lambda: ("hopper", "portable"),
    }
    extension = type("", (), known)
    monkeypatch.setattr(ffi, "extension", lambda: extension)
    monkeypatch.setattr(ffi, "_LOADED", (True, ""))
    monkeypatch.setattr(ffi, "_machine", ffi._machine.__wrapped__)
    for said in (ffi._incompatible((0, 4), (0, 3)), ffi.status()[1]):
        assert said in one_line(page)


def test_the_reference_has_every_public_name() -> None:
    page = (ROOT / "docs" / "reference.md").read_text()
    names = re.findall(r"^::: jax_dsa\.(\w+)$", page, re.M)
    assert len(names) == len(set(names))
    assert {*names, "__version__"} == set(jax_dsa.__all__)


@pytest.mark.parametrize("page", ["README.md", "docs/benchmarks.md"])
def test_tables_of_speeds_are_those_of_the_results(page: str) -> None:
    """`python docs/speed.py` renews them."""
    speed = runpy.run_path(str(ROOT / "docs" / "speed.py"))
    assert speed["renewed"](page) == (ROOT / page).read_text()


def test_where_we_lose_is_what_the_results_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """`python docs/first_page.py` renews it."""
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    page = runpy.run_path(str(ROOT / "docs" / "first_page.py"))
    if tables := page["measured"]():
        assert page["lost"](tables) in (ROOT / "docs" / "where-we-lose.md").read_text()

    def row(case: str, implementation: str, milliseconds: str) -> dict[str, str]:
        named = {"operator": "topk", "pass": "fwd", "dtype": "f32", "device": "GPU"}
        return named | {
            "case": case,
            "implementation": implementation,
            "milliseconds": milliseconds,
        }

    rows = [row("S8", "cuda", "2"), row("S8", "A", "4"), row("S8", "B", "1"), row("S8", "C", "3")]
    rows += [row("S9", "cuda", "0.5"), row("S9", "A", "0.6")]
    text = page["lost"]([rows])
    assert "| topk forward, S8 | B 1 ms | 2 ms | 0.50 | (1) |" in text and "S9" not in text


def test_the_drawings_are_those_of_their_script() -> None:
    """`python docs/drawings.py` renews them."""
    drawings = runpy.run_path(str(ROOT / "docs" / "drawings.py"))
    made = {f"mesh_{name}": drawings["mesh"](*x) for name, x in drawings["MESHES"].items()}
    made |= {name: drawings[name]() for name in ("flow", "block_lists")}
    for name, text in made.items():
        assert (ROOT / "docs" / "images" / f"{name}.svg").read_text() == text


def test_links() -> None:
    """All links lead to files and headings that exist."""

    def anchors(page: pathlib.Path) -> set[str]:
        headings = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
        return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}

    dead = []
    for page in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")):
        for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
            if link.startswith("http"):
                continue
            path, _, anchor = link.partition("#")
            target = page.parent / path if path else page
            if target.suffix == ".ipynb":  # The build makes it of the page.
                target = target.with_suffix(".md")
            if not target.exists() or (anchor and anchor not in anchors(target)):
                dead.append(f"{page.name}: {link}")
    assert not dead
