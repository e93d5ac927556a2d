"""Options, operands and gradients of `sparse_attention` and `sparse_attention_decode`."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from jax_dsa.core.checks import FP8
from jax_dsa.core.spec import SHARED, Dtype, accumulated
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
        page_size: Tokens per page; used only with a page table.
        batch_invariant: Whether a request's result is independent of the other requests; used only
            in the forward pass of decoding.
    """

    scale: float
    block_size: int
    sink_blocks: int = 0
    local_blocks: int = 0
    tail_block: bool = False
    deterministic: bool = False
    page_size: int | None = None
    batch_invariant: bool = False


class Operands(NamedTuple):
    """The arrays that both passes read.

    Attributes:
        q: Queries.
        k: Keys. A pool of pages is one batch entry that all requests share.
        v: Values.
        indices: The blocks that each query lists.
        positions: The position of each query among its keys. It sees no later key, and forced
            blocks follow from it. None: a query sees keys at all positions.
        starts: The row of `k` that has position 0 for a query. None: row 0.
        lengths: Number of keys that a query may see, from position 0. None: all rows of `k`.
        topk_length: Number of slots of a row that are used, from the first one. None: all slots.
        sinks: Logits that take part in the softmax denominator but have no value.
        page_table: The pages of each request if `k` and `v` are pools of pages.
        k_scale, v_scale: Factors of the rows of `k` and `v` in FP8. None: 1.
    """

    q: Float[Array, "b t (g m) d"]
    k: Float[Array, "b s g d", SHARED]
    v: Float[Array, "b s g e", SHARED]
    indices: Int[Array, "b t g k"]
    positions: Int[Array, "b t"] | None = None
    starts: Int[Array, "b t"] | None = None
    lengths: Int[Array, "b t"] | None = None
    topk_length: Int[Array, "b t"] | None = None
    sinks: Float[Array, "b (g m)"] | None = None
    page_table: Int[Array, "b p"] | None = None
    k_scale: Float[Array, "b s g", SHARED] | None = None
    v_scale: Float[Array, "b s g", SHARED] | None = None


def _accumulated_unless_fp8(name: str) -> Dtype:
    rule = accumulated(name).rule

    def unless_fp8(options: Options, x: Any) -> Any:
        return None if getattr(x, name).dtype == FP8 else rule(options, x)

    return Dtype(unless_fp8)


class Gradients(NamedTuple):
    """The gradients of q in its dtype, and of k, v (None for FP8) and the sinks in float32.

    Those in float32 are sums over shards. They are rounded after the shards are added.
    """

    q: Array
    k: Float[Array, "", _accumulated_unless_fp8("k")] | None
    v: Float[Array, "", _accumulated_unless_fp8("v")] | None
    sinks: Float[Array, "", accumulated("q")] | None
