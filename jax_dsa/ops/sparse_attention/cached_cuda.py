"""Calls of the CUDA kernel for block-sparse attention over flat and paged caches."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from jax_dsa.core import ffi
from jax_dsa.core.checks import FP8
from jax_dsa.core.typing import Array, Int
from jax_dsa.ops.masked_attention.spec import Results
from jax_dsa.ops.sparse_attention.blocks import listed_blocks, num_slots
from jax_dsa.ops.sparse_attention.cuda import DECODE_DIMS, MAX_DECODE_KEYS, MAX_DECODE_ROWS
from jax_dsa.ops.sparse_attention.spec import Operands, Options

_STORED = jnp.dtype(jnp.bfloat16), jnp.dtype(FP8)


def supports(options: Options, x: Operands) -> str | None:
    """Returns None, or the reason why the kernel does not cover this call."""
    B, T, N, D = x.q.shape
    E, keys = x.v.shape[3], _num_keys(options, x)
    if x.q.dtype != jnp.bfloat16 or x.k.dtype not in _STORED:
        return f"it takes bfloat16, and caches also in {jnp.dtype(FP8).name}, got {x.q.dtype}"
    if D not in DECODE_DIMS or D != E:
        return f"it has D=E in {DECODE_DIMS}, got D={D} and E={E}"
    if B * T * N > MAX_DECODE_ROWS:
        return f"it takes up to {MAX_DECODE_ROWS} queries times heads, got {B * T * N}"
    listed = num_slots(options, x.indices.shape[3], keys) * options.block_size
    if max(keys, listed) > MAX_DECODE_KEYS:
        return f"it takes up to {MAX_DECODE_KEYS} keys, and keys of a list, got {keys} and {listed}"
    return None


def sparse_attention_decode_fwd(options: Options, avals: Results, x: Operands) -> Results:
    """Computes `cached.sparse_attention_decode_fwd` on the kernel."""
    factors = (
        None if a is None else a.astype(jnp.float32) for a in (x.sinks, x.k_scale, x.v_scale)
    )
    sinks, k_scale, v_scale = factors
    blocks, ends = listed_blocks(options, x, _num_keys(options, x)), _ends(x)
    results = ffi.call(
        "jax_dsa.sparse_attention_decode.v1",
        [x.q, x.k, x.v, blocks, ends, sinks, x.page_table, k_scale, v_scale],
        [*avals],
        scale=np.float32(options.scale),
        block_size=np.int32(options.block_size),
        page_size=np.int32(options.page_size or 1),
        batch_invariant=np.bool_(options.batch_invariant),
    )
    return Results(*results)


def _num_keys(options: Options, x: Operands) -> int:
    """Returns the number of keys that a request may have."""
    if x.page_table is None or options.page_size is None:
        return x.k.shape[1]
    return x.page_table.shape[1] * options.page_size


def _ends(x: Operands) -> Int[Array, "B T"]:
    """Returns the end of the keys that each query sees."""
    assert x.lengths is not None
    return x.lengths if x.positions is None else jnp.minimum(x.lengths, x.positions + 1)
