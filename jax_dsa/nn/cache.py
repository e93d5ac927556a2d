"""Key caches of attention layers.

They are pytrees of arrays, so jit, scan and sharding take them as they are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_dsa.core.checks import FP8, WIDE_FLOATS, Args
from jax_dsa.core.export import exportable
from jax_dsa.core.layout import RECORD_DIM, put_in_pages, put_rows
from jax_dsa.core.typing import Array, Float, Int
from jax_dsa.nn.arguments import check_cache, check_presence, check_type
from jax_dsa.nn.cached_rows import empty_rows, with_lengths, with_page_table
from jax_dsa.nn.config import AttentionConfig, DecoderConfig
from jax_dsa.nn.grouped_cache import GroupedCache, check_grouped_cache, empty_grouped
from jax_dsa.nn.grouped_config import GroupedConfig
from jax_dsa.nn.open_pool import OpenPool, check_open_pool
from jax_dsa.ops.cache import FlatCache, PagedCache
from jax_dsa.ops.cache.records import RECORDS, checks_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from jax_dsa.nn.config import IndexerType
    from jax_dsa.nn.indexer import IndexerInputs


@exportable
class LayerCache(NamedTuple):
    """One layer's keys of up to S tokens of each request, flat or in P pages of L tokens.

    Attributes:
        kv: The rows that attention reads; its `lengths` count the tokens. None if the layer attends
            to another layer's keys.
        index_k: The indexer's keys, in the layout of `kv`, and flat if `kv` is None. None without
            an indexer. With `config.index_pool`, a row per complete pool: S // index_pool of each
            request, or L // index_pool of each page.
        index_k_scale: Scales of the indexer's keys, float32; None unless the indexer is quantised
            to FP8.
        open_pool: The tokens that the key of the next pool will be computed from; None unless the
            layer has an indexer with `config.index_pool`. If `lengths` are set to a number for
            which it lacks tokens, the request's outputs are NaN until its length is set to 0. See
            `max_rollback` of `empty`. Default: None.
    """

    kv: FlatCache | PagedCache | None
    index_k: Float[Array, "B S C"] | Float[Array, "P L C"] | None
    index_k_scale: Float[Array, "B S"] | Float[Array, "P L"] | None
    open_pool: OpenPool | None = None

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
        num_pages: int | None = None,
        max_rollback: int = 16,
    ) -> LayerCache:
        """Returns an empty cache; `DSAttention.init_cache` returns that of a layer.

        Args:
            config: Configuration of the layer.
            batch: B, number of requests.
            capacity: S, number of tokens that each request may have.
            indexer_type: The layer's indexer type; "shared" stores no indexer's keys.
            fp8: Whether to store FP8 records, as in `FlatCache.empty`.
            page_size: L, tokens per page, a multiple of `config.index_pool`; None: the cache is
                flat.
            num_pages: P, number of pages in the pool, which may be fewer than all requests need for
                their capacity. No page is mapped before `DecoderCache.with_page_table`; see
                `jax_dsa.serving.PageAllocator`. By default the pool has pages for the capacity of
                all requests, and each request owns consecutive ones.
            max_rollback: Number of tokens by which `lengths` may be set back from the largest that
                a request has had, such as the number of draft tokens per step in speculative
                decoding. Only `config.index_pool` limits it. Every multiple of `index_pool` is
                possible, too.

        Raises:
            TypeError, ValueError: If an argument has the wrong type or is out of range.
        """
        options: dict[str, Any] = {
            "fp8": fp8,
            "page_size": page_size,
            "num_pages": num_pages,
            "max_rollback": max_rollback,
        }
        return empty_layer("LayerCache.empty", config, batch, capacity, indexer_type, **options)

    @property
    def lengths(self) -> Int[Array, "B"]:
        """Number of tokens of each request in the cache, int32."""
        assert self.kv is not None, "the cache of a layer with shares_keys does not count tokens"
        return self.kv.lengths

    @property
    def free_tokens(self) -> Int[Array, "B"]:
        """The number of tokens that can be appended to each request, as in `FlatCache`, int32."""
        assert self.kv is not None, "the cache of a layer with shares_keys does not count tokens"
        return self.kv.free_tokens

    @property
    def index_keys(self) -> Array | FlatCache | PagedCache:
        """The indexer's keys in the form that `indexer_topk` takes.

        With `config.index_pool` they are fewer than `lengths`. The argument `ends` of
        `indexer_topk` must say how many pools a query may select.
        """
        assert self.index_k is not None
        if self.kv is None:
            return self.index_k
        rows = self.index_k[:, :, None]
        if isinstance(self.kv, FlatCache):
            return FlatCache(rows, self.lengths)
        return PagedCache(rows, self.kv.page_table, self.lengths)

    def with_lengths(self, lengths: Int[Array, "B"]) -> LayerCache:
        """Returns the cache with other lengths; see `DecoderCache.with_lengths`.

        A layer that attends to another layer's keys counts no tokens, so its cache stays the same.
        """
        return self.with_rows(with_lengths, "LayerCache.with_lengths", lengths)

    def with_rows(self, change: Callable[..., Any], op: str, x: Any) -> LayerCache:
        """Returns the cache with `change(op, rows, x)` in place of the rows of `kv`."""
        return self._replace(kv=change(op, self.kv, x))

    def append(
        self,
        kv: Float[Array, "B T 1 D"] | None,
        index: IndexerInputs | None,
        positions: Int[Array, "B T"],
        counts: Int[Array, "B"] | None = None,
    ) -> LayerCache:
        """Returns the cache with T more tokens of each request, or only the first `counts` of them.

        Tokens that do not fit are dropped, as in `FlatCache.append` and `PagedCache.append`.

        Args:
            kv: Rows of the new tokens; None if the layer attends to another layer's keys.
            index: The new tokens' indexer inputs; None without an indexer, and with
                `config.index_pool`, where `with_pools` stores the keys.
            positions: Positions of the new tokens, int32, which continue from `lengths`.
            counts: How many of the T tokens each request has, int32. Default: all.
        """
        if counts is not None:
            step = jnp.arange(positions.shape[1], dtype=jnp.int32)
            positions = jnp.where(step < counts[:, None], positions, -1)
        extended = None if self.kv is None or kv is None else self.kv.append(kv, counts)
        cache = self._replace(kv=extended)
        return cache if index is None else cache._with_index_keys(index, positions)

    def with_pools(
        self, index: IndexerInputs, numbers: Int[Array, "B W"], open_pool: OpenPool
    ) -> LayerCache:
        """Returns the cache with the keys of new pools.

        Args:
            index: The indexer's inputs, with one key per pool.
            numbers: Number of each pool in its request, int32; -1 if it is not complete.
            open_pool: The tokens of the pools that are not complete.
        """
        return self._with_index_keys(index, numbers)._replace(open_pool=open_pool)

    def _with_index_keys(self, index: IndexerInputs, rows: Int[Array, "B W"]) -> LayerCache:
        """Returns the cache with the indexer's keys in these rows; -1 drops a key."""

        def write(old: jax.Array, new: jax.Array) -> jax.Array:
            if isinstance(self.kv, PagedCache):
                return put_in_pages(old, self.kv.page_table, rows, new)
            return put_rows(old, rows, new)

        old, new = (self.index_k, self.index_k_scale), (index.index_k, index.index_k_scale)
        keys, scales = jax.tree.map(write, old, new)
        return self._replace(index_k=keys, index_k_scale=scales)


def check_layer_cache(
    args: Args,
    name: str,
    cache: Any,
    config: AttentionConfig | GroupedConfig,
    has_indexer: bool,
) -> None:
    """Raises unless the argument `name` is a cache of such a layer, for the call's requests.

    The rows must have the layer's dtype or be FP8 records: an append would round other rows, and
    the operators do not mix dtypes.
    """
    if isinstance(config, GroupedConfig):
        check_grouped_cache(args, name, cache, config, has_indexer)
        return
    c = config
    check_type(args.op, name, cache, LayerCache)
    check_presence(args, f"{name}.kv", cache.kv, not c.shares_keys)
    check_presence(args, f"{name}.index_k", cache.index_k, has_indexer)
    check_presence(args, f"{name}.index_k_scale", cache.index_k_scale, has_indexer and c.index_fp8)
    if cache.kv is not None:
        check_rows(args, f"{name}.kv", cache.kv, config)
    pooled = has_indexer and c.index_pool is not None
    check_presence(args, f"{name}.open_pool", cache.open_pool, pooled)
    lead = "P L" if isinstance(cache.kv, PagedCache) else "B S"
    if cache.open_pool is not None and c.index_pool is not None:
        check_open_pool(
            *(args, f"{name}.open_pool", cache.open_pool, c.index_pool, c.index_dim, c.dtype),
            has_gates=True,
        )
        if cache.kv is not None:
            tokens = args.sizes[lead[-1]]
            args.bind("W", tokens // c.index_pool, f"'{name}.kv' and index_pool")
        lead = f"{lead[0]} W"
    if cache.index_k is not None:
        dtypes = (FP8 if c.index_fp8 else jnp.dtype(c.dtype),)
        args.array(f"{name}.index_k", cache.index_k, f"{lead} {c.index_dim}", dtypes)
    if cache.index_k_scale is not None:
        args.array(f"{name}.index_k_scale", cache.index_k_scale, lead, WIDE_FLOATS)


def check_rows(args: Args, name: str, cache: Any, config: AttentionConfig) -> None:
    """Raises unless the argument `name` is a cache of the rows that such a layer attends to."""
    check_cache(args, name, cache, FlatCache, PagedCache)
    paged = isinstance(cache, PagedCache)
    name, lead = (f"{name}.pages", "P L") if paged else (f"{name}.data", "B S")
    dim = config.kv_rank + config.rope_dim
    stored: tuple[Any, ...] = (jnp.dtype(config.dtype),)
    if dim == RECORD_DIM or (paged and dim in RECORDS):
        stored += (jnp.uint8,)
    rows = args.typed(name, cache.pages if paged else cache.data, stored)
    width = RECORDS[dim] if rows.dtype == jnp.uint8 else dim
    args.array(name, rows, f"{lead} 1 {width}", stored)


@exportable
class DecoderCache(NamedTuple):
    """The caches of all layers of a decoder.

    Attributes:
        layers: One cache per layer, from the first layer on.
    """

    layers: tuple[LayerCache, ...] | tuple[GroupedCache, ...]

    @classmethod
    def empty(
        cls,
        config: DecoderConfig,
        batch: int,
        capacity: int,
        *,
        fp8: bool = False,
        page_size: int | None = None,
        num_pages: int | None = None,
        max_rollback: int = 16,
    ) -> DecoderCache:
        """Returns an empty cache for `capacity` tokens of each of `batch` requests.

        The arguments are those of `LayerCache.empty`, and `fp8` is False for grouped heads. A page
        number means the same place in every layer's pool, so all layers have the same page table.
        """
        options: dict[str, Any] = {
            "fp8": fp8,
            "page_size": page_size,
            "num_pages": num_pages,
            "max_rollback": max_rollback,
        }
        return empty_decoder("DecoderCache.empty", config, batch, capacity, **options)

    @property
    def lengths(self) -> Int[Array, "B"]:
        """Number of tokens of each request in the cache, int32; the same in every layer."""
        return self.layers[0].lengths

    @property
    def free_tokens(self) -> Int[Array, "B"]:
        """The number of tokens that can be appended to each request, int32.

        In a paged cache, only places on mapped pages count.
        """
        return self.layers[0].free_tokens

    def with_page_table(self, page_table: Int[Array, "B R"]) -> DecoderCache:
        """Returns the paged cache with another page table, the same one in every layer.

        Args:
            page_table: For each request, the numbers of its pages in the pool, int32, -1 in entries
                without a page.

        Raises:
            TypeError: If `page_table` is not an array of integers.
            ValueError: If the cache is flat, or `page_table` has the wrong shape.
        """
        return self._with_rows(with_page_table, "DecoderCache.with_page_table", page_table)

    def with_lengths(self, lengths: Int[Array, "B"]) -> DecoderCache:
        """Returns the cache with other lengths, the same ones in every layer.

        Smaller lengths drop the last tokens, for example rejected draft tokens or the padding of
        prompts. A length of 0 begins a new request. With `index_pool`, `max_rollback` of
        `LayerCache.empty` limits how far a length may be set back.

        Args:
            lengths: Number of tokens to keep of each request, int32.

        Raises:
            TypeError: If `lengths` is not an integer array.
            ValueError: If `lengths` has the wrong shape.
        """
        return self._with_rows(with_lengths, "DecoderCache.with_lengths", lengths)

    def _with_rows(self, change: Callable[..., Any], op: str, x: Any) -> DecoderCache:
        layers: Any = tuple(layer.with_rows(change, op, x) for layer in self.layers)
        return DecoderCache(layers)


def empty_layer(
    op: str,
    config: AttentionConfig,
    batch: int,
    capacity: int,
    indexer_type: IndexerType,
    *,
    fp8: bool,
    page_size: int | None,
    num_pages: int | None,
    max_rollback: int,
) -> LayerCache:
    """Returns `LayerCache.empty`, where `op` is the public function, for messages."""
    args = checks_of(op)
    check_type(op, "config", config, AttentionConfig, "such as a layer's 'config'")
    batch, capacity = args.integer("batch", batch, 0), args.integer("capacity", capacity, 0)
    c = config
    dim = c.kv_rank + c.rope_dim
    if args.flag("fp8", fp8) and not c.shares_keys:
        known = (RECORD_DIM,) if page_size is None else tuple(RECORDS)
        if dim not in known:
            raise ValueError(
                f"{op}: the configuration has kv_rank + rope_dim = {dim}, "
                f"want {' or '.join(map(str, known))} with fp8=True"
            )
    kv: FlatCache | PagedCache | None = None
    tokens: tuple[int, ...] = batch, capacity
    if not c.shares_keys:
        kv = empty_rows(
            *(args, batch, capacity, dim),
            dtype=c.dtype,
            fp8=fp8,
            page_size=page_size,
            num_pages=num_pages,
            multiple=(c.index_pool or 1, "index_pool"),
        )
        tokens = (kv.pages if isinstance(kv, PagedCache) else kv.data).shape[:2]
    max_rollback = args.integer("max_rollback", max_rollback, 0)
    if indexer_type == "shared":
        return LayerCache(kv, None, None)
    open_pool = None
    if c.index_pool is not None:
        sizes = batch, c.index_pool, c.index_dim, max_rollback
        open_pool = OpenPool.empty(*sizes, c.dtype, has_gates=True)
        tokens = tokens[0], tokens[1] // c.index_pool
    return LayerCache(
        kv,
        jnp.zeros((*tokens, c.index_dim), jnp.float8_e4m3fn if c.index_fp8 else c.dtype),
        jnp.zeros(tokens, jnp.float32) if c.index_fp8 else None,
        open_pool,
    )


def empty_decoder(
    op: str, config: DecoderConfig, batch: int, capacity: int, **options: Any
) -> DecoderCache:
    """Returns `DecoderCache.empty`, where `op` is the public function, for messages."""
    check_type(op, "config", config, DecoderConfig, "such as a model's 'config'")
    a = config.attention

    def empty(kind: IndexerType) -> Any:
        if not isinstance(a, GroupedConfig):
            return empty_layer(op, a, batch, capacity, kind, **options)
        has_indexer = kind == "full" and a.indexer is not None
        return empty_grouped(op, a, has_indexer, batch, capacity, **options)

    layers: Any = tuple(map(empty, config.layers))
    return DecoderCache(layers)
