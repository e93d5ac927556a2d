"""Runs the tests marked `gpu` in every tier, on all GPUs of this machine.

    python tools/gpu_tests.py [--limit 540] [--configurations hopper portable-99] [-- -k topk]

Each configuration is a run of pytest on one GPU, with many workers. Configurations wait until a GPU
is free. The last one, `several`, is left out on a machine with one GPU: it has the tests marked
`several_gpus`, runs alone and uses all GPUs. Arguments after `--` go to pytest.

For each configuration the folder --output receives pytest's output (NAME.log) and every result
(NAME.jsonl) while the tests run. The script prints a row when a configuration ends, then the
failures, the reasons of skipped tests and a table. The exit status is 1 if a test failed or was not
run, or if all tests of a configuration were skipped.

The tests run with the package that Python finds without this folder: an editable installation, or a
wheel. JAX's compilation cache is shared, because all tiers compile the same programs.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from gpu_queue import (
    CONFIGURATIONS,
    End,
    Task,
    cores,
    interrupt_on_signals,
    run_tasks,
    visible_gpus,
)

ROOT = Path(__file__).resolve().parent.parent
PYTEST = [sys.executable, "-m", "pytest"]
SEVERAL = "several"
MOST_WORKERS = 14  # on one GPU, whose memory they share
STATUS = """
import sys, jax_dsa
from jax_dsa.core import ffi
available, why = ffi.status()
print(f"jax_dsa {jax_dsa.__version__} in {jax_dsa.__path__[0]}", *[] if available else [why])
sys.exit(not available)
"""


@dataclasses.dataclass
class Results:
    """The results of one configuration."""

    selected: int = 0
    passed: set[str] = dataclasses.field(default_factory=set)
    failed: dict[str, str] = dataclasses.field(default_factory=dict)  # test -> traceback
    skipped: dict[str, str] = dataclasses.field(default_factory=dict)  # test -> reason

    @property
    def not_run(self) -> int:
        """How many tests have no result."""
        return max(0, self.selected - len({*self.passed, *self.failed, *self.skipped}))


def read_results(path: Path) -> Results:
    """Returns what tools/pytest_results.py wrote. The last line may be incomplete."""
    results = Results()
    for line in path.read_text().splitlines(keepends=True) if path.exists() else []:
        if not line.endswith("\n"):
            break
        record = json.loads(line)
        if "selected" in record:
            results.selected = record["selected"]
        elif record["outcome"] == "passed":
            results.passed.add(record["test"])
        else:
            outcomes = results.failed if record["outcome"] == "failed" else results.skipped
            outcomes[record["test"]] = record["reason"]
    results.passed -= results.failed.keys()  # a teardown may fail after the test
    return results


@dataclasses.dataclass(frozen=True)
class Row:
    """The row of a configuration in the table."""

    name: str
    end: End
    results: Results

    @property
    def status(self) -> str:
        """What is wrong, or `ok`, or `nothing selected`."""
        r = self.results
        if self.end.status:
            return self.end.status
        if self.end.exit_status == 5 and r.selected == 0:  # pytest.ExitCode.NO_TESTS_COLLECTED
            return "nothing selected"
        if r.failed:
            return "failed"
        if r.skipped and not r.passed:
            return "all skipped"
        if self.end.exit_status != 0:
            return f"exit status {self.end.exit_status}"
        return "incomplete" if r.not_run else "ok"

    def cells(self) -> tuple[str, ...]:
        """Returns the contents of the row."""
        r = self.results
        # How many tests there are is unknown until a worker has collected them.
        not_run = r.not_run if r.selected or self.status == "nothing selected" else "all"
        counts = (len(r.passed), len(r.failed), len(r.skipped), not_run)
        return (
            self.name,
            self.end.gpus,
            *map(str, counts),
            f"{self.end.seconds:.0f} s",
            self.status,
        )


def make_task(name: str, options: argparse.Namespace, workers: int, pytest: list[str]) -> Task:
    """Returns the run of pytest for a configuration."""
    results = options.output / f"{name}.jsonl"
    results.unlink(missing_ok=True)
    marks = "gpu and several_gpus" if name == SEVERAL else "gpu"
    command = [*PYTEST, "-m", marks, "-n", str(workers), "--dist", "worksteal", "-rfE"]
    command += ["--tb=short", "-p", "pytest_results", "--results", str(results), *pytest]
    environment = dict(CONFIGURATIONS["hopper" if name == SEVERAL else name])
    environment |= python_path() | {
        "JAX_COMPILATION_CACHE_DIR": options.cache,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "PYTHONUNBUFFERED": "1",
    }
    return Task(name, command, options.output / f"{name}.log", environment)


def python_path() -> dict[str, str]:
    """Returns the environment in which Python finds the plugin, but not the checkout's jax_dsa.

    Otherwise the checkout, which has no extension, would hide an installed wheel.
    """
    paths = [str(ROOT / "tools"), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def check_kernels() -> None:
    """Prints which package the tests will use. Exits if its kernels are not available."""
    command = [sys.executable, "-c", STATUS]
    if subprocess.run(command, env=os.environ | python_path()).returncode != 0:
        sys.exit("no kernels to test")


def summarize(rows: list[Row]) -> bool:
    """Prints failures, reasons and the table, and returns whether all is well."""
    for row in rows:
        for test, text in row.results.failed.items():
            errors = re.findall(r"^E +(.*)", text, re.M) or text.splitlines() or [""]
            print(f"{row.name}: {test}: {errors[0][:200]}")
    for row in rows:
        for reason, count in Counter(row.results.skipped.values()).most_common():
            print(f"{row.name}: {count} skipped: {reason.removeprefix('Skipped: ')[:200]}")
    heads = ("configuration", "GPU", "passed", "failed", "skipped", "not run", "time", "status")
    print("\n" + "\n".join(f"| {' | '.join(x)} |" for x in (heads, ("---",) * len(heads))))
    for row in rows:
        print(f"| {' | '.join(row.cells())} |")
    passed = any(row.results.passed for row in rows)
    return passed and all(row.status in ("ok", "nothing selected") for row in rows)


def main(arguments: list[str]) -> int:
    """Runs the configurations and prints the results."""
    start = time.monotonic()
    own, pytest = arguments, list[str]()
    if "--" in arguments:
        own = arguments[: arguments.index("--")]
        pytest = arguments[len(own) + 1 :]
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], usage="%(prog)s [options] [-- arguments of pytest]"
    )
    names = (*CONFIGURATIONS, SEVERAL)
    parser.add_argument("--configurations", nargs="+", choices=names, help="default: all")
    parser.add_argument(
        "--workers",
        type=int,
        help=f"workers per GPU; default: cores / GPUs, at most {MOST_WORKERS}",
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=ROOT / "build" / "gpu_tests",
        help="folder of the logs and results; default: build/gpu_tests",
    )
    parser.add_argument(
        "--limit", type=float, default=math.inf, help="stop everything after so many seconds"
    )
    parser.add_argument(
        "--cache",
        default=os.environ.get("JAX_COMPILATION_CACHE_DIR")
        or os.path.join(tempfile.gettempdir(), "jax_dsa_gpu_tests"),
        help="folder of JAX's compilation cache",
    )
    options = parser.parse_args(own)
    options.output = options.output.resolve()
    gpus = visible_gpus()
    chosen = options.configurations or [n for n in names if n != SEVERAL or len(gpus) > 1]
    check_kernels()
    single = [name for name in chosen if name != SEVERAL]
    busy = max(1, min(len(gpus), len(single)))
    workers = options.workers or max(1, min(MOST_WORKERS, cores() // busy))
    print(f"{', '.join(chosen)}: GPUs {', '.join(gpus)}, {workers} workers, {options.output}")

    rows: list[Row] = []

    def ended(task: Task, end: End) -> None:
        rows.append(Row(task.name, end, read_results(options.output / f"{task.name}.jsonl")))
        name, gpu, passed, failed, skipped, not_run, seconds, status = rows[-1].cells()
        counts = f"{passed} passed, {failed} failed, {skipped} skipped, {not_run} not run"
        print(f"{name:12}  GPU {gpu}  {counts}  {seconds}  {status}", flush=True)

    os.chdir(ROOT)
    until = start + options.limit
    tasks = {name: make_task(name, options, workers, pytest) for name in chosen}
    several = [tasks.pop(SEVERAL)] if SEVERAL in tasks else []
    complete = run_tasks(tasks.values(), gpus, until, ended)
    run_tasks(several, [",".join(gpus)], until if complete else 0, ended)
    good = summarize(sorted(rows, key=lambda row: chosen.index(row.name)))
    return int(not good)


if __name__ == "__main__":
    interrupt_on_signals()
    sys.exit(main(sys.argv[1:]))
