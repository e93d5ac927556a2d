"""The configuration of a training run, and presets."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

from jax_dsa.core.checks import Args
from jax_dsa.nn import AttentionConfig, DecoderConfig, GroupedConfig
from jax_dsa.training.data import VOCAB
from jax_dsa.training.remat import POLICY_NAMES

Stage = Literal["dense", "warmup", "sparse"]

_AT_LEAST_0 = ("dense_steps", "warmup_steps", "sparse_steps", "ramp_steps", "seed")
_AT_LEAST_1 = (
    *("seq_len", "batch_size", "accumulate", "sample_tokens"),
    *("log_every", "probe_every", "checkpoint_every"),
    *("probe_sequences", "eval_sequences", "eval_batch"),
)
_RATES = ("learning_rate", "indexer_learning_rate", "weight_decay", "final_learning_rate")


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """The configuration of one training run.

    A run has three stages: dense attention, the warm-up of the indexer alone, and sparse attention
    with both. DeepSeek-V3.2 starts from a trained dense model; here the dense stage trains one.
    Steps are numbered over all stages, and each step takes one batch.

    Attributes:
        model: The decoder's configuration.
        seq_len: Tokens per sequence.
        batch_size: Sequences per step, over all devices.
        dense_steps: Steps of the dense stage.
        warmup_steps: Steps of the indexer's warm-up.
        sparse_steps: Steps of the sparse stage.
        learning_rate: Peak learning rate of the backbone.
        indexer_learning_rate: Peak learning rate of the indexers.
        ramp_steps: Steps over which each optimizer's learning rate rises from zero.
        remat: Name of the rematerialisation policy; see `jax_dsa.training.remat_policy`.
        log_every: Steps between rows of the metrics file.
        probe_every: Steps between validations on `probe_sequences`. Each stage also ends with one.
        probe_sequences: Validation sequences of these validations.
        eval_sequences: Validation sequences of the final table.
        eval_batch: Validation sequences per batch.
        checkpoint_every: Steps between checkpoints.
        sample_tokens: Tokens of the text that the demo generates at the end.
        weight_decay: AdamW's decay of matrices; other parameters do not decay. Default: 0.1.
        clip_norm: The norm to which each optimizer clips its gradients. Default: 1.0.
        final_learning_rate: The learning rate at the end of the sparse stage, as a fraction of the
            peak. Default: 0.1.
        seed: Seed of the parameters, of the order of the data, and of all random draws. Default: 0.
        accumulate: Microbatches per step. They are processed one after the other to save memory.
            Default: 1.
        packed: Whether tokens attend only to tokens of their own document. Otherwise a window of
            the text is one sequence, even if it contains several documents. Default: False.
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
    remat: str
    log_every: int
    probe_every: int
    probe_sequences: int
    eval_sequences: int
    eval_batch: int
    checkpoint_every: int
    sample_tokens: int
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    final_learning_rate: float = 0.1
    seed: int = 0
    accumulate: int = 1
    packed: bool = False

    def __post_init__(self) -> None:
        """Checks the numbers.

        Raises:
            ValueError: If a count is too small, a rate is negative or not finite, or `remat` is not
                the name of a policy.
        """
        args = Args("TrainConfig", "", np.empty(0), "K")
        for least, names in enumerate((_AT_LEAST_0, _AT_LEAST_1)):
            for name in names:
                args.integer(name, getattr(self, name), least, 2**63 - 1)
        args.option("remat", self.remat, self.remat in POLICY_NAMES, f"one of {POLICY_NAMES}")
        for name in _RATES:
            value = args.real(name, getattr(self, name))
            args.option(name, value, value >= 0, "a number of at least 0")
        args.option("clip_norm", self.clip_norm, self.clip_norm > 0, "a positive number")
        if isinstance(a := self.model.attention, GroupedConfig):
            want = "'max' or 'mean': a run trains indexers"
            args.option("model.attention.indexer", a.indexer, a.indexer is not None, want)

    @property
    def bos(self) -> int:
        """The token that precedes each document: the vocabulary's last one."""
        return self.model.vocab - 1

    @property
    def total_steps(self) -> int:
        """The number of steps of all stages together."""
        return self.dense_steps + self.warmup_steps + self.sparse_steps

    @property
    def sparse_start(self) -> int:
        """The first step of the sparse stage."""
        return self.dense_steps + self.warmup_steps

    def stage(self, step: int) -> Stage:
        """Returns the stage of step number `step`."""
        if step < self.dense_steps:
            return "dense"
        return "warmup" if step < self.sparse_start else "sparse"


def settings(config: TrainConfig | DecoderConfig) -> dict[str, str]:
    """Returns the leaves of a configuration as text, the form in which checkpoints keep them."""
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
    """Returns a model of a million parameters, which two CPU cores train in a few minutes."""
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
    """Returns a bfloat16 model for one large GPU: 8192 tokens per sequence, 2048 selected keys."""
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
    """Returns two layers with DeepSeek-V3.2's attention and sequences of 131072 tokens.

    This preset is for measuring attention, so its feed-forward layers are narrow.
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


def _with_attention(config: TrainConfig, attention: AttentionConfig | GroupedConfig) -> TrainConfig:
    """Returns the same run with another attention."""
    return dataclasses.replace(config, model=dataclasses.replace(config.model, attention=attention))


def cpu_pools_preset() -> TrainConfig:
    """Returns the CPU preset with GLM-5.3-Flash's attention: pools of 4 keys, no position."""
    config = cpu_preset()
    own: dict[str, Any] = {"nope_dim": 48, "rope_dim": 0, "index_rope_dim": 0, "index_pool": 4}
    return _with_attention(config, dataclasses.replace(config.model.attention, **own))


def cpu_blocks_preset() -> TrainConfig:
    """Returns the CPU preset with MiniMax-M3's attention: blocks of keys for each KV head."""
    attention = GroupedConfig(
        model_dim=128,
        num_heads=4,
        kv_heads=2,
        head_dim=32,
        rope_dim=16,
        indexer="max",
        block_size=4,
        top_k=4,
        index_heads=2,
        index_dim=32,
    )
    return _with_attention(cpu_preset(), attention)


def cpu_means_preset() -> TrainConfig:
    """Returns the CPU preset with Qwen3.8's attention: means of 4 keys, one list, a gate."""
    config = cpu_blocks_preset()
    own: dict[str, Any] = {"indexer": "mean", "index_heads": 4, "gate": True}
    return _with_attention(config, dataclasses.replace(config.model.attention, **own))


def h200_blocks_preset() -> TrainConfig:
    """Returns `h200_preset` with MiniMax-M3's attention: 16 blocks of 128 of up to 8192 keys."""
    attention = GroupedConfig(
        model_dim=1024,
        num_heads=16,
        kv_heads=2,
        head_dim=128,
        rope_dim=64,
        indexer="max",
        block_size=128,
        top_k=16,
        index_heads=2,
        index_dim=128,
        dtype=jnp.bfloat16,
    )
    return _with_attention(h200_preset(), attention)


PRESETS = {
    "cpu": cpu_preset,
    "cpu-pools": cpu_pools_preset,
    "cpu-blocks": cpu_blocks_preset,
    "cpu-means": cpu_means_preset,
    "h200": h200_preset,
    "h200-blocks": h200_blocks_preset,
    "v32": v32_preset,
}


def in_fp8(config: TrainConfig) -> TrainConfig:
    """Returns the same run with the projections and feed-forward layers in FP8."""
    return _with_attention(config, dataclasses.replace(config.model.attention, fp8=True))
