"""Hierarchical tree attention."""

from jax_dsa.ops.htree.api import (
    HTreeSelection,
    htree_attention,
    htree_build,
    htree_decode,
    htree_select,
)
from jax_dsa.ops.htree.cache import HTreeCache

__all__ = [
    "HTreeCache",
    "HTreeSelection",
    "htree_attention",
    "htree_build",
    "htree_decode",
    "htree_select",
]
