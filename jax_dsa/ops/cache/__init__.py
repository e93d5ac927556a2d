"""Key caches for decoding."""

from jax_dsa.ops.cache.api import FlatCache, PagedCache, pack_records, unpack_records

__all__ = ["FlatCache", "PagedCache", "pack_records", "unpack_records"]
