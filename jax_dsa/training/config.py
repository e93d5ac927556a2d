"""What a training run consists of, and its presets."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

from jax_dsa.core.checks import Args
from jax_dsa.nn import AttentionConfig, DecoderConfig
from jax_dsa.training.data import VOCAB

Stage = Literal["dense", "warmup", "sparse"]

_FROM_0 = ("dense_steps", "warmup_steps", "sparse_steps", "ramp_steps", "seed")
_FROM_1 = (
    *("seq_len", "batch_size", "accumulate", "sample_tokens"),
    *("log_every", "probe_every", "checkpoint_every"),
    *("probe_sequences", "eval_sequences", "eval_batch"),
)


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """One run: `dense_steps` of dense attention, `warmup_steps` of the indexer alone,
    `sparse_steps` of both.

    DeepSeek-V3.2 starts from a trained dense model; the dense stage makes one. Step numbers count
    batches over all stages.
    """

    model: DecoderConfig
    seq_len: int
    batch_size: int
    dense_steps: int
    warmup_steps: int
    sparse_steps: int
    learning_rate: float
    indexer_learning_rate: float
    ramp_steps: int
    """Steps over which each optimiser's learning rate rises from zero."""
    remat: str
    """See `jax_dsa.training.remat_policy`."""
    log_every: int
    probe_every: int
    """Steps between validations on `probe_sequences`; every stage also ends with one."""
    probe_sequences: int
    eval_sequences: int
    """Validation sequences of the final table."""
    eval_batch: int
    checkpoint_every: int
    sample_tokens: int
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    final_learning_rate: float = 0.1
    """Share of the learning rate that the decay during the sparse stage ends at."""
    seed: int = 0
    accumulate: int = 1
    """Parts of a batch that a step goes through one after the other, to take less memory."""
    packed: bool = False
    """No token sees another document. Otherwise a window of the text is one sequence to the model,
    whatever it consists of."""

    def __post_init__(self) -> None:
        """Rejects numbers that no run can have."""
        args = Args("TrainConfig", "", np.empty(0), "K")
        for least, names in enumerate((_FROM_0, _FROM_1)):
            for name in names:
                args.integer(name, getattr(self, name), least, 2**63 - 1)

    @property
    def bos(self) -> int:
        """The token that begins a document: the vocabulary's last one."""
        return self.model.vocab - 1

    @property
    def total_steps(self) -> int:
        """Steps of all stages."""
        return self.dense_steps + self.warmup_steps + self.sparse_steps

    @property
    def sparse_start(self) -> int:
        """The first step of the sparse stage."""
        return self.dense_steps + self.warmup_steps

    def stage(self, step: int) -> Stage:
        """The stage that step number `step` belongs to."""
        if step < self.dense_steps:
            return "dense"
        return "warmup" if step < self.sparse_start else "sparse"


def settings(config: TrainConfig | DecoderConfig) -> dict[str, str]:
    """The leaves of a configuration as text, as checkpoints keep them."""
    return _leaves(dataclasses.asdict(config))


def _leaves(config: dict[str, Any], prefix: str = "") -> dict[str, str]:
    leaves: dict[str, str] = {}
    for name, value in config.items():
        if isinstance(value, dict):
            leaves |= _leaves(value, f"{prefix}{name}.")
        else:
            leaves[prefix + name] = repr(value)
    return leaves


def cpu_preset() -> TrainConfig:
    """A model of a million parameters that two CPU cores train in a few minutes."""
    attention = AttentionConfig(
        model_dim=128,
        num_heads=4,
        q_rank=96,
        kv_rank=64,
        nope_dim=32,
        rope_dim=16,
        v_dim=32,
        index_heads=4,
        index_dim=32,
        index_rope_dim=16,
        top_k=16,
    )
    return TrainConfig(
        model=DecoderConfig(attention, vocab=VOCAB, num_layers=3, mlp_dim=384),
        seq_len=256,
        batch_size=4,
        dense_steps=700,
        warmup_steps=130,
        sparse_steps=170,
        learning_rate=3e-3,
        indexer_learning_rate=3e-3,
        ramp_steps=40,
        remat="none",
        log_every=10,
        probe_every=100,
        probe_sequences=16,
        eval_sequences=128,
        eval_batch=16,
        checkpoint_every=250,
        sample_tokens=400,
    )


def h200_preset() -> TrainConfig:
    """Sequences of 8192 tokens with 2048 selected keys in bfloat16, for one large GPU."""
    attention = AttentionConfig(
        model_dim=1024,
        num_heads=16,
        q_rank=768,
        kv_rank=512,
        nope_dim=128,
        rope_dim=64,
        v_dim=128,
        index_heads=16,
        index_dim=64,
        index_rope_dim=32,
        top_k=2048,
        dtype=jnp.bfloat16,
    )
    return TrainConfig(
        model=DecoderConfig(attention, vocab=VOCAB, num_layers=8, mlp_dim=2816),
        seq_len=8192,
        batch_size=2,
        dense_steps=300,
        warmup_steps=60,
        sparse_steps=60,
        learning_rate=6e-4,
        indexer_learning_rate=1e-3,
        ramp_steps=30,
        remat="attention",
        log_every=5,
        probe_every=60,
        probe_sequences=2,
        eval_sequences=8,
        eval_batch=1,
        checkpoint_every=100,
        sample_tokens=600,
    )


def v32_preset() -> TrainConfig:
    """Two layers with DeepSeek-V3.2's attention on sequences of 131072 tokens, to be measured.

    The feed-forward layers are narrow: they are not what such a run is to show.
    """
    attention = AttentionConfig(
        model_dim=7168,
        num_heads=128,
        q_rank=1536,
        kv_rank=512,
        nope_dim=128,
        rope_dim=64,
        v_dim=128,
        index_heads=64,
        index_dim=128,
        index_rope_dim=64,
        top_k=2048,
        dtype=jnp.bfloat16,
        query_chunk=16384,
    )
    return TrainConfig(
        model=DecoderConfig(attention, vocab=VOCAB, num_layers=2, mlp_dim=4096),
        seq_len=131072,
        batch_size=1,
        dense_steps=10,
        warmup_steps=10,
        sparse_steps=10,
        learning_rate=2e-4,
        indexer_learning_rate=1e-3,
        ramp_steps=5,
        remat="selection",
        log_every=1,
        probe_every=10,
        probe_sequences=1,
        eval_sequences=1,
        eval_batch=1,
        checkpoint_every=100,
        sample_tokens=200,
        packed=True,
    )


PRESETS = {"cpu": cpu_preset, "h200": h200_preset, "v32": v32_preset}


def in_fp8(config: TrainConfig) -> TrainConfig:
    """The same run with the model's projections and feed-forward layers in FP8."""
    attention = dataclasses.replace(config.model.attention, fp8=True)
    return dataclasses.replace(config, model=dataclasses.replace(config.model, attention=attention))
