"""Key caches for decoding, flat and paged: immutable pytrees, of which an append makes a new one.

Operators that decode take a cache where others take keys. A cache holds each request's rows either
as they are or as FP8 records. Those of D = 576 (DeepSeek-V3.2) are 656 bytes: 512 e4m3 values, 4
float32 power-of-two scales (one per 128 values), 64 bfloat16 RoPE values. Those of D = 512
(DeepSeek-V4) are 584 bytes, in pages only: 448 e4m3 values, 64 bfloat16 RoPE values and, after
those of the whole page, 7 exponents of powers of two (one per 64 values) and a zero. Requests are
the batch axis; `lengths` says how many tokens each holds. A cache may also be a single request's,
without that axis.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np

from jax_dsa.core import layout
from jax_dsa.core.checks import FLOATS, FP8, INT32, LARGEST, Args
from jax_dsa.core.layout import (
    PAGE_RECORD_BLOCK,
    PAGE_RECORD_BYTES,
    PAGE_RECORD_DIM,
    PAGE_RECORD_LATENT,
    RECORD_BLOCK,
    RECORD_BYTES,
    RECORD_DIM,
    RECORD_LATENT,
    put_in_pages,
    put_page_records,
    put_rows,
    to_page_record,
    to_record_pages,
)
from jax_dsa.core.typing import Array, Float, Int, UInt8
from jax_dsa.ops.quantize_fp8.api import quantize_fp8_op
from jax_dsa.ops.quantize_fp8.spec import INPUTS, Operands, Options

__all__ = [
    "CachedKeys",
    "FlatCache",
    "PagedCache",
    "cached_keys",
    "check_row",
    "pack_page_records",
    "pack_records",
    "unpack_page_records",
    "unpack_records",
]

STORED = (*FLOATS, FP8, jnp.uint8)
_RECORDS = {RECORD_DIM: RECORD_BYTES, PAGE_RECORD_DIM: PAGE_RECORD_BYTES}


def pack_records(rows: Float[Array, "... 576"]) -> UInt8[Array, "... 656"]:
    """Rows as FP8 cache records: 512 values quantised, the last 64 rounded to bfloat16.

    Raises:
        TypeError, ValueError: `rows` has the wrong type or shape.
    """
    rows = _rows_of("pack_records", "rows", rows, INPUTS, RECORD_DIM)
    return _packed(_checks("pack_records"), rows)


def _packed(args: Args, rows: Float[Array, "... 576"]) -> UInt8[Array, "... 656"]:
    """`pack_records` without its checks, as part of what `args` belong to."""
    values, scale = _quantised(args, rows[..., :RECORD_LATENT], RECORD_BLOCK)
    parts = (values, scale, rows[..., RECORD_LATENT:].astype(jnp.bfloat16))
    as_bytes = (jax.lax.bitcast_convert_type(x, jnp.uint8) for x in parts)
    lead = rows.shape[:-1]
    flat = [x.reshape(*lead, math.prod(x.shape[len(lead) :])) for x in as_bytes]
    return jnp.concatenate(flat, axis=-1)


def _packed_for_page(args: Args, rows: Float[Array, "... 512"]) -> UInt8[Array, "... 584"]:
    """The tokens' bytes, of each side by side."""
    codes, scale = _quantised(args, rows[..., :PAGE_RECORD_LATENT], PAGE_RECORD_BLOCK)
    return to_page_record(codes, scale, rows[..., PAGE_RECORD_LATENT:])


def _quantised(
    args: Args, latent: Float[Array, "... L"], block: int
) -> tuple[Float[Array, "... L"], Float[Array, "... j"]]:
    """Codes and power-of-two scales."""
    options = Options.of(latent.shape, (1, block), power_of_two_scale=True)
    codes, scale = quantize_fp8_op(args.call(None), options, Operands(latent[None]))
    return codes[0], scale[0]


def unpack_records(records: UInt8[Array, "... 656"], dtype: Any) -> Float[Array, "... 576"]:
    """The rows that FP8 cache records hold; exact in bfloat16, the scales being powers of two.

    Raises:
        TypeError, ValueError: `records` has the wrong type or shape, or `dtype` is no float's.
    """
    records = _rows_of("unpack_records", "records", records, (jnp.uint8,), RECORD_BYTES)
    return layout.unpack_records(records, _checks("unpack_records").dtype("dtype", dtype, FLOATS))


def pack_page_records(rows: Float[Array, "... L 512"]) -> UInt8[Array, "... L 584"]:
    """Pages of L tokens as a `PagedCache` has them with fp8 and D = 512: of each row 448 values
    quantised and the last 64 rounded to bfloat16; the scales lie after the values of all L tokens,
    so the last two axes are one run of bytes.

    Raises:
        TypeError, ValueError: `rows` has the wrong type or shape.
    """
    rows = _rows_of("pack_page_records", "rows", rows, INPUTS, PAGE_RECORD_DIM, least=2)
    return to_record_pages(_packed_for_page(_checks("pack_page_records"), rows))


def unpack_page_records(pages: UInt8[Array, "... L 584"], dtype: Any) -> Float[Array, "... L 512"]:
    """The rows that pages of `pack_page_records` hold; exact in bfloat16.

    Raises:
        TypeError, ValueError: `pages` has the wrong type or shape, or `dtype` is no float's.
    """
    op = "unpack_page_records"
    pages = _rows_of(op, "pages", pages, (jnp.uint8,), PAGE_RECORD_BYTES, least=2)
    return layout.unpack_page_records(pages, _checks(op).dtype("dtype", dtype, FLOATS))


def _checks(op: str) -> Args:
    """Checks for a function without an operand that leads."""
    return Args(op, "", np.empty(0), "K")


def _rows_of(op: str, name: str, x: Any, dtypes: Any, width: int, least: int = 1) -> Array:
    """The argument `name`, of any rank from `least` on."""
    args = _checks(op)
    x = args.typed(name, x, dtypes)
    want = f"[..., {width}]" if least == 1 else f"[..., L, {width}]"
    args.shape(name, x, x.ndim >= least and x.shape[-1] == width, want)
    return x


def _storage(
    args: Args, sizes: dict[str, Any], dim: Any, dtype: Any, fp8: Any, records: tuple[int, ...]
) -> Array:
    """Zeros of the axes `sizes`, at least 0 each, and what one row is stored as: with `fp8` one of
    the records for D in `records`.
    """
    shape = [args.integer(name, size, 0) for name, size in sizes.items()]
    width, dtype = args.integer("dim", dim, 1), args.dtype("dtype", dtype, STORED)
    if args.flag("fp8", fp8):
        want = " or ".join(map(str, records))
        args.option("dim", dim, width in records, f"{want} with fp8=True")
        width, dtype = _RECORDS[width], jnp.uint8
    return jnp.zeros((*shape, width), dtype)


class _Cache:
    """What both caches do alike."""

    lengths: Int[Array, "B"]

    @property
    def capacity(self) -> int:
        """Tokens that a request may have."""
        raise NotImplementedError

    @property
    def free_tokens(self) -> Int[Array, "B"]:
        """How many more tokens each request has room for; 0 where the cache is full."""
        return self.capacity - jnp.clip(self.lengths, 0, self.capacity)

    @property
    def room(self) -> Int[Array, "B"]:
        """Deprecated name of `free_tokens`."""
        warnings.warn("room is deprecated, use free_tokens", DeprecationWarning, stacklevel=2)
        return self.free_tokens

    def append(self, rows: Float[Array, "B T G D"], counts: Int[Array, "B"] | None = None) -> Self:
        """The cache with T more tokens of each request, or the first `counts` of them.

        Rows are rounded to what the cache stores; a cache of e4m3 takes rows of e4m3, whose scales
        are the caller's. Tokens for which there is no `room` are dropped, and the length stays at
        the capacity: a traced function cannot raise. Compare before.
        """
        args = Args(f"{type(self).__name__}.append", "rows", rows, "B T G D")
        lengths = args.array("lengths", self.lengths, "B", INT32)
        lengths = jnp.clip(lengths, 0, self.capacity)
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
        """The cache with rows written at given positions of each request; the lengths stay.

        Rows are as in `append`. Tokens for which there is no room are dropped.
        """
        args = Args(f"{type(self).__name__}.update", "rows", rows, "B T G D")
        args.array("lengths", self.lengths, "B", INT32)
        positions = args.array("positions", positions, "B T", INT32)
        return self._written(args, rows, positions)

    def _written(self, args: Args, rows: Any, positions: jax.Array, **changes: Any) -> Self:
        """The cache with rows at positions [B, T], some of which may lie outside it."""
        raise NotImplementedError


def _encoded(args: Args, rows: Any, stored: jax.Array, dims: str) -> jax.Array:
    """New rows as the cache stores them, checked against it."""
    rows = args.typed("rows", rows, (FP8,) if stored.dtype == FP8 else FLOATS)
    if stored.dtype == jnp.uint8:
        in_pages = stored.shape[-1] == PAGE_RECORD_BYTES
        dim = PAGE_RECORD_DIM if in_pages else RECORD_DIM
        args.shape("rows", rows, rows.shape[-1:] == (dim,), f"[B, T, G, {dim}]")
        low = rows.dtype if rows.dtype in INPUTS else jnp.float32
        rows = (_packed_for_page if in_pages else _packed)(args, rows.astype(low))
    rows = rows.astype(stored.dtype)
    return args.array("rows", rows, dims, (stored.dtype,))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)  # equality of arrays is no bool
class FlatCache(_Cache):
    """Room for S tokens of each request, side by side.

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
        """A cache without tokens; with `fp8` it holds records in place of rows of `dtype`."""
        args = _checks("FlatCache.empty")
        sizes = {"batch": batch, "capacity": capacity, "groups": groups}
        data = _storage(args, sizes, dim, dtype, fp8, (RECORD_DIM,))
        return cls(data, jnp.zeros(data.shape[0], jnp.int32))

    @property
    def capacity(self) -> int:
        """Tokens that a request may have."""
        return self.data.shape[-3]

    def _written(self, args: Args, rows: Any, positions: jax.Array, **changes: Any) -> Self:
        data = args.array("data", self.data, "B S G R", STORED)
        rows = _encoded(args, rows, data, "B T G R")
        data = args.restore(put_rows(data, positions, rows))
        return dataclasses.replace(self, data=data, **changes)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)  # equality of arrays is no bool
class PagedCache(_Cache):
    """Pages of L tokens from one pool, which a table deals out to the requests.

    Entry r of a request's table is the page of its tokens r*L to r*L + L-1; anything outside 0..P-1
    is not mapped. Which request has which page is for the caller to decide, before it appends:
    `dataclasses.replace(cache, page_table=...)`.

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
        """A pool of pages, none mapped; with `fp8` of records in place of rows of `dtype`: of 656
        bytes for D = 576, of 584 for D = 512.
        """
        args = _checks("PagedCache.empty")
        batch = args.integer("batch", batch, 0)
        most = LARGEST // args.integer("page_size", page_size, 1)  # positions are int32
        room = args.integer("pages_per_request", pages_per_request, 0, most)
        args.integer("num_pages", num_pages, 0, most)
        sizes = {"num_pages": num_pages, "page_size": page_size, "groups": groups}
        pages = _storage(args, sizes, dim, dtype, fp8, tuple(_RECORDS))
        return cls(pages, jnp.full((batch, room), -1, jnp.int32), jnp.zeros(batch, jnp.int32))

    @property
    def capacity(self) -> int:
        """Tokens that a request may have."""
        return self.page_table.shape[-1] * self.pages.shape[-3]

    def _written(self, args: Args, rows: Any, positions: jax.Array, **changes: Any) -> Self:
        pages = _pages(args, "pages", self.pages, "G R", STORED)
        table = args.array("page_table", self.page_table, "B M", INT32)
        rows = _encoded(args, rows, pages, "B T G R")
        split = pages.dtype == jnp.uint8 and pages.shape[-1] == PAGE_RECORD_BYTES
        pages = (put_page_records if split else put_in_pages)(pages, table, positions, rows)
        return dataclasses.replace(self, pages=pages, **changes)


def _pages(args: Args, name: str, pages: Any, row: str, dtypes: Any) -> Array:
    """The argument `name`, pages of rows of the axes `row`."""
    pages = args.array(name, pages, f"P L {row}", dtypes)
    args.shape(name, pages, pages.shape[1] > 0, "pages of at least one row")
    return pages


class CachedKeys(NamedTuple):
    """A cache as the operators that decode read it.

    Attributes:
        rows: [B, S, G, R], or a pool [1, P * L, G, R] of P pages, which all requests share.
        lengths: tokens that each request holds.
        page_table: of a paged cache.
        page_size: L, 1 if it is not paged.
    """

    rows: Array
    lengths: Int[Array, "B"]
    page_table: Int[Array, "B M"] | None
    page_size: int


def cached_keys(args: Args, name: str, cache: Any, row: str, dtypes: Any) -> CachedKeys:
    """The argument `name`, a cache of rows of the axes `row`. S is how many tokens a request may
    have.
    """
    if isinstance(cache, PagedCache):
        pages = _pages(args, f"{name}.pages", cache.pages, row, dtypes)
        table = args.array(f"{name}.page_table", cache.page_table, "B M", INT32)
        count, size = pages.shape[:2]
        rows = pages.reshape(count * size, *pages.shape[2:])[None]
        args.sizes["S"] = table.shape[1] * size
        room = args.sizes["S"]
        fits = not isinstance(room, int) or room <= LARGEST
        args.option(f"{name}.page_table", room, fits, "room for less than 2**31 rows")
    elif isinstance(cache, FlatCache):
        rows = args.array(f"{name}.data", cache.data, f"B S {row}", dtypes)
        table, size = None, 1
    else:
        raise TypeError(
            f"{args.op}: argument '{name}' is {type(cache).__name__}, want a FlatCache or a "
            f"PagedCache"
        )
    lengths = args.array(f"{name}.lengths", cache.lengths, "B", INT32)
    return CachedKeys(rows, lengths, table, size)


def check_row(args: Args, name: str, keys: CachedKeys) -> None:
    """Raises unless the cache's rows have q's D values, or are FP8 records of that many."""
    dim, rows = args.sizes["D"], keys.rows
    fits, rule = rows.shape[-1] == dim, f"D={dim}"
    if rows.dtype == jnp.uint8:
        paged = keys.page_table is not None
        fits = rows.shape[-1] == _RECORDS.get(dim) and (paged or dim == RECORD_DIM)
        rule = (
            f"FP8 records of {RECORD_BYTES} bytes with D={RECORD_DIM} or, in pages, of "
            f"{PAGE_RECORD_BYTES} with D={PAGE_RECORD_DIM}"
        )
    if not fits:
        raise ValueError(
            f"{args.op}: argument '{name}' holds rows of {rows.shape[-1]} elements of "
            f"{rows.dtype} for queries of D={dim}, want {rule}"
        )
