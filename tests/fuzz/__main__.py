"""The fuzzer's command line, to be used in the folder `tests`.

`python -m fuzz --calls 100000` runs many cases. `python -m fuzz topk value 17` runs one case, as a
failure names it.
"""

from __future__ import annotations

import argparse
import collections
import sys
import time
from collections.abc import Iterator

import jax
import tqdm

import fuzz


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=fuzz.__doc__)
    parser.add_argument("case", nargs="*", help="run one case: operator, kind and seed")
    parser.add_argument("--calls", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--operators", nargs="*", default=(), choices=[*fuzz.ALL])
    parser.add_argument(
        "--kernels", action="store_true", help="kernels against the XLA implementations, on a GPU"
    )
    args = parser.parse_args()
    # Compilation takes most of the time. The tolerances of float32 assume float32 products.
    jax.config.update("jax_disable_most_optimizations", not args.kernels)
    jax.config.update("jax_default_matmul_precision", "highest")
    if args.case:
        operator, kind, seed = args.case
        outcome = fuzz.Case(operator, kind, int(seed)).run()
        print(outcome)
        return outcome not in fuzz.RIGHT
    return many(fuzz.cases(args.calls, args.seed, tuple(args.operators), args.kernels), args.calls)


def many(cases: Iterator[fuzz.Case], calls: int) -> int:
    """Runs all cases; prints each failure at once and a table at the end."""
    start = time.perf_counter()
    outcomes: collections.Counter[tuple[str, str, str]] = collections.Counter()
    with tqdm.tqdm(total=calls, unit="call", mininterval=5) as bar:
        for case in cases:
            outcome = case.run()
            if outcome not in fuzz.RIGHT:
                bar.write(outcome, file=sys.stdout)
                sys.stdout.flush()
                outcome = "wrong"
            outcomes[case.operator, case.kind, outcome] += 1
            bar.update()
    print(f"{outcomes.total()} calls in {time.perf_counter() - start:.0f} s")
    print("| operator |" + "".join(f" {kind} |" for kind in fuzz.KINDS))
    print("| --- |" + " --- |" * len(fuzz.KINDS))
    for operator in fuzz.ALL:
        cells = [_cell(outcomes, operator, kind) for kind in fuzz.KINDS]
        if any(cells):
            print(f"| {operator} |" + "".join(f" {cell} |" for cell in cells))
    wrong = sum(n for (_, _, outcome), n in outcomes.items() if outcome == "wrong")
    print(f"{wrong} wrong")
    return wrong > 0


def _cell(outcomes: collections.Counter, operator: str, kind: str) -> str:
    """Returns how many calls passed, were refused or were wrong."""
    counts = {o: outcomes[operator, kind, o] for o in (*fuzz.RIGHT, "wrong")}
    return ", ".join(f"{n} {o}" for o, n in counts.items() if n)


if __name__ == "__main__":
    sys.exit(main())
