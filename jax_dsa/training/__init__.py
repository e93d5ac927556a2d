"""Training with sparse attention: losses, stages, metrics and rematerialisation policies.

This package needs Flax and Optax, which the extra `flax` installs. The demo
(`examples/train_lm.py`) is built from it; the modules `trainer`, `summary`, `plots` and `cli` serve
only the demo and need the extra `examples`.
"""

from jax_dsa.core.extras import needs_extra

with needs_extra("flax", __name__):
    from jax_dsa.training.config import PRESETS, TrainConfig
    from jax_dsa.training.losses import INDEXER, indexer_loss, next_token_loss
    from jax_dsa.training.metrics import (
        attention_mass,
        mass_recall,
        random_indices,
        recency_indices,
    )
    from jax_dsa.training.remat import RESIDUALS, remat_policy
    from jax_dsa.training.sampling import Sampler, generate
    from jax_dsa.training.steps import Learner, Program, TrainState

__all__ = [
    "INDEXER",
    "PRESETS",
    "RESIDUALS",
    "Learner",
    "Program",
    "Sampler",
    "TrainConfig",
    "TrainState",
    "attention_mass",
    "generate",
    "indexer_loss",
    "mass_recall",
    "next_token_loss",
    "random_indices",
    "recency_indices",
    "remat_policy",
]
