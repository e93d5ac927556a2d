"""What a decode step needs around the operators: key caches, flat and paged, and FP8 records."""

from jax_dsa.ops.cache import (
    FlatCache,
    PagedCache,
    pack_page_records,
    pack_records,
    unpack_page_records,
    unpack_records,
)

__all__ = [
    "FlatCache",
    "PagedCache",
    "pack_page_records",
    "pack_records",
    "unpack_page_records",
    "unpack_records",
]
