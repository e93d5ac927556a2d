"""Pooling in plain JAX."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_dsa.core import compat
from jax_dsa.core.typing import Array, Bool, Float, Int
from jax_dsa.ops.gated_pool.spec import Gradients, Operands, Options, Results


class _Blocks(NamedTuple):
    """The block of each slot. A slot without a block has arbitrary rows.

    Attributes:
        last: Row of the block's last token.
        exists: Whether the slot has a block.
        has_previous: Whether the document has a block before this one.
    """

    last: Int[Array, "B W"]
    exists: Bool[Array, "B W"]
    has_previous: Bool[Array, "B W"]


def _blocks(ratio: int, starts: Int[Array, "B S"]) -> _Blocks:
    """Finds the block of each slot.

    Block i of a document that begins at row s has the slot w = s // ratio + i. Its last row is one
    of the `ratio` rows from (w + 1) * ratio - 1 on.
    """
    batch, length = starts.shape
    slots = length // ratio
    rows = jnp.arange(length, dtype=jnp.int32)[None]
    ends = jnp.pad((rows - starts + 1) % ratio == 0, ((0, 0), (0, ratio)))
    ends = ends[:, ratio - 1 : (slots + 1) * ratio - 1].reshape(batch, slots, ratio)
    first = (jnp.arange(slots, dtype=jnp.int32) + 1)[None] * ratio - 1
    last = jnp.minimum(first + jnp.argmax(ends, axis=2).astype(jnp.int32), length - 1)
    has_previous = last - jnp.take_along_axis(starts, last, axis=1) + 1 >= 2 * ratio
    return _Blocks(last, ends.any(axis=2), has_previous)


def _contributions(
    ratio: int, last: Int[Array, "B W"] | None, x: Float[Array, "B S H D"]
) -> Float[Array, "B W C D"]:
    """Returns each key's contributions: those of the previous block, then those of its own."""
    batch, length, halves, dim = x.shape
    slots = length // ratio
    if last is not None:
        offsets = jnp.arange(1 - halves * ratio, 1, dtype=jnp.int32)
        rows = jnp.maximum(last[..., None] + offsets[None, None], 0)
        half = (offsets > -ratio).astype(jnp.int32) * (halves - 1)
        return jax.vmap(lambda x, rows: x[rows, half[None]])(x, rows)
    x = x[:, : slots * ratio].reshape(batch, slots, ratio, halves, dim)
    if halves == 1:
        return x[:, :, :, 0]
    before = jnp.pad(x[:, :, :, 0], ((0, 0), (1, 0), (0, 0), (0, 0)))[:, :-1]
    return jnp.concatenate([before, x[:, :, :, 1]], axis=2)


def _bias(x: Float[Array, "B R H D"]) -> Float[Array, "B 1 C D"]:
    """Arranges the bias as `_contributions` does. It is the same for all blocks."""
    batch, ratio, halves, dim = x.shape
    return jnp.moveaxis(x, 2, 1).reshape(batch, 1, halves * ratio, dim)


class _Weighted(NamedTuple):
    """The contributions to each key, and their weights.

    Attributes:
        values: The contributions.
        weights: Weights of the values in the mean; 0 in a slot without a block.
    """

    values: Float[Array, "B W C D"]
    weights: Float[Array, "B W C D"]


def _weighted(options: Options, x: Operands, blocks: _Blocks | None) -> _Weighted:
    """Gathers the contributions to each key and computes their weights."""
    assert x.gates is not None and x.bias is not None
    ratio, halves = options.ratio, x.values.shape[2]
    wide = jnp.promote_types(x.values.dtype, jnp.float32)
    gather = functools.partial(_contributions, ratio, None if blocks is None else blocks.last)
    values, gates = (gather(a).astype(wide) for a in (x.values, x.gates))
    gates = gates + _bias(x.bias).astype(wide)
    position = jnp.arange(halves * ratio, dtype=jnp.int32)[None, None]
    if blocks is None:
        has_previous = jnp.arange(values.shape[1], dtype=jnp.int32)[None, :, None] > 0
        used = has_previous | (position >= (halves - 1) * ratio)
    else:
        used = blocks.has_previous[..., None] | (position >= (halves - 1) * ratio)
        used &= blocks.exists[..., None]
    used = used[..., None]
    values = jnp.where(used, values, 0)  # unused values may be NaN
    return _Weighted(values, jax.nn.softmax(gates, axis=2, where=used))


def _mean(ratio: int, x: Float[Array, "B S 1 D"], blocks: _Blocks | None) -> Float[Array, "B W D"]:
    """Returns the mean of each block's values, which are added in the order of the tokens."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    values = _contributions(ratio, None if blocks is None else blocks.last, wide)
    total = functools.reduce(jnp.add, (values[:, :, i] for i in range(ratio)))
    if blocks is not None:
        total = jnp.where(blocks.exists[..., None], total, 0)
    return (total * (1 / ratio)).astype(x.dtype)


def gated_pool_fwd(options: Options, x: Operands) -> Results:
    """Returns the mean of each key's contributions, weighted by the softmax of their gates."""
    blocks = None if x.starts is None else _blocks(options.ratio, x.starts)
    if x.gates is None:
        return Results(_mean(options.ratio, x.values, blocks), None)
    values, weights = _weighted(options, x, blocks)
    keys = jnp.sum(weights * values, axis=2)
    squares = None
    if x.scale is not None:
        squares = jnp.sum(keys * keys, axis=2)
        keys = keys * x.scale[:, None]
    return Results(keys.astype(x.values.dtype), squares)


def gated_pool_bwd(options: Options, x: Operands, dy: Results) -> Gradients:
    """Returns the gradients. Gathers the contributions and computes their weights again."""
    blocks = None if x.starts is None else _blocks(options.ratio, x.starts)
    if x.gates is None:
        pull = jax.vjp(functools.partial(_mean, options.ratio, blocks=blocks), x.values)[1]
        return Gradients(pull(dy.keys)[0], None, None, None)
    assert x.bias is not None
    values, weights = _weighted(options, x, blocks)
    dkeys = dy.keys.astype(values.dtype)
    if blocks is not None:
        dkeys = jnp.where(blocks.exists[..., None], dkeys, 0)
    mean = jnp.sum(weights * values, axis=2)
    dscale = None
    if x.scale is not None:
        assert dy.squares is not None
        dscale = jnp.sum(dkeys * mean, axis=1).astype(x.scale.dtype)
        dkeys = dkeys * x.scale[:, None] + 2 * mean * dy.squares[..., None]
    dvalues = weights * dkeys[:, :, None]
    dgates = dvalues * (values - mean[:, :, None])
    # The gradients of a key's gates add up to zero. The largest weight may be so close to 1 that
    # the difference of its value and the mean has no correct digit. The other gradients have.
    position = jnp.arange(weights.shape[2], dtype=jnp.int32)[None, None, :, None]
    is_largest = jnp.argmax(weights, axis=2, keepdims=True).astype(jnp.int32) == position
    others = jnp.where(is_largest, 0, dgates)
    dgates = jnp.where(is_largest, -jnp.sum(others, axis=2, keepdims=True), others)
    gather = functools.partial(
        _contributions, options.ratio, None if blocks is None else blocks.last
    )
    scatter = jax.vjp(gather, x.values.astype(values.dtype))[1]
    # For arrays without elements, jnp.where returns a constant, which varies over no mesh axis.
    dgates = compat.match_vary(dgates, x.values)
    dbias = jax.vjp(_bias, x.bias.astype(values.dtype))[1]
    return Gradients(
        values=scatter(dvalues)[0].astype(x.values.dtype),
        gates=scatter(dgates)[0].astype(x.gates.dtype),
        bias=dbias(jnp.sum(dgates, axis=1, keepdims=True))[0].astype(x.bias.dtype),
        scale=dscale,
    )
