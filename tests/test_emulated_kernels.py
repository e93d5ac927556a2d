"""The CUDA kernels on the CPU emulator: small cases of every kernel, all cases, and races.

No GPU is needed. A few small cases of every program are run by `make test`, the other tests by
`make test-op` for one operator and by `make test-all`.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
from support.emulator import PATTERNS, PROGRAMS, RACES, build, races, run
from support.marks import slow

if TYPE_CHECKING:
    from pathlib import Path

every_program = pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.stem)

# Even the small cases of these programs take more than a minute. `make test` runs the portable
# kernels of attn_dist, of decoding, of the forward passes of masked and sparse attention, and each
# part of the warm-up loss.
LONG = (
    "htree_bwd_portable",
    "losses_dense_portable",
    "masked_attention_bwd_portable",
    "sparse_attention_bwd_portable",
    "sparse_mla_portable",
)


def assert_all_good(binary: Path, *arguments: str) -> None:
    ran = run(binary, *arguments)
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-1000:]
    assert "all good" in ran.stdout


@pytest.mark.parametrize(
    "program",
    [slow(p, id=p.stem) if p.stem in LONG else pytest.param(p, id=p.stem) for p in PROGRAMS],
)
def test_small_cases_on_the_emulator(program: Path, tmp_path: Path) -> None:
    assert_all_good(build(program, tmp_path / program.stem), "small")


@pytest.mark.slow
@every_program
def test_kernels_on_the_emulator(program: Path, tmp_path: Path) -> None:
    assert_all_good(build(program, tmp_path / program.stem))


@pytest.mark.slow
@every_program
def test_kernels_have_no_races(program: Path, tmp_path: Path) -> None:
    binary = build(program, tmp_path / program.stem, *RACES)
    ran = run(binary)
    assert ran.returncode == 0, ran.stdout[-4000:]
    assert not races(binary, ran.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("race", [False, True], ids=["right", "race"])
@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda p: p.stem)
def test_a_race_is_found_in_a_pattern_that_has_one(
    pattern: Path, race: bool, tmp_path: Path
) -> None:
    """The patterns are those for which compute-sanitizer reports races that are none."""
    binary = build(pattern, tmp_path / pattern.stem, *RACES, *(["-DRACE"] if race else []))
    ran = run(binary)
    assert ran.returncode == 0, ran.stdout
    assert (re.search(r"^0 of \d+ values wrong", ran.stdout, re.M) is None) == race
    assert bool(found := races(binary, ran.stdout)) == race, found
