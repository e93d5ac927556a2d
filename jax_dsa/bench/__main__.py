"""Times every operator's implementations side by side, against ceilings measured in the same run.

Device time: dispatch from Python does not count. Rows are printed and written as they come.
"""

from __future__ import annotations

import argparse
import functools
import pathlib
import re
import sys
from typing import TYPE_CHECKING, Any

import jax

from jax_dsa.bench import peers, report, timing
from jax_dsa.bench.case import shrunk
from jax_dsa.bench.ceilings import ceilings
from jax_dsa.bench.registry import OPERATORS
from jax_dsa.core.extras import needs_extra

with needs_extra("bench", "jax_dsa.bench"):
    from tqdm import tqdm

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from jax_dsa.bench.case import Case
    from jax_dsa.bench.peers import Peer
    from jax_dsa.bench.report import Row

    Function = Callable[..., Any]


def _parse(argv: list[str] | None, operators: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m jax_dsa.bench", description=__doc__)
    parser.add_argument("operators", nargs="*", metavar="operator", help=", ".join(operators))
    parser.add_argument("--list", action="store_true", help="list the cases and stop")
    parser.add_argument(
        "--only", default="", metavar="REGEX", help="only the lines of --list that match"
    )
    parser.add_argument(
        "--peers",
        action="store_true",
        help="the cases that other libraries have, too, and those that can be imported here",
    )
    parser.add_argument(
        "--csv", type=pathlib.Path, metavar="PATH", help="a .csv file, or a folder: one an operator"
    )
    parser.add_argument("--plot", type=pathlib.Path, metavar="FILE.png")
    parser.add_argument(
        "--scale", type=int, default=1, help="divide long axes by this, for machines without a GPU"
    )
    parser.add_argument(
        "--seconds", type=float, default=0.3, help="length of each of the five measurements"
    )
    parser.add_argument(
        "--rest",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="idle before each measurement; with short ones, the device keeps its clock, which "
        "it lowers under steady load to stay within its power limit",
    )
    parser.add_argument("--commit", default=report.commit(), help="for the CSV, if git cannot say")
    args = parser.parse_args(argv)
    unknown = set(args.operators) - set(operators)
    if unknown:
        parser.error(f"no operator {', '.join(sorted(unknown))}; there are {', '.join(operators)}")
    return args


def _implementations(case: Case, libraries: Sequence[Peer] | None) -> dict[str, Function]:
    """Functions of the case's arguments, by name. With `libraries`, those of the kernels and of
    others; none if there are no others.
    """

    def own(name: str) -> Function:
        return functools.partial(case.call, implementation=name)

    on_gpu = jax.default_backend() == "gpu"
    others = {name: fn for name, fn in case.peers.items() if on_gpu or name != "cudnn"}
    if libraries is None:
        return {"cuda": own("cuda"), "xla": own("xla"), **others}
    others |= peers.of(case, libraries)
    return {"cuda": own("cuda"), **others} if others else {}


def _prepare(case: Case, fn: Function, key: jax.Array) -> tuple[Function, tuple]:
    """What to time, and its arguments."""
    if isinstance(fn, peers.Call) and fn.torch:
        return fn, peers.tensors(case, fn, key)
    args = case.make(key)
    if not case.diff:
        return fn, args

    def forward(*moving: Any) -> Any:
        full = list(args)
        for i, x in zip(case.diff, moving, strict=True):
            full[i] = x
        return fn(*full)

    outs, pullback = jax.vjp(forward, *(args[i] for i in case.diff))
    cotangents = jax.tree.map(lambda y: jax.random.normal(key, y.shape, y.dtype), outs)
    return (lambda pull, ct: pull(ct)), (pullback, cotangents)


def _measure(case: Case, fn: Function, seconds: float, rest: float) -> float:
    """Device seconds of one call."""
    keys = jax.random.split(jax.random.key(0), timing.MAX_ROTATION)
    target, first = _prepare(case, fn, keys[0])
    count = timing.rotation(timing.tree_bytes(first))
    sets = [first, *(_prepare(case, fn, key)[1] for key in keys[1:count])]
    on_torch = isinstance(fn, peers.Call) and fn.torch
    clock = peers.torch_seconds if on_torch else timing.device_seconds
    return clock(target, sets, seconds, rest)


def _difference(case: Case, fn: peers.Call) -> float:
    """Between what `fn` returns and what ours does."""
    key = jax.random.key(0)
    ours, args = _prepare(case, functools.partial(case.call, implementation=None), key)
    theirs, operands = _prepare(case, fn, key)
    theirs = theirs if fn.torch else jax.jit(theirs)
    return peers.difference(case, jax.jit(ours)(*args), theirs(*operands))


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; the exit status is 1 if a case failed."""
    args = _parse(argv, list(OPERATORS))
    size = functools.partial(shrunk, args.scale)
    libraries, absent = peers.available() if args.peers else (None, [])
    chosen = [
        (case, name, fn)
        for operator in args.operators or OPERATORS
        for case in OPERATORS[operator](size)
        for name, fn in _implementations(case, libraries).items()
        if re.search(args.only, f"{case.label} {name}")
    ]
    if args.list:
        print("\n".join(f"{case.label} {name}" for case, name, _ in chosen))
        return 0

    rows: list[Row] = []
    rates: dict[str, float] = {}  # of the ceilings, operations or bytes a second
    unavailable: set[str] = set()
    gaps: dict[str, float] = {}  # between a library's results and ours, the largest
    failed = False
    limits = {n: c for n, c in ceilings(args.scale).items() if any(n in x.work for x, *_ in chosen)}
    work = [(c, "xla", functools.partial(c.call, implementation="xla")) for c in limits.values()]
    table = report.Table([case for case, *_ in work + chosen], [name for _, name, _ in chosen])
    file = report.CSV(args.csv) if args.csv else None
    progress = tqdm(work + chosen, unit="case", disable=None)
    for line in absent:
        tqdm.write(line)
    tqdm.write(table.header())
    try:
        for case, name, fn in progress:
            progress.set_description(f"{case.label} {name}")
            library = isinstance(fn, peers.Call)
            try:
                if library:
                    gap = _difference(case, fn)
                    if not gap <= peers.TOLERANCE:
                        raise peers.DisagreementError(f"differs from ours by {gap:.2g}")
                    gaps[name] = max(gaps.get(name, 0.0), gap)
                seconds = _measure(case, fn, args.seconds, args.rest)
            except NotImplementedError as error:
                unavailable.add(str(error))
                continue
            except Exception as error:
                if library and not isinstance(error, peers.DisagreementError):
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
        for name, gap in gaps.items():
            print(f"{name} agrees with ours to {gap:.2g}")
        for path in file.files if file else []:
            print(f"wrote {path}")
        if args.plot:
            report.write_plot(rows, args.plot)
            print(f"wrote {args.plot}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
