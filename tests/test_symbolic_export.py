"""`jax.export` with symbols for batch, queries and keys, so that one program takes all sizes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from support.compare import assert_matches
from support.transforms import weighted

import jax_dsa
from jax_dsa import FlatCache, PagedCache
from jax_dsa.core import streaming

if TYPE_CHECKING:
    from collections.abc import Callable

f32, i32, e4m3 = jnp.float32, jnp.int32, jnp.float8_e4m3fn
INDEX = [("b, t, 2, 8", f32), ("b, s, 8", f32), ("b, t, 2", f32)]
ATTENTION = [("b, t, 4, 8", f32), ("b, s, 1, 8", f32)]
SLOTS, LENGTHS = ("b, t, 5", i32), ("b", i32)

# By name: the function, and the axes and dtype of each of its arrays.
CASES: dict[str, tuple[Callable, list]] = {
    "topk": (lambda x: jax_dsa.topk(x, 3, return_values=True), [("b, t, s", f32)]),
    "topk_mask": (lambda x: jax_dsa.topk_mask(x, 2), [("b, t, s", f32)]),
    "sparse_mla": (
        lambda *x: jax_dsa.sparse_mla(*x, is_causal=True, return_lse=True),
        [*ATTENTION, SLOTS],
    ),
    "sparse_mla_decode": (
        lambda q, k, n, i: jax_dsa.sparse_mla_decode(q, FlatCache(k, n), i, is_causal=True),
        [*ATTENTION, LENGTHS, SLOTS],
    ),
    "sparse_mla_decode-paged": (
        lambda q, k, table, n, i: jax_dsa.sparse_mla_decode(q, PagedCache(k, table, n), i),
        [ATTENTION[0], ("p, 2, 1, 8", f32), ("b, r", i32), LENGTHS, SLOTS],
    ),
    "sparse_mla_decode-two-caches": (
        lambda q, k, n, i, pages, table, m, j: jax_dsa.sparse_mla_decode(
            q,
            FlatCache(k, n),
            i,
            extra_cache=PagedCache(pages, table, m),
            extra_indices=j,
            is_causal=True,
            extra_key_stride=2,
        ),
        [*ATTENTION, LENGTHS, SLOTS, ("p, 2, 1, 8", f32), ("b, r", i32), LENGTHS, ("b, t, 3", i32)],
    ),
    "sparse_mla-batch_invariant": (
        lambda *x: jax_dsa.sparse_mla(*x, batch_invariant=True),
        [*ATTENTION, SLOTS],
    ),
    "sparse_attention": (
        lambda q, k, i: jax_dsa.sparse_attention(
            q, k, k, i, block_size=4, is_causal=True, sink_blocks=1, local_blocks=3
        ),
        [*ATTENTION, SLOTS],
    ),
    "sparse_attention_decode": (
        lambda q, k, n, i: jax_dsa.sparse_attention_decode(
            q, *[FlatCache(k, n)] * 2, i, block_size=4, is_causal=True, local_blocks=3
        ),
        [*ATTENTION, LENGTHS, SLOTS],
    ),
    "sparse_attention_decode-paged": (
        lambda q, k, table, n, i: jax_dsa.sparse_attention_decode(
            q, *[PagedCache(k, table, n)] * 2, i, block_size=4
        ),
        [ATTENTION[0], ("p, 2, 1, 8", f32), ("b, r", i32), LENGTHS, SLOTS],
    ),
    "attn_dist": (jax_dsa.attn_dist, [*ATTENTION, SLOTS, ("b, t, 4", f32)]),
    "attn_dist-blocks": (
        lambda *x: jax_dsa.attn_dist(*x, block_size=4, is_causal=True),
        [*ATTENTION, SLOTS, ("b, t, 4", f32)],
    ),
    "block_tokens": (lambda i: jax_dsa.block_tokens(i, 4), [SLOTS]),
    "mean_pool": (lambda x: jax_dsa.mean_pool(x, 2), [("b, s, 8", f32)]),
    "indexer_logits": (lambda *x: jax_dsa.indexer_logits(*x, is_causal=True), INDEX),
    "indexer_topk": (lambda *x: jax_dsa.indexer_topk(*x, 3, is_causal=True), INDEX),
    "indexer_topk-candidates": (
        lambda blocks, *x: jax_dsa.indexer_topk(*x, 3, candidates=blocks, candidate_block_size=2),
        [("b, t, 2", i32), *INDEX],
    ),
    "indexer_block_topk": (
        lambda starts, *x: jax_dsa.indexer_block_topk(*x, 3, block_size=2, starts=starts),
        [("b, t", i32), *INDEX],
    ),
    "indexer_block_topk-mean": (
        lambda *x: jax_dsa.indexer_block_topk(*x, 3, block_size=2, pooling="mean", local_blocks=0),
        INDEX,
    ),
    "block_topk": (
        lambda x, ends: jax_dsa.block_topk(x, 3, block_size=2, ends=ends),
        [("b, t, s", f32), ("b, t", i32)],
    ),
    "dsa_attention": (lambda *x: jax_dsa.dsa_attention(*x, top_k=3), [*ATTENTION, *INDEX]),
    "dsa_attention-documents": (
        lambda ids, *x: jax_dsa.dsa_attention(*x, top_k=3, is_causal=False, segment_ids=ids),
        [("b, t", i32), *[(d.replace("s", "t"), x) for d, x in (*ATTENTION, *INDEX)]],
    ),
    "masked_attention-documents": (
        lambda ids, *x: jax_dsa.masked_attention(*x, segment_ids=ids),
        [("b, t", i32), ("b, t, 4, 8", f32), *[("b, t, 2, 8", f32)] * 2],
    ),
    "indexer_kl_loss": (
        lambda logits, teacher: jax_dsa.indexer_kl_loss(logits, jnp.abs(teacher)),
        [("b, t, s", f32)] * 2,
    ),
    "dense_indexer_kl_loss": (jax_dsa.dense_indexer_kl_loss, [*INDEX, *ATTENTION]),
    "dense_indexer_kl_loss-blocks": (
        lambda index_q, keys, *x: jax_dsa.dense_indexer_kl_loss(
            index_q, jax_dsa.mean_pool(keys, 2), *x, block_size=2
        ),
        [*INDEX, *ATTENTION],
    ),
    "masked_attention": (
        lambda q, k, v: jax_dsa.masked_attention(
            q, k, v, causal_alignment="bottom_right", local_window_size=(3, 1), return_lse=True
        ),
        [("b, t, 4, 8", f32), *[("b, s, 2, 8", f32)] * 2],
    ),
    "mqa_decode": (
        lambda q, k, n: jax_dsa.mqa_decode(q, k, key_value_seq_lengths=n, num_splits=2),
        [*ATTENTION, LENGTHS],
    ),
    "merge_attention": (jax_dsa.merge_attention, [("2, b, t, 4, 8", f32), ("2, b, t, 4", f32)]),
    "htree_attention": (
        lambda q, k: jax_dsa.htree_attention(q, k, k, compression=2, top_k=2),
        [("b, 9, 4, 8", f32), ("b, 9, 2, 8", f32)],
    ),
    "quantize_fp8": (jax_dsa.quantize_fp8, [("b, t, 256", f32)]),
    "fake_quantize_fp8": (jax_dsa.fake_quantize_fp8, [("b, t, 256", f32)]),
    "dequantize_fp8": (jax_dsa.dequantize_fp8, [("b, t, 256", e4m3), ("b, t, 2", f32)]),
    "fp8_matmul": (
        lambda a, b: jax_dsa.fp8_matmul(a, None, b, None),
        [("b, t, 256", f32), ("128, 256", f32)],
    ),
    "fp8_linear": (jax_dsa.fp8_linear, [("b, t, 256", f32), ("256, 128", f32)]),
    "append": (
        lambda k, n, new: FlatCache(k, n).append(new),
        [ATTENTION[1], LENGTHS, ("b, t, 1, 8", f32)],
    ),
}
CONSTANT = ("block_tokens", "quantize_fp8", "topk_mask")


@pytest.mark.slow
@pytest.mark.parametrize("budget", [2**27, 900], ids=["whole", "chunks"])
@pytest.mark.parametrize("name", CASES)
def test_one_program_for_all_sizes(
    name: str, budget: int, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small budget for intermediates leads to several chunks and a smaller last one."""
    monkeypatch.setattr(streaming, "BUDGET", budget)
    fn, arrays = CASES[name]
    floats = tuple(i for i, (_, dtype) in enumerate(arrays) if dtype == f32)

    def total(*args: Any) -> Any:
        outs = jax.tree.leaves(fn(*args))
        return sum((weighted(y.ravel()[:2]) for y in outs if y.dtype == f32), start=f32(0))

    def both_ways(*args: Any) -> Any:
        grads = () if name in CONSTANT else jax.grad(total, floats)(*args)
        return jax.tree.leaves((fn(*args), grads))

    scope = export.SymbolicScope()
    dims = [export.symbolic_shape(text, scope=scope) for text, _ in arrays]
    symbolic = [jax.ShapeDtypeStruct(d, x) for d, (_, x) in zip(dims, arrays, strict=True)]
    exported = export.export(jax.jit(both_ways))(*symbolic)
    for sizes in (
        {"b": 1, "t": 1, "s": 1, "p": 1, "r": 1},
        {"b": 2, "t": 3, "s": 7, "p": 5, "r": 3},
    ):
        args = []
        for text, dtype in arrays:
            shape = [sizes.get(d) or int(d) for d in text.split(", ")]
            x = rng.integers(0, 4, shape) if dtype == i32 else rng.normal(size=shape)
            args.append(jnp.asarray(x).astype(dtype))
        assert_matches(exported.call(*args), both_ways(*args), what=str(sizes))


@pytest.mark.parametrize(
    ("call", "message", "arrays"),
    [
        (
            lambda q, k: jax_dsa.htree_attention(q, k, k),
            "htree_attention: argument 'k' is 'T=t tokens', want numbers, no symbols",
            [("b, t, 4, 8", f32), ("b, t, 2, 8", f32)],
        ),
        (
            lambda k: jax_dsa.htree_build(k, k),
            "htree_build: argument 'k' is 'S=s tokens'",
            [("b, s, 2, 8", f32)],
        ),
        (
            jax_dsa.make_block_mask,
            "make_block_mask: argument 'shape' is b .*, want an int",
            [("b, 1, t, s", jnp.bool_)],
        ),
        (
            lambda q, c: jax_dsa.masked_attention_varlen(q, q, q, c, c),
            r"masked_attention_varlen: argument 'cu_seqlens_q' has shape \(r,\), want .*no symbol",
            [("t, 4, 8", f32), ("r", i32)],
        ),
        (
            lambda q, k, i: jax_dsa.sparse_mla(q, k, i),
            "sparse_mla: argument 'q' is 'N=n heads and G=1 groups', want numbers, no symbols",
            [("b, t, n, 8", f32), *ATTENTION[1:], SLOTS],
        ),
        (
            lambda q, k, i: jax_dsa.sparse_mla(q, k, i),
            "sparse_mla: argument 'scale' is None, want a float where D is symbolic",
            [("b, t, 4, d", f32), ("b, s, 1, d", f32), SLOTS],
        ),
        (
            lambda q, k, i: jax_dsa.sparse_mla(q, k, i, scale=0.1),
            "sparse_mla: argument 'value_dim' is None, want an int where D is symbolic",
            [("b, t, 4, d", f32), ("b, s, 1, d", f32), SLOTS],
        ),
        (
            lambda q, k, i: jax_dsa.sparse_mla(q, k, i, scale=0.1, value_dim=4),
            "sparse_mla: argument 'value_dim' is 4, want at most D=d, .*constraint.*'d >= 4'",
            [("b, t, 4, d", f32), ("b, s, 1, d", f32), SLOTS],
        ),
        (
            jax_dsa.quantize_fp8,
            r"quantize_fp8: argument 'x' has shape \(b, c\), want .*no symbols",
            [("b, c", f32)],
        ),
    ],
)
def test_an_error_names_the_axis_that_cannot_be_symbolic(
    call: Any, message: str, arrays: list
) -> None:
    scope = export.SymbolicScope()
    args = [jax.ShapeDtypeStruct(export.symbolic_shape(s, scope=scope), d) for s, d in arrays]
    with pytest.raises((TypeError, ValueError), match=message):
        export.export(jax.jit(call))(*args)


def test_a_constraint_on_a_symbolic_row_size() -> None:
    """D may be symbolic if the scale is given and a constraint covers the value size."""
    scope = export.SymbolicScope(["d >= 4"])
    arrays = [("b, t, 4, d", f32), ("b, s, 1, d", f32), SLOTS]
    args = [jax.ShapeDtypeStruct(export.symbolic_shape(s, scope=scope), d) for s, d in arrays]
    call = jax.jit(lambda *x: jax_dsa.sparse_mla(*x, scale=0.1, value_dim=4))
    assert export.export(call)(*args).out_avals[0].shape[-1] == 4


def test_kernels_take_no_symbols(monkeypatch: pytest.MonkeyPatch) -> None:
    from jax_dsa.core import ffi

    monkeypatch.setattr(ffi, "status", lambda: (True, ""))
    shapes = [("b, t, 64, 576", jnp.bfloat16), ("b, s, 1, 576", jnp.bfloat16), ("b, t, 9", i32)]
    scope = export.SymbolicScope()
    args = [jax.ShapeDtypeStruct(export.symbolic_shape(s, scope=scope), d) for s, d in shapes]
    exported = export.export(jax.jit(jax_dsa.sparse_mla))(*args)
    assert "jax_dsa.sparse_mla" not in exported.mlir_module()
    with pytest.raises(NotImplementedError, match="it takes no symbolic sizes"):
        export.export(jax.jit(lambda *x: jax_dsa.sparse_mla(*x, implementation="cuda")))(*args)
