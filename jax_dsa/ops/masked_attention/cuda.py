"""Masked attention on its CUDA kernels: their limits, and the conversion of operands for them."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_dsa.core import compat, ffi
from jax_dsa.core.rows import gather_rows, scatter_rows
from jax_dsa.core.typing import Array, Bool, Float, Int
from jax_dsa.ops.block_mask.cuda import compress
from jax_dsa.ops.block_mask.spec import Map
from jax_dsa.ops.masked_attention.sinks import without_sinks
from jax_dsa.ops.masked_attention.spec import Gradients, Operands, Options, Results

if TYPE_CHECKING:
    from collections.abc import Sequence

# The operands of the kernels. `mask` and `kv_indices` are converted in this module.
TAKES = (
    "q", "k", "v", "bias", "mask", "starts", "ends", "q_segments", "kv_segments", "kv_indices",
    "rows", "tiles", "bits", "sinks",
)  # fmt: skip

_DTYPES = (jnp.bfloat16, jnp.float16)

# The kernels' limits; tests/test_ffi.py compares them with those of the extension.
MAX_DIM = 256
DIM_MULTIPLE = 8
BLOCK_K_MULTIPLE = 128
MAX_LENGTH = 2**31 - 1 - 4096


def supports(options: Options, x: Operands) -> str | None:
    """Returns None, or the reason why the forward kernel does not cover this call."""
    del options
    (T, _, D), S, E = x.q.shape[1:], x.k.shape[1], x.v.shape[3]
    if x.q.dtype not in _DTYPES:
        return f"it takes bfloat16 or float16, got {x.q.dtype}"
    if not all(0 < dim <= MAX_DIM and dim % DIM_MULTIPLE == 0 for dim in (D, E)):
        return f"it takes multiples of {DIM_MULTIPLE} up to {MAX_DIM} for D and E, got D={D}, E={E}"
    if max(T, S) > MAX_LENGTH:
        return f"it takes T and S up to {MAX_LENGTH}, got T={T}, S={S}"
    if x.mask is not None and x.kv_indices is not None:
        return "it takes 'mask' or 'kv_indices', got both"
    if x.bits is not None and 8 * x.bits.shape[4] % BLOCK_K_MULTIPLE != 0:
        got = 8 * x.bits.shape[4]
        return f"it takes block masks whose block_k is a multiple of {BLOCK_K_MULTIPLE}, got {got}"
    return None


def bwd_supports(options: Options, x: Operands, *_: Results) -> str | None:
    """Returns None, or the reason why the backward kernel does not cover this call."""
    if options.deterministic and x.bias is not None and _scores_share_bias(x.bias, x):
        return (
            "it has no fixed order for the gradient of a bias that several scores share, which "
            "deterministic=True requires"
        )
    return supports(options, x)


def _scores_share_bias(bias: Array, x: Operands) -> bool:
    """Returns whether several scores share an entry of the bias that the kernel reads."""
    batch, queries, heads = x.q.shape[:3]
    own_batch = x.kv_indices is not None or bias.shape[0] == batch
    return not (own_batch and bias.shape[1:3] == (heads, queries) and queries > 1)


def masked_attention_fwd(options: Options, avals: Results, x: Operands) -> Results:
    """Computes `xla.masked_attention_fwd` on the kernel."""
    del avals
    if x.kv_indices is None:
        return _forward(options, x)
    groups = x.k.shape[2]
    y = _forward(options, _KeptKeys.of(x, x.kv_indices).operands)
    return Results(*(_groups_to_heads(z, groups) for z in y))


def masked_attention_bwd(
    options: Options, avals: Gradients, x: Operands, y: Results, dy: Results
) -> Gradients:
    """Computes `xla.masked_attention_bwd` on the kernels, which know no sinks."""
    y, dy, dsinks = without_sinks(x, y, dy)
    if x.kv_indices is None:
        return _backward(options, x, y, dy)._replace(sinks=dsinks)
    groups, kept = x.k.shape[2], _KeptKeys.of(x, x.kv_indices)
    y, dy = (
        Results(*(None if z is None else _groups_to_batch(z, groups) for z in given))
        for given in (y, dy)
    )
    dq, dk, dv, dbias, _ = _backward(options, kept.operands, y, dy)
    scatter = functools.partial(kept.scatter, deterministic=options.deterministic)
    dk, dv = scatter(dk, avals.k), scatter(dv, avals.v)
    if x.bias is not None and dbias is not None:
        like = jax.eval_shape(functools.partial(_bias_by_key, groups=groups), x.bias)
        total = scatter(_bias_by_key(dbias, 1), like.update(dtype=jnp.float32))
        dbias = _bias_from_keys(total, x.bias)
    return Gradients(_groups_to_heads(dq, groups), dk, dv, dbias, dsinks)


def _forward(options: Options, x: Operands) -> Results:
    """Runs the forward kernel on a call without `kv_indices`."""
    x = _mask_to_block_mask(x)
    space, _ = _workspaces(x)
    out = jax.ShapeDtypeStruct((*x.q.shape[:3], x.v.shape[3]), x.q.dtype)
    row = jax.ShapeDtypeStruct(x.q.shape[:3], jnp.float32)
    sinks = None if x.sinks is None else x.sinks.astype(jnp.float32)
    *results, _ = ffi.call(
        "jax_dsa.masked_attention_fwd.v2",
        [*_operands(x), sinks],
        [out, row, row, space],
        **_attributes(options),
    )
    return Results(*results)


def _backward(options: Options, x: Operands, y: Results, dy: Results) -> Gradients:
    """Runs the backward kernels on a call without `kv_indices`."""
    x = _mask_to_block_mask(x)
    _, space = _workspaces(x)
    operands = _operands(x)
    dq, dk, dv, dbias, _ = ffi.call(
        "jax_dsa.masked_attention_bwd.v2",
        [*operands, *y, dy.out, dy.log_sum],
        [x.q, x.k, x.v, operands[-1], space],
        **_attributes(options),
        deterministic=np.bool_(options.deterministic),
    )
    return Gradients(dq, dk, dv, None if dbias is None else dbias[..., : x.k.shape[1]], None)


def _mask_to_block_mask(x: Operands) -> Operands:
    """Returns operands without `mask`: it is combined with the block mask, if there is one."""
    if x.mask is None:
        return x
    other = None
    if x.rows is not None and x.tiles is not None and x.bits is not None:
        other = Map(x.rows, x.tiles, x.bits)
    rows, tiles, bits = compress(x.mask, x.q.shape[1], starts=x.starts, ends=x.ends, other=other)
    return x._replace(mask=None, rows=rows, tiles=tiles, bits=bits)


def _operands(x: Operands) -> Sequence[Any]:
    """Returns the operands of both passes in the order of the FFI handlers.

    The handlers require that starts and ends have the same shape, and that the rows of the bias are
    padded to a multiple of 8 keys.
    """
    shape = jnp.broadcast_shapes(*(b.shape for b in (x.starts, x.ends) if b is not None))
    starts, ends = (None if b is None else jnp.broadcast_to(b, shape) for b in (x.starts, x.ends))
    visible = starts, ends, x.q_segments, x.kv_segments
    bias = x.bias
    if bias is not None:
        bias = jnp.pad(bias, [(0, 0)] * 3 + [(0, -bias.shape[3] % 8)])
    return x.q, x.k, x.v, *visible, x.rows, x.tiles, x.bits, bias


def _attributes(options: Options) -> dict[str, Any]:
    return {"scale": np.float32(options.scale), "softcap": np.float32(options.softcap or 0)}


def _workspaces(x: Operands) -> list[jax.ShapeDtypeStruct]:
    """Returns the workspaces of the forward kernel and of the backward kernels."""
    (B, T, N, D), (S, G), E = x.q.shape, x.k.shape[1:3], x.v.shape[3]
    segmented = x.q_segments is not None
    bounded = segmented or any(b is not None for b in (x.starts, x.ends, x.rows))
    bias_batch, bias_heads, bias_queries = (0, 0, 0) if x.bias is None else x.bias.shape[:3]
    sizes = ffi.extension().masked_attention_workspaces(
        batch=B,
        queries=T,
        keys=S,
        heads=N,
        groups=G,
        dim=D,
        value_dim=E,
        bounded=bounded,
        segmented=segmented,
        bias_batch=bias_batch,
        bias_heads=bias_heads,
        bias_queries=bias_queries,
    )
    return [jax.ShapeDtypeStruct((size,), jnp.uint8) for size in sizes]


def _groups_to_batch(x: Array, groups: int) -> Array:
    """[B, T, N, ...] -> [B*G, T, N/G, ...]"""
    B, T, N, *rest = x.shape
    x = x.reshape(B, T, groups, N // groups, *rest)
    return jnp.swapaxes(x, 1, 2).reshape(B * groups, T, N // groups, *rest)


def _groups_to_heads(x: Array, groups: int) -> Array:
    """[B*G, T, N/G, ...] -> [B, T, N, ...]"""
    rows, T, M, *rest = x.shape
    x = x.reshape(rows // groups, groups, T, M, *rest)
    return jnp.swapaxes(x, 1, 2).reshape(rows // groups, T, groups * M, *rest)


def _bias_by_key(bias: Array, groups: int) -> Array:
    """[1|B, 1|G|N, 1|T, S] -> [1|B, S, G, M*T], which is the layout of k and v."""
    B, heads, T, S = bias.shape
    if heads == 1:
        bias, heads = jnp.broadcast_to(bias, (B, groups, T, S)), groups
    return jnp.moveaxis(bias.reshape(B, groups, heads // groups * T, S), 3, 1)


def _bias_from_keys(rows: Array, bias: Array) -> Array:
    """Converts a gradient in the layout of `_bias_by_key` to the shape and dtype of the bias."""
    x = jnp.moveaxis(rows, 1, 3)
    if bias.shape[1] == 1:
        x = x.sum(1, keepdims=True)
    return x.reshape(bias.shape).astype(bias.dtype)


class _KeptKeys(NamedTuple):
    """A call with `kv_indices`, converted to a call without.

    Each KV head becomes a batch entry (B*G in total) and has the keys that it keeps, in ascending
    order. A range of keys is then still a range.

    A key that is listed twice occurs twice, since the kernels have no counts. So `scatter` has to
    add, unlike `scores.Keys.scatter_rows` of the XLA implementation.

    Attributes:
        operands: The operands of the converted call.
        position: The positions of its keys in 0..S-1; S for entries that are no keys, which are
            last.
        valid: Which entries are keys.
    """

    operands: Operands
    position: Int[Array, "B 1 G W"]
    valid: Bool[Array, "B 1 G W"]

    @classmethod
    def of(cls, x: Operands, indices: Int[Array, "B G W"]) -> _KeptKeys:
        """Converts a call; `indices` are its `kv_indices`."""
        (B, T), (S, G) = x.q.shape[:2], x.k.shape[1:3]
        position = jnp.sort(jnp.where((indices >= 0) & (indices < S), indices, S))[:, None]
        valid = position < S

        def rows(y: Float[Array, "B S G D"]) -> Float[Array, "B*G W 1 D"]:
            kept = gather_rows(y, position, valid, y.dtype)
            return kept.reshape(B * G, kept.shape[3], 1, y.shape[3])

        def before(bound: Int[Array, "1|B T"]) -> Int[Array, "B*G T"]:
            """Returns the number of kept keys before the bound of each query."""
            bound = jnp.broadcast_to(jnp.minimum(bound, S)[:, None], (B, G, T))
            find = functools.partial(jnp.searchsorted, method="sort")
            count = jax.vmap(jax.vmap(find))(position[:, 0], bound)
            return count.astype(jnp.int32).reshape(B * G, T)

        bias = x.bias
        if bias is not None:
            kept = jnp.moveaxis(rows(_bias_by_key(bias, G)), 1, 3)
            bias = kept.reshape(B * G, max(bias.shape[1] // G, 1), bias.shape[2], kept.shape[3])
        q_segments, kv_segments = x.q_segments, x.kv_segments
        if q_segments is not None and kv_segments is not None:
            q_segments = jnp.repeat(q_segments, G, axis=0)
            wide = jnp.broadcast_to(kv_segments[:, :, None, None], (B, S, G, 1))
            kv_segments = rows(wide)[..., 0, 0]
        operands = x._replace(
            q=_groups_to_batch(x.q, G),
            k=rows(x.k),
            v=rows(x.v),
            bias=bias,
            starts=None if x.starts is None else before(x.starts),
            ends=before(jnp.full((1, T), S, jnp.int32) if x.ends is None else x.ends),
            q_segments=q_segments,
            kv_segments=kv_segments,
            kv_indices=None,
            sinks=None if x.sinks is None else x.sinks.reshape(B * G, -1),
        )
        return cls(operands, position, valid)

    def scatter(self, rows: Array, like: Any, *, deterministic: bool) -> Array:
        """Returns the gradient of k or v from that of the kept rows, summed for repeated keys."""
        rows = rows.astype(jnp.float32).reshape(*self.position.shape, rows.shape[3])
        total = compat.match_vary(jnp.zeros(like.shape, jnp.float32), rows)
        total = scatter_rows(total, self.position, self.valid, rows, deterministic=deterministic)
        return total.astype(like.dtype)
