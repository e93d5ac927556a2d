"""The public names for decoding: flat and paged key caches, and packing of FP8 cache records.

They are defined in `jax_dsa.ops.cache`.
"""

from jax_dsa.ops.cache import *  # noqa: F403
from jax_dsa.ops.cache import __all__ as __all__
