"""The pooling of blocks of tokens in plain JAX."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_dsa.core.typing import Array, Bool, Float, Int
from jax_dsa.ops.gated_pool.spec import Gradients, Operands, Options, Results


class _Blocks(NamedTuple):
    """Where the slots' blocks lie; any row where there is none."""

    last: Int[Array, "B W"]
    """The rows of their last tokens."""
    exists: Bool[Array, "B W"]
    follows: Bool[Array, "B W"]
    """Whether there is a block before it."""


def _blocks(ratio: int, starts: Int[Array, "B S"]) -> _Blocks:
    """Block i of a document that begins at row s has the slot s // ratio + i, and ends less than
    `ratio` rows behind the first row that it can end at.
    """
    length = starts.shape[1]
    slots = length // ratio
    rows = jnp.arange(length, dtype=jnp.int32)[None]
    ends = jnp.pad((rows - starts + 1) % ratio == 0, ((0, 0), (0, ratio)))
    ends = ends[:, ratio - 1 : (slots + 1) * ratio - 1].reshape(-1, slots, ratio)
    first = (jnp.arange(slots, dtype=jnp.int32) + 1)[None] * ratio - 1
    last = jnp.minimum(first + jnp.argmax(ends, axis=2).astype(jnp.int32), length - 1)
    follows = last - jnp.take_along_axis(starts, last, axis=1) + 1 >= 2 * ratio
    return _Blocks(last, ends.any(axis=2), follows)


def _contributions(
    ratio: int, last: Int[Array, "B W"] | None, x: Float[Array, "B S H D"]
) -> Float[Array, "B W C D"]:
    """What each block's key is made of: what the tokens before give it, then what its own do."""
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
    """As `_contributions`, the same for all blocks."""
    batch, ratio, halves, dim = x.shape
    return jnp.moveaxis(x, 2, 1).reshape(batch, 1, halves * ratio, dim)


class _Parts(NamedTuple):
    values: Float[Array, "B W C D"]
    shares: Float[Array, "B W C D"]
    """Their weights in the mean; 0 in a slot without a block."""


def _parts(options: Options, x: Operands, blocks: _Blocks | None) -> _Parts:
    ratio, halves = options.ratio, x.values.shape[2]
    wide = jnp.promote_types(x.values.dtype, jnp.float32)
    gather = functools.partial(_contributions, ratio, None if blocks is None else blocks.last)
    values, gates = (gather(a).astype(wide) for a in (x.values, x.gates))
    gates = gates + _bias(x.bias).astype(wide)
    count = jnp.arange(halves * ratio, dtype=jnp.int32)[None, None]
    if blocks is None:
        follows = jnp.arange(values.shape[1], dtype=jnp.int32)[None, :, None] > 0
        used = follows | (count >= (halves - 1) * ratio)
    else:
        used = blocks.follows[..., None] | (count >= (halves - 1) * ratio)
        used &= blocks.exists[..., None]
    used = used[..., None]
    values = jnp.where(used, values, 0)  # what is not used may be NaN
    return _Parts(values, jax.nn.softmax(gates, axis=2, where=used))


def gated_pool_fwd(options: Options, x: Operands) -> Results:
    """The mean of the contributions' values, weighted by the softmax of their gates."""
    blocks = None if x.starts is None else _blocks(options.ratio, x.starts)
    parts = _parts(options, x, blocks)
    return Results(jnp.sum(parts.shares * parts.values, axis=2).astype(x.values.dtype))


def gated_pool_bwd(options: Options, x: Operands, dy: Results) -> Gradients:
    """The gradients, of the contributions found again."""
    blocks = None if x.starts is None else _blocks(options.ratio, x.starts)
    values, shares = _parts(options, x, blocks)
    dkeys = dy.keys.astype(values.dtype)[:, :, None]
    if blocks is not None:
        dkeys = jnp.where(blocks.exists[..., None, None], dkeys, 0)
    mean = jnp.sum(shares * values, axis=2, keepdims=True)
    dvalues = shares * dkeys
    dgates = dvalues * (values - mean)
    gather = functools.partial(
        _contributions, options.ratio, None if blocks is None else blocks.last
    )
    spread = jax.vjp(gather, x.values.astype(values.dtype))[1]
    dbias = jax.vjp(_bias, x.bias.astype(values.dtype))[1]
    return Gradients(
        values=spread(dvalues)[0].astype(x.values.dtype),
        gates=spread(dgates)[0].astype(x.gates.dtype),
        bias=dbias(jnp.sum(dgates, axis=1, keepdims=True))[0].astype(x.bias.dtype),
    )
