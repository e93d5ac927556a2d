"""The cache of an attention layer with grouped heads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp

from jax_dsa.core.checks import INT32
from jax_dsa.core.export import exportable
from jax_dsa.core.layout import put_in_pages, put_rows
from jax_dsa.core.typing import Array, Float, Int
from jax_dsa.nn.arguments import check_cache, check_presence, check_type
from jax_dsa.nn.cached_rows import empty_rows, with_lengths, with_page_table
from jax_dsa.nn.grouped_config import GroupedConfig
from jax_dsa.nn.grouped_indexer import OpenBlock
from jax_dsa.nn.open_pool import check_open_pool
from jax_dsa.ops.cache import FlatCache, PagedCache
from jax_dsa.ops.cache.records import checks_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from jax_dsa.core.checks import Args


@exportable
class GroupedCache(NamedTuple):
    """One layer's keys of up to S tokens of each request, flat or in P pages of L tokens.

    Attributes:
        k: The keys; their `lengths` count the tokens.
        v: The values, in a cache of the same kind and sizes.
        index_k: The indexer's keys, in the layout of `k`. With "mean" a row per complete block:
            S // block_size of each request, or L // block_size of each page. None without an
            indexer.
        open_block: With "mean", the tokens that the key of the next block will be computed from;
            else None. If `lengths` are set to a number for which it lacks tokens, the request's
            outputs are NaN until its length is set to 0.
    """

    k: FlatCache | PagedCache
    v: FlatCache | PagedCache
    index_k: Float[Array, "B S C"] | Float[Array, "P L C"] | None
    open_block: OpenBlock | None

    @property
    def lengths(self) -> Int[Array, "B"]:
        """Number of tokens of each request in the cache, int32."""
        return self.k.lengths

    @property
    def free_tokens(self) -> Int[Array, "B"]:
        """The number of tokens that can be appended to each request, as in `FlatCache`, int32."""
        return self.k.free_tokens

    @property
    def index_keys(self) -> FlatCache | PagedCache:
        """The indexer's keys in the form that operators take.

        With "mean" they are fewer than `lengths`, so the operators need `ends`.
        """
        assert self.index_k is not None
        rows = self.index_k[:, :, None]
        if isinstance(self.k, FlatCache):
            return FlatCache(rows, self.lengths)
        return PagedCache(rows, self.k.page_table, self.lengths)

    def with_lengths(self, lengths: Int[Array, "B"]) -> GroupedCache:
        """Returns the cache with other lengths.

        Smaller lengths drop the last tokens, for example rejected draft tokens or the padding of
        prompts. A length of 0 begins a new request. With "mean", `max_rollback` of
        `GroupedAttention.init_cache` limits how far a length may be set back.

        Args:
            lengths: Number of tokens to keep of each request, int32.

        Raises:
            TypeError: If `lengths` is not an integer array.
            ValueError: If `lengths` has the wrong shape.
        """
        return self.with_rows(with_lengths, "GroupedCache.with_lengths", lengths)

    def with_page_table(self, page_table: Int[Array, "B R"]) -> GroupedCache:
        """Returns the paged cache with another page table.

        Args:
            page_table: For each request, the numbers of its pages in the pool, int32, -1 in entries
                without a page.

        Raises:
            TypeError: If `page_table` is not an array of integers.
            ValueError: If the cache is flat, or `page_table` has the wrong shape.
        """
        return self.with_rows(with_page_table, "GroupedCache.with_page_table", page_table)

    def with_rows(self, change: Callable[..., Any], op: str, x: Any) -> GroupedCache:
        """Returns the cache with `change(op, rows, x)` in place of the rows of `k` and `v`."""
        return self._replace(k=change(op, self.k, x), v=change(op, self.v, x))

    def append(
        self,
        k: Float[Array, "B T G D"],
        v: Float[Array, "B T G D"],
        counts: Int[Array, "B"] | None = None,
    ) -> GroupedCache:
        """Returns the cache with T more keys and values of each request, or the first `counts`.

        Tokens that do not fit are dropped, as in `FlatCache.append` and `PagedCache.append`.
        """
        return self._replace(k=self.k.append(k, counts), v=self.v.append(v, counts))

    def with_index_keys(self, keys: Float[Array, "B W C"], rows: Int[Array, "B W"]) -> GroupedCache:
        """Returns the cache with the indexer's keys in these rows of each request; -1 drops one."""
        assert self.index_k is not None
        if isinstance(self.k, PagedCache):
            return self._replace(index_k=put_in_pages(self.index_k, self.k.page_table, rows, keys))
        return self._replace(index_k=put_rows(self.index_k, rows, keys))


def empty_grouped(
    op: str,
    config: GroupedConfig,
    has_indexer: bool,
    batch: int,
    capacity: int,
    *,
    fp8: bool = False,
    page_size: int | None,
    num_pages: int | None,
    max_rollback: int,
) -> GroupedCache:
    """Returns an empty cache; the arguments are those of `GroupedAttention.init_cache`.

    `fp8` must be False. A decoder has this argument for layers that can store FP8 records.
    """
    args, c = checks_of(op), config
    args.option("fp8", fp8, not args.flag("fp8", fp8), "False with grouped heads")
    batch, capacity = args.integer("batch", batch, 0), args.integer("capacity", capacity, 0)
    max_rollback = args.integer("max_rollback", max_rollback, 0)
    pooled = has_indexer and c.indexer == "mean"
    k, v = (
        empty_rows(
            *(args, batch, capacity, c.head_dim),
            groups=c.kv_heads,
            dtype=c.dtype,
            page_size=page_size,
            num_pages=num_pages,
            multiple=(c.block_size if pooled else 1, "block_size"),
        )
        for _ in range(2)
    )
    if not has_indexer:
        return GroupedCache(k, v, None, None)
    rows, tokens = (k.pages if isinstance(k, PagedCache) else k.data).shape[:2]
    open_block = None
    if pooled:
        open_block = OpenBlock.empty(c, batch, max_rollback)
        tokens //= c.block_size
    return GroupedCache(k, v, jnp.zeros((rows, tokens, c.index_dim), c.dtype), open_block)


def check_grouped_cache(
    args: Args, name: str, cache: GroupedCache, config: GroupedConfig, has_indexer: bool
) -> Int[Array, "B"]:
    """Returns the lengths of the argument `name`, for the call's requests.

    Raises:
        TypeError, ValueError: If it is not a cache of a layer with this configuration.
    """
    c, dtypes = config, (jnp.dtype(config.dtype),)
    check_type(args.op, name, cache, GroupedCache)
    lengths = check_cache(args, f"{name}.k", cache.k, FlatCache, PagedCache)
    check_cache(args, f"{name}.v", cache.v, type(cache.k))
    paged = isinstance(cache.k, PagedCache)
    field, lead = ("pages", "P L") if paged else ("data", "B S")
    for part in ("k", "v"):
        rows = getattr(getattr(cache, part), field)
        args.array(f"{name}.{part}.{field}", rows, f"{lead} {c.kv_heads} {c.head_dim}", dtypes)
    pooled = has_indexer and c.indexer == "mean"
    check_presence(args, f"{name}.index_k", cache.index_k, has_indexer)
    check_presence(args, f"{name}.open_block", cache.open_block, pooled)
    if (state := cache.open_block) is not None:
        size, inner = c.block_size, f"{name}.open_block"
        check_type(args.op, inner, state, OpenBlock)
        check_open_pool(
            *(args, f"{inner}.keys", state.keys, size, c.index_dim, c.dtype), has_gates=False
        )
        axes = 1 if c.mrope_sections is None else 3
        args.array(f"{inner}.positions", state.positions, f"B R {axes}", INT32)
        args.bind("W", args.sizes[lead[-1]] // size, f"'{name}.k' and block_size")
        lead = f"{lead[0]} W"
    if cache.index_k is not None:
        args.array(f"{name}.index_k", cache.index_k, f"{lead} {c.index_dim}", dtypes)
    return lengths
