"""What a step multiplies, what the device can multiply, and what it holds: a run's efficiency."""

from __future__ import annotations

import functools
import time
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jax_dsa.nn import DecoderLM
from jax_dsa.training.losses import INDEXER

if TYPE_CHECKING:
    from jax_dsa.training.config import Stage, TrainConfig


def flops_per_token(config: TrainConfig) -> dict[Stage, float]:
    """Operations that a step of each stage has to do for a token, by count: two for each
    multiplication of a matrix product, over the keys that a query sees or selects; a backward pass
    is two forward ones. What is recomputed does not count, and a sequence counts as one document.
    The sparse stage's include its control's.
    """
    c, length, layers = config.model.attention, config.seq_len, config.model.num_layers
    model = nnx.eval_shape(lambda: DecoderLM(config.model, rngs=nnx.Rngs(0)))
    # Embeddings are looked up.
    indexer, _, backbone = nnx.state(model, INDEXER, nnx.PathContains("embed"), ...)
    matrices, index_matrices = _products(backbone), _products(indexer)
    indexers = config.model.layers.count("full")
    seen = (length + 1) / 2
    selected = float(np.minimum(np.arange(1, length + 1), c.top_k).mean())
    latent = c.kv_rank + c.rope_dim
    dense = layers * 2 * c.num_heads * (c.nope_dim + c.rope_dim + c.v_dim) * seen
    sparse = layers * 2 * c.num_heads * (latent + c.kv_rank) * selected
    teacher = indexers * 2 * c.num_heads * latent  # a key
    scores = indexers * 2 * c.index_heads * c.index_dim  # a key
    learn = 2 * index_matrices  # nothing goes back beyond the indexer
    control = 3 * (matrices + dense)
    return {
        "dense": control,
        "warmup": matrices + dense + learn + (teacher + 3 * scores) * seen,
        "sparse": control
        + 3 * (matrices + sparse)
        + learn
        + scores * seen
        + (teacher + 2 * scores) * selected,
    }


def _products(params: Any) -> int:
    """Operations a token of a forward pass through all matrices."""
    return sum(2 * x.size for x in jax.tree.leaves(params) if x.ndim > 1)


@functools.cache
def matmul_peak(dtype: Any) -> float:
    """Operations a second of a large product on this process's first device, measured."""
    device = jax.local_devices()[0]
    size = 512 if device.platform == "cpu" else 8192
    x = jax.device_put(jnp.full((size, size), 1e-3, dtype), device)
    multiply = jax.jit(jnp.matmul)
    jax.block_until_ready(multiply(x, x))
    times = []
    for _ in range(3):
        start = time.perf_counter()
        y = x
        for _ in range(8):
            y = multiply(x, y)
        jax.block_until_ready(y)
        times.append(time.perf_counter() - start)
    return 8 * 2 * size**3 / min(times)


def peak_memory() -> float | None:
    """GiB at most in use on one of this process's devices; None where nobody counts."""
    stats = [device.memory_stats() for device in jax.local_devices()]
    return max(s["peak_bytes_in_use"] for s in stats if s) / 2**30 if all(stats) else None
