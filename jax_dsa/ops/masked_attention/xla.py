"""Masked attention in plain JAX: the XLA implementation, and what the kernels are checked against.

The query axis is walked in chunks, so that one chunk's scores [B, N, chunk, S] fit the streaming
budget. Bias and masks are read a chunk at a time in their own broadcast shape, and dbias is summed
to that shape in place. Inside, everything lies as [b, g, m, t, s], the N query heads being G
groups of M, with axes of 1 where an operand broadcasts.
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
from jax_dsa.ops.masked_attention.spec import (
    LSE,
    Gradients,
    Operands,
    Options,
    Probabilities,
    Results,
)

if TYPE_CHECKING:
    from collections.abc import Callable


def _weights(scores: Array, base: Array) -> Array:
    """exp(scores - base), at most 1, though huge scores are rounded by more than an exponent has
    range.
    """
    x = scores - base
    return jnp.exp(jnp.where(x > 0, 0, x))  # minimum would halve the gradient at 0


def masked_attention_fwd(options: Options, x: Operands) -> Results:
    """Output and log-sum-exp."""
    keys, queries = _Keys.of(x), _Queries.of(x)

    def body(
        _: tuple[()], numbers: Array, q: Array, *each: Any
    ) -> tuple[tuple[()], tuple[Any, ...]]:
        chunk = queries.at(numbers, each)
        visible = chunk.visible(keys)
        k, v = keys.seen(visible)
        scores = _scores(options, q, k, chunk.bias_on(keys, visible))
        if visible is not None:
            scores = jnp.where(visible, scores, -jnp.inf)
        peak = jax.lax.stop_gradient(scores.max(-1, keepdims=True, initial=-jnp.inf))
        peak = jnp.where(peak == -jnp.inf, 0, peak)
        p = keys.weigh(_weights(scores, peak))
        total = p.sum(-1, keepdims=True)
        dead = total == 0
        total = jnp.where(dead, 1, total)
        out = _dot("bgmts,bgsd->bgmtd", p.astype(v.dtype), v) / total
        lse = jnp.where(dead, -jnp.inf, peak + jnp.log(total))
        return (), (out.astype(q.dtype), lse)

    _, (out, lse) = _walk(body, (), (x.q,), queries, keys, copies=3)
    return Results(_rows(out), _rows(lse)[..., 0])


def masked_attention_bwd(options: Options, x: Operands, y: Results, dy: Results) -> Gradients:
    """Gradients of q, k, v and bias.

    With x the scaled and biased scores, s = cap * tanh(x / cap) and P = exp(s - lse):
    delta = sum(out * dout) - dlse, dS = P * (dout V^T - delta), dX = dS * (1 - (s / cap)^2),
    dV = P^T dout, dQ = scale * dX K, dK = scale * dX^T Q, dbias = dX summed to bias's shape.
    """
    acc = compat.accum_dtype(x.q.dtype)
    keys, queries = _Keys.of(x), _Queries.of(x)
    delta = (y.out.astype(acc) * dy.out.astype(acc)).sum(-1) - dy.lse

    def body(
        carry: Any, numbers: Array, q: Array, dout: Array, lse: Array, delta: Array, *each: Any
    ) -> tuple[Any, tuple[Array]]:
        chunk = queries.at(numbers, each)
        alive = lse != -jnp.inf
        visible = chunk.visible(keys)
        k, v = keys.seen(visible)
        visible = alive if visible is None else alive & visible
        # Whatever a fully masked query holds must not reach a key: 0 * NaN is NaN.
        q, dout = jnp.where(alive, q, 0), jnp.where(alive, dout, 0)
        scores = _scores(options, q, k, chunk.bias_on(keys, visible))
        p = _weights(scores, jnp.where(alive, lse, 0))
        p = keys.weigh(jnp.where(visible, p, 0))
        dx = p * (_dot("bgmtd,bgsd->bgmts", dout, v) - delta)
        if options.softcap is not None:
            dx *= 1 - (scores / options.softcap) ** 2
        dx = jnp.where(visible, dx, 0)
        dx_low = dx.astype(q.dtype)
        dq = options.scale * _dot("bgmts,bgsd->bgmtd", dx_low, k)
        dk, dv, dbias = carry
        dk += _dot("bgmts,bgmtd->bgsd", dx_low, q)
        dv += _dot("bgmts,bgmtd->bgsd", p.astype(v.dtype), dout)
        if chunk.bias is not None:
            part = keys.put(dx, chunk.bias.shape)
            dbias = dbias + part if dbias.shape[3] == 1 else _put_rows(dbias, numbers, part)
        return (dk, dv, dbias), (dq.astype(q.dtype),)

    bias, dbias = queries.bias, None
    if bias is not None:  # one that all queries share sums over chunks
        dbias = jnp.zeros(bias.shape, acc if bias.shape[3] == 1 else bias.dtype)
    carry = jnp.zeros(keys.k.shape, acc), jnp.zeros(keys.v.shape, acc), dbias
    carry = compat.match_vary(carry, *x, *y, *dy)
    xs = (x.q, dy.out, y.lse[..., None], delta[..., None])
    (dk, dv, dbias), (dq,) = _walk(body, carry, xs, queries, keys, copies=5)
    dk, dv = keys.spread(options.scale * dk), keys.spread(dv)
    if x.bias is not None:
        dbias = dbias.reshape(x.bias.shape).astype(x.bias.dtype)
    return Gradients(_rows(dq), dk.astype(x.k.dtype), dv.astype(x.v.dtype), dbias)


def masked_attention_probs(options: Options, x: Operands, y: LSE) -> Probabilities:
    """Attention probabilities over all S keys. Not memory-bounded."""
    keys, queries = _Keys.of(x), _Queries.of(x)

    def body(
        _: tuple[()], numbers: Array, q: Array, lse: Array, *each: Any
    ) -> tuple[tuple[()], tuple[Array]]:
        chunk = queries.at(numbers, each)
        visible = chunk.visible(keys)
        k = keys.seen(visible)[0]
        scores = _scores(options, q, k, chunk.bias_on(keys, visible))
        alive = lse != -jnp.inf
        visible = alive if visible is None else alive & visible
        p = jnp.where(visible, _weights(scores, jnp.where(alive, lse, 0)), 0)
        return (), (keys.put(keys.weigh(p)),)

    _, (probs,) = _walk(body, (), (x.q, y.lse[..., None]), queries, keys, copies=3)
    return Probabilities(_merged(probs))


def _walk(
    body: Callable[..., Any],
    carry: Any,
    xs: tuple[Array, ...],
    queries: _Queries,
    keys: _Keys,
    *,
    copies: int,
) -> Any:
    """`body` over chunks of queries: of their numbers, of `xs` [B, T, N, ...], and `queries.each`.

    A chunk is as long as `copies` arrays of its scores fit the budget.
    """
    batch, length, heads = xs[0].shape[:3]
    groups, kept = keys.k.shape[1:3]
    size = jnp.dtype(compat.accum_dtype(xs[0].dtype)).itemsize
    chunk = streaming.chunk_length(length, copies * size * batch * heads * kept)
    numbers = jnp.arange(length, dtype=jnp.int32).reshape(1, 1, 1, length, 1)
    grouped = (_grouped(jnp.swapaxes(x, 1, 2), heads, groups) for x in xs)
    return streaming.scan_chunks(
        body, carry, (numbers, *grouped, *queries.each), axis=3, chunk=chunk
    )


def _take_rows(x: Array | None, numbers: Array) -> Array | None:
    """The consecutive rows `numbers` of x [b g m t s]; all of it where queries share it."""
    if x is None or x.shape[3] == 1:
        return x
    return jax.lax.dynamic_slice_in_dim(
        x, jnp.min(numbers, initial=x.shape[3]), numbers.shape[3], 3
    )


def _put_rows(x: Array, numbers: Array, part: Array) -> Array:
    start = jnp.min(numbers, initial=x.shape[3])
    return jax.lax.dynamic_update_slice_in_dim(x, part.astype(x.dtype), start, 3)


def _scores(options: Options, q: Array, k: Array, bias: Array | None) -> Array:
    """Scaled, biased and capped q.k, not yet masked."""
    x = options.scale * _dot("bgmtd,bgsd->bgmts", q, k)
    if bias is not None:
        x += bias.astype(x.dtype)
    return x if options.softcap is None else options.softcap * jnp.tanh(x / options.softcap)


def _dot(equation: str, a: Array, b: Array) -> Array:
    return jnp.einsum(equation, a, b, preferred_element_type=compat.accum_dtype(a.dtype))


def _grouped(x: Array, heads: int, groups: int) -> Array:
    """[b h t s] -> [b g m t s], with h one of N, G and 1."""
    split = (groups, heads // groups) if x.shape[1] == heads else (x.shape[1], 1)
    return x.reshape(x.shape[0], *split, *x.shape[2:])


def _merged(x: Array) -> Array:
    """[b g m t s] -> [b n t s]"""
    return x.reshape(x.shape[0], x.shape[1] * x.shape[2], *x.shape[3:])


def _rows(x: Array) -> Array:
    """[b g m t d] -> [b t n d]"""
    return jnp.swapaxes(_merged(x), 1, 2)


class _Queries(NamedTuple):
    """What each query sees and adds to its scores, as [b g m t s] with axes of 1."""

    bias: Array | None
    mask: Array | None
    starts: Array | None
    ends: Array | None
    segments: Array | None
    rows: Any
    tiles: Any
    bits: Any

    @classmethod
    def of(cls, given: Operands) -> _Queries:
        heads, groups = given.q.shape[2], given.k.shape[2]
        wide = (None if x is None else _grouped(x, heads, groups) for x in (given.bias, given.mask))
        each = (given.starts, given.ends, given.q_segments, given.rows)
        columns = (None if x is None else x[:, None, None, :, None] for x in each)
        blocks = (
            None if x is None else _grouped(x, heads, groups) for x in (given.tiles, given.bits)
        )
        return cls(*wide, *columns, *blocks)

    @property
    def each(self) -> tuple[Array | None, ...]:
        """The small arrays with something for each query, which are walked in chunks."""
        return self.starts, self.ends, self.segments, self.rows

    def at(self, numbers: Array, each: tuple[Array | None, ...]) -> _Queries:
        """The queries `numbers`, whose `each` is cut already: the large arrays are not copied."""
        starts, ends, segments, rows = each
        return self._replace(
            bias=_take_rows(self.bias, numbers),
            mask=_take_rows(self.mask, numbers),
            starts=starts,
            ends=ends,
            segments=segments,
            rows=rows,
        )

    def visible(self, keys: _Keys) -> Array | None:
        """Whether a query sees a key; None if every one sees every one."""
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
            conditions.append(_block_rows(self.rows, self.tiles, self.bits)[..., : keys.total])
        return functools.reduce(operator.and_, conditions) if conditions else None

    def bias_on(self, keys: _Keys, visible: Array | None) -> Array | None:
        """The bias on visible keys, 0 elsewhere."""
        if self.bias is None or visible is None:
            return self.bias
        return jnp.where(visible, keys.select(self.bias), 0)


@dataclasses.dataclass
class _Keys:
    """What the queries are compared with: all keys, or for each head the ones that it keeps.

    Attributes:
        k, v: a row for each of W keys.
        position: where the key lies in 0..total-1; total marks an entry that is no key.
        segments: the key's segment.
        count: how often the key was listed, in its first entry. The others are no keys: so every
            key has one entry, and `put` reads where it would have to add.
        entry: for each of the `total` keys its entry, W if it was not listed.
    """

    k: Float[Array, "B G W D"]
    v: Float[Array, "B G W D"]
    total: int
    position: Int[Array, "1|B 1|G 1 1 W"]
    segments: Int[Array, "B 1|G 1 1 W"] | None
    count: Int[Array, "B G 1 1 W"] | None = None
    entry: Int[Array, "B G 1 1 S"] | None = None

    @classmethod
    def of(cls, given: Operands) -> _Keys:
        k, v = jnp.swapaxes(given.k, 1, 2), jnp.swapaxes(given.v, 1, 2)
        batch, groups, total, _ = k.shape
        segments = given.kv_segments
        if segments is not None:
            segments = segments[:, None, None, None]
        indices = given.kv_indices
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
        position, count, entry = (x[:, :, None, None] for x in (position, count, entry))
        if segments is not None:
            segments = _take(segments, position, -1)
        k, v = (_take(x, position.reshape(batch, groups, kept, 1), 2) for x in (k, v))
        return cls(k, v, total, position, segments, count, entry)

    def seen(self, visible: Array | None) -> tuple[Array, Array]:
        """k and v, with 0 in the rows that no query sees: 0 * NaN is NaN."""
        if visible is None:
            return self.k, self.v
        seen = visible.any((2, 3))[..., None]
        return jnp.where(seen, self.k, 0), jnp.where(seen, self.v, 0)

    def weigh(self, p: Array) -> Array:
        """Probabilities, times how often their keys were listed."""
        return p if self.count is None else p * self.count.astype(p.dtype)

    def select(self, x: Array) -> Array:
        """x [b g m t S] at the keys: [b g m t W]."""
        return x if self.entry is None else _take(x, self.position, -1)

    def put(self, x: Array, shape: tuple[int, ...] | None = None) -> Array:
        """x [b g m t W] in its place in [b g m t S], summed over the axes that are 1 in `shape`."""
        if shape is not None:  # before it grows: heads and queries of a group share their keys
            x = _sum_to(x, (*x.shape[:2], *shape[2:4], x.shape[4]))
        if self.entry is not None:
            x = _take(x, self.entry, -1)
        return x if shape is None else _sum_to(x, shape)

    def spread(self, x: Array) -> Array:
        """Gradients of the rows of k or v, in the shape of k and v."""
        if self.entry is not None:
            x = _take(x, self.entry.reshape(*x.shape[:2], self.total, 1), 2)
        return jnp.swapaxes(x, 1, 2)


def _take(x: Array, indices: Array, axis: int) -> Array:
    """x at `indices` along `axis`, other axes broadcast; 0 where an index is past the end."""
    if not x.shape[axis]:
        x = jnp.zeros([1 if i == axis % x.ndim else n for i, n in enumerate(x.shape)], x.dtype)
    return jnp.take_along_axis(x, indices, axis, mode="fill", fill_value=0)


def _sum_to(x: Array, shape: tuple[int, ...]) -> Array:
    """x, summed over the axes that are 1 in `shape`."""
    axes = [i for i, (have, want) in enumerate(zip(x.shape, shape)) if want == 1 != have]
    return x.sum(axes, keepdims=True) if axes else x


def _block_rows(rows: Array, tiles: Array, bits: Array) -> Array:
    """Rows of a block mask: which keys (the last tile's all) are visible, [b g m t s]."""
    slots, block_q, block_bytes = bits.shape[3:]
    tile = _take(tiles, rows // block_q, 3)
    # One gather for the rows of all tiles of a row of tiles.
    flat = bits.reshape(*bits.shape[:3], slots * block_q, block_bytes)
    line = jnp.maximum(tile, 0) * block_q + rows % block_q
    length, columns = line.shape[3:]
    lines = _take(flat, line.reshape(*line.shape[:3], length * columns, 1), 3)
    bit = jnp.arange(8, dtype=jnp.uint8).reshape(*[1] * lines.ndim, 8)
    kept = (lines[..., None] >> bit) % 2 == 1
    kept = kept.reshape(*line.shape, 8 * block_bytes)
    kept = (tile == FULL)[..., None] | ((tile >= 0)[..., None] & kept)
    return kept.reshape(*line.shape[:4], columns * 8 * block_bytes)
