"""Sparse attention to a long sequence, a chunk of queries at a time."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from jax_dsa.core import compat
from jax_dsa.core.placement import names_of
from jax_dsa.core.typing import Array, Int

if TYPE_CHECKING:
    from collections.abc import Callable

SELECTION = ("dsa_topk_indices", "dsa_topk_logits")
"""Remat names of an indexer's selection and of the selected logits."""
CHUNKED = "dsa_chunked"
"""Remat name of the attention's output where queries come in chunks.

The backward pass of the chunks recomputes them already. A policy around the whole block should save
this output, or the chunks are computed a third time.
"""


class QueryInputs(NamedTuple):
    """The arrays of a chunk of queries. Keys are not among them: every chunk sees all keys.

    Attributes:
        projections: What the layer projects the queries' tokens to; arrays [B, T, ...].
        scoring: `index_q` and `index_weights`, if the layer has an indexer.
        starts: First key that each query sees, int32; None: key 0.
        ends: End of the range of keys that each query sees, int32; None: causal.
        indices: A given selection, int32; None: the indexer selects.
    """

    projections: Any
    scoring: dict[str, Any]
    starts: Int[Array, "B T"] | None
    ends: Int[Array, "B T"] | None
    indices: Int[Array, "B T *G K"] | None


def map_query_chunks(
    attend: Callable[[QueryInputs], tuple[Any, ...]],
    inputs: QueryInputs,
    shape: tuple[int, ...],
    chunk: int | None,
    stripes: int = 1,
    op: str = "DSAttention",
) -> tuple[Any, ...]:
    """Returns the results of `attend`, which may see only a chunk of the queries at a time.

    Every stripe of the sequence, which is what one device holds, is cut into chunks. A chunk's call
    of `attend` gets the corresponding chunk of every stripe, so that all devices take part in it.

    Args:
        attend: Maps the inputs of some queries to a tuple of results. The first is None, or a pair:
            a loss that is the mean over those of these queries that count, and their number. The
            second, if there is one, is the output. All but the first are arrays [B, T, ...] of
            these queries.
        inputs: The inputs of all queries.
        shape: [B, T, M], the shape of the hidden states.
        chunk: Queries of each stripe that one call of `attend` takes; None: all of them.
        stripes: Number of stripes that the sequence is stored in.
        op: Name of the layer, for error messages.

    Returns:
        The tuple of results for all queries, with the loss in place of the pair.

    Raises:
        ValueError: If T / stripes is greater than `chunk` and not a multiple of it.
    """
    batch, length = shape[0], shape[1] // stripes
    if chunk is None or length <= chunk:
        loss, *results = attend(inputs)
        return None if loss is None else loss[0], *results
    if length % chunk:
        divided = "T" if stripes == 1 else f"T / {stripes} stripes"
        raise ValueError(
            f"{op}: argument 'x' has shape {list(shape)}, expected {divided} to be a "
            f"multiple of query_chunk = {chunk}, or at most {chunk}"
        )
    if inputs.ends is None:
        ends = jnp.arange(1, shape[1] + 1, dtype=jnp.int32)
        inputs = inputs._replace(ends=jnp.broadcast_to(ends, shape[:2]))
    chunks = length // chunk

    # On Explicit axes, every chunk is sharded like the sequence, so that all devices take part in
    # it. If the axes do not divide a chunk, every device has all of it.
    rows = jax.typeof(jax.tree.leaves(inputs.projections)[0]).sharding

    def cut(a: jax.Array) -> jax.Array:
        def run(a: jax.Array) -> jax.Array:
            rest = a.shape[2:]
            a = jnp.moveaxis(a.reshape(batch, stripes, chunks, chunk, *rest), 2, 0)
            return a.reshape(chunks, batch, stripes * chunk, *rest)

        sharding = jax.typeof(a).sharding
        b, t, *rest = sharding.spec
        shards = math.prod(sharding.mesh.shape[name] for name in names_of(t))
        t = t if stripes * chunk % shards == 0 else None
        return compat.left_to_compiler(run, a, PartitionSpec(None, b, t, *rest))(a)

    def joined(a: jax.Array) -> jax.Array:
        def run(a: jax.Array) -> jax.Array:
            rest = a.shape[3:]
            a = jnp.moveaxis(a.reshape(chunks, batch, stripes, chunk, *rest), 0, 2)
            return a.reshape(batch, stripes * length, *rest)

        spec = PartitionSpec(*rows.spec[:2], *jax.typeof(a).sharding.spec[3:])
        return compat.left_to_compiler(run, a, spec)(a)

    policy = jax.checkpoint_policies.save_only_these_names(*SELECTION)
    loss, *results = jax.lax.map(jax.checkpoint(attend, policy=policy), jax.tree.map(cut, inputs))
    results = jax.tree.map(joined, results)
    results[:1] = [checkpoint_name(y, CHUNKED) for y in results[:1]]
    if loss is not None:
        means, rows = loss
        loss = jnp.sum(means * rows) / jnp.maximum(jnp.sum(rows), 1)
    return loss, *results
