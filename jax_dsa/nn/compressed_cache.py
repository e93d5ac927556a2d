"""The cache of an attention layer with compressed keys."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax.numpy as jnp

from jax_dsa.core.checks import INT32, LARGEST
from jax_dsa.core.export import exportable
from jax_dsa.core.typing import Array, Bool, Float, Int
from jax_dsa.nn.arguments import check_cache, check_presence
from jax_dsa.nn.compressor import Stream
from jax_dsa.nn.ring import put_in_ring
from jax_dsa.ops.cache.lengths import checked_copy

if TYPE_CHECKING:
    from jax_dsa.core.checks import Args
    from jax_dsa.nn.compressed_config import CompressedConfig
    from jax_dsa.nn.compressor import Compressor


@exportable
class CompressedCache(NamedTuple):
    """One layer's keys of some requests.

    The keys of the window are in ring buffers, which hold `max_rollback` tokens more than the next
    token needs. So `lengths` may be set back, for each request on its own: by up to `max_rollback`
    tokens from the largest length that the request has had, or to 0 to begin a new request. After
    any other change, the request's outputs are NaN until its length is set to 0.

    Attributes:
        lengths: Number of tokens of each request, int32.
        longest: The largest length that each request has had, int32.
        recent: The last R = window - 1 + max_rollback keys, in a ring buffer; see `nn.ring`.
        compressed: The compressed keys; None if the layer has none.
        index_keys: The indexer's compressed keys; None without an indexer.
    """

    lengths: Int[Array, "B"]
    longest: Int[Array, "B"]
    recent: Float[Array, "B R D"]
    compressed: Stream | None
    index_keys: Stream | None

    def with_lengths(self, lengths: Int[Array, "B"]) -> CompressedCache:
        """Returns the cache with other lengths, for example without rejected draft tokens.

        The array is copied, so caches of several layers can get the same one and be donated.

        Args:
            lengths: Number of tokens to keep of each request, int32.

        Raises:
            TypeError: If `lengths` is not an integer array.
            ValueError: If `lengths` has the wrong shape.
        """
        op = "CompressedCache.with_lengths"
        lengths = checked_copy(op, "lengths", lengths, "B", self.lengths)
        return self._replace(lengths=lengths)

    def extended(
        self,
        window: int,
        kv: Float[Array, "B T D"],
        counts: Int[Array, "B"],
        compressed: Stream | None,
        index_keys: Stream | None,
    ) -> tuple[CompressedCache, Bool[Array, "B"]]:
        """Returns the cache with more tokens, and for which requests it is valid.

        Args:
            window: Number of keys in the layer's window.
            kv: Keys of the new tokens.
            counts: Number of new tokens of each request, int32, 0 to T.
            compressed: The compressed keys, already with the new tokens.
            index_keys: The indexer's compressed keys, already with the new tokens.
        """
        max_rollback = self.recent.shape[1] - (window - 1)
        is_new = self.lengths == 0
        is_held = (self.lengths <= self.longest) & (self.lengths >= self.longest - max_rollback)
        is_valid = is_new | (is_held & (self.lengths > 0))
        lengths = self.lengths + counts
        longest = jnp.maximum(jnp.where(is_new, 0, self.longest), lengths)
        # A request that is not valid stays so until its length is 0.
        longest = jnp.where(is_valid, longest, LARGEST)
        recent = put_in_ring(self.recent, kv, self.lengths, counts)
        return CompressedCache(lengths, longest, recent, compressed, index_keys), is_valid


def check_compressed_cache(
    args: Args,
    cache: CompressedCache,
    config: CompressedConfig,
    compressor: Compressor | None,
    index_compressor: Compressor | None,
) -> Int[Array, "B"]:
    """Returns the lengths of the argument 'cache', for the call's requests.

    Raises:
        TypeError, ValueError: If it is not a cache of a layer with this configuration.
    """
    c = config
    lengths = check_cache(args, "cache", cache, CompressedCache)
    args.array("cache.longest", cache.longest, "B", INT32)
    dtypes = (jnp.dtype(c.dtype),)
    recent = args.array("cache.recent", cache.recent, f"B R {c.head_dim}", dtypes)
    max_rollback = recent.shape[1] - (c.window - 1)
    want = f"[B, R, {c.head_dim}] with R of at least window - 1 = {c.window - 1}"
    args.shape("cache.recent", recent, max_rollback >= 0, want)
    for name, owner in (("compressed", compressor), ("index_keys", index_compressor)):
        stream = getattr(cache, name)
        check_presence(args, f"cache.{name}", stream, owner is not None)
        if owner is not None:
            owner.check_stream(args, f"cache.{name}", stream, max_rollback)
    return lengths
