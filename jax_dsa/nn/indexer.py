"""The projections of the lightning indexer, which precede `jax_dsa.indexer_topk`."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jax_dsa.core.checks import FLOATS, INT32
from jax_dsa.core.export import exportable
from jax_dsa.core.typing import Array, Float, Int
from jax_dsa.nn.arguments import check_module, hidden_states
from jax_dsa.nn.config import AttentionConfig
from jax_dsa.nn.fp4 import fake_quantize_fp4
from jax_dsa.nn.linear import projection
from jax_dsa.nn.rotary import hadamard, rope
from jax_dsa.nn.scopes import LayerNorm, Linear, Module, scoped
from jax_dsa.nn.stripes import unstriped
from jax_dsa.ops.quantize_fp8 import quantize_fp8


@exportable
class IndexerInputs(NamedTuple):
    """The arguments, by name, of every operator with an indexer.

    Attributes:
        index_q: Queries, in the layer's dtype or float8_e4m3fn.
        index_k: Keys, in the dtype of the queries.
        index_weights: Weight of each head for each query, float32.
        index_k_scale: Scale of each FP8 key, float32; None without quantisation.
    """

    index_q: Float[Array, "B T J C"]
    index_k: Float[Array, "B T C"]
    index_weights: Float[Array, "B T J"]
    index_k_scale: Float[Array, "B T"] | None

    def unstriped_keys(self, stripes: int) -> IndexerInputs:
        """Returns these arguments with the keys in the sequence's order.

        See `jax_dsa.nn.stripes`.
        """
        k, scale = jax.tree.map(lambda a: unstriped(a, stripes), (self.index_k, self.index_k_scale))
        return self._replace(index_k=k, index_k_scale=scale)


class LogScale(Module):
    """Multiplies each head's queries by `scale log(position + 1) + bias`.

    The factor of a new module is 1.
    """

    def __init__(self, num_heads: int) -> None:
        self.scale = nnx.Param(jnp.zeros(num_heads))
        self.bias = nnx.Param(jnp.ones(num_heads))

    @scoped
    def __call__(
        self, q: Float[Array, "B T N D"], positions: Int[Array, "B T"]
    ) -> Float[Array, "B T N D"]:
        """Returns the scaled queries, in the dtype of `q`."""
        log = jnp.log(positions.astype(jnp.float32) + 1)[..., None]
        return q * (self.scale[...] * log + self.bias[...])[..., None].astype(q.dtype)


class LightningIndexer(Module):
    """Projects hidden states to the indexer's queries, keys and head weights.

    The keys have a layer norm. Queries and keys have rotary position in their first (or last)
    `index_rope_dim` elements. Then the Hadamard transform and quantisation follow, if the
    configuration asks for them. Both inputs pass through `stop_gradient`, so that any loss of the
    results trains the indexer alone.

    Args:
        config: Sizes and switches of the layer.
        rngs: Random streams that initialise the parameters.

    Source: DeepSeek-V3.2 (2025), section 2.
    """

    def __init__(self, config: AttentionConfig, *, rngs: nnx.Rngs) -> None:
        check_module("LightningIndexer", config, AttentionConfig, rngs)
        self.config = config
        c = config
        width = c.index_heads * c.index_dim
        eps = c.norm_eps if c.index_norm_eps is None else c.index_norm_eps
        norm = {"epsilon": eps, "dtype": c.dtype, "rngs": rngs}
        self.q_norm = LayerNorm(c.model_dim, **norm) if c.q_rank is None else None
        self.wq = projection(c, c.q_rank or c.model_dim, width, rngs)
        self.wk = projection(c, c.model_dim, c.index_dim, rngs)
        self.k_norm = LayerNorm(c.index_dim, **norm)
        self.q_scale = LogScale(c.index_heads) if c.log_scaling else None
        # The weights decide between close scores and are few, so they stay in float32.
        self.weights = Linear(c.model_dim, c.index_heads, use_bias=False, rngs=rngs)

    @scoped
    def __call__(
        self,
        x: Float[Array, "B T M"],
        q_latent: Float[Array, "B T Q"],
        positions: Int[Array, "B T"],
    ) -> IndexerInputs:
        """Returns the indexer's arguments for some tokens.

        Args:
            x: Hidden states.
            q_latent: The input of the attention's query projection; see `MLAProjections`.
            positions: Rotary positions of the tokens, int32.

        Raises:
            TypeError, ValueError: If an argument has the wrong type or shape.
        """
        c = self.config
        args, x = hidden_states("LightningIndexer", self, x, c.model_dim)
        args.bind("Q", c.q_rank or c.model_dim, "'config'")
        q_latent = args.array("q_latent", q_latent, "B T Q", FLOATS)
        positions = args.array("positions", positions, "B T", INT32)
        x, q_latent = jax.lax.stop_gradient((x, q_latent))
        if self.q_norm is not None:
            q_latent = self.q_norm(q_latent)
        q = self.wq(q_latent).reshape(*x.shape[:2], c.index_heads, c.index_dim)
        if self.q_scale is not None:
            q = self.q_scale(q, positions)
        q = self._rotate(q, positions)
        k = self._rotate(self.k_norm(self.wk(x)), positions)
        weights = self.weights(x.astype(jnp.float32)) * (c.index_heads * c.index_dim) ** -0.5
        if not c.index_fp8:
            return IndexerInputs(q, k, weights, None)
        q8, q_scale = quantize_fp8(jax.lax.stop_gradient(q), block=c.index_dim)
        k8, k_scale = quantize_fp8(jax.lax.stop_gradient(k), block=c.index_dim)
        # relu(a x) = a relu(x) for a > 0, so the weights absorb the queries' scale.
        return IndexerInputs(q8, k8, weights * q_scale[..., 0], k_scale[..., 0])

    def _rotate(
        self, x: Float[Array, "B T *H C"], positions: Int[Array, "B T"]
    ) -> Float[Array, "B T *H C"]:
        """Returns queries or keys with rotary position, prepared for scoring."""
        c = self.config
        last = c.index_rope_last
        split = c.index_dim - c.index_rope_dim if last else c.index_rope_dim
        head, tail = jnp.split(x, [split], axis=-1)
        rotated = rope(tail if last else head, positions, layout=c.index_rope_layout, **c.rotation)
        x = jnp.concatenate([head, rotated] if last else [rotated, tail], axis=-1)
        return prepare_for_scoring(x, use_hadamard=c.index_hadamard, fp4=c.index_fp4)


def prepare_for_scoring(
    x: Float[Array, "B T *H C"], *, use_hadamard: bool, fp4: bool
) -> Float[Array, "B T *H C"]:
    """Returns an indexer's queries or keys after the Hadamard transform and FP4 rounding."""
    if use_hadamard:
        x = hadamard(x)
    return fake_quantize_fp4(x) if fp4 else x
