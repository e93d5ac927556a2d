"""The backward pass of `sparse_mla` on its CUDA kernels: what surrounds them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_dsa.core import compat, ffi
from jax_dsa.core.streaming import chunk_length, scan_chunks
from jax_dsa.reference import sparse_mla as reference

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jaxtyping import Array, Bool, Float, Int

    from jax_dsa.ops.sparse_mla import Options

# As in cuda/sparse_mla: heads and slots of a tile, bytes of a tile's P and dS, how many tickets
# behind the one kind of work the other follows, and up to how many slots are put in order.
_TILE = 64
_IMAGE_BYTES = 2 * _TILE * _TILE * 2
_TICKETS_BEHIND = 264
_ORDER_SLOTS = 8192

# Bytes of the rows that a deterministic sum stores at a time: 512 queries of 2048 slots.
ROWS_BUDGET = 5 << 28


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def _workspace(q: Any, indices: Any, by_rows: bool) -> tuple[jax.ShapeDtypeStruct, ...]:
    """The kernel's counters and images, and neighbouring queries' slots in a common order."""
    B, T, N, _ = q.shape
    G, K = indices.shape[2:]
    rows, head_tiles = B * T * G, _ceil_div(N // G, _TILE)
    span = 2 if head_tiles == 1 else 1
    steps, sources = _ceil_div(rows, span), span * head_tiles
    lag = min(steps, _ceil_div(_TICKETS_BEHIND, sources + 2 * _ceil_div(sources, 2)))
    images = 2 * lag * sources * _ceil_div(K, _TILE) * _IMAGE_BYTES
    shares = span == 2 and rows > 1 and G == 1 and K <= _ORDER_SLOTS and not by_rows
    return (
        jax.ShapeDtypeStruct((16 + 8 * steps,), jnp.uint8),
        jax.ShapeDtypeStruct((images,), jnp.uint8),
        jax.ShapeDtypeStruct((rows * K + steps if shares else 0,), jnp.int32),
    )


def _kernel(
    options: Options, operands: Sequence[Any], gradient: jax.ShapeDtypeStruct, by_rows: bool
) -> tuple[Any, Any]:
    """dq, and dkv or the rows that it is the sum of."""
    q, _, indices = operands[:3]
    dq, summed, *_ = ffi.handler(
        "jax_dsa.sparse_mla_bwd.v1",
        operands,
        [jax.ShapeDtypeStruct(q.shape, q.dtype), gradient, *_workspace(q, indices, by_rows)],
        {"scale": np.float32(options.scale), "by_rows": np.bool_(by_rows)},
    )
    return dq, summed


def _in_order(dkv: Float[Array, "B S G D"]) -> Float[Array, "B S G D"]:
    """Undoes `sparse_mla_dkv_place`: the kernel keeps pairs of 16 columns as 0 4 1 5 2 6 3 7."""
    pairs = dkv.reshape(*dkv.shape[:-1], dkv.shape[-1] // 16, 4, 2, 2)
    return jnp.swapaxes(pairs, -3, -2).reshape(dkv.shape)


def _rows_by_key(
    indices: Int[Array, "B T G K"],
    valid: Bool[Array, "B T G K"],
    keys: int,
    parts: int,
    padded: int,
) -> tuple[Int[Array, "R"], Int[Array, "R"]]:
    """A stable order of all rows by key, and the keys in that order; those of no key come last.

    A slot has `parts` rows, of 128 heads each.
    """
    B, _, G, K = indices.shape
    b = jnp.arange(B, dtype=jnp.int32)[:, None, None, None]
    g = jnp.arange(G, dtype=jnp.int32)[:, None]
    nowhere = B * keys * G
    key = jnp.where(valid, (b * keys + indices) * G + g, nowhere)
    key = jnp.pad(key, [(0, 0)] * 3 + [(0, padded - K)], constant_values=nowhere)
    key = jnp.broadcast_to(key[:, :, :, None], (*key.shape[:3], parts, padded))
    # Unsigned, which XLA sorts by radix on a GPU.
    key = key.reshape(-1).astype(jnp.uint32)
    row = jnp.arange(key.size, dtype=jnp.int32)
    key, order = jax.lax.sort((key, row), num_keys=1, is_stable=True)
    return order, key


def sparse_mla_bwd(
    options: Options,
    avals: Sequence[Any],
    q: Float[Array, "B T N D"],
    kv: Float[Array, "B S G D"],
    indices: Int[Array, "B T G K"],
    ends: Int[Array, "B T"] | None,
    topk_length: Int[Array, "B T"] | None,
    sinks: Float[Array, "B N"] | None,
    out: Float[Array, "B T N E"],
    lse: Float[Array, "B T N"],
    dout: Float[Array, "B T N E"],
    dlse: Float[Array, "B T N"],
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """`reference.sparse_mla_bwd` on the kernels, which know no sinks: their gate scales `dout`."""
    B, S, G, D = kv.shape
    gate = reference.sink_gate(sinks, reference.grouped(lse, G))
    dsinks = None
    if gate is not None:
        gate = gate.reshape(lse.shape)
        dsinks = -jnp.sum((1 - gate) * reference.row_products(dout, out), axis=1)
        dout = (dout * gate[..., None]).astype(dout.dtype)
    if not options.deterministic:
        operands = q, kv, indices, ends, topk_length, dout, lse, out, dlse
        dq, dkv = _kernel(options, operands, avals[1], by_rows=False)
        return dq, _in_order(dkv), dsinks

    padded = _ceil_div(indices.shape[3], _TILE) * _TILE
    parts = _ceil_div(q.shape[2] // G, 2 * _TILE)

    def chunk(dkv: Any, q: Any, indices: Any, ends: Any, topk_length: Any, *rest: Any) -> Any:
        count = B * q.shape[1] * G * parts * padded
        operands = q, kv, indices, ends, topk_length, *rest
        aval = jax.ShapeDtypeStruct((count, D), q.dtype)
        dq, rows = _kernel(options, operands, aval, by_rows=True)
        valid = reference.valid_slots(indices, ends, topk_length, S)
        order, key = _rows_by_key(indices, valid, S, parts, padded)
        shape = jax.ShapeDtypeStruct(dkv.shape, dkv.dtype)
        target = "jax_dsa.sparse_mla_sum_rows.v1"
        (dkv,) = ffi.handler(target, (rows, order, key, dkv), [shape], {}, {3: 0})
        return dkv, (dq,)

    xs = q, indices, ends, topk_length, dout, lse, out, dlse
    dkv = compat.match_vary(jnp.zeros((B * S * G, D), jnp.float32), kv, *xs)
    per_query = B * G * parts * padded * D * 2
    size = chunk_length(q.shape[1], per_query, budget=ROWS_BUDGET)
    dkv, (dq,) = scan_chunks(chunk, dkv, xs, chunk=size)
    return dq, dkv.reshape(B, S, G, D), dsinks
