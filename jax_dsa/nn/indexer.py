"""The projections of the lightning indexer, which precede `jax_dsa.indexer_topk`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jax_dsa.core.checks import FLOATS, INT32
from jax_dsa.core.export import exportable
from jax_dsa.core.typing import Array, Bool, Float, Int
from jax_dsa.nn.arguments import check_module, hidden_states
from jax_dsa.nn.config import AttentionConfig
from jax_dsa.nn.fp4 import fake_quantize_fp4
from jax_dsa.nn.linear import projection
from jax_dsa.nn.rotary import hadamard, rope
from jax_dsa.nn.scopes import LayerNorm, Linear, Module, scoped
from jax_dsa.nn.stripes import unstriped
from jax_dsa.ops.gated_pool import gated_pool
from jax_dsa.ops.quantize_fp8 import quantize_fp8

if TYPE_CHECKING:
    from jax_dsa.nn.open_pool import OpenPool


@exportable
class IndexerInputs(NamedTuple):
    """The arguments, by name, of every operator with an indexer.

    Attributes:
        index_q: Queries, in the layer's dtype or float8_e4m3fn.
        index_k: Keys, in the dtype of the queries: S = T keys of tokens, or one key for every
            `index_pool` tokens.
        index_weights: Weight of each head for each query, float32.
        index_k_scale: Scale of each FP8 key, float32; None without quantisation.
    """

    index_q: Float[Array, "B T J C"]
    index_k: Float[Array, "B S C"]
    index_weights: Float[Array, "B T J"]
    index_k_scale: Float[Array, "B S"] | None

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
    `index_rope_dim` elements. With `config.index_pool` they have none, and the keys of each pool of
    tokens become one, by the softmax of `gated_pool` over the tokens' gates. Then the Hadamard
    transform and quantisation follow, if the configuration asks for them. Both inputs pass through
    `stop_gradient`, so that any loss of the results trains the indexer alone.

    Args:
        config: Sizes and switches of the layer.
        rngs: Random streams that initialise the parameters.

    Source: DeepSeek-V3.2 (2025), section 2; the pooling as in GLM-5.3-Flash (2026).
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
        size = c.index_pool
        self.wg = None if size is None else projection(c, c.model_dim, c.index_dim, rngs)
        self.position_bias = None if size is None else nnx.Param(jnp.zeros((size, c.index_dim)))
        # The weights decide between close scores and are few, so they stay in float32.
        self.weights = Linear(c.model_dim, c.index_heads, use_bias=False, rngs=rngs)

    @scoped
    def __call__(
        self,
        x: Float[Array, "B T M"],
        q_latent: Float[Array, "B T Q"],
        positions: Int[Array, "B T"],
        starts: Int[Array, "B T"] | None = None,
        *,
        stripes: int = 1,
    ) -> IndexerInputs:
        """Returns the indexer's arguments for some tokens.

        Args:
            x: Hidden states.
            q_latent: The input of the attention's query projection; see `MLAProjections`.
            positions: Rotary positions of the tokens, int32.
            starts: First token of each token's document, int32; read only with `index_pool`.
                Default: each sequence is one document.
            stripes: Number of stripes that all arrays store the sequence in; see
                `jax_dsa.nn.stripes`. The keys of pools are in the sequence's order.

        Raises:
            TypeError, ValueError: If an argument has the wrong type or shape.
        """
        x, q_latent, positions = self._checked(x, q_latent, positions)
        if self.config.index_pool is None:
            keys = self._rotate(self.k_norm(self.wk(x)), positions)
        else:
            in_order = (*self._contributions(x), starts)
            keys = self._pooled(*jax.tree.map(lambda a: unstriped(a, stripes), in_order))
        return self._inputs(x, q_latent, positions, keys)

    @scoped
    def extend(
        self,
        x: Float[Array, "B T M"],
        q_latent: Float[Array, "B T Q"],
        positions: Int[Array, "B T"],
        pool: OpenPool,
        lengths: Int[Array, "B"],
        counts: Int[Array, "B"],
    ) -> tuple[IndexerInputs, Int[Array, "B W"], OpenPool, Bool[Array, "B"]]:
        """Returns the indexer's arguments for each request's next tokens, with `index_pool`.

        Args:
            x: Hidden states of the new tokens.
            q_latent: As in `__call__`.
            positions: As in `__call__`.
            pool: The last tokens before.
            lengths: Number of tokens before the new ones in each request, int32.
            counts: Number of new tokens of each request, int32, 0 to T. The rest is padding.

        Returns:
            The arguments, whose keys are those of the pools that the new tokens may complete; the
            numbers of these pools, -1 where they are not complete; `pool` with the new tokens; and
            for which requests `pool` is valid.
        """
        c = self.config
        x, q_latent, positions = self._checked(x, q_latent, positions)
        assert c.index_pool is not None
        pool, new = pool.extended(c.index_pool, *self._contributions(x), lengths, counts)
        keys = self._pooled(new.values, new.gates, None)
        inputs = self._inputs(x, q_latent, positions, keys)
        return inputs, new.numbers, pool, new.is_valid

    def _checked(self, x: Any, q_latent: Any, positions: Any) -> tuple[Array, Array, Array]:
        """Returns the arguments of these names; hidden states and latents have no gradient."""
        c = self.config
        args, x = hidden_states("LightningIndexer", self, x, c.model_dim)
        args.bind("Q", c.q_rank or c.model_dim, "'config'")
        q_latent = args.array("q_latent", q_latent, "B T Q", FLOATS)
        positions = args.array("positions", positions, "B T", INT32)
        return *jax.lax.stop_gradient((x, q_latent)), positions

    def _contributions(
        self, x: Float[Array, "B T M"]
    ) -> tuple[Float[Array, "B T C"], Float[Array, "B T C"]]:
        """Returns the tokens' keys before the pooling, and their gates."""
        assert self.wg is not None
        return self.k_norm(self.wk(x)), self.wg(x)

    def _pooled(
        self,
        values: Float[Array, "B T C"],
        gates: Float[Array, "B T C"] | None,
        starts: Int[Array, "B T"] | None,
    ) -> Float[Array, "B W C"]:
        """Returns the pools' keys, prepared for scoring."""
        assert self.position_bias is not None and gates is not None
        bias = self.position_bias[...].astype(jnp.float32)[:, None]
        keys = gated_pool(values[:, :, None], gates[:, :, None], bias, starts)
        return self._prepared(keys)

    def _inputs(
        self,
        x: Float[Array, "B T M"],
        q_latent: Float[Array, "B T Q"],
        positions: Int[Array, "B T"],
        k: Float[Array, "B S C"],
    ) -> IndexerInputs:
        """Returns the arguments with these keys."""
        c = self.config
        if self.q_norm is not None:
            q_latent = self.q_norm(q_latent)
        q = self.wq(q_latent).reshape(*x.shape[:2], c.index_heads, c.index_dim)
        if self.q_scale is not None:
            q = self.q_scale(q, positions)
        q = self._rotate(q, positions)
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
        return self._prepared(
            jnp.concatenate([head, rotated] if last else [rotated, tail], axis=-1)
        )

    def _prepared(self, x: Float[Array, "B T *H C"]) -> Float[Array, "B T *H C"]:
        c = self.config
        return prepare_for_scoring(x, use_hadamard=c.index_hadamard, fp4=c.index_fp4)


def prepare_for_scoring(
    x: Float[Array, "B T *H C"], *, use_hadamard: bool, fp4: bool
) -> Float[Array, "B T *H C"]:
    """Returns an indexer's queries or keys after the Hadamard transform and FP4 rounding."""
    if use_hadamard:
        x = hadamard(x)
    return fake_quantize_fp4(x) if fp4 else x
