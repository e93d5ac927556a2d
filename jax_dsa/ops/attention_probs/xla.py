"""`attention_probs` in plain JAX. It has no CUDA kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from jax_dsa.ops.attention_probs.spec import Operands, Probabilities
from jax_dsa.ops.masked_attention import spec as attention
from jax_dsa.ops.masked_attention.scores import (
    Keys,
    Queries,
    exponentials,
    merge_heads,
    scan_query_chunks,
    scores,
)
from jax_dsa.ops.masked_attention.sinks import gates

if TYPE_CHECKING:
    from jax_dsa.core.typing import Array


def attention_probs(options: attention.Options, x: Operands) -> Probabilities:
    """Returns the attention probabilities over all S keys. The result is not memory-bounded."""
    no_values = x.k[..., :0]
    operands = attention.Operands(v=no_values, **x._asdict())
    keys, queries = Keys.of(operands), Queries.of(operands)

    def body(_: Any, rows: Array, q: Array, *per_query: Any) -> tuple[tuple[()], tuple[Array]]:
        chunk = queries.chunk(rows, per_query)
        visible = chunk.visible(keys)
        k, _ = keys.zero_unseen(visible)
        s = scores(options, q, k, chunk.visible_bias(keys, visible))
        p, total, max_logit = exponentials(s, visible, keys)
        p /= total
        if x.sinks is not None:
            p *= gates(x.sinks, max_logit, jnp.log(total))
        if visible is not None:
            p = jnp.where(visible, p, 0)  # a NaN of the query shows at visible keys only
        return (), (keys.scatter_scores(p),)

    _, (probs,) = scan_query_chunks(body, (), (x.q,), queries, keys, copies=3)
    return Probabilities(merge_heads(probs))
