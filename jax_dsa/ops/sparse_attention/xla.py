"""XLA implementation of block-sparse attention: dense attention to gathered keys and values.

Per query and head, over the keys i of its blocks that it sees:

    s_i = scale * q . k_i            m = max s_i                   l = sum_i exp(s_i - m)
    p_i = exp(s_i - m - log l)       out = gate * sum_i p_i v_i    gate = l / (l + exp(sink - m))

    ds_i = p_i * (gate * (dout . v_i - dout . out) + dlse)
    dq = scale * sum_i ds_i k_i      dk_i = scale * ds_i q         dv_i = gate * p_i dout
    dsink = -dout . out * (1 - gate)

where `dlse` is the cotangent of m + log l, and `out` is the gated output. Queries are processed in
chunks, so the gathered rows of all queries never exist at once. A key that is not seen is read as
zeros and its score as -inf. This keeps its contents, NaN included, out of every sum.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jax_dsa.core import compat
from jax_dsa.core.checks import FP8
from jax_dsa.core.rows import gather_rows, scatter_rows, scores
from jax_dsa.core.softmax import (
    grouped,
    log_of_sum,
    of_rows_with_keys,
    probabilities,
    row_products,
    sink_gate,
    sink_gradient,
    split_scale,
)
from jax_dsa.core.streaming import chunk_length, scan_chunks
from jax_dsa.core.typing import Array, Bool, Float, Int
from jax_dsa.ops.masked_attention.spec import Results
from jax_dsa.ops.sparse_attention.blocks import num_slots, selected_keys
from jax_dsa.ops.sparse_attention.spec import Gradients, Operands, Options

if TYPE_CHECKING:
    from collections.abc import Callable

    # Returns the rows of `k` that the queries' blocks consist of, and which of them the queries
    # see, both [B, T, G, K * block_size].
    Selector = Callable[[Operands], tuple[Array, Array]]


def sparse_attention_fwd(options: Options, x: Operands) -> Results:
    """Returns the output, the largest score and the logarithm of the sum."""
    keys = x.k.shape[1]
    return forward(options, x, lambda part: selected_keys(options, part, keys), keys)


def sparse_attention_bwd(options: Options, x: Operands, y: Results, dy: Results) -> Gradients:
    """Returns the gradients of q, k, v and the sinks."""
    keys = x.k.shape[1]
    return backward(options, x, y, dy, lambda part: selected_keys(options, part, keys), keys)


def forward(
    options: Options, x: Operands, select: Selector, keys: int, *, axis: int = 1
) -> Results:
    """Computes `sparse_attention_fwd` for one chunk of queries after the other.

    Args:
        options: the options.
        x: the operands.
        select: finds the rows of `k` for a chunk of `x`.
        keys: number of keys of a batch entry.
        axis: the axis of the chunks. With 0, a batch entry is one query and `k` has one batch entry
            for all of them.
    """
    held = _held(x, axis)

    def chunk(carry: tuple[()], part: Operands) -> Any:
        return carry, tuple(attend(options, part._replace(**held), select))

    size = _chunk_length(options, x, keys, axis, x.q.dtype.itemsize, 12)
    return Results(*scan_chunks(chunk, (), (_scanned(x, held),), axis=axis, chunk=size)[1])


def attend(options: Options, x: Operands, select: Selector) -> Results:
    """Computes `sparse_attention_fwd` at once; see `forward`."""
    q, dtype = grouped(x.q, x.k.shape[2]), x.q.dtype
    keys, seen = select(x)
    s = scores(options.scale, q, _gathered(x.k, x.k_scale, keys, seen, dtype), seen)
    top = jax.lax.stop_gradient(jnp.max(s, axis=-1, initial=-jnp.inf))
    p = jnp.exp(s - jnp.where(top == -jnp.inf, 0, top)[..., None])
    total = p.sum(-1)
    # XLA may drop a NaN from a maximum on a CPU, but not from a sum.
    top = jnp.where(jnp.isnan(total), jax.lax.stop_gradient(total), top)
    log_sum = log_of_sum(total)
    values = _gathered(x.v, x.v_scale, keys, seen, dtype)
    out = jnp.einsum("btgmk,btgke->btgme", p.astype(dtype), values, preferred_element_type=p.dtype)
    out = out / jnp.where(total == 0, 1, total)[..., None]
    gate = sink_gate(x.sinks, top, log_sum)
    out = out if gate is None else out * gate[..., None]
    heads = x.q.shape[:3]
    out = out.reshape(*heads, x.v.shape[3]).astype(dtype)
    return Results(out, top.reshape(heads), log_sum.reshape(heads))


def backward(
    options: Options,
    x: Operands,
    y: Results,
    dy: Results,
    select: Selector,
    keys: int,
    *,
    axis: int = 1,
) -> Gradients:
    """Computes `sparse_attention_bwd` for one chunk of queries after the other; see `forward`."""
    G = x.k.shape[2]
    acc = compat.accum_dtype(x.q.dtype)
    first, last = split_scale(options.scale, x.q.dtype)
    held = _held(x, axis)
    carry = tuple([None if a.dtype == FP8 else jnp.zeros(a.shape, acc) for a in (x.k, x.v)])

    def chunk(carry: Any, x: Operands, y: Results, dy: Results) -> Any:
        dk, dv = carry
        x = x._replace(**held)
        q, out, top, log_sum, dout, dlse = (grouped(a, G) for a in (x.q, *y, dy.out, dy.log_sum))
        dout, dlse = of_rows_with_keys(top, dout, dlse)
        keys, seen = select(x)
        rows = _gathered(x.k, x.k_scale, keys, seen, q.dtype)
        values = _gathered(x.v, x.v_scale, keys, seen, q.dtype)
        p = probabilities(scores(options.scale, q, rows, seen), top, log_sum)
        dp = jnp.einsum("btgme,btgke->btgmk", first * dout, values, preferred_element_type=acc)
        dp -= row_products(first * dout, out)[..., None]
        gate = sink_gate(x.sinks, top, log_sum)
        weighted = p if gate is None else p * gate[..., None]
        ds = ((weighted * dp + p * (first * dlse)[..., None]) * last).astype(q.dtype)
        dq = jnp.einsum("btgmk,btgkd->btgmd", ds, rows, preferred_element_type=acc)
        if dk is not None:
            drows = jnp.einsum("btgmk,btgmd->btgkd", ds, q, preferred_element_type=acc)
            dk = scatter_rows(dk, keys, seen, drows, deterministic=options.deterministic)
        if dv is not None:
            dvalues = jnp.einsum(
                "btgmk,btgme->btgke", weighted.astype(q.dtype), dout, preferred_element_type=acc
            )
            dv = scatter_rows(dv, keys, seen, dvalues, deterministic=options.deterministic)
        return (dk, dv), (dq.reshape(x.q.shape).astype(q.dtype),)

    row_copies = 6 if options.deterministic else 2
    size = _chunk_length(options, x, keys, axis, 2 * x.q.dtype.itemsize + 4 * row_copies, 24)
    carry = compat.match_vary(carry, *x, *y, *dy)
    xs = _scanned(x, held), y, dy
    (dk, dv), (dq,) = scan_chunks(chunk, carry, xs, axis=axis, chunk=size)
    return Gradients(q=dq, k=dk, v=dv, sinks=_sinks_gradient(x, y, dy, first))


def _sinks_gradient(
    x: Operands, y: Results, dy: Results, factor: float
) -> Float[Array, "B N"] | None:
    """Returns the gradient of the sinks. `factor` multiplies cotangents until they are summed."""
    if x.sinks is None:
        return None
    G = x.k.shape[2]
    out, top, log_sum, dout = (grouped(a, G) for a in (*y, dy.out))
    (dout,) = of_rows_with_keys(top, dout)
    return sink_gradient(x.sinks, top, log_sum, row_products(factor * dout, out)) / factor


def _gathered(
    kv: Float[Array, "1|B S G D"],
    scale: Float[Array, "1|B S G"] | None,
    keys: Int[Array, "B T G K*b"],
    seen: Bool[Array, "B T G K*b"],
    dtype: jnp.dtype,
) -> Float[Array, "B T G K*b D"]:
    """Returns the selected rows in `dtype`; zeros for those that are not seen. FP8 is constant."""
    rows = gather_rows(kv, keys, seen, dtype)
    if rows.dtype != FP8:
        return rows
    rows = rows.astype(compat.accum_dtype(dtype))
    if scale is not None:
        rows *= gather_rows(scale[..., None], keys, seen, dtype).astype(rows.dtype)
    return jax.lax.stop_gradient(rows.astype(dtype))


def _held(x: Operands, axis: int) -> dict[str, Any]:
    """Returns the operands, by name, that all chunks along an axis share."""
    names = ["k", "v", "k_scale", "v_scale", *(["sinks"] if axis else [])]
    return {name: getattr(x, name) for name in names}


def _scanned(x: Operands, held: dict[str, Any]) -> Any:
    """Returns the operands that are divided into chunks."""
    return x._replace(**dict.fromkeys(held))  # type: ignore[arg-type]


def _chunk_length(
    options: Options, x: Operands, keys: int, axis: int, element_bytes: int, score_bytes: int
) -> int:
    """Returns the number of queries in a chunk.

    Args:
        options: the options.
        x: the operands.
        keys: number of keys of a batch entry.
        axis: the axis of the chunks.
        element_bytes: bytes of intermediates for one element of a gathered row.
        score_bytes: bytes of intermediates for one score.
    """
    B, T, G, K = x.indices.shape
    slots = num_slots(options, K, keys)
    rows = G * (x.k.shape[3] + x.v.shape[3]) * element_bytes + x.q.shape[2] * score_bytes
    # The numbers of forced blocks are compared with those of all slots.
    per_query = slots * (options.block_size * rows + G * (slots - K))
    return chunk_length(T, B * per_query) if axis else chunk_length(B, T * per_query)
