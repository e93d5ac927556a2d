"""Key caches for decoding, flat and paged. They are immutable pytrees: an append makes a new one.

Operators that decode take a cache where others take keys. A cache stores each request's rows either
as they are or as FP8 records.

- A row of D = 576 (DeepSeek-V3.2) is a record of 656 bytes: 512 e4m3 values, 4 float32 power-of-two
  scales (one per 128 values) and 64 bfloat16 RoPE values.
- A row of D = 512 (DeepSeek-V4) is a record of 584 bytes, in pages only: 448 e4m3 values and 64
  bfloat16 RoPE values. The scales follow the values of the whole page: for each token 7 exponents
  of powers of two (one per 64 values) and a zero byte.

Requests are the batch axis, and `lengths` is the number of tokens that each request has. A cache of
a single request may have no batch axis.
"""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from jax_dsa.core import compat
from jax_dsa.core.checks import FLOATS, FP8, INT32, LARGEST, Args, as_array
from jax_dsa.core.export import exportable
from jax_dsa.core.layout import (
    PAGE_RECORD_BYTES,
    PAGE_RECORD_DIM,
    RECORD_BYTES,
    RECORD_DIM,
    put_in_pages,
    put_page_records,
    put_rows,
)
from jax_dsa.core.typing import Array, Float, Int, UInt8
from jax_dsa.ops.cache.lengths import checked_copy, extended, in_dtype_of
from jax_dsa.ops.cache.records import RECORDS, checks_of, packed, packed_for_page
from jax_dsa.ops.quantize_fp8.spec import INPUTS

__all__ = ["FlatCache", "PagedCache", "are_records", "checked_pages", "stored_dims"]

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
        """The number of tokens that can be appended to each request; 0 where none fits."""
        args, lengths = self._checked("free_tokens")
        lengths = jnp.minimum(lengths, self.capacity)
        return args.restore(jnp.maximum(self._end(self._arrays(args), lengths) - lengths, 0))

    @property
    def room(self) -> Int[Array, "B"]:
        """Deprecated name of `free_tokens`."""
        warnings.warn("room is deprecated, use free_tokens", DeprecationWarning, stacklevel=2)
        return self.free_tokens

    def with_lengths(self, lengths: Int[Array, "B"]) -> Self:
        """Returns the cache with other lengths.

        A smaller length drops the last tokens of a request, for example rejected draft tokens, and
        a length of 0 begins a new request. Rows beyond a length are never read.

        Args:
            lengths: Number of tokens to keep of each request, int32. The array is copied.

        Raises:
            TypeError, ValueError: If `lengths` has the wrong type or shape.
        """
        op = f"{type(self).__name__}.with_lengths"
        lengths = checked_copy(op, "lengths", lengths, "B", self.lengths)
        return dataclasses.replace(self, lengths=lengths)  # type: ignore[type-var]

    def append(self, rows: Float[Array, "B T G D"], counts: Int[Array, "B"] | None = None) -> Self:
        """Returns the cache with T more tokens in each request, or only the first `counts` of them.

        Rows are rounded to the dtype that the cache stores. A cache of e4m3 takes rows of e4m3,
        whose scales the caller keeps.

        Tokens that do not fit are dropped, because a traced function cannot raise. Tokens beyond
        the capacity still count: readers need the true length to know the positions of the queries.
        So `lengths > capacity` says that tokens were lost. Tokens from the first one on whose page
        is not mapped do not count, and they can be appended again once it is. The queries of such
        an append have no valid results. Compare `free_tokens` before.

        Args:
            rows: The new rows of keys.
            counts: How many of the T rows each request gets. Default: all.

        Raises:
            TypeError, ValueError: An argument has the wrong type or shape.
        """
        args, start = self._checked("append")
        arrays = self._arrays(args)
        rows = _encoded(args, rows, arrays[0])
        new: Any = rows.shape[1]
        if counts is not None:
            counts = compat.shard_as(args.array("counts", counts, "B", INT32), start)
            new = jnp.clip(counts, 0, new)
        lengths, end = extended(start, new), self._end(arrays, start)
        positions = start[:, None] + jnp.arange(rows.shape[1], dtype=jnp.int32)[None]
        fits = positions < jnp.minimum(lengths, end)[:, None]
        positions = jnp.where(fits, positions, -1)
        counted = jnp.maximum(start, jnp.minimum(lengths, end))
        lengths = jnp.where(end < self.capacity, counted, lengths)
        lengths = in_dtype_of(self.lengths, args.restore(lengths))
        return self._written(args, arrays, rows, positions, lengths=lengths)

    def update(self, rows: Float[Array, "B T G D"], positions: Int[Array, "B T"]) -> Self:
        """Returns the cache with rows written at given positions. The lengths stay the same.

        Args:
            rows: The new rows, as for `append`.
            positions: The position of each row in its request. Rows outside the cache are dropped.

        Raises:
            TypeError, ValueError: An argument has the wrong type or shape.
        """
        args, _ = self._checked("update")
        arrays = self._arrays(args)
        rows = _encoded(args, rows, arrays[0])
        positions = args.array("positions", positions, "B T", INT32)
        return self._written(args, arrays, rows, positions)

    def _checked(self, method: str) -> tuple[Args, Int[Array, "B"]]:
        """Returns the checks of a call of a method, and the lengths with a batch axis."""
        args = Args(f"{type(self).__name__}.{method}", "lengths", self.lengths, "B")
        return args, jnp.maximum(args.array("lengths", self.lengths, "B", INT32), 0)

    def _arrays(self, args: Args) -> tuple[Array, ...]:
        """Returns the checked array of rows, and that of a page table if there is one."""
        raise NotImplementedError

    def _end(self, arrays: tuple[Array, ...], lengths: Int[Array, "B"]) -> Int[Array, "B"] | int:
        """Returns the first position from `lengths` on that the cache has no place for."""
        return self.capacity

    def _written(
        self,
        args: Args,
        arrays: tuple[Array, ...],
        rows: Array,
        positions: Int[Array, "B T"],
        **changes: Any,
    ) -> Self:
        """Returns the cache with rows written at positions [B, T]; those outside it are dropped."""
        raise NotImplementedError


def _encoded(args: Args, rows: Any, stored: jax.Array) -> jax.Array:
    """Returns the checked argument 'rows' in the form that the cache stores."""
    is_record, dim = stored.dtype == jnp.uint8, stored.shape[-1]
    in_pages = dim == PAGE_RECORD_BYTES
    if is_record:
        dim = PAGE_RECORD_DIM if in_pages else RECORD_DIM
    dtypes = (FP8,) if stored.dtype == FP8 else FLOATS
    args.bind("D", dim, "the cache's records" if is_record else "the cache")
    rows = args.array("rows", rows, "B T G D", dtypes)
    if is_record:
        low = rows.dtype if rows.dtype in INPUTS else jnp.float32
        rows = compat.whole_axis(rows, -1)
        rows = (packed_for_page if in_pages else packed)(args, rows.astype(low))
    return rows.astype(stored.dtype)


@exportable
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)  # Comparing arrays gives no bool.
class FlatCache(_Cache):
    """A cache that stores up to S tokens of each request in one array.

    Attributes:
        data: The rows, or the FP8 records, of all tokens.
        lengths: The number of tokens that each request has; above S where an append lost tokens.

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
            dtype: The dtype of the rows, which is that of the queries that will read them. It has
                no effect with `fp8`.
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
        return np.shape(self.data)[-3]

    def _arrays(self, args: Args) -> tuple[Array, ...]:
        data = args.array("data", self.data, stored_dims("B S G D", self.data), STORED)
        fits = data.dtype != jnp.uint8 or data.shape[-1] == RECORD_BYTES
        args.shape("data", data, fits, f"[B, S, G, {RECORD_BYTES}] for FP8 records")
        return (data,)

    def _written(
        self,
        args: Args,
        arrays: tuple[Array, ...],
        rows: Array,
        positions: Int[Array, "B T"],
        **changes: Any,
    ) -> Self:
        data = args.restore(put_rows(arrays[0], positions, rows))
        return dataclasses.replace(self, data=data, **changes)


@exportable
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)  # Comparing arrays gives no bool.
class PagedCache(_Cache):
    """A cache whose requests use pages of L tokens from one pool, through a page table.

    Entry r of a request's table is the page of its tokens r*L to r*L + L-1. An entry outside 0..P-1
    maps no page. The caller assigns pages to requests before it appends, with `with_page_table`;
    `jax_dsa.serving.PageAllocator` keeps such a table. An append to a place without a page writes
    nothing and does not count, so a page that is mapped later shows no rows of its former request.

    Attributes:
        pages: The pool of pages, with the rows or the FP8 records of their tokens.
        page_table: The pages of each request.
        lengths: The number of tokens that each request has; above R * L where an append lost
            tokens. Set it back to R * L before the request gets a longer table.

    Examples:
        >>> import jax.numpy as jnp, jax_dsa
        >>> cache = jax_dsa.PagedCache.empty(8, 4, batch=2, pages_per_request=2, dim=96)
        >>> cache = cache.with_page_table(jnp.array([[5, 0], [2, 3]]))
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
            dtype: The dtype of the rows, which is that of the queries that will read them. It has
                no effect with `fp8`.
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
        return np.shape(self.page_table)[-1] * np.shape(self.pages)[-3]

    def with_page_table(self, page_table: Int[Array, "B R"]) -> PagedCache:
        """Returns the cache with another page table.

        Args:
            page_table: The pages of each request, int32, -1 in entries without a page. The array is
                copied.

        Raises:
            TypeError, ValueError: If `page_table` has the wrong type or shape.
        """
        op = "PagedCache.with_page_table"
        table = checked_copy(op, "page_table", page_table, "B R", self.lengths)
        return dataclasses.replace(self, page_table=table)

    def _arrays(self, args: Args) -> tuple[Array, ...]:
        pages = checked_pages(args, "pages", self.pages, "G D", STORED)
        fits = pages.dtype != jnp.uint8 or pages.shape[-1] in RECORDS.values()
        args.shape("pages", pages, fits, "[P, L, G, 656] or [P, L, G, 584] for FP8 records")
        return pages, args.array("page_table", self.page_table, "B R", INT32)

    def _end(self, arrays: tuple[Array, ...], lengths: Int[Array, "B"]) -> Int[Array, "B"]:
        pages, table = arrays
        count, size = pages.shape[:2]
        entry = jnp.arange(table.shape[1], dtype=jnp.int32)[None]
        is_missing = ((table < 0) | (table >= count)) & (entry >= lengths[:, None] // size)
        first = jnp.min(entry, axis=1, initial=table.shape[1], where=is_missing)
        return first * size

    def _written(
        self,
        args: Args,
        arrays: tuple[Array, ...],
        rows: Array,
        positions: Int[Array, "B T"],
        **changes: Any,
    ) -> Self:
        pages, table = arrays
        scales_apart = pages.dtype == jnp.uint8 and pages.shape[-1] == PAGE_RECORD_BYTES
        pages = (put_page_records if scales_apart else put_in_pages)(pages, table, positions, rows)
        return dataclasses.replace(self, pages=pages, **changes)


def are_records(rows: Any) -> bool:
    """Returns whether the unchecked rows of a cache are FP8 records."""
    return getattr(as_array(rows), "dtype", None) == jnp.uint8


def stored_dims(dims: str, rows: Any, mark: str = "") -> str:
    """Returns the dims of stored rows. FP8 records have a number of bytes in place of D."""
    return dims.replace("D", f"bytes{mark}") if are_records(rows) else dims


def checked_pages(
    args: Args, name: str, pages: Any, row: str, dtypes: Any, hint: str = "", mark: str = ""
) -> Array:
    """Returns the checked argument `name`: pages of rows with the dims `row`; see `read_cache`."""
    dims = stored_dims(f"P{mark} L{mark} {row}", pages, mark)
    pages = args.array(name, pages, dims, dtypes, hint)
    args.shape(name, pages, pages.shape[1] > 0, "pages of at least one row")
    return pages
