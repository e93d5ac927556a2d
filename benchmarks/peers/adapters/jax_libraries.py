"""Calls of libraries that are written for JAX."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jax_dsa.bench.case import Case


def jla_logits(case: Case, q: Any, k: Any, weights: Any, ends: Any) -> Any:
    from jla.ops.mosaic_gpu.dsa import index_scores

    return index_scores(q, k, weights, scale=1.0)


def jla_top_k(case: Case, x: Any) -> Any:
    from jla.ops.mosaic_gpu.dsa_topk import radix_top_k

    return radix_top_k(x[None], case.dims["K"])[0][0]


def jla_gather(case: Case, q: Any, kv: Any, indices: Any) -> Any:
    from jla.ops.dsa_gather import gather_attention

    return gather_attention(q, kv, kv[..., : min(512, case.dims["D"])], indices[:, :, 0])


def jla_attention(case: Case, q: Any, k: Any, v: Any) -> Any:
    from jla.ops.mosaic_gpu.attention import flash_attention

    return flash_attention(q, k, v)


def fa4_attention(case: Case, q: Any, k: Any, v: Any) -> Any:
    from fa4_jax import flash_attn

    return flash_attn(q, k, v, causal=case.note == "causal")


def fa3_attention(case: Case, q: Any, k: Any, v: Any) -> Any:
    from flash_attn3_jax import flash_mha

    if (q.shape[3], v.shape[3]) != (128, 128):
        raise NotImplementedError("its wheels support only heads of 128 dims")
    window = (case.dims["W"] - 1, 0) if case.note == "window" else (-1, -1)
    return flash_mha(q, k, v, is_causal=case.note != "dense", window_size=window)


def te_attention(case: Case, q: Any, k: Any, v: Any) -> Any:
    from transformer_engine.jax.flax import DotProductAttention

    attention = DotProductAttention(
        head_dim=q.shape[3],
        num_attention_heads=q.shape[2],
        num_gqa_groups=k.shape[2],
        attn_mask_type="causal" if case.note == "causal" else "no_mask",
        qkv_layout="bshd_bshd_bshd",
        transpose_batch_sequence=False,
        dtype=q.dtype,
    )
    out = attention.apply({}, q, k, v, deterministic=True)
    return out.reshape(*q.shape[:3], v.shape[3])
