"""Calls of cuDNN's Python frontend."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jax_dsa.bench.case import Case


def logits(case: Case, q: Any, k: Any, weights: Any, ends: Any, k_scale: Any = None) -> Any:
    """Computes the indexer's logits. The weights already contain the queries' scales."""
    import torch
    from cudnn import DSA

    options = {}
    if k_scale is not None:
        ones = torch.ones_like(weights)
        options = {"precision": "fp8", "q_scale": ones, "k_scale": k_scale[..., None]}
    offset = torch.full_like(ends[:, 0], k.shape[1] - q.shape[1])
    return DSA.indexer_forward_wrapper(
        q, k[:, :, None], weights, ratio=1, q_causal_offsets=offset, **options
    )["scores"]


def top_k(case: Case, x: Any) -> Any:
    import torch
    from cudnn import DSA

    lengths = torch.full((x.shape[0],), x.shape[1], dtype=torch.int32, device=x.device)
    return DSA.indexer_top_k_wrapper(x, lengths, case.dims["K"], return_val=False)["indices"]


def teacher(case: Case, q: Any, kv: Any, indices: Any, lse: Any) -> Any:
    from cudnn import DSA

    scale = q.shape[3] ** -0.5
    return DSA.sparse_attn_score_recompute_wrapper(q, kv[:, :, 0], lse, indices[:, :, 0], scale)[
        "target"
    ]


def sparse_backward(
    case: Case, q: Any, kv: Any, indices: Any, out: Any, lse: Any, dout: Any
) -> Any:
    import torch
    from cudnn import DSA

    sinks = torch.full((q.shape[2],), -torch.inf, device=q.device)
    grads = DSA.sparse_attention_backward_wrapper(
        q[0], kv[0, :, 0], out[0], dout[0], lse[0], sinks, indices[0, :, 0], q.shape[3] ** -0.5
    )
    return grads["dq"], grads["dkv"]
