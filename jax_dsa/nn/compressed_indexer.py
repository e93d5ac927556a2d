"""The lightning indexer of compressed attention, which has compressed keys of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp
from flax import nnx

from jax_dsa.core.typing import Array, Float, Int
from jax_dsa.nn.compressor import Compressor
from jax_dsa.nn.indexer import prepare_for_scoring
from jax_dsa.nn.scopes import Linear, Module, scoped

if TYPE_CHECKING:
    from jax_dsa.nn.compressed_config import CompressedConfig
    from jax_dsa.nn.compressor import Stream


class IndexCompressor(Compressor):
    """Computes an indexer's compressed keys."""

    def pool(
        self, values: Array, gates: Array, positions: Array, starts: Array | None
    ) -> Float[Array, "B W D"]:
        """Returns the keys of `Compressor.pool`, prepared like the indexer's queries."""
        keys = super().pool(values, gates, positions, starts)
        return prepare_for_scoring(
            keys, use_hadamard=self.config.index_hadamard, fp4=self.config.index_fp4
        )


class CompressedIndexer(Module):
    """A lightning indexer over compressed keys of its own.

    The caller passes inputs behind `jax.lax.stop_gradient`, so that the indexer's loss trains the
    indexer alone.

    Args:
        config: Sizes and switches of the layer.
        rngs: Random streams that initialise the parameters.
    """

    def __init__(self, config: CompressedConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        c, width = config, config.index_heads * config.index_dim
        self.wq = Linear(c.q_rank, width, use_bias=False, dtype=c.dtype, rngs=rngs)
        self.compressor = IndexCompressor(c, c.index_dim, rngs=rngs)
        self.weights = Linear(c.model_dim, c.index_heads, use_bias=False, rngs=rngs)

    @scoped
    def __call__(
        self,
        x: Float[Array, "B T M"],
        q_latent: Float[Array, "B T Q"],
        positions: Int[Array, "B T"],
    ) -> tuple[Float[Array, "B T J C"], Float[Array, "B T J"]]:
        """Returns the queries and the head weights for `jax_dsa.indexer_topk`.

        Args:
            x: Hidden states, which the float32 weights are projected from.
            q_latent: The latent that the queries are projected from.
            positions: Rotary positions of the tokens, int32.
        """
        c = self.config
        q = self.wq(q_latent).reshape(*x.shape[:2], c.index_heads, c.index_dim)
        weights = self.weights(x.astype(jnp.float32)) * (c.index_heads * c.index_dim) ** -0.5
        q = prepare_for_scoring(
            c.rotate(q, positions), use_hadamard=c.index_hadamard, fp4=c.index_fp4
        )
        return q, weights

    @scoped
    def keys(
        self,
        x: Float[Array, "B T M"],
        positions: Int[Array, "B T"],
        starts: Int[Array, "B T"] | None,
    ) -> Float[Array, "B W C"]:
        """Returns the indexer's compressed keys; the arguments are those of `Compressor`."""
        return self.compressor(x, positions, starts)

    @scoped
    def extend(
        self,
        stream: Stream,
        x: Float[Array, "B T M"],
        lengths: Int[Array, "B"],
        counts: Int[Array, "B"],
    ) -> Stream:
        """Returns the compressed keys with more tokens, as `Compressor.extend`."""
        return self.compressor.extend(stream, x, lengths, counts)
