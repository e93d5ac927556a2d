"""Multi-head latent attention with a lightning indexer."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jax_dsa.nn.indexer import IndexerInputs, LightningIndexer
from jax_dsa.nn.rotary import rope
from jax_dsa.ops.dsa_attention import dsa_attention
from jax_dsa.ops.indexer import indexer_topk
from jax_dsa.ops.losses import dense_indexer_kl_loss
from jax_dsa.ops.masked_attention import masked_attention
from jax_dsa.ops.sparse_mla import sparse_mla_decode

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int

    from jax_dsa.nn.cache import LayerCache
    from jax_dsa.nn.config import AttentionConfig


class MLAProjections(NamedTuple):
    """A layer's projected tokens: queries of every head, and the key that all heads share."""

    q_nope: Float[Array, "B T N P"]
    q_rope: Float[Array, "B T N R"]
    kv: Float[Array, "B T 1 D"]
    """The normalised latent (first E numbers) and the rotary key: what a cache holds."""
    q_latent: Float[Array, "B T Q"]


class AttentionAux(NamedTuple):
    """What attention found beside its output; under `jax.jit` unused parts cost nothing."""

    kl: Float[Array, ""]
    """The indexer's loss: over the selected keys if sparse, else over all visible keys."""
    lse: Float[Array, "B T N"]
    indices: Int[Array, "B T K"] | None
    """The selection; None if dense."""
    q: Float[Array, "B T N D"]
    kv: Float[Array, "B T 1 D"]
    indexer: IndexerInputs


class SparseMLA(nnx.Module):
    """The projections of multi-head latent attention, in both of its forms.

    Keys and values of all heads are linear in one latent of E numbers a token, so the heads'
    up-projections can be multiplied into the query and the output instead. In this absorbed form
    every head attends to the same D = E + R numbers a token (multi-query attention): that is what a
    cache holds and what `jax_dsa.sparse_mla` gathers. The expanded form makes each head's keys and
    values explicit: fewer operations when all keys are attended to.

    Source: DeepSeek-V2 (2024), section 2.1 and appendix C.
    """

    def __init__(self, config: AttentionConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        c = config
        heads = c.num_heads
        linear = {"use_bias": False, "dtype": c.dtype, "rngs": rngs}
        norm = {"epsilon": c.norm_eps, "dtype": c.dtype, "rngs": rngs}
        self.wq_a = nnx.Linear(c.model_dim, c.q_rank, **linear)
        self.q_norm = nnx.RMSNorm(c.q_rank, **norm)
        self.wq_b = nnx.Linear(c.q_rank, heads * (c.nope_dim + c.rope_dim), **linear)
        self.wkv_a = nnx.Linear(c.model_dim, c.kv_rank + c.rope_dim, **linear)
        self.kv_norm = nnx.RMSNorm(c.kv_rank, **norm)
        per_head = nnx.initializers.lecun_normal(in_axis=1, out_axis=2, batch_axis=0)
        self.w_uk = nnx.Param(per_head(rngs.params(), (heads, c.kv_rank, c.nope_dim)))
        self.w_uv = nnx.Param(per_head(rngs.params(), (heads, c.kv_rank, c.v_dim)))
        self.wo = nnx.Linear(heads * c.v_dim, c.model_dim, **linear)

    def project(self, x: Float[Array, "B T M"], positions: Int[Array, "B T"]) -> MLAProjections:
        """Queries and latent keys of hidden states `x` at the given positions."""
        c = self.config
        q_latent = self.q_norm(self.wq_a(x))
        q = self.wq_b(q_latent).reshape(*x.shape[:2], c.num_heads, c.nope_dim + c.rope_dim)
        q_nope, q_rope = jnp.split(q, [c.nope_dim], axis=-1)
        latent, k_rope = jnp.split(self.wkv_a(x), [c.kv_rank], axis=-1)
        q_rope = rope(q_rope, positions, base=c.rope_base, layout=c.rope_layout)
        k_rope = rope(k_rope, positions, base=c.rope_base, layout=c.rope_layout)
        kv = jnp.concatenate([self.kv_norm(latent), k_rope], axis=-1)[:, :, None, :]
        return MLAProjections(q_nope, q_rope, kv, q_latent)

    def absorbed_queries(self, p: MLAProjections) -> Float[Array, "B T N D"]:
        """Queries against the latent keys."""
        q = jnp.einsum("btnp,nep->btne", p.q_nope, self.w_uk.astype(self.config.dtype))
        return jnp.concatenate([q, p.q_rope], axis=-1)

    def output(self, out: Float[Array, "B T N E"]) -> Float[Array, "B T M"]:
        """Hidden states from the attention's latent output."""
        values = jnp.einsum("btne,nev->btnv", out, self.w_uv.astype(self.config.dtype))
        return self.wo(values.reshape(*out.shape[:2], -1))

    def dense(self, p: MLAProjections) -> tuple[Float[Array, "B T M"], Float[Array, "B T N"]]:
        """Causal attention to all keys, in expanded form: hidden states and lse."""
        c = self.config
        latent, k_rope = jnp.split(p.kv[:, :, 0], [c.kv_rank], axis=-1)
        k_nope = jnp.einsum("bse,nep->bsnp", latent, self.w_uk.astype(c.dtype))
        k_rope = jnp.broadcast_to(k_rope[:, :, None], (*k_nope.shape[:3], c.rope_dim))
        v = jnp.einsum("bse,nev->bsnv", latent, self.w_uv.astype(c.dtype))
        # The operator takes one width for keys and values; zeros change neither scores nor values.
        width = max(c.nope_dim + c.rope_dim, c.v_dim)
        q = jnp.concatenate([p.q_nope, p.q_rope], axis=-1)
        k = jnp.concatenate([k_nope, k_rope], axis=-1)
        q, k, v = (jnp.pad(x, [(0, 0)] * 3 + [(0, width - x.shape[-1])]) for x in (q, k, v))
        out, lse = masked_attention(q, k, v, scale=c.scale, is_causal=True, return_lse=True)
        return self.wo(out[..., : c.v_dim].reshape(*out.shape[:2], -1)), lse


class DSAttention(nnx.Module):
    """DeepSeek sparse attention: MLA over the keys that a lightning indexer selects.

    The indexer lies in the attribute `indexer`, which is all that its own loss, `aux.kl`, trains;
    any other loss gives its parameters exactly zero gradient.
    """

    def __init__(self, config: AttentionConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        self.mla = SparseMLA(config, rngs=rngs)
        self.indexer = LightningIndexer(config, rngs=rngs)

    def __call__(
        self, x: Float[Array, "B T M"], *, sparse: bool = True
    ) -> tuple[Float[Array, "B T M"], AttentionAux]:
        """Causal attention among the tokens of `x`.

        Args:
            x: hidden states.
            sparse: attend to the selected keys. False attends to all of them, and its `aux.kl` is
                the indexer's warm-up loss over all of them.
        """
        c = self.config
        positions = jnp.broadcast_to(jnp.arange(x.shape[1], dtype=jnp.int32), x.shape[:2])
        p = self.mla.project(x, positions)
        index = self.indexer(x, p.q_latent, positions)
        q = self.mla.absorbed_queries(p)
        if sparse:
            out, dsa = dsa_attention(
                q,
                p.kv,
                index.q,
                index.k,
                index.weights,
                index_k_scale=index.k_scale,
                top_k=c.top_k,
                value_dim=c.kv_rank,
                scale=c.scale,
            )
            return self.mla.output(out), AttentionAux(dsa.kl, dsa.lse, dsa.indices, q, p.kv, index)
        y, lse = self.mla.dense(p)
        kl = dense_indexer_kl_loss(
            index.q,
            index.k,
            index.weights,
            *jax.lax.stop_gradient((q, p.kv)),
            k_scale=index.k_scale,
            scale=c.scale,
        )
        return y, AttentionAux(kl, lse, None, q, p.kv, index)

    def decode(
        self, x: Float[Array, "B T M"], cache: LayerCache
    ) -> tuple[Float[Array, "B T M"], LayerCache]:
        """Sparse attention of each request's next T tokens to those in the cache and, causally, to
        each other.

        T = 1 is a decode step, T = the prompt's length a prefill, anything between a chunk of one.
        The cache comes back with the new tokens in it.
        """
        c = self.config
        positions = cache.lengths[:, None] + jnp.arange(x.shape[1], dtype=jnp.int32)
        p = self.mla.project(x, positions)
        index = self.indexer(x, p.q_latent, positions)
        cache = cache.append(p.kv, index)
        indices, _ = indexer_topk(
            index.q,
            cache.index_k,
            index.weights,
            c.top_k,
            k_scale=cache.index_k_scale,
            ends=positions + 1,
        )
        out = sparse_mla_decode(
            self.mla.absorbed_queries(p),
            cache.kv,
            indices[:, :, None],
            value_dim=c.kv_rank,
            scale=c.scale,
        )
        return self.mla.output(out), cache
