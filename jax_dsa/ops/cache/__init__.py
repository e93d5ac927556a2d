"""Key caches for decoding."""

from jax_dsa.ops.cache.api import FlatCache, PagedCache
from jax_dsa.ops.cache.records import (
    import_page_records,
    pack_page_records,
    pack_records,
    unpack_page_records,
    unpack_records,
)

__all__ = [
    "FlatCache",
    "PagedCache",
    "import_page_records",
    "pack_page_records",
    "pack_records",
    "unpack_page_records",
    "unpack_records",
]
