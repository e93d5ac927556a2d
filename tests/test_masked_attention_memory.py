"""Tests that `masked_attention` in XLA works in chunks of queries and in little memory."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.compare import assert_matches
from support.masked_attention import B, D, E, G, N, S, T, normal, qkv

from jax_dsa.core import streaming
from jax_dsa.ops.block_mask import make_block_mask
from jax_dsa.ops.masked_attention import masked_attention, xla
from jax_dsa.ops.masked_attention.spec import Operands, Options, Results


@pytest.mark.parametrize("kind", ["kept", "block-mask"])
def test_chunks(kind: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 2 queries and a remainder of 1 give the same results as a single chunk."""
    mask: Any = jnp.asarray(rng.random((B, 1, T, S)) < 0.7)
    segments = jnp.asarray(rng.integers(0, 2, (B, T)), jnp.int32), jnp.zeros((B, S), jnp.int32)
    causal = jnp.zeros((1, T), jnp.int32), jnp.arange(1, T + 1, dtype=jnp.int32)[None]
    kept = rows = tiles = bits = None
    if kind == "kept":
        kept = jnp.asarray(rng.integers(-1, S, (B, G, S)), jnp.int32)
        bias_heads, bias = "g", normal(rng, 1, G, T, S)
    else:
        blocks = make_block_mask(mask, block_q=3, block_k=8)
        mask, rows = None, jnp.arange(T, dtype=jnp.int32)[None]
        tiles, bits = blocks.tiles, blocks.bits
        bias_heads, bias = "x", normal(rng, B, 1, 1, S)
    q, k, v = qkv(rng)
    x = Operands(
        q=q,
        k=k,
        v=v,
        bias=bias,
        mask=mask,
        starts=causal[0],
        ends=causal[1],
        q_segments=segments[0],
        kv_segments=segments[1],
        kv_indices=kept,
        rows=rows,
        tiles=tiles,
        bits=bits,
        sinks=normal(rng, B, N),
    )
    options = Options(0.4, None, bias_heads, "x", "x", deterministic=False)
    dy = Results(normal(rng, B, T, N, E), None, normal(rng, B, T, N))

    def run(x: Operands) -> tuple:
        y = xla.masked_attention_fwd(options, x)
        return y, xla.masked_attention_bwd(options, x, y, dy)

    whole = jax.jit(run)(x)
    monkeypatch.setattr(streaming, "BUDGET", 5 * 4 * B * N * S * 2)
    assert_matches(jax.jit(lambda x: run(x))(x), whole, 1e-5)  # the order of sums differs


def test_a_sum_over_chunks_is_rounded_once(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gradient of a shared bfloat16 bias accumulates in float32 over 300 chunks."""
    monkeypatch.setattr(streaming, "BUDGET", 1)
    q, k, v = (normal(rng, 1, n, 1, D).astype(jnp.bfloat16) for n in (300, 5, 5))
    bias = normal(rng, 1, 1, 1, 5).astype(jnp.bfloat16)

    def total(q: Any, k: Any, v: Any, bias: Any) -> jax.Array:
        return masked_attention(q, k, v, bias, return_lse=True)[1].sum()

    got = jax.jit(jax.grad(total, 3))(q, k, v, bias)
    wide = [x.astype(jnp.float32) for x in (q, k, v, bias)]
    want = jax.jit(jax.grad(total, 3))(*wide)
    assert got.dtype == jnp.bfloat16
    assert_matches(got.astype(jnp.float32), want, 5e-3)


def test_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gradient takes far less memory than all scores, even if each score has a bias."""
    # Use shapes that no other test has, since a cached trace would not see the budget.
    q, k, v = jnp.zeros((2, 252, 4, 8)), jnp.zeros((2, 252, 2, 8)), jnp.zeros((2, 252, 2, 7))
    bias, mask = jnp.zeros((1, 2, 252, 252)), jnp.ones((1, 1, 252, 252), bool)
    monkeypatch.setattr(streaming, "BUDGET", 2**17)

    def loss(*arrays: Any) -> jax.Array:
        return masked_attention(*arrays, mask, is_causal=True).sum()

    compiled = jax.jit(jax.grad(loss, (0, 1, 2, 3))).lower(q, k, v, bias).compile()
    # The scores would take 2 MB. dbias takes half a megabyte and may be copied.
    assert compiled.memory_analysis().temp_size_in_bytes < 1.2e6
