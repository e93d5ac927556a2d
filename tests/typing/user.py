"""A file as a user writes it, which calls every public function. mypy and pyright check it.

`assert_type` fails if the declared type of a result differs. Nothing here runs.
"""

from __future__ import annotations

from typing import assert_type

import jax
import jax.numpy as jnp
from jax import Array

import jax_dsa
from jax_dsa import BlockMask, DSAAux, FlatCache, HTreeCache, HTreeSelection, PagedCache


def attention(q: Array, kv: Array, indices: Array, lse: Array) -> None:
    assert_type(jax_dsa.sparse_mla(q, kv, indices, is_causal=True), Array)
    assert_type(jax_dsa.sparse_mla(q, kv, indices, return_lse=True), tuple[Array, Array])
    assert_type(jax_dsa.attn_dist(q, kv, indices, lse), Array)
    out, aux = jax_dsa.dsa_attention(q, kv, q, kv, lse, top_k=2048)
    assert_type(out, Array)
    assert_type(aux, DSAAux)
    assert_type(aux.kl, Array)
    jax_dsa.dsa_attention(q, kv, indices=aux.indices)


def selection(index_q: Array, index_k: Array, index_weights: Array, cache: PagedCache) -> None:
    index = index_q, index_k, index_weights
    assert_type(jax_dsa.indexer_logits(*index, is_causal=True), Array)
    assert_type(jax_dsa.indexer_topk(*index, 2048), tuple[Array, Array])
    jax_dsa.indexer_topk(index_q, cache, index_weights, top_k=2048)
    blocks, logits = jax_dsa.indexer_block_topk(
        index_q, cache, None, 16, block_size=128, per_head=True
    )
    assert_type(blocks, Array)
    assert_type(logits, Array)
    assert_type(jax_dsa.block_topk(index_q, 16, block_size=128), Array)
    assert_type(jax_dsa.topk(index_q, 8), Array)
    assert_type(jax_dsa.topk(index_q, 8, return_values=True), tuple[Array, Array])
    assert_type(jax_dsa.indexer_kl_loss(index_q, index_k), Array)
    assert_type(jax_dsa.dense_indexer_kl_loss(*index, index_q, index_k), Array)
    assert_type(jax_dsa.block_tokens(index_q, 4), Array)


def pooling(values: Array, gates: Array, bias: Array) -> None:
    assert_type(jax_dsa.gated_pool(values, gates, bias), Array)
    assert_type(jax_dsa.mean_pool(values, 4), Array)


def decoding(q: Array, rows: Array, indices: Array) -> None:
    flat = FlatCache.empty(2, 64, fp8=True)
    assert_type(flat.append(rows), FlatCache)
    paged = PagedCache.empty(8, 64, 2, 4)
    assert_type(paged.append(rows), PagedCache)
    assert_type(jax_dsa.sparse_mla_decode(q, flat, indices), Array)
    assert_type(jax_dsa.sparse_mla_decode(q, paged, indices, return_lse=True), tuple[Array, Array])
    assert_type(jax_dsa.sparse_mla_decode(q, flat, indices, batch_invariant=True), Array)
    assert_type(jax_dsa.mqa_decode(q, rows), Array)
    plan = jax_dsa.mqa_decode_plan(paged.lengths, num_heads=128)
    assert_type(plan, jax_dsa.MqaDecodePlan)
    assert_type(jax_dsa.mqa_decode(q, paged, plan=plan), Array)
    out, lse = jax_dsa.mqa_decode(q, paged, return_lse=True)
    assert_type(jax_dsa.mqa_decode(q, rows, return_max_logit=True), tuple[Array, Array])
    both = jax_dsa.mqa_decode(q, rows, return_lse=True, return_max_logit=True)
    assert_type(both, tuple[Array, Array, Array])
    assert_type(jax_dsa.mqa_decode(q, rows, normalize=False), tuple[Array, Array, Array])
    assert_type(jax_dsa.merge_attention([out, out], [lse, lse]), tuple[Array, Array])
    sums = jax_dsa.merge_attention([out, out], max_logits=[lse, lse], sums=[lse, lse])
    assert_type(sums, tuple[Array, Array, Array])


def decoding_blocks(q: Array, k: PagedCache, v: PagedCache, indices: Array) -> None:
    assert_type(jax_dsa.sparse_attention_decode(q, k, v, indices, block_size=64), Array)
    assert_type(
        jax_dsa.sparse_attention_decode(q, k, v, indices, block_size=64, return_lse=True),
        tuple[Array, Array],
    )
    assert_type(
        jax_dsa.sparse_attention_decode(
            q, k, v, indices, block_size=64, return_lse=True, return_max_logit=True
        ),
        tuple[Array, Array, Array],
    )


def masked(q: Array, k: Array, v: Array, ends: Array) -> None:
    mask = jax_dsa.make_block_mask(shape=(1, 1, 512, 512), is_causal=True)
    assert_type(mask, BlockMask)
    assert_type(jax_dsa.masked_attention(q, k, v, block_mask=mask), Array)
    assert_type(jax_dsa.masked_attention(q, k, v, return_lse=True), tuple[Array, Array])
    assert_type(jax_dsa.masked_attention(q, k, v, return_max_logit=True), tuple[Array, Array])
    assert_type(
        jax_dsa.masked_attention(q, k, v, return_lse=True, return_max_logit=True),
        tuple[Array, Array, Array],
    )
    assert_type(jax_dsa.attention_probs(q, k, block_mask=mask), Array)
    assert_type(jax_dsa.masked_attention_varlen(q, k, v, ends, ends), Array)
    assert_type(jax_dsa.topk_mask(q, 4), Array)
    assert_type(jax_dsa.topk_indices(q, 4), Array)
    assert_type(jax_dsa.relu_mask(q), Array)


def blocks(q: Array, k: Array, v: Array, indices: Array, ends: Array) -> None:
    assert_type(jax_dsa.sparse_attention(q, k, v, indices, block_size=64), Array)
    assert_type(
        jax_dsa.sparse_attention(q, k, v, indices, block_size=64, return_lse=True),
        tuple[Array, Array],
    )
    assert_type(
        jax_dsa.sparse_attention(
            q, k, v, indices, block_size=64, return_lse=True, return_max_logit=True
        ),
        tuple[Array, Array, Array],
    )
    assert_type(jax_dsa.sparse_attention_varlen(q, k, v, indices, ends, ends, block_size=64), Array)


def tree(q: Array, k: Array, v: Array) -> None:
    assert_type(jax_dsa.htree_attention(q, k, v, top_k=8), Array)
    assert_type(jax_dsa.htree_attention(q, k, v, return_lse=True), tuple[Array, Array])
    assert_type(jax_dsa.htree_build(k, v), tuple[tuple[Array, Array], ...])
    assert_type(jax_dsa.htree_select(q, k), tuple[HTreeSelection, ...])
    cache = HTreeCache.empty(2, 64, 16).append(k, v)
    assert_type(cache, HTreeCache)
    assert_type(jax_dsa.htree_decode(q, cache, return_lse=True), tuple[Array, Array])


def fp8(x: Array, weights: Array) -> None:
    codes, scale = jax_dsa.quantize_fp8(x, power_of_two_scale=True)
    assert_type(codes, Array)
    assert_type(jax_dsa.dequantize_fp8(codes, scale, dtype=jnp.bfloat16), Array)
    assert_type(jax_dsa.fake_quantize_fp8(x), Array)
    assert_type(jax_dsa.fp8_matmul(x, None, weights, None), Array)
    assert_type(jax_dsa.fp8_linear(x, weights, dtype=jnp.float32), Array)


def around(x: Array) -> None:
    assert_type(jax_dsa.capabilities().cuda, str)
    assert_type(jax_dsa.export_checks(), list[jax.export.DisabledSafetyCheck])
    with jax_dsa.plain_xla():
        jax_dsa.topk(x, 2)
