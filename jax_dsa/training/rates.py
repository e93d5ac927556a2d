"""The efficiency of a run: operations per step, the device's peak rate, and peak memory."""

from __future__ import annotations

import functools
import time
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jax_dsa.nn import DecoderLM, GroupedConfig
from jax_dsa.training.losses import INDEXER

if TYPE_CHECKING:
    from jax_dsa.training.config import Stage, TrainConfig


def flops_per_token(config: TrainConfig) -> dict[Stage, float]:
    """Returns the floating-point operations per token that a step of each stage needs.

    The operations are counted, not measured: two for each multiplication of a matrix product, over
    the keys that a query sees or selects. A backward pass counts as two forward passes. Recomputed
    operations do not count, and a sequence counts as one document. The sparse stage includes its
    dense control.
    """
    c, length, layers = config.model.attention, config.seq_len, config.model.num_layers
    model = nnx.eval_shape(lambda: DecoderLM(config.model, rngs=nnx.Rngs(0)))
    # Embeddings are looked up, not multiplied.
    indexer, _, backbone = nnx.state(model, INDEXER, nnx.PathContains("embed"), ...)
    matrices, index_matrices = _matrix_flops(backbone), _matrix_flops(indexer)
    indexers = config.model.layers.count("full")
    ends = np.arange(1, length + 1)
    if isinstance(c, GroupedConfig):
        widths = 2 * c.head_dim, 2 * c.head_dim, c.head_dim
        size, keys = c.block_size if c.indexer == "mean" else 1, c.top_k * c.block_size
    else:
        latent = c.kv_rank + c.rope_dim
        widths = c.nope_dim + c.rope_dim + c.v_dim, latent + c.kv_rank, latent
        size, keys = c.index_pool or 1, c.top_k
    in_pools = ends // size * size
    # The means over queries, of keys that a query sees, that are scored, and that are selected.
    seen, scored = float(ends.mean()), float(in_pools.mean())
    selected = float(np.minimum(in_pools, keys).mean())
    attended = selected + (seen - scored if c.attended > keys else 0)
    per_key = [2 * c.num_heads * width for width in widths]
    dense, sparse = layers * per_key[0] * seen, layers * per_key[1] * attended
    teacher = indexers * per_key[2]  # per key
    scores = indexers * 2 * c.index_heads * c.index_dim / size  # per key in a pool
    # The forward pass and the weights' gradients. The indexer's input gets no gradient.
    learn = 2 * index_matrices
    control = 3 * (matrices + dense)
    return {
        "dense": control,
        "warmup": matrices + dense + learn + teacher * seen + 3 * scores * scored,
        "sparse": control
        + 3 * (matrices + sparse)
        + learn
        + scores * scored
        + (teacher + 2 * scores) * selected,
    }


def _matrix_flops(params: Any) -> int:
    """Returns the operations per token of a forward pass through all matrices."""
    return sum(2 * x.size for x in jax.tree.leaves(params) if x.ndim > 1)


@functools.cache
def matmul_peak(dtype: Any) -> float:
    """Measures the rate of a large matrix product on this process's first device.

    Args:
        dtype: The dtype of the matrices.

    Returns:
        Floating-point operations per second.
    """
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
    """Returns the peak memory use, in GiB, of the fullest of this process's devices.

    None if a device does not report its memory.
    """
    stats = [device.memory_stats() for device in jax.local_devices()]
    return max(s["peak_bytes_in_use"] for s in stats if s) / 2**30 if all(stats) else None
