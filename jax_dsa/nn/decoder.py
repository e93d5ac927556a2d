"""A small decoder-only language model with sparse attention."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from jax_dsa.core import compat
from jax_dsa.core.typing import Array, Float, Int
from jax_dsa.nn.arguments import (
    check_module,
    check_policy,
    check_type,
    hidden_states,
    token_counts,
    token_numbers,
)
from jax_dsa.nn.attention import DSAttention
from jax_dsa.nn.cache import DecoderCache, check_layer_cache, empty_decoder
from jax_dsa.nn.config import DecoderConfig
from jax_dsa.nn.layers import attention_layer
from jax_dsa.nn.linear import projection
from jax_dsa.nn.scopes import Embed, Linear, Module, RMSNorm, scoped
from jax_dsa.ops.losses import indexer_kl_loss

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from jax.sharding import Sharding

    from jax_dsa.core.checks import Args
    from jax_dsa.nn.attention import AttentionAux
    from jax_dsa.nn.cache import LayerCache
    from jax_dsa.nn.config import IndexerType
    from jax_dsa.nn.grouped import GroupedAux
    from jax_dsa.nn.grouped_cache import GroupedCache

    Aux = AttentionAux | GroupedAux
    Selection = Int[Array, "B T K"] | Int[Array, "B T G K"]


class SwiGLU(Module):
    """Gated feed-forward layer: `down(silu(gate(x)) * up(x))` (Shazeer, 2020).

    Args:
        config: Sizes of the decoder.
        rngs: Random streams that initialise the parameters.
    """

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs) -> None:
        check_module("SwiGLU", config, DecoderConfig, rngs)
        a = config.attention
        self.gate_up = projection(a, a.model_dim, 2 * config.mlp_dim, rngs)
        self.down = projection(a, config.mlp_dim, a.model_dim, rngs)

    @scoped
    def __call__(self, x: Float[Array, "B T M"]) -> Float[Array, "B T M"]:
        """Returns the layer's output for hidden states `x`, in the configuration's dtype."""
        _, x = hidden_states("SwiGLU", self, x, self.gate_up.in_features)
        gate, up = jnp.split(self.gate_up(x), 2, axis=-1)
        return self.down(jax.nn.silu(gate) * up)


class Block(Module):
    """Pre-norm residual block: attention, then SwiGLU.

    Args:
        config: Sizes of the decoder.
        indexer_type: "full" or "shared", as in `DSAttention`.
        rngs: Random streams that initialise the parameters.
    """

    def __init__(
        self, config: DecoderConfig, indexer_type: IndexerType = "full", *, rngs: nnx.Rngs
    ) -> None:
        check_module("Block", config, DecoderConfig, rngs)
        a = config.attention
        self.attention_norm = RMSNorm(a.model_dim, **config.residual_norm, rngs=rngs)
        self.attention = attention_layer(a, indexer_type, rngs=rngs)
        self.mlp_norm = RMSNorm(a.model_dim, **config.residual_norm, rngs=rngs)
        self.mlp = SwiGLU(config, rngs=rngs)

    def __call__(
        self,
        x: Float[Array, "B T M"],
        *,
        indices: Selection | None = None,
        positions: Int[Array, "B T"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
        stripes: int = 1,
        sparse: bool = True,
        return_teacher: bool = False,
    ) -> tuple[Float[Array, "B T M"], Aux]:
        """Returns hidden states, and the attention's other results.

        The arguments are those of the layer, `DSAttention` or `GroupedAttention`. The hidden states
        have the wider of the dtypes of `x` and of the configuration, because the block adds to `x`.
        """
        args, x = hidden_states("Block", self, x, self.attention.config.model_dim)
        return_teacher = args.flag("return_teacher", return_teacher)
        is_latent = isinstance(self.attention, DSAttention)
        args.option("return_teacher", return_teacher, is_latent or not return_teacher, "False")
        latent_only: dict[str, Any] = {"return_teacher": return_teacher} if is_latent else {}
        y, aux = self.attention(
            self.attention_norm(x),
            indices=indices,
            positions=positions,
            segment_ids=segment_ids,
            stripes=stripes,
            sparse=args.flag("sparse", sparse),
            **latent_only,
        )
        x = x + y
        return x + self.mlp(self.mlp_norm(x)), aux

    def decode(
        self,
        x: Float[Array, "B T M"],
        cache: LayerCache | GroupedCache,
        *,
        counts: Int[Array, "B"] | None = None,
        indices: Selection | None = None,
    ) -> tuple[Float[Array, "B T M"], LayerCache | GroupedCache, Selection | None]:
        """Computes `__call__` for the T tokens after those in the cache.

        Arguments and results are those of the layer's `decode`. The hidden states of padding are
        arbitrary.
        """
        a = self.attention
        args, x = hidden_states("Block.decode", self, x, a.config.model_dim)
        check_layer_cache(args, "cache", cache, a.config, a.indexer is not None)
        own: Any = cache
        y, cache, indices = self.attention.decode(
            self.attention_norm(x), own, counts=counts, indices=indices
        )
        x = x + y
        return x + self.mlp(self.mlp_norm(x)), cache, indices


def _with_teacher_of(aux: Any, selecting: Any) -> AttentionAux:
    """Returns the results of the layer that selected, with the teacher of `aux` added to its own.

    A replayed selection of `aux` may have other keys. They do not count.
    """
    assert aux.indices is not None and aux.teacher is not None and selecting.teacher is not None
    same_key = aux.indices == selecting.indices
    teacher = selecting.teacher + jnp.where(same_key, aux.teacher, 0)
    return selecting._replace(teacher=teacher)


def _common_loss(selecting: Any) -> Float[Array, ""]:
    """Returns the loss of an indexer whose layer has the sum of several layers' teachers."""
    assert selecting.logits is not None and selecting.teacher is not None
    assert selecting.indices is not None
    return indexer_kl_loss(selecting.logits, selecting.teacher, selecting.indices >= 0)


class DecoderLM(Module):
    """A language model: embedding, blocks, final norm and vocabulary projection.

    Args:
        config: Sizes of the decoder.
        rngs: Random streams that initialise the parameters.

    Examples:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from jax_dsa import nn
        >>> attention = nn.AttentionConfig(
        ...     model_dim=16, num_heads=2, q_rank=None, kv_rank=8, nope_dim=4, rope_dim=4, v_dim=4,
        ...     index_heads=2, index_dim=8, index_rope_dim=4, top_k=3,
        ... )
        >>> config = nn.DecoderConfig(attention, vocab=11, num_layers=1, mlp_dim=32)
        >>> model = nn.DecoderLM(config, rngs=nnx.Rngs(0))
        >>> logits, layers = model(jnp.array([[1, 2, 3, 4, 5]]))
        >>> logits.shape, layers[0].indices.shape
        ((1, 5, 11), (1, 5, 3))
    """

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs) -> None:
        check_module("DecoderLM", config, DecoderConfig, rngs)
        self.config = config
        a = config.attention
        self.embed = Embed(config.vocab, a.model_dim, dtype=a.dtype, rngs=rngs)
        self.blocks = nnx.List([Block(config, kind, rngs=rngs) for kind in config.layers])
        self.norm = RMSNorm(a.model_dim, **config.residual_norm, rngs=rngs)
        self.head = Linear(a.model_dim, config.vocab, use_bias=False, dtype=a.dtype, rngs=rngs)

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
    ) -> tuple[Float[Array, "B T V"], list[Aux]]:
        """Computes next-token logits.

        Args:
            tokens: Token numbers, int32.
            indices: Each layer's selection to replay: `aux.indices` of an earlier run, or the
                selections that `decode` returned. None, for all layers or for one, selects anew.
            positions: As in `DSAttention`.
            segment_ids: As in `DSAttention`.
            stripes: As in `DSAttention`.
            sparse: As in `DSAttention`.
            remat_policy: A policy of `jax.checkpoint`, such as `jax_dsa.training.remat_policy`
                returns. The backward pass recomputes each block, except for the values that the
                policy saves. None saves everything.
            activation_sharding: Sharding of the hidden states [B, T, M] between the blocks, on a
                mesh with Auto axes. Without it the compiler may shard them like the parameters.

        Returns:
            The logits, float32, and each layer's attention results. With `config.shared_teacher`
            and `sparse`, `aux.kl` and `aux.teacher` of a layer that selects are the loss and the
            sum of the teachers of all layers that attend to its selection.

        Raises:
            TypeError, ValueError: If an argument has the wrong type or shape.
        """
        args, tokens = token_numbers("DecoderLM", self, tokens)
        sparse = args.flag("sparse", sparse)
        check_policy("DecoderLM", remat_policy)
        if indices is not None:
            self._check_number(args, "indices", len(indices), "selections")

        def sharded(x: jax.Array) -> jax.Array:
            if activation_sharding is None:
                return x
            return jax.lax.with_sharding_constraint(x, activation_sharding)

        x = sharded(self._embed(tokens))
        token_arrays = {"positions": positions, "segment_ids": segment_ids}
        selections = [None] * len(self.blocks) if indices is None else indices
        last = None
        layers: list[Aux] = []
        kinds, selecting = self.config.layers, 0
        return_teacher = self.config.shared_teacher and sparse
        blocks = [nnx.split(block) for block in self.blocks]
        for i, (kind, replayed) in enumerate(zip(kinds, selections, strict=True)):
            if replayed is None and kind == "shared":
                replayed = last
            graph, params = blocks[i]
            if i + 1 < len(blocks):
                # In the backward pass, this barrier makes this block wait for the gradients of the
                # next block's parameters, whose exchange then overlaps with this block's backward
                # pass. Without it, XLA postpones all blocks' exchanges to the end of the step if
                # devices exchange anything, and keeps their operands in memory until then (JAX
                # issue 20763).
                next_graph, next_params = blocks[i + 1]
                next_params, x = jax.lax.optimization_barrier((next_params, x))
                blocks[i + 1] = next_graph, next_params

            def run(
                params: Any, x: jax.Array, arrays: dict[str, Any], i: int = i, graph: Any = graph
            ) -> tuple[jax.Array, Aux]:
                with jax.named_scope(f"blocks/{i}"):
                    block = nnx.merge(graph, params)
                    flags = {"sparse": sparse, "return_teacher": return_teacher}
                    return block(x, **arrays, stripes=stripes, **flags)

            # With nothing to recompute, `jax.checkpoint` would only add barriers.
            if remat_policy not in (None, jax.checkpoint_policies.everything_saveable):
                run = jax.checkpoint(run, policy=remat_policy)
            x, aux = run(params, x, {"indices": replayed, **token_arrays})
            x, last = sharded(x), aux.indices
            layers.append(aux)
            if not return_teacher:
                continue
            if kind == "full":
                selecting = i
            else:
                layers[selecting] = _with_teacher_of(aux, layers[selecting])
            if kinds[i + 1 : i + 2] != ("shared",):
                with jax.named_scope(f"blocks/{selecting}/attention/indexer"):
                    kl = _common_loss(layers[selecting])
                # The barrier keeps XLA from postponing the losses, as in `dsa_attention`.
                x, kl = jax.lax.optimization_barrier((x, kl))
                layers[selecting] = layers[selecting]._replace(kl=kl)
        return self._logits(x), layers

    def init_cache(
        self,
        batch: int,
        capacity: int,
        *,
        fp8: bool = False,
        page_size: int | None = None,
        num_pages: int | None = None,
        max_rollback: int = 16,
    ) -> DecoderCache:
        """Returns an empty cache for `capacity` tokens of each of `batch` requests.

        The arguments are those of `LayerCache.empty`.
        """
        options: dict[str, Any] = {
            "fp8": fp8,
            "page_size": page_size,
            "num_pages": num_pages,
            "max_rollback": max_rollback,
        }
        return empty_decoder("DecoderLM.init_cache", self.config, batch, capacity, **options)

    @overload
    def decode(
        self,
        tokens: Int[Array, "B T"],
        cache: DecoderCache,
        *,
        counts: Int[Array, "B"] | None = None,
        return_indices: Literal[False] = False,
    ) -> tuple[Float[Array, "B T V"], DecoderCache]: ...
    @overload
    def decode(
        self,
        tokens: Int[Array, "B T"],
        cache: DecoderCache,
        *,
        counts: Int[Array, "B"] | None = None,
        return_indices: Literal[True],
    ) -> tuple[Float[Array, "B T V"], DecoderCache, list[Int[Array, "B T K"]]]: ...
    def decode(
        self,
        tokens: Int[Array, "B T"],
        cache: DecoderCache,
        *,
        counts: Int[Array, "B"] | None = None,
        return_indices: bool = False,
    ) -> Any:
        """Computes logits of each request's next T tokens, or only the first `counts` of them.

        Args:
            tokens: Numbers of the next tokens, int32. Padding may be any number.
            cache: The caches of all layers, as `init_cache` makes them.
            counts: How many of the T tokens each request has, as in `DSAttention.decode`. The
                logits of padding are finite and mean nothing.
            return_indices: Whether to return each layer's selection, which `__call__` can replay.

        Returns:
            The logits, float32; the cache with the new tokens in it; with `return_indices`, each
            layer's selected keys, int32.

        Raises:
            TypeError, ValueError: If an argument has the wrong type or shape.
        """
        args, tokens = token_numbers("DecoderLM.decode", self, tokens)
        return_indices = args.flag("return_indices", return_indices)
        check_type(args.op, "cache", cache, DecoderCache)
        self._check_number(args, "cache.layers", len(cache.layers), "caches")
        a, kinds = self.config.attention, self.config.layers
        caches: tuple[Any, ...] = cache.layers
        for i, (block, layer) in enumerate(zip(self.blocks, caches, strict=True)):
            has_indexer = block.attention.indexer is not None
            check_layer_cache(args, f"cache.layers[{i}]", layer, a, has_indexer)
        counts = token_counts(args, counts, tokens.shape[1])
        if counts is not None:
            step = jnp.arange(tokens.shape[1], dtype=jnp.int32)
            # A number outside the vocabulary would have an embedding of NaN.
            tokens = jnp.where(step < counts[:, None], tokens, 0)
        x = self._embed(tokens)
        selections: list[Any] = []
        layers: list[Any] = []
        for i, (block, old) in enumerate(zip(self.blocks, caches, strict=True)):
            reused = selections[-1] if kinds[i] == "shared" else None
            with jax.named_scope(f"blocks/{i}"):
                x, new, indices = block.decode(x, old, counts=counts, indices=reused)
            layers.append(new)
            selections.append(indices)
        caches = tuple(layers)
        results = self._logits(x), DecoderCache(caches)
        return (*results, selections) if return_indices else results

    def _check_number(self, args: Args, name: str, number: int, what: str) -> None:
        """Raises unless there is one entry per layer."""
        layers = len(self.blocks)
        args.option(name, f"{number} {what}", number == layers, f"one for each of {layers} layers")

    def _embed(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T M"]:
        # On a mesh with Explicit axes, the lookup needs the sharding of its result.
        mesh = compat.explicit_mesh(tokens, self.embed.embedding[...])
        spec = PartitionSpec(*jax.typeof(tokens).sharding.spec, None)
        return self.embed(tokens, None if mesh is None else NamedSharding(mesh, spec))

    def _logits(self, x: Float[Array, "B T M"]) -> Float[Array, "B T V"]:
        return self.head(self.norm(x)).astype(jnp.float32)
