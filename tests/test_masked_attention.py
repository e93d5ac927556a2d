"""`masked_attention` and `masked_attention_varlen` against loops in numpy float64."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads
from support.compare import assert_as_good_as, assert_matches
from support.oracles import masked_attention as oracle

from jax_dsa.core import streaming
from jax_dsa.ops.block_mask import make_block_mask
from jax_dsa.ops.masked_attention import masked_attention, masked_attention_varlen, xla
from jax_dsa.ops.masked_attention.spec import Operands, Options, Results

B, T, S, N, G, D, E = 2, 5, 7, 4, 2, 8, 6
EXTREMES = (-(2**31), -1, S, 2**31 - 1)


def normal(rng: np.random.Generator, *shape: int, dtype: Any = np.float32) -> jax.Array:
    return jnp.asarray(rng.normal(size=shape), dtype)


def qkv(
    rng: np.random.Generator, dtype: Any = np.float32, groups: int = G, value_dim: int = E
) -> tuple:
    shapes = (B, T, N, D), (B, S, groups, D), (B, S, groups, value_dim)
    return tuple(normal(rng, *shape, dtype=dtype) for shape in shapes)


@functools.lru_cache(maxsize=4)
def outputs_and_gradients(fn: Any) -> Any:
    """(arrays, douts) -> outputs of `fn`, and the arrays' gradients for these cotangents.

    -inf has no cotangent.
    """

    def loss(arrays: tuple, douts: tuple) -> tuple[jax.Array, tuple]:
        outs = fn(*arrays)
        terms = [
            jnp.sum(jnp.where(jnp.isfinite(y), y, 0) * d) for y, d in zip(outs, douts, strict=True)
        ]
        return sum(terms), outs

    grads = jax.jit(jax.grad(loss, has_aux=True))
    return lambda *args: grads(*args)[::-1]


def all_of(fn: Any, arrays: tuple, douts: tuple) -> tuple[tuple, tuple]:
    return outputs_and_gradients(fn)(arrays, douts)


# bias and mask shapes before S, options
CONFIGS = {
    "plain": (None, None, {}),
    "causal": ((1, 1, 1), None, {"is_causal": True, "softcap": 1.5}),
    "bottom-right": ((2, G, T), (1, N, 1), {"is_causal": True, "alignment": True}),
    "window": ((2, N, T), (2, G, T), {"window": (2, 1), "alignment": True, "softcap": 3.0}),
    "lengths": (
        (1, N, 1),
        (2, 1, T),
        {"lengths": (S - 3, S + 9), "alignment": True, "window": (3, 4)},
    ),
    "blocks": ((1, G, T), (2, N, T), {"blocks": True, "window": 3}),
    "any lengths": (
        None,
        None,
        {"lengths": (-(2**31), 2**31 - 1), "alignment": True, "window": (2**40, 2**31 - 1)},
    ),
    "segments": ((2, 1, T), None, {"segments": True, "lengths": (S - 3, S + 9)}),
    "kept": ((1, G, 1), None, {"kept": True, "is_causal": True, "alignment": True}),
    "kept-all": ((2, N, T), (1, G, T), {"kept": True, "segments": True, "softcap": 2.0}),
    "kept-shared": ((1, 1, T), (1, 1, T), {"kept": True, "lengths": (S - 3, 2**40)}),
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_against_oracle(config: tuple, rng: np.random.Generator) -> None:
    bias_shape, mask_shape, chosen = config
    visible: dict[str, Any] = {"is_causal": chosen.get("is_causal", False)}
    if "alignment" in chosen:
        visible["causal_alignment"] = "bottom_right"
    if "window" in chosen:
        visible["local_window_size"] = chosen["window"]
    if "lengths" in chosen:
        visible["key_value_seq_lengths"] = np.array(chosen["lengths"])
    if "kept" in chosen:
        visible["kv_indices"] = rng.integers(-1, S + 1, (B, G, 9)).astype(np.int32)
        visible["kv_indices"][0, 0, :4] = EXTREMES
    options = dict(visible)
    if "segments" in chosen:
        pair = tuple(rng.integers(0, 3, (B, x)).astype(np.int32) for x in (T, S))
        options["segment_ids"] = pair
        visible["q_segments"], visible["kv_segments"] = pair
    softcap = chosen.get("softcap")
    with jax.enable_x64(True):
        arrays = qkv(rng, np.float64)
        mask = None if mask_shape is None else jnp.asarray(rng.random((*mask_shape, S)) < 0.7)
        masks = {"mask": mask}
        if "blocks" in chosen:
            masks = {"block_mask": make_block_mask(mask, block_q=2, block_k=8)}
        if bias_shape is not None:
            arrays = (*arrays, normal(rng, *bias_shape, S, dtype=np.float64))
        douts = normal(rng, B, T, N, E, dtype=np.float64), normal(rng, B, T, N, dtype=np.float64)

        def fn(q: Any, k: Any, v: Any, bias: Any = None) -> tuple:
            return masked_attention(
                q, k, v, bias, softcap=softcap, return_lse=True, return_attn_probs=True,
                **masks, **options,
            )  # fmt: skip

        got, grads = all_of(fn, arrays, (*douts, 0))
        numbers = [np.asarray(x) for x in arrays]
        bias = numbers[3] if bias_shape is not None else None
        count = oracle.counts((B, N, T, S), G, mask=mask, **visible)
        want = oracle.attention(*numbers[:3], bias, count, D**-0.5, softcap)
        want_grads = oracle.gradients(*numbers[:3], bias, count, D**-0.5, softcap, *douts)
        assert_matches(got, want, 1e-12, "outputs")
        assert_matches(grads, want_grads[: len(grads)], 1e-12, "gradients")


def test_finite_differences(rng: np.random.Generator) -> None:
    with jax.enable_x64(True):
        arrays = tuple(x[:1, :3] for x in qkv(rng, np.float64))
        bias = normal(rng, 1, G, 1, 3, dtype=np.float64)

        def fn(q: Any, k: Any, v: Any, bias: Any) -> tuple:
            return masked_attention(
                q, k, v, bias, is_causal=True, softcap=1.0, scale=0.7, return_lse=True
            )

        check_grads(fn, (*arrays, bias), order=1, modes=["rev"], atol=1e-5, rtol=1e-4)


def test_against_jax_nn(rng: np.random.Generator) -> None:
    arrays = qkv(rng, groups=N, value_dim=D)
    bias, mask = normal(rng, B, N, T, S), jnp.asarray(rng.random((B, 1, T, S)) < 0.8)
    lengths = jnp.asarray([3, S], jnp.int32)
    # A row without any key is uniform there and 0 here.
    mask = mask.at[..., 0].set(True)
    options = {
        "scale": 0.3,
        "is_causal": True,
        "key_value_seq_lengths": lengths,
        "local_window_size": (9, 0),
    }
    douts = (normal(rng, B, T, N, D),)
    got = all_of(
        lambda q, k, v, b: (masked_attention(q, k, v, b, mask, **options),),
        (*arrays, bias),
        douts,
    )
    want = all_of(
        lambda q, k, v, b: (jax.nn.dot_product_attention(q, k, v, b, mask, **options),),
        (*arrays, bias),
        douts,
    )
    assert_matches(got, want, 1e-5)


def test_bfloat16(rng: np.random.Generator) -> None:
    dtype = jnp.bfloat16
    low = (*qkv(rng, dtype), normal(rng, 1, G, 1, S, dtype=dtype))
    exact = tuple(x.astype(jnp.float32) for x in low)
    douts = (normal(rng, B, T, N, E, dtype=dtype), normal(rng, B, T, N))

    def naive(q: Any, k: Any, v: Any, bias: Any) -> tuple:
        k, v, bias = (jnp.repeat(x, N // G, axis) for x, axis in ((k, 2), (v, 2), (bias, 1)))
        x = jnp.einsum("btnd,bsnd->bnts", q, k) * jnp.asarray(D**-0.5, q.dtype) + bias
        lse = jax.nn.logsumexp(x, axis=-1)
        return jnp.einsum("bnts,bsnd->btnd", jax.nn.softmax(x, -1), v), jnp.swapaxes(lse, 1, 2)

    outs, grads = all_of(lambda *a: masked_attention(*a, return_lse=True), low, douts)
    assert [y.dtype for y in (*outs, *grads)] == [dtype, jnp.float32, *[dtype] * 4]
    low_outs, low_grads = all_of(naive, low, douts)
    exact_outs, exact_grads = all_of(naive, exact, douts)
    for i in range(2):
        assert_as_good_as(outs[i], low_outs[i], exact_outs[i], 3, f"output {i}")
    for i in range(4):
        assert_as_good_as(grads[i], low_grads[i], exact_grads[i], 4, f"gradient {i}")


def test_nan_that_no_query_sees(rng: np.random.Generator) -> None:
    """In keys, values, their biases, and in queries that see nothing: not a bit of it gets out."""
    clean = (*qkv(rng), normal(rng, B, N, T, S))
    mask = jnp.ones((B, 1, T, S), bool).at[:, :, :, 2].set(False).at[:, :, 1].set(False)
    lengths = jnp.asarray([S - 2, S], jnp.int32)
    seen = mask & (jnp.arange(S) < lengths[:, None, None, None])
    q, k, v, bias = clean
    bad = jnp.where(seen.any((1, 2))[..., None, None], 0, jnp.nan)
    dirty = (q.at[:, 1].set(jnp.inf), k + bad, v - bad, jnp.where(seen, bias, jnp.nan))
    douts = normal(rng, B, T, N, E), normal(rng, B, T, N)

    def fn(*arrays: Any) -> tuple:
        return masked_attention(
            *arrays, mask, key_value_seq_lengths=lengths, softcap=4.0, return_lse=True
        )

    outs, grads = all_of(fn, dirty, douts)
    assert_matches((outs, grads), all_of(fn, clean, douts), 0.0)
    out, lse = outs
    assert np.all(np.asarray(out[:, 1]) == 0) and np.all(np.asarray(lse[:, 1]) == -np.inf)
    assert np.all(np.asarray(grads[0][:, 1]) == 0)
    assert np.all(np.asarray(grads[3])[~np.broadcast_to(seen, bias.shape)] == 0)


def test_nan_that_a_query_sees_shows(rng: np.random.Generator) -> None:
    """In all that there is of this query: its output, its probabilities and its gradient."""
    q, k, v = qkv(rng)
    fn = functools.partial(masked_attention, return_lse=True, return_attn_probs=True)
    dirty = q.at[0, 2].set(jnp.nan), k, v
    (out, lse, probs), dq = fn(*dirty), jax.grad(lambda q: fn(q, k, v)[0].sum())(dirty[0])
    for y in (out, lse, probs.swapaxes(1, 2), dq):
        rows = np.isnan(np.asarray(y)).reshape(B, T, -1)
        assert rows[0, 2].all() and rows.sum() == rows[0, 2].size


def test_huge_scores(rng: np.random.Generator) -> None:
    """Rounding of scores that is larger than an exponent's range: probabilities stay in 0..1."""
    q, k, v = qkv(rng)

    def fn(q: jax.Array) -> tuple:
        return masked_attention(q, k, v, scale=1e30, return_attn_probs=True)

    (out, probs), pull = jax.vjp(jax.jit(fn), q)
    (dq,) = pull((jnp.ones_like(out), jnp.zeros_like(probs)))
    assert np.all(np.isfinite(out)) and np.all(np.isfinite(dq))
    assert np.all((np.asarray(probs) >= 0) & (np.asarray(probs) <= 1))


def test_nan_in_keys_that_are_not_kept(rng: np.random.Generator) -> None:
    arrays = qkv(rng)
    kept = jnp.asarray(np.broadcast_to([3, 1, -1, 3, *EXTREMES], (B, G, 8)), jnp.int32)
    other = jnp.asarray([s not in (1, 3) for s in range(S)])[:, None, None]
    dirty = (arrays[0], *(jnp.where(other, jnp.nan, x) for x in arrays[1:]))
    douts = normal(rng, B, T, N, E), normal(rng, B, T, N)

    def fn(*arrays: Any) -> tuple:
        return masked_attention(*arrays, kv_indices=kept, return_lse=True)

    got = all_of(fn, dirty, douts)
    assert_matches(got, all_of(fn, arrays, douts), 0.0)
    # Key 3 is listed twice, which is what a bias of log 2 does.
    bias = jnp.where(other[:, 0, 0], -jnp.inf, jnp.log(jnp.asarray([1, 1, 1, 2, 1, 1, 1.0])))
    same = all_of(
        lambda *a: masked_attention(*a, bias[None, None, None], return_lse=True), arrays, douts
    )
    assert_matches(got, same, 1e-5)


@pytest.mark.parametrize("kind", ["kept", "block-mask"])
def test_chunks(kind: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny budget, which leaves chunks of 2 queries and a remainder of 1, changes nothing."""
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
    x = Operands(*qkv(rng), bias, mask, *causal, *segments, kept, rows, tiles, bits)
    options = Options(0.4, None, bias_heads, "x", "x", deterministic=False)
    dy = Results(normal(rng, B, T, N, E), normal(rng, B, T, N))

    def run(x: Operands) -> tuple:
        y = xla.masked_attention_fwd(options, x)
        return y, xla.masked_attention_bwd(options, x, y, dy)

    whole = jax.jit(run)(x)
    monkeypatch.setattr(streaming, "BUDGET", 5 * 4 * B * N * S * 2)
    assert_matches(jax.jit(lambda x: run(x))(x), whole, 1e-5)  # sums in another order


def test_a_sum_over_chunks_is_rounded_once(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of a bfloat16 bias that 300 queries share, one of them a chunk."""
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
    """A gradient works in far less memory than all scores, with a bias of its own for each."""
    # Shapes that no other test has, since what is traced already does not see the budget.
    q, k, v = jnp.zeros((2, 252, 4, 8)), jnp.zeros((2, 252, 2, 8)), jnp.zeros((2, 252, 2, 7))
    bias, mask = jnp.zeros((1, 2, 252, 252)), jnp.ones((1, 1, 252, 252), bool)
    monkeypatch.setattr(streaming, "BUDGET", 2**17)

    def loss(*arrays: Any) -> jax.Array:
        return masked_attention(*arrays, mask, is_causal=True).sum()

    compiled = jax.jit(jax.grad(loss, (0, 1, 2, 3))).lower(q, k, v, bias).compile()
    # The scores would take 2 MB; dbias, half a megabyte, may be copied.
    assert compiled.memory_analysis().temp_size_in_bytes < 1.2e6


@pytest.mark.parametrize(
    ("b", "t", "s", "w"),
    [(0, 3, 4, 2), (2, 0, 4, None), (2, 3, 0, None), (2, 3, 0, 2), (2, 3, 4, 0)],
)
def test_empty(b: int, t: int, s: int, w: int | None) -> None:
    q, k, v = jnp.ones((b, t, N, D)), jnp.ones((b, s, G, D)), jnp.ones((b, s, G, E))
    bias = jnp.ones((1, N, 1, s))
    kept = None if w is None else jnp.zeros((b, G, w), jnp.int32)

    def fn(*arrays: Any) -> tuple:
        return masked_attention(*arrays, kv_indices=kept, is_causal=True, return_lse=True)

    douts = jnp.ones((b, t, N, E)), jnp.ones((b, t, N))
    (out, lse), grads = all_of(fn, (q, k, v, bias), douts)
    assert out.shape == (b, t, N, E) and lse.shape == q.shape[:3]
    assert [g.shape for g in grads] == [x.shape for x in (q, k, v, bias)]
    assert not any(np.asarray(x).any() for x in (out, *grads))
    assert np.all(np.asarray(lse) == -np.inf)


@pytest.mark.parametrize(("queries", "keys", "dtype"), [(1, 1, np.float32), (62, 213, np.float16)])
def test_no_batch_axis(queries: int, keys: int, dtype: Any, rng: np.random.Generator) -> None:
    q = normal(rng, queries, N, D, dtype=dtype)
    k, v = (normal(rng, keys, G, dim, dtype=dtype) for dim in (D, E))
    bias = normal(rng, N, 1, keys, dtype=dtype)
    mask = jnp.asarray(rng.random((1, queries, keys)) < 0.9)
    one = {"is_causal": True, "causal_alignment": "bottom_right"}
    one["key_value_seq_lengths"] = np.int32(keys - 1)
    got = masked_attention(q, k, v, bias, mask, return_lse=True, return_attn_probs=True, **one)
    batched = (x[None] for x in (q, k, v, bias, mask))
    one["key_value_seq_lengths"] = np.array([keys - 1], np.int32)
    want = masked_attention(*batched, return_lse=True, return_attn_probs=True, **one)
    assert_matches(got, tuple(x[0] for x in want), 1e-6)
    assert got[2].shape == (N, queries, keys)
    np.testing.assert_allclose(got[2].sum(-1), np.isfinite(got[1]).T, atol=1e-5)


CU_Q, CU_K = np.array([0, 2, 2, 7], np.int32), np.array([1, 5, 6, 9])


@pytest.mark.parametrize(
    "options",
    [
        {"is_causal": True, "kept": True},
        {"is_causal": True, "causal_alignment": "bottom_right", "blocks": True},
        {"local_window_size": (1, 2), "causal_alignment": "bottom_right", "softcap": 2.0},
    ],
    ids=["causal", "bottom-right", "window"],
)
def test_packed(options: dict[str, Any], rng: np.random.Generator) -> None:
    """Each sequence by itself in the oracle; around them padding, with NaN in it."""
    queries, keys = 9, 11
    chosen = dict(options)
    kept = rng.integers(-1, keys + 1, (G, 12)).astype(np.int32) if chosen.pop("kept", 0) else None
    mask = rng.random((N, queries, keys)) < 0.8
    mask_or_blocks: dict[str, Any] = {"mask": jnp.asarray(mask)}
    if chosen.pop("blocks", False):
        blocks = make_block_mask(jnp.asarray(mask)[None], block_q=4, block_k=8)
        mask_or_blocks = {"block_mask": blocks}
    with jax.enable_x64(True):
        q = normal(rng, queries, N, D, dtype=np.float64).at[7:].set(np.nan)
        inside = (jnp.arange(keys) >= 1) & (jnp.arange(keys) < 9)
        k, v = (normal(rng, keys, G, dim, dtype=np.float64) for dim in (D, E))
        k, v = (jnp.where(inside[:, None, None], x, np.nan) for x in (k, v))
        bias = normal(rng, G, 1, keys, dtype=np.float64)
        shapes = (queries, N, E), (queries, N)
        douts = tuple(normal(rng, *shape, dtype=np.float64) for shape in shapes)

        def fn(q: Any, k: Any, v: Any, bias: Any) -> tuple:
            return masked_attention_varlen(
                q, k, v, CU_Q, CU_K, bias=bias, kv_indices=kept, return_lse=True,
                return_attn_probs=True, **mask_or_blocks, **chosen,
            )  # fmt: skip

        got, grads = all_of(fn, (q, k, v, bias), (*douts, 0))
        arrays = [np.nan_to_num(np.asarray(x))[None] for x in (q, k, v, bias)]
        softcap = chosen.pop("softcap", None)
        count = np.zeros((1, N, queries, keys), np.int64)
        for a, b, c, d in zip(CU_Q[:-1], CU_Q[1:], CU_K[:-1], CU_K[1:], strict=True):
            own = None if kept is None else kept[None] - c
            count[:, :, a:b, c:d] = oracle.counts(
                (1, N, b - a, d - c), G, mask=mask[None, :, a:b, c:d], kv_indices=own, **chosen
            )
        want = oracle.attention(*arrays, count, D**-0.5, softcap)
        numbers = [np.asarray(x)[None] for x in douts]
        want_grads = oracle.gradients(*arrays, count, D**-0.5, softcap, *numbers)
        assert_matches(got, tuple(x[0] for x in want), 1e-12, "outputs")
        assert_matches(grads, tuple(x[0] for x in want_grads), 1e-12, "gradients")
