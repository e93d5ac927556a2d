"""`attn_dist`: how the attention of all heads is spread over each query's selected keys."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np

from jax_dsa.core.checks import FLOAT32, FLOATS, Args
from jax_dsa.core.ffi import Kernel
from jax_dsa.core.op import Pass, differentiable
from jax_dsa.ops.sparse_mla import (
    causal_ends,
    check_heads,
    default_scale,
    selection,
    shared_sinks,
)
from jax_dsa.reference import attn_dist as reference

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int

    from jax_dsa.core.checks import Implementation


@dataclasses.dataclass(frozen=True)
class Options:
    """Static options of the passes."""

    scale: float
    head_group: int | None
    deterministic: bool = False


def _dims(options: Options) -> tuple[str, str]:
    """The operands that both passes have, and the distribution."""
    if options.head_group is None:
        heads, dist = "(g m)", "b t k"
    else:
        heads, dist = "(g h m)", "b (g h) t k"
    operands = f"b t {heads} d, b s g d, b t g k, b t {heads}, b t, b t, b {heads}"
    return operands, dist


def _fwd_dims(options: Options) -> str:
    operands, dist = _dims(options)
    return f"{operands} -> {dist}"


def _bwd_dims(options: Options) -> str:
    operands, dist = _dims(options)
    q, kv, _, lse, _, _, sinks = operands.split(", ")
    return f"{operands}, {dist} -> {q}, {kv}, {lse}, {sinks}"


# What the kernel covers, as in cuda/attn_dist/attn_dist.h.
_KERNEL_DIMS = (576, 512)


def _kernel_supports(options: Options, q: Any, kv: Any, *_: Any) -> str | None:
    if q.dtype != jnp.bfloat16 or kv.dtype != jnp.bfloat16:
        return f"it takes bfloat16, got q of {q.dtype} and kv of {kv.dtype}"
    if q.shape[3] not in _KERNEL_DIMS:
        return f"it has D=576 and D=512, got D={q.shape[3]}"
    return None


_FWD = Pass(
    "attn_dist_fwd",
    _fwd_dims,
    reference.attn_dist_fwd,
    shardable="b t g h m",
    kernel=Kernel(
        target="jax_dsa.attn_dist_fwd.v1",
        limits="bfloat16; D 576 or 512",
        supported=_kernel_supports,
        attrs=lambda o, *_: {"scale": np.float32(o.scale)},
    ),
)
_BWD = Pass("attn_dist_bwd", _bwd_dims, reference.attn_dist_bwd, shardable="b t g h m")


def _fwd(options: Options, implementation: Any, *operands: Any) -> tuple[Any, Any]:
    return _FWD(options, *operands, implementation=implementation), operands


def _bwd(options: Options, implementation: Any, residuals: Any, cotangents: Any) -> tuple[Any, ...]:
    dq, dkv, dlse, dsinks = _BWD(options, *residuals, *cotangents, implementation=implementation)
    return dq, dkv, None, dlse, None, None, dsinks


_attn_dist = differentiable("attn_dist", _fwd, _bwd)


def attn_dist(
    q: Float[Array, "B T N D"],
    kv: Float[Array, "B S G D"],
    indices: Int[Array, "B T G K"],
    lse: Float[Array, "B T N"],
    *,
    scale: float | None = None,
    head_group: int | None = 64,
    is_causal: bool = False,
    query_start: int | Int[Array, "*B"] = 0,
    key_stride: int = 1,
    topk_length: Int[Array, "B T"] | None = None,
    sinks: Float[Array, "N"] | None = None,
    deterministic: bool = False,
    implementation: Implementation | None = None,
) -> Any:
    """Attention probabilities of `sparse_mla`, slot by slot, summed over groups of heads.

        dist[b, h, t, i] = sum over the heads n of group h of
                           exp(s_i[n] - lse[n]) / (1 + exp(sink[n] - lse[n]))

    with `s_i[n] = scale * q[n] . kv[idx_i]`; 0 for slots that do not count, and for queries with
    lse = -inf. It is not normalised, so that shards of heads can be added up first. It is the
    teacher of the indexer's loss.

    Args:
        q: absorbed queries, bfloat16, float16 or float32. N is a multiple of G.
        kv: latent keys, dtype of `q`.
        indices: int32 positions along S; anything outside 0..S-1 is an empty slot.
        lse: float32, natural logarithm, without the sinks: what `sparse_mla(..., return_lse=True)`
            returns for the same arguments.
        scale: of the scores, default D^-1/2.
        head_group: how many consecutive heads one sum takes, a divisor of N/G; or None, all of
            them, where G = 1 (the slots of several KV groups hold different keys, and have no
            common sum).
        is_causal: as for `sparse_mla`.
        query_start: as for `sparse_mla`.
        key_stride: as for `sparse_mla`.
        topk_length: as for `sparse_mla`.
        sinks: as for `sparse_mla`.
        deterministic: bit-identical gradients on every run.
        implementation: None chooses, "cuda" and "xla" insist.

    Returns:
        float32 [B, N/head_group, T, K], or [B, T, K] with head_group=None. It has gradients for
        `q`, `kv`, `lse` and `sinks`. Without a batch axis in the arguments there is none in the
        result.

    Raises:
        ValueError, TypeError: wrong shapes, dtypes or ranges.
        NotImplementedError: forward mode, gradients of gradients, or `implementation="cuda"` for
            what it does not cover.

    Source: DeepSeek-V3.2 (2025), the alignment of the indexer with the main attention.
    """
    args = Args("attn_dist", "q", q, "B T N D")
    implementation = args.implementation(implementation)
    q = args.array("q", q, "B T N D", FLOATS)
    kv = args.array("kv", kv, "B S G D", (q.dtype,))
    heads, groups = q.shape[2], kv.shape[2]
    check_heads(args, "kv", heads, groups)
    indices, topk_length = selection(args, indices, topk_length)
    lse = args.array("lse", lse, "B T N", FLOAT32)
    if head_group is None:
        args.option(
            "head_group",
            head_group,
            groups == 1,
            f"an int, since the G={groups} KV groups have slots of their own",
        )
    else:
        args.integer("head_group", head_group, 1)
        args.option(
            "head_group",
            head_group,
            heads // groups % head_group == 0,
            f"a divisor of N/G={heads // groups}, or None",
        )
    options = Options(
        scale=default_scale(args, scale, q.shape[3]),
        head_group=head_group,
        deterministic=args.flag("deterministic", deterministic),
    )
    ends = causal_ends(args, is_causal, query_start, key_stride, *q.shape[:2])
    sinks = shared_sinks(args, sinks)
    (dist,) = _attn_dist(options, implementation, q, kv, indices, lse, ends, topk_length, sinks)
    return args.restore(dist)
