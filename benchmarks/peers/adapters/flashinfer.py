"""Calls of FlashInfer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jax_dsa.bench.case import Case


def top_k(case: Case, x: Any) -> Any:
    import flashinfer

    return flashinfer.top_k(x, case.dims["K"])[1].int()


def attention(case: Case, q: Any, k: Any, v: Any) -> Any:
    import flashinfer

    return flashinfer.single_prefill_with_kv_cache(q[0], k[0], v[0], causal=case.note == "causal")
