"""Runs tests with pytest and the interpreter that the repository @python found."""

load("@python//:defs.bzl", "PYTHON")

_LAUNCHER = """#!/bin/sh
cd "$TEST_SRCDIR/$TEST_WORKSPACE" || exit 1
export HOME="$TEST_TMPDIR" PYTHONDONTWRITEBYTECODE=1 PYTHONPATH="$PWD"
exec '{python}' -m pytest -p no:cacheprovider -q --rootdir "$PWD" -m "not slow" {srcs} "$@"
"""

def _pytest_test(ctx):
    launcher = ctx.actions.declare_file(ctx.label.name + ".sh")
    ctx.actions.write(
        launcher,
        _LAUNCHER.format(python = PYTHON, srcs = " ".join([x.short_path for x in ctx.files.srcs])),
        is_executable = True,
    )
    files = ctx.files.srcs + ctx.files.data
    return [DefaultInfo(executable = launcher, runfiles = ctx.runfiles(files = files))]

pytest_test = rule(
    implementation = _pytest_test,
    doc = "Runs the tests of some files, except those marked slow.",
    attrs = {
        "data": attr.label_list(allow_files = True, doc = "The files that the tests read or import."),
        "srcs": attr.label_list(allow_files = [".py"], mandatory = True),
    },
    test = True,
)
