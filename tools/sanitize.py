"""Runs the check programs of tests/kernels/gpu under compute-sanitizer, on a Hopper GPU.

    python tools/sanitize.py [--jobs 8] [--only sparse_mla topk] [--tools memcheck racecheck]

The script prints a row when a run ends, then a table of all runs, then the reports of racecheck and
the program of tests/kernels/races that explains each. Such a program uses the same synchronization
as the reported accesses and has no race. It explains a report if racecheck reports the program too,
and also reports its control, which has a race. The exit status is 1 if a report is unexplained, or
if a program ran into its time limit or computed wrong values.

The script needs nvcc, and compute-sanitizer on PATH or from the PyPI package
nvidia-cuda-sanitizer-api.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import importlib.util
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CHECKS = sorted(ROOT.glob("tests/kernels/gpu/*_check.cu"))
PATTERNS = sorted(ROOT.glob("tests/kernels/races/*.cu"))
TOOLS = ("racecheck", "memcheck", "synccheck", "initcheck")  # the slowest first

# The program that explains a report, by the functions whose accesses may be reported together. A
# report concerns some of these functions. A function is listed by its name alone where the tool
# reports no source line.
EXPLANATIONS = {
    frozenset(["attn_dist/fwd.cuh:consume", "attn_dist/fwd.cuh:produce"]): "beside_copies",
    frozenset(["common/gather.cuh:operator[]", "common/gather.cuh:set"]): "beside_copies",
    frozenset(["common/copy.cuh:cp_async_16", "common/copy.cuh:load_matrix_x4"]): "load_matrix",
    frozenset(
        [
            *("common/copy.cuh:cp_async_16_alone", "common/copy.cuh:cp_async_8"),
            *("common/copy.cuh:load_shared_16", "common/copy.cuh:load_shared_byte"),
            "common/copy.cuh:store_shared_16",
        ]
    ): "in_place",
    frozenset(
        [
            *("fp8/matmul_tile.cuh:produce_scales", "fp8/matmul_tile.cuh:row_scales"),
            "fp8/matmul_few.cuh:consume_thin",
        ]
    ): "elected_arrival",
    frozenset(["htree/walk.cuh:produce", "htree/walk.cuh:consume", "htree::queries_kernel"]): (
        "elected_arrival"
    ),
    frozenset(
        [
            *("common/copy.cuh:bulk_load", "htree::queries_kernel", "htree::nodes_kernel"),
            *("common/copy.cuh:load_matrix_x4", "common/copy.cuh:load_matrix_x4_transposed"),
        ]
    ): "bulk_copy",
    frozenset(["common/copy.cuh:store_any"]): "any_of_several",
    frozenset(
        [
            *("indexer/bwd_queries.cuh:gather", "indexer/bwd_queries.cuh:multiply"),
            "common/barrier.cuh:mbarrier_wait",  # the tool may attribute a write of gather to it
        ]
    ): "elected_arrival",
    frozenset(["indexer/candidates.cuh:gather", "indexer/candidates.cuh:score"]): (
        "elected_arrival"
    ),
    frozenset(
        [
            *("losses/index_grads.cuh:copy", "losses/index_grads.cuh:multiply"),
            "losses/index_grads_plan.cuh:make_h",
        ]
    ): "elected_arrival",
    frozenset(
        [
            *("common/copy.cuh:bulk_load", "masked_attention/scores.cuh:init_negated"),
            *("masked_attention/bwd.cuh:consume", "masked_attention/bwd_wide.cuh:consume_wide"),
            "masked_attention/bwd_dq.cuh:consume_keys",
        ]
    ): "bulk_copy",
    frozenset(
        [
            *(
                "masked_attention/bwd_producer.cuh:load_steps",
                "masked_attention/bwd_producer.cuh:prepare_steps",
            ),
            *("masked_attention/bwd.cuh:consume", "masked_attention/bwd_wide.cuh:consume_wide"),
            "masked_attention/bwd_dq.cuh:consume_keys",
            *(
                "masked_attention/bwd_rows.cuh:for_each_work_tile",
                "masked_attention/mask.cuh:clear_rows",
            ),
        ]
    ): "bulk_copy",
    frozenset(
        [
            *(
                "masked_attention/fwd_producer.cuh:schedule_tiles",
                "masked_attention/fwd_producer.cuh:load_tiles",
            ),
            "masked_attention/fwd_producer.cuh:build_mask_bits",
        ]
    ): "elected_writer",
    frozenset(
        [
            "masked_attention/fwd_producer.cuh:load_tiles",
            "masked_attention/fwd_consumer.cuh:consume",
        ]
    ): ("bulk_copy"),
    frozenset(
        [
            *(
                "masked_attention/fwd_producer.cuh:build_mask_bits",
                "masked_attention/fwd_producer.cuh:load_tiles",
            ),
            *("masked_attention/mask.cuh:clear_rows", "masked_attention/scores.cuh:mask_scores"),
        ]
    ): "elected_arrival",
    # What the warpgroup for dQ needs to know of a step.
    frozenset(
        ["masked_attention/bwd_dq.cuh:consume_ds", "masked_attention/bwd_dq.cuh:consume_keys"]
    ): "elected_writer",
    frozenset(
        [
            "masked_attention/bwd_producer.cuh:build_mask_bits",
            "masked_attention/scores.cuh:mask_scores",
        ]
    ): ("elected_arrival"),
    frozenset(
        [
            *("mqa_decode/plan.cuh:write", "mqa_decode/plan.cuh:set"),
            *("mqa_decode/plan.cuh:splits", "mqa_decode/splits.cuh:SplitIterator"),
            "mqa_decode/splits.cuh:next",
        ]
    ): "warpgroup_arrival",
    frozenset(["mqa_decode/few.cuh:mask_scores", "mqa_decode/few.cuh:produce_few"]): (
        "beside_copies"
    ),
    frozenset(["mqa_decode/wide.cuh:mask_scores", "mqa_decode/wide.cuh:produce_wide"]): (
        "beside_copies"
    ),
    frozenset(["mla/consumer.cuh:consume"]): "through_producer",
    frozenset(
        [
            *("common/gather.cuh:set", "mla/few_heads.cuh:consume_few"),
            "mla/few_heads.cuh:ValidKeyRows",
        ]
    ): "elected_writer",
    frozenset(["mla/few_heads.cuh:consume_few", "mla/producer.cuh:begin_work_tile"]): (
        "beside_copies"
    ),
    # The queue of steps and the rows of their keys.
    frozenset(
        [
            *(
                "sparse_attention/producer.cuh:schedule_steps",
                "masked_attention/fwd_producer.cuh:load_tiles",
            ),
            *(
                "sparse_attention/producer.cuh:load_boxes",
                "sparse_attention/producer.cuh:gather_steps",
            ),
            "sparse_attention/producer.cuh:build_query_bits",
            "sparse_attention/producer.cuh:build_key_bits",
        ]
    ): "elected_arrival",
    # Which keys of a step each query sees.
    frozenset(
        [
            *(
                "sparse_attention/producer.cuh:build_query_bits",
                "sparse_attention/rows.cuh:mask_rows",
            ),
            "sparse_attention/producer.cuh:build_key_bits",
        ]
    ): "elected_arrival",
    # Work tiles, which come with Q, and stages.
    frozenset(
        [
            *(
                "masked_attention/fwd_producer.cuh:load_tiles",
                "sparse_attention/producer.cuh:gather_steps",
            ),
            *(
                "masked_attention/fwd_consumer.cuh:consume",
                "sparse_attention/bwd_dq.cuh:consume_dq",
            ),
        ]
    ): "bulk_copy",
    # Work items, which come with K and V.
    frozenset(
        [
            *(
                "sparse_attention/bwd_producer.cuh:share_item",
                "sparse_attention/bwd_producer.cuh:produce",
            ),
            "sparse_attention/bwd_dkv.cuh:consume",
        ]
    ): "bulk_copy",
    # What the MMA warpgroups need to know of the rows of a step.
    frozenset(
        ["sparse_attention/bwd_dkv.cuh:consume", "sparse_attention/bwd_producer.cuh:store"]
    ): "elected_arrival",
    # In the backward kernel the readers report back as in over_two_barriers.
    frozenset(["common/gather.cuh:all", "common/gather.cuh:set"]): "beside_copies",
    frozenset(
        ["sparse_mla/bwd_dq.cuh:compute_p_ds", "sparse_mla/bwd_dq.cuh:produce_dq"]
    ): "over_two_barriers",
    frozenset(["sparse_mla/bwd.cuh:bwd_kernel"]): "in_turns",
    frozenset(["common/gather.cuh:index", "sparse_mla/bwd_dkv.cuh:produce_dkv"]): "beside_copies",
    frozenset(["sparse_mla/bwd_dkv.cuh:consume_dkv", "sparse_mla/bwd_dkv.cuh:produce_dkv"]): (
        "beside_copies"
    ),
    frozenset(["sparse_mla/bwd_dkv.cuh:produce_dkv", "sparse_mla/bwd_plan.cuh:find"]): (
        "beside_copies"
    ),
    frozenset(["sparse_mla/bwd_dkv.cuh:produce_dkv", "sparse_mla/bwd_plan.cuh:tiles"]): (
        "beside_copies"
    ),
}


def pattern_of(report: frozenset[str]) -> str | None:
    """Returns the program that explains a report about these functions, or None."""
    fitting = [pattern for functions, pattern in EXPLANATIONS.items() if report <= functions]
    return fitting[0] if fitting else None


def build_command(source: Path, binary: Path, *options: str) -> list[str]:
    """Returns the build command in a program's first lines, with its output at `binary`."""
    head = source.read_text().split("#include")[0].replace("\n//", "\n")
    line = re.search(r"nvcc (?:.*\\\n)*.*", head)
    if line is None:
        raise ValueError(f"{source}: no build line at its head")
    words = shlex.split(line[0].replace("\\\n", " "))
    words[0] = os.environ.get("CUDACXX") or "nvcc"
    words[words.index("-o") + 1] = str(binary)
    files = [str(f) for w in words for f in (sorted(ROOT.glob(w)) if "*" in w else [w])]
    return [*files, *options]


@dataclasses.dataclass(frozen=True)
class Run:
    """A program that is run under a tool."""

    name: str
    binary: Path
    args: tuple[str, ...]
    tool: str
    control: bool = False  # whether the program has a race


@dataclasses.dataclass
class Outcome:
    """The result of a run."""

    run: Run
    status: str  # ok, wrong values, timed out, no summary
    errors: int
    seconds: float
    races: Counter[frozenset[str]]
    output: str


def function_at(path: str, line: int) -> str:
    """Returns the device function at a source line, for example `mla/consumer.cuh:consume`.

    Returns the path and the line if the file does not belong to this repository.
    """
    ours = re.fullmatch(r"(?:.*/)?((?:cuda|tests)/.*)", path)  # the program may be built elsewhere
    if ours is None or not (ROOT / ours[1]).is_file():
        return f"{path}:{line}"
    place = ours[1].removeprefix("cuda/")
    lines = (ROOT / ours[1]).read_text().splitlines()
    for i in range(min(line, len(lines)) - 1, -1, -1):
        if re.search(r"\b__(device|global)__\b", lines[i]):
            head = re.sub(r"__launch_bounds__\([^)]*\)", "", " ".join(lines[i : i + 3]))
            name = re.search(r"([\w~]+|operator\W+)\(", head)
            return f"{place}:{name[1]}" if name else f"{place}:{line}"
    return f"{place}:{line}"


def name_in(signature: str) -> str:
    """Returns `htree::queries_kernel` for `void jax_dsa::htree::queries_kernel<...>(...)`."""
    name = re.search(r"jax_dsa::([\w:~]+)", signature)
    return name[1] if name else signature


def races(output: str) -> Counter[frozenset[str]]:
    """Returns how often racecheck reports each pair of functions."""
    found: Counter[frozenset[str]] = Counter()
    for report in re.split(r"Race reported between", output)[1:]:
        report = re.split(r"\n=+ *\n", report)[0]
        accesses = re.findall(r"access at (.+?)\+0x[0-9a-f]+(?: in (\S+?):(\d+))?", report)
        found[
            frozenset(
                function_at(path, int(line)) if path else name_in(signature)
                for signature, path, line in accesses
            )
        ] += 1
    return found


def sanitizer() -> str:
    """Returns the path of compute-sanitizer, from a CUDA toolkit or a PyPI package."""
    wheels = importlib.util.find_spec("nvidia")
    places = wheels.submodule_search_locations or [] if wheels else []
    found = (str(x) for place in places for x in Path(place).rglob("bin/compute-sanitizer"))
    return (
        shutil.which("compute-sanitizer") or next(found, None) or sys.exit("no compute-sanitizer")
    )


def execute(run: Run, tool: str, timeout: float) -> Outcome:
    """Runs a program. Kills its process group after `timeout` seconds."""
    command = [tool, "--tool", run.tool, "--print-limit", "1000", "--strip-paths", "no"]
    command += ["--max-connections", "200", str(run.binary), *run.args]
    start = time.monotonic()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        output, _ = process.communicate(timeout=timeout)
        late = False
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, late = process.communicate()[0], True
    seconds = time.monotonic() - start
    summary = re.search(
        r"ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazards? displayed", output
    )
    errors = int(summary[1] or summary[2]) if summary else 0
    status = "ok"
    if late:
        status = "timed out"
    elif summary is None:
        status = "no summary"
    elif process.returncode != 0:
        status = "wrong values"
    return Outcome(run, status, errors, seconds, races(output), output)


def build(jobs: int, to: Path) -> None:
    """Builds all programs, and the patterns also with their race."""
    to.mkdir(parents=True, exist_ok=True)
    commands = [build_command(s, to / s.stem, "-lineinfo") for s in CHECKS + PATTERNS]
    commands += [build_command(s, to / f"{s.stem}_race", "-lineinfo", "-DRACE") for s in PATTERNS]
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        list(pool.map(lambda c: subprocess.run(c, cwd=ROOT, check=True), commands))


def runs(only: list[str], tools: list[str], built: Path) -> list[Run]:
    """Returns the runs, the longest first."""
    checks = [s.stem for s in CHECKS if any(name in s.stem for name in only)]
    all_runs = [Run(n, built / n, ("small",), t) for t in TOOLS if t in tools for n in checks]
    if "racecheck" in tools:
        for name in (s.stem for s in PATTERNS):
            all_runs.append(Run(name, built / name, (), "racecheck"))
            all_runs.append(Run(name, built / f"{name}_race", (), "racecheck", control=True))
    first = ("sparse_mla_bwd_check", "indexer_bwd_check")
    return sorted(all_runs, key=lambda r: (TOOLS.index(r.tool), r.name not in first))


def run_all(todo: list[Run], tool: str, jobs: int, timeout: float) -> list[Outcome]:
    """Executes up to `jobs` runs at a time.

    Prints a row when a run ends, and writes the run's output to a file beside the program.
    """
    outcomes = []
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        started = [pool.submit(execute, run, tool, timeout) for run in todo]
        for done in concurrent.futures.as_completed(started):
            o = done.result()
            outcomes.append(o)
            print(
                f"{o.run.tool:10} {o.run.binary.name:28} {o.errors:5} errors {o.seconds:5.0f} s  "
                f"{o.status}",
                flush=True,
            )
            Path(f"{o.run.binary}.{o.run.tool}.log").write_text(o.output)
    return outcomes


def judge(outcomes: list[Outcome]) -> list[str]:
    """Prints the table and the reports, and returns the problems."""
    wrong = []
    cells: dict[str, dict[str, str]] = {}
    patterns: dict[str, bool] = {s.stem: False for s in PATTERNS}
    for o in outcomes:
        name = f"{o.run.name} (with its race)" if o.run.control else o.run.name
        values = re.search(r"\d+ of \d+ values wrong", o.output) if o.run.control else None
        notes = [f"{o.seconds:.0f} s", *([values[0]] if values else [])]
        notes += [o.status] if o.status != "ok" else []
        cells.setdefault(name, {})[o.run.tool] = f"{o.errors} ({', '.join(notes)})"
        if o.status != "ok":
            wrong.append(f"{name}: {o.run.tool} {o.status}")
        if o.run.control and o.errors == 0:
            wrong.append(f"{name}: not reported")
        if o.run.name in patterns and not o.run.control:
            patterns[o.run.name] = o.errors > 0
        if o.run.tool != "racecheck" and o.errors > 0:
            wrong.append(f"{name}: {o.errors} errors of {o.run.tool}")
    print("\n| program | " + " | ".join(TOOLS) + " |\n|---|" + "---|" * len(TOOLS))
    for name, row in sorted(cells.items()):
        print(f"| {name} | " + " | ".join(row.get(t, "-") for t in TOOLS) + " |")
    print("\n| racecheck on | reports | between | explained by |\n|---|---|---|---|")
    for o in outcomes:
        if o.run.tool != "racecheck" or o.run.name in patterns:
            continue
        for pair, count in sorted(o.races.items(), key=str):
            pattern, between = pattern_of(pair), " and ".join(sorted(pair))
            explained = pattern is not None and patterns[pattern]
            by = pattern if explained else f"no: {pattern} is clean" if pattern else "no"
            print(f"| {o.run.name} | {count} | {between} | {by} |")
            if not explained:
                wrong.append(f"{o.run.name}: {between} is not explained")
        if o.errors > 0 and not o.races:
            wrong.append(f"{o.run.name}: reports of racecheck that could not be parsed")
    return wrong


def main() -> int:
    """Builds and runs the programs and prints the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=8, help="number of processes at a time")
    parser.add_argument(
        "--timeout", type=float, default=300, help="time limit of a run, in seconds"
    )
    parser.add_argument(
        "--only",
        nargs="+",
        default=[""],
        help="run the check programs whose names contain one of these",
    )
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=TOOLS)
    parser.add_argument("--build", type=Path, default=ROOT / "build" / "sanitize")
    parser.add_argument(
        "--built", action="store_true", help="use the programs that are already built"
    )
    options = parser.parse_args()
    tool = sanitizer()
    if not options.built:
        start = time.monotonic()
        build(options.jobs, options.build)
        print(f"built in {time.monotonic() - start:.0f} s", flush=True)
    outcomes = run_all(
        runs(options.only, options.tools, options.build), tool, options.jobs, options.timeout
    )
    wrong = judge(outcomes)
    print("\n" + "\n".join(wrong or ["all good"]))
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
