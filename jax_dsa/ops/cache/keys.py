"""How the operators that decode read their keys: from an array, a flat cache or a paged cache."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp

from jax_dsa.core import compat
from jax_dsa.core.checks import INT32, LARGEST, Args, type_of
from jax_dsa.core.layout import PAGE_RECORD_BYTES, PAGE_RECORD_DIM, RECORD_BYTES, RECORD_DIM
from jax_dsa.core.typing import Array, Int
from jax_dsa.ops.cache.api import FlatCache, PagedCache, are_records, checked_pages, stored_dims
from jax_dsa.ops.cache.records import RECORDS


class Keys(NamedTuple):
    """The keys of a call, as the operands of a pass.

    Attributes:
        rows: [B, S, G, D], or [B, S, D] for operators whose keys have no heads. The pages of a
            paged cache are one batch entry [1, P * L, ...] that all requests share.
        lengths: the number of tokens that each request has, which may exceed S; None if the keys
            are an array and the caller gave no lengths.
        page_table: the page table of a paged cache, else None.
        page_size: L, the tokens per page; None if there are no pages.
        letter: The letter of the axis of the keys, if they are an array.
    """

    rows: Array
    lengths: Int[Array, "B"] | None
    page_table: Int[Array, "B R"] | None
    page_size: int | None
    letter: str = "S"

    def alongside(self, args: Args, name: str, x: Any, tail: str, dtypes: Any) -> Array:
        """Returns the checked argument `name`, which has one entry per key.

        Args:
            args: the checks of the call.
            name: the argument's name.
            x: values or scales, [B, S, *tail], or [P, L, *tail] where the keys are pages.
            tail: the dims of an entry.
            dtypes: the dtypes that the argument may have.

        Returns:
            The array with the leading axes of `rows`.
        """
        if self.page_table is None:
            return args.array(name, x, f"B {self.letter} {tail}", dtypes)
        x = args.array(name, x, f"P L {tail}", dtypes)
        return _pool(x)


def _pool(pages: Array) -> Array:
    """Returns pages [P, L, ...] as the one batch entry [1, P * L, ...] that all requests share."""
    pages = compat.whole_axis(pages, 1)
    return pages.reshape(pages.shape[0] * pages.shape[1], *pages.shape[2:])[None]


def read_keys(
    args: Args,
    name: str,
    keys: Any,
    dims: str,
    cache_dims: str,
    dtypes: Any,
    stored: Any = None,
    lengths: Any = None,
    fp8: str = "",
) -> Keys:
    """Returns the checked argument `name`, an array or a cache of keys.

    Args:
        args: the checks of the call.
        name: the argument's name.
        keys: the argument.
        dims: the dims of one key of an array.
        cache_dims: the dims of one row of a cache; see `read_cache`.
        dtypes: the dtypes that an array may have.
        stored: the dtypes that a cache may store; `dtypes` by default.
        lengths: the user's argument 'key_value_seq_lengths'. It must be None with a cache.
        fp8: see `read_cache`.
    """
    if isinstance(keys, FlatCache | PagedCache):
        free = lengths is None
        args.option("key_value_seq_lengths", lengths, free, "None with a cache, which has its own")
        return read_cache(args, name, keys, cache_dims, stored or dtypes, fp8=fp8)
    rows = args.array(name, keys, f"B S {dims}", dtypes)
    if lengths is not None:
        lengths = args.array("key_value_seq_lengths", lengths, "B", INT32)
    return Keys(rows, lengths, None, None)


def read_cache(
    args: Args, name: str, cache: Any, dims: str, dtypes: Any, mark: str = "", fp8: str = ""
) -> Keys:
    """Returns the checked argument `name`, a cache of keys.

    The size S becomes the number of tokens that a request may have. A second cache of a call has
    sizes of its own for pages, tokens and bytes. Their letters end with its `mark`.

    Args:
        args: the checks of the call.
        name: the argument's name.
        cache: the argument.
        dims: the dims of one row. The result has no axis G if they begin with 1.
        dtypes: the dtypes that the cache may store.
        mark: the mark of a second cache.
        fp8: how an operator that takes no FP8 records takes FP8 keys, for a message.
    """
    table, page_size = None, None
    has_one_head = dims.startswith("1 ")
    if isinstance(cache, PagedCache):
        hint = _dtype_hint(args, cache, cache.pages, dtypes, fp8)
        pages = checked_pages(args, f"{name}.pages", cache.pages, dims, dtypes, hint, mark)
        table = args.array(f"{name}.page_table", cache.page_table, f"B R{mark}", INT32)
        rows, page_size = _pool(pages), pages.shape[1]
        capacity = table.shape[1] * page_size
        args.bind(f"S{mark}", capacity, f"'{name}'")
        fits = not isinstance(capacity, int) or capacity <= LARGEST
        args.option(f"{name}.page_table", capacity, fits, "room for less than 2**31 rows")
    elif isinstance(cache, FlatCache):
        hint = _dtype_hint(args, cache, cache.data, dtypes, fp8)
        dims = stored_dims(f"B S{mark} {dims}", cache.data, mark)
        rows = args.array(f"{name}.data", cache.data, dims, dtypes, hint)
    else:
        raise TypeError(
            f"{args.op}: argument '{name}' is {type_of(cache)}, want a FlatCache or a PagedCache"
        )
    if has_one_head:
        rows = rows[:, :, 0]
    lengths = args.array(f"{name}.lengths", cache.lengths, "B", INT32)
    return Keys(rows, lengths, table, page_size)


def _dtype_hint(args: Args, cache: Any, rows: Any, dtypes: Any, fp8: str) -> str:
    """Returns the end of a message about a wrong dtype of `rows`: how to make a right cache."""
    takes_records = jnp.uint8 in dtypes
    if fp8 and are_records(rows) and not takes_records:
        return f"; {args.op} takes no FP8 records; pass {fp8}"
    make = f"{type(cache).__name__}.empty"
    hint = f"; {make}(..., dtype=jnp.{jnp.dtype(dtypes[0]).name}) makes such a cache"
    if takes_records:
        hint += f"; uint8 means FP8 records, which {make}(..., fp8=True) makes"
    e4m3 = getattr(rows, "dtype", None) == jnp.float8_e4m3fn
    if takes_records and e4m3 and rows.shape[-1:] == (PAGE_RECORD_BYTES,):
        hint += "; import_page_records takes pages of records in float8_e4m3fn"
    return hint


def check_record(args: Args, name: str, keys: Keys) -> None:
    """Raises ValueError if a cache holds FP8 records of rows that have not the D values of q."""
    dim, rows = args.sizes["D"], keys.rows
    fits = keys.page_table is not None or dim == RECORD_DIM
    if rows.dtype == jnp.uint8 and not (fits and rows.shape[-1] == RECORDS.get(dim)):
        raise ValueError(
            f"{args.op}: argument '{name}' holds rows of {rows.shape[-1]} elements of "
            f"{rows.dtype} for queries of D={dim}, want FP8 records of {RECORD_BYTES} bytes with "
            f"D={RECORD_DIM} or, in pages, of {PAGE_RECORD_BYTES} with D={PAGE_RECORD_DIM}"
        )
