"""Exact top-k in XLA, without a sort.

Values are mapped to integer keys of the same order. A bisection over the bits of the keys finds the
k-th largest key of each row, with one count per bit. Larger keys are selected, and equal keys from
the left until there are k. The selection is packed to one bit per position and expanded to
ascending indices. No step collects candidates in a buffer, so none can overflow.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_dsa.core.streaming import chunk_length, scan_chunks
from jax_dsa.core.typing import Array, Bool, Float, Int
from jax_dsa.ops.topk.spec import (
    BlockOperands,
    BlockResults,
    Blocks,
    Gradients,
    Operands,
    Options,
    Results,
    Selected,
    clipped_block,
)

_WORD = 32

# Bytes of temporaries per position of a row: value, key, summand of the count, padded masks.
BYTES_PER_POSITION = 16


def visible(starts: Int[Array, "..."], ends: Int[Array, "..."], size: int) -> Bool[Array, "... S"]:
    """Returns which of `size` positions lie in the half-open range of each row."""
    position = jnp.arange(size, dtype=jnp.int32).reshape(*[1] * starts.ndim, size)
    return (position >= starts[..., None]) & (position < ends[..., None])


def topk_fwd(options: Options, x: Operands) -> Results:
    """Returns the indices [B, T, K], and with `options.return_values` the values at them."""
    batch, queries, size = x.x.shape
    count = batch * queries
    rows = (x.x.reshape(count, size), x.starts.reshape(count), x.ends.reshape(count))
    chunk = chunk_length(count, size * BYTES_PER_POSITION)

    def body(carry: tuple[()], x: Array, starts: Array, ends: Array) -> tuple[tuple[()], tuple]:
        indices = select(jnp.where(visible(starts, ends, size), x, -jnp.inf), options.top_k)
        return carry, (indices, values_at(x, indices) if options.return_values else None)

    _, outs = scan_chunks(body, (), rows, axis=0, chunk=chunk)
    indices, values = outs
    shape = batch, queries, options.top_k
    return Results(indices.reshape(shape), None if values is None else values.reshape(shape))


def topk_bwd(options: Options, selected: Selected, dy: Results) -> Gradients:
    """Returns the gradient of the rows: each value's gradient at the position of the value."""
    assert dy.values is not None
    return Gradients(scatter_values(selected.indices, dy.values, options.size))


def block_topk_fwd(options: Blocks, x: BlockOperands) -> BlockResults:
    """Returns the numbers [B, T, K] of the blocks with the largest logits."""
    batch, queries, size = x.logits.shape
    count = batch * queries
    starts = None if x.starts is None else x.starts.reshape(count)
    rows = (x.logits.reshape(count, size), starts, x.ends.reshape(count))
    chunk = chunk_length(count, size * BYTES_PER_POSITION)

    def body(carry: tuple[()], x: Array, starts: Array | None, ends: Array) -> Any:
        first = jnp.zeros_like(ends) if starts is None else starts
        x = jnp.where(visible(first, ends, size), x, -jnp.inf)
        scores = _block_max(split_into_blocks(x, starts, options.block_size))
        return carry, (select_blocks(options, scores, scores != -jnp.inf),)

    _, (indices,) = scan_chunks(body, (), rows, axis=0, chunk=chunk)
    return BlockResults(indices.reshape(batch, queries, options.top_k))


def split_into_blocks(
    x: Float[Array, "R S"], starts: Int[Array, "R"] | None, block_size: int
) -> Float[Array, "R M b"]:
    """Returns the blocks of each row, which count from `starts`, padded with -inf."""
    rows, size = x.shape
    block_size = clipped_block(block_size, size)
    blocks = -(-size // block_size)
    reach = blocks * block_size
    if starts is None:
        x = jnp.pad(x, ((0, 0), (0, reach - size)), constant_values=-jnp.inf)
    else:
        x = jnp.pad(x, ((0, 0), (0, reach)), constant_values=-jnp.inf)
        x = jax.vmap(lambda row, at: jax.lax.dynamic_slice_in_dim(row, at, reach))(x, starts)
    return x.reshape(rows, blocks, block_size)


def in_blocks(
    blocks: Int[Array, "R M"], starts: Int[Array, "R"], block_size: int, size: int
) -> Bool[Array, "R S"]:
    """Returns which of `size` keys lie in the given blocks of each row.

    Blocks count from `starts`; the result is undefined for keys before it. Numbers of blocks that a
    row does not have are ignored.
    """
    block_size = clipped_block(block_size, size)
    count = -(-size // block_size)
    row = jnp.arange(blocks.shape[0], dtype=jnp.int32)[:, None]
    number = jnp.where((blocks >= 0) & (blocks < count), blocks, count)
    is_given = jnp.zeros((blocks.shape[0], count + 1), bool).at[row, number].set(True)
    own = (jnp.arange(size, dtype=jnp.int32)[None] - starts[:, None]) // block_size
    return jnp.take_along_axis(is_given, jnp.maximum(own, 0), axis=1, mode="promise_in_bounds")


def select_blocks(
    options: Blocks, scores: Float[Array, "R M"], seen: Bool[Array, "R M"]
) -> Int[Array, "R K"]:
    """Returns the numbers of the blocks with the largest scores, ascending, then -1.

    Forced blocks come first if they are seen. `local_blocks` count from the last block that is.
    """
    number = jnp.arange(scores.shape[1], dtype=jnp.int32)[None]
    last = jnp.max(jnp.where(seen, number, -1), axis=1, keepdims=True, initial=-1)
    local = number > last - options.local_blocks
    forced = seen & (local | (number < options.sink_blocks))
    # A minimum of floats would flush denormals to zero on some devices.
    others = jnp.where(scores == jnp.inf, jnp.finfo(scores.dtype).max, scores)
    return select(jnp.where(forced, jnp.inf, others), options.top_k)


def values_at(x: Float[Array, "... S"], indices: Int[Array, "... K"]) -> Float[Array, "... K"]:
    """Returns the values at `indices`, -inf where an index is -1."""
    if x.shape[-1] == 0:
        return jnp.full(indices.shape, -jnp.inf, x.dtype)
    values = jnp.take_along_axis(x, jnp.maximum(indices, 0), axis=-1, mode="promise_in_bounds")
    return jnp.where(indices >= 0, values, -jnp.inf)


def scatter_values(
    indices: Int[Array, "B T K"], values: Float[Array, "B T K"], size: int
) -> Float[Array, "B T S"]:
    """Returns zeros [B, T, size] to which the values are added at their indices.

    Values at index -1 are dropped.
    """
    batch, queries, k = indices.shape
    where = jnp.where(indices >= 0, indices, size)  # Negative indices would wrap around.
    rows = (where.reshape(batch * queries, k), values.reshape(batch * queries, k))

    def row(index: Array, value: Array) -> Array:
        return jnp.zeros(size, value.dtype).at[index].add(value, mode="drop")

    return jax.vmap(row)(*rows).reshape(batch, queries, size)


def select(x: Float[Array, "R S"], k: int) -> Int[Array, "R K"]:
    """Returns the indices of the k largest values of each row, ascending, with -1 at the end."""
    size = x.shape[1]
    reach = min(k, size) if isinstance(size, int) else k
    if reach == 0:
        return jnp.full((x.shape[0], k), -1, jnp.int32)
    keys, bits = _ordered_keys(x)
    threshold = _kth_largest(keys, reach, bits)[:, None]
    above = _pack(keys > threshold)
    tied = _pack((keys == threshold) & (keys != -(2 ** (bits - 1))))

    room = reach - jnp.sum(_popcount(above), axis=1, dtype=jnp.int32, keepdims=True)
    ties = _popcount(tied)
    before = jnp.cumsum(ties, axis=1, dtype=jnp.int32) - ties
    indices = _positions(above | _first_bits(tied, room - before), reach)
    return jnp.pad(indices, ((0, 0), (0, k - reach)), constant_values=-1)


def _block_max(x: Float[Array, "R M b"]) -> Float[Array, "R M"]:
    """Returns the largest value of each block; NaN if the block has one.

    A maximum of floats would flush denormals to zero on some devices.
    """
    lowest = jnp.iinfo(f"int{jnp.finfo(x.dtype).bits}").min
    keys = jnp.max(_signed_keys(x)[0], axis=2)
    raw = jnp.where(keys < 0, lowest - keys, keys)  # the sign, then the magnitude
    return jax.lax.bitcast_convert_type(raw, x.dtype)


def _signed_keys(x: Float[Array, "*b"]) -> tuple[Int[Array, "*b"], Any]:
    """Returns signed integers with the order of the values, as wide as these, and that of +inf.

    The integers of NaN are the largest. Comparisons of floats would not do, because they flush
    denormals to zero on some devices.
    """
    bits = jnp.finfo(x.dtype).bits
    raw = jax.lax.bitcast_convert_type(x, jnp.dtype(f"int{bits}"))
    magnitude = raw & np.array(2 ** (bits - 1) - 1, raw.dtype)
    infinity = np.array(np.inf, x.dtype).view(raw.dtype)
    is_negative = (raw < 0) & (magnitude <= infinity)
    return jnp.where(is_negative, -magnitude, magnitude), infinity  # -0 becomes the key of +0.


def _ordered_keys(x: Float[Array, "R S"]) -> tuple[Int[Array, "R S"], int]:
    """Returns signed integers with the order of the values, and their number of bits.

    NaN and -inf become the lowest integer.
    """
    keys, infinity = _signed_keys(x)
    bits = jnp.finfo(x.dtype).bits
    lowest = np.array(-(2 ** (bits - 1)), keys.dtype)
    keys = jnp.where((keys > infinity) | (keys == -infinity), lowest, keys)
    return keys.astype(jnp.promote_types(jnp.int32, keys.dtype)), bits


def _kth_largest(keys: Int[Array, "R S"], k: int, bits: int) -> Int[Array, "R"]:
    """Returns the largest integer of `bits` bits that at least k keys of a row reach."""
    # On CPU, sums of floats are vectorized and sums of integers are not. They are exact up to 2^24.
    size = keys.shape[1]
    count = jnp.float32 if isinstance(size, int) and size <= 2**24 else jnp.int32

    def raise_bit(i: Array, t: Array) -> Array:
        step = jax.lax.shift_left(jnp.ones((), keys.dtype), jnp.asarray(bits - 1 - i, keys.dtype))
        higher = t + step  # At full width, the first step wraps around from the lowest key to 0.
        reached = jnp.sum((keys >= higher[:, None]).astype(count), axis=1)
        return jnp.where(reached >= k, higher, t)

    start = jnp.full_like(keys[:, 0], -(2 ** (bits - 1)))
    return jax.lax.fori_loop(0, bits, raise_bit, start)


def _popcount(words: Int[Array, "..."]) -> Int[Array, "..."]:
    return jax.lax.population_count(words).astype(jnp.int32)


def _pack(mask: Bool[Array, "R S"]) -> Int[Array, "R W"]:
    """Packs 32 positions into each word, the first into the lowest bit."""
    rows, size = mask.shape
    words = -(-size // _WORD)
    mask = jnp.pad(mask, ((0, 0), (0, words * _WORD - size))).reshape(rows, words, _WORD)
    bit = jnp.arange(_WORD, dtype=jnp.uint32).reshape(1, 1, _WORD)
    return jnp.sum(mask.astype(jnp.uint32) << bit, axis=2, dtype=jnp.uint32)


def _nth_bit(words: Int[Array, "..."], n: Int[Array, "..."]) -> Int[Array, "..."]:
    """Returns the index of the n-th set bit of each word, counted from the lowest, n >= 1.

    The word must have at least n set bits.
    """
    at = jnp.zeros(words.shape, jnp.uint32)
    for width in (16, 8, 4, 2, 1):
        low = _popcount(words & np.uint32(2**width - 1))
        skip = n > low
        at = jnp.where(skip, at + np.uint32(width), at)
        n = jnp.where(skip, n - low, n)
        words = jnp.where(skip, words >> np.uint32(width), words)
    return at


def _first_bits(words: Int[Array, "R W"], n: Int[Array, "R W"]) -> Int[Array, "R W"]:
    """Returns each word with only its lowest n set bits."""
    last = np.uint32(1) << _nth_bit(words, n)
    return jnp.where(n >= _popcount(words), words, jnp.where(n > 0, words & (last | (last - 1)), 0))


def _positions(words: Int[Array, "R W"], k: int) -> Int[Array, "R K"]:
    """Returns the positions of the set bits of each row, ascending, then -1.

    At most k bits of a row may be set.
    """
    ends = jnp.cumsum(_popcount(words), axis=1, dtype=jnp.int32)
    slot = jnp.arange(k, dtype=jnp.int32)[None]

    def word_of_slot(ends: Int[Array, "W"]) -> Int[Array, "K"]:
        finished = jnp.zeros(k, jnp.int32).at[ends].add(1, mode="drop")
        return jnp.minimum(jnp.cumsum(finished, dtype=jnp.int32), ends.size - 1)

    word = jax.vmap(word_of_slot)(ends)

    def take(a: Array) -> Array:
        return jnp.take_along_axis(a, word, axis=1, mode="promise_in_bounds")

    nth = slot + 1 - take(ends - _popcount(words))
    position = word * _WORD + _nth_bit(take(words), nth).astype(jnp.int32)
    return jnp.where(slot < ends[:, -1:], position, -1)
