"""The lightning indexer, streamed over queries.

    x[t,j,s] = q[t,j] . k[s]        I[t,s] = k_scale[s] * sum_j w[t,j] * relu(x[t,j,s])

With g = dL/dI and the gates a[t,j,s] = g[t,s] * [x > 0], all gradients follow from two products,

    h[t,j] = sum_s  a[t,j,s] * k_scale[s] * k[s]        f[s] = sum_tj a[t,j,s] * w[t,j] * q[t,j]

    dq[t,j] = w[t,j] * h[t,j]                           dk[s]       = k_scale[s] * f[s]
    dw[t,j] = q[t,j] . h[t,j]                           dk_scale[s] = k[s] . f[s]

since relu(x) = [x > 0] * x is linear in q and in k once the gates are fixed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jax_dsa.core import compat
from jax_dsa.core.layout import physical_rows
from jax_dsa.core.rows import scatter_rows, some_row
from jax_dsa.core.streaming import chunk_length, scan_chunks
from jax_dsa.core.typing import Array, Bool, Float
from jax_dsa.ops.indexer.spec import Gradients, Logits, Operands, Options, Selected, Selection
from jax_dsa.ops.topk.xla import BYTES_PER_POSITION, select, values_at, visible

if TYPE_CHECKING:
    from collections.abc import Callable

# Four times a score's own four bytes, for its gate and temporaries of both.
_BYTES_PER_SCORE = 16


def stream_queries(
    body: Callable[..., tuple[Any, tuple[Any, ...]]],
    carry: tuple[Array, ...],
    keys: tuple[Array | None, ...],
    queries: tuple[Array | None, ...],
    bytes_per_query: int,
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Runs `carry, ys = body(carry, keys, *queries)` over chunks of queries and of batch entries.

    Args:
        body: takes the carry and `keys` of some batch entries, and a chunk of their queries'
            arrays.
        carry: arrays [B, ...] that accumulate over the queries.
        keys: arrays [B, ...] that every query of a batch entry sees, or None.
        queries: arrays [B, T, ...].
        bytes_per_query: what one query needs in temporaries.

    Returns:
        The carry after the last chunk, and the results ys [B, T, ...].
    """
    batch, total = next(x.shape[:2] for x in queries if x is not None)
    # Many queries of few batch entries a chunk, rather than the other way round: that reads the
    # keys less often.
    entries = chunk_length(batch, total * bytes_per_query)
    if not isinstance(entries, int):  # a formula in the formula below would be slow to export
        entries = 1
    chunk = chunk_length(total, entries * bytes_per_query)
    n, m = len(carry), len(carry) + len(keys)

    def some_entries(_: tuple[()], *arrays: Any) -> tuple[tuple[()], tuple[Any, ...]]:
        first, own, queries = arrays[:n], arrays[n:m], arrays[m:]
        first = compat.match_vary(first, *arrays)
        last, ys = scan_chunks(lambda c, *x: body(c, own, *x), first, queries, chunk=chunk)
        return (), (*last, *ys)

    _, outs = scan_chunks(some_entries, (), (*carry, *keys, *queries), axis=0, chunk=entries)
    return outs[:n], outs[n:]


def score_bytes(heads: int, size: int) -> int:
    """The temporaries of one query's scores, gates and logits."""
    return (heads + 1) * size * _BYTES_PER_SCORE


def scores(q: Array, k: Array) -> Float[Array, "B T J S"]:
    """q . k for every head, before the relu."""
    # bfloat16 holds every FP8 value, and every device multiplies it.
    dtype = jnp.bfloat16 if q.dtype.itemsize == 1 else q.dtype
    return jnp.einsum(
        "btjc,bsc->btjs",
        q.astype(dtype),
        k.astype(dtype),
        preferred_element_type=compat.accum_dtype(dtype),
    )


def combine(
    options: Options,
    x: Float[Array, "B T J S"],
    weights: Float[Array, "B T J"],
    k_scale: Float[Array, "B S"] | None,
    mask: Bool[Array, "B T S"],
) -> Float[Array, "B T S"]:
    """The logits of the scores `x`, -inf where `mask` is false."""
    x = jax.nn.relu(x) if options.relu else x
    logits = jnp.sum(x * weights.astype(x.dtype)[..., None], axis=2)
    if k_scale is not None:
        logits = logits * k_scale.astype(x.dtype)[:, None]
    return jnp.where(mask, logits, -jnp.inf)


def gradients(
    options: Options,
    x: Float[Array, "B T J S"],
    q: Float[Array, "B T J C"],
    k: Float[Array, "B S C"],
    weights: Float[Array, "B T J"],
    k_scale: Float[Array, "B S"] | None,
    g: Float[Array, "B T S"],
) -> tuple[Float[Array, "B S C"], Float[Array, "B T J C"], Float[Array, "B T J"]]:
    """f, dq, dw of the file's head comment, for g that is 0 wherever a key is not used."""
    gates = g.astype(x.dtype)[:, :, None]
    gates = jnp.where(x > 0, gates, 0) if options.relu else jnp.broadcast_to(gates, x.shape)
    q, k, weights = q.astype(x.dtype), k.astype(x.dtype), weights.astype(x.dtype)
    # Whatever a query without gradients holds must not reach a key: 0 * NaN is NaN.
    live = (g != 0).any(-1)[..., None]
    q, weights = jnp.where(live[..., None], q, 0), jnp.where(live, weights, 0)
    if k_scale is not None:
        k = k * k_scale.astype(x.dtype)[..., None]
    h = jnp.einsum("btjs,bsc->btjc", gates, _finite(k))
    f = jnp.einsum("btjs,btjc->bsc", gates, q * weights[..., None])
    return f, h * weights[..., None], jnp.sum(q * h, axis=-1)


def key_gradients(
    f: Float[Array, "B S C"], k: Float[Array, "B S C"], k_scale: Float[Array, "B S"] | None
) -> tuple[Float[Array, "B S C"], Float[Array, "B S"] | None]:
    """dk and dk_scale from f."""
    if k_scale is None:
        return f, None
    k, k_scale = k.astype(f.dtype), k_scale.astype(f.dtype)
    return f * _finite(k_scale)[..., None], jnp.sum(_finite(k) * f, axis=-1)


def _finite(k: Array) -> Array:
    """Zeros for NaN and Inf: what no query uses of a key is multiplied by 0, which must stay 0.

    Where a query does use one, its logit, and with that its g, is not finite either.
    """
    return jnp.where(jnp.isfinite(k), k, 0)


def indexer_logits_fwd(options: Options, x: Operands) -> Logits:
    """Logits of all keys."""
    queries = x.q, x.weights, x.starts, x.ends
    size = x.k.shape[1]
    return Logits(*_stream_logits(options, queries, (x.k, x.k_scale), size, lambda y: (y,)))


def indexer_topk_fwd(options: Options, x: Operands) -> Selection:
    """The keys of the largest logits, and these.

    With a page table k and k_scale have a pool's axis in place of S, and perhaps a batch axis of 1.
    """

    def selected(logits: Array) -> tuple[Array, Array]:
        batch, queries, size = logits.shape
        indices = select(logits.reshape(batch * queries, size), options.top_k)
        indices = indices.reshape(batch, queries, options.top_k)
        return indices, values_at(logits, indices)

    k, k_scale, page_table = x.k, x.k_scale, x.page_table
    queries = x.q, x.weights, x.starts, x.ends
    if page_table is None:
        return Selection(*_stream_logits(options, queries, (k, k_scale), k.shape[1], selected))
    assert options.page_size is not None
    batch, pages = page_table.shape
    size, pool = pages * options.page_size, k.shape[1]
    positions = jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32), (batch, size))
    rows = physical_rows(pool // options.page_size, options.page_size, page_table, positions)
    entry = jnp.arange(batch if k.shape[0] == batch else 1, dtype=jnp.int32)[:, None]
    entry = jnp.broadcast_to(entry, (batch, 1))

    def gathered(entry: Array, rows: Array) -> Any:
        where = entry, jnp.where(rows < 0, pool, rows)
        own = (
            None if x is None else some_row(x).at[where].get(mode="fill", fill_value=0)
            for x in (k, k_scale)
        )
        return *own, rows >= 0

    return Selection(*_stream_logits(options, queries, (entry, rows), size, selected, gathered))


def _stream_logits(
    options: Options,
    queries: tuple[Array, ...],
    keys: tuple[Array | None, ...],
    size: int,
    finish: Callable[[Array], tuple[Array, ...]],
    load: Callable[..., Any] = lambda k, k_scale: (k, k_scale, None),
) -> Any:
    """What `finish` makes of the logits, given those of many queries at a time.

    The chunks of queries that it gets are larger than those whose scores fit the budget, since
    selecting takes some forty steps however few the rows are. `load` makes of `keys` the indexer's
    keys, their scales, and which of them are there.
    """

    def few(_: tuple[()], keys: Any, q: Array, weights: Array, starts: Array, ends: Array) -> Any:
        k, k_scale, there = load(*keys)
        mask = visible(starts, ends, size)
        mask = mask if there is None else mask & there[:, None]
        return (), (combine(options, scores(q, k), weights, k_scale, mask),)

    scores_cost = score_bytes(queries[0].shape[2], size)
    # With symbolic sizes both chunks are the same one, for the same reason as above.
    nested = all(isinstance(n, int) for n in (size, *queries[0].shape))

    def many(_: tuple[()], keys: Any, *queries: Array) -> Any:
        if nested:
            _, (logits,) = stream_queries(few, (), keys, queries, scores_cost)
        else:
            _, (logits,) = few((), keys, *queries)
        # Behind the barrier the logits are computed alike, bit for bit, whatever `finish` does.
        return (), finish(jax.lax.optimization_barrier(logits))

    cost = size * BYTES_PER_POSITION + (0 if nested else scores_cost)
    return stream_queries(many, (), keys, queries, cost)[1]


def indexer_logits_bwd(options: Options, x: Operands, dy: Logits) -> Gradients:
    """Gradients of the inputs, from that of all logits."""
    size = x.k.shape[1]

    def body(
        carry: Any, keys: Any, q: Array, weights: Array, starts: Array, ends: Array, g: Array
    ) -> Any:
        (f,), (k, k_scale) = carry, keys
        g = jnp.where(visible(starts, ends, size), g, 0)
        df, dq, dw = gradients(options, scores(q, k), q, k, weights, k_scale, g)
        return (f + df,), (compat.saturated(dq, q.dtype), dw.astype(weights.dtype))

    queries = x.q, x.weights, x.starts, x.ends, dy.logits
    return _stream_gradients(body, x.k, x.k_scale, queries, score_bytes(x.q.shape[2], size))


def indexer_selected_fwd(options: Options, x: Selected) -> Selection:
    """The logits of keys that are selected already."""
    (size, _), slots = x.k.shape[1:], x.indices.shape[2]

    def body(_: tuple[()], keys: Any, q: Array, weights: Array, indices: Array) -> Any:
        k, k_scale = keys
        own_k, own_scale = _selected_keys(k, k_scale, indices)
        valid = _alone((indices >= 0) & (indices < size))[:, None]
        own_q, own_w = _alone(q)[:, None], _alone(weights)[:, None]
        logits = combine(options, scores(own_q, own_k), own_w, own_scale, valid)
        return (), (logits.reshape(indices.shape),)

    if size == 0:
        logits = jnp.full(x.indices.shape, -jnp.inf, compat.accum_dtype(x.q.dtype))
        return Selection(x.indices, logits)
    cost = score_bytes(x.q.shape[2], slots) + slots * x.k.shape[2] * _BYTES_PER_SCORE
    queries = x.q, x.weights, x.indices
    _, (logits,) = stream_queries(body, (), (x.k, x.k_scale), queries, cost)
    return Selection(x.indices, logits)


def _alone(x: Array) -> Array:
    """Every query as a batch entry of its own, whose keys are those that it selected."""
    return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])


def _selected_keys(k: Array, k_scale: Array | None, indices: Array) -> tuple[Array, Array | None]:
    """Keys and scales of each query alone; what lies at an empty slot counts for nothing."""
    entry = jnp.arange(indices.shape[0], dtype=jnp.int32)[:, None, None]
    used = jnp.clip(indices, 0, k.shape[1] - 1)
    return _alone(k[entry, used]), None if k_scale is None else _alone(k_scale[entry, used])


def indexer_topk_bwd(options: Options, x: Selected, dy: Selection) -> Gradients:
    """Gradients of the inputs, from that of the selected logits."""
    (size, channels), heads, slots = x.k.shape[1:], x.q.shape[2], x.indices.shape[2]
    if size == 0:  # nothing to gather from
        dk, dk_scale = key_gradients(x.k.astype(compat.accum_dtype(x.k.dtype)), x.k, x.k_scale)
        return Gradients(
            q=jnp.zeros_like(x.q), k=dk, weights=jnp.zeros_like(x.weights), k_scale=dk_scale
        )

    def body(carry: Any, keys: Any, q: Array, weights: Array, indices: Array, g: Array) -> Any:
        (f,), (k, k_scale) = carry, keys
        own_k, own_scale = _selected_keys(k, k_scale, indices)
        own_q, own_w = _alone(q)[:, None], _alone(weights)[:, None]
        valid = (indices >= 0) & (indices < size)
        own_g = _alone(jnp.where(valid, g, 0))[:, None]
        x = scores(own_q, own_k)
        df, dq, dw = gradients(options, x, own_q, own_k, own_w, own_scale, own_g)
        df = df.reshape(*indices.shape, channels)
        slots = (x[:, :, None] for x in (indices, valid, df))
        f = scatter_rows(f[:, :, None], *slots, deterministic=options.deterministic)[:, :, 0]
        return (f,), (
            compat.saturated(dq, q.dtype).reshape(q.shape),
            dw.astype(weights.dtype).reshape(weights.shape),
        )

    # A fixed order of the sums takes sorted rows and their partial sums besides.
    row_bytes = (6 if options.deterministic else 1) * channels * _BYTES_PER_SCORE
    cost = score_bytes(heads, slots) + slots * row_bytes
    queries = x.q, x.weights, x.indices, dy.logits
    return _stream_gradients(body, x.k, x.k_scale, queries, cost)


def _stream_gradients(
    body: Callable[..., Any],
    k: Array,
    k_scale: Array | None,
    queries: tuple[Array, ...],
    cost: int,
) -> Gradients:
    """dq, dk, dweights, dk_scale from a body that accumulates f."""
    f = jnp.zeros(k.shape, compat.accum_dtype(k.dtype))
    (f,), (dq, dw) = stream_queries(body, (f,), (k, k_scale), queries, cost)
    dk, dk_scale = key_gradients(f, k, k_scale)
    return Gradients(q=dq, k=dk, weights=dw, k_scale=dk_scale)
