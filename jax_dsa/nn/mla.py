"""The projections of multi-head latent attention (MLA), and its dense form."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jax_dsa.core.checks import INT32
from jax_dsa.core.export import exportable
from jax_dsa.core.typing import Array, Float, Int
from jax_dsa.nn.arguments import check_module, hidden_states
from jax_dsa.nn.config import AttentionConfig
from jax_dsa.nn.indexer import LogScale
from jax_dsa.nn.linear import projection
from jax_dsa.nn.rotary import rope
from jax_dsa.nn.scopes import Module, RMSNorm, scoped
from jax_dsa.ops.masked_attention import masked_attention


@exportable
class MLAProjections(NamedTuple):
    """The projections of a layer's tokens: queries of every head, and the key that heads share.

    Attributes:
        q_nope: The elements of the queries without position.
        q_rope: The elements of the queries that have been rotated by their position.
        kv: The normalised latent (the first E elements) and the rotary key (the last R): the row
            that a cache stores. None if the layer attends to another layer's keys.
        q_latent: The input of the query projection: the queries' latent, or the hidden states if
            `config.q_rank` is None.
        gate: Sigmoid gate on each head's values; None if `config.gate` is False.
    """

    q_nope: Float[Array, "B T N P"]
    q_rope: Float[Array, "B T N R"]
    kv: Float[Array, "B T 1 D"] | None
    q_latent: Float[Array, "B T Q"]
    gate: Float[Array, "B T N V"] | None


class MLA(Module):
    """The projections of multi-head latent attention, in its absorbed and its expanded form.

    Keys and values of all heads are linear in one latent of E numbers per token. In the absorbed
    form, the heads' up-projections are multiplied into the query and into the output. Every head
    then attends to the same D = E + R numbers per token (multi-query attention), which are what a
    cache stores and what `jax_dsa.sparse_mla` gathers. The expanded form computes each head's keys
    and values, which takes fewer operations if a query attends to all keys.

    Args:
        config: Sizes and switches of the layer.
        rngs: Random streams that initialise the parameters.

    Source: DeepSeek-V2 (2024), section 2.1 and appendix C.
    """

    def __init__(self, config: AttentionConfig, *, rngs: nnx.Rngs) -> None:
        check_module("MLA", config, AttentionConfig, rngs)
        self.config = config
        c = config
        heads = c.num_heads
        norm = {"epsilon": c.norm_eps, "dtype": c.dtype, "rngs": rngs}
        rank = c.q_rank
        self.wq_a = None if rank is None else projection(c, c.model_dim, rank, rngs, bias=c.bias)
        self.q_norm = None if rank is None else RMSNorm(rank, **norm)
        self.wq_b = projection(c, rank or c.model_dim, heads * (c.nope_dim + c.rope_dim), rngs)
        self.q_scale = LogScale(heads) if c.log_scaling else None
        own_keys = not c.shares_keys
        latent = c.kv_rank + c.rope_dim
        self.wkv_a = projection(c, c.model_dim, latent, rngs, bias=c.bias) if own_keys else None
        self.kv_norm = RMSNorm(c.kv_rank, **norm) if own_keys else None
        per_head = nnx.initializers.lecun_normal(in_axis=1, out_axis=2, batch_axis=0)
        self.w_uk = nnx.Param(per_head(rngs.params(), (heads, c.kv_rank, c.nope_dim)))
        self.w_uv = nnx.Param(per_head(rngs.params(), (heads, c.kv_rank, c.v_dim)))
        self.wo = projection(c, heads * c.v_dim, c.model_dim, rngs, bias=c.bias)
        self.sinks = nnx.Param(jnp.zeros(heads)) if c.sinks else None
        self.wg = projection(c, c.model_dim, heads * c.v_dim, rngs) if c.gate else None

    @scoped
    def project(self, x: Float[Array, "B T M"], positions: Int[Array, "B T"]) -> MLAProjections:
        """Returns the queries, the latent keys and the gate of hidden states.

        Args:
            x: Hidden states.
            positions: Rotary positions of the tokens, int32.

        Raises:
            TypeError, ValueError: If an argument has the wrong type or shape.
        """
        c = self.config
        args, x = hidden_states("MLA.project", self, x, c.model_dim)
        positions = args.array("positions", positions, "B T", INT32)
        q_latent = x
        if self.wq_a is not None and self.q_norm is not None:
            q_latent = self.q_norm(self.wq_a(x))
        q = self.wq_b(q_latent).reshape(*x.shape[:2], c.num_heads, c.nope_dim + c.rope_dim)
        if self.q_scale is not None:
            q = self.q_scale(q, positions)
        q_nope, q_rope = jnp.split(q, [c.nope_dim], axis=-1)
        q_rope = rope(q_rope, positions, layout=c.rope_layout, **c.rotation)
        kv = None
        if self.wkv_a is not None and self.kv_norm is not None:
            latent, k_rope = jnp.split(self.wkv_a(x), [c.kv_rank], axis=-1)
            k_rope = rope(k_rope, positions, layout=c.rope_layout, **c.rotation)
            kv = jnp.concatenate([self.kv_norm(latent), k_rope], axis=-1)[:, :, None, :]
        gate = None
        if self.wg is not None:
            gate = jax.nn.sigmoid(self.wg(x)).reshape(*x.shape[:2], c.num_heads, c.v_dim)
        return MLAProjections(q_nope, q_rope, kv, q_latent, gate)

    @property
    def sink_logits(self) -> Float[Array, "N"] | None:
        """The heads' sink logits, float32, as operators take them; None without sinks."""
        return None if self.sinks is None else self.sinks[...]

    @scoped
    def absorbed_queries(self, p: MLAProjections) -> Float[Array, "B T N D"]:
        """Returns the queries of the absorbed form, which attend to the latent keys."""
        q = self._up_projected("w_uk", "btnp,nep->btne", p.q_nope)
        return jnp.concatenate([q, p.q_rope], axis=-1)

    @scoped
    def output(self, out: Float[Array, "B T N E"], p: MLAProjections) -> Float[Array, "B T M"]:
        """Returns hidden states for the heads' outputs in the absorbed form."""
        values = self._up_projected("w_uv", "btne,nev->btnv", out)
        return self._gated_output(values, p)

    @scoped
    def dense(
        self, p: MLAProjections, starts: Int[Array, "B T"] | None = None
    ) -> tuple[Float[Array, "B T M"], Float[Array, "B T N"]]:
        """Computes causal attention to all keys of the same document, in the expanded form.

        Args:
            p: The projections of whole sequences, in order; `p.kv` must not be None.
            starts: Index of the first token of each token's document, int32. Default: each sequence
                is one document.

        Returns:
            The hidden states, and the lse of the scores, float32.
        """
        c = self.config
        assert p.kv is not None
        latent, k_rope = jnp.split(p.kv[:, :, 0], [c.kv_rank], axis=-1)
        k_nope = self._up_projected("w_uk", "bse,nep->bsnp", latent)
        k_rope = jnp.broadcast_to(k_rope[:, :, None], (*k_nope.shape[:3], c.rope_dim))
        v = self._up_projected("w_uv", "bse,nev->bsnv", latent)
        q = jnp.concatenate([p.q_nope, p.q_rope], axis=-1)
        k = jnp.concatenate([k_nope, k_rope], axis=-1)
        own = None if starts is None else (starts, starts)  # A document's start identifies it.
        out, lse = masked_attention(
            q,
            k,
            v,
            scale=c.scale,
            is_causal=True,
            segment_ids=own,
            sinks=self.sink_logits,
            return_lse=True,
        )
        return self._gated_output(out, p), lse

    def _up_projected(self, name: str, equation: str, x: Array) -> Array:
        """Returns the product of `x` with the heads' up-projections "w_uk" or "w_uv"."""
        with jax.named_scope(name):
            return jnp.einsum(equation, x, getattr(self, name).astype(self.config.dtype))

    def _gated_output(
        self, values: Float[Array, "B T N V"], p: MLAProjections
    ) -> Float[Array, "B T M"]:
        if p.gate is not None:
            values = values * p.gate
        batch, length, heads, dim = values.shape
        return self.wo(values.reshape(batch, length, heads * dim))
