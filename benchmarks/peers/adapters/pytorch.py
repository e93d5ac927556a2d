"""Calls of PyTorch."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from jax_dsa.bench.case import Case


def top_k(case: Case, x: Any) -> Any:
    import torch

    return torch.topk(x, case.dims["K"], sorted=False)[1].int()


def matmul(case: Case, a: Any, a_scale: Any, b: Any, b_scale: Any) -> Any:
    from torch.nn.functional import ScalingType, scaled_mm

    rows, tiles = ScalingType.BlockWise1x128, ScalingType.BlockWise128x128
    return scaled_mm(a, b.t(), a_scale, rows, b_scale.t(), tiles)


def attention(case: Case, q: Any, k: Any, v: Any) -> Any:
    from torch.nn.functional import scaled_dot_product_attention

    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = scaled_dot_product_attention(
        q, k, v, is_causal=case.note == "causal", enable_gqa=k.shape[1] < q.shape[1]
    )
    return out.transpose(1, 2)


def flex_attention(case: Case, q: Any, k: Any, v: Any, block_mask: Any) -> Any:
    return _compiled_flex_attention()(q, k, v, block_mask=block_mask).transpose(1, 2)


def flex_operands(case: Case, q: Any, k: Any, v: Any, *mask: Any) -> tuple:
    """Returns FlexAttention's operands. The last array of `mask` is the mask by elements."""
    from torch.nn.attention.flex_attention import create_block_mask

    # The mask consists of full and empty tiles of 128 x 128.
    kept = mask[-1][0, 0, ::128, ::128].contiguous()

    def keeps(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return kept[query // 128, key // 128]

    t, s = q.shape[1], k.shape[1]
    block_mask = create_block_mask(keeps, None, None, t, s, device=q.device)
    return *(x.transpose(1, 2) for x in (q, k, v)), block_mask


@functools.cache
def _compiled_flex_attention() -> Callable[..., Any]:
    import torch
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)
