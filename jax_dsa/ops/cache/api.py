"""Key caches for decoding, flat and paged. They are immutable pytrees: an append makes a new one.

Operators that decode take a cache where others take keys. A cache stores each request's rows either
as they are or as FP8 records.

- A row of D = 576 (DeepSeek-V3.2) is a record of 656 bytes: 512 e4m3 values, 4 float32 power-of-two
  scales (one per 128 values) and 64 bfloat16 RoPE values.
- A row of D = 512 (DeepSeek-V4) is a record of 584 bytes, in pages only: 448 e4m3 values and 64
  bfloat16 RoPE values. The scales follow the values of the whole page: for each token 7 exponents
  of powers of two (one per 64 values) and a zero byte.

Requests are the batch axis, and `lengths` is the number of tokens that each request holds. A cache
of a single request may have no batch axis.
"""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any, Self

import jax
import jax.numpy as jnp

from jax_dsa.core.checks import FLOATS, FP8, INT32, LARGEST, Args, as_array
from jax_dsa.core.layout import (
    PAGE_RECORD_BYTES,
    PAGE_RECORD_DIM,
    RECORD_DIM,
    put_in_pages,
    put_page_records,
    put_rows,
)
from jax_dsa.core.typing import Array, Float, Int, UInt8
from jax_dsa.ops.cache.records import RECORDS, checks_of, packed, packed_for_page
from jax_dsa.ops.quantize_fp8.spec import INPUTS

__all__ = ["FlatCache", "PagedCache", "checked_pages"]

STORED = (*FLOATS, FP8, jnp.uint8)


def _storage(
    args: Args, sizes: dict[str, Any], dim: Any, dtype: Any, fp8: Any, records: tuple[int, ...]
) -> Array:
    """Returns zeros for an empty cache.

    Args:
        args: the checks of the call.
        sizes: the user's arguments for the axes, by name, each at least 0.
        dim: the user's D.
        dtype: the user's dtype of a row.
        fp8: whether the cache stores records in place of rows of `dtype`.
        records: the values of D for which this cache has records.
    """
    shape = [args.integer(name, size, 0) for name, size in sizes.items()]
    width, dtype = args.integer("dim", dim, 1), args.dtype("dtype", dtype, STORED)
    if args.flag("fp8", fp8):
        expected = " or ".join(map(str, records))
        args.option("dim", dim, width in records, f"{expected} with fp8=True")
        width, dtype = RECORDS[width], jnp.uint8
    return jnp.zeros((*shape, width), dtype)


class _Cache:
    """The methods that both caches share."""

    lengths: Int[Array, "B"]

    @property
    def capacity(self) -> int:
        """The number of tokens that a request may have."""
        raise NotImplementedError

    @property
    def free_tokens(self) -> Int[Array, "B"]:
        """The number of tokens that can be appended to each request; 0 where the cache is full."""
        return self.capacity - jnp.clip(self.lengths, 0, self.capacity)

    @property
    def room(self) -> Int[Array, "B"]:
        """Deprecated name of `free_tokens`."""
        warnings.warn("room is deprecated, use free_tokens", DeprecationWarning, stacklevel=2)
        return self.free_tokens

    def append(self, rows: Float[Array, "B T G D"], counts: Int[Array, "B"] | None = None) -> Self:
        """Returns the cache with T more tokens in each request, or only the first `counts` of them.

        Rows are rounded to the dtype that the cache stores. A cache of e4m3 takes rows of e4m3,
        whose scales the caller keeps. Tokens that do not fit are dropped, and the length stays at
        the capacity, because a traced function cannot raise. Compare with `free_tokens` before.

        Args:
            rows: The new rows of keys.
            counts: How many of the T rows each request gets. Default: all.

        Raises:
            TypeError, ValueError: An argument has the wrong type or shape.
        """
        args = Args(f"{type(self).__name__}.append", "rows", rows, "B T G D")
        lengths = args.array("lengths", self.lengths, "B", INT32)
        lengths = jnp.clip(lengths, 0, self.capacity)
        rows = as_array(rows)  # type: ignore[assignment]
        queries = rows.shape[-3]
        step = jnp.arange(queries, dtype=jnp.int32)[None]
        positions = lengths[:, None] + step
        if counts is None:
            lengths = jnp.minimum(lengths + queries, self.capacity)
        else:
            counts = args.array("counts", counts, "B", INT32)
            positions = jnp.where(step < counts[:, None], positions, -1)
            lengths = jnp.minimum(lengths + jnp.clip(counts, 0, queries), self.capacity)
        return self._written(args, rows, positions, lengths=args.restore(lengths))

    def update(self, rows: Float[Array, "B T G D"], positions: Int[Array, "B T"]) -> Self:
        """Returns the cache with rows written at given positions. The lengths stay the same.

        Args:
            rows: The new rows, as for `append`.
            positions: The position of each row in its request. Rows outside the cache are dropped.

        Raises:
            TypeError, ValueError: An argument has the wrong type or shape.
        """
        args = Args(f"{type(self).__name__}.update", "rows", rows, "B T G D")
        args.array("lengths", self.lengths, "B", INT32)
        positions = args.array("positions", positions, "B T", INT32)
        return self._written(args, rows, positions)

    def _written(self, args: Args, rows: Any, positions: jax.Array, **changes: Any) -> Self:
        """Returns the cache with rows written at positions [B, T]; those outside it are dropped."""
        raise NotImplementedError


def _encoded(args: Args, rows: Any, stored: jax.Array, dims: str) -> jax.Array:
    """Returns new rows in the form that the cache stores, checked against the stored array."""
    rows = args.typed("rows", rows, (FP8,) if stored.dtype == FP8 else FLOATS)
    if stored.dtype == jnp.uint8:
        in_pages = stored.shape[-1] == PAGE_RECORD_BYTES
        dim = PAGE_RECORD_DIM if in_pages else RECORD_DIM
        args.shape("rows", rows, rows.shape[-1:] == (dim,), f"[B, T, G, {dim}]")
        low = rows.dtype if rows.dtype in INPUTS else jnp.float32
        rows = (packed_for_page if in_pages else packed)(args, rows.astype(low))
    rows = rows.astype(stored.dtype)
    return args.array("rows", rows, dims, (stored.dtype,))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)  # Comparing arrays gives no bool.
class FlatCache(_Cache):
    """A cache that stores up to S tokens of each request in one array.

    Attributes:
        data: The rows, or the FP8 records, of all tokens.
        lengths: The number of tokens that each request holds.

    Examples:
        >>> import jax.numpy as jnp, jax_dsa
        >>> cache = jax_dsa.FlatCache.empty(batch=2, capacity=16, dim=96)
        >>> cache = cache.append(jnp.ones((2, 3, 1, 96)))  # three tokens of each request
        >>> cache.lengths
        Array([3, 3], dtype=int32)
    """

    data: Float[Array, "B S G D"] | UInt8[Array, "B S G 656"]
    lengths: Int[Array, "B"]

    @classmethod
    def empty(
        cls,
        batch: int,
        capacity: int,
        dim: int = RECORD_DIM,
        *,
        groups: int = 1,
        dtype: Any = jnp.bfloat16,
        fp8: bool = False,
    ) -> FlatCache:
        """Returns a cache without tokens.

        Args:
            batch: B, the number of requests.
            capacity: S, the number of tokens that a request may have.
            dim: D, the size of a row; 576 with `fp8`.
            groups: G, the number of KV heads.
            dtype: The dtype of the rows.
            fp8: Whether to store FP8 records in place of rows of `dtype`.

        Raises:
            TypeError, ValueError: An argument has the wrong type or is out of range.
        """
        args = checks_of("FlatCache.empty")
        sizes = {"batch": batch, "capacity": capacity, "groups": groups}
        data = _storage(args, sizes, dim, dtype, fp8, (RECORD_DIM,))
        return cls(data, jnp.zeros(data.shape[0], jnp.int32))

    @property
    def capacity(self) -> int:
        """The number of tokens that a request may have."""
        return self.data.shape[-3]

    def _written(self, args: Args, rows: Any, positions: jax.Array, **changes: Any) -> Self:
        data = args.array("data", self.data, "B S G R", STORED)
        rows = _encoded(args, rows, data, "B T G R")
        data = args.restore(put_rows(data, positions, rows))
        return dataclasses.replace(self, data=data, **changes)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)  # Comparing arrays gives no bool.
class PagedCache(_Cache):
    """A cache whose requests use pages of L tokens from one pool, through a page table.

    Entry r of a request's table is the page of its tokens r*L to r*L + L-1. An entry outside 0..P-1
    maps no page. The caller assigns pages to requests before it appends:
    `dataclasses.replace(cache, page_table=...)`.

    Attributes:
        pages: The pool of pages, with the rows or the FP8 records of their tokens.
        page_table: The pages of each request.
        lengths: The number of tokens that each request holds.

    Examples:
        >>> import dataclasses, jax.numpy as jnp, jax_dsa
        >>> cache = jax_dsa.PagedCache.empty(8, 4, batch=2, pages_per_request=2, dim=96)
        >>> cache = dataclasses.replace(cache, page_table=jnp.array([[5, 0], [2, 3]]))
        >>> cache.append(jnp.ones((2, 6, 1, 96))).lengths
        Array([6, 6], dtype=int32)
    """

    pages: Float[Array, "P L G D"] | UInt8[Array, "P L G 656"] | UInt8[Array, "P L G 584"]
    page_table: Int[Array, "B R"]
    lengths: Int[Array, "B"]

    @classmethod
    def empty(
        cls,
        num_pages: int,
        page_size: int,
        batch: int,
        pages_per_request: int,
        dim: int = RECORD_DIM,
        *,
        groups: int = 1,
        dtype: Any = jnp.bfloat16,
        fp8: bool = False,
    ) -> PagedCache:
        """Returns a cache without tokens, whose page table maps no pages.

        Args:
            num_pages: P, the number of pages in the pool.
            page_size: L, the number of tokens in a page.
            batch: B, the number of requests.
            pages_per_request: The number of entries that a request has in the page table.
            dim: D, the size of a row; 576 or 512 with `fp8`.
            groups: G, the number of KV heads.
            dtype: The dtype of the rows.
            fp8: Whether to store FP8 records in place of rows of `dtype`: of 656 bytes for D = 576,
                of 584 bytes for D = 512.

        Raises:
            TypeError, ValueError: An argument has the wrong type or is out of range.
        """
        args = checks_of("PagedCache.empty")
        batch = args.integer("batch", batch, 0)
        most = LARGEST // args.integer("page_size", page_size, 1)  # Positions are int32.
        entries = args.integer("pages_per_request", pages_per_request, 0, most)
        args.integer("num_pages", num_pages, 0, most)
        sizes = {"num_pages": num_pages, "page_size": page_size, "groups": groups}
        pages = _storage(args, sizes, dim, dtype, fp8, tuple(RECORDS))
        return cls(pages, jnp.full((batch, entries), -1, jnp.int32), jnp.zeros(batch, jnp.int32))

    @property
    def capacity(self) -> int:
        """The number of tokens that a request may have."""
        return self.page_table.shape[-1] * self.pages.shape[-3]

    def _written(self, args: Args, rows: Any, positions: jax.Array, **changes: Any) -> Self:
        pages = checked_pages(args, "pages", self.pages, "G R", STORED)
        table = args.array("page_table", self.page_table, "B M", INT32)
        rows = _encoded(args, rows, pages, "B T G R")
        scales_apart = pages.dtype == jnp.uint8 and pages.shape[-1] == PAGE_RECORD_BYTES
        pages = (put_page_records if scales_apart else put_in_pages)(pages, table, positions, rows)
        return dataclasses.replace(self, pages=pages, **changes)


def checked_pages(args: Args, name: str, pages: Any, row: str, dtypes: Any) -> Array:
    """Returns the checked argument `name`: pages of rows with the dims `row`."""
    pages = args.array(name, pages, f"P L {row}", dtypes)
    args.shape(name, pages, pages.shape[1] > 0, "pages of at least one row")
    return pages
