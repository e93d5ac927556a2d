"""Eight thousand calls of the fuzzer. `python -m fuzz --help`, in this folder, explains more."""

from __future__ import annotations

import fuzz
import pytest

CALLS = 8_000


@pytest.mark.slow
@pytest.mark.parametrize("operator", fuzz.ALL)
def test_fuzz(operator: str, seed: int) -> None:
    calls = CALLS // len(fuzz.ALL)
    outcomes = [case.run() for case in fuzz.cases(calls, seed, operators=(operator,))]
    wrong = [outcome for outcome in outcomes if outcome not in fuzz.RIGHT]
    assert not wrong, "\n".join([f"{len(wrong)} of {len(outcomes)} are wrong", *wrong])
