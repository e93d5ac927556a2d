"""Multi-head latent attention with a lightning indexer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jax_dsa.core import compat
from jax_dsa.core.checks import FLOATS, INT32, Args
from jax_dsa.core.typing import Array, Float, Int
from jax_dsa.nn.indexer import IndexerInputs, LightningIndexer, LogScale
from jax_dsa.nn.linear import projection
from jax_dsa.nn.rotary import rope
from jax_dsa.nn.stripes import striped, unstriped
from jax_dsa.ops.dsa_attention import dsa_attention
from jax_dsa.ops.indexer import indexer_topk
from jax_dsa.ops.losses import dense_indexer_kl_loss
from jax_dsa.ops.masked_attention import masked_attention
from jax_dsa.ops.sparse_mla import sparse_mla_decode

if TYPE_CHECKING:
    from collections.abc import Callable

    from jax_dsa.nn.cache import LayerCache
    from jax_dsa.nn.config import AttentionConfig, IndexerType
    from jax_dsa.ops.cache import FlatCache, PagedCache


SELECTION = ("dsa_topk_indices", "dsa_topk_logits")
"""The names, for remat policies, of what an indexer selects and of its logits."""
CHUNKED = "dsa_chunked"
"""The name of attention's output where queries come in chunks. Their backward pass computes them
again by itself: a block's that has to, too, would do so twice."""


class MLAProjections(NamedTuple):
    """A layer's projected tokens: queries of every head, and the key that all heads share."""

    q_nope: Float[Array, "B T N P"]
    q_rope: Float[Array, "B T N R"]
    kv: Float[Array, "B T 1 D"] | None
    """The normalised latent (first E numbers) and the rotary key: what a cache holds. None if the
    keys are another layer's."""
    q_latent: Float[Array, "B T Q"]
    """What the queries are projected from: the hidden states if there is no latent."""
    gate: Float[Array, "B T N V"] | None
    """Of the heads' values; None if they have none."""


class AttentionAux(NamedTuple):
    """What attention found beside its output; under `jax.jit` unused parts cost nothing."""

    kl: Float[Array, ""] | None
    """The indexer's loss: over the selected keys if sparse, else over all visible keys. None
    without an indexer."""
    lse: Float[Array, "B T N"]
    indices: Int[Array, "B T K"] | None
    """The selection; None if dense."""
    q: Float[Array, "B T N D"]
    kv: Float[Array, "B T 1 D"]
    indexer: IndexerInputs | None


class MLA(nnx.Module):
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
        norm = {"epsilon": c.norm_eps, "dtype": c.dtype, "rngs": rngs}
        rank = c.q_rank
        self.wq_a = None if rank is None else projection(c, c.model_dim, rank, rngs, bias=c.bias)
        self.q_norm = None if rank is None else nnx.RMSNorm(rank, **norm)
        self.wq_b = projection(c, rank or c.model_dim, heads * (c.nope_dim + c.rope_dim), rngs)
        self.q_scale = LogScale(heads) if c.log_scaling else None
        own = not c.shares_keys
        latent = c.kv_rank + c.rope_dim
        self.wkv_a = projection(c, c.model_dim, latent, rngs, bias=c.bias) if own else None
        self.kv_norm = nnx.RMSNorm(c.kv_rank, **norm) if own else None
        per_head = nnx.initializers.lecun_normal(in_axis=1, out_axis=2, batch_axis=0)
        self.w_uk = nnx.Param(per_head(rngs.params(), (heads, c.kv_rank, c.nope_dim)))
        self.w_uv = nnx.Param(per_head(rngs.params(), (heads, c.kv_rank, c.v_dim)))
        self.wo = projection(c, heads * c.v_dim, c.model_dim, rngs, bias=c.bias)
        self.sinks = nnx.Param(jnp.zeros(heads)) if c.sinks else None
        self.wg = projection(c, c.model_dim, heads * c.v_dim, rngs) if c.gate else None

    def project(self, x: Float[Array, "B T M"], positions: Int[Array, "B T"]) -> MLAProjections:
        """Queries and latent keys of hidden states `x` at the given positions."""
        c = self.config
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
        """The sinks, as the operators take them."""
        return None if self.sinks is None else self.sinks[...]

    def absorbed_queries(self, p: MLAProjections) -> Float[Array, "B T N D"]:
        """Queries against the latent keys."""
        q = jnp.einsum("btnp,nep->btne", p.q_nope, self.w_uk.astype(self.config.dtype))
        return jnp.concatenate([q, p.q_rope], axis=-1)

    def output(self, out: Float[Array, "B T N E"], p: MLAProjections) -> Float[Array, "B T M"]:
        """Hidden states from the attention's latent output."""
        values = jnp.einsum("btne,nev->btnv", out, self.w_uv.astype(self.config.dtype))
        return self._merged(values, p)

    def dense(
        self, p: MLAProjections, starts: Int[Array, "B T"] | None = None
    ) -> tuple[Float[Array, "B T M"], Float[Array, "B T N"]]:
        """Causal attention to all keys of the same document, in expanded form: hidden states and
        lse. `starts` are the first tokens of the tokens' documents.
        """
        c = self.config
        assert p.kv is not None
        latent, k_rope = jnp.split(p.kv[:, :, 0], [c.kv_rank], axis=-1)
        k_nope = jnp.einsum("bse,nep->bsnp", latent, self.w_uk.astype(c.dtype))
        k_rope = jnp.broadcast_to(k_rope[:, :, None], (*k_nope.shape[:3], c.rope_dim))
        v = jnp.einsum("bse,nev->bsnv", latent, self.w_uv.astype(c.dtype))
        q = jnp.concatenate([p.q_nope, p.q_rope], axis=-1)
        k = jnp.concatenate([k_nope, k_rope], axis=-1)
        out, lse = masked_attention(
            q, k, v, scale=c.scale, is_causal=True, segment_ids=starts, return_lse=True
        )
        if self.sink_logits is not None:
            out = out * jax.nn.sigmoid(lse - self.sink_logits)[..., None].astype(out.dtype)
        return self._merged(out, p), lse

    def _merged(self, values: Float[Array, "B T N V"], p: MLAProjections) -> Float[Array, "B T M"]:
        if p.gate is not None:
            values = values * p.gate
        batch, length, heads, dim = values.shape
        return self.wo(values.reshape(batch, length, heads * dim))


class _Part(NamedTuple):
    """What belongs to some of the queries; keys are not among it."""

    p: MLAProjections
    scoring: dict[str, Any]
    """`index_q` and `index_weights`."""
    starts: Int[Array, "B T"] | None
    ends: Int[Array, "B T"] | None
    indices: Int[Array, "B T K"] | None


def _in_parts(
    attend: Callable[[_Part], tuple[Any, ...]],
    part: _Part,
    shape: tuple[int, ...],
    chunk: int | None,
    stripes: int,
) -> tuple[Any, ...]:
    """`attend` of all queries of `shape` [B, T, M]: a loss, which is a mean, then arrays of them.
    Each stripe, which is what a device holds, is cut into chunks.
    """
    batch, length = shape[0], shape[1] // stripes
    if chunk is None or length <= chunk:
        return attend(part)
    if length % chunk:
        of = "T" if stripes == 1 else f"T / {stripes} stripes"
        raise ValueError(
            f"DSAttention: argument 'x' has shape {list(shape)}, want {of} to be a multiple of "
            f"query_chunk = {chunk}, or less"
        )
    if part.ends is None:
        rows = jnp.arange(1, shape[1] + 1, dtype=jnp.int32)
        part = part._replace(ends=jnp.broadcast_to(rows, shape[:2]))

    def cut(a: jax.Array) -> jax.Array:
        rest = a.shape[2:]
        a = jnp.moveaxis(a.reshape(batch, stripes, length // chunk, chunk, *rest), 2, 0)
        return a.reshape(length // chunk, batch, stripes * chunk, *rest)

    def joined(a: jax.Array) -> jax.Array:
        rest = a.shape[3:]
        a = jnp.moveaxis(a.reshape(length // chunk, batch, stripes, chunk, *rest), 0, 2)
        return a.reshape(batch, stripes * length, *rest)

    policy = jax.checkpoint_policies.save_only_these_names(*SELECTION)
    kl, y, *found = jax.lax.map(jax.checkpoint(attend, policy=policy), jax.tree.map(cut, part))
    y, *found = jax.tree.map(joined, (y, *found))
    return None if kl is None else kl.mean(), checkpoint_name(y, CHUNKED), *found


class DSAttention(nnx.Module):
    """DeepSeek sparse attention: MLA over the keys that a lightning indexer selects.

    The indexer lies in the attribute `indexer`, which is all that its own loss, `aux.kl`, trains;
    any other loss gives its parameters exactly zero gradient. With `indexer_type="shared"` there is
    none, and the selection is another layer's. With `config.shares_keys` the keys are another
    layer's too.
    """

    def __init__(
        self, config: AttentionConfig, indexer_type: IndexerType = "full", *, rngs: nnx.Rngs
    ) -> None:
        if indexer_type not in ("full", "shared"):
            raise ValueError(
                f"DSAttention: argument 'indexer_type' is {indexer_type!r}, want 'full' or 'shared'"
            )
        self.config = config
        self.mla = MLA(config, rngs=rngs)
        self.indexer = LightningIndexer(config, rngs=rngs) if indexer_type == "full" else None

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
    ) -> tuple[Float[Array, "B T M"], AttentionAux]:
        """Causal attention among the tokens of `x`.

        Args:
            x: hidden states.
            indices: a selection to attend to, as in `jax_dsa.dsa_attention`; by default the
                indexer's, `aux.indices`: given again, they replay it. A layer without an indexer
                needs one.
            kv: another layer's `aux.kv`, for a layer that shares its keys.
            positions: int32, for RoPE and `log_scaling` alone; by default each document counts
                from 0.
            segment_ids: int32, for several documents in one sequence: a run of equal numbers is a
                document, and its tokens see no others. By default a sequence is one document.
            stripes: in how many stripes all arrays store the sequence, a divisor of T; see
                `jax_dsa.nn.stripes`. Selections are the tokens' places in the sequence.
            sparse: attend to the selected keys. False attends to all of them, and its `aux.kl` is
                the indexer's warm-up loss over all of them.
        """
        c = self.config
        self._check_selection(indices, sparse)
        self._check_keys(kv)
        positions, starts, ends = placed("DSAttention", x, positions, segment_ids, stripes)
        p = self.mla.project(x, positions)
        stored = p.kv if kv is None else kv
        assert stored is not None
        index = None if self.indexer is None else self.indexer(x, p.q_latent, positions)
        # Keys by their places in the sequence, queries as they are stored.
        kv = unstriped(stored, stripes)
        inputs: dict[str, Any] = {} if index is None else index.unstriped_keys(stripes)._asdict()
        if sparse:
            asked = {name: inputs.pop(name, None) for name in ("index_q", "index_weights")}

            def attend(part: _Part) -> tuple[Any, ...]:
                q = self.mla.absorbed_queries(part.p)
                out, dsa = dsa_attention(
                    q,
                    kv,
                    **part.scoring,
                    **inputs,
                    starts=part.starts,
                    ends=part.ends,
                    is_causal=part.ends is None,
                    top_k=c.top_k if part.indices is None else None,
                    indices=part.indices,
                    value_dim=c.kv_rank,
                    scale=c.scale,
                    sinks=self.mla.sink_logits,
                )
                kl = None if index is None else dsa.kl
                return kl, self.mla.output(out, part.p), dsa.lse, dsa.indices, q

            part = _Part(p._replace(kv=None), asked, starts, ends, indices)
            kl, y, lse, chosen, q = _in_parts(attend, part, x.shape, c.query_chunk, stripes)
            return y, AttentionAux(kl, lse, chosen, q, stored, index)
        seen: dict[str, Any] = {"starts": starts, "ends": ends, "is_causal": ends is None}
        q = self.mla.absorbed_queries(p)
        whole = jax.tree.map(lambda a: unstriped(a, stripes), (p._replace(kv=stored), starts))
        y, lse = (striped(a, stripes) for a in self.mla.dense(*whole))
        kl = None
        if index is not None:
            queries, keys = jax.lax.stop_gradient((q, kv))
            kl = dense_indexer_kl_loss(**inputs, **seen, q=queries, kv=keys, scale=c.scale)
            y, kl = jax.lax.optimization_barrier((y, kl))  # in turn, as in `dsa_attention`
        return y, AttentionAux(kl, lse, None, q, stored, index)

    def decode(
        self,
        x: Float[Array, "B T M"],
        cache: LayerCache,
        *,
        indices: Int[Array, "B T K"] | None = None,
        kv: FlatCache | PagedCache | None = None,
    ) -> tuple[Float[Array, "B T M"], LayerCache, Int[Array, "B T K"]]:
        """Sparse attention of each request's next T tokens to those in the cache and, causally, to
        each other.

        T = 1 is a decode step, T = the prompt's length a prefill, anything between a chunk of one.
        The cache comes back with the new tokens in it, and then the selection: of `indices` what a
        token sees or, by default, the indexer's. `kv` are another layer's cached keys with the new
        tokens in them, for a layer that shares its keys.
        """
        c = self.config
        self._check_selection(indices, True)
        self._check_keys(kv)
        lengths = cache.lengths if kv is None else kv.lengths - x.shape[1]
        positions = lengths[:, None] + jnp.arange(x.shape[1], dtype=jnp.int32)
        p = self.mla.project(x, positions)
        index = None if self.indexer is None else self.indexer(x, p.q_latent, positions)
        cache = cache.append(p.kv, index, positions)
        if indices is None:
            assert index is not None
            indices, _ = indexer_topk(
                index.index_q,
                cache.index_keys,
                index.index_weights,
                c.top_k,
                index_k_scale=cache.index_k_scale,
                ends=positions + 1,
            )
        else:
            indices = jnp.where(indices <= positions[..., None], indices, -1)
        keys = cache.kv if kv is None else kv
        assert keys is not None
        out = sparse_mla_decode(
            self.mla.absorbed_queries(p),
            keys,
            indices,
            value_dim=c.kv_rank,
            scale=c.scale,
            sinks=self.mla.sink_logits,
        )
        return self.mla.output(out, p), cache, indices

    def _check_keys(self, kv: object) -> None:
        if (kv is not None) != self.config.shares_keys:
            got, want = ("None", "another layer's keys") if kv is None else ("given", "None")
            raise ValueError(
                f"DSAttention: argument 'kv' is {got}, want {want} with "
                f"shares_keys={self.config.shares_keys}"
            )

    def _check_selection(self, indices: Array | None, sparse: bool) -> None:
        if not sparse and indices is not None:
            raise ValueError(
                "DSAttention: argument 'indices' is given, want None with sparse=False"
            )
        if sparse and indices is None and self.indexer is None:
            raise ValueError(
                "DSAttention: argument 'indices' is None, want a selection for a layer whose "
                "indexer is shared"
            )


def placed(
    op: str,
    x: Float[Array, "B T M"],
    positions: Int[Array, "B T"] | None,
    segment_ids: Int[Array, "B T"] | None,
    stripes: int = 1,
) -> tuple[Int[Array, "B T"], Int[Array, "B T"] | None, Int[Array, "B T"] | None]:
    """The tokens' positions; the first tokens of their documents, if there may be several; one past
    their places in the sequence, if they are not stored in its order.
    """
    args = Args(op, "x", x, "B T M")
    args.array("x", x, "B T M", FLOATS)
    stripes = args.integer("stripes", stripes, 1)
    args.option("stripes", stripes, x.shape[1] % stripes == 0, f"a divisor of T = {x.shape[1]}")
    rows = jnp.broadcast_to(jnp.arange(x.shape[1], dtype=jnp.int32), x.shape[:2])
    rows = striped(rows, stripes)
    ends = None if stripes == 1 else rows + 1
    starts = None
    if segment_ids is not None:
        ids = unstriped(args.array("segment_ids", segment_ids, "B T", INT32), stripes)
        starts = striped(compat.left_to_compiler(document_starts, ids)(ids), stripes)
    if positions is not None:
        return args.array("positions", positions, "B T", INT32), starts, ends
    return rows if starts is None else rows - starts, starts, ends


def document_starts(ids: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """The first token of each token's document, a run of equal `ids`."""
    begins = ids != jnp.roll(ids, 1, axis=1)
    rows = jnp.broadcast_to(jnp.arange(ids.shape[1], dtype=jnp.int32), ids.shape)
    return jax.lax.cummax(jnp.where(begins, rows, 0), axis=1)
