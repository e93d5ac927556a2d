"""Options, operands and gradients of `sparse_attention`."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from jax_dsa.core.spec import accumulated
from jax_dsa.core.typing import Array, Float, Int

BLOCK_SIZES = (1, 4, 16, 32, 64, 128)


@dataclasses.dataclass(frozen=True)
class Options:
    """Static options.

    Attributes:
        scale: Factor of the scores.
        block_size: Number of keys in a block.
        sink_blocks: Number of first blocks that every query sees.
        local_blocks: Number of newest blocks that every query sees, its own block included.
        tail_block: Whether a query sees its own block if that is not complete yet.
        deterministic: Whether gradients are bit-identical on every run.
    """

    scale: float
    block_size: int
    sink_blocks: int = 0
    local_blocks: int = 0
    tail_block: bool = False
    deterministic: bool = False


class Operands(NamedTuple):
    """The arrays that both passes read.

    Attributes:
        q: Queries.
        k: Keys.
        v: Values.
        indices: The blocks that each query lists.
        positions: The position of each query among its keys. It sees no later key, and forced
            blocks follow from it. None: a query sees keys at all positions.
        starts: The row of `k` that has position 0 for a query. None: row 0.
        lengths: Number of keys that a query may see, from position 0. None: all rows of `k`.
        topk_length: Number of slots of a row that are used, from the first one. None: all slots.
        sinks: Logits that take part in the softmax denominator but have no value.
    """

    q: Float[Array, "b t (g m) d"]
    k: Float[Array, "b s g d"]
    v: Float[Array, "b s g e"]
    indices: Int[Array, "b t g k"]
    positions: Int[Array, "b t"] | None = None
    starts: Int[Array, "b t"] | None = None
    lengths: Int[Array, "b t"] | None = None
    topk_length: Int[Array, "b t"] | None = None
    sinks: Float[Array, "b (g m)"] | None = None


class Gradients(NamedTuple):
    """The gradients of q in its dtype, and of k, v and the sinks in float32.

    Those in float32 are sums over shards. They are rounded after the shards are added.
    """

    q: Array
    k: Float[Array, "", accumulated("k")]
    v: Float[Array, "", accumulated("v")]
    sinks: Float[Array, "", accumulated("q")] | None
