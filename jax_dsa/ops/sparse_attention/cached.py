"""XLA implementation of block-sparse attention over flat and paged caches.

Every query becomes a batch entry of its own, and the caches of all requests one array of rows. So a
chunk of `xla.forward` may have any number of requests, and gathers no more than their blocks.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from jax_dsa.core.checks import LARGEST
from jax_dsa.core.layout import physical_rows
from jax_dsa.core.streaming import entry_by_entry
from jax_dsa.core.typing import Array, Bool, Int
from jax_dsa.ops.masked_attention.spec import Results
from jax_dsa.ops.sparse_attention.blocks import selected_keys
from jax_dsa.ops.sparse_attention.spec import Gradients, Operands, Options
from jax_dsa.ops.sparse_attention.xla import attend, backward, forward

if TYPE_CHECKING:
    from jax_dsa.ops.sparse_attention.xla import Selector


def sparse_attention_decode_fwd(options: Options, x: Operands) -> Results:
    """Returns the output, the largest score and the logarithm of the sum."""
    keys, select = _selector(options, x)
    each = _query_by_query(x)
    if options.batch_invariant:
        y = entry_by_entry(functools.partial(attend, options, select=select), each)
    else:
        y = forward(options, each, select, keys, axis=0)
    return Results(*(a.reshape(*x.q.shape[:2], *a.shape[2:]) for a in y))


def sparse_attention_decode_bwd(
    options: Options, x: Operands, y: Results, dy: Results
) -> Gradients:
    """Returns the gradients of q, k, v and the sinks."""
    keys, select = _selector(options, x)
    results, cotangents = (Results(*(None if a is None else _flat(a) for a in r)) for r in (y, dy))
    grads = backward(options, _query_by_query(x), results, cotangents, select, keys, axis=0)
    dk, dv = (
        None if d is None else d.reshape(a.shape) for d, a in ((grads.k, x.k), (grads.v, x.v))
    )
    dsinks = None if grads.sinks is None else grads.sinks.reshape(x.q.shape[:3]).sum(1)
    return Gradients(q=grads.q.reshape(x.q.shape), k=dk, v=dv, sinks=dsinks)


def _selector(options: Options, x: Operands) -> tuple[int, Selector]:
    """Returns the number of keys that a request may have, and what finds the rows of queries."""
    if x.page_table is None:
        keys = x.k.shape[1]
        return keys, functools.partial(_selected_rows, options, keys, 0)
    assert options.page_size is not None
    keys = x.page_table.shape[1] * options.page_size
    return keys, functools.partial(_selected_rows, options, keys, x.k.shape[1] // options.page_size)


def _flat(x: Array) -> Array:
    """Returns an array [B, T, ...] as [B * T, 1, ...]."""
    return x.reshape(x.shape[0] * x.shape[1], 1, *x.shape[2:])


def _query_by_query(x: Operands) -> Operands:
    """Returns operands in which every query is a batch entry, and `k` and `v` have one.

    `starts` are the rows of `k` at which the request's rows, or its pool's, begin.
    """
    B, T = x.q.shape[:2]
    pools, rows = x.k.shape[:2]
    if isinstance(pools * rows, int) and pools * rows > LARGEST:
        raise ValueError(
            f"sparse_attention_decode: argument 'k_cache' has {pools * rows} rows on a device, "
            f"want less than 2**31"
        )

    def repeated(a: Array) -> Array:
        return _flat(jnp.broadcast_to(a[:, None], (B, T, *a.shape[1:])))[:, 0]

    def joined(a: Any) -> Any:
        return None if a is None else a.reshape(1, pools * rows, *a.shape[2:])

    first = jnp.arange(B, dtype=jnp.int32) * (0 if pools == 1 else rows)
    queries = ("q", "indices", "positions", "lengths", "topk_length")
    entries = ("sinks", "page_table")
    given = x._asdict()
    each = {n: None if given[n] is None else _flat(given[n]) for n in queries}
    each |= {n: None if given[n] is None else repeated(given[n]) for n in entries}
    each |= {n: joined(given[n]) for n in ("k", "v", "k_scale", "v_scale")}
    return x._replace(starts=repeated(first)[:, None], **each)  # type: ignore[arg-type]


def _selected_rows(
    options: Options, keys: int, pages: int, x: Operands
) -> tuple[Int[Array, "B 1 G K*b"], Bool[Array, "B 1 G K*b"]]:
    """Returns the rows of `k` that each query's blocks consist of, and which of them it sees."""
    position, seen = selected_keys(options, x._replace(starts=None), keys)
    assert x.starts is not None
    first = x.starts[:, :, None, None]
    if x.page_table is None:
        return position + first, seen
    size = options.page_size
    assert size is not None
    rows = physical_rows(pages, size, x.page_table, jnp.where(seen, position, -1))
    return rows + first, rows >= 0
