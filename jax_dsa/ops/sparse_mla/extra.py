"""The second cache of `sparse_mla_decode`: its arguments, checks and operands."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp

from jax_dsa.core.arguments import selection
from jax_dsa.core.checks import Args
from jax_dsa.core.deferred import Deferred
from jax_dsa.core.typing import Array, Int
from jax_dsa.ops.cache.keys import check_record, read_cache


class Extra(NamedTuple):
    """The arguments of a call that belong to its second cache, unchecked."""

    cache: Any
    indices: Any
    topk_length: Any
    key_stride: Any

    def checked(
        self, args: Args, dtype: Any, is_causal: bool, lengths: Int[Array, "B"] | None
    ) -> tuple[int | None, dict[str, Any]]:
        """Returns the page size of the second cache, and its operands by name.

        Args:
            args: the checks of the call, after those of the queries and of the first cache.
            dtype: the dtype of the queries.
            is_causal: the user's argument, checked.
            lengths: the lengths of the first cache, which say where the queries are.
        """
        stride = args.integer("extra_key_stride", self.key_stride, 1)
        if self.cache is None:
            for name, given in (("indices", self.indices), ("topk_length", self.topk_length)):
                want = "None without 'extra_cache'; pass the cache that it belongs to"
                args.option(f"extra_{name}", given, given is None, want)
            want = "1 without 'extra_cache'; the first cache has one token per key"
            args.option("extra_key_stride", stride, stride == 1, want)
            return None, {}
        want = "the positions in 'extra_cache' that each query selects, int32 [B, T, K2]"
        args.option("extra_indices", self.indices, self.indices is not None, want)
        keys = read_cache(args, "extra_cache", self.cache, "G D", (dtype, jnp.uint8), mark="2")
        check_record(args, "extra_cache", keys)
        indices, topk_length = selection(args, self.indices, self.topk_length, "extra_", "K2")
        sizes = (args.batch, args.sizes["T"]), args.sizes["S2"], stride
        given = (keys.lengths, lengths if is_causal else None)
        return keys.page_size, {
            "extra_kv": keys.rows,
            "extra_indices": indices,
            "extra_ends": Deferred(_ends, given, sizes),
            "extra_topk_length": topk_length,
            "extra_page_table": keys.page_table,
        }


def _ends(
    entries: Array, lengths: Array | None, shape: tuple[int, int], size: int, stride: int
) -> Int[Array, "B T"]:
    """Returns one past the last entry of the second cache that each query sees.

    Args:
        entries: the number of entries that each request has.
        lengths: the number of tokens that each request has, the last T of which are the queries'
            own; None if the queries see all entries.
        shape: (B, T).
        size: the number of entries that a request may have.
        stride: the number of tokens per entry.
    """
    ends = jnp.broadcast_to(jnp.clip(entries, 0, size)[:, None], shape)
    if lengths is None:
        return ends
    before = jnp.maximum(lengths, 0)[:, None] - shape[1]  # tokens before the first query
    tokens = before + jnp.arange(1, shape[1] + 1, dtype=jnp.int32)[None]
    return jnp.minimum(ends, jnp.maximum(tokens, 0) // stride)
