"""Key caches of the decoder: pytrees of arrays, for jit, scan and sharding as they are."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_dsa.core.checks import Args
from jax_dsa.core.layout import put_in_pages, put_rows
from jax_dsa.core.typing import Array, Float, Int
from jax_dsa.ops.cache import FlatCache, PagedCache

if TYPE_CHECKING:
    from jax_dsa.nn.config import AttentionConfig, DecoderConfig, IndexerType
    from jax_dsa.nn.indexer import IndexerInputs


class LayerCache(NamedTuple):
    """One layer's keys of up to S tokens of each request, flat or in P pages of L tokens."""

    kv: FlatCache | PagedCache | None
    """What attention reads; its `lengths` count the tokens, and the indexer's keys lie as its. None
    if the keys are another layer's: the indexer's are flat then."""
    index_k: Float[Array, "B S C"] | Float[Array, "P L C"] | None
    """None in a layer without an indexer."""
    index_k_scale: Float[Array, "B S"] | Float[Array, "P L"] | None
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
        page_size: int | None = None,
    ) -> LayerCache:
        """Room for `capacity` tokens of each of `batch` requests; `fp8` as in `FlatCache.empty`.

        With a `page_size` it is paged: of the pool each request has the pages for its room, one
        after the other. `DecoderCache.with_page_table` deals them out anew.
        """
        c = config
        dim = c.kv_rank + c.rope_dim
        places = batch, capacity
        kv: FlatCache | PagedCache | None = None
        if not c.shares_keys and page_size is None:
            kv = FlatCache.empty(*places, dim, dtype=c.dtype, fp8=fp8)
        elif not c.shares_keys:
            page_size = Args("LayerCache.empty", "", np.empty(0), "K").integer(
                "page_size", page_size, 1
            )
            room = -(-capacity // page_size)
            places = batch * room, page_size
            kv = PagedCache.empty(*places, batch, room, dim, dtype=c.dtype, fp8=fp8)
            table = jnp.arange(batch * room, dtype=jnp.int32).reshape(batch, room)
            kv = dataclasses.replace(kv, page_table=table)
        if indexer_type == "shared":
            return cls(kv, None, None)
        index_dtype = jnp.float8_e4m3fn if c.index_fp8 else c.dtype
        return cls(
            kv,
            jnp.zeros((*places, c.index_dim), index_dtype),
            jnp.zeros(places, jnp.float32) if c.index_fp8 else None,
        )

    @property
    def lengths(self) -> Int[Array, "B"]:
        """How many tokens of each request are in the cache."""
        assert self.kv is not None, "a layer that shares keys counts no tokens"
        return self.kv.lengths

    @property
    def index_keys(self) -> Array | FlatCache | PagedCache:
        """The indexer's keys, as `indexer_topk` takes them."""
        assert self.index_k is not None
        if self.kv is None:
            return self.index_k
        rows = self.index_k[:, :, None]
        if isinstance(self.kv, FlatCache):
            return FlatCache(rows, self.lengths)
        return PagedCache(rows, self.kv.page_table, self.lengths)

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

        def put(rows: jax.Array, more: jax.Array) -> jax.Array:
            if isinstance(self.kv, PagedCache):
                return put_in_pages(rows, self.kv.page_table, positions, more)
            return put_rows(rows, positions, more)

        grown = None if self.kv is None or kv is None else self.kv.append(kv)
        return LayerCache(grown, *jax.tree.map(put, old, new))


class DecoderCache(NamedTuple):
    """The caches of all layers."""

    layers: tuple[LayerCache, ...]

    @classmethod
    def empty(
        cls,
        config: DecoderConfig,
        batch: int,
        capacity: int,
        *,
        fp8: bool = False,
        page_size: int | None = None,
    ) -> DecoderCache:
        """Room for `capacity` tokens of each of `batch` requests, as in `LayerCache.empty`."""
        options: dict[str, Any] = {"fp8": fp8, "page_size": page_size}
        return cls(
            tuple(
                LayerCache.empty(config.attention, batch, capacity, indexer_type=t, **options)
                for t in config.layers
            )
        )

    def with_page_table(self, page_table: Int[Array, "B R"]) -> DecoderCache:
        """The paged cache with another table, the same in every layer.

        Raises:
            ValueError: the cache is flat.
        """

        def dealt(layer: LayerCache) -> LayerCache:
            if not isinstance(layer.kv, PagedCache):
                raise ValueError(
                    "DecoderCache.with_page_table: the cache is flat and has no table, want one "
                    "made with a page_size"
                )
            # A copy, since a buffer that several arrays share cannot be donated.
            return layer._replace(kv=dataclasses.replace(layer.kv, page_table=page_table.copy()))

        return DecoderCache(tuple(dealt(layer) for layer in self.layers))
