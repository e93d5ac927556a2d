"""Trains the demo's model twice, with and without FP8 linear layers, and draws both curves:
`python -m jax_dsa.training.compare`.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import jax.numpy as jnp
import numpy as np

from jax_dsa.core.extras import needs_extra

with needs_extra("examples", __name__):
    from matplotlib.figure import Figure

    from jax_dsa.training.config import PRESETS, in_fp8
    from jax_dsa.training.data import RunError, load_corpus
    from jax_dsa.training.report import BLUE, GREY, ORANGE, smooth
    from jax_dsa.training.trainer import Trainer

if TYPE_CHECKING:
    from jax_dsa.training.config import TrainConfig
    from jax_dsa.training.data import Corpus

TOLERANCE = 0.005
"""The FP8 run's final loss may be this much above the other's."""


@dataclasses.dataclass(frozen=True)
class Curve:
    """One finished run."""

    label: str
    steps: np.ndarray
    losses: np.ndarray
    """Of training batches, at `steps`."""
    validation: float
    """After the last step."""


def main(argv: list[str] | None = None) -> int:
    """Runs the comparison; 0 if the final losses agree, 1 if they do not, 130 if interrupted."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", choices=list(PRESETS), default="cpu")
    parser.add_argument("--steps", type=int, default=1000, help="of dense attention")
    parser.add_argument("--data", type=Path, help="folder of text, default Python's own sources")
    parser.add_argument("--run-dir", type=Path, help="default runs/PRESET-compared")
    args = parser.parse_args(argv)
    folder = args.run_dir or Path("runs") / f"{args.preset}-compared"
    stages = {"dense_steps": args.steps, "warmup_steps": 0, "sparse_steps": 0}
    config = dataclasses.replace(PRESETS[args.preset](), **stages)
    name = jnp.dtype(config.model.attention.dtype).name
    curves = []
    try:
        corpus = load_corpus(args.data, folder)
        for label, run in ((name, config), ("FP8", in_fp8(config))):
            curve = _train(label, run, corpus, folder / label)
            if curve is None:
                print("stopped; the same command goes on from there")
                return 130
            curves.append(curve)
    except RunError as error:
        parser.error(str(error))
    base, fp8 = curves
    _plot(base, fp8, folder / "curves.png")
    change = fp8.validation / base.validation - 1
    agree = abs(change) <= TOLERANCE
    print(
        f"\n{'PASS' if agree else 'FAIL'}  validation loss after {args.steps} steps within "
        f"{TOLERANCE:.1%}: {fp8.validation:.4f} in FP8, {base.validation:.4f} in {base.label} "
        f"({change:+.2%}); {folder / 'curves.png'}"
    )
    return int(not agree)


def _train(label: str, config: TrainConfig, corpus: Corpus, folder: Path) -> Curve | None:
    """None if it was interrupted."""
    trainer = Trainer(config, corpus, folder)
    print(f"{label}: {folder}" + (f"; going on from step {trainer.step}" if trainer.step else ""))
    if not trainer.run():
        return None
    rows = trainer.log.rows()
    state, batches = trainer.state, trainer.validation(config.eval_sequences)
    return Curve(
        label,
        np.array([int(r["step"]) for r in rows]),
        np.array([float(r["lm_loss"]) for r in rows]),
        trainer.evaluator.loss(state.backbone.params, state.indexer.params, batches, sparse=False),
    )


def _plot(base: Curve, fp8: Curve, path: Path) -> None:
    figure = Figure(figsize=(9, 6.5), layout="constrained")
    loss, change = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    for curve, color in ((base, BLUE), (fp8, ORANGE)):
        label = f"{curve.label}, validation at the end {curve.validation:.4f}"
        loss.plot(curve.steps, curve.losses, color=color, alpha=0.2, lw=1)
        loss.plot(curve.steps, smooth(curve.losses), color=color, lw=1.2, label=label)
    loss.set(title="Language model loss, training batches", ylabel="nats per byte", yscale="log")
    loss.legend(frameon=False, fontsize=9)
    change.axhline(0, color=GREY, lw=0.8)
    change.axhspan(-100 * TOLERANCE, 100 * TOLERANCE, color=GREY, alpha=0.15, lw=0)
    relative = 100 * (smooth(fp8.losses) / smooth(base.losses) - 1)
    change.plot(base.steps, relative, color=ORANGE, lw=1.2)
    change.set(xlabel="step", ylabel="FP8's, % more", ylim=(-3, 3))
    for axis in (loss, change):
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    sys.exit(main())
