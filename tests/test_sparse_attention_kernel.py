"""Tests the sparse attention kernels against the XLA implementation and NumPy in float64."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.compare import assert_as_good_as, assert_matches
from support.masked_attention_kernel import inputs, integers
from support.masked_attention_kernel import run as run_call
from support.oracles import sparse_attention as oracle
from support.sparse_attention_kernel import CAUSAL, FORCED, TAIL, compare, lists, run

from jax_dsa import masked_attention, sparse_attention, sparse_attention_varlen, sparse_mla

pytestmark = pytest.mark.gpu

SIZES = [1, 62, 213, 8193]


@pytest.mark.parametrize("causal", [False, True], ids=["all keys", "causal"])
@pytest.mark.parametrize("s", SIZES)
@pytest.mark.parametrize("t", SIZES)
def test_sizes(t: int, s: int, causal: bool, rng: np.random.Generator) -> None:
    arrays = inputs(rng, b=1 if t * s > 10**7 else 2, t=t, s=s, n=16, g=1)
    compare(arrays, lists(rng, arrays, 64, 3), block_size=64, is_causal=causal)


DIMS = [
    (64, 64), (96, 96), (128, 128), (192, 128), (256, 256),
    (8, 8), (72, 40), (40, 72), (128, 64), (64, 128), (200, 136), (128, 256),
]  # fmt: skip


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bf16", "f16"])
@pytest.mark.parametrize(("d", "e"), DIMS)
def test_dims(d: int, e: int, dtype: Any, rng: np.random.Generator) -> None:
    arrays = inputs(rng, t=213, s=300, n=32, g=2, d=d, e=e, dtype=dtype)
    compare(arrays, lists(rng, arrays, 32, 4), block_size=32, **FORCED)


@pytest.mark.parametrize("m", [1, 2, 3, 4, 7, 8, 12, 16, 31, 32])
def test_heads(m: int, rng: np.random.Generator) -> None:
    arrays = inputs(rng, t=213, s=300, n=2 * m, g=2)
    compare(arrays, lists(rng, arrays, 16, 5, "similar"), block_size=16, **CAUSAL)


@pytest.mark.parametrize("kind", ["random", "similar", "distinct", "empty"])
@pytest.mark.parametrize("size", [1, 4, 16, 32, 64, 128])
def test_block_sizes(size: int, kind: str, rng: np.random.Generator) -> None:
    arrays = inputs(rng, t=213, s=1001, n=16, g=1, d=128)
    which = lists(rng, arrays, size, min(200 // size + 2, 8 if size > 64 else 99), kind)
    compare(arrays, which, block_size=size)
    compare(arrays, which, block_size=size, query_start=700, **TAIL)


@pytest.mark.parametrize("size", [1, 4, 16])
@pytest.mark.parametrize(("m", "slots"), [(12, 513), (1, 120)])
def test_long_lists(m: int, slots: int, size: int, rng: np.random.Generator) -> None:
    """Tables of blocks make the unions of distinct blocks, and sorting those of repeated ones."""
    arrays = inputs(rng, t=62, s=3001, n=2 * m, g=2, d=256)
    for kind, options in (("distinct", TAIL), ("distinct", FORCED), ("similar", TAIL)):
        which = lists(rng, arrays, size, slots, kind)
        compare(arrays, which, block_size=size, query_start=2900, **options)


OPTIONS: dict[str, dict[str, Any]] = {
    "forced": FORCED,
    "tail": TAIL,
    "all forced": {"is_causal": True, "sink_blocks": 1, "local_blocks": 2, "tail_block": True},
    "all blocks": {"is_causal": True, "local_blocks": 10**9, "query_start": 100},
    "before the keys": {**FORCED, "query_start": -150},
    "past the keys": {"is_causal": True, "local_blocks": 9, "query_start": 250},
    "far past the keys": {"is_causal": True, "local_blocks": 9, "query_start": 2**31 - 400},
    "scale": {"scale": 0.4},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options(name: str, rng: np.random.Generator) -> None:
    arrays = inputs(rng, t=213, s=300, n=16, g=2)
    compare(arrays, lists(rng, arrays, 16, 3), block_size=16, **OPTIONS[name])


def test_lengths(rng: np.random.Generator) -> None:
    arrays = inputs(rng, b=3, t=213, s=300, n=16, g=2)
    masks = lists(rng, arrays, 16, 6)
    masks["topk_length"] = integers(rng, -2, 9, 3, 213)
    masks["key_value_seq_lengths"] = jnp.asarray([293, 0, 1000], jnp.int32)
    compare(arrays, masks, block_size=16)
    masks["query_start"] = jnp.asarray([-30, 100, 87], jnp.int32)
    compare(arrays, masks, block_size=16, **FORCED)


def attend_with_sinks(q: Any, k: Any, v: Any, sinks: Any, **options: Any) -> Any:
    return sparse_attention(q, k, v, sinks=sinks.astype(jnp.float32), **options)


@pytest.mark.parametrize(("d", "e"), [(64, 64), (128, 128), (192, 128), (256, 256)])
def test_sinks(d: int, e: int, rng: np.random.Generator) -> None:
    arrays = inputs(rng, t=150, s=213, d=d, e=e)
    sinks = jnp.asarray([-2.0, jnp.inf, -jnp.inf, 5.0], jnp.bfloat16)
    masks = lists(rng, arrays, 16, 4)
    compare((*arrays, sinks), masks, call=attend_with_sinks, block_size=16, **CAUSAL)


def test_max_logit(rng: np.random.Generator) -> None:
    arrays = inputs(rng, t=150, s=213, n=16, g=1)
    options = {"block_size": 32, "return_max_logit": True, **FORCED, **lists(rng, arrays, 32, 3)}
    got, want = (sparse_attention(*arrays, **options, implementation=i) for i in ("cuda", "xla"))
    assert_matches(got[1], want[1], 2e-5)


# T, S, N, G, D, E, slots, block size, options. The cases are those of the emulator's programs.
CASES: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "1 head, blocks of 16": ((150, 213, 2, 2, 64, 64, 4, 16), CAUSAL),
    "4 heads, blocks of 32": ((70, 213, 8, 2, 64, 64, 3, 32), {}),
    "12 heads, blocks of 4, tail": ((25, 150, 24, 2, 256, 256, 12, 4), TAIL | {"query_start": 120}),
    "16 heads, blocks of 64": ((20, 300, 16, 1, 128, 128, 3, 64), {}),
    "16 heads, blocks of 128": ((40, 500, 32, 2, 128, 128, 3, 128), CAUSAL | {"query_start": 470}),
    "32 heads, blocks of 1": ((20, 200, 32, 1, 64, 64, 40, 1), CAUSAL | {"query_start": 180}),
    "192 and 128 dims": ((30, 400, 16, 1, 192, 128, 2, 64), FORCED | {"query_start": 370}),
    "positions before the keys": ((60, 100, 4, 1, 64, 64, 2, 16), FORCED | {"query_start": -20}),
    "sinks": ((40, 150, 16, 2, 64, 64, 4, 16), CAUSAL | {"query_start": 100, "sinks": "sinks"}),
}


@pytest.mark.parametrize("name", CASES)
def test_against_float64(name: str, rng: np.random.Generator) -> None:
    (t, s, n, g, d, e, slots, size), options = CASES[name]
    arrays = inputs(rng, t=t, s=s, n=n, g=g, d=d, e=e)
    options = {"block_size": size, **lists(rng, arrays, size, slots), **options}
    if "sinks" in options:
        options["sinks"] = jnp.asarray(3 * rng.normal(size=n), jnp.float32)
    numbers = [np.asarray(x, np.float64) for x in arrays]
    held = {n: np.asarray(x) if isinstance(x, jax.Array) else x for n, x in options.items()}
    indices = held.pop("indices")
    out, lse, _ = oracle.sparse_attention(*numbers, indices, **held)
    dout, dlse = 3 * np.cos(3 * out), np.where(np.isfinite(lse), -np.sin(lse), 0)
    grads = oracle.sparse_attention_grads(*numbers, indices, dout, dlse, **held)[:3]
    got, low = (run(i, jnp.bfloat16, arrays, None, **options) for i in ("cuda", "xla"))
    assert_as_good_as(got.out, low.out, out, what="out")
    assert_matches(np.asarray(got.lse, np.float64), lse, tol=2e-5, what="lse")
    for name, *three in zip("qkv", got.gradients, low.gradients, grads, strict=True):
        assert_as_good_as(*three, factor=4.0, what=f"d{name}")


@pytest.mark.parametrize(("m", "size"), [(1, 1), (4, 16), (16, 64), (16, 128)])
@pytest.mark.parametrize("options", [{}, CAUSAL, FORCED], ids=["all keys", "causal", "forced"])
def test_unseen_nan_has_no_effect(
    options: dict[str, Any], m: int, size: int, rng: np.random.Generator
) -> None:
    """NaN in keys that no query of their group sees, and in queries that see no key."""
    q, k, v = inputs(rng, t=60, s=900, n=2 * m, g=2)
    masks = lists(rng, (q, k, v), size, 2)
    used, alive = np.zeros(k.shape[:3], bool), np.zeros(q.shape[:3], bool)
    which = {"block_size": size, **options}
    for at, g, keys in oracle.selections(
        np.asarray(q), np.asarray(k), np.asarray(masks["indices"]), **which
    ):
        used[at[0], keys, g] = True
        alive[at] = len(keys) > 0
    arrays = q, k, v
    dirty = tuple(
        jnp.where(seen[..., None], x, bad)
        for x, seen, bad in zip(
            arrays, (alive, used, used), (jnp.nan, jnp.nan, jnp.inf), strict=True
        )
    )
    want, got = (run("cuda", q.dtype, x, masks, **which) for x in (arrays, dirty))
    jax.tree.map(np.testing.assert_array_equal, got, want)
    assert np.all(np.asarray(got.out)[~alive] == 0) and np.all(
        np.asarray(got.lse)[~alive] == -np.inf
    )
    for gradient, seen in zip(got.gradients, (alive, used, used), strict=True):
        assert np.all(np.asarray(gradient)[~seen] == 0)


@pytest.mark.parametrize("alignment", ["top_left", "bottom_right"])
@pytest.mark.parametrize("options", [{}, CAUSAL, FORCED, TAIL], ids=str)
def test_packed_sequences(
    options: dict[str, Any], alignment: str, rng: np.random.Generator
) -> None:
    """Sequences have very different lengths, some are empty, and padding surrounds them."""
    arrays = inputs(rng, b=1, t=1500, s=1700, n=16, g=2)
    cu_q = jnp.asarray([3, 4, 4, 300, 1000, 1001, 1490], jnp.int32)
    cu_k = jnp.asarray([0, 7, 9, 200, 200, 900, 1650], jnp.int32)
    masks = {
        "indices": integers(rng, -1, 25, 1500, 2, 4),
        "cu_seqlens_q": cu_q,
        "cu_seqlens_k": cu_k,
    }
    options = options | ({"causal_alignment": alignment} if options else {})
    packed = tuple(x[0] for x in arrays)
    compare(packed, masks, call=sparse_attention_varlen, block_size=32, **options)


@pytest.mark.parametrize("size", [4, 64, 128])
def test_equals_masked_attention(size: int, rng: np.random.Generator) -> None:
    """Attention under the mask that distinct lists are."""
    arrays = inputs(rng, t=300, s=500, n=8, g=2, d=128)
    which = lists(rng, arrays, size, 3, "distinct")
    of_keys = np.arange(500) // size
    mask = (np.asarray(which["indices"])[..., None] == of_keys).any(3)  # [B, T, G, S]
    mask = jnp.asarray(np.repeat(mask.swapaxes(1, 2), 4, axis=1))
    got = run("cuda", jnp.bfloat16, arrays, which, block_size=size, query_start=200, **CAUSAL)
    mask &= jnp.arange(500) <= jnp.arange(200, 500)[:, None]
    want = run_call("cuda", jnp.bfloat16, arrays, {"mask": mask}, call=masked_attention)
    assert_matches(got.lse, want.lse, 2e-5)
    assert_matches((got.out, got.gradients), (want.out, want.gradients), 2e-2)


def test_equals_sparse_mla(rng: np.random.Generator) -> None:
    """Blocks of one key, and values that are the first columns of the keys."""
    q, kv, _ = inputs(rng, t=150, s=213, n=16, g=1, d=128)
    indices = lists(rng, (q, kv), 1, 60)["indices"]

    def attend(call: Any) -> Any:
        def loss(q: Any, kv: Any) -> Any:
            out, lse = call(q, kv)
            seen = jnp.where(jnp.isfinite(lse), lse, 0).sum()
            return jnp.sin(out.astype(jnp.float32)).sum() + seen, (out, lse)

        (_, results), grads = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(q, kv)
        return *results, grads

    options: Any = {"return_lse": True}
    got = attend(
        lambda q, kv: sparse_attention(
            q, kv, kv[..., :64], indices, block_size=1, implementation="cuda", **options
        )
    )
    want = attend(
        lambda q, kv: sparse_mla(q, kv, indices, value_dim=64, implementation="xla", **options)
    )
    assert_matches(got, want, 2e-2)


@pytest.mark.parametrize("empty", ["b", "t", "s", "n", "slots"])
def test_empty_axes(empty: str, rng: np.random.Generator) -> None:
    sizes = {"b": 2, "t": 3, "s": 5, "n": 4, "slots": 2} | {empty: 0}
    slots = sizes.pop("slots")
    arrays = inputs(rng, **sizes)
    which = {"indices": jnp.zeros((*arrays[0].shape[:2], 2, slots), jnp.int32)}
    got = run("cuda", jnp.bfloat16, arrays, which, block_size=4, **CAUSAL)
    assert [x.shape for x in got.gradients] == [x.shape for x in arrays]
    assert not any(np.asarray(x, np.float32).any() for x in (got.out, *got.gradients))
    assert np.all(np.asarray(got.lse) == -np.inf)


def test_unsupported_calls(rng: np.random.Generator) -> None:
    q, k, v = inputs(rng, t=3, s=8, n=66)
    few = q[:, :, :4]
    many = jnp.zeros((2, 3, 2, 16385), jnp.int32)
    for arrays, indices in (
        ([x.astype(jnp.float32) for x in (few, k, v)], many[..., :1]),
        ((few[..., :12], k[..., :12], v), many[..., :1]),
        ((q, k, v), many[..., :1]),
        ((few, k, v), many),
    ):
        with pytest.raises(NotImplementedError, match="implementation='xla'"):
            sparse_attention(*arrays, indices, block_size=4, implementation="cuda")
