"""Attention probabilities of `masked_attention`, for inspection."""

from __future__ import annotations

import jax

from jax_dsa.core.arguments import CausalAlignment, SegmentIds, Window
from jax_dsa.core.checks import Args
from jax_dsa.core.op import Pass
from jax_dsa.core.typing import Array, Bool, Float, Int
from jax_dsa.ops.attention_probs import xla
from jax_dsa.ops.attention_probs.spec import Operands
from jax_dsa.ops.block_mask.spec import BlockMask
from jax_dsa.ops.block_mask.visible import Visible
from jax_dsa.ops.masked_attention.arguments import (
    options_and_masks,
    queries_and_keys,
    require_no_batch_axis,
)
from jax_dsa.ops.masked_attention.spec import Options

_NONE_IF_PACKED = "None beside 'cu_seqlens_q' and 'cu_seqlens_k'"
PROBS = Pass("attention_probs", xla.attention_probs)


def attention_probs(
    q: Float[Array, "B T N D"],
    k: Float[Array, "B S G D"],
    bias: Float[Array, "1|B 1|G|N 1|T S"] | None = None,
    mask: Bool[Array, "1|B 1|G|N 1|T S"] | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    causal_alignment: CausalAlignment = "top_left",
    local_window_size: Window | None = None,
    segment_ids: SegmentIds | None = None,
    key_value_seq_lengths: Int[Array, "B"] | None = None,
    cu_seqlens_q: Int[Array, "R+1"] | None = None,
    cu_seqlens_k: Int[Array, "R+1"] | None = None,
    softcap: float | None = None,
    block_mask: BlockMask | None = None,
    kv_indices: Int[Array, "B G W"] | None = None,
    sinks: Float[Array, "N"] | None = None,
) -> Float[Array, "B N T S"]:
    """Returns the attention probabilities that `masked_attention` gives each key.

    This function is for inspection. The result takes the memory that `masked_attention` avoids, it
    has no gradient, and no CUDA kernel computes it.

    The probabilities of a query sum to 1, or with sinks to less, by the share of the sink. They are
    all 0 if the query sees no key. A key that
    `kv_indices` lists twice has the probability of both entries.

    Args:
        q, k, bias, mask: As in `masked_attention`. The batch axis may be absent from all arrays.
        scale, is_causal, causal_alignment, local_window_size, segment_ids, key_value_seq_lengths,
            softcap, block_mask, kv_indices, sinks: As in `masked_attention`.
        cu_seqlens_q, cu_seqlens_k: Bounds of packed sequences, as in `masked_attention_varlen`. The
            arrays then have no batch axis, and `segment_ids` and `key_value_seq_lengths` must be
            None.

    Returns:
        Probabilities of shape [B, N, T, S], float32 (float64 if q is).

    Raises:
        ValueError, TypeError: If a shape, dtype or option is wrong.

    Examples:
        >>> import jax, jax_dsa
        >>> q, k = jax.random.normal(jax.random.key(0), (2, 1, 4, 2, 8))
        >>> probs = jax_dsa.attention_probs(q, k, is_causal=True)
        >>> probs.shape, bool(abs(probs.sum(-1) - 1).max() < 1e-5)
        ((1, 2, 4, 4), True)
    """
    args = Args("attention_probs", "q", q, "B T N D")
    packed = cu_seqlens_q is not None or cu_seqlens_k is not None
    if packed:
        require_no_batch_axis(args, q)
    q, k = queries_and_keys(args, q, k)
    if not packed:
        visible = Visible.from_arguments(
            args,
            is_causal,
            causal_alignment,
            local_window_size,
            key_value_seq_lengths,
            segment_ids,
        )
    else:
        args.option("segment_ids", segment_ids, segment_ids is None, _NONE_IF_PACKED)
        lengths = key_value_seq_lengths
        args.option("key_value_seq_lengths", lengths, lengths is None, _NONE_IF_PACKED)
        visible = Visible.from_packed(
            args, cu_seqlens_q, cu_seqlens_k, is_causal, causal_alignment, local_window_size
        )
    options, masks = options_and_masks(
        args,
        q,
        k,
        visible,
        bias=bias,
        mask=mask,
        block_mask=block_mask,
        kv_indices=kv_indices,
        sinks=sinks,
        scale=scale,
        softcap=softcap,
    )
    return probabilities(args, options, q, k, masks)


def probabilities(
    args: Args, options: Options, q: Array, k: Array, masks: dict[str, Array | None]
) -> Float[Array, "B N T S"]:
    """Returns the probabilities for checked arguments."""
    operands = jax.lax.stop_gradient(Operands(q=q, k=k, **masks))
    (probs,) = args.restore(PROBS(args.call("xla"), options, operands))
    return probs
