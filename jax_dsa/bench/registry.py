"""The operators that are measured, and the functions that make their cases."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jax_dsa.bench.cases.attn_dist import attn_dist
from jax_dsa.bench.cases.block_mask import block_mask
from jax_dsa.bench.cases.fp8 import fp8
from jax_dsa.bench.cases.gated_pool import gated_pool
from jax_dsa.bench.cases.htree import htree
from jax_dsa.bench.cases.indexer import indexer
from jax_dsa.bench.cases.losses import losses
from jax_dsa.bench.cases.masked_attention import masked_attention
from jax_dsa.bench.cases.mqa_decode import mqa_decode
from jax_dsa.bench.cases.sparse_attention import sparse_attention, sparse_attention_decode
from jax_dsa.bench.cases.sparse_mla import sparse_mla
from jax_dsa.bench.cases.topk import topk

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from jax_dsa.bench.case import Case, Scale

OPERATORS: dict[str, Callable[[Scale], Iterator[Case]]] = {
    f.__name__: f
    for f in (
        fp8,
        topk,
        indexer,
        sparse_mla,
        attn_dist,
        masked_attention,
        sparse_attention,
        sparse_attention_decode,
        block_mask,
        gated_pool,
        losses,
        mqa_decode,
        htree,
    )
}
"""The functions that make each operator's cases, by the operator's name."""
