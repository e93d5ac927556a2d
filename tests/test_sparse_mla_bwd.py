"""What surrounds the backward kernels of sparse MLA, with plain JAX in their place."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from quick import compile_quickly  # noqa: F401

from jax_dsa.ops import sparse_mla_bwd as module
from jax_dsa.ops.sparse_mla import Options
from jax_dsa.reference import sparse_mla as reference

B, T, S, N, G, D, E, K = 2, 5, 9, 6, 2, 32, 24, 7

# sparse_mla_dkv_place of cuda/sparse_mla/sparse_mla.h.
PLACES = np.array([c // 16 * 16 + c % 8 // 2 * 4 + c // 8 % 2 * 2 + c % 2 for c in range(D)])


def handler(
    target: str, operands: Any, avals: Any, attrs: Any, aliases: Any = None
) -> tuple[Any, ...]:
    """The handlers' contracts."""
    if target == "jax_dsa.sparse_mla_sum_rows.v1":
        rows, order, key, dkv = operands
        summed = rows.astype(jnp.float32)[order]
        return (dkv.at[key].add(summed, mode="drop"),)
    q, kv, indices, ends, topk_length, dout, lse, out, dlse = operands
    delta = jnp.sum(out * dout, axis=-1) - dlse
    valid = reference.valid_slots(indices, ends, topk_length, S)
    gathered = reference.gather_rows(kv, indices, valid, q.dtype)
    q, dout, lse, delta = (reference.grouped(x, G) for x in (q, dout, lse, delta))
    p = reference.probabilities(reference.scores(float(attrs["scale"]), q, gathered, valid), lse)
    dp = jnp.einsum("btgme,btgke->btgmk", dout, gathered[..., :E])
    ds = p * (dp - delta[..., None]) * float(attrs["scale"])
    dq = jnp.einsum("btgmk,btgkd->btgmd", ds, gathered).reshape(avals[0].shape)
    rows = jnp.einsum("btgmk,btgmd->btgkd", ds, q)
    rows = rows.at[..., :E].add(jnp.einsum("btgmk,btgme->btgke", p, dout))
    if attrs["by_rows"]:
        padded = avals[1].shape[0] // (B * q.shape[1] * G)
        pad = [(0, 0)] * 3 + [(0, padded - K), (0, 0)]
        return dq, jnp.pad(rows, pad, constant_values=jnp.nan).reshape(avals[1].shape), 0, 0
    zeros = jnp.zeros((B, S, G, D))
    dkv = reference.scatter_rows(zeros, indices, valid, rows, deterministic=False)
    return dq, zeros.at[..., PLACES].set(dkv), 0, 0


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_composition(
    rng: np.random.Generator, monkeypatch: Any, deterministic: bool, with_sinks: bool
) -> None:
    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    options = Options(scale=0.3, value_dim=E, deterministic=deterministic)
    indices = jnp.asarray(rng.integers(-2, S + 2, size=(B, T, G, K)), jnp.int32)
    ends = jnp.asarray(rng.integers(0, S + 1, size=(B, T)), jnp.int32)
    lengths = jnp.asarray(rng.integers(0, K + 1, size=(B, T)), jnp.int32)
    sinks = jnp.tile(normal(1, N), (B, 1)).at[:, 0].set(jnp.inf) if with_sinks else None
    operands = normal(B, T, N, D), normal(B, S, G, D), indices, ends, lengths, sinks
    out, lse = reference.sparse_mla_fwd(options, *operands)
    everything = *operands, out, lse, normal(B, T, N, E), normal(B, T, N)
    want = reference.sparse_mla_bwd(options, *everything)
    monkeypatch.setattr(module, "ffi", SimpleNamespace(handler=handler))
    monkeypatch.setattr(module, "ROWS_BUDGET", 2 * B * G * 64 * D * 2)  # two queries at a time
    got = module.sparse_mla_bwd(options, want, *everything)
    assert (got[2] is None) == (sinks is None)
    for x, y in zip(got, want, strict=True):
        if y is not None:
            np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)
