"""Caches of rows, flat or in pages, which the caches of layers consist of."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from jax_dsa.ops.cache import FlatCache, PagedCache
from jax_dsa.ops.cache.lengths import checked_copy

if TYPE_CHECKING:
    from jax_dsa.core.checks import Args


def empty_rows(
    args: Args,
    batch: int,
    capacity: int,
    dim: int,
    *,
    groups: int = 1,
    dtype: Any,
    fp8: bool = False,
    page_size: int | None,
    num_pages: int | None,
    multiple: tuple[int, str],
) -> FlatCache | PagedCache:
    """Returns an empty cache of rows; the arguments are those of `LayerCache.empty`.

    Args:
        args: The checks of the public function.
        batch: B, number of requests.
        capacity: S, number of tokens that each request may have.
        dim: D, size of a row.
        groups: G, number of KV heads.
        dtype: Dtype of the rows.
        fp8: Whether to store FP8 records.
        page_size: L, tokens per page; None: the cache is flat.
        num_pages: P, number of pages in the pool.
        multiple: What `page_size` must be a multiple of, and the field of the configuration.
    """
    options: dict[str, Any] = {"groups": groups, "dtype": dtype, "fp8": fp8}
    if page_size is None:
        args.option("num_pages", num_pages, num_pages is None, "None without 'page_size'")
        return FlatCache.empty(batch, capacity, dim, **options)
    page_size, (size, field) = args.integer("page_size", page_size, 1), multiple
    want = f"a multiple of the configuration's {field} = {size}"
    args.option("page_size", page_size, page_size % size == 0, want)
    entries = -(-capacity // page_size)  # of each request in the page table
    owned = batch * entries
    pool = owned if num_pages is None else args.integer("num_pages", num_pages, 0)
    cache = PagedCache.empty(pool, page_size, batch, entries, dim, **options)
    if num_pages is not None:
        return cache
    table = jnp.arange(owned, dtype=jnp.int32).reshape(batch, entries)
    return dataclasses.replace(cache, page_table=table)


def with_lengths(op: str, cache: Any, lengths: Any) -> Any:
    """Returns a cache of rows with a copy of `lengths`; `op` is for messages.

    A layer that attends to another layer's keys has None, and nothing to change.
    """
    if cache is None:
        return None
    return dataclasses.replace(
        cache, lengths=checked_copy(op, "lengths", lengths, "B", cache.lengths)
    )


def with_page_table(op: str, cache: Any, page_table: Any) -> Any:
    """Returns a cache of rows with a copy of `page_table`; raises ValueError unless it is paged."""
    if not isinstance(cache, PagedCache):
        raise ValueError(
            f"{op}: the cache is flat and has no page table; create it with a page_size"
        )
    table = checked_copy(op, "page_table", page_table, "B R", cache.lengths)
    return dataclasses.replace(cache, page_table=table)
