"""Calls of the CUDA kernels of `mqa_decode` for block-sparse attention over caches.

Every query becomes a request of its own with one token. Its lists of blocks, one for each KV head,
are page tables of `mqa_decode`: a page has as many rows as blocks and pages of the cache have in
common. The page in which the query's keys end is marked, because it has fewer of them.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_dsa.core.layout import physical_rows
from jax_dsa.core.typing import Array, Int
from jax_dsa.ops.masked_attention.spec import Results
from jax_dsa.ops.mqa_decode import cuda
from jax_dsa.ops.mqa_decode.cuda import DIMS
from jax_dsa.ops.mqa_decode.spec import Operands as DecodeOperands
from jax_dsa.ops.mqa_decode.spec import Options as DecodeOptions
from jax_dsa.ops.mqa_decode.spec import Results as DecodeResults
from jax_dsa.ops.sparse_attention.blocks import listed_blocks
from jax_dsa.ops.sparse_attention.spec import Operands, Options

# A block consists of at most so many pages of the lists.
MAX_PAGES_PER_BLOCK = 32


def supports(options: Options, x: Operands) -> str | None:
    """Returns None, or the reason why the kernels do not cover this call."""
    B, T, N, D = x.q.shape
    E, rows = x.v.shape[3], x.k.shape[0] * x.k.shape[1]
    dtypes = {a.dtype for a in (x.q, x.k, x.v)}
    if dtypes != {jnp.dtype(jnp.bfloat16)}:
        return f"it takes bfloat16, got {', '.join(sorted(d.name for d in dtypes))}"
    if D not in DIMS or D != E:
        return f"it has D=E in {DIMS}, got D={D} and E={E}"
    if N == 0:
        return "it takes at least one head"
    if options.scale <= 0:
        return f"it takes scale > 0, got {options.scale}"
    if options.batch_invariant:
        return "its results depend on the number of requests"
    if options.block_size > MAX_PAGES_PER_BLOCK * _page_size(options, x):
        return "blocks and pages, or the capacity of a flat cache, have too small a common divisor"
    # Marked pages have numbers up to twice the number of pages.
    if max(B * T * N, 2 * rows) > cuda.MAX_ROWS:
        return f"it takes up to {cuda.MAX_ROWS // 2} rows, and {cuda.MAX_ROWS} queries times heads"
    return None


def sparse_attention_decode_fwd(options: Options, avals: Results, x: Operands) -> Results:
    """Computes `cached.sparse_attention_decode_fwd` on the kernels."""
    B, T, N, D = x.q.shape
    lists = _lists(options, x)
    k, v = (a.reshape(1, a.shape[0] * a.shape[1], *a.shape[2:]) for a in (x.k, x.v))
    sinks = x.sinks
    if sinks is not None:
        sinks = jnp.broadcast_to(sinks[:, None].astype(jnp.float32), (B, T, N)).reshape(B * T, N)
    operands = DecodeOperands(
        q=x.q.reshape(B * T, 1, N, D),
        k=k,
        v=v,
        starts=jnp.zeros((B * T, 1), jnp.int32),
        ends=lists.ends,
        sinks=sinks,
        page_table=lists.pages,
    )
    each = DecodeOptions(
        scale=options.scale,
        value_dim=v.shape[3],
        num_splits=None,
        normalize=True,
        page_size=_page_size(options, x),
    )
    outs = [jax.ShapeDtypeStruct((B * T, 1, *a.shape[2:]), a.dtype) for a in avals]
    y = cuda.attend(each, DecodeResults(*outs), operands, lists.cuts)  # type: ignore[arg-type]
    return Results(*(a.reshape(B, T, *a.shape[2:]) for a in y))


class _Lists(NamedTuple):
    """The keys of queries as page tables of `mqa_decode`.

    Attributes:
        pages: The pages of each list; -1 for none. A page with fewer keys has the number of pages
            added to its own number.
        ends: Number of keys up to the last page of the query's lists.
        cuts: Number of keys of a page with fewer keys.
    """

    pages: Int[Array, "BT G R"]
    ends: Int[Array, "BT 1"]
    cuts: Int[Array, "BT 1"]


def _page_size(options: Options, x: Operands) -> int:
    """Returns the number of rows of a page of the lists."""
    return math.gcd(options.block_size, options.page_size or x.k.shape[1])


def _lists(options: Options, x: Operands) -> _Lists:
    B, T, G = x.indices.shape[:3]
    size, (pools, rows) = _page_size(options, x), x.k.shape[:2]
    keys = rows
    if x.page_table is not None and options.page_size is not None:
        keys = x.page_table.shape[1] * options.page_size
    end = jnp.full((B, T), keys, jnp.int32)
    for limit in (x.lengths, None if x.positions is None else x.positions + 1):
        end = end if limit is None else jnp.minimum(end, limit)
    end = jnp.maximum(end, 0)[:, :, None, None]
    blocks = listed_blocks(options, x, keys)
    blocks = jnp.where((blocks >= 0) & (blocks < -(-keys // options.block_size)), blocks, -1)
    count = options.block_size // size
    within = jnp.arange(count, dtype=jnp.int32).reshape(1, 1, 1, 1, count) * size
    first = blocks[..., None] * options.block_size + within
    first = first.reshape(B, T, G, blocks.shape[3] * count)
    seen = (first >= 0) & (first < end)
    if x.page_table is None:
        pages = first // size
    else:
        assert options.page_size is not None
        where = jnp.where(seen, first, -1)
        row = physical_rows(rows // options.page_size, options.page_size, x.page_table, where)
        seen &= row >= 0
        pages = row // size
    if pools > 1:
        of_pool = jnp.arange(B, dtype=jnp.int32) * (rows // size)
        pages += of_pool[:, None, None, None]
    is_cut = first + size > end
    pages = jnp.where(seen, pages + jnp.where(is_cut, pools * rows // size, 0), -1)
    slot = jnp.arange(1, pages.shape[3] + 1, dtype=jnp.int32)[None, None, None]
    last = jnp.max(jnp.where(seen, slot, 0), axis=(2, 3), initial=0)
    return _Lists(
        pages=pages.reshape(B * T, *pages.shape[2:]),
        ends=last.reshape(B * T, 1) * size,
        cuts=end.reshape(B * T, 1) % size,
    )
