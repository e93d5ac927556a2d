"""`make lint` rejects words that were replaced: it finds planted ones, and none in this tree."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from support.scripts import load_script

if TYPE_CHECKING:
    from types import ModuleType


@pytest.fixture(name="plain_words")
def fixture_plain_words(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return load_script("tools/plain_words.py", monkeypatch)


@pytest.mark.parametrize(
    ("path", "line", "word"),
    [
        ("cuda/topk/topk.cu", "return launch_behind(stream);", "launch_behind"),
        ("cuda/common/any.cuh", "// The block takes the next ticket.", "ticket"),
        ("cuda/common/any.cuh", "const int next_ticket = 0;", "ticket"),
        ("tests/kernels/gpu/any.cu", "constexpr int kMaxTeams = 4;", "Teams"),
        ("ffi/any.cc", "int team_rank;", "team"),
        ("cuda/mla/rows.cuh", "int max_parts;", "_parts"),
        ("cuda/mqa_decode/combine.cuh", "void merge_kernel() {}", "merge_kernel"),
        ("jax_dsa/core/any.py", "    return why_not(options)", "why_not"),
        ("jax_dsa/core/any.py", "class Later:", "class Later"),
        ("jax_dsa/core/any.py", "operands = resolved(operands)", "resolved("),
        ("tests/test_any.py", "FLOORS = ('core', 'ops')", "FLOORS"),
        ("jax_dsa/serving/any.py", "n = cache.room", "cache.room"),
        ("docs/which.md", "Use `nn.SparseMLA`.", "SparseMLA"),
        ("docs/benchmarks.md", "loaded and rested", "rested"),
    ],
)
def test_a_planted_word_is_found(plain_words: ModuleType, path: str, line: str, word: str) -> None:
    assert plain_words.is_checked(path)
    (finding,) = plain_words.found(path, f"first line\n{line}\n")
    assert finding.startswith(f"{path}:2: '{word}' was replaced by: ")


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("cuda/mla/rows.cuh", "// Parts of a row are partial; a merged list is sorted. Steam."),
        ("jax_dsa/core/any.py", "# Later calls reuse what was resolved; path.resolved() is final."),
        ("jax_dsa/core/any.py", "# The team deals with ripped pages and gives room to others."),
        ("docs/which.md", "A compass needle, a ticket, two processors: ordinary English."),
        ("jax_dsa/ops/gated_pool/api.py", "# gates scale the values"),
    ],
)
def test_ordinary_english_passes(plain_words: ModuleType, path: str, line: str) -> None:
    assert plain_words.found(path, line) == []


def test_a_word_may_be_allowed_in_a_file(plain_words: ModuleType) -> None:
    assert plain_words.found("jax_dsa/nn/__init__.py", "SparseMLA") == []
    assert not plain_words.is_checked("CHANGELOG.md")
    assert not plain_words.is_checked("docs/design/history/topk.md")
    assert plain_words.is_checked("docs/machinery.md")


def test_this_tree_has_no_replaced_words(
    plain_words: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plain_words.main() == 0, capsys.readouterr().out
