"""Runs the check programs of tests/kernels/gpu under compute-sanitizer, on all Hopper GPUs.

    python tools/sanitize.py [--only sparse_mla topk] [--tools memcheck racecheck]
    python tools/sanitize.py --build DIR                  only compiles, which needs no GPU
    python tools/sanitize.py --programs DIR [--limit 540] [--configurations hopper portable-99]

The script prints a row when a run ends, then a table of all runs, then the reports of racecheck and
the program of tests/kernels/races that explains each. Such a program uses the same synchronization
as the reported accesses and has no race. It explains a report if racecheck reports the program too,
and also reports its control, which has a race. The exit status is 1 if a report is unexplained, or
if a program ran into its time limit, was not run or computed wrong values.

To compile, the script needs nvcc. To run, it needs compute-sanitizer on PATH or from the PyPI
package nvidia-cuda-sanitizer-api, and the sources from which the programs were compiled. The option
--configurations replaces JAX_DSA_TIER and JAX_DSA_SHARED_KIB of the environment.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import importlib.util
import itertools
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
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
CHECKS = sorted(ROOT.glob("tests/kernels/gpu/*_check.cu"))
PATTERNS = sorted(ROOT.glob("tests/kernels/races/*.cu"))
TOOLS = ("racecheck", "memcheck", "synccheck", "initcheck")  # the slowest first
MOST_RUNS = 8  # on one GPU at a time

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
            *(
                "sparse_attention/producer.cuh:build_key_bits",
                "sparse_attention/bwd_dq.cuh:consume_dq",
            ),
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
        [
            *("sparse_attention/bwd_dkv.cuh:consume", "sparse_attention/bwd_producer.cuh:store"),
            *("sparse_attention/bwd_dkv.cuh:of_rows", "sparse_attention/bwd_dkv.cuh:probabilities"),
        ]
    ): "elected_arrival",
    frozenset(
        [
            "sparse_attention/decode.cuh:valid_key_rows",
            "sparse_attention/decode_rows.cuh:produce_fp8_tiles",
        ]
    ): "elected_arrival",
    # In the backward kernel the readers report back as in over_two_barriers.
    frozenset(
        [
            *("common/gather.cuh:all", "common/gather.cuh:set"),
            "sparse_mla/decode_producer.cuh:produce",
        ]
    ): "beside_copies",
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
    """Returns the build command in a program's first lines, with its output at `binary`.

    Sources are relative to the repository, where the command must run.
    """
    head = source.read_text().split("#include")[0].replace("\n//", "\n")
    line = re.search(r"nvcc (?:.*\\\n)*.*", head)
    if line is None:
        raise ValueError(f"{source}: no build line at its head")
    words = shlex.split(line[0].replace("\\\n", " "))
    words[0] = os.environ.get("CUDACXX") or "nvcc"
    words[words.index("-o") + 1] = str(binary)
    for i in reversed(range(len(words))):
        if "*" in words[i]:
            words[i : i + 1] = [str(f.relative_to(ROOT)) for f in sorted(ROOT.glob(words[i]))]
    return [*words, *options]


@dataclasses.dataclass(frozen=True)
class Run:
    """A program that is run under a tool."""

    name: str
    binary: Path
    args: tuple[str, ...]
    tool: str
    configuration: str = "hopper"
    control: bool = False  # whether the program has a race

    @property
    def label(self) -> str:
        """The name of the program, with what distinguishes it in the tables."""
        which = "with its race" if self.control else self.configuration
        return self.name if which == "hopper" else f"{self.name} ({which})"


@dataclasses.dataclass
class Outcome:
    """The result of a run."""

    run: Run
    status: str  # ok, wrong values, timed out, stopped, not started, no summary
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


def outcome(run: Run, end: End, output: str) -> Outcome:
    """Returns the result of a run that ended and printed `output`."""
    summary = re.search(
        r"ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazards? displayed", output
    )
    errors = int(summary[1] or summary[2]) if summary else 0
    status = end.status
    if not status and summary is None:
        status = "no summary"
    elif not status:
        status = "wrong values" if end.exit_status != 0 else "ok"
    return Outcome(run, status, errors, end.seconds, races(output), output)


def hopper_sources() -> set[str]:
    """Returns the sources that CMakeLists.txt compiles for sm_90a."""
    lists = re.search(r"^set\(hopper\n(.*?)\)", (ROOT / "CMakeLists.txt").read_text(), re.M | re.S)
    if lists is None:
        raise ValueError("CMakeLists.txt has no list of sources for Hopper")
    return set(lists[1].split())


def build_steps(programs: list[Path], to: Path) -> tuple[list[list[str]], list[list[str]]]:
    """Returns the commands that compile the programs' objects, and those that link them.

    Programs share the objects of kernels. As in the extension, kernels that do not need Hopper are
    compiled for sm_90 instead of sm_90a.
    """
    hopper, objects, links = hopper_sources(), dict[str, list[str]](), list[list[str]]()
    for program in programs:
        binary = str(to / program.stem)
        command = build_command(program, Path(binary), "-lineinfo")
        sources = [word for word in command if word.endswith((".cu", ".cc"))]
        flags = [word for word in command if word not in (*sources, "-o", binary)]
        for source in sources:
            portable = source.startswith("cuda/") and source not in hopper
            own = [flag.replace("90a", "90") if portable else flag for flag in flags]
            output = str(to / "objects" / f"{source.replace('/', '.')}.o")
            objects[source] = [*own, "-c", source, "-o", output]
        links.append([*flags, *(objects[source][-1] for source in sources), "-o", binary])
    # These come first, because they have the slowest compilation, of three minutes.
    order = sorted(objects, key=lambda source: "masked_attention" not in source)
    return [objects[source] for source in order], links


def build(jobs: int, to: Path, only: list[str]) -> None:
    """Builds the check programs, and the patterns with and without their race."""
    (to / "objects").mkdir(parents=True, exist_ok=True)
    commands, links = build_steps(checks(only), to)
    commands += [build_command(s, to / s.stem, "-lineinfo") for s in PATTERNS]
    commands += [build_command(s, to / f"{s.stem}_race", "-lineinfo", "-DRACE") for s in PATTERNS]
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        for step in (commands, links):
            list(pool.map(lambda c: subprocess.run(c, cwd=ROOT, check=True), step))


def checks(only: list[str]) -> list[Path]:
    """Returns the check programs whose names contain one of these words."""
    return [s for s in CHECKS if any(word in s.stem for word in only)]


def runs(only: list[str], tools: list[str], configurations: list[str], built: Path) -> list[Run]:
    """Returns the runs, the longest first."""
    all_runs = []
    if "racecheck" in tools:
        for name in (s.stem for s in PATTERNS):
            all_runs.append(Run(name, built / name, (), "racecheck"))
            all_runs.append(Run(name, built / f"{name}_race", (), "racecheck", control=True))
    for tool, configuration, source in itertools.product(tools, configurations, checks(only)):
        name = source.stem
        all_runs.append(Run(name, built / name, ("small",), tool, configuration))
    longest = ("sparse_mla_bwd_check", "indexer_bwd_check")
    return sorted(all_runs, key=lambda r: (TOOLS.index(r.tool), r.name not in longest))


def run_all(
    todo: list[Run], tool: str, slots: list[str], timeout: float, until: float, logs: Path
) -> list[Outcome]:
    """Executes one run at a time in each slot of `run_tasks`.

    Prints a row when a run ends. The run's output is in a file of the folder `logs`.
    """
    outcomes, tasks, by_name = list[Outcome](), list[Task](), dict[str, Run]()
    for run in todo:
        command = [tool, "--tool", run.tool, "--print-limit", "1000", "--strip-paths", "no"]
        command += ["--max-connections", "200", str(run.binary), *run.args]
        name = f"{run.binary.name}.{run.configuration}.{run.tool}"
        by_name[name] = run
        environment = CONFIGURATIONS[run.configuration]
        tasks.append(Task(name, command, logs / f"{name}.log", environment, timeout))

    def ended(task: Task, end: End) -> None:
        started = end.status != "not started"
        output = task.log.read_text(errors="replace") if started else ""
        o = outcome(by_name[task.name], end, output)
        outcomes.append(o)
        print(f"{task.name:50} {o.errors:5} errors {o.seconds:5.0f} s  {o.status}", flush=True)

    run_tasks(tasks, slots, until, ended)
    return outcomes


def judge(outcomes: list[Outcome]) -> list[str]:
    """Prints the table and the reports, and returns the problems."""
    wrong = []
    cells: dict[str, dict[str, str]] = {}
    patterns: dict[str, bool] = {s.stem: False for s in PATTERNS}
    for o in outcomes:
        name = o.run.label
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
            print(f"| {o.run.label} | {count} | {between} | {by} |")
            if not explained:
                wrong.append(f"{o.run.label}: {between} is not explained")
        if o.errors > 0 and not o.races:
            wrong.append(f"{o.run.label}: reports of racecheck that could not be parsed")
    return wrong


def main(arguments: list[str]) -> int:
    """Builds and runs the programs and prints the results."""
    start = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--jobs",
        type=int,
        default=cores(),
        help=f"compilations or runs at a time (default: cores); at most {MOST_RUNS} runs per GPU",
    )
    parser.add_argument(
        "--timeout", type=float, default=300, help="time limit of a run, in seconds"
    )
    parser.add_argument(
        "--limit", type=float, default=math.inf, help="stop the runs after so many seconds"
    )
    parser.add_argument(
        "--only",
        nargs="+",
        default=[""],
        help="use the check programs whose names contain one of these",
    )
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=TOOLS)
    parser.add_argument("--configurations", nargs="+", choices=CONFIGURATIONS, default=["hopper"])
    folders = parser.add_mutually_exclusive_group()
    folders.add_argument(
        "--build", type=Path, metavar="DIR", help="build into this folder and stop"
    )
    folders.add_argument(
        "--programs", type=Path, metavar="DIR", help="run the programs built there"
    )
    parser.add_argument("--output", type=Path, help="folder of the logs; default: the programs'")
    options = parser.parse_args(arguments)
    if options.build:
        build(options.jobs, options.build.resolve(), options.only)
        return 0
    tool, gpus = sanitizer(), visible_gpus()
    programs = (options.programs or ROOT / "build" / "sanitize").resolve()
    if not options.programs:
        build(options.jobs, programs, options.only)
        print(f"built in {time.monotonic() - start:.0f} s", flush=True)
    outcomes = run_all(
        runs(options.only, options.tools, options.configurations, programs),
        tool,
        [gpus[i % len(gpus)] for i in range(min(options.jobs, MOST_RUNS * len(gpus)))],
        options.timeout,
        start + options.limit,
        options.output or programs,
    )
    wrong = judge(outcomes)
    print("\n" + "\n".join(wrong or ["all good"]))
    return int(bool(wrong))


if __name__ == "__main__":
    interrupt_on_signals()
    sys.exit(main(sys.argv[1:]))
