"""Times all implementations of each operator, and compares them with ceilings of the same run.

Times are device times, without Python's dispatch. Rows are printed and written one by one.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import pathlib
import re
import sys
from typing import TYPE_CHECKING, Any

import jax

from jax_dsa.bench import report, timing
from jax_dsa.bench.case import shrunk
from jax_dsa.bench.ceilings import ceilings
from jax_dsa.bench.external import TOLERANCE, DisagreementError, ExternalCall
from jax_dsa.bench.registry import OPERATORS
from jax_dsa.core import ffi
from jax_dsa.core.extras import needs_extra

with needs_extra("bench", "jax_dsa.bench"):
    from tqdm import tqdm

if TYPE_CHECKING:
    from collections.abc import Callable

    from jax_dsa.bench.case import Case
    from jax_dsa.bench.report import Row

    Function = Callable[..., Any]

PORTABLE = "portable"  # our portable kernels, on a Hopper GPU


def _parse(argv: list[str] | None, operators: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m jax_dsa.bench", description=__doc__)
    parser.add_argument("operators", nargs="*", metavar="operator", help=", ".join(operators))
    parser.add_argument("--list", action="store_true", help="list the cases and stop")
    parser.add_argument(
        "--only", default="", metavar="REGEX", help="measure only the lines of --list that match"
    )
    parser.add_argument(
        "--peers",
        action="store_true",
        help="measure only the cases that other libraries have too, with our kernels and with all "
        "libraries that can be imported; needs a checkout of the repository",
    )
    parser.add_argument(
        "--csv",
        type=pathlib.Path,
        metavar="PATH",
        help="a .csv file, or a folder that gets one file per operator",
    )
    parser.add_argument("--plot", type=pathlib.Path, metavar="FILE.png")
    parser.add_argument(
        "--scale",
        type=_positive(int),
        default=1,
        help="divide long axes by this, for machines without a GPU",
    )
    parser.add_argument(
        "--seconds",
        type=_positive(float),
        default=0.3,
        help="length of each of the five measurements",
    )
    parser.add_argument(
        "--rest",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="idle time before each measurement; with a short --seconds the device then runs "
        "unthrottled, because it lowers its clock only under steady load",
    )
    parser.add_argument(
        "--commit", default=report.commit(), help="the commit for the CSV (default: ask git)"
    )
    args = parser.parse_args(argv)
    unknown = set(args.operators) - set(operators)
    if unknown:
        parser.error(f"no operator {', '.join(sorted(unknown))}; there are {', '.join(operators)}")
    args.library_calls, args.absent = _libraries(parser) if args.peers else (None, [])
    return args


def _positive(number: type) -> Callable[[str], Any]:
    """Returns a parser of positive numbers."""

    def parse(text: str) -> Any:
        value = number(text)
        if not value > 0:
            raise argparse.ArgumentTypeError(f"{text} is not positive")
        return value

    return parse


def _libraries(
    parser: argparse.ArgumentParser,
) -> tuple[Callable[[Case], dict[str, ExternalCall]], list[str]]:
    """Imports the other libraries.

    Returns:
        A function that returns their calls for a case, by name, and a line of text for each library
        that cannot be imported.
    """
    try:
        peers = importlib.import_module("benchmarks.peers")
    except ModuleNotFoundError as error:
        if error.name not in ("benchmarks", "benchmarks.peers"):
            raise
        parser.error(
            "--peers needs the repository, because the wheel does not contain benchmarks/peers; "
            "run this command in the root of a checkout"
        )
    found, absent = peers.available()
    return functools.partial(peers.calls_for, peers=found), absent


def _implementations(
    case: Case, library_calls: Callable[[Case], dict[str, ExternalCall]] | None
) -> dict[str, Function]:
    """Returns the implementations of a case, by name, as functions of its arguments.

    With `library_calls` these are our kernel and other libraries, or nothing if no other library
    has the case. Otherwise they are our implementations and those that the case brings along.
    """

    def own(name: str) -> Function:
        return functools.partial(case.call, implementation=name)

    on_gpu = jax.default_backend() == "gpu"
    others = {name: fn for name, fn in case.peers.items() if on_gpu or name != "cudnn"}
    if library_calls is None:
        tiers = {PORTABLE: own("cuda")} if on_gpu and ffi.has_both_tiers() else {}
        return {"cuda": own("cuda"), **tiers, "xla": own("xla"), **others}
    others |= library_calls(case)
    return {"cuda": own("cuda"), **others} if others else {}


def _prepare(case: Case, fn: Function) -> tuple[Function, Callable[[jax.Array], tuple]]:
    """Returns the function to time, and a function of a random key that returns its arguments."""
    if isinstance(fn, ExternalCall) and fn.uses_torch:
        return fn, functools.partial(fn.tensors, case)
    if not case.diff:
        return fn, jax.jit(case.make)

    @jax.jit
    def draw(key: jax.Array) -> tuple:
        args = case.make(key)

        def forward(*differentiated: Any) -> Any:
            full = list(args)
            for i, x in zip(case.diff, differentiated, strict=True):
                full[i] = x
            return fn(*full)

        outs, pullback = jax.vjp(forward, *(args[i] for i in case.diff))
        return pullback, jax.tree.map(lambda y: jax.random.normal(key, y.shape, y.dtype), outs)

    return (lambda pull, ct: pull(ct)), draw


def _measure(case: Case, fn: Function, seconds: float, rest: float) -> float:
    """Returns the device seconds of one call."""
    keys = jax.random.split(jax.random.key(0), timing.MAX_ROTATION)
    target, draw = _prepare(case, fn)
    first = draw(keys[0])
    count = timing.rotation(timing.tree_bytes(first))
    sets = [first, *map(draw, keys[1:count])]
    if isinstance(fn, ExternalCall) and fn.uses_torch:
        return fn.torch_seconds(sets, seconds, rest)
    return timing.device_seconds(target, sets, seconds, rest)


def _difference(case: Case, fn: ExternalCall) -> float:
    """Returns how much the results of `fn` differ from ours."""
    key = jax.random.key(0)
    ours, draw = _prepare(case, functools.partial(case.call, implementation=None))
    theirs, draw_theirs = _prepare(case, fn)
    theirs = theirs if fn.uses_torch else jax.jit(theirs)
    return fn.difference(case, jax.jit(ours)(*draw(key)), theirs(*draw_theirs(key)))


def main(argv: list[str] | None = None) -> int:
    """Runs the command line.

    Args:
        argv: The command line's arguments. Default: `sys.argv[1:]`.

    Returns:
        0, or 1 if a case failed.
    """
    args = _parse(argv, list(OPERATORS))
    size = functools.partial(shrunk, args.scale)
    chosen = [
        (case, name, fn)
        for operator in args.operators or OPERATORS
        for case in OPERATORS[operator](size)
        for name, fn in _implementations(case, args.library_calls).items()
        if re.search(args.only, f"{case.label} {name}")
    ]
    if args.list:
        print("\n".join(f"{case.label} {name}" for case, name, _ in chosen))
        return 0

    rows: list[Row] = []
    rates: dict[str, float] = {}  # Operations or bytes per second, by ceiling.
    unavailable: set[str] = set()
    differences: dict[str, float] = {}  # The largest difference from our results, by library.
    failed = False
    limits = {n: c for n, c in ceilings(args.scale).items() if any(n in x.work for x, *_ in chosen)}
    work = [(c, "xla", functools.partial(c.call, implementation="xla")) for c in limits.values()]
    table = report.Table([case for case, *_ in work + chosen], [name for _, name, _ in chosen])
    file = report.CSV(args.csv) if args.csv else None
    progress = tqdm(work + chosen, unit="case", disable=None)
    for line in args.absent:
        tqdm.write(line)
    tqdm.write(table.header())
    try:
        for case, name, fn in progress:
            progress.set_description(f"{case.label} {name}")
            try:
                if isinstance(fn, ExternalCall):
                    difference = _difference(case, fn)
                    if not difference <= TOLERANCE:
                        raise DisagreementError(f"differs from ours by {difference:.2g}")
                    differences[name] = max(differences.get(name, 0.0), difference)
                with ffi.portable_tier() if name == PORTABLE else contextlib.nullcontext():
                    seconds = _measure(case, fn, args.seconds, args.rest)
            except NotImplementedError as error:
                unavailable.add(str(error))
                continue
            except Exception as error:
                if isinstance(fn, ExternalCall) and not isinstance(error, DisagreementError):
                    unavailable.add(f"{name} has no {case.label}: {error}")
                    continue
                failed = True
                tqdm.write(f"{case.label} {name} FAILED: {error}", file=sys.stderr)
                continue
            if case.operator in limits:
                rates[case.operator] = case.work[case.operator] / seconds
            row = report.row(case, name, seconds, rates, args.commit)
            rows.append(row)
            tqdm.write(table.line(row))
            sys.stdout.flush()
            if file:
                file.add(row)
    except KeyboardInterrupt:
        failed = True
    finally:
        progress.close()
        for line in sorted(unavailable):
            print(line, file=sys.stderr)
        if compared := report.speed_ups(rows):
            print(f"\n{compared}")
        for name, difference in differences.items():
            print(f"{name} agrees with ours to {difference:.2g}")
        for path in file.files if file else []:
            print(f"wrote {path}")
        if args.plot:
            report.write_plot(rows, args.plot)
            print(f"wrote {args.plot}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
