"""Tests `attn_dist` against the float64 oracle, its edge cases and its error messages."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.test_util import check_grads
from support.compare import assert_as_good_as, assert_matches, assert_unmoved
from support.oracles import attn_dist as oracle
from support.oracles import sparse_mla as attention

from jax_dsa import attn_dist, block_tokens, sparse_attention, sparse_mla
from jax_dsa.core import streaming
from jax_dsa.core.rows import query_bytes
from jax_dsa.ops.attn_dist import xla
from jax_dsa.ops.attn_dist.spec import Operands, Options, Results

INT_MIN, INT_MAX = -(2**31), 2**31 - 1
B, T, S, N, G, D, K = 2, 5, 11, 12, 2, 10, 9


def inputs(
    rng: np.random.Generator,
    dtype: Any = np.float32,
    t: int = T,
    s: int = S,
    k: int = K,
    g: int = G,
) -> tuple:
    """Returns q, kv, indices and lse.

    The indices contain duplicates and invalid ones, and one row has only invalid ones.
    """
    q = rng.normal(size=(B, t, N, D)).astype(dtype)
    kv = rng.normal(size=(B, s, g, D)).astype(dtype)
    indices = rng.integers(0, max(s, 1), size=(B, t, g, k)).astype(np.int32)
    bad = np.array([INT_MIN, -1, s, INT_MAX], np.int32)
    indices = np.where(rng.random(indices.shape) < 0.3, rng.choice(bad, indices.shape), indices)
    indices[0, t // 2] = -1
    _, lse = attention.sparse_mla(q, kv, indices, value_dim=1, scale=D**-0.5)
    return q, kv, indices, lse.astype(dtype)


def blocks(rng: np.random.Generator, size: int, slots: int, groups: int = G) -> np.ndarray:
    """Returns numbers of blocks in random order, some of them invalid; the last one is cut by S."""
    count = -(-S // size)
    shape = B, T, groups
    numbers = rng.permuted(np.broadcast_to(np.arange(-2, count + 2), (*shape, count + 4)), axis=-1)
    bad = np.array([INT_MIN, INT_MAX, 2**30], np.int32)
    return np.where(numbers < -1, rng.choice(bad, numbers.shape), numbers)[..., :slots]


CASES = {
    "six": {"head_group": 6},
    "two": {"head_group": 2},
    "one": {"head_group": 1, "scale": 0.7},
    "causal": {"head_group": 3, "is_causal": True, "query_start": 4},
    "compressed": {"head_group": 6, "is_causal": True, "query_start": 20, "key_stride": 3},
    "length": {
        "head_group": 6,
        "topk_length": np.array([[9, 0, 1, -5, 99], [8, 7, 6, 5, 4]], np.int32),
    },
    "sinks": {"head_group": 6, "sinks": np.array([0.5, -1, np.inf, -np.inf, 3, 0] * 2, np.float32)},
}


@pytest.mark.parametrize("options", CASES.values(), ids=CASES.keys())
def test_forward(options: dict, rng: np.random.Generator) -> None:
    args = inputs(rng)
    want = oracle.attn_dist(*args, **{"scale": D**-0.5, **options})
    assert_matches(attn_dist(*args, **options), want.astype(np.float32), tol=1e-5)


def test_all_heads(rng: np.random.Generator) -> None:
    args = inputs(rng, g=1)
    want = oracle.attn_dist(*args, scale=D**-0.5, head_group=None)
    got = attn_dist(*args, head_group=None)
    assert got.shape == (B, T, K)
    assert_matches(got, want.astype(np.float32), tol=1e-5)
    assert_matches(attn_dist(*args, head_group=4).sum(1), got, tol=1e-5)


def test_sums_of_64_heads(rng: np.random.Generator) -> None:
    q, kv, indices, _ = inputs(rng, g=1)
    q = np.tile(q, (1, 1, 11, 1))[:, :, :128]
    _, lse = sparse_mla(q, kv, indices, value_dim=4, return_lse=True)
    dist = attn_dist(q, kv, indices, lse, head_group=64)
    assert dist.shape == (B, 2, T, K)
    assert_matches(attn_dist(q, kv, indices, lse), dist.sum(1), tol=1e-5)
    rows = np.asarray(dist.sum(-1))
    valid = np.broadcast_to(((indices >= 0) & (indices < S)).any(-1)[:, :, 0][:, None], rows.shape)
    np.testing.assert_allclose(rows[valid], 64, rtol=1e-5)
    assert np.all(rows[~valid] == 0)


BLOCK_CASES = {
    "pairs": {"block_size": 2, "head_group": 6},
    "cut by the query": {"block_size": 3, "head_group": 2, "is_causal": True, "query_start": 4},
    "compressed": {
        "block_size": 2, "head_group": 6, "is_causal": True, "query_start": 20, "key_stride": 3
    },
    "length": {
        "block_size": 4,
        "head_group": 3,
        "topk_length": np.array([[3, 0, 1, -5, 2**30], [4, 3, 2, 1, INT_MIN]], np.int32),
    },
    "sinks": {"block_size": 4, "head_group": 6, "sinks": np.linspace(-1, 1, N, dtype=np.float32)},
    "one block": {"block_size": S, "head_group": 6},
    "larger than S": {"block_size": INT_MAX, "head_group": 6},
}  # fmt: skip


@pytest.mark.parametrize("options", BLOCK_CASES.values(), ids=BLOCK_CASES.keys())
def test_blocks(options: dict, rng: np.random.Generator) -> None:
    q, kv, _, lse = inputs(rng)
    indices = blocks(rng, options["block_size"], 4)
    got = attn_dist(q, kv, indices, lse, **options)
    want = oracle.attn_dist(q, kv, indices, lse, **{"scale": D**-0.5, **options})
    assert got.shape == want.shape
    assert_matches(got, want.astype(np.float32), tol=1e-5)


@pytest.mark.parametrize("shared", [False, True])
def test_blocks_of_sparse_attention(shared: bool, rng: np.random.Generator) -> None:
    """The probabilities of each head's blocks sum to 1, also where the query cuts its own block."""
    q, k, _, _ = inputs(rng)
    indices = np.sort(rng.permuted(np.tile(np.arange(3), (B, T, G, 1)), axis=-1)[..., :2], axis=-1)
    indices[..., 0] = 0  # every query sees a key
    indices = indices[:, :, 0] if shared else indices
    causal = {"is_causal": True, "query_start": 3}
    options = {"block_size": 4, **causal}
    _, lse = sparse_attention(q, k, k, indices, return_lse=True, **options)
    dist = attn_dist(q, k, indices, lse, head_group=N // G, **options)
    assert dist.shape == (B, G, T, 2)
    np.testing.assert_allclose(dist.sum(-1), N // G, rtol=1e-5)
    tokens = attn_dist(q, k, block_tokens(indices, 4), lse, head_group=N // G, **causal)
    assert_matches(dist, tokens.reshape(B, G, T, 2, 4).sum(-1), tol=1e-6)


def test_gradients_of_blocks(rng: np.random.Generator) -> None:
    q, kv, _, lse = inputs(rng, np.float64, t=T)
    indices = blocks(rng, 3, 3)
    lse = np.where(np.isfinite(lse), lse + rng.normal(size=lse.shape), 1.0)

    def fn(q: Any, kv: Any, lse: Any) -> Any:
        return attn_dist(q, kv, indices, lse, head_group=3, block_size=3, is_causal=True)

    with jax.enable_x64(True):
        args = tuple(jnp.asarray(x) for x in (q, kv, lse))
        check_grads(fn, args, order=1, modes=["rev"], atol=1e-7, rtol=1e-7, eps=1e-5)


def test_positions_of_blocks() -> None:
    indices = np.array([[[2, -1, INT_MIN], [0, INT_MAX, 2**29 - 1]]])
    got = block_tokens(indices, 4)
    empty, last = [-1] * 4, list(range(2**31 - 4, 2**31))
    np.testing.assert_array_equal(
        got, [[[8, 9, 10, 11, *empty, *empty], [0, 1, 2, 3, *empty, *last]]]
    )
    np.testing.assert_array_equal(block_tokens(indices, 1), np.maximum(indices, -1))
    assert block_tokens(np.zeros((2, 0), np.int8), 3).shape == (2, 0)
    for wrong, error, message in (
        ((np.int32(3), 4), ValueError, r"'indices' has shape \(\), want \[..., K\]"),
        ((np.ones(3, np.float32), 4), TypeError, "'indices' has dtype float32, want int32"),
        (([1, 2], 4), TypeError, "'indices' is list, want an array"),
        ((indices, 0), ValueError, "'block_size' is 0, want int in 1"),
        ((indices, 2.0), TypeError, "'block_size' is 2.0"),
    ):
        with pytest.raises(error, match=f"block_tokens: argument {message}"):
            block_tokens(*wrong)


@pytest.mark.parametrize("sinks", [False, True])
def test_gradients_against_finite_differences(sinks: bool, rng: np.random.Generator) -> None:
    q, kv, indices, lse = inputs(rng, np.float64, t=3)
    lse = np.where(np.isfinite(lse), lse + rng.normal(size=lse.shape), 1.0)
    bias = rng.normal(size=N) if sinks else None

    def fn(q: Any, kv: Any, lse: Any, bias: Any) -> Any:
        return attn_dist(q, kv, indices, lse, head_group=3, sinks=bias, deterministic=sinks)

    with jax.enable_x64(True):
        args = tuple(None if x is None else jnp.asarray(x) for x in (q, kv, lse, bias))
        assert fn(*args).dtype == jnp.float64
        check_grads(fn, args, order=1, modes=["rev"], atol=1e-7, rtol=1e-7, eps=1e-5)


def test_deterministic_gradients(rng: np.random.Generator) -> None:
    """Deterministic gradients are the same sums in a fixed order, which needs a sort of slots."""
    q, kv, indices, lse = inputs(rng)

    def gradient(deterministic: bool) -> Any:
        options = {"head_group": 3, "deterministic": deterministic}

        def loss(kv: Any) -> jax.Array:
            return jnp.sin(attn_dist(q, kv, indices, lse, **options)).sum()

        lowered = jax.jit(jax.grad(loss)).lower(kv)
        assert ("stablehlo.sort" in lowered.as_text()) == deterministic
        return lowered.compile()(kv)

    assert_matches(gradient(True), gradient(False), tol=1e-5)


def test_queries_without_a_sum_have_no_gradients(rng: np.random.Generator) -> None:
    """NaN in a query with lse = -inf, in its keys and cotangents reaches no gradient."""
    q, kv, indices, lse = inputs(rng)
    indices = np.where(indices == S - 1, 0, indices)
    indices[1, 2, :, 0] = S - 1  # of this query alone
    lse[1, 2] = -np.inf
    dirty_q, dirty_kv = q.copy(), kv.copy()
    dirty_q[1, 2] = dirty_kv[1, S - 1] = np.nan
    cotangents = rng.normal(size=(B, 2 * G, T, K)).astype(np.float32)
    dirty_cotangents = cotangents.copy()
    dirty_cotangents[1, :, 2] = np.nan

    def gradients(q: Any, kv: Any, cotangents: Any) -> Any:
        sinks = np.linspace(-1, 1, N, dtype=np.float32)
        options = {"head_group": N // (2 * G), "sinks": sinks}
        dist, pull = jax.vjp(lambda *x: attn_dist(x[0], x[1], indices, x[2], **options), q, kv, lse)
        assert not np.any(np.asarray(dist)[1, :, 2])
        return pull(cotangents)

    got = gradients(dirty_q, dirty_kv, dirty_cotangents)
    assert_matches(got, gradients(q, kv, cotangents), tol=0.0)
    assert not np.any(np.asarray(got[0])[1, 2]) and not np.any(np.asarray(got[2])[1, 2])


def test_invalid_slots_are_zero_where_all_lse_are_nan(rng: np.random.Generator) -> None:
    q, kv, indices, lse = inputs(rng)
    dist = np.asarray(attn_dist(q, kv, indices, np.full_like(lse, np.nan), head_group=3))
    counts = ((indices >= 0) & (indices < S)).transpose(0, 2, 1, 3)  # [B, G, T, K]
    counts = np.repeat(counts, dist.shape[1] // counts.shape[1], axis=1)
    np.testing.assert_array_equal(np.isnan(dist), counts)
    assert np.all(dist[~counts] == 0)


def test_rows_and_sinks_without_weight(rng: np.random.Generator) -> None:
    q, kv, indices, lse = inputs(rng)
    lse[1, 1] = -np.inf  # as if the row had no key
    sinks = np.array([np.inf, -np.inf, 0.0] * 4, np.float32)

    def fn(q: Any, kv: Any, lse: Any, sinks: Any) -> Any:
        return attn_dist(q, kv, indices, lse, head_group=1, sinks=sinks)

    dist, pull = jax.vjp(fn, q, kv, lse, sinks)
    assert np.all(np.asarray(dist[0, :, T // 2]) == 0)
    assert np.all(np.asarray(dist[1, :, 1]) == 0)
    assert np.all(np.asarray(dist[:, 0::3]) == 0)
    grads = pull(jnp.ones_like(dist))
    assert all(np.isfinite(g).all() for g in grads)
    dq, _, dlse, dsinks = grads
    assert np.all(np.asarray(dq[1, 1]) == 0) and np.all(np.asarray(dlse[1, 1]) == 0)
    assert np.all(np.asarray(dsinks).reshape(4, 3)[:, :2] == 0)


def test_invalid_slots_are_zero_where_one_lse_is_nan(rng: np.random.Generator) -> None:
    """The gate of a NaN lse is NaN, which must not reach invalid slots."""
    q, kv, indices, lse = inputs(rng)
    lse[0, 1] = np.nan
    sinks = np.zeros(N, np.float32)
    got = np.asarray(attn_dist(q, kv, indices, lse, head_group=6, sinks=sinks))
    empty = (indices < 0) | (indices >= S)
    assert empty[0, 1].any() and not got[0, :, 1][empty[0, 1]].any()
    assert np.isnan(got[0, :, 1][~empty[0, 1]]).all()


def test_keys_that_no_slot_selects(rng: np.random.Generator) -> None:
    q, kv, indices, lse = inputs(rng)
    length = rng.integers(0, K, size=(B, T)).astype(np.int32)
    indices[..., K - 1] = 0  # beyond every row's length
    indices[..., : K - 1][indices[..., : K - 1] == 0] = 1
    indices[indices == S - 1] = -1
    lse[np.isneginf(lse)] = 0
    bad = kv.copy()
    bad[:, [0, S - 1]] = np.nan

    def run(kv: Any) -> Any:
        fn = lambda *a: attn_dist(a[0], a[1], indices, a[2], head_group=6, topk_length=length)  # noqa: E731
        dist, pull = jax.vjp(fn, q, kv, lse)
        return dist, *pull(dist)

    assert_unmoved(run(kv), run(bad))


def test_low_precision(rng: np.random.Generator) -> None:
    q, kv, indices, lse = inputs(rng, g=1)
    indices = np.where((indices < 0) | (indices >= S), 0, indices)
    low = jnp.asarray(q, jnp.bfloat16), jnp.asarray(kv, jnp.bfloat16)
    exact = tuple(np.asarray(x, np.float32) for x in low)
    lse = np.where(np.isfinite(lse), lse, 0).astype(np.float32)

    def plain(q: Any, kv: Any) -> Any:
        rows = jax.vmap(lambda x, i: x[i])(kv[:, :, 0], indices[:, :, 0])
        s = jnp.einsum("btnd,btkd->btnk", q, rows) * jnp.asarray(D**-0.5, q.dtype)
        return jnp.exp(s - lse[..., None].astype(q.dtype)).astype(jnp.float32).sum(2)

    def run(fn: Any, args: Any) -> tuple:
        out, pull = jax.vjp(fn, *args)
        return out, *pull(jnp.cos(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape))

    ours = run(lambda q, kv: attn_dist(q, kv, indices, lse, head_group=None), low)
    for i, (got, lo, ex) in enumerate(zip(ours, run(plain, low), run(plain, exact), strict=True)):
        assert got.dtype == (jnp.bfloat16 if i else jnp.float32)
        assert_as_good_as(got, lo, ex, factor=4 if i else 3, what=("dist", "dq", "dkv")[i])


@pytest.mark.parametrize(("t", "s", "k"), [(1, 11, 9), (0, 11, 9), (5, 0, 9), (5, 11, 0)])
def test_sizes(t: int, s: int, k: int, rng: np.random.Generator) -> None:
    q, kv, indices, lse = inputs(rng, t=max(t, 1), s=s, k=k)
    args = q[:, :t], kv, indices[:, :t], lse[:, :t]
    want = oracle.attn_dist(*args, scale=D**-0.5, head_group=6)
    got, pull = jax.vjp(
        lambda *a: attn_dist(a[0], a[1], args[2], a[2], head_group=6), q[:, :t], kv, args[3]
    )
    assert_matches(got, want.astype(np.float32), tol=1e-5)
    assert [g.shape for g in pull(got)] == [args[0].shape, kv.shape, args[3].shape]


@pytest.mark.parametrize("deterministic", [False, True])
def test_chunks_of_queries(
    deterministic: bool, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, kv, indices, lse = (jnp.asarray(x) for x in inputs(rng))
    length, sinks = jnp.full((B, T), 5, jnp.int32), jnp.ones((B, N))
    operands = Operands(q, kv, indices, lse, None, length, sinks)
    options = Options(scale=0.3, head_group=3, deterministic=deterministic)

    def run() -> tuple:
        (dist,) = xla.attn_dist_fwd(options, operands)
        return dist, *xla.attn_dist_bwd(options, operands, Results(jnp.cos(dist)))

    whole = jax.jit(run)()
    monkeypatch.setattr(streaming, "BUDGET", 2 * query_bytes(q, indices, 16, 16))  # 2 + 2 + 1
    assert_matches(jax.jit(lambda: run())(), whole, tol=1e-6)


def test_without_batch_axis(rng: np.random.Generator) -> None:
    q, kv, indices, lse = inputs(rng)
    want = attn_dist(q, kv, indices, lse, head_group=6, is_causal=True, query_start=3)
    for b in range(B):
        got = attn_dist(
            q[b], kv[b], indices[b], lse[b], head_group=6, is_causal=True, query_start=3
        )
        assert_matches(got, want[b], tol=1e-6)


GOOD = {
    "q": np.zeros((B, T, N, D), np.float32),
    "kv": np.zeros((B, S, G, D), np.float32),
    "indices": np.zeros((B, T, G, K), np.int32),
    "lse": np.zeros((B, T, N), np.float32),
}
WRONG = {
    "q": ({"q": np.zeros(4, np.float32)}, ValueError, "'q' has shape"),
    "q dtype": ({"q": np.zeros((B, T, N, D), np.int32)}, TypeError, "'q' has dtype int32"),
    "kv": ({"kv": np.zeros((B, S, G, D + 1), np.float32)}, ValueError, "'kv'.*D=10"),
    "kv dtype": ({"kv": jnp.zeros((B, S, G, D), jnp.float16)}, TypeError, "'kv'.*float32"),
    "heads": ({"kv": np.zeros((B, S, 5, D), np.float32)}, ValueError, "N=12.*G=5.*multiple"),
    "indices": ({"indices": np.zeros((B, T, 1, K), np.int32)}, ValueError, "'indices'.*G=2"),
    "indices dtype": ({"indices": np.zeros((B, T, G, K))}, TypeError, "'indices'.*int32"),
    "lse": ({"lse": np.zeros((B, N, T), np.float32)}, ValueError, "'lse'.*T=5"),
    "lse dtype": ({"lse": jnp.zeros((B, T, N), jnp.bfloat16)}, TypeError, "'lse'.*float32"),
    "block_size": ({"block_size": 0}, ValueError, "'block_size' is 0, want int in 1"),
    "block_size type": ({"block_size": 4.0}, TypeError, "'block_size' is 4.0"),
    "scale": ({"scale": np.inf}, ValueError, "'scale' is inf"),
    "head_group": ({"head_group": 64}, ValueError, "'head_group' is 64.*divisor of N/G=6"),
    "head_group 4": ({"head_group": 4}, ValueError, "'head_group' is 4.*divisor of N/G=6"),
    "head_group 0": ({"head_group": 0}, ValueError, "'head_group' is 0"),
    "head_group type": ({"head_group": 2.0}, TypeError, "'head_group'"),
    "head_group None": ({"head_group": None}, ValueError, "'head_group' is None, want 6.*G=2 KV"),
    "is_causal": ({"is_causal": "no"}, TypeError, "'is_causal'"),
    "query_start": ({"query_start": 1.5}, TypeError, "'query_start'"),
    "key_stride": ({"key_stride": -1}, ValueError, "'key_stride' is -1"),
    "topk_length": ({"topk_length": np.zeros((B, K), np.int32)}, ValueError, "'topk_length'.*T=5"),
    "sinks": ({"sinks": np.zeros((B, N), np.float32)}, ValueError, "'sinks'"),
    "deterministic": ({"deterministic": 1}, TypeError, "'deterministic'"),
    "implementation": ({"implementation": "tpu"}, ValueError, "'implementation' is 'tpu'"),
}


@pytest.mark.parametrize(("change", "error", "message"), WRONG.values(), ids=WRONG.keys())
def test_misuse(change: dict, error: type, message: str) -> None:
    with pytest.raises(error, match=f"attn_dist: .*{message}"):
        attn_dist(**{**GOOD, "head_group": 6, **change})


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_any_wrong_shape_is_refused(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(GOOD)))
    shape = list(GOOD[name].shape)
    axis = data.draw(st.integers(0, len(shape) - 1))
    shape[axis] = data.draw(st.integers(0, 20).filter(lambda n: n != shape[axis]))
    bad = {**GOOD, name: np.zeros(shape, GOOD[name].dtype)}
    if (name, axis) in (("kv", 1), ("indices", 3)):
        assert attn_dist(**bad, head_group=6).shape == (B, 2, T, bad["indices"].shape[3])
    else:
        with pytest.raises(ValueError, match="attn_dist: argument"):
            attn_dist(**bad, head_group=6)


@pytest.mark.parametrize("head_group", [None, 1])
def test_no_heads(head_group: int | None, rng: np.random.Generator) -> None:
    q, kv, indices, lse = inputs(rng)

    def fn(*args: Any) -> Any:
        return attn_dist(args[0], args[1][:, :, :1], indices[:, :, :1], args[2], **options)

    options = {"head_group": head_group}
    dist, pull = jax.vjp(fn, q[:, :, :0], kv, lse[:, :, :0])
    assert dist.shape == ((B, T, K) if head_group is None else (B, 0, T, K))
    assert not dist.any() and not any(x.any() for x in pull(jnp.ones_like(dist)))
