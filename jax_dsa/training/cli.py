"""The demo's command line: trains a small language model and shows what came of it."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

import jax
from jax.experimental import multihost_utils

from jax_dsa.core.extras import needs_extra

with needs_extra("examples", __name__):
    from jax_dsa.training import report
    from jax_dsa.training.config import PRESETS, in_fp8
    from jax_dsa.training.data import VOCAB, Corpus, RunError, load_corpus
    from jax_dsa.training.mesh import AXES, make_mesh
    from jax_dsa.training.trainer import Trainer

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from jax_dsa.training.config import TrainConfig


def main(argv: list[str] | None = None) -> int:
    """Runs the demo; 0 if it finished, 130 if it was interrupted and can be resumed."""
    parser = _parser()
    args = parser.parse_args(argv)
    if args.distributed:
        # On CPUs, programs that run side by side meet in any order, and so would their collectives.
        jax.config.update("jax_cpu_enable_async_dispatch", False)
        jax.distributed.initialize()
    say = print if jax.process_index() == 0 else _nothing
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
        f"sequences of {config.seq_len} {unit}, {config.model.attention.top_k} keys selected\n"
        f"{_devices(mesh)}; run folder: {folder}"
        + (f"; going on from step {trainer.step}" if trainer.step else "")
    )
    if not trainer.run():
        say(f"\nstopped after step {trainer.step}; the same command goes on from there")
        return 130

    results = report.evaluate(trainer)
    prompt, continuation = report.sample(trainer)
    picture = folder / "curves.png"
    if jax.process_index() == 0:
        report.plot(trainer, results, picture)
    say(f"\nValidation text | the model's continuation:\n\n{prompt}|{continuation}")
    say(f"\n{report.table(results, trainer)}")
    say(f"\n{trainer.seconds:.0f} s of training; {trainer.log.path}, {picture}")
    return 0


def _config(args: argparse.Namespace) -> TrainConfig:
    """The preset, with what is asked for in its place."""
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
    """The text, which the first process writes as tokens and all read."""
    corpus = None
    if jax.process_index() == 0:
        corpus = load_corpus(args.data, folder, vocab=args.vocab)
    multihost_utils.sync_global_devices("corpus")
    return corpus or load_corpus(args.data, folder, vocab=args.vocab)


def _nothing(_: str) -> None:
    pass


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Trains a small decoder with sparse attention, on Python's own sources or "
        "any other text. Ctrl-C stops it at the end of the step, with a checkpoint; the same "
        "command then goes on."
    )
    parser.add_argument("--preset", choices=list(PRESETS), default="cpu")
    parser.add_argument("--data", type=Path, help="folder of text, default Python's own sources")
    parser.add_argument("--run-dir", type=Path, help="default runs/PRESET, or PRESET-fp8")
    parser.add_argument("--restart", action="store_true", help="begin anew")
    parser.add_argument(
        "--vocab",
        type=int,
        default=VOCAB,
        help="train a tokenizer of this size on the text; default bytes",
    )
    parser.add_argument("--seed", type=int)
    parser.add_argument(
        "--mesh",
        type=_mesh_sizes,
        metavar="AXIS=SIZE,...",
        help=f"sizes of the axes {', '.join(AXES)}; default 1, and for data all devices left",
    )
    parser.add_argument(
        "--distributed",
        action="store_true",
        help="be one of several processes, which jax.distributed.initialize() finds",
    )
    parser.add_argument(
        "--packed", action="store_true", default=None, help="let no token see another file's"
    )
    parser.add_argument("--batch-size", type=int, help="sequences a step, on all devices together")
    parser.add_argument(
        "--accumulate", type=int, help="parts of a batch that a step goes through one by one"
    )
    parser.add_argument(
        "--tensorboard", action="store_true", help="write the metrics for TensorBoard, too"
    )
    parser.add_argument("--fp8", action="store_true", help="multiply in FP8: nn.Fp8Linear")
    for stage in ("dense", "warmup", "sparse"):
        parser.add_argument(f"--{stage}-steps", type=int, help=f"length of the {stage} stage")
    return parser


def _mesh_sizes(text: str) -> dict[str, int]:
    """Sizes by name; what they may be, `make_mesh` says."""
    pairs = (entry.split("=") for entry in text.split(","))
    return {name: int(size) for name, size in pairs}


def _devices(mesh: Mesh) -> str:
    axes = ", ".join(f"{name} {size}" for name, size in mesh.shape.items() if size > 1)
    kind = mesh.devices.flat[0].device_kind
    return f"{mesh.size} devices ({kind}): {axes}" if axes else f"device: {kind}"
