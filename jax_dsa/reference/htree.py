"""Hierarchical tree attention in plain JAX: the XLA implementation, and the kernels' oracle.

Layers are walked from the top down, queries a chunk at a time, so that what a chunk gathers fits
the streaming budget. Letters inside: N query heads are G groups of M; W columns, one per candidate
ordinal (see `htree_nodes`).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jax_dsa.core import compat, streaming
from jax_dsa.reference import htree_tree
from jax_dsa.reference.htree_nodes import (
    Nodes,
    candidate_counts,
    mark,
    rotate,
    select,
    selected_nodes,
)

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int

    from jax_dsa.ops.htree import Options


def htree_build_fwd(
    options: Options, k: Float[Array, "B S G D"], v: Float[Array, "B S G E"]
) -> tuple[Array, Array]:
    """All nodes of the tree over the tokens: keys [B, nodes, G, D] and values [B, nodes, G, E]."""
    r, top_k = options.compression, options.top_k
    return htree_tree.build(k, r, top_k), htree_tree.build(v, r, top_k)


def htree_build_bwd(
    options: Options, dk: Float[Array, "B nodes G D"], dv: Float[Array, "B nodes G E"]
) -> tuple[Array, ...]:
    """Gradients of the `options.capacity` tokens, from those of all nodes."""
    assert options.capacity is not None
    size = (options.capacity, options.compression, options.top_k)
    return tuple(
        htree_tree.spread(x.astype(compat.accum_dtype(x.dtype)), *size).astype(x.dtype)
        for x in (dk, dv)
    )


def htree_fwd(
    options: Options,
    q: Float[Array, "B T N D"],
    k: Float[Array, "B S G D"],
    v: Float[Array, "B S G E"],
    positions: Int[Array, "B T"],
) -> tuple[Array, Array, Array]:
    """Output, lse and selection.

    Args:
        options: `capacity` tells what k and v hold: None for the tokens, else all nodes of a tree
            over so many tokens.
        q: queries, not yet rotated.
        k: keys, not yet rotated.
        v: values.
        positions: the token each query stands at; negative for none.

    Returns:
        out [B, T, N, E] in q's dtype; lse [B, T, N]; selected int32 [B, T, G, layers - 1, K]: in
        [..., l - 1, :] the ordinals of the candidates selected in layer l, ascending, then -1.
    """
    nodes = Nodes.of(options, k, v)

    def body(carry: Any, nodes: Nodes, *xs: Array) -> Any:
        return carry, _attend(options, nodes, *xs)

    return _scan(body, (), nodes, (q, positions), query_bytes(options, q, k, v))[1]


def htree_bwd(
    options: Options,
    q: Float[Array, "B T N D"],
    k: Float[Array, "B S G D"],
    v: Float[Array, "B S G E"],
    positions: Int[Array, "B T"],
    selected: Int[Array, "B T G L K"],
    out: Float[Array, "B T N E"],
    lse: Float[Array, "B T N"],
    dout: Float[Array, "B T N E"],
    dlse: Float[Array, "B T N"],
) -> tuple[Array, Array, Array]:
    """Gradients of q, k and v; `selected`, `out` and `lse` are what `htree_fwd` returned."""
    nodes = Nodes.of(options, k, v)
    dtype = compat.accum_dtype(k.dtype)
    grads = (jnp.zeros(nodes.k.shape, dtype), jnp.zeros(nodes.v.shape, dtype))
    xs = (q, positions, selected, out, lse, dout, dlse)

    def body(grads: Any, nodes: Nodes, *xs: Array) -> Any:
        return _attend_transposed(options, nodes, grads, *xs)

    grads = compat.match_vary(grads, k, v, *xs)
    (dk, dv), (dq,) = _scan(body, grads, nodes, xs, query_bytes(options, q, k, v))
    if options.capacity is None:
        size = (k.shape[1], options.compression, options.top_k)
        dk, dv = htree_tree.spread(dk, *size), htree_tree.spread(dv, *size)
    return dq, dk.astype(k.dtype), dv.astype(v.dtype)


def query_bytes(options: Options, q: Array, k: Array, v: Array) -> int:
    """What one query holds at a time: scores, and the children it gathers with rotated keys."""
    tokens = k.shape[1] if options.capacity is None else options.capacity
    columns = options.compression * options.top_k
    wide = jnp.dtype(compat.accum_dtype(q.dtype)).itemsize
    cost = 3 * q.shape[2] * min(tokens, columns) * wide
    if tokens > columns:
        cost += columns * math.prod(k.shape[2:]) * (2 * k.dtype.itemsize + wide)
        cost += columns * math.prod(v.shape[2:]) * v.dtype.itemsize
    return cost


def _scan(body: Any, carry: Any, nodes: Nodes, xs: tuple[Array, ...], cost: int) -> Any:
    """`carry, ys = body(carry, nodes, *chunks)` over chunks of xs [B, T, ...].

    Queries of one row of the batch, which share keys, come first. Nodes are not split, since that
    would copy a whole cache for the few rows that decoding reads.
    """
    batch, queries = xs[0].shape[:2]
    chunk = streaming.chunk_length(queries, cost)

    def rows(carry: Any, row: Array, *xs: Array) -> Any:
        some = nodes.rows(row)
        step = lambda carry, *xs: body(carry, some, *xs)  # noqa: E731
        return streaming.scan_chunks(step, carry, xs, chunk=chunk)

    row = jnp.arange(batch)
    size = streaming.chunk_length(batch, cost * chunk)
    return streaming.scan_chunks(rows, carry, (row, *xs), axis=0, chunk=size)


def _attend(
    options: Options, nodes: Nodes, q: Array, positions: Array
) -> tuple[Array, Array, Array]:
    """`htree_fwd` for a chunk of queries: one running softmax over all layers."""
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

    some = total != 0  # false for a query without a token, and there alone
    total = jnp.where(some, total, 1)
    lse = jnp.where(some, peak + jnp.log(total), -jnp.inf)
    return (
        (out / total).reshape(batch, queries, heads, value_dim).astype(q.dtype),
        lse.reshape(batch, queries, heads),
        jnp.stack(selected, axis=3)
        if selected
        else jnp.zeros((batch, queries, groups, 0, top_k), jnp.int32),
    )


def _attend_transposed(
    options: Options,
    nodes: Nodes,
    grads: tuple[Array, Array],
    q: Array,
    positions: Array,
    selected: Array,
    out: Array,
    lse: Array,
    dout: Array,
    dlse: Array,
) -> tuple[tuple[Array, Array], tuple[Array]]:
    """`htree_bwd` for a chunk of queries: adds to the gradients of all nodes, returns that of q."""
    shape, dtype = q.shape, nodes.cos.dtype
    groups = nodes.k.shape[2]
    r, top_k = options.compression, options.top_k
    counts = candidate_counts(positions, nodes.layers, r, top_k)

    # A query without cotangents has no gradients, even if there is a NaN among what it sees.
    live = (dout != 0).any(-1, keepdims=True) | (dlse != 0)[..., None]
    delta = (out.astype(dtype) * dout.astype(dtype)).sum(-1, keepdims=True) - dlse[..., None]
    q, dout, live, delta, lse = (
        x.reshape(*shape[:2], groups, shape[2] // groups, x.shape[-1])
        for x in (jnp.where(live, q, 0), dout, live, delta, lse[..., None])
    )

    dk, dv = grads
    dq = jnp.zeros(q.shape, dtype)
    parents: Array | None = None
    for level in reversed(range(len(nodes.layers))):
        columns = nodes.columns(level, parents, counts[level])
        cos, sin = nodes.tables(counts[level] - 1)
        rotated = rotate(q, cos, sin)
        counted = columns.visible & live
        place = level, parents
        if level:
            ordinals = selected[..., level - 1, :]
            parents = selected_nodes(ordinals, parents, r)
            counted &= ~mark(ordinals, counted.shape[-1])[:, :, :, None]
        scores = options.scale * columns.scores(rotated)
        p = jnp.where(counted, jnp.exp(scores - lse), 0)
        dp = columns.dot("btgme,*e->btgmw", dout, columns.values)
        ds = jnp.where(counted, p * (dp - delta) * options.scale, 0)

        dq += rotate(columns.dot("btgmw,*d->btgmd", ds, columns.keys), cos, -sin)
        dk = nodes.add(dk, *place, columns.key_gradients(ds, rotated))
        dv = nodes.add(dv, *place, columns.dot("btgmw,btgme->*e", p, dout))
    dq = jnp.where(live, dq, 0)
    return (dk, dv), (dq.reshape(shape).astype(q.dtype),)
