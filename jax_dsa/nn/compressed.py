"""Attention to a window of keys and to compressed ones, as in DeepSeek-V4.

Every `ratio` tokens are pooled into one compressed key. A query attends, in one softmax with a
sink, to the last `window` keys and to compressed keys of whole blocks before it: those that an
indexer selects, or all of them. Keys are values, so what comes out is rotated: it is turned back by
the query's position before the output projection.

Source: DeepSeek-V4 (2026), section 2.3; its configuration and names in `transformers`.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jax_dsa.core import compat
from jax_dsa.core.checks import FLOATS, Args
from jax_dsa.core.layout import put_rows
from jax_dsa.core.streaming import chunk_length, scan_chunks
from jax_dsa.core.typing import Array, Float, Int
from jax_dsa.nn.attention import placed
from jax_dsa.nn.config import check_quantised
from jax_dsa.nn.indexer import prepared
from jax_dsa.nn.rotary import rope
from jax_dsa.ops.attn_dist import attn_dist
from jax_dsa.ops.gated_pool import gated_pool
from jax_dsa.ops.indexer import indexer_topk
from jax_dsa.ops.indexer import spec as indexer
from jax_dsa.ops.indexer.api import indexer_selected_op
from jax_dsa.ops.losses import dense_indexer_kl_loss, indexer_kl_loss
from jax_dsa.ops.sparse_mla import sparse_mla


@dataclasses.dataclass(frozen=True)
class CompressedConfig:
    """One layer that attends to a window of keys and, with a `ratio`, to compressed ones."""

    model_dim: int
    num_heads: int
    q_rank: int
    """Width of the latent that the queries of attention and indexer are both projected from."""
    head_dim: int
    """D, of queries, keys and values alike; all heads share one key."""
    rope_dim: int
    """The last elements of queries and keys, which have rotary position."""
    out_groups: int
    """Groups of heads whose outputs are projected to `out_rank` numbers each."""
    out_rank: int
    window: int
    ratio: int | None = None
    """Tokens that a compressed key stands for; None has no compressed keys."""
    overlap: bool = False
    """Whether a compressed key is made of its block's tokens and of the block's before."""
    top_k: int | None = None
    """Compressed keys that the indexer selects for a query; None attends to all of them."""
    index_heads: int = 1
    index_dim: int = 128
    index_hadamard: bool = False
    index_fp4: bool = False
    """As in `AttentionConfig`."""
    rope_base: float = 10000.0
    rope_frequencies: tuple[float, ...] | None = None
    rope_factor: float = 1.0
    norm_eps: float = 1e-6
    dtype: Any = jnp.float32
    """Of activations and caches; parameters are float32."""

    def __post_init__(self) -> None:
        """Rejects sizes that no layer can be built of."""
        args = Args("CompressedConfig", "", np.empty(0), "K")
        sizes = ("model_dim", "num_heads", "q_rank", "head_dim", "out_groups", "out_rank", "window")
        for name in (*sizes, "index_heads", "index_dim"):
            args.integer(name, getattr(self, name), 1)
        for name in ("ratio", "top_k"):
            if getattr(self, name) is not None:
                args.integer(name, getattr(self, name), 1)
        args.integer("rope_dim", self.rope_dim, 0)
        args.dtype("dtype", self.dtype, FLOATS)
        least = self.head_dim if self.top_k is None else min(self.head_dim, self.index_dim)
        if self.rope_dim % 2 or self.rope_dim > least:
            raise ValueError(
                f"CompressedConfig: rope_dim is {self.rope_dim}, want even and at most {least}"
            )
        if self.num_heads % self.out_groups:
            raise ValueError(
                f"CompressedConfig: num_heads is {self.num_heads}, want a multiple of "
                f"out_groups = {self.out_groups}"
            )
        if self.ratio is None and (self.overlap or self.top_k is not None):
            raise ValueError("CompressedConfig: ratio is None, want one with overlap or top_k")
        check_quantised("CompressedConfig", self)

    def rotate(
        self, x: Float[Array, "B T *H D"], positions: Int[Array, "B T"]
    ) -> Float[Array, "B T *H D"]:
        """`x` with its last `rope_dim` elements turned by their positions."""
        head, tail = jnp.split(x, [x.shape[-1] - self.rope_dim], axis=-1)
        tail = rope(
            tail,
            positions,
            base=self.rope_base,
            layout="interleaved",
            frequencies=self.rope_frequencies,
            factor=self.rope_factor,
        )
        return jnp.concatenate([head, tail], axis=-1)


class Stream(NamedTuple):
    """Compressed keys of some requests, and what the next ones will be made of."""

    keys: Float[Array, "B W D"]
    values: Float[Array, "B H F"]
    """The last tokens' contributions, before the pooling."""
    gates: Float[Array, "B H F"]


class Compressor(nnx.Module):
    """Pools every `ratio` tokens into a key: element by element a softmax over the tokens' gates.

    With `overlap` a token contributes twice, to its own block's key and to the next one's, and
    keys are pooled from 2 `ratio` contributions. The tokens of a block that is not whole make none.
    """

    def __init__(self, config: CompressedConfig, dim: int, *, rngs: nnx.Rngs) -> None:
        assert config.ratio is not None
        self.config, self.dim, self.ratio = config, dim, config.ratio
        c, width = config, dim * (2 if config.overlap else 1)
        linear = {"use_bias": False, "dtype": c.dtype, "rngs": rngs}
        self.wkv = nnx.Linear(c.model_dim, width, **linear)
        self.wg = nnx.Linear(c.model_dim, width, **linear)
        self.position_bias = nnx.Param(jnp.zeros((self.ratio, width)))
        self.norm = nnx.RMSNorm(dim, epsilon=c.norm_eps, dtype=c.dtype, rngs=rngs)

    def __call__(
        self,
        x: Float[Array, "B T M"],
        positions: Int[Array, "B T"],
        starts: Int[Array, "B T"] | None,
    ) -> Float[Array, "B W D"]:
        """The keys of `x`. `starts` are the first rows of the tokens' documents: block i of one
        that begins at row s has the number s // ratio + i. None: one document.
        """
        whole = x.shape[1] - x.shape[1] % self.ratio
        places = positions[:, : whole : self.ratio]
        if starts is not None:
            first = functools.partial(_first_positions, self.ratio)
            places = compat.left_to_compiler(first, places)(positions, starts)
        return self.pool(self.wkv(x), self.wg(x), places, starts)

    def stream(self, batch: int, capacity: int) -> Stream:
        """Room for the compressed keys of `capacity` tokens of each of `batch` requests."""
        c = self.config
        history = self.ratio * (2 if c.overlap else 1) - 1
        state = jnp.zeros((batch, history, self.position_bias.shape[1]), c.dtype)
        return Stream(jnp.zeros((batch, capacity // self.ratio, self.dim), c.dtype), state, state)

    def extend(self, stream: Stream, x: Float[Array, "B T M"], lengths: Int[Array, "B"]) -> Stream:
        """The stream with T more tokens of each request, which has had `lengths` of them."""
        ratio, length = self.ratio, x.shape[1]
        values = jnp.concatenate([stream.values, self.wkv(x)], axis=1)
        gates = jnp.concatenate([stream.gates, self.wg(x)], axis=1)
        kept = values[:, length:], gates[:, length:]
        count = length // ratio + 1
        earlier = int(self.config.overlap)  # blocks

        def aligned(x: Array, lengths: Array) -> Array:
            """From the first token on of the first block that may have become whole, or of the one
            before; as many rows as whole blocks may need.
            """
            rows = ratio - 1 - lengths % ratio
            rows = rows[:, None] + jnp.arange((count + earlier) * ratio, dtype=jnp.int32)[None]
            x = jnp.pad(x, ((0, 0), (0, ratio), (0, 0)))
            return jnp.take_along_axis(x, rows[..., None], axis=1)

        aligned = compat.left_to_compiler(aligned, values)
        starts = None
        if self.config.overlap:  # the first block of a request has none before it
            is_first = (lengths < ratio)[:, None]
            rows = jnp.arange((count + 1) * ratio, dtype=jnp.int32)[None]
            starts = jnp.where(is_first & (rows >= ratio), jnp.int32(ratio), jnp.int32(0))
        number = lengths[:, None] // ratio + jnp.arange(count, dtype=jnp.int32)
        places = (number[:, :1] - earlier + jnp.arange(count + earlier, dtype=jnp.int32)) * ratio
        new = self.pool(aligned(values, lengths), aligned(gates, lengths), places, starts)
        is_whole = (number + 1) * ratio - lengths[:, None] <= length
        keys = put_rows(stream.keys, jnp.where(is_whole, number, -1), new[:, earlier:])
        return Stream(keys, *kept)

    def pool(
        self, values: Array, gates: Array, positions: Array, starts: Array | None
    ) -> Float[Array, "B W D"]:
        """The keys of blocks whose first tokens have these positions."""
        bias = self.position_bias[...].astype(jnp.float32).reshape(self.ratio, -1, self.dim)
        values, gates = (x.reshape(*x.shape[:2], *bias.shape[1:]) for x in (values, gates))
        keys = gated_pool(values, gates, bias, starts)
        # Where tokens are sharded, the channels were for the pooling.
        keys = compat.left_to_compiler(lambda keys: keys, values)(keys)
        return self.config.rotate(self.norm(keys), positions)


class IndexCompressor(Compressor):
    """Makes an indexer's keys."""

    def pool(
        self, values: Array, gates: Array, positions: Array, starts: Array | None
    ) -> Float[Array, "B W D"]:
        """`Compressor.pool`, prepared as the queries are."""
        keys = super().pool(values, gates, positions, starts)
        return prepared(keys, self.config.index_hadamard, self.config.index_fp4)


class CompressedIndexer(nnx.Module):
    """A lightning indexer with compressed keys of its own; trained by its own loss alone."""

    def __init__(self, config: CompressedConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        c, wide = config, config.index_heads * config.index_dim
        self.wq = nnx.Linear(c.q_rank, wide, use_bias=False, dtype=c.dtype, rngs=rngs)
        self.compressor = IndexCompressor(c, c.index_dim, rngs=rngs)
        self.weights = nnx.Linear(c.model_dim, c.index_heads, use_bias=False, rngs=rngs)

    def __call__(
        self,
        x: Float[Array, "B T M"],
        q_latent: Float[Array, "B T Q"],
        positions: Int[Array, "B T"],
    ) -> tuple[Float[Array, "B T J C"], Float[Array, "B T J"]]:
        """Queries and weights of the heads, for `jax_dsa.indexer_topk`."""
        c = self.config
        q = self.wq(q_latent).reshape(*x.shape[:2], c.index_heads, c.index_dim)
        weights = self.weights(x.astype(jnp.float32)) * (c.index_heads * c.index_dim) ** -0.5
        return prepared(c.rotate(q, positions), c.index_hadamard, c.index_fp4), weights


class CompressedAux(NamedTuple):
    """What attention found beside its output; under `jax.jit` unused parts cost nothing."""

    kl: Float[Array, ""] | None
    """The indexer's loss: over the compressed keys attended to if sparse, else over all. None
    without an indexer."""
    lse: Float[Array, "B T N"]
    indices: Int[Array, "B T K"] | None
    """The compressed keys attended to, -1 where there are fewer; None without any, and in the
    indexer's warm-up."""


class CompressedCache(NamedTuple):
    """One layer's keys of some requests."""

    lengths: Int[Array, "B"]
    """How many tokens each has had."""
    recent: Float[Array, "B W D"]
    """The last window - 1 keys."""
    compressed: Stream | None
    index_keys: Stream | None


class CompressedAttention(nnx.Module):
    """Attention to the last `window` keys and to compressed ones; see `CompressedConfig`.

    The indexer's parameters get gradients of `aux.kl` alone, which gives none to the others.
    """

    def __init__(self, config: CompressedConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        c = config
        linear = {"use_bias": False, "dtype": c.dtype, "rngs": rngs}
        norm = {"epsilon": c.norm_eps, "dtype": c.dtype, "rngs": rngs}
        self.wq_a = nnx.Linear(c.model_dim, c.q_rank, **linear)
        self.q_norm = nnx.RMSNorm(c.q_rank, **norm)
        self.wq_b = nnx.Linear(c.q_rank, c.num_heads * c.head_dim, **linear)
        self.wkv = nnx.Linear(c.model_dim, c.head_dim, **linear)
        self.kv_norm = nnx.RMSNorm(c.head_dim, **norm)
        per_group = nnx.initializers.lecun_normal(in_axis=1, out_axis=2, batch_axis=0)
        wide = c.num_heads * c.head_dim // c.out_groups
        self.wo_a = nnx.Param(per_group(rngs.params(), (c.out_groups, wide, c.out_rank)))
        self.wo_b = nnx.Linear(c.out_groups * c.out_rank, c.model_dim, **linear)
        self.sinks = nnx.Param(jnp.zeros(c.num_heads))
        self.compressor = None if c.ratio is None else Compressor(c, c.head_dim, rngs=rngs)
        self.indexer = None if c.top_k is None else CompressedIndexer(c, rngs=rngs)

    def __call__(
        self,
        x: Float[Array, "B T M"],
        *,
        indices: Int[Array, "B T K"] | None = None,
        positions: Int[Array, "B T"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
        sparse: bool = True,
    ) -> tuple[Float[Array, "B T M"], CompressedAux]:
        """Causal attention among the tokens of `x`.

        Args:
            x: hidden states.
            indices: compressed keys to attend to in place of the indexer's, such as an earlier
                run's `aux.indices`; anything that a query does not see is an empty slot.
            positions: int32, for RoPE alone; by default each document counts from 0.
            segment_ids: int32, for several documents in one sequence, as in `DSAttention`. Each
                document has blocks of its own, which begin with it.
            sparse: attend to the compressed keys that the indexer selects. False attends to all of
                them, and its `aux.kl` is the indexer's warm-up loss over all of them.
        """
        c = self.config
        if not sparse and indices is not None:
            raise ValueError(
                "CompressedAttention: argument 'indices' is given, want None with sparse=False"
            )
        positions, starts, _ = placed("CompressedAttention", x, positions, segment_ids)
        rows = jnp.broadcast_to(jnp.arange(x.shape[1], dtype=jnp.int32), x.shape[:2])
        first = jnp.zeros_like(rows) if starts is None else starts
        q, kv, q_latent = self._project(x, positions)
        if c.ratio is None or self.compressor is None:
            out, lse = self._attend(q, kv, self._slots(kv, rows, first, None))
            return self._output(out, positions), CompressedAux(None, lse, None)
        # A document's blocks have the numbers from first // ratio on: they never reach the next's.
        begin = first // c.ratio
        end = begin + (rows - first + 1) // c.ratio
        keys = self.compressor(x, positions, starts)
        index = logits = None
        if self.indexer is not None:
            x, q_latent = jax.lax.stop_gradient((x, q_latent))
            index_q, weights = self.indexer(x, q_latent, positions)
            index = index_q, self.indexer.compressor(x, positions, starts), weights
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
            call = Args("CompressedAttention", "x", x, "B T M").call(None)
            options = indexer.Options(True, indices.shape[-1])
            selected = indexer.Selected(*index, None, indices)
            logits = indexer_selected_op(call, options, selected).logits
        chosen = jnp.where(seen, indices + kv.shape[1], -1)
        out, lse = self._attend(q, joined, self._slots(joined, rows, first, chosen))
        y = self._output(out, positions)
        if logits is None:
            return y, CompressedAux(None, lse, indices)
        main, taught, total = jax.lax.stop_gradient((q, joined[:, :, None], lse))
        teacher = attn_dist(main, taught, chosen, total, scale=c.head_dim**-0.5)
        return y, CompressedAux(indexer_kl_loss(logits, teacher, seen), lse, indices)

    def init_cache(self, batch: int, capacity: int) -> CompressedCache:
        """Room for `capacity` tokens of each of `batch` requests."""
        c = self.config
        return CompressedCache(
            jnp.zeros(batch, jnp.int32),
            jnp.zeros((batch, c.window - 1, c.head_dim), c.dtype),
            None if self.compressor is None else self.compressor.stream(batch, capacity),
            None if self.indexer is None else self.indexer.compressor.stream(batch, capacity),
        )

    def decode(
        self,
        x: Float[Array, "B T M"],
        cache: CompressedCache,
        *,
        indices: Int[Array, "B T K"] | None = None,
    ) -> tuple[Float[Array, "B T M"], CompressedCache, Int[Array, "B T K"] | None]:
        """`__call__` for each request's next T tokens; T = 1 is a decode step, T = the prompt's
        length a prefill, anything between a chunk of one. Then the cache with the new tokens in it,
        and the compressed keys that were attended to.
        """
        c = self.config
        step = jnp.arange(x.shape[1], dtype=jnp.int32)
        positions = cache.lengths[:, None] + step
        q, kv, q_latent = self._project(x, positions)
        joined = jnp.concatenate([cache.recent, kv], axis=1)
        last = joined[:, x.shape[1] :]
        window = jnp.arange(c.window, dtype=jnp.int32)
        recent = step[:, None] + window
        is_token = positions[..., None] + window >= c.window - 1
        recent = jnp.where(is_token, recent, -1)
        compressed, index = cache.compressed, cache.index_keys
        if self.compressor is None or compressed is None or c.ratio is None:
            indices = None
        else:
            compressed = self.compressor.extend(compressed, x, cache.lengths)
            ends = (positions + 1) // c.ratio
            if self.indexer is not None and index is not None:
                index = self.indexer.compressor.extend(index, x, cache.lengths)
            if indices is None and self.indexer is not None and index is not None:
                index_q, weights = self.indexer(x, q_latent, positions)
                assert c.top_k is not None
                indices, _ = indexer_topk(index_q, index.keys, weights, c.top_k, ends=ends)
            elif indices is None:
                indices = jnp.arange(compressed.keys.shape[1], dtype=jnp.int32)
            indices = jnp.where((indices >= 0) & (indices < ends[..., None]), indices, -1)
            chosen = jnp.where(indices >= 0, indices + joined.shape[1], -1)
            recent = jnp.concatenate([recent, chosen], axis=-1)
            joined = jnp.concatenate([joined, compressed.keys], axis=1)
        out, _ = self._attend(q, joined, recent)
        cache = CompressedCache(cache.lengths + x.shape[1], last, compressed, index)
        return self._output(out, positions), cache, indices

    def _attend_to_all(
        self,
        q: Float[Array, "B T N D"],
        joined: Float[Array, "B S D"],
        rows: Int[Array, "B T"],
        first: Int[Array, "B T"],
        begin: Int[Array, "B T"],
        end: Int[Array, "B T"],
    ) -> tuple[Float[Array, "B T N D"], Float[Array, "B T N"]]:
        """Attention to the window and to the compressed keys from `begin` to `end`. Lists of them
        are made for a chunk of queries at a time, in the backward pass again.
        """
        batch, length = rows.shape
        numbers = jnp.arange(joined.shape[1] - length, dtype=jnp.int32)
        kept = jax.checkpoint_policies.save_only_these_names("dsa_out", "dsa_lse")

        @functools.partial(jax.checkpoint, policy=kept)
        def attend(q: Array, rows: Array, first: Array, begin: Array, end: Array) -> Any:
            seen = (numbers >= begin[..., None]) & (numbers < end[..., None])
            chosen = jnp.where(seen, length + numbers, -1)
            return self._attend(q, joined, self._slots(joined, rows, first, chosen))

        _, (out, lse) = scan_chunks(
            lambda carry, *xs: (carry, attend(*xs)),
            None,
            (q, rows, first, begin, end),
            chunk=chunk_length(length, 4 * batch * (self.config.window + len(numbers))),
        )
        return out, lse

    def _slots(
        self, kv: Array, rows: Array, first: Array, chosen: Array | None
    ) -> Int[Array, "B T K"]:
        """The last `window` rows of each token's document, and what else is chosen."""

        def slots(rows: Array, first: Array, chosen: Array | None) -> Array:
            recent = rows[..., None] + jnp.arange(1 - self.config.window, 1)
            recent = jnp.where(recent >= first[..., None], recent, -1)
            return recent if chosen is None else jnp.concatenate([recent, chosen], axis=-1)

        return compat.left_to_compiler(slots, kv)(rows, first, chosen)

    def _project(
        self, x: Float[Array, "B T M"], positions: Int[Array, "B T"]
    ) -> tuple[Float[Array, "B T N D"], Float[Array, "B T D"], Float[Array, "B T Q"]]:
        c = self.config
        q_latent = self.q_norm(self.wq_a(x))
        q = self.wq_b(q_latent).reshape(*x.shape[:2], c.num_heads, c.head_dim)
        wide = q.astype(jnp.float32)
        size = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + c.norm_eps)
        q = c.rotate((wide * size).astype(c.dtype), positions)
        return q, c.rotate(self.kv_norm(self.wkv(x)), positions), q_latent

    def _attend(
        self,
        q: Float[Array, "B T N D"],
        kv: Float[Array, "B S D"],
        indices: Int[Array, "B T K"],
    ) -> tuple[Float[Array, "B T N D"], Float[Array, "B T N"]]:
        dim = self.config.head_dim
        return sparse_mla(
            *(q, kv[:, :, None], indices),
            value_dim=dim,
            scale=dim**-0.5,
            sinks=self.sinks[...],
            return_lse=True,
        )

    def _output(
        self, out: Float[Array, "B T N D"], positions: Int[Array, "B T"]
    ) -> Float[Array, "B T M"]:
        c = self.config
        heads = c.num_heads // c.out_groups
        grouped = c.rotate(out, -positions).reshape(*out.shape[:2], c.out_groups, heads, c.head_dim)
        weights = self.wo_a[...].reshape(c.out_groups, heads, c.head_dim, c.out_rank)
        ranks = jnp.einsum("btgnd,gndr->btgr", grouped, weights.astype(c.dtype))
        return self.wo_b(ranks.reshape(*out.shape[:2], c.out_groups * c.out_rank))


def _first_positions(
    ratio: int, positions: Int[Array, "B T"], starts: Int[Array, "B T"]
) -> Int[Array, "B W"]:
    """Of the first tokens of the documents' blocks, by the blocks' numbers; any where there is no
    whole block. They are the last rows in reach that a block begins at.
    """
    count = starts.shape[1] // ratio
    rows = jnp.arange(starts.shape[1], dtype=jnp.int32)[None]
    begins = jnp.where((rows - starts) % ratio == 0, rows, 0)[:, : count * ratio]
    return jnp.take_along_axis(positions, begins.reshape(-1, count, ratio).max(axis=2), axis=1)
