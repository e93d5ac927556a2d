"""`attn_dist`: how the attention of all heads is spread over each query's selected keys."""

from __future__ import annotations

from jax_dsa.core.arguments import (
    causal_ends,
    check_heads,
    scale_or_default,
    selection,
    shared_sinks,
)
from jax_dsa.core.checks import FLOATS, WIDE_FLOATS, Args
from jax_dsa.core.ffi import Kernel, either
from jax_dsa.core.op import Pass, differentiable
from jax_dsa.core.typing import Array, Float, Implementation, Int
from jax_dsa.ops.attn_dist import cuda, xla
from jax_dsa.ops.attn_dist.spec import Operands, Options

FWD = Pass(
    "attn_dist_fwd",
    xla.attn_dist_fwd,
    shardable="b t g h m",
    kernel=Kernel(cuda.attn_dist_fwd, cuda.supports, limits=f"bfloat16; D {either(cuda.DIMS)}"),
)
BWD = Pass("attn_dist_bwd", xla.attn_dist_bwd, shardable="b t g h m")

# The operator without its checks.
attn_dist_op = differentiable("attn_dist", FWD, BWD, residuals=lambda x, y: (x,))


def attn_dist(
    q: Float[Array, "B T N D"],
    kv: Float[Array, "B S G D"],
    indices: Int[Array, "B T G K"] | Int[Array, "B T K"],
    lse: Float[Array, "B T N"],
    *,
    scale: float | None = None,
    head_group: int | None = None,
    is_causal: bool = False,
    query_start: int | Int[Array, "*B"] = 0,
    key_stride: int = 1,
    topk_length: Int[Array, "B T"] | None = None,
    sinks: Float[Array, "N"] | None = None,
    deterministic: bool = False,
    implementation: Implementation | None = None,
) -> Float[Array, "B T K"] | Float[Array, "B N/H T K"]:
    """Attention probabilities of `sparse_mla`, slot by slot, summed over groups of heads.

        dist[b, h, t, i] = sum over the heads n of group h of
                           exp(s_i[n] - lse[n]) / (1 + exp(sink[n] - lse[n]))

    with `s_i[n] = scale * q[n] . kv[idx_i]`; 0 for slots that do not count, and for queries with
    lse = -inf. It is not normalised, so that shards of heads can be added up first. It is the
    teacher of the indexer's loss.

    Args:
        q: absorbed queries, bfloat16, float16 or float32. N is a multiple of G.
        kv: latent keys, dtype of `q`.
        indices: as for `sparse_mla`.
        lse: float32, natural logarithm, without the sinks: what `sparse_mla(..., return_lse=True)`
            returns for the same arguments.
        scale: of the scores, default D^-1/2.
        head_group: how many consecutive heads one sum takes, a divisor of N/G; or None, all of
            them, where G = 1 (the slots of several KV groups may hold different keys, which have no
            common sum).
        is_causal: as for `sparse_mla`.
        query_start: as for `sparse_mla`.
        key_stride: as for `sparse_mla`.
        topk_length: as for `sparse_mla`.
        sinks: as for `sparse_mla`.
        deterministic: bit-identical gradients on every run.
        implementation: None chooses, "cuda" and "xla" insist.

    Returns:
        float32 [B, T, K], or with a head_group [B, N/head_group, T, K]. It has gradients for
        `q`, `kv`, `lse` and `sinks`. Without a batch axis in the arguments there is none in the
        result.

    Raises:
        ValueError, TypeError: wrong shapes, dtypes or ranges.
        NotImplementedError: forward mode, gradients of gradients, or `implementation="cuda"` for
            what it does not cover.

    Examples:
        >>> import jax, jax.numpy as jnp, jax_dsa
        >>> q = jax.random.normal(jax.random.key(0), (1, 4, 8, 96))
        >>> kv = jax.random.normal(jax.random.key(1), (1, 32, 1, 96))
        >>> indices = jnp.array([[[3, 1, 7], [0, 9, 4], [5, 6, 2], [31, 30, 29]]])
        >>> _, lse = jax_dsa.sparse_mla(q, kv, indices, return_lse=True)
        >>> dist = jax_dsa.attn_dist(q, kv, indices, lse)
        >>> bool(jnp.allclose(dist.sum(-1), 8))  # each of 8 heads adds 1
        True

    Source: DeepSeek-V3.2 (2025), the alignment of the indexer with the main attention.
    """
    args = Args("attn_dist", "q", q, "B T N D")
    call = args.call(implementation)
    q = args.array("q", q, "B T N D", FLOATS)
    kv = args.array("kv", kv, "B S G D", (q.dtype,))
    check_heads(args, "q", "kv")
    indices, topk_length = selection(args, indices, topk_length)
    lse = args.array("lse", lse, "B T N", WIDE_FLOATS)
    heads, groups = args.sizes["N"], args.sizes["G"]
    if head_group is None:
        fits, want = (
            groups == 1,
            f"{heads // groups}, since G={groups} KV groups have no common sum",
        )
    else:
        head_group = args.integer("head_group", head_group, 1)
        fits = heads // groups % head_group == 0
        want = f"a divisor of N/G={heads // groups}, or None"
    args.option("head_group", head_group, fits, want)
    options = Options(
        scale=scale_or_default(args, scale),
        head_group=head_group,
        deterministic=args.flag("deterministic", deterministic),
    )
    ends = causal_ends(args, is_causal, query_start, key_stride)
    sinks = shared_sinks(args, sinks)
    operands = Operands(q, kv, indices, lse, ends, topk_length, sinks)
    return args.restore(attn_dist_op(call, options, operands)).dist
