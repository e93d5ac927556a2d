"""Calls of DeepGEMM."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jax_dsa.bench.case import Case


def logits(case: Case, q: Any, k: Any, weights: Any, ends: Any, k_scale: Any) -> Any:
    import deep_gemm
    import torch

    starts = torch.zeros_like(ends[0])
    return deep_gemm.fp8_mqa_logits(
        q[0], (k[0], k_scale[0]), weights[0], starts, ends[0], clean_logits=True
    )


def matmul(case: Case, a: Any, a_scale: Any, b: Any, b_scale: Any) -> Any:
    import deep_gemm
    import torch

    out = torch.empty(a.shape[0], b.shape[0], dtype=torch.bfloat16, device=a.device)
    deep_gemm.fp8_gemm_nt((a, a_scale), (b, b_scale), out)
    return out


def column_major_scales(case: Case, a: Any, a_scale: Any, b: Any, b_scale: Any) -> tuple:
    """Returns the operands with the activations' scales stored by columns."""
    return a, a_scale.t().contiguous().t(), b, b_scale
