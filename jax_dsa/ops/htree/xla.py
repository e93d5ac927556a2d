"""The XLA implementation of hierarchical tree attention, in plain JAX.

It walks the layers from the top down for one chunk of queries at a time, so that the nodes that a
chunk gathers fit the streaming budget. In the einsum equations, N query heads are G groups of M,
and W is the number of columns, one per ordinal of a candidate (see `nodes`).
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from jax_dsa.core import compat, streaming
from jax_dsa.core.softmax import log_of_sum, split_scale
from jax_dsa.core.typing import Array
from jax_dsa.ops.htree import spec, tree
from jax_dsa.ops.htree.nodes import (
    Nodes,
    candidate_counts,
    mark,
    rotate,
    select,
    selected_nodes,
)
from jax_dsa.ops.htree.spec import (
    Gradients,
    Operands,
    Options,
    Results,
    TokenGradients,
    Tokens,
)


def htree_build_fwd(options: Options, x: Tokens) -> spec.Nodes:
    """Returns all nodes of the tree over the tokens."""
    r, top_k = options.compression, options.top_k
    return spec.Nodes(tree.build(x.k, r, top_k), tree.build(x.v, r, top_k))


def htree_build_bwd(options: Options, dy: spec.Nodes) -> TokenGradients:
    """Returns the gradients of the `options.capacity` tokens, given those of all nodes."""
    assert options.capacity is not None
    size = (options.capacity, options.compression, options.top_k)
    return TokenGradients(
        *(tree.spread(x.astype(compat.accum_dtype(x.dtype)), *size).astype(x.dtype) for x in dy)
    )


def htree_fwd(options: Options, x: Operands) -> Results:
    """Returns the output, the logsumexp and the selection."""
    nodes = Nodes.of(options, x.k, x.v)

    def body(carry: Any, nodes: Nodes, *xs: Array) -> Any:
        return carry, _attend(options, nodes, *xs)

    cost = query_bytes(options, x.q, x.k, x.v)
    return Results(*_scan(body, (), nodes, (x.q, x.positions), cost)[1])


def htree_bwd(options: Options, x: Operands, y: Results, dy: Results) -> Gradients:
    """Returns the gradients of q, k and v."""
    nodes = Nodes.of(options, x.k, x.v)
    dtype = compat.accum_dtype(x.k.dtype)
    grads = (jnp.zeros(nodes.k.shape, dtype), jnp.zeros(nodes.v.shape, dtype))
    xs = (x.q, x.positions, y.selected, *y[:3], dy.out, dy.log_sum)

    def body(grads: Any, nodes: Nodes, *xs: Array) -> Any:
        return _attend_transposed(options, nodes, grads, *xs)

    grads = compat.match_vary(grads, x.k, x.v, *xs)
    (dk, dv), (dq,) = _scan(body, grads, nodes, xs, query_bytes(options, x.q, x.k, x.v))
    if options.capacity is None:
        size = (x.k.shape[1], options.compression, options.top_k)
        dk, dv = tree.spread(dk, *size), tree.spread(dv, *size)
    return Gradients(q=dq, k=dk.astype(x.k.dtype), v=dv.astype(x.v.dtype))


def query_bytes(options: Options, q: Array, k: Array, v: Array) -> int:
    """Returns the bytes that one query needs at a time.

    These are its scores, the children that it gathers, and their rotated keys.
    """
    tokens = k.shape[1] if options.capacity is None else options.capacity
    columns = options.compression * options.top_k
    accum_bytes = jnp.dtype(compat.accum_dtype(q.dtype)).itemsize
    cost = 3 * q.shape[2] * min(tokens, columns) * accum_bytes
    if tokens > columns:
        cost += columns * math.prod(k.shape[2:]) * (2 * k.dtype.itemsize + accum_bytes)
        cost += columns * math.prod(v.shape[2:]) * v.dtype.itemsize
    return cost


def _scan(body: Any, carry: Any, nodes: Nodes, xs: tuple[Array, ...], cost: int) -> Any:
    """Scans `carry, ys = body(carry, nodes, *chunks)` over chunks of the queries xs [B, T, ...].

    A chunk has queries of one batch entry, which share keys, and of several entries only if all
    their queries fit. The nodes are indexed, not split: splitting would copy a whole cache although
    decoding reads few of its rows.
    """
    batch, queries = xs[0].shape[:2]
    chunk = streaming.chunk_length(queries, cost)

    def scan_rows(carry: Any, row: Array, *xs: Array) -> Any:
        row_nodes = nodes.rows(row)
        step = lambda carry, *xs: body(carry, row_nodes, *xs)  # noqa: E731
        return streaming.scan_chunks(step, carry, xs, chunk=chunk)

    row = jnp.arange(batch, dtype=jnp.int32)
    size = streaming.chunk_length(batch, cost * chunk)
    return streaming.scan_chunks(scan_rows, carry, (row, *xs), axis=0, chunk=size)


def _attend(
    options: Options, nodes: Nodes, q: Array, positions: Array
) -> tuple[Array, Array, Array, Array]:
    """Computes `htree_fwd` for a chunk of queries, with one running softmax over all layers."""
    batch, queries, heads, _ = q.shape
    groups, value_dim = nodes.v.shape[2:]
    r, top_k = options.compression, options.top_k
    q = q.reshape(batch, queries, groups, heads // groups, q.shape[-1])
    counts = candidate_counts(positions, nodes.layers, r, top_k)

    peak = jnp.full((*q.shape[:4], 1), -jnp.inf, nodes.cos.dtype)
    total = jnp.zeros(peak.shape, peak.dtype)
    out = jnp.zeros((*q.shape[:4], value_dim), peak.dtype)
    parents: Array | None = None
    selected: list[Array] = []
    for level in reversed(range(len(nodes.layers))):
        columns = nodes.columns(level, parents, counts[level])
        rotated = rotate(q, *nodes.tables(counts[level] - 1))
        scores = options.scale * columns.scores(rotated)
        scores = jnp.where(columns.visible, scores, -jnp.inf)
        if level:
            importance = jax.nn.logsumexp(jax.lax.stop_gradient(scores), axis=3)
            ordinals = select(importance, counts[level], top_k)
            selected.insert(0, ordinals)
            parents = selected_nodes(ordinals, parents, r)
            scores = jnp.where(mark(ordinals, scores.shape[-1])[:, :, :, None], -jnp.inf, scores)
        highest = jnp.maximum(peak, scores.max(-1, keepdims=True, initial=-jnp.inf))
        highest = jax.lax.stop_gradient(highest)
        shift = jnp.where(highest == -jnp.inf, 0, highest)
        p, decay = jnp.exp(scores - shift), jnp.exp(peak - shift)
        total = total * decay + p.sum(-1, keepdims=True)
        out = out * decay + columns.mix(p)
        peak = highest

    log_sum = log_of_sum(total)
    total = jnp.where(total == 0, 1, total)
    return (
        (out / total).reshape(batch, queries, heads, value_dim).astype(q.dtype),
        peak.reshape(batch, queries, heads),
        log_sum.reshape(batch, queries, heads),
        jnp.stack(selected, axis=3).astype(options.ordinal_dtype)
        if selected
        else jnp.zeros((batch, queries, groups, 0, top_k), options.ordinal_dtype),
    )


def _attend_transposed(
    options: Options,
    nodes: Nodes,
    grads: tuple[Array, Array],
    q: Array,
    positions: Array,
    selected: Array,
    out: Array,
    max_logit: Array,
    log_sum: Array,
    dout: Array,
    dlse: Array,
) -> tuple[tuple[Array, Array], tuple[Array]]:
    """Computes `htree_bwd` for a chunk of queries.

    Returns `grads`, the gradients of all nodes, with those of the chunk added; and that of q.
    """
    shape, dtype = q.shape, nodes.cos.dtype
    groups = nodes.k.shape[2]
    r, top_k = options.compression, options.top_k
    counts = candidate_counts(positions, nodes.layers, r, top_k)

    # A query without cotangents has zero gradients even if it sees NaN, and so has a query without
    # a token, whatever its cotangents are.
    live = (dout != 0).any(-1, keepdims=True) | (dlse != 0)[..., None]
    live &= max_logit[..., None] != -jnp.inf
    dout = jnp.where(live, dout, 0)
    first, last = split_scale(options.scale, dout.dtype)
    delta = (out.astype(dtype) * (first * dout).astype(dtype)).sum(-1, keepdims=True)
    delta -= first * dlse[..., None]
    q, dout, live, delta, max_logit, log_sum = (
        x.reshape(*shape[:2], groups, shape[2] // groups, x.shape[-1])
        for x in (
            jnp.where(live, q, 0),
            dout,
            live,
            delta,
            max_logit[..., None],
            log_sum[..., None],
        )
    )

    dk, dv = grads
    dq = jnp.zeros(q.shape, dtype)
    parents: Array | None = None
    for level in reversed(range(len(nodes.layers))):
        columns = nodes.columns(level, parents, counts[level])
        cos, sin = nodes.tables(counts[level] - 1)
        rotated = rotate(q, cos, sin)
        counted = columns.visible & live
        layer = level, parents
        if level:
            ordinals = selected[..., level - 1, :].astype(jnp.int32)
            parents = selected_nodes(ordinals, parents, r)
            counted &= ~mark(ordinals, counted.shape[-1])[:, :, :, None]
        scores = options.scale * columns.scores(rotated)
        p = jnp.where(counted, jnp.exp((scores - max_logit) - log_sum), 0)
        dp = columns.dot("btgme,*e->btgmw", first * dout, columns.values)
        ds = jnp.where(counted, p * (dp - delta) * last, 0)

        dq += rotate(columns.dot("btgmw,*d->btgmd", ds, columns.keys), cos, -sin)
        dk = nodes.add(dk, *layer, columns.key_gradients(ds, rotated))
        dv = nodes.add(dv, *layer, columns.dot("btgmw,btgme->*e", p, dout))
    dq = jnp.where(live, dq, 0)
    return (dk, dv), (dq.reshape(shape).astype(q.dtype),)
