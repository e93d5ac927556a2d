"""What a decode step needs around the operators: key caches, flat and paged."""

from jax_dsa.serving.caches import FlatCache, PagedCache, pack_records, unpack_records

__all__ = ["FlatCache", "PagedCache", "pack_records", "unpack_records"]
