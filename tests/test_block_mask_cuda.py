"""Tests the block mask kernel, and the code around it with NumPy in place of the kernel."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_dsa import make_block_mask
from jax_dsa.core.call import Call
from jax_dsa.ops.block_mask import cuda, xla
from jax_dsa.ops.block_mask.api import CLASSIFY, PACK
from jax_dsa.ops.block_mask.spec import Kinds, Map, Operands, Options, Tiles

T, S = 21, 37
EMPTY_MAP = (None, None, None)


def visible_in(other: Any, heads: int) -> np.ndarray:
    """Returns which keys a map shows, [B, heads, T, ...], including keys beyond S."""
    rows, tiles, bits = (np.asarray(x) for x in other)
    block_q, slots = bits.shape[3], bits.shape[2]
    kept = np.unpackbits(bits, axis=-1, bitorder="little").astype(bool)
    batch = max(rows.shape[0], tiles.shape[0])
    out = np.zeros((batch, tiles.shape[1], rows.shape[1], tiles.shape[3], kept.shape[-1]), bool)
    for b, h, t, j in np.ndindex(*out.shape[:4]):
        row, entry = rows[b % rows.shape[0], t], b % tiles.shape[0]
        tile = tiles[entry, h, row // block_q, j]
        if tile == -1:
            out[b, h, t, j] = True
        elif 0 <= tile < slots:
            out[b, h, t, j] = kept[entry, h, tile, row % block_q]
    wide = out.reshape(*out.shape[:3], -1)
    return np.repeat(wide, heads // wide.shape[1], axis=1)


def call(target: str, operands: Any, avals: Any, **sizes: Any) -> list[Any]:
    """Implements the FFI handlers in NumPy and checks their operands."""
    assert all(type(n) is np.int64 for n in sizes.values())
    queries, keys = int(sizes["queries"]), int(sizes["keys"])
    mask, starts, ends, q_segments, kv_segments, *other = operands[:8]
    batch, heads = avals[0].shape[:2]
    if starts is not None and ends is not None:
        assert starts.shape == ends.shape  # the handlers have one stride for both
    seen = np.ones((batch, heads, queries, keys), bool)
    if mask is not None:
        assert mask.dtype == bool and mask.shape[0] in (1, batch)
        assert mask.shape[2] in (1, queries) and mask.shape[3] == keys
        seen &= np.repeat(np.asarray(mask), heads // mask.shape[1], axis=1)
    position = np.arange(keys)
    for bound, inside in ((starts, np.greater_equal), (ends, np.less)):
        if bound is not None:
            assert bound.shape in ((1, queries), (batch, queries))
            seen &= inside(position, np.asarray(bound)[:, None, :, None])
    if q_segments is not None:
        assert q_segments.shape == (batch, queries) and kv_segments.shape == (batch, keys)
        same = np.asarray(q_segments)[:, :, None] == np.asarray(kv_segments)[:, None]
        seen &= same[:, None]
    if other[0] is not None:
        assert other[0].shape in ((1, queries), (batch, queries))
        assert other[1].shape[0] in (1, batch) and heads % other[1].shape[1] == 0
        seen &= visible_in(other, heads)[..., :keys]
    classify = target == "jax_dsa.block_mask_classify.v1"
    block_q, line = avals[-1].shape[3:] if not classify else (int(sizes["block_q"]), 0)
    block_k = int(sizes["block_k"]) if classify else 8 * line
    rows, columns = -(-queries // block_q), -(-keys // block_k)
    padding = (rows * block_q - queries, columns * block_k - keys)

    def tiled(x: np.ndarray) -> np.ndarray:
        wide = np.pad(x, ((0, 0), (0, 0), (0, padding[0]), (0, padding[1])))
        split = wide.reshape(*wide.shape[:2], rows, block_q, columns, block_k)
        return split.swapaxes(3, 4)

    tiles, masked = tiled(seen), tiled(~seen)
    occupied, full = tiles.any((4, 5)), ~masked.any((4, 5))
    if classify:
        results = [occupied, full]
    else:
        bits = np.packbits(tiles, axis=-1, bitorder="little")
        flat = bits.reshape(batch, heads, rows * columns, block_q, line)
        number = np.arange(rows * columns, dtype=np.int32).reshape(rows, columns)
        if target == "jax_dsa.block_mask_compress.v1":
            results = [np.where(full, -1, np.where(occupied, number, -2)).astype(np.int32), flat]
        else:
            assert target == "jax_dsa.block_mask_pack.v1"
            packed = np.zeros(avals[0].shape, np.uint8)
            slots = np.asarray(operands[8]).reshape(batch, heads, -1)
            for b, h, i in np.ndindex(*slots.shape):
                if 0 <= slots[b, h, i] < packed.shape[2]:
                    packed[b, h, slots[b, h, i]] = flat[b, h, i]
            results = [packed]
    assert [(a.shape, a.dtype) for a in avals] == [(y.shape, y.dtype) for y in results]
    return [jnp.asarray(y) for y in results]


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch, without_kernels: None) -> None:
    monkeypatch.setattr(cuda, "ffi", SimpleNamespace(call=call))


def integers(rng: np.random.Generator, low: int, high: int, *shape: int) -> jax.Array:
    return jnp.asarray(rng.integers(low, high, shape), jnp.int32)


def bools(rng: np.random.Generator, *shape: int) -> jax.Array:
    """Returns random bools with all-True and all-False ranges of keys."""
    mask = rng.random(shape) < 0.5
    mask[..., : shape[3] // 3] = True
    mask[..., shape[3] // 2 : shape[3] * 4 // 5] = False
    return jnp.asarray(mask)


def operands(rng: np.random.Generator, name: str, queries: int, keys: int) -> Operands:
    """Returns the operands of a case, with two batch entries where they are not shared."""
    full = jnp.full((1, queries), keys, jnp.int32)
    causal = jnp.arange(1, queries + 1, dtype=jnp.int32)[None]
    random = integers(rng, -9, keys + 9, 2, queries)
    pair = integers(rng, 0, 2, 1, queries), integers(rng, 0, 2, 2, keys)
    return {
        "mask": Operands(bools(rng, 2, 3, queries, keys), None, full, None, None),
        "shared mask": Operands(bools(rng, 1, 3, queries, keys), None, causal, None, None),
        "one row": Operands(bools(rng, 2, 1, 1, keys), None, random, None, None),
        "ranges": Operands(None, causal - 5, random, None, None),
        "segments": Operands(bools(rng, 1, 1, queries, keys), None, full, *pair),
    }[name]


KINDS = ["mask", "shared mask", "one row", "ranges", "segments"]


@pytest.mark.parametrize("blocks", [(4, 8), (8, 48)])
@pytest.mark.parametrize("name", KINDS)
def test_composition(
    name: str, blocks: tuple[int, int], rng: np.random.Generator, kernel: None
) -> None:
    options, x = Options(T, S, *blocks, slots=40), operands(rng, name, T, S)
    want = xla.block_mask_classify(options, x)
    for got, kinds in zip(cuda.block_mask_classify(options, want, x), want, strict=True):
        np.testing.assert_array_equal(got, kinds)
    partial = want.occupied & ~want.full
    slots = jnp.cumsum(partial.reshape(*partial.shape[:2], -1), -1, dtype=jnp.int32) - 1
    tiles = Tiles(jnp.where(partial, slots.reshape(partial.shape), -1))
    bits = xla.block_mask_pack(options, x, tiles)
    got_bits = cuda.block_mask_pack(options, bits, x, tiles)
    np.testing.assert_array_equal(got_bits.bits, bits.bits)


def compressed(rng: np.random.Generator, rows: int, heads: int, other: bool, ranges: bool) -> None:
    """Compares `cuda.compress` of a mask and a block mask with the masks themselves."""
    mask = bools(rng, 2, heads, rows, S)
    ends = integers(rng, 0, S, 2, T) if ranges else None
    blocks = make_block_mask(bools(rng, 1, 4, T, S), block_q=5, block_k=16)
    numbers = jnp.arange(T, dtype=jnp.int32)[None]
    given = Map(numbers, blocks.tiles, blocks.bits) if other else None
    got = cuda.compress(mask, T, ends=ends, other=given, block_q=8, block_k=16)
    count = max(heads, 4 if other else 1)
    want = np.repeat(np.broadcast_to(mask, (2, heads, T, S)), count // heads, axis=1)
    if given is not None:
        want = want & visible_in(given, count)[..., :S]
    seen = visible_in(got, count)[..., :S]
    if ends is not None:  # keys outside of the range may be anything
        inside = np.arange(S) < np.asarray(ends)[:, None, :, None]
        seen, want = seen & inside, want & inside
    np.testing.assert_array_equal(seen, want)
    if rows == 1 and not other:
        assert got.bits.size == 2 * heads * -(-S // 16) * 2


COMPRESSED = pytest.mark.parametrize("other", [False, True], ids=["mask", "mask and map"])
ROWS = pytest.mark.parametrize("rows", [1, T], ids=["one row", "rows"])
RANGES = pytest.mark.parametrize("ranges", [False, True], ids=["all keys", "ranges"])


@COMPRESSED
@ROWS
@RANGES
@pytest.mark.parametrize("heads", [1, 2, 4])
def test_compress(
    heads: int, rows: int, other: bool, ranges: bool, rng: np.random.Generator, kernel: None
) -> None:
    compressed(rng, rows, heads, other, ranges)


def test_ranges_per_batch_entry_do_not_repeat_a_shared_mask(
    rng: np.random.Generator, kernel: None
) -> None:
    mask, ends = bools(rng, 1, 1, T, S), integers(rng, 0, S, 2, T)
    got = cuda.compress(mask, T, ends=ends, block_q=8, block_k=16)
    assert got.tiles.shape[0] == 1
    np.testing.assert_array_equal(visible_in(got, 1)[..., :S], mask)


def test_unsupported_calls() -> None:
    assert cuda.supports(Options(T, S, 8, 8)) is None
    assert "function" in str(cuda.supports(Options(T, S, 8, 8, function=jnp.equal)))
    assert "1073741825" in str(cuda.supports(Options(T, 2**30 + 1, 8, 8)))
    assert "tiles" in str(cuda.supports(Options(2**30, 2**30, 1, 8)))


# ---- on a GPU ------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(200, 512), (213, 333), (1, 1), (700, 1040)], ids=str)
@pytest.mark.parametrize("blocks", [(128, 128), (16, 40), (64, 1040)], ids=str)
@pytest.mark.parametrize("name", KINDS)
def test_kernel(
    name: str, blocks: tuple[int, int], shape: tuple[int, int], rng: np.random.Generator
) -> None:
    x = operands(rng, name, *shape)
    options = Options(
        *shape, *blocks, slots=2 * -(-shape[0] // blocks[0]) * -(-shape[1] // blocks[1])
    )
    kernel, plain = Call("make_block_mask", "cuda"), Call("make_block_mask", "xla")
    want = CLASSIFY(plain, options, x)
    for got, kinds in zip(CLASSIFY(kernel, options, x), want, strict=True):
        np.testing.assert_array_equal(got, kinds)
    partial = want.occupied & ~want.full
    slots = jnp.cumsum(partial.reshape(*partial.shape[:2], -1), -1, dtype=jnp.int32) - 1
    tiles = Tiles(jnp.where(partial, slots.reshape(partial.shape), -2))
    np.testing.assert_array_equal(
        PACK(kernel, options, x, tiles).bits, PACK(plain, options, x, tiles).bits
    )


@pytest.mark.gpu
@COMPRESSED
@ROWS
@RANGES
@pytest.mark.parametrize("heads", [1, 2, 4])
def test_compress_on_the_kernel(
    heads: int, rows: int, other: bool, ranges: bool, rng: np.random.Generator
) -> None:
    compressed(rng, rows, heads, other, ranges)


@pytest.mark.gpu
@pytest.mark.parametrize("traced", [False, True], ids=["eager", "jit"])
def test_make_block_mask_on_the_kernel(
    traced: bool, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    mask = bools(rng, 2, 2, 300, 500)

    def make(mask: jax.Array) -> Any:
        return make_block_mask(
            mask,
            is_causal=True,
            segment_ids=(np.ones((2, 300), np.int32), np.ones((2, 500), np.int32)),
        )

    made = jax.jit(make) if traced else make
    assert "jax_dsa.block_mask_classify.v1" in jax.jit(make).lower(mask).as_text()
    got = made(mask)
    monkeypatch.setenv("JAX_DSA_IMPL", "xla")
    want = (jax.jit(lambda x: make(x)) if traced else make)(mask)
    jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.gpu
def test_kernel_with_more_than_2_31_keys() -> None:
    length = 46400
    number = jax.lax.iota(jnp.uint32, length)

    @jax.jit
    def make() -> jax.Array:
        mixed = (number[:, None] * jnp.uint32(2654435761)) ^ (number * jnp.uint32(40503))
        tile = number[:, None] // 128 + number // 128
        return jnp.where(tile % 3 == 0, (mixed >> 13) % 2 == 0, tile % 3 == 1)[None, None]

    mask, options = make(), Options(length, length, 128, 128)
    x = Operands(mask, None, jnp.full((1, length), length, jnp.int32), None, None)
    got = CLASSIFY(Call("make_block_mask", "cuda"), options, x)
    tile = np.add.outer(np.arange(363), np.arange(363)) % 3
    want = Kinds(jnp.asarray(tile < 2), jnp.asarray(tile == 1))
    for kinds, expected in zip(got, want, strict=True):
        np.testing.assert_array_equal(kinds[0, 0], expected)
