"""Attention to a window of keys and to compressed keys, as in DeepSeek-V4.

Every `ratio` tokens are pooled into one compressed key. A query attends, in one softmax with a
sink, to the last `window` keys and to compressed keys of complete blocks before it: those that an
indexer selects, or all of them. A key is also the value, so the heads' outputs contain rotated
elements. They are rotated back by the query's position before the output projection.

Source: DeepSeek-V4 (2026), section 2.3; its configuration and names in `transformers`.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jax_dsa.core import compat
from jax_dsa.core.checks import Args
from jax_dsa.core.documents import block_range
from jax_dsa.core.export import exportable
from jax_dsa.core.streaming import chunk_length, scan_chunks
from jax_dsa.core.typing import Array, Float, Int
from jax_dsa.nn.arguments import (
    check_module,
    hidden_states,
    selected_keys,
    token_counts,
)
from jax_dsa.nn.compressed_attend import attend, attend_to_caches
from jax_dsa.nn.compressed_cache import CompressedCache, check_compressed_cache
from jax_dsa.nn.compressed_config import CompressedConfig
from jax_dsa.nn.compressed_indexer import CompressedIndexer
from jax_dsa.nn.compressor import Compressor
from jax_dsa.nn.positions import token_positions
from jax_dsa.nn.ring import rows_after_concatenation
from jax_dsa.nn.scopes import Linear, Module, RMSNorm, scoped
from jax_dsa.ops.attn_dist import attn_dist
from jax_dsa.ops.indexer import indexer_selected_logits, indexer_topk
from jax_dsa.ops.losses import dense_indexer_kl_loss, indexer_kl_loss


@exportable
class CompressedAux(NamedTuple):
    """What a layer returns beside its output.

    Under `jax.jit`, results that nothing reads cost nothing.

    Attributes:
        kl: The indexer's loss, in nats, the mean over queries. In sparse attention it compares the
            selected compressed keys, in the warm-up all compressed keys. None without an indexer.
        lse: Log of the sum of exponentials of each head's scores, float32.
        indices: The compressed keys that each query attended to, int32, -1 in empty slots. None in
            the indexer's warm-up, and if the layer has no compressed keys.
    """

    kl: Float[Array, ""] | None
    lse: Float[Array, "B T N"]
    indices: Int[Array, "B T K"] | None


class CompressedAttention(Module):
    """Attention to the last `window` keys and to compressed keys; see `CompressedConfig`.

    The indexer's own loss, `aux.kl`, trains the indexer's parameters and no others. No other loss
    has a gradient for them.

    Args:
        config: Sizes and switches of the layer.
        rngs: Random streams that initialise the parameters.

    Examples:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from jax_dsa import nn
        >>> config = nn.CompressedConfig(
        ...     model_dim=16, num_heads=2, q_rank=8, head_dim=8, rope_dim=4, out_groups=1,
        ...     out_rank=8, window=4, ratio=2, top_k=3, index_dim=8,
        ... )
        >>> layer = nn.CompressedAttention(config, rngs=nnx.Rngs(0))
        >>> y, aux = layer(jnp.ones((1, 6, 16)))
        >>> y.shape, aux.indices[0, -1].tolist()
        ((1, 6, 16), [0, 1, 2])
    """

    def __init__(self, config: CompressedConfig, *, rngs: nnx.Rngs) -> None:
        check_module("CompressedAttention", config, CompressedConfig, rngs)
        self.config = config
        c = config
        linear = {"use_bias": False, "dtype": c.dtype, "rngs": rngs}
        norm = {"epsilon": c.norm_eps, "dtype": c.dtype, "rngs": rngs}
        self.wq_a = Linear(c.model_dim, c.q_rank, **linear)
        self.q_norm = RMSNorm(c.q_rank, **norm)
        self.wq_b = Linear(c.q_rank, c.num_heads * c.head_dim, **linear)
        self.wkv = Linear(c.model_dim, c.head_dim, **linear)
        self.kv_norm = RMSNorm(c.head_dim, **norm)
        per_group = nnx.initializers.lecun_normal(in_axis=1, out_axis=2, batch_axis=0)
        group_width = c.num_heads * c.head_dim // c.out_groups
        self.wo_a = nnx.Param(per_group(rngs.params(), (c.out_groups, group_width, c.out_rank)))
        self.wo_b = Linear(c.out_groups * c.out_rank, c.model_dim, **linear)
        self.sinks = nnx.Param(jnp.zeros(c.num_heads))
        self.compressor = None if c.ratio is None else Compressor(c, c.head_dim, rngs=rngs)
        self.indexer = None if c.top_k is None else CompressedIndexer(c, rngs=rngs)

    @scoped
    def __call__(
        self,
        x: Float[Array, "B T M"],
        *,
        indices: Int[Array, "B T K"] | None = None,
        positions: Int[Array, "B T"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
        sparse: bool = True,
    ) -> tuple[Float[Array, "B T M"], CompressedAux]:
        """Computes causal attention among the tokens of `x`.

        Args:
            x: Hidden states.
            indices: Compressed keys to attend to, int32, such as an earlier run's `aux.indices`.
                Keys that a query does not see are treated as empty slots. By default the indexer
                selects the keys.
            positions: Positions of the tokens, int32, which only RoPE reads. By default each
                document counts from 0.
            segment_ids: Document numbers, int32, for several documents in one sequence, as in
                `DSAttention`. The blocks of a document begin with its first token.
            sparse: True attends to the compressed keys that the indexer selects. False attends to
                all of them, and `aux.kl` is then the indexer's warm-up loss over all of them.

        Returns:
            The hidden states, in `config.dtype` whatever the dtype of `x`, and what else the layer
            computed.

        Raises:
            TypeError: If an argument has the wrong type.
            ValueError: If an argument has the wrong shape, or `indices` is given with
                `sparse=False`.
        """
        c = self.config
        args, x = hidden_states("CompressedAttention", self, x, c.model_dim)
        sparse = args.flag("sparse", sparse)
        indices = selected_keys(args, indices)
        if not sparse and indices is not None:
            raise ValueError(
                "CompressedAttention: argument 'indices' is given, expected None with sparse=False"
            )
        positions, starts, _ = token_positions("CompressedAttention", x, positions, segment_ids)
        rows = jnp.broadcast_to(jnp.arange(x.shape[1], dtype=jnp.int32), x.shape[:2])
        first = jnp.zeros_like(rows) if starts is None else starts
        q, kv, q_latent = self._project(x, positions)
        if c.ratio is None or self.compressor is None:
            out, lse = self._attend(q, kv, self._slots(kv, rows, first, None))
            return self._output(out, positions), CompressedAux(None, lse, None)
        # The numbers of a document's blocks begin at first // ratio and end before the next
        # document's numbers.
        begin, end = block_range(c.ratio, first, rows + 1)
        keys = self.compressor(x, positions, starts)
        index = logits = None
        if self.indexer is not None:
            x, q_latent = jax.lax.stop_gradient((x, q_latent))
            index_q, weights = self.indexer(x, q_latent, positions)
            index = index_q, self.indexer.keys(x, positions, starts), weights
        joined = jnp.concatenate([kv, keys], axis=1)
        if index is not None and not sparse:
            out, lse = self._attend_to_all(q, joined, rows, first, begin, end)
            constant = jax.lax.stop_gradient((q, keys[:, :, None]))
            kl = dense_indexer_kl_loss(
                *(*index, *constant),
                scale=c.head_dim**-0.5,
                is_causal=False,
                starts=begin,
                ends=end,
            )
            return self._output(out, positions), CompressedAux(kl, lse, None)
        replayed = indices is not None
        if indices is None and index is not None and c.top_k is not None:
            indices, logits = indexer_topk(*index, c.top_k, starts=begin, ends=end)
        elif indices is None:
            indices = jnp.arange(keys.shape[1], dtype=jnp.int32)
        seen = (indices >= begin[..., None]) & (indices < end[..., None])
        indices = jnp.where(seen, indices, -1)
        if replayed and index is not None:
            logits = indexer_selected_logits(*index, indices)
        # The compressed keys follow the T uncompressed ones in `joined`.
        selected = jnp.where(seen, indices + kv.shape[1], -1)
        out, lse = self._attend(q, joined, self._slots(joined, rows, first, selected))
        y = self._output(out, positions)
        if logits is None:
            return y, CompressedAux(None, lse, indices)
        main, taught, total = jax.lax.stop_gradient((q, joined[:, :, None], lse))
        teacher = attn_dist(main, taught, selected, total, scale=c.head_dim**-0.5)
        return y, CompressedAux(indexer_kl_loss(logits, teacher, seen), lse, indices)

    def init_cache(self, batch: int, capacity: int, *, max_rollback: int = 16) -> CompressedCache:
        """Returns an empty cache.

        Args:
            batch: B, number of requests.
            capacity: Number of tokens of each request that compressed keys are stored for. Tokens
                beyond it are seen through the window only.
            max_rollback: Number of tokens that `lengths` may be set back by, such as the number of
                draft tokens per step in speculative decoding.

        Raises:
            TypeError: If an argument is not an int.
            ValueError: If an argument is negative.
        """
        c, args = self.config, Args("CompressedAttention.init_cache", "", np.empty(0), "K")
        sizes = {"batch": batch, "capacity": capacity, "max_rollback": max_rollback}
        batch, capacity, extra = (args.integer(name, size, 0) for name, size in sizes.items())
        index_compressor = None if self.indexer is None else self.indexer.compressor
        streams = [
            None if compressor is None else compressor.stream(batch, capacity, extra)
            for compressor in (self.compressor, index_compressor)
        ]
        recent = jnp.zeros((batch, c.window - 1 + extra, c.head_dim), c.dtype)
        lengths, longest = (jnp.zeros(batch, jnp.int32) for _ in range(2))
        return CompressedCache(lengths, longest, recent, *streams)

    @scoped
    def decode(
        self,
        x: Float[Array, "B T M"],
        cache: CompressedCache,
        *,
        counts: Int[Array, "B"] | None = None,
        indices: Int[Array, "B T K"] | None = None,
    ) -> tuple[Float[Array, "B T M"], CompressedCache, Int[Array, "B T K"] | None]:
        """Computes `__call__` for each request's next T tokens, or only the first `counts` of them.

        T = 1 is a decode step, T = the length of the prompt a prefill, and anything between is a
        chunk of a prefill. Prompts of different lengths are padded on the right to a common T.

        Args:
            x: Hidden states of the next tokens.
            cache: The layer's cache, as `init_cache` makes it.
            counts: How many of the T tokens each request has, int32, clipped to 0..T; the others
                are padding. Default: all.
            indices: Compressed keys to attend to, int32. By default the indexer selects them.

        Returns:
            The hidden states; the cache with the new tokens in it; the compressed keys attended to,
            int32, -1 in empty slots, or None if the layer has no compressed keys. Padding gets
            hidden states of 0 and empty slots. A request whose `cache.lengths` were set to a number
            that the cache does not support gets NaN; see `CompressedCache`.

        Raises:
            TypeError, ValueError: If an argument has the wrong type or shape.
        """
        c = self.config
        args, x = hidden_states("CompressedAttention.decode", self, x, c.model_dim)
        indices = selected_keys(args, indices)
        own = None if self.indexer is None else self.indexer.compressor
        lengths = check_compressed_cache(args, cache, c, self.compressor, own)
        counts = token_counts(args, counts, x.shape[1])
        if counts is None:
            counts = jnp.full_like(lengths, x.shape[1])
        step = jnp.arange(x.shape[1], dtype=jnp.int32)
        positions = lengths[:, None] + step
        is_token = (step < counts[:, None])[..., None]
        q, kv, q_latent = self._project(x, positions)
        window = positions[..., None] + jnp.arange(1 - c.window, 1, dtype=jnp.int32)
        slots = rows_after_concatenation(cache.recent.shape[1], window, lengths)
        slots = jnp.where(is_token & (window >= 0), slots, -1)
        joined = jnp.concatenate([cache.recent, kv], axis=1)
        compressed, index = cache.compressed, cache.index_keys
        if self.compressor is None or compressed is None or c.ratio is None:
            indices = None
        else:
            compressed = self.compressor.extend(compressed, x, lengths, counts)
            ends = jnp.where(is_token[..., 0], (positions + 1) // c.ratio, 0)
            if self.indexer is not None and index is not None:
                index = self.indexer.extend(index, x, lengths, counts)
            if indices is None and self.indexer is not None and index is not None:
                index_q, weights = self.indexer(x, q_latent, positions)
                assert c.top_k is not None
                indices, _ = indexer_topk(index_q, index.keys, weights, c.top_k, ends=ends)
            elif indices is None:
                indices = jnp.arange(compressed.keys.shape[1], dtype=jnp.int32)
            indices = jnp.where((indices >= 0) & (indices < ends[..., None]), indices, -1)
        keys = None if compressed is None else compressed.keys
        out = attend_to_caches(q, joined, slots, keys, indices, self.sinks[...])
        cache, is_valid = cache.extended(c.window, kv, counts, compressed, index)
        y = jnp.where(is_valid[:, None, None], self._output(out, positions), jnp.nan)
        return y, cache, indices

    def _attend_to_all(
        self,
        q: Float[Array, "B T N D"],
        joined: Float[Array, "B S D"],
        rows: Int[Array, "B T"],
        first: Int[Array, "B T"],
        begin: Int[Array, "B T"],
        end: Int[Array, "B T"],
    ) -> tuple[Float[Array, "B T N D"], Float[Array, "B T N"]]:
        """Computes attention to the window and to the compressed keys from `begin` to `end`.

        The lists of keys are built for a chunk of queries at a time, and again in the backward
        pass. So no array of all queries times all compressed keys exists.
        """
        batch, length = rows.shape
        numbers = jnp.arange(joined.shape[1] - length, dtype=jnp.int32)
        kept = jax.checkpoint_policies.save_only_these_names("dsa_out", "dsa_lse")

        @functools.partial(jax.checkpoint, policy=kept)
        def attend(q: Array, rows: Array, first: Array, begin: Array, end: Array) -> Any:
            seen = (numbers >= begin[..., None]) & (numbers < end[..., None])
            selected = jnp.where(seen, length + numbers, -1)
            return self._attend(q, joined, self._slots(joined, rows, first, selected))

        _, (out, lse) = scan_chunks(
            lambda carry, *xs: (carry, attend(*xs)),
            None,
            (q, rows, first, begin, end),
            chunk=chunk_length(length, 4 * batch * (self.config.window + len(numbers))),
        )
        return out, lse

    def _slots(
        self, kv: Array, rows: Array, first: Array, selected: Array | None
    ) -> Int[Array, "B T K"]:
        """Returns the rows of `kv` that each query attends to.

        These are the last `window` rows of the query's document, and the `selected` ones.
        """

        def slots(rows: Array, first: Array, selected: Array | None) -> Array:
            recent = rows[..., None] + jnp.arange(1 - self.config.window, 1)
            recent = jnp.where(recent >= first[..., None], recent, -1)
            return recent if selected is None else jnp.concatenate([recent, selected], axis=-1)

        return compat.left_to_compiler(slots, kv)(rows, first, selected)

    def _project(
        self, x: Float[Array, "B T M"], positions: Int[Array, "B T"]
    ) -> tuple[Float[Array, "B T N D"], Float[Array, "B T D"], Float[Array, "B T Q"]]:
        """Returns queries, keys, and the latent that the queries are projected from."""
        c = self.config
        q_latent = self.q_norm(self.wq_a(x))
        q = self.wq_b(q_latent).reshape(*x.shape[:2], c.num_heads, c.head_dim)
        # The queries have an RMS norm without a scale.
        exact = q.astype(jnp.float32)
        factor = jax.lax.rsqrt(jnp.mean(exact * exact, axis=-1, keepdims=True) + c.norm_eps)
        q = c.rotate((exact * factor).astype(c.dtype), positions)
        return q, c.rotate(self.kv_norm(self.wkv(x)), positions), q_latent

    def _attend(
        self,
        q: Float[Array, "B T N D"],
        kv: Float[Array, "B S D"],
        indices: Int[Array, "B T K"],
    ) -> tuple[Float[Array, "B T N D"], Float[Array, "B T N"]]:
        """Returns the heads' outputs over the keys at `indices`, and their lse."""
        return attend(q, kv, indices, self.sinks[...])

    def _output(
        self, out: Float[Array, "B T N D"], positions: Int[Array, "B T"]
    ) -> Float[Array, "B T M"]:
        """Returns hidden states: rotates the heads' outputs back and projects them by groups."""
        c = self.config
        heads = c.num_heads // c.out_groups
        grouped = c.rotate(out, -positions).reshape(*out.shape[:2], c.out_groups, heads, c.head_dim)
        weights = self.wo_a[...].reshape(c.out_groups, heads, c.head_dim, c.out_rank)
        with jax.named_scope("wo_a"):
            ranks = jnp.einsum("btgnd,gndr->btgr", grouped, weights.astype(c.dtype))
        return self.wo_b(ranks.reshape(*out.shape[:2], c.out_groups * c.out_rank))
