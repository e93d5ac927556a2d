"""The libraries that are compared with ours, and `available`, which imports them."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from benchmarks.peers.adapters import (
    cudnn,
    deep_gemm,
    fla,
    flash_mla,
    flashinfer,
    jax_libraries,
    pytorch,
)
from benchmarks.peers.running import Peer
from jax_dsa.bench.cases.masked_attention import EMPTY

if TYPE_CHECKING:
    from collections.abc import Callable


def _attention(call: Callable[..., Any], *steps: str, dense: bool = True) -> dict[str, Any]:
    """Returns the calls of a library that has causal and, by default, dense attention."""
    notes = ("dense", "causal") if dense else ("causal",)
    return {f"masked_attention {step} bf16 {note}": call for step in steps for note in notes}


# Block masks, which PyTorch's FlexAttention has.
_TILES = [f"masked_attention fwd bf16 empty{percent}" for percent in EMPTY if percent]

# TileLang is missing because its package has no operators. Its DeepSeek kernels are examples of its
# repository.
PEERS = (
    Peer(
        "FlashMLA",
        "flash_mla",
        {
            "sparse_mla fwd bf16": flash_mla.sparse,
            "sparse_mla fwd fp8 decode": flash_mla.sparse_decode,
            "mqa_decode fwd bf16": flash_mla.decode,
            "mqa_decode fwd bf16 plan": flash_mla.decode,
        },
        torch=True,
        prepare={
            "sparse_mla fwd fp8 decode": flash_mla.sparse_decode_operands,
            "mqa_decode fwd bf16": flash_mla.decode_operands,
            "mqa_decode fwd bf16 plan": flash_mla.decode_operands,
        },
    ),
    Peer(
        "DeepGEMM",
        "deep_gemm",
        {"indexer fwd fp8": deep_gemm.logits, "fp8 fwd fp8": deep_gemm.matmul},
        torch=True,
        prepare={"fp8 fwd fp8": deep_gemm.column_major_scales},
    ),
    Peer(
        "cuDNN frontend",
        "cudnn",
        {
            "indexer fwd fp8": cudnn.logits,
            "indexer fwd bf16": cudnn.logits,
            "topk fwd f32": cudnn.top_k,
            "attn_dist fwd bf16": cudnn.teacher,
            "sparse_mla bwd bf16": cudnn.sparse_backward,
        },
        torch=True,
    ),
    Peer(
        "flash-linear-attention",
        "fla.ops.nsa.parallel",
        {
            f"sparse_attention {step} bf16 {lists}": call
            for step, call in (("fwd", fla.sparse), ("bwd", fla.sparse_backward))
            for lists in ("similar", "random")
        },
        torch=True,
    ),
    Peer(
        "FlashInfer",
        "flashinfer",
        {"topk fwd f32": flashinfer.top_k, **_attention(flashinfer.attention, "fwd")},
        torch=True,
    ),
    Peer(
        "PyTorch",
        "torch",
        {
            "topk fwd f32": pytorch.top_k,
            "fp8 fwd fp8": pytorch.matmul,
            **_attention(pytorch.attention, "fwd"),
            **dict.fromkeys(_TILES, pytorch.flex_attention),
        },
        torch=True,
        prepare={
            "fp8 fwd fp8": deep_gemm.column_major_scales,
            **dict.fromkeys(_TILES, pytorch.flex_operands),
        },
    ),
    Peer(
        "jax-linear-attention",
        "jla",
        {
            "indexer fwd bf16": jax_libraries.jla_logits,
            "topk fwd f32": jax_libraries.jla_top_k,
            "sparse_mla fwd bf16": jax_libraries.jla_gather,
            "sparse_mla bwd bf16": jax_libraries.jla_gather,
            **_attention(jax_libraries.jla_attention, "fwd", "bwd", dense=False),
        },
    ),
    Peer(
        "flash-attn3-jax",
        "flash_attn3_jax",
        {
            **_attention(jax_libraries.fa3_attention, "fwd", "bwd"),
            "masked_attention fwd bf16 window": jax_libraries.fa3_attention,
            "masked_attention bwd bf16 window": jax_libraries.fa3_attention,
        },
    ),
    Peer("fa4-jax", "fa4_jax", _attention(jax_libraries.fa4_attention, "fwd", "bwd")),
    Peer(
        "TransformerEngine",
        "transformer_engine.jax",
        _attention(jax_libraries.te_attention, "fwd", "bwd"),
    ),
)


def available() -> tuple[list[Peer], list[str]]:
    """Imports the libraries.

    Returns:
        The libraries that can be imported, and a line of text for each one that cannot.
    """
    found, absent = [], []
    for peer in PEERS:
        try:
            importlib.import_module(peer.module)
        except Exception as error:  # Without its CUDA libraries a module may fail in any way.
            absent.append(f"{peer.name} is left out: {error}")
        else:
            found.append(peer)
    return found, absent
