"""The results of a finished run: a table, PASS/FAIL checks, and a text sample."""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jax_dsa.training.data import VOCAB, to_text
from jax_dsa.training.evaluate import SELECTIONS
from jax_dsa.training.sampling import generate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jax_dsa.training.trainer import Trainer

TOLERANCE = 1.02
"""The largest ratio of sparse attention's validation loss to dense attention's that passes."""


@dataclasses.dataclass(frozen=True)
class Results:
    """Measurements of a run on its validation files.

    Attributes:
        dense: Loss of the trained model with dense instead of sparse attention, in nats per token.
        sparse: Loss of the trained model with sparse attention.
        control: Loss of the backbone that trained on the same batches with dense attention
            throughout. NaN without a sparse stage, because only that stage has a control.
        recall: Mass recall of each selection, one number per layer.
        warmup_kl: The indexers' KL before and after the warm-up, on the probe sequences. NaN where
            no stage ended at that step.
        tokens_per_second: Median rate of each stage.
    """

    dense: float
    sparse: float
    control: float
    recall: dict[str, np.ndarray]
    warmup_kl: tuple[float, float]
    tokens_per_second: dict[str, float]

    def checks(self) -> list[tuple[bool, str]]:
        """Returns whether each check of the run passed, and what it checks."""
        before, after = self.warmup_kl
        recall = {name: float(layers.mean()) for name, layers in self.recall.items()}

        def missed_less(other: str) -> tuple[bool, str]:
            missed, baseline = 1 - recall["indexer"], 1 - recall[other]
            return missed < baseline / 2, (
                f"the indexer misses less than half the attention mass that {other} keys miss: "
                f"{missed:.3f} < {baseline:.3f} / 2"
            )

        def within(name: str, loss: float) -> tuple[bool, str]:
            return self.sparse <= TOLERANCE * loss, (
                f"sparse validation loss within 2 % of {name}: {self.sparse:.4f} against "
                f"{loss:.4f} ({self.sparse / loss - 1:+.2%})"
            )

        return [
            (after < before / 2, f"warm-up KL more than halved: {before:.3f} to {after:.3f}"),
            missed_less("random"),
            missed_less("recency"),
            within("the same model with dense attention", self.dense),
            within("the model trained with dense attention throughout", self.control),
        ]


def evaluate(trainer: Trainer) -> Results:
    """Returns the results of a finished run."""
    state, config = trainer.state, trainer.config
    batches = trainer.validation(config.eval_sequences)
    backbone, indexer = state.backbone.params, state.indexer.params
    loss = trainer.evaluator.loss
    rows = trainer.log.rows()
    kl = {int(r["step"]): float(r["validation_kl"]) for r in rows if r["validation_kl"]}
    rates = {
        stage: [
            float(r["tokens_per_second"])
            for r in rows
            if r["stage"] == stage and r["tokens_per_second"]
        ]
        for stage in ("dense", "warmup", "sparse")
    }
    return Results(
        dense=loss(backbone, indexer, batches, sparse=False),
        sparse=loss(backbone, indexer, batches, sparse=True),
        control=loss(state.control.params, indexer, batches, sparse=False)
        if config.sparse_steps
        else math.nan,
        recall={
            k: v for k, v in trainer.evaluator.selection(state, batches).items() if k in SELECTIONS
        },
        warmup_kl=(
            kl.get(config.dense_steps, math.nan),
            kl.get(config.sparse_start, math.nan),
        ),
        tokens_per_second={k: statistics.median(v) if v else math.nan for k, v in rates.items()},
    )


def table(results: Results, trainer: Trainer) -> str:
    """Returns the results as text."""
    config = trainer.config
    keys, length = config.model.attention.attended, config.seq_len
    bits = 1 / (math.log(2) * trainer.corpus.bytes_per_token)

    def loss(name: str, value: float) -> tuple[str, str, str]:
        return name, f"{value:.4f}", f"{value * bits:.4f}"

    losses = [
        ("validation loss", f"nats/{token_unit(trainer)}", "bits/byte"),
        loss(f"sparse attention, top {keys} of up to {length} keys", results.sparse),
        loss("same model, dense attention", results.dense),
        loss("control: dense attention throughout", results.control),
    ]
    layers = [f"layer {i}" for i in range(config.model.num_layers)]
    names = {
        "indexer": "trained indexer",
        "recency": f"last {keys} keys",
        "random": "random keys",
        "best": "best possible",
    }
    recalls = [("top-k mass recall", "mean", *layers)] + [
        (title, *(f"{x:.3f}" for x in (results.recall[key].mean(), *results.recall[key])))
        for key, title in names.items()
    ]
    rates = [
        ("tokens/s", *results.tokens_per_second),
        ("median", *(f"{x:,.0f}" for x in results.tokens_per_second.values())),
    ]
    checks = [f"{'PASS' if ok else 'FAIL'}  {text}" for ok, text in results.checks()]
    return "\n\n".join([grid(losses), grid(recalls), grid(rates), "\n".join(checks)])


def token_unit(trainer: Trainer) -> str:
    """Returns the name of what a token is: "byte" without a tokenizer, else "token"."""
    return "byte" if trainer.corpus.vocab == VOCAB else "token"


def grid(rows: Sequence[tuple[str, ...]]) -> str:
    """Returns an aligned table of text. The first row is the header."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]

    def line(row: tuple[str, ...]) -> str:
        cells = [row[0].ljust(widths[0])] + [c.rjust(w) for c, w in zip(row[1:], widths[1:])]
        return "  ".join(cells)

    head, *body = rows
    return "\n".join([line(head), "-" * len(line(head)), *map(line, body)])


def sample(trainer: Trainer) -> tuple[str, str]:
    """Returns a piece of validation text, and the model's continuation of it.

    In Python's sources the text ends before the name of a method. Text and continuation together
    are at most as long as the training sequences, because the model was trained on no position
    beyond.
    """
    config, tokens = trainer.config, trainer.corpus.validation[:1_000_000]
    length = min(300, config.seq_len // 3)
    steps = min(config.sample_tokens, config.seq_len - length)
    mark = b"\n    def "
    is_bytes = trainer.corpus.vocab == VOCAB
    found = tokens.astype(np.uint8).tobytes().find(mark, length) if is_bytes else -1
    end = found + len(mark) if found >= 0 else length
    prompt = tokens[end - length : end].astype(np.int32)
    state = trainer.state
    key = jax.random.fold_in(jax.random.wrap_key_data(state.rng), config.total_steps)

    @functools.partial(jax.jit, out_shardings=NamedSharding(trainer.program.mesh, PartitionSpec()))
    def decode(backbone: Any, indexer: Any, prompt: jax.Array) -> jax.Array:
        model = trainer.program.model(backbone, indexer)
        return generate(model, prompt, steps, key, temperature=0.8)

    with jax.set_mesh(trainer.program.mesh):
        out = decode(state.backbone.params, state.indexer.params, prompt[None])
    bos, tokenizer = trainer.corpus.bos, trainer.corpus.tokenizer
    return to_text(prompt, bos, tokenizer), to_text(np.asarray(out[0]), bos, tokenizer)
