"""The selections that a run compares, for each kind of attention.

An indexer selects numbers of keys, of pools or of blocks of keys, in the form of `aux.indices`. A
selection is judged by the tokens that a query then attends to.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jax_dsa.core.documents import block_range
from jax_dsa.nn import AttentionConfig, GroupedConfig
from jax_dsa.nn.blocks import block_count, select, slots_of_blocks, tokens_of_blocks
from jax_dsa.nn.pools import tokens_attended
from jax_dsa.ops.indexer import indexer_topk
from jax_dsa.ops.topk import topk
from jax_dsa.training.metrics import attention_mass, mass_recall, random_indices, recency_indices

if TYPE_CHECKING:
    from jax_dsa.core.typing import Array, Float, Int
    from jax_dsa.nn import AttentionAux, GroupedAux

    Config = AttentionConfig | GroupedConfig
    Selection = Int[Array, "B T K"] | Int[Array, "B T G K"]


def recency_selection(
    config: Config, starts: Int[Array, "B T"], ends: Int[Array, "B T"]
) -> Selection:
    """Returns the selection of the latest numbers, for every list of the attention.

    Args:
        config: Configuration of the attention.
        starts: First token of each query's document, int32.
        ends: One past each query's own token, int32.
    """
    (batch, queries), count = ends.shape, config.selected
    latest = recency_indices(batch, queries, count, *_selectable(config, starts, ends))
    if isinstance(config, GroupedConfig) and config.indexer == "max":  # a list for each KV head
        return jnp.broadcast_to(latest[:, :, None], (batch, queries, config.kv_heads, count))
    return latest


def recalls(
    config: Config,
    aux: AttentionAux | GroupedAux,
    indexer: Any,
    queries: Int[Array, "T"],
    key: Array,
    starts: Int[Array, "B T"],
    ends: Int[Array, "B T"],
) -> dict[str, Float[Array, ""]]:
    """Returns the `mass_recall` of a layer's own, random, latest and best selections.

    Args:
        config: Configuration of the attention.
        aux: The layer's results for dense attention.
        indexer: The `aux.indexer` of the layer that selects.
        queries: The queries to take the mean over, int32.
        key: Random key.
        starts: First token of each of these queries' documents, int32.
        ends: One past each of these queries' own tokens, int32.
    """
    begin, end = _selectable(config, starts, ends)
    rows, count, size = len(ends), config.selected, _tokens_per_number(config)
    numbers = -(-aux.lse.shape[1] // size)
    common = {
        "random": random_indices(key, rows, numbers, count, begin, end),
        "recency": recency_indices(rows, len(queries), count, begin, end),
    }

    def of_list(mass: Float[Array, "B T S"], chosen: Int[Array, "B T K"]) -> dict[str, Array]:
        held = mass
        if size > 1:
            every = jnp.broadcast_to(jnp.arange(numbers, dtype=jnp.int32), (*ends.shape, numbers))
            tokens = _tokens(config, every, starts, ends)[..., : numbers * size]
            held = jnp.take_along_axis(mass, jnp.maximum(tokens, 0), axis=2, mode="clip")
            held = jnp.where(tokens < 0, 0, held).reshape(*every.shape, size).sum(-1)
        best = topk(held, count, starts=begin, ends=end)
        selections = {"indexer": chosen, **common, "best": best}
        return {
            name: mass_recall(mass, _tokens(config, x, starts, ends), starts, ends)
            for name, x in selections.items()
        }

    mass = _mass(config, aux, queries, starts, ends)
    chosen = _chosen(config, indexer, queries, starts, ends)
    if chosen.ndim == 4:  # a list for each KV head
        found = jax.vmap(of_list, in_axes=(0, 2))(mass, chosen)
        return {name: x.mean() for name, x in found.items()}
    return of_list(mass.mean(0), chosen)


def similarity(
    config: Config,
    indexer: Any,
    queries: Int[Array, "T"],
    starts: Int[Array, "B T"],
    ends: Int[Array, "B T"],
) -> dict[str, Float[Array, ""]]:
    """Returns how similar the selections of neighbouring queries are.

    Only neighbours in one document count, and only those of which the first can select more numbers
    than it has slots.

    Args:
        config: Configuration of the attention.
        indexer: The `aux.indexer` of the layer.
        queries: Consecutive queries, int32.
        starts: First token of each of these queries' documents, int32.
        ends: One past each of these queries' own tokens, int32.

    Returns:
        "kept": the part of a query's selection that the query before it selected, too.
        "union": how many different numbers eight neighbouring queries select, divided by the number
        that one of them selects. Both are NaN if no query counts.
    """
    begin, end = _selectable(config, starts, ends)
    chosen = _chosen(config, indexer, queries, starts, ends)
    counts = end - begin > config.selected
    if chosen.ndim == 4:  # a list for each KV head
        groups = chosen.shape[2]
        chosen = jnp.moveaxis(chosen, 2, 1).reshape(-1, *chosen.shape[1::2])
        counts, starts = (jnp.repeat(x, groups, axis=0) for x in (counts, starts))
    lists = jnp.where(chosen < 0, jnp.iinfo(jnp.int32).max, chosen)  # ascending
    own, before = lists[:, 1:], lists[:, :-1]
    at = jax.vmap(jax.vmap(jnp.searchsorted))(before, own)
    kept = jnp.take_along_axis(before, at, axis=2, mode="clip") == own
    kept = kept.mean(2, where=own != jnp.iinfo(jnp.int32).max)
    pairs = counts[:, :-1] & (starts[:, 1:] == starts[:, :-1])

    tiles = lists[:, : lists.shape[1] // 8 * 8].reshape(len(lists), -1, 8, lists.shape[2])
    last = tiles.shape[1] * 8
    whole = counts[:, :last:8] & (starts[:, :last:8] == starts[:, 7:last:8])
    index_k = indexer[1] if isinstance(config, GroupedConfig) else indexer.index_k
    members = jnp.zeros((*tiles.shape[:2], index_k.shape[1]), bool)
    rows, columns = jnp.indices(tiles.shape[:2])[..., None, None]
    members = members.at[rows, columns, tiles].set(True, mode="drop")  # empty slots are dropped
    union = members.sum(2) / (tiles != jnp.iinfo(jnp.int32).max).sum((2, 3)) * 8
    return {
        "kept": kept.mean(where=pairs),
        "union": union.mean(where=whole),
    }


def _tokens_per_number(config: Config) -> int:
    return config.block_size if isinstance(config, GroupedConfig) else config.index_pool or 1


def _selectable(
    config: Config, starts: Int[Array, "B T"], ends: Int[Array, "B T"]
) -> tuple[Int[Array, "B T"], Int[Array, "B T"]]:
    """Returns the half-open range of the numbers that each query may select."""
    if isinstance(config, GroupedConfig):
        return jnp.zeros_like(starts), block_count(config, starts, ends)
    return block_range(_tokens_per_number(config), starts, ends)


def _tokens(
    config: Config,
    selection: Int[Array, "B T K"],
    starts: Int[Array, "B T"],
    ends: Int[Array, "B T"],
) -> Int[Array, "B T S"]:
    """Returns the tokens that a query attends to, -1 in empty slots.

    The slots of the selected tokens come first, equally many for each number. Those of the tokens
    that the layer adds to any selection follow.
    """
    size = _tokens_per_number(config)
    if not isinstance(config, GroupedConfig):
        return tokens_attended(size, selection, starts, ends, with_tail=config.index_tail)
    if config.indexer == "max":
        return tokens_of_blocks(config, selection, starts, ends)
    pools = slots_of_blocks(config, selection, starts)
    return tokens_attended(size, pools, starts, ends, with_tail=True)


def _mass(
    config: Config,
    aux: Any,
    queries: Int[Array, "T"],
    starts: Int[Array, "B T"],
    ends: Int[Array, "B T"],
) -> Float[Array, "G B T S"]:
    """Returns the attention mass of the queries for the heads of each group."""
    q, k = (aux.q, aux.k) if isinstance(config, GroupedConfig) else (aux.q, aux.kv)
    groups = k.shape[2]

    def grouped(x: Array) -> Array:
        x = x[:, queries]
        return x.reshape(*x.shape[:2], groups, x.shape[2] // groups, *x.shape[3:])

    def of_group(q: Array, k: Array, lse: Array) -> Array:
        return attention_mass(q, k[:, :, None], lse, scale=config.scale, starts=starts, ends=ends)

    return jax.vmap(of_group, in_axes=2)(grouped(q), k, grouped(aux.lse))


def _chosen(
    config: Config,
    indexer: Any,
    queries: Int[Array, "T"],
    starts: Int[Array, "B T"],
    ends: Int[Array, "B T"],
) -> Selection:
    """Returns the selection of the queries by these inputs of an indexer."""
    if isinstance(config, GroupedConfig):
        index_q, index_k = indexer
        return select(config, index_q[:, queries], index_k, starts, ends)[0]
    inputs = indexer._replace(
        index_q=indexer.index_q[:, queries], index_weights=indexer.index_weights[:, queries]
    )
    begin, end = _selectable(config, starts, ends)
    chosen, _ = indexer_topk(**inputs._asdict(), top_k=config.selected, starts=begin, ends=end)
    return chosen
