"""Scores of chunks of queries in plain JAX: visibility, biases, and the keys that heads keep.

The query axis is processed in chunks, so that the scores [B, N, chunk, S] of one chunk fit the
streaming budget. Biases and masks are read a chunk at a time in their own broadcast shape.

All arrays here have the axes [b, g, m, t, s]. The N query heads are G groups of M heads. An axis
has size 1 where an operand broadcasts.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_dsa.core import compat, streaming
from jax_dsa.core.typing import Array, Float, Int
from jax_dsa.ops.block_mask.spec import FULL

if TYPE_CHECKING:
    from collections.abc import Callable

    from jax_dsa.ops.masked_attention.spec import Operands, Options


def scores(options: Options, q: Array, k: Array, bias: Array | None) -> Array:
    """Returns the scaled, biased and softcapped products q.k, not yet masked."""
    x = options.scale * dot("bgmtd,bgsd->bgmts", q, k)
    if bias is not None:
        x += bias.astype(x.dtype)
    if options.softcap is not None:
        x = options.softcap * jnp.tanh(x / options.softcap)
    # A compiler may compute scale * dot - max_logit in one instruction, which does not round the
    # product. Where logits are huge, this is no difference of two logits. A selection prevents it.
    # Only +inf and NaN take the second branch. abs changes neither, but the compiler does not know.
    return jnp.where(x < jnp.inf, x, jnp.abs(x))


def weights(s: Array, max_logit: Array, log_sum: Array | float = 0.0) -> Array:
    """Returns exp(s - max_logit - log_sum), at most exp(-log_sum).

    The difference of a score and the largest one is computed first, because it is exact where all
    scores of a row are huge. The clamp matters if huge scores have rounding errors.
    """
    x = s - max_logit
    return jnp.exp(jnp.where(x > 0, 0, x) - log_sum)  # jnp.minimum would halve the gradient at 0


def exponentials(s: Array, visible: Array | None, keys: Keys) -> tuple[Array, Array, Array]:
    """Returns the unnormalized probabilities of scores, their sums, and the largest scores.

    A query that sees no key has the sum 1 and the largest score -inf.
    """
    if visible is not None:
        s = jnp.where(visible, s, -jnp.inf)
    peak = jax.lax.stop_gradient(s.max(-1, keepdims=True, initial=-jnp.inf))
    p = keys.multiply_by_count(weights(s, jnp.where(peak == -jnp.inf, 0, peak)))
    total = p.sum(-1, keepdims=True)
    return p, jnp.where(peak == -jnp.inf, 1, total), peak


def dot(equation: str, a: Array, b: Array) -> Array:
    """`jnp.einsum` that accumulates in float32, or float64 for float64."""
    return jnp.einsum(equation, a, b, preferred_element_type=compat.accum_dtype(a.dtype))


def scan_query_chunks(
    body: Callable[..., Any],
    carry: Any,
    xs: tuple[Array, ...],
    queries: Queries,
    keys: Keys,
    *,
    copies: int,
) -> Any:
    """Scans `body` over chunks of queries.

    Args:
        body: Takes the carry, the indices of the queries of a chunk, the chunks of `xs`, and the
            chunks of `queries.per_query`. Returns the new carry and a tuple of results.
        carry: The initial carry.
        xs: Arrays [B, T, N, ...].
        queries: All queries.
        keys: The keys.
        copies: How many arrays of the size of the scores of one chunk must fit the budget.
    """
    batch, length, heads = xs[0].shape[:3]
    groups, kept = keys.k.shape[1:3]
    size = jnp.dtype(compat.accum_dtype(xs[0].dtype)).itemsize
    chunk = streaming.chunk_length(length, copies * size * batch * heads * kept)
    rows = jnp.arange(length, dtype=jnp.int32).reshape(1, 1, 1, length, 1)
    grouped = (split_heads(jnp.swapaxes(x, 1, 2), heads, groups) for x in xs)
    return streaming.scan_chunks(
        body, carry, (rows, *grouped, *queries.per_query), axis=3, chunk=chunk
    )


def take_rows(x: Array | None, rows: Array) -> Array | None:
    """Returns the consecutive rows `rows` of x [b g m t s]; all of x if queries share it."""
    if x is None or x.shape[3] == 1:
        return x
    return jax.lax.dynamic_slice_in_dim(x, jnp.min(rows, initial=x.shape[3]), rows.shape[3], 3)


def put_rows(x: Array, rows: Array, values: Array) -> Array:
    """Returns x [b g m t s] with the consecutive rows `rows` replaced by `values`."""
    start = jnp.min(rows, initial=x.shape[3])
    return jax.lax.dynamic_update_slice_in_dim(x, values.astype(x.dtype), start, 3)


def split_heads(x: Array, heads: int, groups: int) -> Array:
    """[b h t s] -> [b g m t s], where h is N, G or 1."""
    split = (groups, heads // groups) if x.shape[1] == heads else (x.shape[1], 1)
    return x.reshape(x.shape[0], *split, *x.shape[2:])


def merge_heads(x: Array) -> Array:
    """[b g m t s] -> [b n t s]"""
    return x.reshape(x.shape[0], x.shape[1] * x.shape[2], *x.shape[3:])


class Queries(NamedTuple):
    """What each query sees and adds to its scores, as [b g m t s] with axes of size 1.

    Attributes:
        bias, mask: The operands of the call.
        starts, ends, segments: The range and the segment of each query.
        rows, tiles, bits: The row of each query in the block mask, and the block mask.
    """

    bias: Array | None
    mask: Array | None
    starts: Array | None
    ends: Array | None
    segments: Array | None
    rows: Any
    tiles: Any
    bits: Any

    @classmethod
    def of(cls, x: Operands) -> Queries:
        """Returns the queries of a call."""
        heads, groups = x.q.shape[2], x.k.shape[2]

        def grouped(y: Array | None) -> Array | None:
            return None if y is None else split_heads(y, heads, groups)

        def column(y: Array | None) -> Array | None:
            return None if y is None else y[:, None, None, :, None]

        return cls(
            bias=grouped(x.bias),
            mask=grouped(x.mask),
            starts=column(x.starts),
            ends=column(x.ends),
            segments=column(x.q_segments),
            rows=column(x.rows),
            tiles=grouped(x.tiles),
            bits=grouped(x.bits),
        )

    @property
    def per_query(self) -> tuple[Array | None, ...]:
        """The small arrays with one entry per query, which `scan_query_chunks` cuts."""
        return self.starts, self.ends, self.segments, self.rows

    def chunk(self, rows: Array, per_query: tuple[Array | None, ...]) -> Queries:
        """Returns the queries `rows`, given their chunk of `per_query`.

        The large arrays are sliced here, because a scan over them would copy them.
        """
        starts, ends, segments, block_mask_rows = per_query
        return self._replace(
            bias=take_rows(self.bias, rows),
            mask=take_rows(self.mask, rows),
            starts=starts,
            ends=ends,
            segments=segments,
            rows=block_mask_rows,
        )

    def visible(self, keys: Keys) -> Array | None:
        """Returns whether each query sees each key; None if every query sees every key."""
        conditions: list[Any] = []
        if keys.entry is not None:
            conditions.append(keys.position < keys.total)
        if self.starts is not None:
            conditions.append(keys.position >= self.starts)
        if self.ends is not None:
            conditions.append(keys.position < self.ends)
        if self.segments is not None:
            conditions.append(keys.segments == self.segments)
        if self.mask is not None:
            conditions.append(keys.select(self.mask))
        if self.tiles is not None:
            conditions.append(_block_mask_rows(self.rows, self.tiles, self.bits)[..., : keys.total])
        return functools.reduce(operator.and_, conditions) if conditions else None

    def visible_bias(self, keys: Keys, visible: Array | None) -> Array | None:
        """Returns the bias of visible keys, and 0 elsewhere."""
        if self.bias is None or visible is None:
            return self.bias
        return jnp.where(visible, keys.select(self.bias), 0)


@dataclasses.dataclass
class Keys:
    """The W keys that scores are computed for: all keys, or those that each head keeps.

    A key that `kv_indices` lists several times has a single entry with a count. The gradient of
    every key then has one source, so that the inverse of the gather is a gather too, not a
    scatter-add. (The CUDA kernels have no counts and keep the duplicates.)

    Attributes:
        k, v: One row per entry.
        total: S.
        position: The position of each entry in 0..S-1, or S for an entry that is no key.
        segments: The segment of each entry.
        count: How often the key is listed.
        entry: The entry of each of the S keys; W for a key that is not listed.
    """

    k: Float[Array, "B G W D"]
    v: Float[Array, "B G W D"]
    total: int
    position: Int[Array, "1|B 1|G 1 1 W"]
    segments: Int[Array, "B 1|G 1 1 W"] | None
    count: Int[Array, "B G 1 1 W"] | None = None
    entry: Int[Array, "B G 1 1 S"] | None = None

    @classmethod
    def of(cls, x: Operands) -> Keys:
        """Returns the keys of a call."""
        k, v = jnp.swapaxes(x.k, 1, 2), jnp.swapaxes(x.v, 1, 2)
        batch, groups, total, _ = k.shape
        segments = x.kv_segments
        if segments is not None:
            segments = segments[:, None, None, None]
        indices = x.kv_indices
        if indices is None:
            position = jnp.arange(total, dtype=jnp.int32).reshape(1, 1, 1, 1, total)
            return cls(k, v, total, position, segments)
        kept = indices.shape[2]
        slots = jnp.arange(kept, dtype=jnp.int32).reshape(1, 1, kept)
        head = (
            jnp.arange(batch, dtype=jnp.int32)[:, None, None],
            jnp.arange(groups, dtype=jnp.int32)[:, None],
        )
        indices = jnp.where((indices >= 0) & (indices < total), indices, total)
        count = jnp.zeros((batch, groups, total), jnp.int32).at[*head, indices].add(1, mode="drop")
        entry = jnp.full((batch, groups, total), kept, jnp.int32)
        entry = entry.at[*head, indices].min(slots, mode="drop")
        position = jnp.where(_take(entry, indices, -1) == slots, indices, total)
        count = _take(count, position, -1)
        position, count, entry = (y[:, :, None, None] for y in (position, count, entry))
        if segments is not None:
            segments = _take(segments, position, -1)
        k, v = (_take(y, position.reshape(batch, groups, kept, 1), 2) for y in (k, v))
        return cls(k, v, total, position, segments, count, entry)

    def zero_unseen(self, visible: Array | None) -> tuple[Array, Array]:
        """Returns k and v with 0 in the rows that no query sees, because 0 * NaN is NaN."""
        if visible is None:
            return self.k, self.v
        seen = visible.any((2, 3))[..., None]
        return jnp.where(seen, self.k, 0), jnp.where(seen, self.v, 0)

    def multiply_by_count(self, p: Array) -> Array:
        """Returns probabilities multiplied by how often their keys are listed."""
        return p if self.count is None else p * self.count.astype(p.dtype)

    def select(self, x: Array) -> Array:
        """Returns the columns of x [b g m t S] for the entries: [b g m t W]."""
        return x if self.entry is None else _take(x, self.position, -1)

    def scatter_scores(self, x: Array, shape: tuple[int, ...] | None = None) -> Array:
        """Returns x [b g m t W] as [b g m t S], summed over the axes that are 1 in `shape`.

        Keys that no entry has are 0.
        """
        if shape is not None:
            # Sum over heads and queries first, since the array may grow from W to S keys next.
            x = _sum_to(x, (*x.shape[:2], *shape[2:4], x.shape[4]))
        if self.entry is not None:
            x = _take(x, self.entry, -1)
        return x if shape is None else _sum_to(x, shape)

    def scatter_rows(self, x: Array) -> Array:
        """Returns gradients of the entries, [b g W d], as gradients of k or v, [b S g d]."""
        if self.entry is not None:
            x = _take(x, self.entry.reshape(*x.shape[:2], self.total, 1), 2)
        return jnp.swapaxes(x, 1, 2)


def _take(x: Array, indices: Array, axis: int) -> Array:
    """Returns x at `indices` along `axis`, and 0 where an index is past the end.

    The other axes broadcast.
    """
    if not x.shape[axis]:
        x = jnp.zeros([1 if i == axis % x.ndim else n for i, n in enumerate(x.shape)], x.dtype)
    return jnp.take_along_axis(x, indices, axis, mode="fill", fill_value=0)


def _sum_to(x: Array, shape: tuple[int, ...]) -> Array:
    """Returns x, summed over the axes that are 1 in `shape`."""
    axes = [i for i, (have, want) in enumerate(zip(x.shape, shape)) if want == 1 != have]
    return x.sum(axes, keepdims=True) if axes else x


def _block_mask_rows(rows: Array, tiles: Array, bits: Array) -> Array:
    """Returns rows of a block mask as bools [b g m t s]. All keys of the last tile are included."""
    slots, block_q, block_bytes = bits.shape[3:]
    tile = _take(tiles, rows // block_q, 3)
    # A single gather reads the bits of a row in all tiles.
    flat = bits.reshape(*bits.shape[:3], slots * block_q, block_bytes)
    bit_row = jnp.maximum(tile, 0) * block_q + rows % block_q
    length, columns = bit_row.shape[3:]
    packed = _take(flat, bit_row.reshape(*bit_row.shape[:3], length * columns, 1), 3)
    bit = jnp.arange(8, dtype=jnp.uint8).reshape(*[1] * packed.ndim, 8)
    visible = (packed[..., None] >> bit) % 2 == 1
    visible = visible.reshape(*bit_row.shape, 8 * block_bytes)
    visible = (tile == FULL)[..., None] | ((tile >= 0)[..., None] & visible)
    return visible.reshape(*bit_row.shape[:4], columns * 8 * block_bytes)
