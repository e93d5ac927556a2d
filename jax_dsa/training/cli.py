"""The demo's command line: trains a small language model and prints and plots the results."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

import jax
from jax.experimental import multihost_utils

from jax_dsa.core.extras import needs_extra

with needs_extra("examples", __name__):
    from jax_dsa.training import plots, summary
    from jax_dsa.training.config import PRESETS, in_fp8
    from jax_dsa.training.data import VOCAB, Corpus, RunError, load_corpus
    from jax_dsa.training.mesh import AXES, make_mesh
    from jax_dsa.training.trainer import Trainer

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from jax_dsa.training.config import TrainConfig


def main(argv: list[str] | None = None) -> int:
    """Runs the demo.

    Args:
        argv: The command line's arguments. Default: `sys.argv[1:]`.

    Returns:
        0 if the run finished, 130 if it was interrupted and can be resumed.
    """
    parser = _parser()
    args = parser.parse_args(argv)
    if args.distributed:
        # On CPUs, programs that are dispatched asynchronously may run in a different order in each
        # process. Their collectives would then wait for each other forever.
        jax.config.update("jax_cpu_enable_async_dispatch", False)
        jax.distributed.initialize()
    say = print if jax.process_index() == 0 else _ignore
    try:
        config = _config(args)
    except ValueError as error:
        parser.error(str(error))
    folder = args.run_dir or Path("runs") / (args.preset + ("-fp8" if args.fp8 else ""))
    try:
        mesh = make_mesh(args.mesh)
        corpus = _load(args, folder)
        options = {"tensorboard": args.tensorboard, "restart": args.restart}
        trainer = Trainer(config, corpus, folder, mesh, **options)
    except RunError as error:
        parser.error(str(error))
    size = sum(x.size for x in jax.tree.leaves(trainer.state.backbone.params))
    index = sum(x.size for x in jax.tree.leaves(trainer.state.indexer.params))
    unit = "bytes" if args.vocab == VOCAB else "tokens"
    say(
        f"{corpus.name}: {corpus.files[0]} files, {len(corpus.train) / 1e6:.1f} M {unit} to train "
        f"on; {corpus.files[1]} files, {len(corpus.validation) / 1e6:.1f} M {unit} to validate on\n"
        f"model: {size / 1e6:.2f} M parameters and {index / 1e6:.2f} M in the indexers; "
        f"sequences of {config.seq_len} {unit}, "
        f"{config.model.attention.attended} keys selected\n"
        f"{_devices(mesh)}; run folder: {folder}"
        + (f"; resuming from step {trainer.step}" if trainer.step else "")
    )
    if not trainer.run():
        say(f"\nstopped after step {trainer.step}; run the same command again to resume")
        return 130

    results = summary.evaluate(trainer)
    prompt, continuation = summary.sample(trainer)
    picture = folder / "curves.png"
    if jax.process_index() == 0:
        plots.plot(trainer, results, picture)
    say(f"\nValidation text | the model's continuation:\n\n{prompt}|{continuation}")
    say(f"\n{summary.table(results, trainer)}")
    say(f"\n{trainer.seconds:.0f} s of training; {trainer.log.path}, {picture}")
    return 0


def _config(args: argparse.Namespace) -> TrainConfig:
    """Returns the preset, changed by the options that were given."""
    config = PRESETS[args.preset]()
    stages = ("dense_steps", "warmup_steps", "sparse_steps")
    settings = (*stages, "seed", "batch_size", "accumulate", "packed")
    given = {name: getattr(args, name) for name in settings}
    model = dataclasses.replace(config.model, vocab=args.vocab)
    config = dataclasses.replace(
        config, model=model, **{k: v for k, v in given.items() if v is not None}
    )
    return in_fp8(config) if args.fp8 else config


def _load(args: argparse.Namespace, folder: Path) -> Corpus:
    """Returns the corpus. The first process writes the tokens, and all processes read them."""
    corpus = None
    if jax.process_index() == 0:
        corpus = load_corpus(args.data, folder, vocab=args.vocab)
    multihost_utils.sync_global_devices("corpus")
    return corpus or load_corpus(args.data, folder, vocab=args.vocab)


def _ignore(_: str) -> None:
    pass


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Trains a small decoder with sparse attention on Python's own sources or "
        "any other text. Ctrl-C stops the run at the end of the step and writes a checkpoint. "
        "The same command then resumes the run."
    )
    parser.add_argument("--preset", choices=list(PRESETS), default="cpu")
    parser.add_argument("--data", type=Path, help="folder of text (default: Python's own sources)")
    parser.add_argument(
        "--run-dir",
        type=Path,
        help="folder of the run (default: runs/PRESET, with --fp8 runs/PRESET-fp8)",
    )
    parser.add_argument(
        "--restart", action="store_true", help="start from the beginning instead of resuming"
    )
    parser.add_argument(
        "--vocab",
        type=int,
        default=VOCAB,
        help="train a tokenizer of this size on the text (default: tokens are bytes)",
    )
    parser.add_argument("--seed", type=int)
    parser.add_argument(
        "--mesh",
        type=_mesh_sizes,
        metavar="AXIS=SIZE,...",
        help=f"sizes of the axes {', '.join(AXES)} (default: 1; for data, all remaining devices)",
    )
    parser.add_argument(
        "--distributed",
        action="store_true",
        help="run as one of several processes, which jax.distributed.initialize() finds",
    )
    parser.add_argument(
        "--packed",
        action="store_true",
        default=None,
        help="let tokens attend only to tokens of the same file",
    )
    parser.add_argument(
        "--batch-size", type=int, help="sequences per step, over all devices together"
    )
    parser.add_argument(
        "--accumulate",
        type=int,
        help="number of microbatches that a step processes one after the other",
    )
    parser.add_argument(
        "--tensorboard", action="store_true", help="also write the metrics for TensorBoard"
    )
    parser.add_argument("--fp8", action="store_true", help="use FP8 linear layers (nn.Fp8Linear)")
    for stage in ("dense", "warmup", "sparse"):
        parser.add_argument(f"--{stage}-steps", type=int, help=f"steps of the {stage} stage")
    return parser


def _mesh_sizes(text: str) -> dict[str, int]:
    """Parses sizes by axis name. `make_mesh` checks them."""
    pairs = (entry.split("=") for entry in text.split(","))
    return {name: int(size) for name, size in pairs}


def _devices(mesh: Mesh) -> str:
    axes = ", ".join(f"{name} {size}" for name, size in mesh.shape.items() if size > 1)
    kind = mesh.devices.flat[0].device_kind
    return f"{mesh.size} devices ({kind}): {axes}" if axes else f"device: {kind}"
