"""Tests `sparse_attention` and `sparse_attention_varlen` against loops in NumPy float64."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads
from support.compare import assert_matches
from support.marks import slow
from support.oracles import sparse_attention as oracle
from support.sparse_attention import B, D, E, G, K, N, grads, inputs, sizes_of_intermediates, three

from jax_dsa import (
    masked_attention,
    plain_xla,
    sparse_attention,
    sparse_attention_varlen,
    sparse_mla,
)
from jax_dsa.core import streaming

f32 = np.float32
FORCED = {"is_causal": True, "sink_blocks": 1, "local_blocks": 2}
TAIL = {"is_causal": True, "tail_block": True}
# T, S, block size, options. `query_start` and lengths are drawn where their name is given.
CASES: dict[str, tuple[int, int, int, dict[str, Any]]] = {
    "plain": (7, 30, 4, {}),
    "causal": (9, 30, 4, {"is_causal": True, "query_start": 5}),
    "starts": (5, 30, 4, {"is_causal": True, "query_start": "starts", **FORCED}),
    "before the first key": (7, 10, 4, {"query_start": -4, **FORCED, "tail_block": True}),
    "lengths": (6, 30, 16, {"key_value_seq_lengths": "lengths", **FORCED}),
    "topk": (7, 62, 16, {"topk_length": "topk", **TAIL}),
    "sinks": (6, 20, 4, {"sinks": "sinks", "deterministic": True, "scale": 0.3}),
    "tail": (9, 30, 4, {**TAIL, "query_start": 17}),
    "tail beside a sink": (9, 30, 4, {**TAIL, "sink_blocks": 2}),
    "all local": (6, 10, 4, {"is_causal": True, "local_blocks": 10**9, "query_start": 7}),
    "past the keys": (6, 10, 4, {"is_causal": True, "local_blocks": 9, "query_start": 22}),
    "documents": (30, 30, 4, {"segment_ids": "documents", **FORCED}),
    "documents not causal": (
        *(21, 21, 4),
        {"segment_ids": "documents", "key_value_seq_lengths": "lengths", "topk_length": "topk"},
    ),
    "tails of documents": (23, 23, 4, {"segment_ids": "documents", **TAIL}),
    "keys one by one": (6, 20, 1, {"is_causal": True, "query_start": 11}),
}


def drawn(options: dict[str, Any], rng: np.random.Generator, t: int, s: int) -> dict[str, Any]:
    """Returns the options with arrays in place of their names."""
    arrays = {
        "starts": np.array([0, s - 3], np.int32),
        "lengths": np.array([s - 5, 3], np.int32),
        "documents": np.sort(rng.integers(0, 4, (B, t)), axis=1).astype(np.int32)[:, ::-1].copy(),
        "topk": rng.integers(-1, K + 2, size=(B, t)).astype(np.int32),
        "sinks": np.array([np.inf, -np.inf, 0.5, 3], f32),
    }
    return {n: arrays[x] if isinstance(x, str) else x for n, x in options.items()}


def check(
    rng: np.random.Generator, args: tuple, options: dict[str, Any], tol: float = 1e-5
) -> None:
    """Compares results and gradients with the oracle."""
    want = oracle.sparse_attention(*args, **options)
    got = jax.jit(functools.partial(three, **options))(*args)
    assert_matches(got, [x.astype(f32) for x in want], tol)
    dout = rng.normal(size=want[0].shape).astype(f32)
    dlse = rng.normal(size=want[1].shape).astype(f32)
    held = {n: x for n, x in options.items() if n != "sinks"}
    run = jax.jit(functools.partial(grads, **held))
    got = run(args, dout, dlse, options.get("sinks"))
    exact = oracle.sparse_attention_grads(*args, dout, dlse, **options)
    exact = exact if "sinks" in options else exact[:3]
    assert_matches(jax.tree.leaves(got), [x.astype(f32) for x in exact], tol)


FAST = "plain", "causal", "before the first key", "topk", "sinks", "tail", "documents"


@pytest.mark.parametrize("name", [name if name in FAST else slow(name) for name in CASES])
def test_equals_the_oracle(name: str, rng: np.random.Generator) -> None:
    t, s, size, options = CASES[name]
    options = drawn(options, rng, t, s)
    shared = [True] if name in ("tail", "topk") else []
    check(rng, inputs(rng, t, s, size, *shared), {"block_size": size, **options})


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 4, 16, 32, 64, 128])
@pytest.mark.parametrize("t", [1, 62, 213])
@pytest.mark.parametrize("s", [1, 62, 213])
def test_sizes(t: int, s: int, size: int, rng: np.random.Generator) -> None:
    options = {"block_size": size, "query_start": s // 2, **FORCED}
    check(rng, inputs(rng, t, s, size), options, 3e-5)


@pytest.mark.parametrize(
    ("t", "s", "size"), [(1, 213, 64), slow(62, 1, 16), slow(213, 62, 4), slow(213, 213, 128)]
)
def test_equals_masked_attention(t: int, s: int, size: int, rng: np.random.Generator) -> None:
    """Without duplicates, a list of blocks is a mask."""
    q, k, v, _ = inputs(rng, t, s, size)
    blocks = -(-s // size)
    count = min(3, blocks)
    indices = np.argsort(rng.random((B, t, G, blocks)), axis=3)[..., :count].astype(np.int32)
    own = (np.arange(s) // size == indices[..., None]).any(3)
    mask = np.moveaxis(own, 1, 2)
    sinks = rng.normal(size=N).astype(f32)
    which = {"is_causal": True}

    def masked(q: Any, k: Any, v: Any) -> Any:
        return masked_attention(q, k, v, mask=jnp.asarray(mask), return_lse=True, **which)

    def sparse(q: Any, k: Any, v: Any) -> Any:
        return sparse_attention(q, k, v, indices, block_size=size, return_lse=True, **which)

    want, pull = jax.vjp(masked, q, k, v)
    got, own_pull = jax.vjp(sparse, q, k, v)
    assert_matches(got, want, 1e-5)
    assert_matches(own_pull(want), pull(want), 2e-5)
    gated = sparse_attention(q, k, v, indices, block_size=size, sinks=sinks, **which)
    lse = np.asarray(want[1])
    gate = np.where(np.isinf(lse), 1, 1 / (1 + np.exp(sinks - lse)))
    assert_matches(gated, want[0] * gate[..., None], 1e-5)


def test_equals_sparse_mla(rng: np.random.Generator) -> None:
    """Blocks of one key, one KV head, and values that are the first columns of the keys."""
    q, k, _, indices = inputs(rng, 9, 25, 1)
    k, indices, sinks = k[:, :, :1], indices[:, :, :1], rng.normal(size=N).astype(f32)
    options = {"is_causal": True, "query_start": 12, "sinks": sinks, "return_lse": True}

    def latent(q: Any, kv: Any) -> Any:
        return sparse_mla(q, kv, indices, value_dim=E, **options)

    def sparse(q: Any, kv: Any) -> Any:
        return sparse_attention(q, kv, kv[..., :E], indices, block_size=1, **options)

    want, pull = jax.vjp(latent, q, k)
    got, own_pull = jax.vjp(sparse, q, k)
    assert_matches(got, want, 1e-5)
    assert_matches(own_pull(want), pull(want), 1e-5)


def test_gradients_by_finite_differences(rng: np.random.Generator) -> None:
    with jax.enable_x64(True):
        q, k, v, indices = inputs(rng, 3, 9, 4)
        floats = [jnp.asarray(x, jnp.float64) for x in (q, k, v, rng.normal(size=N))]

        def fn(q: Any, k: Any, v: Any, sinks: Any) -> Any:
            call = functools.partial(sparse_attention, block_size=4, return_lse=True, **FORCED)
            out, lse = call(q, k, v, indices, sinks=sinks, query_start=5)
            return out, jnp.where(jnp.isinf(lse), 0, lse)

        check_grads(fn, floats, order=1, modes=["rev"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("alignment", [slow("top_left"), "bottom_right"])
def test_varlen(alignment: str, rng: np.random.Generator) -> None:
    """Each packed sequence gives what it gives alone, and padding gives nothing."""
    cu_q, cu_k = np.array([1, 6, 6, 13], np.int32), np.array([2, 13, 15, 24], np.int32)
    T, S, size = 15, 26, 4
    q, k, v, indices = (x[0] for x in inputs(rng, T, S, size))
    indices = rng.integers(-1, 4, size=indices.shape).astype(np.int32)
    lengths = rng.integers(0, K + 1, size=T).astype(np.int32)
    seen = np.zeros(S, bool)
    seen[2:13] = seen[15:24] = True
    k, v = (np.where(seen[:, None, None], x, np.nan).astype(f32) for x in (k, v))
    dout = rng.normal(size=(T, N, E)).astype(f32)
    options = {"block_size": size, **FORCED}

    def packed(q: Any, k: Any, v: Any) -> Any:
        return sparse_attention_varlen(
            q,
            k,
            v,
            indices,
            cu_q,
            cu_k,
            topk_length=lengths,
            causal_alignment=alignment,
            return_lse=True,
            return_max_logit=True,
            **options,
        )

    got, pull = jax.vjp(packed, q, k, v)
    want = [np.zeros((T, N, E), f32), *(np.full((T, N), -np.inf, f32) for _ in range(2))]
    dwant = [np.zeros(x.shape, f32) for x in (q, k, v)]
    for i in range(3):
        rows, keys = slice(cu_q[i], cu_q[i + 1]), slice(cu_k[i], cu_k[i + 1])
        if rows.start == rows.stop:
            continue
        start = (keys.stop - keys.start) - (rows.stop - rows.start)
        call = functools.partial(
            three,
            indices=indices[rows],
            topk_length=lengths[rows],
            query_start=int(start) if alignment == "bottom_right" else 0,
            **options,
        )
        own, own_pull = jax.vjp(call, q[rows], k[keys], v[keys])
        for whole, part in zip(want, own, strict=True):
            whole[rows] = part
        parts = own_pull((dout[rows], jnp.zeros_like(own[1]), jnp.zeros_like(own[2])))
        for whole, where, part in zip(dwant, (rows, keys, keys), parts, strict=True):
            whole[where] += part
    assert_matches(got, want, 1e-5)
    zeros = jnp.zeros_like(got[1])
    assert_matches(pull((dout, zeros, zeros)), dwant, 1e-5)


def test_nan_in_unseen_keys(rng: np.random.Generator) -> None:
    """Keys that no list names, and keys of listed blocks that are masked, are never read."""
    t, s, size = 6, 30, 4
    q, k, v, indices = inputs(rng, t, s, size)
    indices = np.where(indices == 2, 1, indices)
    q[0, t // 2] = np.nan  # its row sees no key
    options = {
        "block_size": size,
        "is_causal": True,
        "query_start": 13,
        "key_value_seq_lengths": np.array([17, 30], np.int32),
    }
    seen = np.zeros(k.shape[:3], bool)
    for (b, _, _), g, keys in oracle.selections(q, k, indices, **options):
        seen[b, keys, g] = True
    assert not seen.all()
    clean, dirty = (
        [np.where(seen[..., None], x, fill).astype(f32) for x in (k, v)] for fill in (0, np.nan)
    )
    dout = rng.normal(size=(B, t, N, E)).astype(f32)
    dlse = rng.normal(size=(B, t, N)).astype(f32)
    for deterministic in (False, True):
        both = [
            grads((q, *kv, indices), dout, dlse, deterministic=deterministic, **options)
            for kv in (clean, dirty)
        ]
        assert_matches(both[1], both[0], 0)
        assert all(np.isfinite(x).all() for x in both[0][:3])
    got = three(q, *dirty, indices, **options)
    assert_matches(got, three(q, *clean, indices, **options), 0)


@pytest.mark.parametrize("logit", [slow(-1e9), slow(-3e38), float(np.finfo(f32).min)])
def test_huge_scores(logit: float) -> None:
    """Rows of 1, 2 and 100 keys with one huge score share the softmax evenly."""
    k = np.zeros((1, 128, 1, 2), f32)
    k[..., 0], k[..., 1] = 1, np.linspace(-1, 1, 128)[:, None]
    k[0, 127, 0, 0] = 0  # the score of this key is 0
    q = np.zeros((1, 4, 1, 2), f32)
    q[..., 0] = logit
    indices = np.full((1, 4, 100), -1, np.int32)
    for t, count in enumerate((1, 2, 100)):
        indices[0, t, :count] = np.arange(count)
    indices[0, 3, :3] = 127, 4, 5
    v = np.linspace(0, 1, 128, dtype=f32).reshape(1, 128, 1, 1)
    options = {"block_size": 1, "scale": 1.0}
    check(np.random.default_rng(0), (q, k, v, indices), options, 1e-6)
    grad = jax.grad(lambda v: sparse_attention(q, k, v, indices, **options)[0, 2].sum())(v)
    np.testing.assert_allclose(grad.sum(), 1, rtol=1e-6)


def test_max_logit_has_no_gradient(rng: np.random.Generator) -> None:
    q, k, v, indices = inputs(rng, 3, 8, 4)

    def largest(q: Any, k: Any) -> Any:
        call = sparse_attention(q, k, v, indices, block_size=4, return_max_logit=True)
        return jnp.where(jnp.isinf(call[1]), 0, call[1]).sum()

    for gradient in jax.grad(largest, (0, 1))(q, k):
        assert not gradient.any()


def test_nan_in_queries() -> None:
    """A NaN among 384 scores, which XLA drops from their maximum on a CPU."""
    q = np.ones((1, 12, 1, 4), f32)
    q[0, 2] = np.nan
    indices = np.tile(np.array([-1, 0, -1], np.int32), (1, 12, 1))
    k = np.ones((1, 3, 1, 4), f32)
    for result in three(q, k, k, indices, block_size=128):
        np.testing.assert_array_equal(
            np.isnan(result).any((0, 2, *range(3, result.ndim))), q[0, :, 0, 0] != 1
        )


def test_chunks(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 2 queries and a remainder of 1 give the same results as a single chunk."""
    args = inputs(rng, 7, 30, 4)
    sinks = rng.normal(size=N).astype(f32)
    options = {"block_size": 4, **FORCED, "query_start": 11}

    def run(*args: Any) -> Any:
        results, pull = jax.vjp(
            lambda q, k, v, sinks: three(q, k, v, args[3], sinks=sinks, **options),
            *args[:3],
            sinks,
        )
        return results, pull(tuple(jnp.where(jnp.isinf(x), 0, x) for x in results))

    with plain_xla():
        want = jax.jit(run)(*args)
    rows = B * (K + 3) * 4 * G * (D + E)
    monkeypatch.setattr(streaming, "BUDGET", rows * 4 * 8)
    jax.clear_caches()
    assert_matches(jax.jit(lambda *x: run(*x))(*args), want, 1e-5)


def test_no_array_holds_the_gathered_rows_of_all_queries() -> None:
    """The largest intermediate has at most the bytes of the budget."""
    T, S, size, slots, dim = 4096, 8192, 64, 16, 128
    shapes = [(1, T, 16, dim), (1, S, 1, dim), (1, S, 1, dim)]
    arrays = [jax.ShapeDtypeStruct(x, jnp.bfloat16) for x in shapes]
    indices = jax.ShapeDtypeStruct((1, T, slots), jnp.int32)

    def loss(q: Any, k: Any, v: Any, indices: Any) -> Any:
        options: Any = {"block_size": size, "is_causal": True, "implementation": "xla"}
        call = functools.partial(sparse_attention, **options)
        return call(q, k, v, indices).astype(jnp.float32).sum()

    sizes = sizes_of_intermediates(jax.grad(loss, (0, 1, 2)), *arrays, indices)
    assert len(sizes) > 100
    assert max(sizes) <= streaming.BUDGET < T * slots * size * dim * 2
