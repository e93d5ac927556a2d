"""Measures what sparse training costs on source text, and how the model uses distant tokens.

    python experiments/proof.py --data SITE_PACKAGES --top-k 1024 --minutes 8,2,8

The run has a dense stage, the indexer's warm-up, and a sparse stage with a dense control. It passes
if the sparse loss is close to the control's, and the indexer's selection close to the best one.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jax_dsa.core.extras import needs_extra

with needs_extra("examples", "experiments/proof.py"):
    from matplotlib.figure import Figure

    from jax_dsa.training import plots, summary
    from jax_dsa.training.config import PRESETS
    from jax_dsa.training.data import VOCAB, RunError, load_corpus
    from jax_dsa.training.mesh import make_mesh
    from jax_dsa.training.plots import BLUE, GREY, ORANGE, RED
    from jax_dsa.training.steps import Program
    from jax_dsa.training.trainer import Trainer

if TYPE_CHECKING:
    from collections.abc import Iterable

    from jax_dsa.training.config import Stage, TrainConfig
    from jax_dsa.training.data import Corpus
    from jax_dsa.training.evaluate import Keys

STAGES: tuple[Stage, ...] = ("dense", "warmup", "sparse")
TRIAL = 4
"""Steps of each stage that are timed to plan how many steps fit into the given minutes."""
LOSS_TOLERANCE, RECALL_TOLERANCE = 0.01, 0.05
BINS = 16
"""Number of position bins for which losses are shown."""
SPAN, CUE = 128, 32
"""Tokens of a copied piece, and tokens at its start that do not count because they only reveal what
is being copied. Both are shorter if sequences are short."""
MODELS: dict[str, tuple[str, Keys]] = {
    "sparse": ("backbone", "sparse"),
    "dense": ("backbone", "dense"),
    "control": ("control", "dense"),
    "last keys": ("backbone", "recency"),
}
"""The parameters of each model, and the keys that it attends to."""
LISTS = {
    "kept": "kept from the query before",
    "union": "different numbers in 8 lists, relative to one list",
}
COLORS = {"sparse": BLUE, "dense": GREY, "control": ORANGE, "last keys": RED}


def main(argv: list[str] | None = None) -> int:
    """Runs the experiment.

    Args:
        argv: The command line's arguments. Default: `sys.argv[1:]`.

    Returns:
        0 if all checks pass, 1 if one fails, 130 if the run stopped before its end.
    """
    started = time.perf_counter()
    parser = _parser()
    args = parser.parse_args(argv)
    folder = args.run_dir
    config = PRESETS[args.preset]()
    attention = config.model.attention
    if args.top_k is not None:
        attention = dataclasses.replace(attention, top_k=args.top_k)
    if attention.attended >= config.seq_len:
        parser.error(
            f"argument --top-k: {attention.attended} keys are all keys of a sequence, which has "
            f"{config.seq_len} tokens, so sparse attention would be dense; select fewer"
        )
    jax.config.update("jax_compilation_cache_dir", str(folder.absolute() / "compiled"))
    config = dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, attention=attention, vocab=args.vocab),
        batch_size=args.batch_size or config.batch_size,
        probe_every=250,
        checkpoint_every=250,
        eval_sequences=args.sequences,
    )
    try:
        corpus = load_corpus(args.data, folder, vocab=args.vocab, packages=True)
        print(
            f"{corpus.name}: {len(corpus.train) / 1e6:.1f} M tokens of {corpus.files[0]} files to "
            f"train on, {len(corpus.validation) / 1e6:.1f} M of {corpus.files[1]} files in other "
            f"packages to validate on",
            flush=True,
        )
        config = with_planned_steps(config, corpus, args.minutes, folder)
        trainer = Trainer(config, corpus, folder, tensorboard=args.tensorboard)
    except RunError as error:
        parser.error(str(error))
    print(
        f"{config.dense_steps} dense, {config.warmup_steps} warm-up and {config.sparse_steps} "
        f"sparse steps of {config.batch_size} x {config.seq_len} tokens; {trainer.step} are done",
        flush=True,
    )
    if not trainer.run(60 * args.stop_after - (time.perf_counter() - started)):
        print(f"\nstopped after step {trainer.step}; run the same command again to resume")
        return 130
    results = summary.evaluate(trainer)
    plots.plot(trainer, results, folder / "curves.png")
    positions, copies = loss_by_position(trainer), loss_of_copies(trainer)
    lists = trainer.evaluator.similarity(trainer.state, trainer.validation(config.eval_sequences))
    checks = _checks(results)
    table = (
        f"{summary.table(results, trainer)}\n\n{_tables(positions, copies, lists)}\n\n"
        + "\n".join(f"{'PASS' if ok else 'FAIL'}  {text}" for ok, text in checks)
    )
    print(f"\n{table}\n\n{trainer.seconds:.0f} s of training, {folder}")
    (folder / "proof.txt").write_text(table + "\n")
    _write(positions, copies, lists, folder / "proof.csv")
    _plot(positions, copies, folder / "proof.png")
    return int(not all(ok for ok, _ in checks))


def with_planned_steps(
    config: TrainConfig, corpus: Corpus, minutes: list[float], folder: Path
) -> TrainConfig:
    """Returns the run with the number of steps that fit into the given minutes.

    A few steps of each stage are timed on this device. The plan is stored in the folder, and reused
    when the run resumes.

    Args:
        config: The run.
        corpus: The text.
        minutes: Time of each stage, without validations.
        folder: The run's folder.
    """
    path = folder / "plan.json"
    if not path.exists():
        trial: dict[str, Any] = {f"{stage}_steps": TRIAL for stage in STAGES}
        program = Program(dataclasses.replace(config, **trial), make_mesh({"data": 1}))
        batch = np.resize(corpus.train, (config.batch_size, config.seq_len + 1)).astype(np.int32)
        state, steps = program.init(), {}
        for stage, limit in zip(STAGES, minutes, strict=True):
            for i in range(TRIAL):
                if i == 1:  # The first step waits for the compiler.
                    start = time.perf_counter()
                state, losses = program.step(state, batch)
                jax.block_until_ready(losses)
            seconds = (time.perf_counter() - start) / (TRIAL - 1)
            steps[f"{stage}_steps"] = max(TRIAL, round(60 * limit / seconds))
        path.write_text(json.dumps(steps))
    return dataclasses.replace(config, **json.loads(path.read_text()))


def loss_by_position(trainer: Trainer) -> dict[str, np.ndarray]:
    """Returns the validation loss of every model in each bin of positions.

    The later a token is, the more context it can use.
    """
    batches = trainer.validation(trainer.config.eval_sequences)
    bins = min(BINS, trainer.config.seq_len)
    return {
        name: np.array([losses.mean() for losses in np.array_split(by_token.mean(0), bins)])
        for name, by_token in _losses(trainer, batches)
    }


def loss_of_copies(trainer: Trainer) -> dict[str, float]:
    """Returns the loss of every model on pieces of text that occurred earlier in the sequence.

    The first occurrence is more than half of a sequence back. "first reading" is the dense model's
    loss at the first occurrence.
    """
    c = trainer.config
    span = min(SPAN, c.seq_len // 8)
    cue = span * CUE // SPAN
    rng = np.random.default_rng(c.seed)
    batches, first, second = [], [], []
    for batch in trainer.validation(c.eval_sequences):
        tokens = batch.copy()
        for row in tokens:
            distance = int(rng.integers(c.seq_len // 2 + 1, c.seq_len - span))
            start = int(rng.integers(1, c.seq_len + 1 - span - distance))
            row[start + distance :][:span] = row[start:][:span]
            # The loss at position t is that of token t + 1.
            first.append(np.arange(start + cue, start + span) - 1)
            second.append(first[-1] + distance)
        batches.append(tokens)
    found = {}
    for name, losses in _losses(trainer, batches):
        found[name] = float(np.take_along_axis(losses, np.array(second), 1).mean())
        if name == "dense":
            found["first reading"] = float(np.take_along_axis(losses, np.array(first), 1).mean())
    return found


def _losses(trainer: Trainer, batches: list[np.ndarray]) -> Iterable[tuple[str, np.ndarray]]:
    """Yields the name of each model and its losses of all tokens, [sequences, seq_len]."""
    state = trainer.state
    for name, (learner, keys) in MODELS.items():
        params = getattr(state, learner).params
        yield name, trainer.evaluator.token_losses(params, state.indexer.params, batches, keys)


def _checks(results: summary.Results) -> list[tuple[bool, str]]:
    """Returns whether each check passes, and what it checks."""
    recall, best = (float(results.recall[name].mean()) for name in ("indexer", "best"))

    def within(name: str, loss: float) -> tuple[bool, str]:
        change = results.sparse / loss - 1
        return change <= LOSS_TOLERANCE, (
            f"sparse validation loss within {LOSS_TOLERANCE:.0%} of {name}: {change:+.2%}"
        )

    return [
        within("the control's", results.control),
        within("the same model's with dense attention", results.dense),
        (
            recall >= (1 - RECALL_TOLERANCE) * best,
            f"the indexer's recall within {RECALL_TOLERANCE:.0%} of the best possible: "
            f"{recall:.4f} of {best:.4f}",
        ),
    ]


def _tables(
    positions: dict[str, np.ndarray], copies: dict[str, float], lists: dict[str, np.ndarray]
) -> str:
    bins = len(positions["sparse"])
    shown = sorted({0, bins // 4, bins // 2, 3 * bins // 4, bins - 1})
    rows = [("validation loss by position", *(f"{i + 1}/{bins}" for i in shown))]
    rows += [(name, *(f"{x[i]:.4f}" for i in shown)) for name, x in positions.items()]
    far = [("copy from more than half of a sequence back", "nats/token")]
    far += [(name, f"{x:.4f}") for name, x in copies.items()]
    layers = [f"layer {i}" for i in range(len(lists["kept"]))]
    similar = [("selections of neighbouring queries", "mean", *layers)] + [
        (title, *(f"{x:.3f}" for x in (lists[name].mean(), *lists[name])))
        for name, title in LISTS.items()
    ]
    return "\n\n".join(summary.grid(x) for x in (rows, far, similar))


def _write(
    positions: dict[str, np.ndarray],
    copies: dict[str, float],
    lists: dict[str, np.ndarray],
    path: Path,
) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("measure", "model", "part", "value"))
        for name, losses in positions.items():
            writer.writerows(
                ("position", name, i, f"{x:.6f}") for i, x in enumerate(losses, start=1)
            )
        writer.writerows(("copy", name, "", f"{x:.6f}") for name, x in copies.items())
        for name, by_layer in lists.items():
            writer.writerows((name, "sparse", i, f"{x:.6f}") for i, x in enumerate(by_layer))


def _plot(positions: dict[str, np.ndarray], copies: dict[str, float], path: Path) -> None:
    figure = Figure(figsize=(12, 4.4), layout="constrained")
    late, copy = figure.subplots(1, 2, width_ratios=(2, 1))
    for name, losses in positions.items():
        late.plot(np.arange(1, len(losses) + 1), losses, "o-", color=COLORS[name], label=name, ms=4)
    late.set(title="Validation loss by position", xlabel=f"position, in {BINS} bins")
    late.set_ylabel("nats per token")
    late.legend(frameon=False, fontsize=9)
    names = list(copies)
    copy.barh(names, list(copies.values()), color=[COLORS.get(name, "#cccccc") for name in names])
    copy.set(title="Copy from far back", xlabel="nats per token")
    copy.invert_yaxis()
    for axis in (late, copy):
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="folder of Python packages")
    parser.add_argument("--run-dir", type=Path, default=Path("runs/proof"))
    parser.add_argument("--preset", choices=list(PRESETS), default="h200")
    parser.add_argument(
        "--vocab", type=int, default=VOCAB, help="size of the vocabulary (default: bytes)"
    )
    parser.add_argument(
        "--top-k", type=int, help="number of selected keys or blocks (default: the preset's)"
    )
    parser.add_argument(
        "--sequences", type=int, default=32, help="validation sequences of the final results"
    )
    parser.add_argument("--batch-size", type=int, help="sequences per step (default: the preset's)")
    parser.add_argument(
        "--minutes",
        type=_minutes,
        default=[8.0, 2.0, 8.0],
        metavar="DENSE,WARMUP,SPARSE",
        help="time of each stage, which determines its number of steps; a resumed run keeps the "
        "numbers that it started with",
    )
    parser.add_argument(
        "--stop-after",
        type=float,
        default=np.inf,
        metavar="MINUTES",
        help="write a checkpoint and stop after this time; the same command resumes the run",
    )
    parser.add_argument(
        "--tensorboard", action="store_true", help="also write the metrics for TensorBoard"
    )
    return parser


def _minutes(text: str) -> list[float]:
    minutes = [float(x) for x in text.split(",")]
    if len(minutes) != len(STAGES):
        raise argparse.ArgumentTypeError(f"{text} is not three numbers")
    return minutes


if __name__ == "__main__":
    sys.exit(main())
