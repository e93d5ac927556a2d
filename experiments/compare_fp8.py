"""Trains the demo's model with and without FP8 linear layers, and draws both loss curves.

python experiments/compare_fp8.py --preset h200 --steps 1000
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np

from jax_dsa.core.extras import needs_extra

with needs_extra("examples", "experiments/compare_fp8.py"):
    from matplotlib.figure import Figure

    from jax_dsa.training.config import PRESETS, in_fp8
    from jax_dsa.training.data import RunError, load_corpus
    from jax_dsa.training.plots import BLUE, GREY, ORANGE, smooth
    from jax_dsa.training.trainer import Trainer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jax_dsa.training.config import TrainConfig
    from jax_dsa.training.data import Corpus

TOLERANCE = 0.005
"""Largest relative difference between the final losses of both runs that passes."""


@dataclasses.dataclass(frozen=True)
class Curve:
    """The losses of one run, which may be unfinished.

    Attributes:
        label: Name of the run.
        steps: Numbers of steps.
        losses: Losses of the training batches at these steps.
        validation: Validation loss after the last step, or None if the run is unfinished.
    """

    label: str
    steps: np.ndarray
    losses: np.ndarray
    validation: float | None


class _UnprobedTrainer(Trainer):
    """A trainer that does not validate during training."""

    def probe(self, stage: str) -> dict[str, Any]:
        """Returns no columns."""
        return {}


def main(argv: list[str] | None = None) -> int:
    """Runs the comparison.

    Args:
        argv: The command line's arguments. Default: `sys.argv[1:]`.

    Returns:
        0 if the final losses agree, 1 if they do not, 130 if a run was interrupted.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", choices=list(PRESETS), default="cpu")
    parser.add_argument("--steps", type=int, default=1000, help="steps with dense attention")
    parser.add_argument("--seq-len", type=int, help="tokens per sequence (default: the preset's)")
    parser.add_argument("--batch-size", type=int, help="sequences per step (default: the preset's)")
    parser.add_argument("--data", type=Path, help="folder of text (default: Python's own sources)")
    parser.add_argument(
        "--run-dir", type=Path, help="folder of both runs (default: runs/PRESET-compared)"
    )
    args = parser.parse_args(argv)
    folder = args.run_dir or Path("runs") / f"{args.preset}-compared"
    try:
        config = _config(PRESETS[args.preset](), args.steps, args.seq_len, args.batch_size)
    except ValueError as error:
        parser.error(str(error))
    tokens = f"{config.batch_size} x {config.seq_len} tokens per step"
    title = f"Preset {args.preset}, dense attention, {tokens}"
    name = jnp.dtype(config.model.attention.dtype).name
    curves: list[Curve] = []
    try:
        corpus = load_corpus(args.data, folder)
        for label, run in ((name, config), ("FP8", in_fp8(config))):
            curves.append(_train(label, run, corpus, folder / label))
            _plot(curves, title, folder / "curves.png")
            if curves[-1].validation is None:
                print("stopped; run the same command again to resume")
                return 130
    except RunError as error:
        parser.error(str(error))
    base, fp8 = (curve.validation or 0.0 for curve in curves)
    change = fp8 / base - 1
    agree = abs(change) <= TOLERANCE
    print(
        f"\n{'PASS' if agree else 'FAIL'}  validation loss after {args.steps} steps within "
        f"{TOLERANCE:.1%}: {fp8:.4f} in FP8, {base:.4f} in {name} ({change:+.2%}); "
        f"{folder / 'curves.png'}"
    )
    return int(not agree)


def _config(
    preset: TrainConfig, steps: int, seq_len: int | None, batch_size: int | None
) -> TrainConfig:
    """Returns the preset with only a dense stage, and the same number of validation tokens."""
    seq_len = seq_len or preset.seq_len
    return dataclasses.replace(
        preset,
        dense_steps=steps,
        warmup_steps=0,
        sparse_steps=0,
        seq_len=seq_len,
        batch_size=batch_size or preset.batch_size,
        eval_sequences=-(-preset.eval_sequences * preset.seq_len // seq_len),
    )


def _train(label: str, config: TrainConfig, corpus: Corpus, folder: Path) -> Curve:
    """Trains one model, and returns its curve."""
    trainer = _UnprobedTrainer(config, corpus, folder)
    print(f"{label}: {folder}" + (f"; resuming from step {trainer.step}" if trainer.step else ""))
    validation = None
    if trainer.run():
        state, batches = trainer.state, trainer.validation(config.eval_sequences)
        params = state.backbone.params, state.indexer.params
        validation = trainer.evaluator.loss(*params, batches, sparse=False)
    rows = trainer.log.rows()
    return Curve(
        label,
        np.array([int(r["step"]) for r in rows]),
        np.array([float(r["lm_loss"]) for r in rows]),
        validation,
    )


def _plot(curves: Sequence[Curve], title: str, path: Path) -> None:
    figure = Figure(figsize=(9, 6.5), layout="constrained")
    loss, change = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    for curve, color in zip(curves, (BLUE, ORANGE), strict=False):
        end = "" if curve.validation is None else f", validation at the end {curve.validation:.4f}"
        loss.plot(curve.steps, curve.losses, color=color, alpha=0.2, lw=1)
        loss.plot(
            curve.steps, smooth(curve.losses), color=color, lw=1.2, label=f"{curve.label}{end}"
        )
    figure.suptitle(title, fontsize=11)
    loss.set(title="Language model loss, training batches", ylabel="nats per byte", yscale="log")
    loss.legend(frameon=False, fontsize=9)
    change.axhline(0, color=GREY, lw=0.8)
    change.axhspan(-100 * TOLERANCE, 100 * TOLERANCE, color=GREY, alpha=0.15, lw=0)
    base, other = curves[0], curves[-1]
    count = len(other.steps)  # An unfinished FP8 run has fewer steps.
    relative = 100 * (smooth(other.losses) / smooth(base.losses[:count]) - 1)
    change.plot(other.steps, relative, color=ORANGE, lw=1.2)
    change.set(xlabel="step", ylabel="FP8 above the other, %", ylim=(-3, 3))
    for axis in (loss, change):
        axis.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    sys.exit(main())
