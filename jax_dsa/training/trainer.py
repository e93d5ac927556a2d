"""The training loop: batches, steps, progress, validation probes, metrics and checkpoints."""

from __future__ import annotations

import contextlib
import csv
import math
import signal
import time
from typing import TYPE_CHECKING, Any

import jax
from tqdm import tqdm

from jax_dsa.core.extras import needs_extra
from jax_dsa.training.checkpoint import Checkpoints
from jax_dsa.training.config import settings
from jax_dsa.training.data import Batches, Corpus, RunError, validation_batches
from jax_dsa.training.evaluate import SELECTIONS, Evaluator
from jax_dsa.training.rates import flops_per_token, matmul_peak, peak_memory
from jax_dsa.training.steps import Program

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from jax.sharding import Mesh

    from jax_dsa.nn import DecoderConfig
    from jax_dsa.training.config import TrainConfig

RECALLS = tuple(f"recall_{name}" for name in SELECTIONS)
COLUMNS = (
    "step",
    "stage",
    "tokens",
    "seconds",
    "tokens_per_second",
    "matmul_share",
    "memory_gib",
    "lm_loss",
    "kl",
    "control_loss",
    "validation_dense",
    "validation_sparse",
    "validation_control",
    "validation_kl",
    *RECALLS,
)
Row = dict[str, Any]


def layer_columns(config: DecoderConfig) -> tuple[str, ...]:
    """Returns the metrics columns of the individual layers, in the order of the layers."""
    kl = [f"validation_kl_layer_{i}" for i, kind in enumerate(config.layers) if kind == "full"]
    return (*kl, *(f"recall_indexer_layer_{i}" for i in range(config.num_layers)))


class Trainer:
    """One training run in a folder.

    The folder holds `metrics.csv`, `checkpoints/` and optionally `tensorboard/`. If it has a
    checkpoint, the run resumes from it.

    Args:
        config: The run's configuration. A resumed run needs the configuration it started with.
        corpus: The text. A resumed run needs the same tokens.
        folder: The run's folder.
        mesh: The mesh to run on; see `jax_dsa.training.mesh`. Default: one device.
        tensorboard: Whether to write the metrics for TensorBoard too.
        restart: Whether to delete the folder's checkpoints and start from the beginning.

    Raises:
        RunError: If the corpus does not fit the configuration, or if the folder's run has another
            configuration or corpus.
    """

    def __init__(
        self,
        config: TrainConfig,
        corpus: Corpus,
        folder: Path,
        mesh: Mesh | None = None,
        *,
        tensorboard: bool = False,
        restart: bool = False,
    ) -> None:
        if corpus.vocab != config.model.vocab:
            raise RunError(
                f"Trainer: the corpus has a vocabulary of {corpus.vocab} tokens, expected that of "
                f"the model, {config.model.vocab}"
            )
        self.config, self.corpus, self.folder = config, corpus, folder
        self.program = Program(config, mesh)
        self.evaluator = Evaluator(self.program)
        self.batches = Batches(corpus.train, config.seq_len + 1, config.batch_size, config.seed)
        self.checkpoints = Checkpoints(folder / "checkpoints")
        columns = (*COLUMNS, *layer_columns(config.model))
        self.log = Log(
            folder / "metrics.csv", columns, folder / "tensorboard" if tensorboard else None
        )
        self.validation(config.eval_sequences)  # Fail here, not at the end, if there is too little.
        self.state = self.program.init()
        self.seconds = 0.0
        if restart:  # Delete checkpoints only after all checks have passed.
            self.checkpoints.clear()
        self._resume()

    @property
    def step(self) -> int:
        """The number of completed steps."""
        return int(self.state.step)

    def run(self, seconds: float = math.inf) -> bool:
        """Trains until all steps are done, SIGINT arrives, or the time is over.

        In the last two cases training stops at the end of the current step and writes a checkpoint.

        Args:
            seconds: Time limit. Use it only in runs of a single process.

        Returns:
            Whether all steps are done.
        """
        config, first = self.config, self.step
        bar = tqdm(
            total=config.total_steps,
            initial=first,
            unit="step",
            dynamic_ncols=True,
            disable=jax.process_index() > 0,
        )
        peak = self.program.mesh.size * matmul_peak(config.model.attention.dtype)
        flops = flops_per_token(config)
        clock = Clock(first)
        probe: Row = {}
        with bar, _interrupts() as stop:
            for step in range(first, config.total_steps):
                stage = config.stage(step)
                bar.set_description(stage)
                tokens = self.batches.rows(step, self.program.local_rows())
                self.state, metrics = self.program.step(self.state, tokens)
                done = step + 1
                stage_ends = done == config.total_steps or config.stage(done) != stage
                stage_starts = step in (0, config.dense_steps, config.sparse_start)
                # The first step of a stage, and of a resumed run, waits for the compiler. Its time
                # is not a training rate.
                compiles = stage_starts or step == first
                logs = done % config.log_every == 0 or stage_ends or stage_starts
                bar.update()
                if compiles or logs:
                    jax.block_until_ready(metrics)
                if logs:
                    row = {"step": done, "stage": stage} | jax.tree.map(float, metrics)
                    rate = clock.rate(done, config.seq_len * config.batch_size)
                    row["tokens_per_second"] = "" if compiles else rate
                    row["matmul_share"] = "" if compiles else rate * flops[stage] / peak
                    row["memory_gib"] = peak_memory()
                    row["tokens"] = done * config.seq_len * config.batch_size
                    if stage_ends or done % config.probe_every == 0:
                        probe = self.probe(stage)
                        row |= probe
                    row["seconds"] = self.seconds + clock.total()
                    self.log.append(row)
                    bar.set_postfix_str(_postfix(row, probe))
                if compiles or logs:
                    clock.mark(done)
                stop.is_set |= clock.total() > seconds
                if stop.is_set or done % config.checkpoint_every == 0 or stage_ends:
                    self.save(clock.total())
                    clock.mark(done)
                if stop.is_set:
                    break
        self.seconds += clock.total()
        self.checkpoints.close()
        self.log.close()
        return self.step == config.total_steps

    def probe(self, stage: str) -> Row:
        """Returns losses and recalls on a few validation sequences, as columns of the metrics."""
        config, state, loss = self.config, self.state, self.evaluator.loss
        batches = self.validation(config.probe_sequences)
        backbone, indexer = state.backbone.params, state.indexer.params
        row: Row = {"validation_dense": loss(backbone, indexer, batches, sparse=False)}
        found = self.evaluator.selection(state, batches)
        row["validation_kl"] = float(found["kl"].mean())
        row |= {f"recall_{name}": float(found[name].mean()) for name in SELECTIONS}
        layers = map(float, (*found["kl"], *found["indexer"]))
        row |= zip(layer_columns(config.model), layers, strict=True)
        if stage != "dense":
            row["validation_sparse"] = loss(backbone, indexer, batches, sparse=True)
        if stage == "sparse":
            row["validation_control"] = loss(state.control.params, indexer, batches, sparse=False)
        return row

    def validation(self, sequences: int) -> list[Any]:
        """Returns batches of windows that are spread over the validation files."""
        c = self.config
        size = min(c.eval_batch, sequences)
        return validation_batches(self.corpus.validation, c.seq_len + 1, size, sequences)

    def save(self, seconds: float) -> None:
        """Starts to write a checkpoint.

        Args:
            seconds: Time that the current call of `run` has taken so far.
        """
        facts = {
            "config": settings(self.config),
            "corpus": self.corpus.fingerprint,
            "corpus_name": self.corpus.name,
            "seconds": self.seconds + seconds,
        }
        self.checkpoints.save(self.state, facts)

    def _resume(self) -> None:
        step = self.checkpoints.latest()
        if step is None:
            self.log.keep_until(0)
            return
        facts = self.checkpoints.facts(step)
        old, new = facts["config"], settings(self.config)
        changes = [
            f"{name} was {old.get(name)}, is {new.get(name)}"
            for name in old | new
            if old.get(name) != new.get(name)
        ]
        if facts["corpus"] != self.corpus.fingerprint:
            changes.append(
                f"corpus was {facts['corpus_name']} ({facts['corpus']}), "
                f"is {self.corpus.name} ({self.corpus.fingerprint})"
            )
        if changes:
            raise RunError(
                f"Trainer: the run in {self.folder} has another configuration or corpus: "
                f"{'; '.join(changes)}. Use the same ones to resume it, or start from the "
                f"beginning with --restart or another --run-dir"
            )
        self.state = self.checkpoints.restore(step, self.state)
        self.seconds = facts["seconds"]
        self.log.keep_until(step)


class Clock:
    """Measures the time since training started or resumed, and the rate of the latest steps.

    Args:
        step: The number of steps that were completed before.
    """

    def __init__(self, step: int) -> None:
        self._started = self._marked = time.perf_counter()
        self._step = step

    def total(self) -> float:
        """Returns the seconds since the clock was made."""
        return time.perf_counter() - self._started

    def rate(self, step: int, tokens: int) -> float:
        """Returns the tokens per second since the last mark.

        Args:
            step: The number of completed steps.
            tokens: Tokens per step.
        """
        return (step - self._step) * tokens / (time.perf_counter() - self._marked)

    def mark(self, step: int) -> None:
        """Starts a new measurement at this moment, after `step` completed steps."""
        self._step, self._marked = step, time.perf_counter()


class Log:
    """The metrics file, which gets a row every few steps.

    Only the first process of a run writes it.

    Args:
        path: The CSV file.
        columns: Its columns.
        tensorboard: Folder that gets the same numbers for TensorBoard, or None.
    """

    def __init__(
        self, path: Path, columns: Sequence[str] = COLUMNS, tensorboard: Path | None = None
    ) -> None:
        self.path, self.columns = path, columns
        self._writes = jax.process_index() == 0
        self._board: Any = None
        self._open: Any = None
        if tensorboard is not None:
            with needs_extra("tensorboard", "jax_dsa.training --tensorboard"):
                from tensorboardX import SummaryWriter
            self._open = lambda step: SummaryWriter(
                str(tensorboard), purge_step=step + 1, flush_secs=10
            )

    def rows(self) -> list[dict[str, str]]:
        """Returns the rows of the file, as text."""
        if not self.path.exists():
            return []
        with self.path.open(newline="") as file:
            return list(csv.DictReader(file))

    def keep_until(self, step: int) -> None:
        """Deletes the rows of later steps, and creates the file if it does not exist.

        A row that is incomplete, because the process was killed while writing it, is deleted too.
        """
        rows = [r for r in self.rows() if None not in r.values() and int(r["step"]) <= step]
        if not self._writes:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        new = self.path.with_suffix(".tmp")
        with new.open("w", newline="") as file:
            writer = csv.DictWriter(file, self.columns)
            writer.writeheader()
            writer.writerows(rows)
        new.replace(self.path)
        if self._open is not None:
            self._board = self._open(step)

    def close(self) -> None:
        """Waits until all rows are written."""
        if self._board is not None:
            self._board.close()

    def append(self, row: Row) -> None:
        """Appends a row. Columns that the row lacks stay empty."""
        shown = {k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()}
        if self._writes:
            with self.path.open("a", newline="") as file:
                csv.DictWriter(file, self.columns).writerow(shown)
        if self._board is not None:
            for name, value in row.items():
                if name != "step" and isinstance(value, (int, float)):
                    self._board.add_scalar(name, value, row["step"])


class _Stop:
    is_set = False


@contextlib.contextmanager
def _interrupts() -> Iterator[_Stop]:
    """Turns the first SIGINT into a request to stop. A second one interrupts as usual."""
    stop = _Stop()

    def handle(*_: Any) -> None:
        stop.is_set = True
        signal.signal(signal.SIGINT, previous)

    previous = signal.signal(signal.SIGINT, handle)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, previous)


def _postfix(row: Row, probe: Row) -> str:
    parts = []
    if row["tokens_per_second"]:
        parts.append(f"{row['tokens_per_second']:,.0f} tok/s")
    parts.append(f"LM {row['lm_loss']:.3f}")
    if "kl" in row:
        parts.append(f"KL {row['kl']:.3f}")
    if "recall_indexer" in probe:
        parts.append(f"recall {probe['recall_indexer']:.3f}")
    return ", ".join(parts)
