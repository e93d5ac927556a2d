"""`experiments/rounded_output.py` at a small size."""

from __future__ import annotations

from support import repository  # noqa: F401

from experiments import rounded_output


def test_sharper_scores_have_larger_errors(capsys):
    results = rounded_output.main(["--queries", "32", "--heads", "4"])
    errors = [error for error, *_ in results.values()]
    assert errors == sorted(errors)
    assert 1e-4 < errors[0] < 2e-3
    assert errors[-1] < 2e-2
    assert len(capsys.readouterr().out.splitlines()) == 1 + len(results)
