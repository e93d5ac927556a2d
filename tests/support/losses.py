"""Arguments for the tests of the indexer's losses."""

from __future__ import annotations

import numpy as np


def dense_inputs(
    rng: np.random.Generator,
    B: int = 2,
    T: int = 5,
    J: int = 2,
    C: int = 3,
    S: int = 8,
    N: int = 4,
    G: int = 2,
    D: int = 3,
) -> tuple[np.ndarray, ...]:
    """Returns index_q, index_k, index_weights, q and kv of `dense_indexer_kl_loss`."""
    shapes = [(B, T, J, C), (B, S, C), (B, T, J), (B, T, N, D), (B, S, G, D)]
    return tuple(rng.normal(size=s).astype(np.float32) for s in shapes)
