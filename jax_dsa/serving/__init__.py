"""The public names for decoding: key caches, their pages, and packing of FP8 records.

The caches and the packing are defined in `jax_dsa.ops.cache`.
"""

from jax_dsa.ops.cache import (
    FlatCache,
    PagedCache,
    import_page_records,
    pack_page_records,
    pack_records,
    unpack_page_records,
    unpack_records,
)
from jax_dsa.serving.pages import OutOfPagesError, PageAllocator

__all__ = [
    "FlatCache",
    "OutOfPagesError",
    "PageAllocator",
    "PagedCache",
    "import_page_records",
    "pack_page_records",
    "pack_records",
    "unpack_page_records",
    "unpack_records",
]
