"""Random calls of the indexer's losses and of `dsa_attention`."""

from __future__ import annotations

from typing import Any

import numpy as np
from fuzz.draw import Call, Draw, f32, f64, i32, peak, without_batch
from fuzz.operators.indexer import (
    KERNEL,
    draw_inputs,
    draw_ranges,
    gradients,
    logits_of,
    ranges,
    result_dtype,
)
from fuzz.operators.sparse_mla import wide
from support.oracles import attn_dist, losses, sparse_mla
from support.oracles import indexer as oracle
from support.oracles import topk as topk_oracle

from jax_dsa import dense_indexer_kl_loss, dsa_attention, indexer_kl_loss

INDEXER = "index_q", "index_k", "index_weights", "index_k_scale"
RANGES = "is_causal", "query_start", "starts", "ends", "segment_ids"


def scale_of(scale: Any, dim: int) -> float:
    return max(1, dim) ** -0.5 if scale is None else float(scale)


def draw_indexer_kl_loss(c: Draw, r: Draw) -> Call:
    B, T, K = c.dims({"K": (5, 130, 2048)}, B=3, T=4, K=6)
    dtype = f32 if c.kernel else c.dtype()
    logits, teacher = r.floats(dtype, B, T, K), r.rng.gamma(1, size=(B, T, K))
    logits[r.rng.random((B, T, K)) < r.one(0, 0.3, 1)] = -np.inf
    teacher[r.rng.random((B, T, K)) < r.one(0, 0.3)] = 0
    if r.hostile and r.chance():
        teacher[tuple(r.rng.integers(max(1, n)) for n in teacher.shape) if teacher.size else ()] = (
            np.nan
        )
    teacher = teacher.astype(c.one(dtype, wide(dtype)))
    kwargs = {
        "logits": logits,
        "teacher": teacher,
        "valid": r.bools(B, T, K) if c.chance() else None,
    }
    if c.gradient and kwargs["valid"] is not None:  # an infinite loss has no gradient
        kwargs["valid"] &= logits > -np.inf

    def want(logits: Any, teacher: Any, valid: Any) -> list[np.ndarray]:
        valid = np.asarray(logits, np.float64) > -np.inf if valid is None else valid
        return [np.asarray(losses.kl_rows(logits, teacher, valid)[0])]

    call = Call(
        indexer_kl_loss,
        kwargs,
        want,
        (wide(dtype),),
        diff=("logits",),
        constant=("teacher",),
        peak=10.0,
    )
    return without_batch(call) if B == 1 and c.chance() else call


def draw_dense_indexer_kl_loss(c: Draw, r: Draw) -> Call:
    on_kernel = {**KERNEL, "G": (1,), "M": (1, 64, 70), "D": (192, 512, 576)}
    B, T, S, J, C, G, M, D = c.dims(on_kernel, B=3, T=4, S=8, J=2, C=3, G=2, M=2, D=5)
    S = T if c.chance(0.3) else S  # as `segment_ids` need it
    dtype = c.dtype()
    block = 1 if c.kernel else c.one(1, 1, 2, 3, *([2**31 - 1] if c.edge else []))
    block = block if c.edge else min(block, S)
    index = draw_inputs(c, r, B, T, S // block, J, C)
    if f64 in (dtype, index["index_q"].dtype):
        dtype = f64
        index = {n: x if x is None else x.astype(f64) for n, x in index.items()}
    kwargs = {
        **index,
        "q": r.floats(dtype, B, T, G * M, D),
        "kv": r.floats(dtype, B, S, G, D),
        "block_size": c.integer(block),
        "scale": c.scale(),
        **draw_ranges(c, r, B, T, S),
        "relu": c.flag(0.8),
    }

    def want(q: Any, kv: Any, block_size: Any, scale: Any, **index: Any) -> list[np.ndarray]:
        which, size = {n: index.pop(n) for n in RANGES}, int(block_size)
        starts, ends = ranges((*q.shape[:2], kv.shape[1]), **which)
        teacher = losses.attention_mass(q, kv, scale_of(scale, q.shape[3]), starts, ends)
        if size > 1:
            teacher = losses.by_block(teacher, starts, ends, size)
            starts, ends = losses.block_ranges(starts, ends, kv.shape[1], size)
        logits = oracle.indexer_logits(
            index["index_q"],
            index["index_k"],
            index["index_weights"],
            index_k_scale=index["index_k_scale"],
            starts=starts,
            ends=ends,
            relu=bool(index["relu"]),
        )
        s = np.arange(logits.shape[2])
        valid = (s >= starts[..., None]) & (s < ends[..., None])
        return [np.asarray(losses.kl_rows(logits, teacher, valid)[0])]

    call = Call(
        dense_indexer_kl_loss,
        kwargs,
        want,
        (result_dtype(kwargs),),
        diff=gradients(kwargs),
        constant=("q", "kv"),
        poison=("index_k", "kv"),
        peak=30.0 + peak(kwargs["scale"], kwargs["q"], kwargs["kv"]),
    )
    return without_batch(call) if B == 1 and c.chance() else call


def draw_dsa_attention(c: Draw, r: Draw) -> Call:
    """Draws a call with the indexer's selection or given indices, with or without a loss."""
    on_kernel = {**KERNEL, "G": (1,), "M": (64,), "D": (576,)}
    B, T, S, J, C, G, M, D = c.dims(on_kernel, B=3, T=4, S=8, J=2, C=3, G=2, M=2, D=5)
    S = T if c.chance(0.3) else S  # as `segment_ids` need it
    dtype = c.dtype()
    index = draw_inputs(c, r, B, T, S, J, C)
    if f64 in (dtype, index["index_q"].dtype):
        dtype = f64
        index = {n: x if x is None else x.astype(f64) for n, x in index.items()}
    indices_given = c.chance(0.3)
    if indices_given and c.chance():
        index = dict.fromkeys(index)
    K = c.below(S + 2)
    kwargs = {
        "q": r.floats(dtype, B, T, G * M, D),
        "kv": r.floats(dtype, B, S, G, D),
        **index,
        "top_k": None if indices_given else c.integer(K),
        "indices": r.positions(S, B, T, K) if indices_given else None,
        "value_dim": 512 if c.kernel else c.one(None, c.integer(c.below(D))),
        "scale": c.scale(),
        **draw_ranges(c, r, B, T, S),
        "sinks": r.limits(wide(dtype), G * M) if c.chance() else None,
        "deterministic": c.flag(),
        "return_teacher": c.flag(0.3),
    }
    indexed = index["index_q"] is not None

    def logits(kwargs: dict[str, Any]) -> np.ndarray:
        names = (*INDEXER, *RANGES)
        return logits_of(**{n: kwargs[n] for n in names}, relu=True)

    def hold(**x: Any) -> dict[str, Any]:
        if x["indices"] is None:
            selected = topk_oracle.topk(logits(x), int(x["top_k"]))
        else:
            shape = *x["q"].shape[:2], x["kv"].shape[1]
            which = {n: x[n] for n in RANGES}
            starts, ends = ranges(shape, **which)
            seen = (x["indices"] >= starts[..., None]) & (x["indices"] < ends[..., None])
            selected = np.where(seen, x["indices"], -1)
        slots = np.repeat(selected[:, :, None], x["kv"].shape[2], 2)
        scale = scale_of(x["scale"], x["q"].shape[3])
        _, lse = sparse_mla.sparse_mla(x["q"], x["kv"], slots, value_dim=0, scale=scale)
        group = max(1, x["q"].shape[2] // max(1, x["kv"].shape[2]))
        teacher = attn_dist.attn_dist(
            x["q"], x["kv"], slots, lse, scale=scale, head_group=group
        ).sum(1)
        return {"slots": slots, "selected": selected, "teacher": teacher}

    def want(slots: Any, selected: Any, teacher: Any, **x: Any) -> list[np.ndarray]:
        scale, D = scale_of(x["scale"], x["q"].shape[3]), x["q"].shape[3]
        E = min(512, D) if x["value_dim"] is None else int(x["value_dim"])
        out, lse = sparse_mla.sparse_mla(
            x["q"], x["kv"], slots, value_dim=E, scale=scale, sinks=x["sinks"]
        )
        chosen = topk_oracle.values(logits(x), selected) if indexed else None
        if x["return_teacher"]:
            taught = [teacher] if chosen is None else [chosen, teacher]
            return [out, selected, np.zeros(()), lse, *taught]
        kl = 0.0 if chosen is None else losses.kl_rows(chosen, teacher, selected >= 0)[0]
        return [out, selected, np.asarray(kl), lse]

    sums = wide(dtype)
    taught = (sums,) * (1 + indexed) if kwargs["return_teacher"] else ()
    call = Call(
        dsa_attention,
        kwargs,
        want,
        (dtype, i32, sums, sums, *taught),
        diff=("q", "kv", *(n for n in (*INDEXER, "sinks") if kwargs[n] is not None)),
        poison=("kv",),
        hold=hold,
        peak=30.0 + peak(kwargs["scale"], kwargs["q"], kwargs["kv"]),
    )
    return without_batch(call) if B == 1 and c.chance() else call


GENERATORS = {
    "indexer_kl_loss": draw_indexer_kl_loss,
    "dense_indexer_kl_loss": draw_dense_indexer_kl_loss,
    "dsa_attention": draw_dsa_attention,
}
