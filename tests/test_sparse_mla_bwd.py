"""Tests the JAX code around the backward kernels of sparse MLA, which JAX code replaces here."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_dsa.core.rows import gather_rows, scatter_rows, scores, valid_slots
from jax_dsa.core.softmax import grouped, probabilities
from jax_dsa.ops.sparse_mla import cuda, xla
from jax_dsa.ops.sparse_mla.spec import Gradients, Operands, Options, Results

B, T, S, N, G, D, E, K = 2, 5, 9, 6, 2, 32, 24, 7

# sparse_mla_dkv_place of cuda/sparse_mla/sparse_mla.h.
PLACES = np.array([c // 16 * 16 + c % 8 // 2 * 4 + c // 8 % 2 * 2 + c % 2 for c in range(D)])


def call(target: str, operands: Any, avals: Any, scale: np.float32) -> tuple[Any, ...]:
    """Does what the FFI handler promises."""
    q, kv, indices, ends, topk_length, dout, top, log_sum, out, dlse, order, key = operands
    delta = jnp.sum(out * dout, axis=-1) - dlse
    valid = valid_slots(indices, ends, topk_length, S)
    gathered = gather_rows(kv, indices, valid, q.dtype)
    q, dout, top, log_sum, delta = (grouped(x, G) for x in (q, dout, top, log_sum, delta))
    p = probabilities(scores(float(scale), q, gathered, valid), top, log_sum)
    dp = jnp.einsum("btgme,btgke->btgmk", dout, gathered[..., :E])
    ds = p * (dp - delta[..., None]) * float(scale)
    dq = jnp.einsum("btgmk,btgkd->btgmd", ds, gathered).reshape(avals[0].shape)
    rows = jnp.einsum("btgmk,btgmd->btgkd", ds, q)
    rows = rows.at[..., :E].add(jnp.einsum("btgmk,btgme->btgke", p, dout))
    if order is not None:
        # For every `count` queries: their rows, in the order of their keys.
        queries, query_rows = order.shape
        count = avals[-1].shape[0] // query_rows
        pad = [(0, 0)] * 3 + [(0, query_rows // G - K), (0, 0)]
        rows = jnp.pad(rows, pad, constant_values=jnp.nan).reshape(queries, query_rows, D)
        dkv = jnp.zeros((B * S * G, D))
        for first in range(0, queries, count):
            some = slice(first, first + count)
            to = key[some].reshape(-1) - jnp.uint32(first // count * (B * S * G + 1))
            ascending = (jnp.diff(to.astype(jnp.int32)) >= 0).all()
            summed = rows[some].reshape(-1, D)[order[some].reshape(-1)]
            summed = jnp.where(ascending, summed, jnp.nan)
            dkv = dkv.at[to].add(summed, mode="drop")
        return dq, dkv.reshape(B, S, G, D), 0, 0
    zeros = jnp.zeros((B, S, G, D))
    dkv = scatter_rows(zeros, indices, valid, rows, deterministic=False)
    return dq, zeros.at[..., PLACES].set(dkv), 0, 0


ROW_BYTES = G * 64 * D * 2  # rows of one query
KERNELS = SimpleNamespace(
    call=call,
    extension=lambda: SimpleNamespace(sparse_mla_bwd_workspace=lambda **_: (0, 0, 0)),
)


@pytest.mark.parametrize(
    ("deterministic", "rows_from", "queries", "sorted_queries"),
    [
        (False, S * G * D * 4 + 1, 3, 5),
        (False, S * G * D * 4, 3, 5),
        (True, S * G * D * 4 + 1, 3, 5),
        (True, 0, 1, 2),
    ],
    ids=["reductions", "rows because they are faster", "rows", "rows of two calls"],
)
@pytest.mark.parametrize("with_sinks", [False, True])
def test_gradients(
    rng: np.random.Generator,
    monkeypatch: Any,
    deterministic: bool,
    rows_from: int,
    queries: int,
    sorted_queries: int,
    with_sinks: bool,
) -> None:
    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    options = Options(scale=0.3, value_dim=E, deterministic=deterministic)
    indices = jnp.asarray(rng.integers(-2, S + 2, size=(B, T, G, K)), jnp.int32)
    ends = jnp.asarray(rng.integers(0, S + 1, size=(B, T)), jnp.int32)
    lengths = jnp.asarray(rng.integers(0, K + 1, size=(B, T)), jnp.int32)
    sinks = jnp.tile(normal(1, N), (B, 1)).at[:, 0].set(jnp.inf) if with_sinks else None
    x = Operands(normal(B, T, N, D), normal(B, S, G, D), indices, ends, lengths, sinks)
    cotangents = Results(normal(B, T, N, E), None, normal(B, T, N))
    everything = x, xla.sparse_mla_fwd(options, x), cotangents
    want = xla.sparse_mla_bwd(options, *everything)
    by_rows = []

    def counted(target: str, operands: Any, *args: Any, **kwargs: Any) -> Any:
        by_rows.append(operands[-1] is not None)
        return call(target, operands, *args, **kwargs)

    monkeypatch.setattr(cuda, "ffi", SimpleNamespace(call=counted, extension=KERNELS.extension))
    monkeypatch.setattr(cuda, "ROWS_FROM", rows_from)
    monkeypatch.setattr(cuda, "ROWS_BUDGET", queries * ROW_BYTES)
    monkeypatch.setattr(cuda, "SORT_BUDGET", sorted_queries * B * G * 64 * 24)
    got = cuda.sparse_mla_bwd(options, want, *everything)
    assert set(by_rows) == {deterministic or rows_from <= S * G * D * 4}
    assert (got.sinks is None) == (sinks is None)
    for x, y in zip(got, want, strict=True):
        if y is not None:
            np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("shape", "wins"),
    {
        "sums fit in the L2": ((1, 4096, 8192, 128, 2048), False),
        "sums do not fit in the L2": ((1, 4096, 131072, 128, 2048), True),
        "sums of few queries fit in the L2": ((1, 4, 131072, 128, 2048), False),
        "sums of one batch entry fit in the L2": ((16, 512, 8192, 128, 2048), False),
        "few heads": ((1, 4096, 32768, 64, 2048), True),
        "several calls": ((1, 32768, 131072, 128, 2048), True),
        "several calls, no room for a second dkv": ((8, 32768, 131072, 128, 2048), False),
    }.values(),
)
def test_default_is_the_faster_route(shape: tuple[int, ...], wins: bool) -> None:
    b, t, s, n, k = shape
    q = jax.ShapeDtypeStruct((b, t, n, 576), jnp.bfloat16)
    kv = jax.ShapeDtypeStruct((b, s, 1, 576), jnp.bfloat16)
    indices = jax.ShapeDtypeStruct((b, t, 1, k), jnp.int32)
    x = Operands(q, kv, indices)
    assert cuda.sums_by_rows(Options(1.0, 512, deterministic=False), x) == wins
    assert cuda.sums_by_rows(Options(1.0, 512, deterministic=True), x)


@pytest.mark.parametrize("keys", [S, 5461, 5462, 50000], ids=lambda x: f"{x} keys")
def test_rows_by_key(rng: np.random.Generator, keys: int) -> None:
    """Rows of 4, 4 and 2 queries are sorted; keys up to 5461 fit in 16 bits."""
    indices = jnp.asarray(rng.integers(-2, keys + 2, size=(B, T, G, K)), jnp.int32)
    valid = (indices >= 0) & (indices < keys)
    order, key = cuda._rows_by_key(indices, valid, keys, 2, 4)
    batch, group = np.arange(B)[:, None, None, None], np.arange(G)[:, None]
    no_key = B * keys * G
    want = np.where(valid, (batch * keys + indices) * G + group, no_key)
    want = np.pad(want, [(0, 0)] * 3 + [(0, 64 - K)], constant_values=no_key)
    want = np.repeat(want[:, :, :, None], 2, axis=3).reshape(B * T, -1)
    for first in range(0, B * T, 4):
        some = want[first : first + 4].reshape(-1)
        ascending = np.argsort(some, kind="stable")
        np.testing.assert_array_equal(order[first : first + 4].reshape(-1), ascending)
        numbered = some[ascending] + first // 4 * (no_key + 1)
        np.testing.assert_array_equal(key[first : first + 4].reshape(-1), numbered)
    assert key.dtype == jnp.uint32


def test_no_queries(monkeypatch: Any) -> None:
    options = Options(scale=0.3, value_dim=E, deterministic=True)
    shapes = (B, 0, N, D), (B, S, G, D), (B, 0, G, K), (B, 0, N, E), (B, 0, N)
    q, kv, indices, out, lse = (jnp.zeros(shape) for shape in shapes)
    operands, results = Operands(q, kv, indices.astype(jnp.int32)), Results(out, lse, lse)
    monkeypatch.setattr(cuda, "ffi", KERNELS)
    avals = Gradients(q, kv, None)
    got = cuda.sparse_mla_bwd(options, avals, operands, results, results)
    assert got.q.shape == q.shape and got.kv.shape == kv.shape and not got.kv.any()


def test_workspace_of_the_kernel() -> None:
    """The launcher's sizes: bytes of counters, P and dS tiles, and reordered slots."""
    extension = pytest.importorskip("jax_dsa._cuda", reason="built without the extension")

    def workspace(queries: int, heads: int, slots: int = 2048, by_rows: bool = False) -> Any:
        return extension.sparse_mla_bwd_workspace(
            batch=1,
            queries=queries,
            keys=8192,
            heads=heads,
            groups=1,
            slots=slots,
            dim=576,
            queries_at_once=queries,
            by_rows=by_rows,
        )

    counters, tiles, order = workspace(4096, 64)
    assert tiles == 2 * 66 * 2 * 32 * 2**14 and order == (4096 * 2048 + 2048) * 4
    # Four queries of 16 heads are packed into one, whose slots are stored twice.
    packed_counters, packed_tiles, packed_order = workspace(4096, 16)
    assert packed_tiles == 4 * tiles and packed_counters == 16 + (counters - 16) // 4
    assert packed_order == (2 * 4096 * 2048 + 512 + 1024) * 4
    assert workspace(4096, 12) == workspace(4096, 64)
    assert workspace(4096, 16, by_rows=True)[2] == 0
    for empty in ((0, 16), (4096, 0), (4096, 16, 0)):
        assert all(x >= 0 for x in workspace(*empty))
