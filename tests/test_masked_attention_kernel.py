"""Tests the masked attention kernels against the XLA implementation and NumPy in float64."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from support.compare import assert_as_good_as, assert_matches
from support.masked_attention_kernel import (
    CAUSAL,
    INT_MAX,
    INT_MIN,
    MASKS,
    RIGHT,
    WINDOW,
    compare,
    inputs,
    integers,
    mask_of,
    random_tiles,
    run,
)
from support.oracles import masked_attention as oracle

from jax_dsa import make_block_mask, masked_attention, masked_attention_varlen

pytestmark = pytest.mark.gpu


SIZES = [1, 62, 213, 8193]


@pytest.mark.parametrize("causal", [False, True], ids=["dense", "causal"])
@pytest.mark.parametrize("s", SIZES)
@pytest.mark.parametrize("t", SIZES)
def test_sizes(t: int, s: int, causal: bool, rng: np.random.Generator) -> None:
    """With a causal mask, all queries see a single key, and a single query sees the first key."""
    compare(inputs(rng, b=1 if t * s > 10**7 else 2, t=t, s=s), is_causal=causal)


DIMS = [
    (64, 64), (96, 96), (128, 128), (192, 128), (256, 256),
    (8, 8), (72, 40), (40, 72), (128, 64), (64, 128), (200, 136), (128, 256),
]  # fmt: skip


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bf16", "f16"])
@pytest.mark.parametrize(("d", "e"), DIMS)
def test_dims(d: int, e: int, dtype: Any, rng: np.random.Generator) -> None:
    compare(inputs(rng, t=213, s=300, d=d, e=e, dtype=dtype), is_causal=True)


@pytest.mark.parametrize(("n", "g"), [(1, 1), (5, 5), (6, 2), (32, 8), (16, 1)])
def test_heads(n: int, g: int, rng: np.random.Generator) -> None:
    compare(inputs(rng, t=150, s=213, n=n, g=g), is_causal=True)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bf16", "f16"])
@pytest.mark.parametrize(
    "options",
    [{"softcap": 2.0}, {"softcap": 50.0, "scale": 0.5}, {"scale": -0.1}, {"scale": 0.0}],
    ids=str,
)
def test_scores(options: dict[str, Any], dtype: Any, rng: np.random.Generator) -> None:
    compare(inputs(rng, t=213, d=128, dtype=dtype), is_causal=True, **options)


def attend_with_sinks(q: Any, k: Any, v: Any, sinks: Any, **options: Any) -> Any:
    return masked_attention(q, k, v, sinks=sinks.astype(jnp.float32), **options)


@pytest.mark.parametrize("kept", [False, True], ids=["all keys", "kept keys"])
@pytest.mark.parametrize(("d", "e"), [(64, 64), (128, 128), (192, 128), (256, 256)])
def test_sinks(d: int, e: int, kept: bool, rng: np.random.Generator) -> None:
    arrays = inputs(rng, t=150, s=213, d=d, e=e)
    sinks = jnp.asarray([-2.0, jnp.inf, -jnp.inf, 5.0], jnp.bfloat16)
    masks = {"kv_indices": integers(rng, -1, 214, 2, 2, 100)} if kept else {}
    compare((*arrays, sinks), masks, call=attend_with_sinks, is_causal=True)


def test_max_logit(rng: np.random.Generator) -> None:
    arrays = inputs(rng, t=150, s=213)
    options = {"is_causal": True, "softcap": 3.0, "return_max_logit": True}
    got, want = (masked_attention(*arrays, **options, implementation=i) for i in ("cuda", "xla"))
    assert_matches(got[1], want[1], 2e-5)


@pytest.mark.parametrize("name", MASKS)
def test_masks(name: str, rng: np.random.Generator) -> None:
    arrays = inputs(rng, t=300, s=450, d=128)
    mask = mask_of(name, rng, arrays)
    compare(arrays, mask.arrays, **mask.options)


@pytest.mark.parametrize("name", MASKS)
def test_unseen_nan_has_no_effect(name: str, rng: np.random.Generator) -> None:
    """NaN in keys that no query of their group sees, and in queries that see no key."""
    q, k, v = inputs(rng, t=150, s=300)
    mask = mask_of(name, rng, (q, k, v))
    g, shape = k.shape[2], (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    seen = oracle.counts(shape, g, **mask.visible) > 0
    alive = seen.any(3).swapaxes(1, 2)[..., None]
    used = seen.reshape(shape[0], g, -1, *shape[2:]).any((2, 3)).swapaxes(1, 2)[..., None]
    dirty = jnp.where(alive, q, jnp.nan), jnp.where(used, k, jnp.nan), jnp.where(used, v, jnp.inf)
    want = run("cuda", q.dtype, (q, k, v), mask.arrays, **mask.options)
    got = run("cuda", q.dtype, dirty, mask.arrays, **mask.options)
    np.testing.assert_array_equal(got.out, want.out)
    np.testing.assert_array_equal(got.lse, want.lse)
    assert_matches(got.gradients, want.gradients, tol=8e-3)
    masked, (dq, dk, dv) = ~alive[..., 0], got.gradients
    assert np.all(np.asarray(got.out)[masked] == 0) and np.all(
        np.asarray(got.lse)[masked] == -np.inf
    )
    assert np.all(np.isfinite(np.asarray(got.lse)[~masked])) and np.all(np.asarray(dq)[masked] == 0)
    for grad in (dk, dv):
        assert np.all(np.asarray(grad)[~used[..., 0]] == 0)


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize(
    "name", ["causal", "lengths, window", "segments", "block mask per group, causal"]
)
def test_against_float64(name: str, softcap: float | None, rng: np.random.Generator) -> None:
    arrays = inputs(rng, t=62, s=100)
    mask = mask_of(name, rng, arrays)
    numbers = [np.asarray(x, np.float64) for x in arrays]
    scale, shape = 0.2, (2, 4, 62, 100)
    count = oracle.counts(shape, 2, **mask.visible)
    out, lse, _ = oracle.attention(*numbers, None, count, scale, softcap)
    dout, dlse = 3 * np.cos(3 * out), np.where(np.isfinite(lse), -np.sin(lse), 0)
    grads = oracle.gradients(*numbers, None, count, scale, softcap, dout, dlse)[:3]
    options = mask.options | {"scale": scale, "softcap": softcap}
    got = run("cuda", jnp.bfloat16, arrays, mask.arrays, **options)
    low = run("xla", jnp.bfloat16, arrays, mask.arrays, **options)
    assert_as_good_as(got.out, low.out, out, what="out")
    assert_matches(np.asarray(got.lse, np.float64), lse, tol=2e-5, what="lse")
    for name, *three in zip("qkv", got.gradients, low.gradients, grads, strict=True):
        assert_as_good_as(*three, factor=4.0, what=f"d{name}")


@pytest.mark.parametrize("g", [1, 2])
@pytest.mark.parametrize("w", [1, 62, 300])
def test_kept_keys(w: int, g: int, rng: np.random.Generator) -> None:
    """kv_indices has any order, repeated keys and invalid entries. Other keys are NaN."""
    q, k, v = inputs(rng, t=150, s=500, g=g)
    kept = rng.integers(0, 498, (2, g, w)).astype(np.int32)
    bad = rng.random(kept.shape) < 0.2
    kept[bad] = rng.choice([INT_MIN, -1, 500, INT_MAX], bad.sum())
    listed = (kept[..., None] == np.arange(500)).any(2).swapaxes(1, 2)[..., None]
    ids = integers(rng, 0, 2, 2, 150), integers(rng, 0, 2, 2, 500)
    clean, dirty = ((q, *(jnp.where(listed, x, y) for x in (k, v))) for y in (0, jnp.nan))
    masks = {"kv_indices": jnp.asarray(kept)}
    compare(clean, masks)
    compare(clean, masks, **RIGHT)
    compare(clean, masks | {"segment_ids": ids}, local_window_size=(200, 100), softcap=5.0)
    got, want = (run("cuda", q.dtype, x, masks, **RIGHT) for x in (dirty, clean))
    np.testing.assert_array_equal(got.out, want.out)
    assert_matches(got.gradients, want.gradients, tol=8e-3)


@pytest.mark.parametrize("options", [{}, CAUSAL, RIGHT, WINDOW], ids=str)
def test_packed_sequences(options: dict[str, Any], rng: np.random.Generator) -> None:
    """Sequences have very different lengths, some are empty, and padding surrounds them."""
    q, k, v = (x[0] for x in inputs(rng, b=1, t=1500, s=1700))
    cu_q = jnp.asarray([3, 4, 4, 300, 1000, 1001, 1490], jnp.int32)
    cu_k = jnp.asarray([0, 7, 9, 200, 200, 900, 1650], jnp.int32)
    masks = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k}
    compare((q, k, v), masks, call=masked_attention_varlen, **options)
    blocks = make_block_mask(jnp.asarray(random_tiles(rng, 1, 4, 1500, 1700, blocks=(128, 128))))
    masks["block_mask"] = blocks
    compare((q, k, v), masks, call=masked_attention_varlen, **options)


@pytest.mark.parametrize("kept", [False, True], ids=["all keys", "kept keys"])
@pytest.mark.parametrize("empty", ["b", "t", "s", "n", "w"])
def test_empty_axes(empty: str, kept: bool, rng: np.random.Generator) -> None:
    arrays = inputs(rng, **({"b": 2, "t": 3, "s": 5, "n": 4} | {empty: 0} if empty != "w" else {}))
    width = 0 if empty == "w" else 3
    masks: dict[str, Any] = {"key_value_seq_lengths": integers(rng, 0, 9, arrays[0].shape[0])}
    if kept:
        masks["kv_indices"] = jnp.zeros((arrays[0].shape[0], 2, width), jnp.int32)
    elif empty == "w":
        masks["key_value_seq_lengths"] = jnp.zeros(2, jnp.int32)
    got = run("cuda", jnp.bfloat16, arrays, masks, is_causal=True)
    assert [x.shape for x in got.gradients] == [x.shape for x in arrays]
    assert not any(np.asarray(x, np.float32).any() for x in (got.out, *got.gradients))
    assert np.all(np.asarray(got.lse) == -np.inf)


def test_unsupported_calls(rng: np.random.Generator) -> None:
    q, k, v = inputs(rng, t=3, s=8)
    mask = jnp.ones((1, 1, 1, 8), bool)
    blocks = make_block_mask(mask, shape=(1, 1, 3, 8), block_k=64)
    for arrays, given in (
        ([x.astype(jnp.float32) for x in (q, k, v)], {}),
        ((q[..., :12], k[..., :12], v), {}),
        ((q, k, v), {"block_mask": blocks}),
    ):
        with pytest.raises(NotImplementedError, match="implementation='xla'"):
            masked_attention(*arrays, **given, implementation="cuda")
