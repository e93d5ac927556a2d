"""Checks of the arguments of `sparse_attention` and its variants."""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp

from jax_dsa.core import compat
from jax_dsa.core.arguments import (
    document_numbers,
    first_position,
    only_zero,
    scale_or_default,
    selection,
    shared_sinks,
    window_reach,
)
from jax_dsa.core.checks import INT32, Args
from jax_dsa.core.deferred import Deferred
from jax_dsa.core.documents import document_ends, document_starts
from jax_dsa.core.typing import Array, Int
from jax_dsa.ops.block_mask.visible import packed_bounds, packed_rows
from jax_dsa.ops.sparse_attention.spec import BLOCK_SIZES, Options


def options_and_slots(
    args: Args,
    *,
    indices: Any,
    block_size: Any,
    scale: Any,
    is_causal: Any,
    sink_blocks: Any,
    local_blocks: Any,
    tail_block: Any,
    topk_length: Any,
    sinks: Any,
    deterministic: Any,
) -> tuple[Options, dict[str, Any]]:
    """Checks the arguments of these names.

    Returns:
        The options, and the operands `indices`, `topk_length` and `sinks` by name.
    """
    size = args.integer("block_size", block_size, 1)
    args.option("block_size", size, size in BLOCK_SIZES, f"one of {BLOCK_SIZES}")
    causal = args.flag("is_causal", is_causal)
    forced: dict[str, Any] = {
        "sink_blocks": args.integer("sink_blocks", sink_blocks, 0),
        "local_blocks": args.integer("local_blocks", local_blocks, 0),
        "tail_block": args.flag("tail_block", tail_block),
    }
    for name, value in forced.items():
        want = "0 or False without is_causal=True, because the position of a query decides"
        args.option(name, value, causal or not value, want)
    indices, topk_length = selection(args, indices, topk_length)
    options = Options(
        scale=scale_or_default(args, scale),
        block_size=size,
        deterministic=args.flag("deterministic", deterministic),
        **forced,
    )
    slots = {"indices": indices, "topk_length": topk_length, "sinks": shared_sinks(args, sinks)}
    return options, slots


def positions_and_lengths(
    args: Args, is_causal: Any, query_start: Any, key_value_seq_lengths: Any, segment_ids: Any
) -> dict[str, Any]:
    """Checks the arguments and returns `positions`, `starts` and `lengths` by name."""
    sizes = args.batch, args.sizes["T"]
    causal = args.flag("is_causal", is_causal)
    lengths = key_value_seq_lengths
    if lengths is not None:
        lengths = args.array("key_value_seq_lengths", lengths, "B", INT32)
    if segment_ids is not None:
        ids = document_numbers(args, segment_ids, "; sparse_attention_varlen takes such sequences")
        only_zero(args, query_start, "0 beside 'segment_ids', where query t is the token of key t")
        positions = Deferred(_document_positions, (ids,), ()) if causal else None
        starts, lengths = (
            Deferred(document_starts, (ids,), ()),
            Deferred(_document_lengths, (ids, lengths), ()),
        )
        return {"positions": positions, "starts": starts, "lengths": lengths}
    first = first_position(args, query_start)
    if lengths is not None:
        lengths = Deferred(_for_all_queries, (lengths,), sizes)
    positions = Deferred(_positions, (first,), sizes) if causal else None
    return {"positions": positions, "lengths": lengths}


def packed_positions(
    args: Args, cu_seqlens_q: Any, cu_seqlens_k: Any, is_causal: Any, causal_alignment: Any
) -> dict[str, Any]:
    """Checks the arguments of packed sequences and returns the operands that describe them."""
    cu_q, cu_k = packed_bounds(args, cu_seqlens_q, cu_seqlens_k)
    window_reach(args, is_causal, causal_alignment, None)
    rows = functools.partial(
        packed_rows, args.sizes["T"], bottom_right=causal_alignment == "bottom_right"
    )
    # Under vmap, jnp.searchsorted fails if the mesh of its arguments is not the current one.
    first, stop, position = compat.on_mesh_of_types(rows)(cu_q, cu_k)
    where = {"starts": first, "lengths": stop - first}
    if is_causal:
        where["positions"] = position
    return {name: x[None] for name, x in where.items()}


def cached_positions_and_lengths(
    args: Args, is_causal: Any, lengths: Int[Array, "B"]
) -> dict[str, Any]:
    """Returns the operands `positions` and `lengths` by name, for caches of these lengths."""
    sizes = args.batch, args.sizes["T"]
    causal = args.flag("is_causal", is_causal)
    positions = Deferred(_last_positions, (lengths,), sizes) if causal else None
    return {"positions": positions, "lengths": Deferred(_for_all_queries, (lengths,), sizes)}


def _document_positions(ids: Array) -> Int[Array, "B T"]:
    order = jnp.arange(ids.shape[1], dtype=jnp.int32)[None]
    return order - document_starts(ids)


def _document_lengths(ids: Array, lengths: Array | None) -> Int[Array, "B T"]:
    """Returns the number of keys of each token's document that `lengths` leaves."""
    ends = document_ends(ids)
    ends = ends if lengths is None else jnp.minimum(ends, jnp.maximum(lengths, 0)[:, None])
    return ends - document_starts(ids)


def _last_positions(lengths: Array, batch: int, queries: int) -> Int[Array, "B T"]:
    return _positions(jnp.maximum(lengths, 0) - queries, batch, queries)


def _positions(first: Any, batch: int, queries: int) -> Int[Array, "B T"]:
    order = jnp.arange(queries, dtype=jnp.int32)
    return jnp.broadcast_to(first[:, None] + order[None], (batch, queries))


def _for_all_queries(lengths: Array, batch: int, queries: int) -> Int[Array, "B T"]:
    return jnp.broadcast_to(lengths[:, None], (batch, queries))
