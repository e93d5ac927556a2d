"""Key caches of the decoder: pytrees of arrays, for jit, scan and sharding as they are."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp

from jax_dsa.core.layout import put_rows
from jax_dsa.core.typing import Array, Float, Int
from jax_dsa.ops.cache import FlatCache

if TYPE_CHECKING:
    from jax_dsa.nn.config import AttentionConfig, DecoderConfig, IndexerType
    from jax_dsa.nn.indexer import IndexerInputs
    from jax_dsa.ops.cache import PagedCache


class LayerCache(NamedTuple):
    """One layer's keys of up to S tokens of each request."""

    kv: FlatCache | PagedCache | None
    """What attention reads; its `lengths` count the tokens. None if the keys are another layer's.
    """
    index_k: Float[Array, "B S C"] | None
    """None in a layer without an indexer."""
    index_k_scale: Float[Array, "B S"] | None
    """Only with a quantised indexer."""

    @classmethod
    def empty(
        cls,
        config: AttentionConfig,
        batch: int,
        capacity: int,
        *,
        indexer_type: IndexerType = "full",
        fp8: bool = False,
    ) -> LayerCache:
        """Room for `capacity` tokens of each of `batch` requests; `fp8` as in `FlatCache.empty`."""
        c = config
        kv = None
        if not c.shares_keys:
            kv = FlatCache.empty(batch, capacity, c.kv_rank + c.rope_dim, dtype=c.dtype, fp8=fp8)
        if indexer_type == "shared":
            return cls(kv, None, None)
        index_dtype = jnp.float8_e4m3fn if c.index_fp8 else c.dtype
        return cls(
            kv,
            jnp.zeros((batch, capacity, c.index_dim), index_dtype),
            jnp.zeros((batch, capacity), jnp.float32) if c.index_fp8 else None,
        )

    @property
    def lengths(self) -> Int[Array, "B"]:
        """How many tokens of each request are in the cache."""
        assert self.kv is not None, "a layer that shares keys counts no tokens"
        return self.kv.lengths

    def append(
        self,
        kv: Float[Array, "B T 1 D"] | None,
        index: IndexerInputs | None,
        positions: Int[Array, "B T"],
    ) -> LayerCache:
        """The cache with T more tokens of each request, at positions that go on from its length;
        those beyond the capacity are dropped.
        """
        old = self.index_k, self.index_k_scale
        new = (None, None) if index is None else (index.index_k, index.index_k_scale)
        return LayerCache(
            None if self.kv is None or kv is None else self.kv.append(kv),
            *jax.tree.map(lambda x, y: put_rows(x, positions, y), old, new),
        )


class DecoderCache(NamedTuple):
    """The caches of all layers."""

    layers: tuple[LayerCache, ...]

    @classmethod
    def empty(
        cls, config: DecoderConfig, batch: int, capacity: int, *, fp8: bool = False
    ) -> DecoderCache:
        """Room for `capacity` tokens of each of `batch` requests; `fp8` as in `FlatCache.empty`."""
        a = config.attention
        return cls(
            tuple(
                LayerCache.empty(a, batch, capacity, indexer_type=t, fp8=fp8) for t in config.layers
            )
        )
