"""Tests block masks against the masks they are made of, and the masks made of biases."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.compare import assert_matches
from support.oracles import masked_attention as oracle

import jax_dsa
from jax_dsa.ops.block_mask import (
    BlockMask,
    make_block_mask,
    relu_mask,
    topk_indices,
    topk_mask,
)
from jax_dsa.ops.masked_attention import masked_attention

f32, i32 = np.float32, np.int32


def expanded(blocks: BlockMask) -> np.ndarray:
    """Returns the mask that a block mask represents."""
    tiles, bits = np.asarray(blocks.tiles), np.asarray(blocks.bits)
    block_q, block_k = blocks.block_q, blocks.block_k
    batch, heads, rows, columns = tiles.shape
    out = np.zeros((batch, heads, rows * block_q, columns * block_k), bool)
    for b, h, i, j in np.ndindex(*tiles.shape):
        tile = tiles[b, h, i, j]
        block = out[b, h, i * block_q : (i + 1) * block_q, j * block_k : (j + 1) * block_k]
        block[:] = tile == -1
        if tile >= 0:
            block[:] = np.unpackbits(bits[b, h, tile], axis=-1, bitorder="little")
    return out[:, :, : blocks.query_length, : blocks.key_length]


def check(blocks: BlockMask, mask: np.ndarray) -> None:
    """Asserts that all fields of the block mask follow from `mask` [B, H, T, S]."""
    blocks = jax.tree.map(np.asarray, blocks)
    np.testing.assert_array_equal(expanded(blocks), mask)
    _, _, rows, columns = blocks.tiles.shape
    block_q, block_k = blocks.block_q, blocks.block_k
    assert (rows, columns) == (-(-mask.shape[2] // block_q), -(-mask.shape[3] // block_k))
    for b, h in np.ndindex(*mask.shape[:2]):
        slots = []
        occupied = np.zeros((rows, columns), bool)
        for i, j in np.ndindex(rows, columns):
            tile = mask[b, h, i * block_q : (i + 1) * block_q, j * block_k : (j + 1) * block_k]
            occupied[i, j] = tile.any()
            got = int(blocks.tiles[b, h, i, j])
            assert (got == -1) == tile.all() and (got == -2) == (not tile.any())
            slots += [got] if got >= 0 else []
        assert slots == list(range(len(slots)))
        for lists, counts, rows_of_tiles in (
            (blocks.kv_tiles, blocks.num_kv_tiles, occupied),
            (blocks.q_tiles, blocks.num_q_tiles, occupied.T),
        ):
            for i, row in enumerate(rows_of_tiles):
                want = list(np.flatnonzero(row))
                assert int(counts[b, h, i]) == len(want)
                assert lists[b, h, i].tolist() == want + [-1] * (len(row) - len(want))


@pytest.mark.parametrize("traced", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("mask_shape", [(2, 3, 21, 37), (1, 3, 1, 37), (2, 1, 21, 37)])
def test_from_an_array(mask_shape: tuple, traced: bool, rng: np.random.Generator) -> None:
    shape = (2, 3, 21, 37)
    mask = rng.random(mask_shape) < 0.5
    # Make sure that there are tiles of every kind.
    mask[..., :8] = True
    mask[..., 16:32] = False
    make = lambda m: make_block_mask(m, shape=shape, block_q=4, block_k=8)  # noqa: E731
    blocks = (jax.jit(make) if traced else make)(jnp.asarray(mask))
    check(blocks, np.broadcast_to(mask, (*mask_shape[:2], *shape[2:])))
    partial = int((np.asarray(blocks.tiles) >= 0).sum((2, 3)).max())
    slots = blocks.bits.shape[2]
    assert slots == blocks.tiles[0, 0].size if traced else partial <= slots < 2 * partial


def test_from_a_function(rng: np.random.Generator) -> None:
    """The function gets int32 indices in range, also for tiles that extend beyond the mask."""
    lengths = jnp.asarray([5, 30])
    seen = []

    def fn(b: jax.Array, h: jax.Array, t: jax.Array, s: jax.Array) -> jax.Array:
        seen.append([x.dtype for x in (b, h, t, s)])
        return (s < lengths[b]) & ((t + s) % (h + 2) == 0)

    blocks = make_block_mask(fn, shape=(2, 2, 13, 30), block_q=5, block_k=16)
    b, h, t, s = np.ogrid[:2, :2, :13, :30]
    check(blocks, (s < np.asarray(lengths)[b]) & ((t + s) % (h + 2) == 0))
    assert {str(d) for row in seen for d in row} == {"int32"}


OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {"is_causal": True},
    "bottom-right": {"is_causal": True, "causal_alignment": "bottom_right"},
    "window": {"local_window_size": (3, 1)},
    "lengths": {
        "key_value_seq_lengths": np.array([9, 23], i32),
        "causal_alignment": "bottom_right",
        "local_window_size": 4,
    },
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_from_options(options: dict[str, Any], rng: np.random.Generator) -> None:
    shape = (2, 1, 11, 21)
    segments = rng.integers(0, 2, (2, 11)).astype(i32), rng.integers(0, 2, (2, 21)).astype(i32)
    blocks = make_block_mask(shape=shape, segment_ids=segments, block_q=3, block_k=8, **options)
    count = oracle.counts(shape, 1, q_segments=segments[0], kv_segments=segments[1], **options)
    check(blocks, count > 0)


@pytest.mark.parametrize(("block_q", "block_k"), [(128, 256), (256, 128), (1024, 1024)])
def test_tiles_beyond_a_short_mask(block_q: int, block_k: int, rng: np.random.Generator) -> None:
    """One block size serves sequences of all lengths."""
    q = jnp.asarray(rng.normal(size=(1, 9, 2, 8)), f32)
    k = jnp.asarray(rng.normal(size=(1, 21, 2, 8)), f32)
    mask = rng.random((1, 1, 9, 21)) < 0.5
    for some_mask in (mask, np.ones_like(mask), mask[:, :, :0]):
        blocks = make_block_mask(some_mask, block_q=block_q, block_k=block_k)
        check(blocks, some_mask)
        some = q[:, : some_mask.shape[2]]
        want = masked_attention(some, k, k, mask=some_mask)
        assert_matches(masked_attention(some, k, k, block_mask=blocks), want, 1e-5)
    options = {"shape": (1, 1, 9, 9), "block_q": block_q, "block_k": block_k}
    check(make_block_mask(is_causal=True, **options), np.tri(9, dtype=bool)[None, None])


def test_attention_with_a_block_mask_equals_attention_with_the_mask(
    rng: np.random.Generator,
) -> None:
    """Outputs and gradients agree, under vmap too, and with another mask besides."""
    q = jnp.asarray(rng.normal(size=(2, 13, 4, 8)), f32)
    k = jnp.asarray(rng.normal(size=(2, 19, 2, 8)), f32)
    own = jnp.asarray(rng.random((1, 2, 13, 19)) < 0.5)
    other = jnp.asarray(rng.random((2, 1, 1, 19)) < 0.8)
    blocks = make_block_mask(own, block_q=4, block_k=8)

    @jax.jit
    def both(q: jax.Array, k: jax.Array, masks: dict) -> tuple:
        def loss(q: jax.Array, k: jax.Array) -> tuple:
            out, lse = masked_attention(q, k, k, **masks, is_causal=True, return_lse=True)
            return (out**2).sum() + jnp.where(jnp.isfinite(lse), lse, 0).sum(), (out, lse)

        return jax.grad(loss, (0, 1), has_aux=True)(q, k)

    want = both(q, k, {"mask": own & other})
    assert_matches(both(q, k, {"mask": other, "block_mask": blocks}), want, 1e-6)
    pair = jax.tree.map(lambda x: jnp.stack([x, x]), blocks)
    over = jax.vmap(both, (None, None, {"mask": None, "block_mask": 0}))
    got = over(q, k, {"mask": other, "block_mask": pair})
    assert_matches(jax.tree.map(lambda x: x[1], got), want, 1e-6)


@pytest.mark.parametrize("shape", [(0, 1, 4, 9), (1, 0, 4, 9), (1, 1, 0, 9), (1, 1, 4, 0)])
def test_empty(shape: tuple[int, ...]) -> None:
    check(make_block_mask(np.ones(shape, bool), is_causal=True), np.zeros(shape, bool))
    q, k = jnp.ones((1, shape[2], 1, 8)), jnp.ones((1, shape[3], 1, 8))
    if shape[0] and shape[1]:
        out = masked_attention(q, k, k, block_mask=make_block_mask(shape=shape))
        assert out.shape == q.shape and not np.asarray(out).any()


def test_relu_mask() -> None:
    bias = jnp.asarray([-1.0, -0.0, 0.0, 1e-30, jnp.inf, jnp.nan], jnp.bfloat16)
    assert relu_mask(bias).tolist() == [False, False, False, True, True, False]
    assert jax.grad(lambda x: jnp.where(relu_mask(x), x, 0)[3])(bias).tolist() == [0, 0, 0, 1, 0, 0]


@settings(deadline=None, max_examples=25)
@given(
    rows=st.lists(
        st.lists(
            st.sampled_from([-np.inf, -1.0, -0.0, 0.0, 0.5, 1.0, np.inf, np.nan]),
            min_size=7,
            max_size=7,
        ),
        min_size=2,
        max_size=2,
    ),
    top_k=st.sampled_from([3, 9]),
    dtype=st.sampled_from(["float32", "bfloat16"]),
)
def test_topk_masks(rows: list[list[float]], top_k: int, dtype: str) -> None:
    """Compares with a stable sort by descending value, including ties at the threshold."""
    bias = jnp.asarray(rows, dtype)[:, None]
    mask, indices = topk_mask(bias, top_k), topk_indices(bias, top_k)
    for i, row in enumerate(rows):
        usable = [s for s, x in enumerate(row) if x > -np.inf]
        best = sorted(sorted(usable, key=lambda s: -row[s])[:top_k])
        assert np.flatnonzero(mask[i, 0]).tolist() == best
        assert indices[i, 0].tolist() == best + [-1] * (top_k - len(best))


def test_topk_mask_within_a_mask(rng: np.random.Generator) -> None:
    """With one bias per key, each query selects its own keys, as in dynamic mask attention."""
    bias = jnp.asarray(rng.normal(size=(2, 3, 1, 9)), f32)
    causal = jnp.tril(jnp.ones((9, 9), bool))
    mask = np.asarray(jax.jit(lambda b: topk_mask(b, 4, mask=causal))(bias))
    assert mask.shape == (2, 3, 9, 9)
    for b, h, t in np.ndindex(2, 3, 9):
        row = np.asarray(bias)[b, h, 0, : t + 1]
        assert np.flatnonzero(mask[b, h, t]).tolist() == sorted(np.argsort(-row)[:4].tolist())


def test_kept_keys_equal_a_mask(rng: np.random.Generator) -> None:
    """`topk_indices` as kv_indices and `topk_mask` as mask give the same attention."""
    q = jnp.asarray(rng.normal(size=(2, 6, 4, 8)), f32)
    k, v = (jnp.asarray(rng.normal(size=(2, 15, 2, 8)), f32) for _ in range(2))
    bias = jnp.asarray(rng.normal(size=(2, 2, 1, 15)), f32)
    options = {"is_causal": True, "causal_alignment": "bottom_right"}

    def grads(**how: Any) -> Any:
        fn = lambda *a: (jax_dsa.masked_attention(*a, **how, **options) ** 2).sum()  # noqa: E731
        return jax.jit(jax.value_and_grad(fn, (0, 1, 2, 3)))(q, k, v, bias)

    kept = grads(kv_indices=topk_indices(bias[:, :, 0], 5))
    assert_matches(kept, grads(mask=topk_mask(bias, 5)), 1e-5)


ARRAY = np.ones((1, 1, 4, 9), bool)
ERRORS = [
    ((), {}, ValueError, r"make_block_mask.*'shape' is None, want \(B, H, T, S\)"),
    ((), {"shape": (1, 4, 9)}, ValueError, "'shape' is"),
    ((), {"shape": (1, 1, -4, 9)}, ValueError, "'shape' is -4"),
    ((ARRAY[0],), {}, ValueError, r"'mask' has shape \(.*\), want \[B, H, T, S\]$"),
    ((ARRAY[0, 0],), {}, ValueError, r"'mask' has shape .*did you mean mask\[None, None\]\?$"),
    ((ARRAY.astype(i32),), {}, TypeError, "'mask' has dtype int32, want bool"),
    ((ARRAY,), {"shape": (1, 1, 4, 8)}, ValueError, r"'mask' has shape \(1, 1, 4, 9\)"),
    ((ARRAY,), {"shape": (2, 1, 5, 9)}, ValueError, "'mask' has shape"),
    ((lambda b, h, t, s: s,), {"shape": (1, 1, 4, 9)}, TypeError, "'mask' has dtype int32"),
    ((ARRAY,), {"block_q": 0}, ValueError, "'block_q' is 0"),
    ((ARRAY,), {"block_q": 1025}, ValueError, r"'block_q' is 1025, want int in 1\.\.1024"),
    ((ARRAY,), {"block_k": 12}, ValueError, "'block_k' is 12, want a multiple of 8"),
    ((ARRAY,), {"local_window_size": "all"}, TypeError, "'local_window_size'"),
    (
        (ARRAY,),
        {"key_value_seq_lengths": np.ones(2, i32)},
        ValueError,
        "'key_value_seq_lengths' has shape.*B=1",
    ),
    ((ARRAY,), {"segment_ids": np.ones((1, 4), i32)}, ValueError, "'segment_ids' has shape.*S=9"),
    ((ARRAY,), {"is_causal": None}, TypeError, "'is_causal'"),
    ((ARRAY,), {"causal_alignment": 1}, ValueError, "'causal_alignment' is 1"),
]


@pytest.mark.parametrize(("args", "options", "error", "message"), ERRORS)
def test_misuse(args: tuple, options: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make_block_mask(*args, **options)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: relu_mask([1.0]), TypeError, "relu_mask: argument 'bias' is list"),
        (lambda: relu_mask(ARRAY), TypeError, "relu_mask: argument 'bias' has dtype bool"),
        (lambda: topk_indices(np.float32(1), 2), ValueError, "topk_indices: argument 'bias'"),
        (lambda: topk_indices(np.ones(4, f32), 0), ValueError, "topk_indices: argument 'top_k'"),
        (lambda: topk_mask(np.ones(4, f32), 1.0), TypeError, "topk_mask: argument 'top_k' is 1.0"),
        (lambda: topk_mask(np.ones(9, f32), 1, mask=1), TypeError, "topk_mask: argument 'mask'"),
        (lambda: topk_mask(np.ones(8, f32), 1, mask=ARRAY), ValueError, "'mask' has shape"),
    ],
)
def test_misuse_of_masks_from_biases(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
