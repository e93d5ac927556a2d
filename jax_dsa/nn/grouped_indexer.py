"""The projections of an indexer of blocks, as in MiniMax-M3 and Qwen3.8."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp

from jax_dsa.core import compat
from jax_dsa.core.export import exportable
from jax_dsa.core.typing import Array, Bool, Float, Int
from jax_dsa.nn.compressor import first_positions
from jax_dsa.nn.head_norm import RotaryHeadNorm
from jax_dsa.nn.linear import projection
from jax_dsa.nn.open_pool import OpenPool
from jax_dsa.nn.ring import put_in_ring, rows_of_ring_and_new
from jax_dsa.nn.scopes import Module, scoped
from jax_dsa.ops.gated_pool import mean_pool

if TYPE_CHECKING:
    from flax import nnx

    from jax_dsa.nn.grouped_config import GroupedConfig


@exportable
class OpenBlock(NamedTuple):
    """The last tokens of some requests, from which the key of the next block will be computed.

    Attributes:
        keys: Their keys before the mean.
        positions: Their rotary positions, int32, A = 3 with `mrope_sections` and else 1 for each,
            in a ring buffer like the keys.
    """

    keys: OpenPool
    positions: Int[Array, "B R A"]

    @classmethod
    def empty(cls, config: GroupedConfig, batch: int, max_rollback: int) -> OpenBlock:
        """Returns the state of `batch` requests without tokens."""
        c = config
        sizes = batch, c.block_size, c.index_dim, max_rollback
        keys = OpenPool.empty(*sizes, c.dtype, has_gates=False)
        axes = 1 if c.mrope_sections is None else 3
        return cls(keys, jnp.zeros((*keys.values.shape[:2], axes), jnp.int32))


class GroupedIndexer(Module):
    """Projects hidden states to the queries and keys of an indexer of blocks.

    Queries and keys have an RMS norm and then rotary position. With `config.indexer` "mean", the
    projected keys of each block become their mean before that, whose position is that of the
    block's first token. The hidden states pass through `stop_gradient`, so that any loss of the
    results trains the indexer alone.

    Args:
        config: Sizes and switches of the layer.
        rngs: Random streams that initialise the parameters.
    """

    def __init__(self, config: GroupedConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        c = config
        self.wq = projection(c, c.model_dim, c.index_heads * c.index_dim, rngs)
        self.wk = projection(c, c.model_dim, c.index_dim, rngs)
        self.q_norm = RotaryHeadNorm(c, c.index_dim)
        self.k_norm = RotaryHeadNorm(c, c.index_dim)

    @scoped
    def queries(
        self, x: Float[Array, "B T M"], positions: Int[Array, "B T"] | Int[Array, "3 B T"]
    ) -> Float[Array, "B T J C"]:
        """Returns the queries of some tokens at these rotary positions."""
        c = self.config
        q = self.wq(jax.lax.stop_gradient(x))
        return self.q_norm(q.reshape(*x.shape[:2], c.index_heads, c.index_dim), positions)

    @scoped
    def raw_keys(self, x: Float[Array, "B T M"]) -> Float[Array, "B T C"]:
        """Returns the keys of some tokens before pooling, norm and position."""
        return self.wk(jax.lax.stop_gradient(x))

    @scoped
    def keys(
        self,
        raw: Float[Array, "B T C"],
        positions: Int[Array, "B T"] | Int[Array, "3 B T"],
        starts: Int[Array, "B T"] | None,
    ) -> Float[Array, "B S C"]:
        """Returns one key per token, or with "mean" one per block, in the slots of `mean_pool`.

        Args:
            raw: The tokens' `raw_keys`.
            positions: Rotary positions of the tokens, int32.
            starts: First token of each token's document, int32; None: each sequence is one
                document.
        """
        c = self.config
        if c.indexer == "max":
            return self.k_norm(raw, positions)
        size = c.block_size
        if starts is None:
            count = raw.shape[1] // size * size

            def first(positions: Array) -> Array:
                return positions[..., :count:size]

            firsts = compat.left_to_compiler(first, positions)(positions)
        else:

            def first_of_documents(positions: Array, starts: Array) -> Array:
                if positions.ndim == 2:
                    return first_positions(size, positions, starts)
                return jnp.stack([first_positions(size, p, starts) for p in positions])

            firsts = compat.left_to_compiler(first_of_documents, positions)(positions, starts)
        return self.k_norm.of_pools(mean_pool(raw, size, starts), firsts)

    @scoped
    def extend(
        self,
        state: OpenBlock,
        x: Float[Array, "B T M"],
        positions: Int[Array, "B T"] | Int[Array, "3 B T"],
        lengths: Int[Array, "B"],
        counts: Int[Array, "B"],
    ) -> tuple[Float[Array, "B W C"], Int[Array, "B W"], OpenBlock, Bool[Array, "B"]]:
        """Returns the keys of the blocks that each request's next tokens complete, with "mean".

        Args:
            state: The last tokens before.
            x: Hidden states of the new tokens.
            positions: Rotary positions of the new tokens, int32.
            lengths: Number of tokens before the new ones in each request, int32.
            counts: Number of new tokens of each request, int32, 0 to T. The rest is padding.

        Returns:
            The keys; the numbers of their blocks, -1 where a block is not complete; `state` with
            the new tokens; and for which requests `state` is valid.
        """
        size, ring = self.config.block_size, state.positions
        pool, new = state.keys.extended(size, self.raw_keys(x), None, lengths, counts)
        if positions.ndim == 2:
            places = jnp.broadcast_to(positions[..., None], (*positions.shape, ring.shape[2]))
        else:
            places = jnp.moveaxis(positions, 0, -1)
        number = jnp.arange(new.numbers.shape[1], dtype=jnp.int32)
        first = (lengths // size * size)[:, None] + number * size
        of_blocks = jnp.moveaxis(rows_of_ring_and_new(ring, places, first, lengths), -1, 0)
        of_blocks = of_blocks[0] if ring.shape[2] == 1 else of_blocks
        keys = self.k_norm.of_pools(mean_pool(new.values, size), of_blocks)
        state = OpenBlock(pool, put_in_ring(ring, places, lengths, counts))
        return keys, new.numbers, state, new.is_valid
