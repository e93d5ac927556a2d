"""Tests `masked_attention` and `masked_attention_varlen` against loops in NumPy float64."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads
from support.compare import assert_as_good_as, assert_matches
from support.masked_attention import EXTREMES, B, D, E, G, N, S, T, all_of, normal, qkv
from support.oracles import masked_attention as oracle

from jax_dsa.ops.attention_probs import attention_probs
from jax_dsa.ops.block_mask import make_block_mask
from jax_dsa.ops.masked_attention import masked_attention, masked_attention_varlen

# The shapes of bias and mask without S, and options.
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
            results = masked_attention(
                q, k, v, bias, softcap=softcap, return_lse=True, **masks, **options
            )
            return *results, attention_probs(q, k, bias, softcap=softcap, **masks, **options)

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
    # jax.nn returns the mean of all values for a query that sees no key, and we return 0.
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


@pytest.mark.parametrize("return_lse", [False, True])
def test_return_attn_probs_is_a_deprecated_option(
    return_lse: bool, rng: np.random.Generator
) -> None:
    q, k, v = (jnp.asarray(x, jnp.float32) for x in qkv(rng))
    want = attention_probs(q, k, is_causal=True)
    options: Any = {"is_causal": True, "return_lse": return_lse, "return_attn_probs": True}
    with pytest.warns(DeprecationWarning, match="use jax_dsa.attention_probs"):
        found = masked_attention(q, k, v, **options)
    assert len(found) == 2 + return_lse
    np.testing.assert_array_equal(found[-1], want)
    with pytest.warns(DeprecationWarning, match="use jax_dsa.attention_probs"):
        found = masked_attention_varlen(
            q[0], k[0], v[0], jnp.array([0, T]), jnp.array([0, S]), **options
        )
    np.testing.assert_allclose(found[-1], want[0], rtol=1e-6)


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
    got = masked_attention(q, k, v, bias, mask, return_lse=True, **one)
    probs = attention_probs(q, k, bias, mask, **one)
    q, k, v, bias, mask = (x[None] for x in (q, k, v, bias, mask))
    one["key_value_seq_lengths"] = np.array([keys - 1], np.int32)
    want = masked_attention(q, k, v, bias, mask, return_lse=True, **one)
    assert_matches(got, tuple(x[0] for x in want), 1e-6)
    assert_matches(probs, attention_probs(q, k, bias, mask, **one)[0], 1e-6)
    assert probs.shape == (N, queries, keys)
    np.testing.assert_allclose(probs.sum(-1), np.isfinite(got[1]).T, atol=1e-5)


CU_Q, CU_K = np.array([1, 3, 3, 8], np.int32), np.array([1, 5, 6, 9])


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
    """The oracle gets each sequence by itself. Padding around the sequences holds NaN."""
    queries, keys = 9, 11
    chosen = dict(options)
    kept = rng.integers(-1, keys + 1, (G, 12)).astype(np.int32) if chosen.pop("kept", 0) else None
    mask = rng.random((N, queries, keys)) < 0.8
    mask_or_blocks: dict[str, Any] = {"mask": jnp.asarray(mask)}
    if chosen.pop("blocks", False):
        blocks = make_block_mask(jnp.asarray(mask)[None], block_q=4, block_k=8)
        mask_or_blocks = {"block_mask": blocks}
    with jax.enable_x64(True):
        q, k, v = (
            normal(rng, rows, heads, dim, dtype=np.float64).at[: cu[0]].set(np.nan)
            .at[cu[-1] :].set(np.nan)
            for rows, heads, dim, cu in (
                (queries, N, D, CU_Q), (keys, G, D, CU_K), (keys, G, E, CU_K)
            )
        )  # fmt: skip
        bias = normal(rng, G, 1, keys, dtype=np.float64)
        shapes = (queries, N, E), (queries, N)
        douts = tuple(normal(rng, *shape, dtype=np.float64) for shape in shapes)

        def fn(q: Any, k: Any, v: Any, bias: Any) -> tuple:
            both = {"bias": bias, "kv_indices": kept, **mask_or_blocks, **chosen}
            results = masked_attention_varlen(q, k, v, CU_Q, CU_K, return_lse=True, **both)
            return *results, attention_probs(q, k, cu_seqlens_q=CU_Q, cu_seqlens_k=CU_K, **both)

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
        assert_matches(grads, tuple(x[0] for x in want_grads[:4]), 1e-12, "gradients")
