"""A small decoder-only language model with sparse attention."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from jax_dsa.core.typing import Array, Float, Int
from jax_dsa.nn.attention import DSAttention
from jax_dsa.nn.cache import DecoderCache
from jax_dsa.nn.linear import projection

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from jax.sharding import Sharding

    from jax_dsa.nn.attention import AttentionAux
    from jax_dsa.nn.cache import LayerCache
    from jax_dsa.nn.config import DecoderConfig, IndexerType


class SwiGLU(nnx.Module):
    """Gated feed-forward layer: `down(silu(gate(x)) * up(x))` (Shazeer, 2020)."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs) -> None:
        a = config.attention
        self.gate_up = projection(a, a.model_dim, 2 * config.mlp_dim, rngs)
        self.down = projection(a, config.mlp_dim, a.model_dim, rngs)

    def __call__(self, x: Float[Array, "B T M"]) -> Float[Array, "B T M"]:
        """Hidden states to hidden states."""
        gate, up = jnp.split(self.gate_up(x), 2, axis=-1)
        return self.down(jax.nn.silu(gate) * up)


class Block(nnx.Module):
    """Pre-norm residual block: attention, then SwiGLU."""

    def __init__(
        self, config: DecoderConfig, indexer_type: IndexerType = "full", *, rngs: nnx.Rngs
    ) -> None:
        a = config.attention
        norm = {"epsilon": a.norm_eps, "dtype": a.dtype, "rngs": rngs}
        self.attention_norm = nnx.RMSNorm(a.model_dim, **norm)
        self.attention = DSAttention(a, indexer_type, rngs=rngs)
        self.mlp_norm = nnx.RMSNorm(a.model_dim, **norm)
        self.mlp = SwiGLU(config, rngs=rngs)

    def __call__(
        self,
        x: Float[Array, "B T M"],
        *,
        indices: Int[Array, "B T K"] | None = None,
        positions: Int[Array, "B T"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
        stripes: int = 1,
        sparse: bool = True,
    ) -> tuple[Float[Array, "B T M"], AttentionAux]:
        """Hidden states to hidden states, and what the attention found; see `DSAttention`."""
        y, aux = self.attention(
            self.attention_norm(x),
            indices=indices,
            positions=positions,
            segment_ids=segment_ids,
            stripes=stripes,
            sparse=sparse,
        )
        x = x + y
        return x + self.mlp(self.mlp_norm(x)), aux

    def decode(
        self,
        x: Float[Array, "B T M"],
        cache: LayerCache,
        *,
        indices: Int[Array, "B T K"] | None = None,
    ) -> tuple[Float[Array, "B T M"], LayerCache, Int[Array, "B T K"]]:
        """`__call__` for the T tokens after those in the cache; see `DSAttention.decode`."""
        y, cache, indices = self.attention.decode(self.attention_norm(x), cache, indices=indices)
        x = x + y
        return x + self.mlp(self.mlp_norm(x)), cache, indices


class DecoderLM(nnx.Module):
    """Embedding, blocks, final norm and vocabulary projection."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        a = config.attention
        self.embed = nnx.Embed(config.vocab, a.model_dim, dtype=a.dtype, rngs=rngs)
        self.blocks = nnx.List([Block(config, kind, rngs=rngs) for kind in config.layers])
        self.norm = nnx.RMSNorm(a.model_dim, epsilon=a.norm_eps, dtype=a.dtype, rngs=rngs)
        self.head = nnx.Linear(a.model_dim, config.vocab, use_bias=False, dtype=a.dtype, rngs=rngs)

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        *,
        indices: Sequence[Int[Array, "B T K"] | None] | None = None,
        positions: Int[Array, "B T"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
        stripes: int = 1,
        sparse: bool = True,
        remat_policy: Callable[..., Any] | None = None,
        activation_sharding: Sharding | None = None,
    ) -> tuple[Float[Array, "B T V"], list[AttentionAux]]:
        """Next-token logits in float32, and each layer's attention results.

        Args:
            tokens: int32 token numbers.
            indices: a selection of each layer, to be replayed: `aux.indices` of an earlier run, or
                what `decode` gave. None, for all or for one, selects anew.
            positions, segment_ids, stripes, sparse: see `DSAttention`.
            remat_policy: recompute each block in the backward pass except for what this policy of
                `jax.checkpoint` saves (`jax_dsa.training.remat_policy` makes one by name); None
                saves everything.
            activation_sharding: of the hidden states [B, T, M] between the blocks, on a mesh with
                Auto axes. Without it the compiler may shard them as it does the parameters.
        """

        def placed(x: jax.Array) -> jax.Array:
            if activation_sharding is None:
                return x
            return jax.lax.with_sharding_constraint(x, activation_sharding)

        x = placed(self._embed(tokens))
        places = {"positions": positions, "segment_ids": segment_ids}
        recorded = [None] * len(self.blocks) if indices is None else indices
        last = None
        layers: list[AttentionAux] = []
        blocks = [nnx.split(block) for block in self.blocks]
        for i, (kind, replayed) in enumerate(zip(self.config.layers, recorded, strict=True)):
            if replayed is None and kind == "shared":
                replayed = last
            graph, params = blocks[i]
            if i + 1 < len(blocks):
                # The backward pass goes on below this block once the next one's parameters have
                # their gradients, whose exchange this block's backward pass hides. Where devices
                # exchange anything, XLA would put them off to the end, for all blocks, and memory
                # would hold what they are made of until then (JAX issue 20763).
                after, later = blocks[i + 1]
                later, x = jax.lax.optimization_barrier((later, x))
                blocks[i + 1] = after, later

            def run(
                params: Any, x: jax.Array, arrays: dict[str, Any], graph: Any = graph
            ) -> tuple[jax.Array, AttentionAux]:
                return nnx.merge(graph, params)(x, **arrays, stripes=stripes, sparse=sparse)

            if remat_policy is not None:
                run = jax.checkpoint(run, policy=remat_policy)
            x, aux = run(params, x, {"indices": replayed, **places})
            x, last = placed(x), aux.indices
            layers.append(aux)
        return self._logits(x), layers

    def init_cache(
        self, batch: int, capacity: int, *, fp8: bool = False, page_size: int | None = None
    ) -> DecoderCache:
        """Room for `capacity` tokens of each of `batch` requests, as in `LayerCache.empty`."""
        return DecoderCache.empty(self.config, batch, capacity, fp8=fp8, page_size=page_size)

    @overload
    def decode(
        self,
        tokens: Int[Array, "B T"],
        cache: DecoderCache,
        *,
        return_indices: Literal[False] = False,
    ) -> tuple[Float[Array, "B T V"], DecoderCache]: ...
    @overload
    def decode(
        self, tokens: Int[Array, "B T"], cache: DecoderCache, *, return_indices: Literal[True]
    ) -> tuple[Float[Array, "B T V"], DecoderCache, list[Int[Array, "B T K"]]]: ...
    def decode(
        self, tokens: Int[Array, "B T"], cache: DecoderCache, *, return_indices: bool = False
    ) -> Any:
        """Logits of each request's next T tokens, and the cache with them in it; with
        `return_indices` also what each layer selected, to be replayed.
        """
        x = self._embed(tokens)
        selections: list[jax.Array] = []
        layers = []
        for block, kind, old in zip(self.blocks, self.config.layers, cache.layers, strict=True):
            reused = selections[-1] if kind == "shared" else None
            x, new, indices = block.decode(x, old, indices=reused)
            layers.append(new)
            selections.append(indices)
        results = self._logits(x), DecoderCache(tuple(layers))
        return (*results, selections) if return_indices else results

    def _embed(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T M"]:
        # On an Explicit mesh a lookup wants to be told where its rows go.
        spec = jax.typeof(tokens).sharding.spec
        explicit = jax.sharding.get_abstract_mesh().explicit_axes
        return self.embed(tokens, PartitionSpec(*spec, None) if explicit else None)

    def _logits(self, x: Float[Array, "B T M"]) -> Float[Array, "B T V"]:
        return self.head(self.norm(x)).astype(jnp.float32)
