"""The demo's command line: trains a small language model and shows what came of it."""

from __future__ import annotations

import argparse
import dataclasses
import shutil
from pathlib import Path

import jax

from jax_dsa.core.extras import needs_extra

with needs_extra("examples", __name__):
    from jax_dsa.training import report
    from jax_dsa.training.config import PRESETS, in_fp8
    from jax_dsa.training.data import RunError, load_corpus
    from jax_dsa.training.trainer import Trainer


def main(argv: list[str] | None = None) -> int:
    """Runs the demo; 0 if it finished, 130 if it was interrupted and can be resumed."""
    parser = _parser()
    args = parser.parse_args(argv)
    config = PRESETS[args.preset]()
    given = {k: getattr(args, k) for k in ("dense_steps", "warmup_steps", "sparse_steps", "seed")}
    config = dataclasses.replace(config, **{k: v for k, v in given.items() if v is not None})
    if args.fp8:
        config = in_fp8(config)
    folder = args.run_dir or Path("runs") / (args.preset + ("-fp8" if args.fp8 else ""))
    try:
        corpus = load_corpus(args.data, exclude=folder)
        if args.restart:
            shutil.rmtree(folder, ignore_errors=True)
        trainer = Trainer(config, corpus, folder)
    except RunError as error:
        parser.error(str(error))
    size = sum(x.size for x in jax.tree.leaves(trainer.state.backbone.params))
    index = sum(x.size for x in jax.tree.leaves(trainer.state.indexer.params))
    print(
        f"{corpus.name}: {corpus.files[0]} files, {len(corpus.train) / 1e6:.1f} MB to train on; "
        f"{corpus.files[1]} files, {len(corpus.validation) / 1e6:.1f} MB to validate on\n"
        f"model: {size / 1e6:.2f} M parameters and {index / 1e6:.2f} M in the indexers; "
        f"sequences of {config.seq_len} bytes, {config.model.attention.top_k} keys selected\n"
        f"device: {jax.devices()[0].device_kind}; run folder: {folder}"
        + (f"; going on from step {trainer.step}" if trainer.step else "")
    )
    if not trainer.run():
        print(f"\nstopped after step {trainer.step}; the same command goes on from there")
        return 130

    results = report.evaluate(trainer)
    prompt, continuation = report.sample(trainer)
    picture = folder / "curves.png"
    report.plot(trainer, results, picture)
    print(f"\nValidation text | the model's continuation:\n\n{prompt}|{continuation}")
    print(f"\n{report.table(results, trainer)}")
    print(f"\n{trainer.seconds:.0f} s of training; {trainer.log.path}, {picture}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Trains a small decoder with sparse attention, on Python's own sources or "
        "any other text. Ctrl-C stops it at the end of the step, with a checkpoint; the same "
        "command then goes on."
    )
    parser.add_argument("--preset", choices=list(PRESETS), default="cpu")
    parser.add_argument("--data", type=Path, help="folder of text, default Python's own sources")
    parser.add_argument("--run-dir", type=Path, help="default runs/PRESET, or PRESET-fp8")
    parser.add_argument("--restart", action="store_true", help="delete the run folder first")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--fp8", action="store_true", help="multiply in FP8: nn.Fp8Linear")
    for stage in ("dense", "warmup", "sparse"):
        parser.add_argument(f"--{stage}-steps", type=int, help=f"length of the {stage} stage")
    return parser
