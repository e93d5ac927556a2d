"""FP8 records: packing rows of keys into bytes and unpacking them again."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_dsa.core import layout
from jax_dsa.core.checks import FLOATS, FP8, Args
from jax_dsa.core.layout import (
    PAGE_RECORD_BLOCK,
    PAGE_RECORD_BYTES,
    PAGE_RECORD_DIM,
    PAGE_RECORD_LATENT,
    RECORD_BLOCK,
    RECORD_BYTES,
    RECORD_DIM,
    RECORD_LATENT,
    to_page_record,
    to_record_pages,
)
from jax_dsa.core.typing import Array, Float, UInt8
from jax_dsa.ops.quantize_fp8.api import quantize_fp8_op
from jax_dsa.ops.quantize_fp8.spec import INPUTS, Operands, Options

# Bytes of a record, by the D of the row that it holds.
RECORDS = {RECORD_DIM: RECORD_BYTES, PAGE_RECORD_DIM: PAGE_RECORD_BYTES}

# FlashMLA and vLLM pad pages of records to a multiple of so many bytes.
PAGE_PADDING = 576


def pack_records(rows: Float[Array, "... 576"]) -> UInt8[Array, "... 656"]:
    """Returns rows as FP8 cache records.

    The first 512 values of a row are quantised to e4m3, with one power-of-two scale per 128 values.
    The last 64 are rounded to bfloat16.

    Args:
        rows: Rows of keys; bfloat16, float16 or float32.

    Raises:
        TypeError, ValueError: `rows` has the wrong type or shape.
    """
    rows = _rows_of("pack_records", "rows", rows, INPUTS, RECORD_DIM)
    return packed(checks_of("pack_records"), rows)


def packed(args: Args, rows: Float[Array, "... 576"]) -> UInt8[Array, "... 656"]:
    """Returns `pack_records(rows)` without its checks, for the call that `args` belongs to."""
    values, scale = _quantised(args, rows[..., :RECORD_LATENT], RECORD_BLOCK)
    pieces = (values, scale, rows[..., RECORD_LATENT:].astype(jnp.bfloat16))
    as_bytes = (jax.lax.bitcast_convert_type(x, jnp.uint8) for x in pieces)
    lead = rows.shape[:-1]
    flat = [x.reshape(*lead, math.prod(x.shape[len(lead) :])) for x in as_bytes]
    return jnp.concatenate(flat, axis=-1)


def packed_for_page(args: Args, rows: Float[Array, "... 512"]) -> UInt8[Array, "... 584"]:
    """Returns each token's bytes, values and scales, which a page stores apart."""
    codes, scale = _quantised(args, rows[..., :PAGE_RECORD_LATENT], PAGE_RECORD_BLOCK)
    return to_page_record(codes, scale, rows[..., PAGE_RECORD_LATENT:])


def _quantised(
    args: Args, latent: Float[Array, "... L"], block: int
) -> tuple[Float[Array, "... L"], Float[Array, "... j"]]:
    """Returns e4m3 codes and their power-of-two scales, one per `block` values."""
    options = Options.of(latent.shape, (1, block), power_of_two_scale=True)
    codes, scale = quantize_fp8_op(args.call(None), options, Operands(latent[None]))
    return codes[0], scale[0]


def unpack_records(records: UInt8[Array, "... 656"], dtype: Any) -> Float[Array, "... 576"]:
    """Returns the rows that FP8 cache records hold.

    The result is exact in bfloat16, because the scales are powers of two.

    Args:
        records: Records as `pack_records` returns them.
        dtype: Floating dtype of the result.

    Raises:
        TypeError, ValueError: `records` has the wrong type or shape, or `dtype` is not a float.
    """
    records = _rows_of("unpack_records", "records", records, (jnp.uint8,), RECORD_BYTES)
    dtype = checks_of("unpack_records").dtype("dtype", dtype, FLOATS)
    return layout.unpack_records(records, dtype)


def pack_page_records(rows: Float[Array, "... L 512"]) -> UInt8[Array, "... L 584"]:
    """Returns pages of L tokens in the layout of a `PagedCache` with fp8 and D = 512.

    The first 448 values of a row are quantised to e4m3 and the last 64 are rounded to bfloat16. The
    scales of a page follow the values of all its L tokens, so its last two axes are one sequence of
    bytes. The rows of G KV heads lie in a page together: for the `pages` [P, L, G, 584] of a cache,
    pass rows [P, L * G, 512] and reshape the result.

    Args:
        rows: Rows of keys; bfloat16, float16 or float32.

    Raises:
        TypeError, ValueError: `rows` has the wrong type or shape.
    """
    rows = _rows_of("pack_page_records", "rows", rows, INPUTS, PAGE_RECORD_DIM, least=2)
    return to_record_pages(packed_for_page(checks_of("pack_page_records"), rows))


def unpack_page_records(pages: UInt8[Array, "... L 584"], dtype: Any) -> Float[Array, "... L 512"]:
    """Returns the rows that pages of FP8 records hold; exact in bfloat16.

    Of a cache, pass `cache.pages.reshape(P, L * G, 584)`.

    Args:
        pages: Pages as `pack_page_records` returns them.
        dtype: Floating dtype of the result.

    Raises:
        TypeError, ValueError: `pages` has the wrong type or shape, or `dtype` is not a float.
    """
    op = "unpack_page_records"
    pages = _rows_of(op, "pages", pages, (jnp.uint8,), PAGE_RECORD_BYTES, least=2)
    return layout.unpack_page_records(pages, checks_of(op).dtype("dtype", dtype, FLOATS))


def import_page_records(
    pages: UInt8[Array, "P bytes"], page_size: int, *, groups: int = 1
) -> UInt8[Array, "P L G 584"]:
    """Returns the `pages` of a `PagedCache`, given pages that may end with padding.

    FlashMLA and vLLM pad the page of L tokens to a multiple of 576 bytes, for example from 37376 to
    37440 bytes with L = 64. The first 584 * L * G bytes are the same in all of them.

    Args:
        pages: Pages of records of 584 bytes; uint8 or float8_e4m3fn, one run of bytes per page. An
            array with more axes is taken as [P, -1].
        page_size: L, the number of tokens in a page.
        groups: G, the number of KV heads.

    Raises:
        TypeError, ValueError: An argument has the wrong type, or the pages are too short or have
            576 bytes of padding or more, as with a wrong `page_size`.

    Examples:
        >>> import jax.numpy as jnp
        >>> from jax_dsa.serving import import_page_records
        >>> import_page_records(jnp.zeros((3, 37440), jnp.uint8), 64).shape
        (3, 64, 1, 584)
    """
    args = checks_of("import_page_records")
    size = args.integer("page_size", page_size, 1)
    groups = args.integer("groups", groups, 1)
    pages = args.typed("pages", pages, (jnp.uint8, FP8))
    used, width = size * groups * PAGE_RECORD_BYTES, math.prod(pages.shape[1:])
    expected = f"[P, bytes] with at least {used} bytes for L={size} and G={groups}"
    fits = pages.ndim >= 2 and used <= width < used + PAGE_PADDING
    args.shape("pages", pages, fits, f"{expected}, and less than {PAGE_PADDING} bytes of padding")
    flat = jax.lax.bitcast_convert_type(pages, jnp.uint8).reshape(pages.shape[0], width)
    return flat[:, :used].reshape(pages.shape[0], size, groups, PAGE_RECORD_BYTES)


def checks_of(op: str) -> Args:
    """Returns the checks of a function that has no leading operand."""
    return Args(op, "", np.empty(0), "K")


def _rows_of(op: str, name: str, x: Any, dtypes: Any, width: int, least: int = 1) -> Array:
    """Returns the checked argument `name`, which has at least `least` axes."""
    args = checks_of(op)
    x = args.typed(name, x, dtypes)
    expected = f"[..., {width}]" if least == 1 else f"[..., L, {width}]"
    args.shape(name, x, x.ndim >= least and x.shape[-1] == width, expected)
    return x
