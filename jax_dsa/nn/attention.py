"""Multi-head latent attention with a lightning indexer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jax_dsa.core.checks import FLOATS
from jax_dsa.core.export import exportable
from jax_dsa.core.typing import Array, Float, Int
from jax_dsa.nn.arguments import (
    check_module,
    hidden_states,
    selected_keys,
    token_counts,
)
from jax_dsa.nn.cache import LayerCache, check_layer_cache, check_rows, empty_layer
from jax_dsa.nn.config import AttentionConfig
from jax_dsa.nn.indexer import IndexerInputs, LightningIndexer
from jax_dsa.nn.mla import MLA
from jax_dsa.nn.pools import pooled_attention, selectable, tokens_attended
from jax_dsa.nn.positions import token_positions
from jax_dsa.nn.query_chunks import QueryInputs, map_query_chunks
from jax_dsa.nn.scopes import Module, scoped
from jax_dsa.nn.stripes import striped, unstriped
from jax_dsa.ops.cache import FlatCache, PagedCache
from jax_dsa.ops.dsa_attention import dsa_attention
from jax_dsa.ops.indexer import indexer_topk
from jax_dsa.ops.losses import dense_indexer_kl_loss
from jax_dsa.ops.sparse_mla import sparse_mla_decode

if TYPE_CHECKING:
    from jax_dsa.nn.config import IndexerType


@exportable
class AttentionAux(NamedTuple):
    """What an attention layer returns beside its output.

    Under `jax.jit`, results that nothing reads cost nothing.

    Attributes:
        kl: The indexer's loss, in nats, the mean over queries. In sparse attention it compares the
            selected keys, in dense attention all visible keys. None without an indexer, and with
            `return_teacher`.
        lse: Log of the sum of exponentials of each head's scores, float32.
        indices: The keys, or with `index_pool` the pools, that each query selected, int32, -1 in
            empty slots; None in dense attention. Pool i of a document that begins at token s has
            the number s // index_pool + i.
        q: Queries in the absorbed form.
        kv: The latent keys, in the order in which the sequence is stored.
        indexer: The indexer's queries, keys and weights; None without an indexer. The keys of pools
            are in the order of their numbers.
        logits: With `return_teacher`, the indexer's logits of what each query selected, -inf in
            empty slots. None without an indexer. Default: None.
        teacher: With `return_teacher`, the attention's probabilities of the same, summed over
            heads, in float32. Default: None.
    """

    kl: Float[Array, ""] | None
    lse: Float[Array, "B T N"]
    indices: Int[Array, "B T K"] | None
    q: Float[Array, "B T N D"]
    kv: Float[Array, "B T 1 D"]
    indexer: IndexerInputs | None
    logits: Float[Array, "B T K"] | None = None
    teacher: Float[Array, "B T K"] | None = None


class DSAttention(Module):
    """DeepSeek sparse attention: MLA over the keys that a lightning indexer selects.

    The attribute `indexer` holds the indexer. Its own loss, `aux.kl`, trains its parameters and no
    others; any other loss has exactly zero gradient for them. With `config.index_pool` the indexer
    selects pools of tokens, and selections consist of the numbers of pools.

    Args:
        config: Sizes and switches of the layer. With `config.shares_keys` the layer attends to
            another layer's keys.
        indexer_type: "full" gives the layer an indexer. A layer of type "shared" has none and takes
            another layer's selection.
        rngs: Random streams that initialise the parameters.

    Raises:
        TypeError: If `config` or `rngs` has the wrong type.
        ValueError: If `indexer_type` is neither "full" nor "shared".

    Examples:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from jax_dsa import nn
        >>> config = nn.AttentionConfig(
        ...     model_dim=16, num_heads=2, q_rank=None, kv_rank=8, nope_dim=4, rope_dim=4, v_dim=4,
        ...     index_heads=2, index_dim=8, index_rope_dim=4, top_k=3,
        ... )
        >>> layer = nn.DSAttention(config, rngs=nnx.Rngs(0))
        >>> y, aux = layer(jnp.ones((1, 5, 16)))
        >>> y.shape, aux.indices.shape
        ((1, 5, 16), (1, 5, 3))
    """

    def __init__(
        self, config: AttentionConfig, indexer_type: IndexerType = "full", *, rngs: nnx.Rngs
    ) -> None:
        check_module("DSAttention", config, AttentionConfig, rngs)
        if indexer_type not in ("full", "shared"):
            raise ValueError(
                f"DSAttention: argument 'indexer_type' is {indexer_type!r}, expected 'full' or "
                f"'shared'"
            )
        self.config = config
        self.mla = MLA(config, rngs=rngs)
        self.indexer = LightningIndexer(config, rngs=rngs) if indexer_type == "full" else None

    @scoped
    def __call__(
        self,
        x: Float[Array, "B T M"],
        *,
        indices: Int[Array, "B T K"] | None = None,
        kv: Float[Array, "B T 1 D"] | None = None,
        positions: Int[Array, "B T"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
        stripes: int = 1,
        sparse: bool = True,
        return_teacher: bool = False,
    ) -> tuple[Float[Array, "B T M"], AttentionAux]:
        """Computes causal attention among the tokens of `x`.

        Args:
            x: Hidden states.
            indices: The keys, or with `index_pool` the pools, to attend to, int32, as in
                `jax_dsa.dsa_attention`. By default the indexer selects them and returns them as
                `aux.indices`; passing these again replays the selection. A layer without an indexer
                needs them.
            kv: Another layer's `aux.kv`, for a layer with `config.shares_keys`.
            positions: Positions of the tokens, int32, which only RoPE and `log_scaling` read. By
                default each document counts from 0.
            segment_ids: Document numbers, int32, for several documents in one sequence. A run of
                equal numbers is a document, and its tokens see no other document. By default each
                sequence is one document.
            stripes: Number of stripes that all arrays store the sequence in, a divisor of T; see
                `jax_dsa.nn.stripes`. Selected keys are numbered in the sequence's own order.
            sparse: True attends to the selected keys. False attends to all keys, and `aux.kl` is
                then the indexer's warm-up loss over all of them.
            return_teacher: Whether to return `aux.logits` and `aux.teacher` instead of `aux.kl`,
                for a loss that several layers with one selection have in common; see
                `jax_dsa.dsa_attention`. It needs `sparse`.

        Returns:
            The hidden states, in `config.dtype` whatever the dtype of `x`, and what else the layer
            computed.

        Raises:
            TypeError: If an argument has the wrong type.
            ValueError: If an argument has the wrong shape; if a selection or keys are missing, or
                given where the layer takes none; if T is no multiple of `config.query_chunk`.
        """
        c = self.config
        args, x = hidden_states("DSAttention", self, x, c.model_dim)
        sparse = args.flag("sparse", sparse)
        return_teacher = args.flag("return_teacher", return_teacher)
        expected = "False with sparse=False, because it belongs to selected keys"
        args.option("return_teacher", return_teacher, sparse or not return_teacher, expected)
        self._check_selection(indices, sparse)
        self._check_keys(kv)
        indices = selected_keys(args, indices)
        if kv is not None:
            args.bind("D", c.kv_rank + c.rope_dim, "'config'")
            kv = args.array("kv", kv, "B T 1 D", FLOATS)
        positions, starts, ends = token_positions("DSAttention", x, positions, segment_ids, stripes)
        p = self.mla.project(x, positions)
        stored = p.kv if kv is None else kv
        assert stored is not None
        index = None
        if self.indexer is not None:
            index = self.indexer(x, p.q_latent, positions, starts, stripes=stripes)
        # Keys are put in the sequence's order here; queries keep the order of storage.
        kv = unstriped(stored, stripes)
        inputs: dict[str, Any] = {}
        if index is not None:
            # The keys of pools are in order already.
            inputs = index.unstriped_keys(stripes if c.index_pool is None else 1)._asdict()
        if sparse:
            scoring = {name: inputs.pop(name, None) for name in ("index_q", "index_weights")}

            def attend(some: QueryInputs) -> tuple[Any, ...]:
                q = self.mla.absorbed_queries(some.projections)
                arguments: dict[str, Any] = {
                    **some.scoring,
                    **inputs,
                    "starts": some.starts,
                    "ends": some.ends,
                    "top_k": c.selected if some.indices is None else None,
                    "indices": some.indices,
                    "value_dim": c.kv_rank,
                    "scale": c.scale,
                    "sinks": self.mla.sink_logits,
                    "return_teacher": return_teacher,
                }
                if c.index_pool is None:
                    out, dsa = dsa_attention(q, kv, is_causal=some.ends is None, **arguments)
                else:
                    pools: dict[str, Any] = {"size": c.index_pool, "with_tail": c.index_tail}
                    out, dsa = pooled_attention(q, kv, **pools, **arguments)
                # With pools, the first queries of a document select nothing and do not count.
                rows = jnp.sum(jnp.any(dsa.indices >= 0, axis=-1), dtype=jnp.float32)
                loss = None if index is None or return_teacher else (dsa.kl, rows)
                y = self.mla.output(out, some.projections)
                return loss, y, dsa.lse, dsa.indices, q, dsa.logits, dsa.teacher

            queries = QueryInputs(p._replace(kv=None), scoring, starts, ends, indices)
            kl, y, lse, selected, q, *taught = map_query_chunks(
                attend, queries, x.shape, c.query_chunk, stripes
            )
            return y, AttentionAux(kl, lse, selected, q, stored, index, *taught)
        visible: dict[str, Any] = {"starts": starts, "ends": ends, "is_causal": ends is None}
        q = self.mla.absorbed_queries(p)
        in_order = jax.tree.map(lambda a: unstriped(a, stripes), (p._replace(kv=stored), starts))
        y, lse = (striped(a, stripes) for a in self.mla.dense(*in_order))
        kl = None
        if index is not None:
            constant_q, constant_kv = jax.lax.stop_gradient((q, kv))
            kl = dense_indexer_kl_loss(
                **inputs,
                **visible,
                q=constant_q,
                kv=constant_kv,
                block_size=c.index_pool or 1,
                scale=c.scale,
            )
            # The barrier keeps XLA from postponing all layers' losses to the end of the step, as in
            # `dsa_attention`.
            y, kl = jax.lax.optimization_barrier((y, kl))
        return y, AttentionAux(kl, lse, None, q, stored, index)

    def init_cache(
        self,
        batch: int,
        capacity: int,
        *,
        fp8: bool = False,
        page_size: int | None = None,
        num_pages: int | None = None,
        max_rollback: int = 16,
    ) -> LayerCache:
        """Returns an empty cache for `capacity` tokens of each of `batch` requests.

        The arguments are those of `LayerCache.empty`.
        """
        kind: IndexerType = "shared" if self.indexer is None else "full"
        options: dict[str, Any] = {
            "fp8": fp8,
            "page_size": page_size,
            "num_pages": num_pages,
            "max_rollback": max_rollback,
        }
        return empty_layer("DSAttention.init_cache", self.config, batch, capacity, kind, **options)

    @scoped
    def decode(
        self,
        x: Float[Array, "B T M"],
        cache: LayerCache,
        *,
        counts: Int[Array, "B"] | None = None,
        indices: Int[Array, "B T K"] | None = None,
        kv: FlatCache | PagedCache | None = None,
    ) -> tuple[Float[Array, "B T M"], LayerCache, Int[Array, "B T K"]]:
        """Computes sparse attention of each request's next T tokens, or the first `counts` of them.

        The tokens attend to those in the cache and, causally, to each other. T = 1 is a decode
        step, T = the length of the prompt a prefill, and anything between is a chunk of a prefill.
        Prompts of different lengths are padded on the right to a common T.

        Args:
            x: Hidden states of the next tokens.
            cache: The layer's cache. Its rows have `config.dtype`, or are FP8 records.
            counts: How many of the T tokens each request has, int32, clipped to 0..T; the others
                are padding, which no token sees. Default: all.
            indices: The keys, or with `index_pool` the pools, to attend to, int32; keys after a
                token's own position are left out. By default the indexer selects them.
            kv: Another layer's cached keys, which already count all new tokens, for a layer with
                `config.shares_keys`. They tell the positions of the tokens, so no token may have
                lacked a page: otherwise the layer overwrites keys of earlier tokens.

        Returns:
            The hidden states, the cache with the new tokens in it, and the selected keys or pools,
            int32, -1 in empty slots. Padding gets hidden states of 0 and empty slots. Tokens that
            do not fit into the cache get no valid results; compare `cache.free_tokens` before. With
            `index_pool`, a request whose length was set to a number that the cache does not support
            gets NaN; see `LayerCache`.

        Raises:
            TypeError: If an argument has the wrong type.
            ValueError: If an argument has the wrong shape or is the cache of another layer; if a
                selection or keys are missing, or given where the layer takes none.
        """
        c = self.config
        args, x = hidden_states("DSAttention.decode", self, x, c.model_dim)
        self._check_selection(indices, True)
        self._check_keys(kv)
        indices = selected_keys(args, indices)
        check_layer_cache(args, "cache", cache, c, self.indexer is not None)
        if kv is not None:
            check_rows(args, "kv", kv, c)
        counts = token_counts(args, counts, x.shape[1])
        new = x.shape[1] if counts is None else counts
        lengths = cache.lengths if kv is None else kv.lengths - new
        step = jnp.arange(x.shape[1], dtype=jnp.int32)
        positions = lengths[:, None] + step
        ends = positions + 1
        if counts is not None:
            ends = jnp.where(step < counts[:, None], ends, 0)
        p = self.mla.project(x, positions)
        index = is_valid = None
        if self.indexer is not None and c.index_pool is None:
            index = self.indexer(x, p.q_latent, positions)
        cache = cache.append(p.kv, index, positions, counts)
        keys = cache.kv if kv is None else kv
        assert keys is not None
        if self.indexer is not None and cache.open_pool is not None:
            # Tokens that lack a page do not count. They come again.
            held = keys.lengths.astype(jnp.int32) - lengths.astype(jnp.int32)
            index, numbers, open_pool, is_valid = self.indexer.extend(
                x, p.q_latent, positions, cache.open_pool, lengths, held
            )
            cache = cache.with_pools(index, numbers, open_pool)
        starts, size = jnp.zeros_like(ends), c.index_pool or 1
        if indices is None:
            assert index is not None
            indices, _ = indexer_topk(
                index.index_q,
                cache.index_keys,
                index.index_weights,
                c.selected,
                index_k_scale=cache.index_k_scale,
                ends=ends // size,
            )
        else:
            indices = selectable(size, indices, starts, ends)
        attended = indices
        if c.index_pool is not None:
            attended = tokens_attended(size, indices, starts, ends, with_tail=c.index_tail)
        out = sparse_mla_decode(
            self.mla.absorbed_queries(p),
            keys,
            attended,
            value_dim=c.kv_rank,
            scale=c.scale,
            sinks=self.mla.sink_logits,
        )
        y = self.mla.output(out, p)
        if counts is not None:
            y = jnp.where((ends > 0)[..., None], y, 0)
        if is_valid is not None:
            y = jnp.where(is_valid[:, None, None], y, jnp.nan)
        return y, cache, indices

    def _check_keys(self, kv: object) -> None:
        if (kv is not None) != self.config.shares_keys:
            got, expected = ("None", "another layer's keys") if kv is None else ("given", "None")
            raise ValueError(
                f"DSAttention: argument 'kv' is {got}, expected {expected} with "
                f"shares_keys={self.config.shares_keys}"
            )

    def _check_selection(self, indices: Array | None, sparse: bool) -> None:
        if not sparse and indices is not None:
            raise ValueError(
                "DSAttention: argument 'indices' is given, expected None with sparse=False"
            )
        if sparse and indices is None and self.indexer is None:
            raise ValueError(
                "DSAttention: argument 'indices' is None, expected a selection because the layer "
                "has no indexer (indexer_type='shared')"
            )
