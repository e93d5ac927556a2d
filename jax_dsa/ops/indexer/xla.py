"""The lightning indexer in XLA, streamed over queries.

    x[t,j,s] = q[t,j] . k[s]        I[t,s] = k_scale[s] * sum_j w[t,j] * relu(x[t,j,s])

With g = dL/dI and the masked gradients a[t,j,s] = g[t,s] * [x > 0], all gradients follow from two
products:

    h[t,j] = sum_s  a[t,j,s] * k_scale[s] * k[s]        f[s] = sum_tj a[t,j,s] * w[t,j] * q[t,j]

    dq[t,j] = w[t,j] * h[t,j]                           dk[s]       = k_scale[s] * f[s]
    dw[t,j] = q[t,j] . h[t,j]                           dk_scale[s] = k[s] . f[s]

because relu(x) = [x > 0] * x is linear in q and in k once the ReLU mask is fixed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jax_dsa.core import compat
from jax_dsa.core.layout import physical_rows
from jax_dsa.core.rows import scatter_rows, some_row
from jax_dsa.core.streaming import chunk_length, scan_chunks
from jax_dsa.core.typing import Array, Bool, Float, Int
from jax_dsa.ops.indexer.spec import Gradients, Logits, Operands, Options, Selected, Selection
from jax_dsa.ops.topk.xla import BYTES_PER_POSITION, in_blocks, select, values_at, visible

if TYPE_CHECKING:
    from collections.abc import Callable

# Bytes of temporaries per score: four each for the score, its masked gradient, and one temporary
# of either.
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
        body: Function of the carry and `keys` of some batch entries, and of a chunk of their
            queries.
        carry: Arrays [B, ...] that accumulate over the queries.
        keys: Arrays [B, ...] that every query of a batch entry reads, or None.
        queries: Arrays [B, T, ...].
        bytes_per_query: Bytes of temporaries per query.

    Returns:
        The carry after the last chunk, and the results ys [B, T, ...].
    """
    batch, total = next(x.shape[:2] for x in queries if x is not None)
    # Prefer many queries of few batch entries to few queries of many: the keys are read less often.
    entries = chunk_length(batch, total * bytes_per_query)
    if not isinstance(entries, int):  # A formula within the formula below is slow to export.
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
    """Returns the bytes of temporaries for the scores, masked gradients and logits of one query."""
    return (heads + 1) * size * _BYTES_PER_SCORE


def scores(q: Array, k: Array) -> Float[Array, "B T J S"]:
    """Returns q . k for every head, before the ReLU."""
    # bfloat16 represents every FP8 value, and every device supports bfloat16 products.
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
    """Returns the logits for the scores `x`, -inf where `mask` is false."""
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
    """Returns f, dq and dw as in the module docstring. g must be 0 where a key is not used."""
    masked = g.astype(x.dtype)[:, :, None]
    masked = jnp.where(x > 0, masked, 0) if options.relu else jnp.broadcast_to(masked, x.shape)
    q, k, weights = q.astype(x.dtype), k.astype(x.dtype), weights.astype(x.dtype)
    # NaN in a query without gradients must not reach the gradient of a key, and 0 * NaN is NaN.
    live = (g != 0).any(-1)[..., None]
    q, weights = jnp.where(live[..., None], q, 0), jnp.where(live, weights, 0)
    if k_scale is not None:
        k = k * k_scale.astype(x.dtype)[..., None]
    h = jnp.einsum("btjs,bsc->btjc", masked, _finite(k))
    f = jnp.einsum("btjs,btjc->bsc", masked, q * weights[..., None])
    return f, h * weights[..., None], jnp.sum(q * h, axis=-1)


def key_gradients(
    f: Float[Array, "B S C"], k: Float[Array, "B S C"], k_scale: Float[Array, "B S"] | None
) -> tuple[Float[Array, "B S C"], Float[Array, "B S"] | None]:
    """Returns dk and dk_scale, computed from f."""
    if k_scale is None:
        return f, None
    k, k_scale = k.astype(f.dtype), k_scale.astype(f.dtype)
    return f * _finite(k_scale)[..., None], jnp.sum(_finite(k) * f, axis=-1)


def _finite(k: Array) -> Array:
    """Replaces NaN and Inf by 0.

    Keys that no query uses are multiplied by 0, and the result must be 0. If a query does use such
    a key, its logit, and so g, is not finite either.
    """
    return jnp.where(jnp.isfinite(k), k, 0)


def indexer_logits_fwd(options: Options, x: Operands) -> Logits:
    """Returns the logits of all keys."""
    queries = x.q, x.weights, x.starts, x.ends
    size = x.k.shape[1]
    return Logits(*_stream_logits(options, queries, (x.k, x.k_scale), size, lambda y, *_: (y,)))


def indexer_topk_fwd(options: Options, x: Operands) -> Selection:
    """Returns the keys with the largest logits, and their logits."""

    def selected(logits: Array, starts: Array, _: Array, blocks: Any) -> tuple[Array, Array]:
        batch, queries, size = logits.shape
        rows = logits.reshape(batch * queries, size)
        if blocks is not None:
            assert options.candidate_block_size is not None
            blocks = blocks.reshape(batch * queries, blocks.shape[2])
            mask = in_blocks(blocks, starts.reshape(-1), options.candidate_block_size, size)
            rows = jnp.where(mask, rows, -jnp.inf)
        indices = select(rows, options.top_k)
        indices = indices.reshape(batch, queries, options.top_k)
        return indices, values_at(logits, indices)

    queries = x.q, x.weights, x.starts, x.ends, x.candidates
    return Selection(*stream_selection(options, queries, x.k, x.k_scale, x.page_table, selected))


def stream_selection(
    options: Options,
    queries: tuple[Array | None, ...],
    k: Float[Array, "1|B S C"],
    k_scale: Float[Array, "1|B S"] | None,
    page_table: Int[Array, "B R"] | None,
    finish: Callable[..., tuple[Array, ...]],
) -> Any:
    """Returns `finish(logits, *ranges)` of all keys, evaluated for chunks of queries.

    With a page table, the axis S of k and k_scale is that of a pool, and their batch axis may have
    size 1.

    Args:
        options: Static options.
        queries: Queries, weights, and ranges: starts, ends, and other arrays [B, T, ...] or None.
        k: Keys, or a pool of pages.
        k_scale: Scales of the keys.
        page_table: Pages of each request, or None.
        finish: Function of the logits and ranges of some queries.
    """
    if page_table is None:
        return _stream_logits(options, queries, (k, k_scale), k.shape[1], finish)
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

    return _stream_logits(options, queries, (entry, rows), size, finish, gathered)


def _stream_logits(
    options: Options,
    queries: tuple[Any, ...],
    keys: tuple[Array | None, ...],
    size: int,
    finish: Callable[..., tuple[Array, ...]],
    load: Callable[..., Any] = lambda k, k_scale: (k, k_scale, None),
) -> Any:
    """Returns `finish(logits, *ranges)`, evaluated for chunks of queries.

    A selection takes about forty steps for any number of rows, so the chunks that `finish` gets are
    larger than those whose scores fit in the memory budget. `load` converts `keys` to the indexer's
    keys, their scales, and a mask of the keys that are mapped.
    """

    def few(_: tuple[()], keys: Any, q: Array, weights: Array, *ranges: Array) -> Any:
        starts, ends = ranges[:2]
        k, k_scale, mapped = load(*keys)
        mask = visible(starts, ends, size)
        mask = mask if mapped is None else mask & mapped[:, None]
        return (), (combine(options, scores(q, k), weights, k_scale, mask),)

    scores_cost = score_bytes(queries[0].shape[2], size)
    # With symbolic sizes, both kinds of chunks are the same: nested formulas are slow to export.
    nested = all(isinstance(n, int) for n in (size, *queries[0].shape))

    def many(_: tuple[()], keys: Any, *queries: Array) -> Any:
        if nested:
            _, (logits,) = stream_queries(few, (), keys, queries, scores_cost)
        else:
            _, (logits,) = few((), keys, *queries)
        # The barrier keeps XLA from fusing `finish` into the logits, which could change their bits.
        return (), finish(jax.lax.optimization_barrier(logits), *queries[2:])

    cost = size * BYTES_PER_POSITION + (0 if nested else scores_cost)
    return stream_queries(many, (), keys, queries, cost)[1]


def indexer_logits_bwd(options: Options, x: Operands, dy: Logits) -> Gradients:
    """Returns the gradients of the inputs, given the gradient of all logits."""
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
    """Returns the logits of keys that are already selected."""
    (size, _), slots = x.k.shape[1:], x.indices.shape[2]

    def body(_: tuple[()], keys: Any, q: Array, weights: Array, indices: Array) -> Any:
        k, k_scale = keys
        own_k, own_scale = _selected_keys(k, k_scale, indices)
        valid = _as_batch_entries((indices >= 0) & (indices < size))[:, None]
        own_q, own_w = _as_batch_entries(q)[:, None], _as_batch_entries(weights)[:, None]
        logits = combine(options, scores(own_q, own_k), own_w, own_scale, valid)
        return (), (logits.reshape(indices.shape),)

    if size == 0:
        logits = jnp.full(x.indices.shape, -jnp.inf, compat.accum_dtype(x.q.dtype))
        return Selection(x.indices, logits)
    cost = score_bytes(x.q.shape[2], slots) + slots * x.k.shape[2] * _BYTES_PER_SCORE
    queries = x.q, x.weights, x.indices
    _, (logits,) = stream_queries(body, (), (x.k, x.k_scale), queries, cost)
    return Selection(x.indices, logits)


def _as_batch_entries(x: Array) -> Array:
    """Merges the axes B and T, so that each query becomes a batch entry with its own keys."""
    return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])


def _selected_keys(k: Array, k_scale: Array | None, indices: Array) -> tuple[Array, Array | None]:
    """Returns the selected keys and scales of each query, with any key in empty slots."""
    entry = jnp.arange(indices.shape[0], dtype=jnp.int32)[:, None, None]
    used = jnp.clip(indices, 0, k.shape[1] - 1)
    own_scale = None if k_scale is None else _as_batch_entries(k_scale[entry, used])
    return _as_batch_entries(k[entry, used]), own_scale


def indexer_topk_bwd(options: Options, x: Selected, dy: Selection) -> Gradients:
    """Returns the gradients of the inputs, given the gradient of the selected logits."""
    (size, channels), heads, slots = x.k.shape[1:], x.q.shape[2], x.indices.shape[2]
    if size == 0:  # There are no keys to gather.
        dk, dk_scale = key_gradients(x.k.astype(compat.accum_dtype(x.k.dtype)), x.k, x.k_scale)
        return Gradients(
            q=jnp.zeros_like(x.q), k=dk, weights=jnp.zeros_like(x.weights), k_scale=dk_scale
        )

    def body(carry: Any, keys: Any, q: Array, weights: Array, indices: Array, g: Array) -> Any:
        (f,), (k, k_scale) = carry, keys
        own_k, own_scale = _selected_keys(k, k_scale, indices)
        own_q, own_w = _as_batch_entries(q)[:, None], _as_batch_entries(weights)[:, None]
        valid = (indices >= 0) & (indices < size)
        own_g = _as_batch_entries(jnp.where(valid, g, 0))[:, None]
        x = scores(own_q, own_k)
        df, dq, dw = gradients(options, x, own_q, own_k, own_w, own_scale, own_g)
        df = df.reshape(*indices.shape, channels)
        slots = (x[:, :, None] for x in (indices, valid, df))
        f = scatter_rows(f[:, :, None], *slots, deterministic=options.deterministic)[:, :, 0]
        return (f,), (
            compat.saturated(dq, q.dtype).reshape(q.shape),
            dw.astype(weights.dtype).reshape(weights.shape),
        )

    # A fixed order of the sums needs sorted rows and their partial sums, too.
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
    """Returns the gradients of the inputs from a body that accumulates f."""
    f = jnp.zeros(k.shape, compat.accum_dtype(k.dtype))
    (f,), (dq, dw) = stream_queries(body, (f,), (k, k_scale), queries, cost)
    dk, dk_scale = key_gradients(f, k, k_scale)
    return Gradients(q=dq, k=dk, weights=dw, k_scale=dk_scale)
