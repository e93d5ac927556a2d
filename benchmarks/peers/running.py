"""Other libraries beside ours, on the same inputs and in the same process: `--peers`.

A library that can be imported is called through its public Python interface. What it returns is
compared with ours, and then it is timed. JAX libraries have the clock of all benchmarks. PyTorch
ones get the same memory (DLPack), and CUDA events around replays of a CUDA graph time them. Where a
call cannot be captured, what it takes to dispatch counts if that takes longer than the device does.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import statistics
import time
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

import jax_dsa
from jax_dsa.bench.masked_attention import EMPTY

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from jax_dsa.bench.case import Case

TOLERANCE = 0.02  # of `difference`: bfloat16 results, and selections among scores that are equal


@dataclasses.dataclass(frozen=True)
class Peer:
    """A library.

    Attributes:
        name: as its project writes it.
        module: what has to be importable.
        calls: by `kind` of case, a function of the case and its arguments.
        torch: whether they are tensors, one for each array of the case. A backward pass then gets
            what sparse attention returned and its cotangent, too: `(case, *tensors, out, lse,
            dout)` -> the gradients.
        prepare: by `kind`, what the call gets in place of these tensors: `(case, *tensors)` -> a
            tuple. It is not timed.
    """

    name: str
    module: str
    calls: Mapping[str, Callable[..., Any]]
    torch: bool = False
    prepare: Mapping[str, Callable[..., tuple]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Call:
    """A library's function of a case's arguments; with `torch` of what `tensors` makes of them."""

    function: Callable[..., Any]
    torch: bool
    prepare: Callable[..., tuple] | None = None

    def __call__(self, *args: Any) -> Any:
        return self.function(*args)


class DisagreementError(Exception):
    """A library's results are not ours."""


def kind(case: Case) -> str:
    """What a call is chosen by: all of a case but its sizes."""
    return " ".join(filter(None, (case.operator, case.step, case.dtype, case.note)))


def available() -> tuple[list[Peer], list[str]]:
    """The peers that can be imported, and a line for each one that cannot."""
    found, absent = [], []
    for peer in PEERS:
        try:
            importlib.import_module(peer.module)
        except Exception as error:  # a library of CUDA may fail in any way where its own are absent
            absent.append(f"{peer.name} is left out: {error}")
        else:
            found.append(peer)
    return found, absent


def of(case: Case, found: Sequence[Peer]) -> dict[str, Call]:
    """What the peers have for the case, by their names."""
    return {
        peer.name: Call(
            functools.partial(peer.calls[kind(case)], case),
            peer.torch,
            peer.prepare.get(kind(case)),
        )
        for peer in found
        if kind(case) in peer.calls
    }


def tensors(case: Case, call: Call, key: jax.Array) -> tuple:
    """The arguments of a `Call` with `torch`."""
    args = case.make(key)
    if case.diff:
        options = {"value_dim": min(512, case.dims["D"]), "return_lse": True}
        out, lse = jax.jit(functools.partial(jax_dsa.sparse_mla, **options))(*args)
        args = (*args, out, lse, jax.random.normal(key, out.shape, out.dtype))
    operands = tuple(map(_tensor, jax.block_until_ready(jax.tree.leaves(args))))
    if call.prepare is None:
        return operands
    import torch

    prepared = call.prepare(case, *operands)
    # Once the operands are gone, JAX gives their memory to others: what is made of them is to be
    # finished before.
    torch.cuda.synchronize()
    return prepared


def _tensor(x: jax.Array) -> Any:
    import torch

    if x.dtype == jnp.float8_e4m3fn:  # DLPack has known it for a short time only
        codes = jax.lax.bitcast_convert_type(x, jnp.uint8)
        return torch.from_dlpack(codes.block_until_ready()).view(torch.float8_e4m3fn)
    return torch.from_dlpack(x)


def torch_seconds(
    fn: Callable[..., Any], sets: Sequence[tuple], budget: float = 0.3, rest: float = 0.0
) -> float:
    """Seconds of one call of `fn`: `timing.device_seconds` of a function of tensors."""
    import torch

    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def calls() -> None:
        for args in sets:
            fn(*args)

    calls()  # compiles
    run = _captured(calls)

    def measure(count: int) -> float:
        time.sleep(rest)
        start.record()
        for _ in range(count):
            run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3

    measure(1)  # loads the graph
    once = measure(1)
    count = max(3, min(1000, round(budget / once)))
    return statistics.median(measure(count) for _ in range(5)) / (count * len(sets))


def _captured(calls: Callable[[], None]) -> Callable[[], None]:
    """`calls` as one CUDA graph, if they can be captured."""
    import torch

    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            calls()
    except RuntimeError:
        return calls
    return graph.replay


def difference(case: Case, ours: Any, theirs: Any) -> float:
    """Between results: the largest gap over the largest value. Of selections: the share of rows
    that differ.
    """
    compared = COMPARED.get(kind(case), lambda x: x)
    pairs = zip(jax.tree.leaves(compared(ours)), jax.tree.leaves(theirs), strict=True)
    return max(float(_difference(x, _array(y))) for x, y in pairs)


def _array(x: Any) -> jax.Array:
    return x if isinstance(x, jax.Array) else jnp.from_dlpack(x.contiguous())


@jax.jit
def _difference(ours: jax.Array, theirs: jax.Array) -> jax.Array:
    theirs = theirs.reshape(ours.shape)
    if jnp.issubdtype(ours.dtype, jnp.integer):
        return (jnp.sort(ours) != jnp.sort(theirs)).any(-1).mean()
    x, y = ours.astype(jnp.float32), theirs.astype(jnp.float32)
    gap = jnp.where(x == y, 0.0, jnp.abs(x - y)).max()  # -inf equals itself
    return gap / jnp.abs(jnp.where(jnp.isfinite(x), x, 0.0)).max()


def _normalised(dist: jax.Array) -> jax.Array:
    """`attn_dist` by groups of heads as the teacher over all."""
    dist = dist.sum(1)
    return dist / dist.sum(-1, keepdims=True)


# Where a peer's results are not ours: what ours become before they are compared.
COMPARED: dict[str, Callable[..., Any]] = {"attn_dist fwd bf16": _normalised}


def _is_causal(case: Case) -> bool:
    return case.note == "causal"


def _flash_mla(case: Case, q: Any, kv: Any, indices: Any) -> Any:
    from flash_mla import flash_mla_sparse_fwd as call

    return call(q[0], kv[0], indices[0], q.shape[3] ** -0.5, **_for_hopper(call))[0]


def _for_hopper(call: Callable[..., Any]) -> dict[str, Any]:
    """SGLang's FlashMLA has Hopper's kernels behind an option, the original has no such option."""
    return {"use_legacy": True} if "use_legacy" in inspect.signature(call).parameters else {}


@functools.cache
def _flash_mla_schedule(label: str) -> Any:
    """How a case's requests are split. A model computes it once a step, for all of its layers."""
    from flash_mla import get_mla_metadata

    return get_mla_metadata()[0]


def _flash_mla_sparse_decode(case: Case, q: Any, records: Any, indices: Any) -> Any:
    from flash_mla import flash_mla_with_kvcache as call

    options = {"is_fp8_kvcache": True, "indices": indices, **_for_hopper(call)}
    return call(q, records, None, None, 512, _flash_mla_schedule(case.label), **options)[0]


def _flash_mla_sparse_operands(
    case: Case, q: Any, records: Any, lengths: Any, indices: Any
) -> tuple[Any, Any, Any]:
    """Pages of 64 records, and positions among those of all requests."""
    import torch

    batch, capacity = records.shape[:2]
    first = capacity * torch.arange(batch, dtype=torch.int32, device=q.device)
    indices = torch.where(indices < 0, -1, indices + first[:, None, None, None])
    return q, records.reshape(-1, 64, 1, records.shape[3]), indices[:, :, 0].contiguous()


def _flash_mla_decode(case: Case, q: Any, pages: Any, table: Any, lengths: Any) -> Any:
    from flash_mla import flash_mla_with_kvcache as call

    options = {"is_fp8_kvcache": False, **_for_hopper(call)}
    return call(q, pages, table, lengths, 512, _flash_mla_schedule(case.label), **options)[0]


def _flash_mla_operands(case: Case, q: Any, kv: Any) -> tuple[Any, Any, Any, Any]:
    """The cache as pages of 64 keys, one request's after the other's."""
    import torch

    batch, keys = kv.shape[:2]
    count = {"dtype": torch.int32, "device": q.device}
    table = torch.arange(batch * keys // 64, **count).reshape(batch, -1)
    return q, kv.reshape(-1, 64, 1, kv.shape[3]), table, torch.full((batch,), keys, **count)


def _deep_gemm_logits(case: Case, q: Any, k: Any, weights: Any, ends: Any, k_scale: Any) -> Any:
    import deep_gemm
    import torch

    starts = torch.zeros_like(ends[0])
    return deep_gemm.fp8_mqa_logits(
        q[0], (k[0], k_scale[0]), weights[0], starts, ends[0], clean_logits=True
    )


def _deep_gemm_matmul(case: Case, a: Any, a_scale: Any, b: Any, b_scale: Any) -> Any:
    import deep_gemm
    import torch

    out = torch.empty(a.shape[0], b.shape[0], dtype=torch.bfloat16, device=a.device)
    deep_gemm.fp8_gemm_nt((a, a_scale), (b, b_scale), out)
    return out


def _scales_by_columns(case: Case, a: Any, a_scale: Any, b: Any, b_scale: Any) -> tuple:
    """The scales of a column of blocks side by side, as these libraries want them."""
    return a, a_scale.t().contiguous().t(), b, b_scale


def _cudnn_logits(case: Case, q: Any, k: Any, weights: Any, ends: Any, k_scale: Any = None) -> Any:
    """The weights hold the queries' scales."""
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


def _cudnn_top_k(case: Case, x: Any) -> Any:
    import torch
    from cudnn import DSA

    lengths = torch.full((x.shape[0],), x.shape[1], dtype=torch.int32, device=x.device)
    return DSA.indexer_top_k_wrapper(x, lengths, case.dims["K"], return_val=False)["indices"]


def _cudnn_teacher(case: Case, q: Any, kv: Any, indices: Any, lse: Any) -> Any:
    from cudnn import DSA

    scale = q.shape[3] ** -0.5
    return DSA.sparse_attn_score_recompute_wrapper(q, kv[:, :, 0], lse, indices[:, :, 0], scale)[
        "target"
    ]


def _cudnn_sparse_bwd(
    case: Case, q: Any, kv: Any, indices: Any, out: Any, lse: Any, dout: Any
) -> Any:
    import torch
    from cudnn import DSA

    sinks = torch.full((q.shape[2],), -torch.inf, device=q.device)
    grads = DSA.sparse_attention_backward_wrapper(
        q[0], kv[0, :, 0], out[0], dout[0], lse[0], sinks, indices[0, :, 0], q.shape[3] ** -0.5
    )
    return grads["dq"], grads["dkv"]


def _flashinfer_top_k(case: Case, x: Any) -> Any:
    import flashinfer

    return flashinfer.top_k(x, case.dims["K"])[1].int()


def _flashinfer_attention(case: Case, q: Any, k: Any, v: Any) -> Any:
    import flashinfer

    return flashinfer.single_prefill_with_kv_cache(q[0], k[0], v[0], causal=_is_causal(case))


def _torch_top_k(case: Case, x: Any) -> Any:
    import torch

    return torch.topk(x, case.dims["K"], sorted=False)[1].int()


def _torch_matmul(case: Case, a: Any, a_scale: Any, b: Any, b_scale: Any) -> Any:
    from torch.nn.functional import ScalingType, scaled_mm

    rows, tiles = ScalingType.BlockWise1x128, ScalingType.BlockWise128x128
    return scaled_mm(a, b.t(), a_scale, rows, b_scale.t(), tiles)


def _flex_attention(case: Case, q: Any, k: Any, v: Any, block_mask: Any) -> Any:
    return _compiled_flex_attention()(q, k, v, block_mask=block_mask).transpose(1, 2)


@functools.cache
def _compiled_flex_attention() -> Callable[..., Any]:
    import torch
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)


def _flex_operands(case: Case, q: Any, k: Any, v: Any, *mask: Any) -> tuple:
    """`mask` ends with the whole one, which is made of tiles of 128x128."""
    from torch.nn.attention.flex_attention import create_block_mask

    kept = mask[-1][0, 0, ::128, ::128].contiguous()

    def keeps(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return kept[query // 128, key // 128]

    t, s = q.shape[1], k.shape[1]
    block_mask = create_block_mask(keeps, None, None, t, s, device=q.device)
    return *(x.transpose(1, 2) for x in (q, k, v)), block_mask


def _torch_attention(case: Case, q: Any, k: Any, v: Any) -> Any:
    from torch.nn.functional import scaled_dot_product_attention

    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = scaled_dot_product_attention(
        q, k, v, is_causal=_is_causal(case), enable_gqa=k.shape[1] < q.shape[1]
    )
    return out.transpose(1, 2)


def _jla_logits(case: Case, q: Any, k: Any, weights: Any, ends: Any) -> Any:
    from jla.ops.mosaic_gpu.dsa import index_scores

    return index_scores(q, k, weights, scale=1.0)


def _jla_top_k(case: Case, x: Any) -> Any:
    from jla.ops.mosaic_gpu.dsa_topk import radix_top_k

    return radix_top_k(x[None], case.dims["K"])[0][0]


def _jla_gather(case: Case, q: Any, kv: Any, indices: Any) -> Any:
    from jla.ops.dsa_gather import gather_attention

    return gather_attention(q, kv, kv[..., : min(512, case.dims["D"])], indices[:, :, 0])


def _jla_attention(case: Case, q: Any, k: Any, v: Any) -> Any:
    from jla.ops.mosaic_gpu.attention import flash_attention

    return flash_attention(q, k, v)


def _fa4_attention(case: Case, q: Any, k: Any, v: Any) -> Any:
    from fa4_jax import flash_attn

    return flash_attn(q, k, v, causal=_is_causal(case))


def _fa3_attention(case: Case, q: Any, k: Any, v: Any) -> Any:
    from flash_attn3_jax import flash_mha

    if (q.shape[3], v.shape[3]) != (128, 128):
        raise NotImplementedError("its wheels have heads of 128 alone")
    window = (case.dims["W"] - 1, 0) if case.note == "window" else (-1, -1)
    return flash_mha(q, k, v, is_causal=case.note != "dense", window_size=window)


def _te_attention(case: Case, q: Any, k: Any, v: Any) -> Any:
    from transformer_engine.jax.flax import DotProductAttention

    attention = DotProductAttention(
        head_dim=q.shape[3],
        num_attention_heads=q.shape[2],
        num_gqa_groups=k.shape[2],
        attn_mask_type="causal" if _is_causal(case) else "no_mask",
        qkv_layout="bshd_bshd_bshd",
        transpose_batch_sequence=False,
        dtype=q.dtype,
    )
    out = attention.apply({}, q, k, v, deterministic=True)
    return out.reshape(*q.shape[:3], v.shape[3])


def _attention(call: Callable[..., Any], *steps: str, dense: bool = True) -> dict[str, Any]:
    notes = ("dense", "causal") if dense else ("causal",)
    return {f"masked_attention {step} bf16 {note}": call for step in steps for note in notes}


# Masks of tiles, for PyTorch's FlexAttention.
_TILES = [f"masked_attention fwd bf16 empty{share}" for share in EMPTY if share]

# TileLang is none: its package has no operators, its DeepSeek kernels are examples of a repository.
PEERS = (
    Peer(
        "FlashMLA",
        "flash_mla",
        {
            "sparse_mla fwd bf16": _flash_mla,
            "sparse_mla fwd fp8 decode": _flash_mla_sparse_decode,
            "mqa_decode fwd bf16": _flash_mla_decode,
        },
        torch=True,
        prepare={
            "sparse_mla fwd fp8 decode": _flash_mla_sparse_operands,
            "mqa_decode fwd bf16": _flash_mla_operands,
        },
    ),
    Peer(
        "DeepGEMM",
        "deep_gemm",
        {"indexer fwd fp8": _deep_gemm_logits, "fp8 fwd fp8": _deep_gemm_matmul},
        torch=True,
        prepare={"fp8 fwd fp8": _scales_by_columns},
    ),
    Peer(
        "cuDNN frontend",
        "cudnn",
        {
            "indexer fwd fp8": _cudnn_logits,
            "indexer fwd bf16": _cudnn_logits,
            "topk fwd f32": _cudnn_top_k,
            "attn_dist fwd bf16": _cudnn_teacher,
            "sparse_mla bwd bf16": _cudnn_sparse_bwd,
        },
        torch=True,
    ),
    Peer(
        "FlashInfer",
        "flashinfer",
        {"topk fwd f32": _flashinfer_top_k, **_attention(_flashinfer_attention, "fwd")},
        torch=True,
    ),
    Peer(
        "PyTorch",
        "torch",
        {
            "topk fwd f32": _torch_top_k,
            "fp8 fwd fp8": _torch_matmul,
            **_attention(_torch_attention, "fwd"),
            **dict.fromkeys(_TILES, _flex_attention),
        },
        torch=True,
        prepare={"fp8 fwd fp8": _scales_by_columns, **dict.fromkeys(_TILES, _flex_operands)},
    ),
    Peer(
        "jax-linear-attention",
        "jla",
        {
            "indexer fwd bf16": _jla_logits,
            "topk fwd f32": _jla_top_k,
            "sparse_mla fwd bf16": _jla_gather,
            "sparse_mla bwd bf16": _jla_gather,
            **_attention(_jla_attention, "fwd", "bwd", dense=False),
        },
    ),
    Peer(
        "flash-attn3-jax",
        "flash_attn3_jax",
        {
            **_attention(_fa3_attention, "fwd", "bwd"),
            "masked_attention fwd bf16 window": _fa3_attention,
            "masked_attention bwd bf16 window": _fa3_attention,
        },
    ),
    Peer("fa4-jax", "fa4_jax", _attention(_fa4_attention, "fwd", "bwd")),
    Peer("TransformerEngine", "transformer_engine.jax", _attention(_te_attention, "fwd", "bwd")),
)
