"""The rows that the lists of one or two caches select."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp

from jax_dsa.core.layout import physical_rows
from jax_dsa.core.rows import gather_rows, valid_slots
from jax_dsa.core.typing import Array, Bool, Float, Int
from jax_dsa.ops.sparse_mla.spec import Operands, Options


class Pool(NamedTuple):
    """The rows that a list selects from: one batch entry may serve all requests."""

    rows: Array
    page_size: int | None


class Slots(NamedTuple):
    """One list of slots per query, which index the rows of a pool."""

    indices: Int[Array, "B T G K"]
    ends: Int[Array, "B T"] | None
    topk_length: Int[Array, "B T"] | None


def pools_and_lists(options: Options, x: Operands) -> tuple[tuple[Pool, ...], tuple[Slots, ...]]:
    """Returns the keys of one or two caches, and the lists that select from them.

    The indices are rows of the pools, not positions within requests.
    """
    pools = [Pool(x.kv, options.page_size)]
    lists = [Slots(x.indices, x.ends, x.topk_length)]
    if x.extra_kv is not None:
        assert x.extra_indices is not None
        pools.append(Pool(x.extra_kv, options.extra_page_size))
        lists.append(Slots(x.extra_indices, x.extra_ends, x.extra_topk_length))
    tables = x.page_table, x.extra_page_table
    for i, (pool, table) in enumerate(zip(pools, tables, strict=False)):
        if table is not None:
            lists[i] = _physical(pool, lists[i], table)
    return tuple(pools), tuple(lists)


def _physical(pool: Pool, slots: Slots, page_table: Array) -> Slots:
    """Returns the slots with indices within the page pool instead of within each request."""
    visible = slots.indices
    if slots.ends is not None:
        visible = jnp.where(visible < slots.ends[:, :, None, None], visible, -1)
    assert pool.page_size is not None
    pages = pool.rows.shape[1] // pool.page_size
    indices = physical_rows(pages, pool.page_size, page_table, visible)
    return slots._replace(indices=indices, ends=None)


def selected(
    pools: tuple[Pool, ...], lists: tuple[Slots, ...], dtype: Any
) -> tuple[Float[Array, "B T G K D"], Bool[Array, "B T G K"]]:
    """Returns the rows of all slots, one list after the other, and which of them are valid."""
    rows, valid = [], []
    for pool, slots in zip(pools, lists, strict=True):
        valid.append(valid_slots(*slots, pool.rows.shape[1]))
        rows.append(gather_rows(pool.rows, slots.indices, valid[-1], dtype, pool.page_size))
    return jnp.concatenate(rows, axis=3), jnp.concatenate(valid, axis=3)
