"""Attention to selected pools of tokens, as in GLM-5.3-Flash.

A pool is a run of `size` tokens whose keys the indexer scores as one key. Pools begin with the
first token of a document, and pool i of a document that begins at token s has the number
s // size + i, which is its slot in the result of `gated_pool`. A query may select the pools that
end at its own token or before it.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jax_dsa.core.documents import block_range
from jax_dsa.core.typing import Array, Float, Int
from jax_dsa.ops.attn_dist import attn_dist
from jax_dsa.ops.dsa_attention import DSAAux
from jax_dsa.ops.indexer import indexer_selected_logits, indexer_topk
from jax_dsa.ops.losses import indexer_kl_loss
from jax_dsa.ops.sparse_mla import sparse_mla


def selectable(
    size: int, pools: Int[Array, "B T K"], starts: Int[Array, "B T"], ends: Int[Array, "B T"]
) -> Int[Array, "B T K"]:
    """Returns the selected pools, with -1 for those that the query may not select.

    Args:
        size: Tokens of a pool.
        pools: Numbers of the selected pools, int32.
        starts: First token of each query's document, int32.
        ends: One past each query's own token, int32.
    """
    begin, end = block_range(size, starts, ends)
    return jnp.where((pools >= begin[..., None]) & (pools < end[..., None]), pools, -1)


def tokens_attended(
    size: int,
    pools: Int[Array, "B T K"],
    starts: Int[Array, "B T"],
    ends: Int[Array, "B T"],
    *,
    with_tail: bool,
) -> Int[Array, "B T S"]:
    """Returns the tokens of the selected pools, `size` for each, int32, -1 in empty slots.

    Args:
        size: Tokens of a pool.
        pools: Numbers of the selected pools, int32, -1 in empty slots.
        starts: As in `selectable`.
        ends: As in `selectable`.
        with_tail: Whether the tokens after each query's last complete pool, up to its own, follow
            in `size` - 1 more slots.
    """
    offsets = jnp.arange(size, dtype=jnp.int32)
    first = pools * size + (starts % size)[..., None]
    tokens = jnp.where(pools[..., None] < 0, -1, first[..., None] + offsets)
    tokens = tokens.reshape(*pools.shape[:2], pools.shape[2] * size)
    if not with_tail:
        return tokens
    tail = (ends - (ends - starts) % size)[..., None] + offsets[:-1]
    return jnp.concatenate([tokens, jnp.where(tail < ends[..., None], tail, -1)], axis=-1)


def pooled_attention(
    q: Float[Array, "B T N D"],
    kv: Float[Array, "B S 1 D"],
    index_q: Float[Array, "B T J C"] | None = None,
    index_k: Float[Array, "B W C"] | None = None,
    index_weights: Float[Array, "B T J"] | None = None,
    *,
    size: int,
    with_tail: bool,
    top_k: int | None = None,
    indices: Int[Array, "B T K"] | None = None,
    value_dim: int,
    scale: float,
    starts: Int[Array, "B T"] | None = None,
    ends: Int[Array, "B T"] | None = None,
    index_k_scale: Float[Array, "B W"] | None = None,
    sinks: Float[Array, "N"] | None = None,
    return_teacher: bool = False,
) -> tuple[Float[Array, "B T N E"], DSAAux]:
    """Returns causal attention over the tokens of the pools that an indexer selects.

    It is `dsa_attention` over pools: a selection consists of numbers of pools, and the loss
    compares the indexer with the attention that all tokens of a selected pool get together.

    Args:
        q: Absorbed queries.
        kv: Latent keys.
        index_q, index_k, index_weights, index_k_scale: The indexer's inputs, with one key per pool.
        size: Tokens of a pool.
        with_tail: Whether a query also attends to the tokens after its last complete pool. They
            take part neither in the selection nor in the loss.
        top_k: Number of pools to select for each query.
        indices: A selection of pools in place of the indexer's.
        value_dim: As in `dsa_attention`.
        scale: As in `dsa_attention`.
        starts: First token of each query's document, int32. Default: token 0.
        ends: One past each query's own token, int32. By default query t is token t.
        sinks: As in `dsa_attention`.
        return_teacher: As in `dsa_attention`.
    """
    if ends is None:
        ends = jnp.broadcast_to(jnp.arange(1, q.shape[1] + 1, dtype=jnp.int32), q.shape[:2])
    if starts is None:
        starts = jnp.zeros_like(ends)
    inputs: dict[str, Any] = {
        "index_q": index_q,
        "index_k": index_k,
        "index_weights": index_weights,
        "index_k_scale": index_k_scale,
    }
    logits = None
    if indices is None:
        assert top_k is not None
        begin, end = block_range(size, starts, ends)
        indices, logits = indexer_topk(**inputs, top_k=top_k, starts=begin, ends=end)
    else:
        indices = selectable(size, indices, starts, ends)
        if index_q is not None:
            logits = indexer_selected_logits(**inputs, indices=indices)
    attended = tokens_attended(size, indices, starts, ends, with_tail=with_tail)
    out, lse = sparse_mla(
        q, kv, attended, value_dim=value_dim, scale=scale, sinks=sinks, return_lse=True
    )
    aux = DSAAux(indices=indices, kl=jnp.zeros((), lse.dtype), lse=lse)
    if logits is None and not return_teacher:
        return out, aux
    q, kv, total = jax.lax.stop_gradient((q, kv, lse))
    taught = attended[..., : indices.shape[-1] * size]
    teacher = attn_dist(q, kv, taught, total, scale=scale)
    teacher = teacher.reshape(*indices.shape, size).sum(-1)
    logits = None if logits is None else checkpoint_name(logits, "dsa_topk_logits")
    teacher = checkpoint_name(teacher, "dsa_teacher")
    # The barriers keep XLA from postponing the losses of all layers, as in `dsa_attention`.
    if return_teacher:
        out, teacher = jax.lax.optimization_barrier((out, teacher))
        return out, aux._replace(logits=logits, teacher=teacher)
    assert logits is not None
    kl = indexer_kl_loss(logits, teacher, indices >= 0)
    out, kl = jax.lax.optimization_barrier((out, kl))
    return out, aux._replace(kl=kl)
