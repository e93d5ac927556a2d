"""The public function `attn_dist`: attention over the selected keys, summed over heads."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from jax_dsa.core.arguments import (
    causal_ends,
    check_heads,
    scale_or_default,
    selection,
    shared_sinks,
)
from jax_dsa.core.checks import FLOATS, WIDE_FLOATS, Args
from jax_dsa.core.deferred import Deferred
from jax_dsa.core.ffi import Kernel, either
from jax_dsa.core.op import Pass, differentiable
from jax_dsa.core.rows import block_tokens
from jax_dsa.core.typing import Array, Float, Implementation, Int
from jax_dsa.ops.attn_dist import cuda, xla
from jax_dsa.ops.attn_dist.spec import Operands, Options

FWD = Pass(
    "attn_dist_fwd",
    xla.attn_dist_fwd,
    shardable="b t g h m",
    kernel=Kernel(
        cuda.attn_dist_fwd,
        cuda.supports,
        limits=f"bfloat16; D {either(cuda.DIMS)}",
        portable=cuda.portable_supports,
    ),
)
BWD = Pass("attn_dist_bwd", xla.attn_dist_bwd, shardable="b t g h m")

# The operator without the checks of its arguments.
attn_dist_op = differentiable("attn_dist", FWD, BWD, residuals=lambda x, y: (x,))


def attn_dist(
    q: Float[Array, "B T N D"],
    kv: Float[Array, "B S G D"],
    indices: Int[Array, "B T G K"] | Int[Array, "B T K"],
    lse: Float[Array, "B T N"],
    *,
    block_size: int = 1,
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
    """Returns the attention probabilities of `sparse_mla` by slot, summed over groups of heads.

        dist[b, h, t, i] = sum over the heads n of group h of
                           exp(s_i[n] - lse[n]) / (1 + exp(sink[n] - lse[n]))

    with `s_i[n] = scale * q[n] . kv[idx_i]`. The result is 0 for invalid slots (see `sparse_mla`)
    and for queries with lse = -inf. It is not normalised, so that sums of shards of heads can be
    added first. The loss of the indexer uses it as the target distribution.

    With `block_size` the slots are blocks of keys, as in `sparse_attention`. The probability of a
    slot is then the sum over those keys of its block that the query sees.

    Args:
        q: Absorbed queries [B, T, N, D]; bfloat16, float16 or float32. N is a multiple of G.
        kv: Latent keys [B, S, G, D] in the dtype of `q`. Query head n attends to KV head
            n // (N/G).
        indices: Positions along S [B, T, G, K] or [B, T, K], int32, in any order. Any value outside
            0..S-1 is an empty slot. With `block_size` they are numbers of blocks.
        lse: Log-sum-exp of the scores [B, T, N], float32, a natural logarithm without the sinks:
            what `sparse_mla` or `sparse_attention` returns for the same arguments and
            `return_lse=True`. The probabilities are as precise as this float32 number: if scores
            are above about 1e5, it has lost digits of the logarithm of the sum.
        block_size: Number of keys in a block. Block j consists of the keys
            `j * block_size <= s < (j + 1) * block_size` that exist. Causality masks keys within it.
        scale: Factor of the scores. Default: D^-1/2.
        head_group: Number of consecutive heads per sum, a divisor of N/G. Default: all heads, which
            requires G = 1, because the slots of several KV heads may hold different keys.
        is_causal: Whether query t sees only the keys
            `j <= (query_start + t + 1) // key_stride - 1`. Default: all keys are visible.
        query_start: Position of the first query in the sequence: an int, a scalar, or int32 [B].
        key_stride: Tokens per key, for compressed keys.
        topk_length: Number of slots (keys or blocks) that are used, from the first one, int32
            [B, T]. The others are never read. Default: K.
        sinks: Logits [N], float32, that take part in the softmax denominator but have no value.
            +-inf are legal.
        deterministic: Whether gradients are bit-identical on every run.
        implementation: "cuda" or "xla". Default: the CUDA kernel where it supports the call.

    Returns:
        The sums [B, T, K], or [B, N/head_group, T, K] if `head_group` is given; float32. They are
        differentiable with respect to `q`, `kv`, `lse` and `sinks`. If the arguments have no batch
        axis, the result has none.

    Raises:
        ValueError: If a shape or a value is out of range.
        TypeError: If a dtype or the type of an argument is wrong.
        NotImplementedError: If forward-mode or second derivatives are taken, or if
            `implementation="cuda"` and the kernel does not support the call.

    Examples:
        >>> import jax, jax.numpy as jnp, jax_dsa
        >>> q = jax.random.normal(jax.random.key(0), (1, 4, 8, 96))
        >>> kv = jax.random.normal(jax.random.key(1), (1, 32, 1, 96))
        >>> indices = jnp.array([[[3, 1, 7], [0, 9, 4], [5, 6, 2], [31, 30, 29]]])
        >>> _, lse = jax_dsa.sparse_mla(q, kv, indices, return_lse=True)
        >>> dist = jax_dsa.attn_dist(q, kv, indices, lse)
        >>> bool(jnp.allclose(dist.sum(-1), 8))  # each of 8 heads adds 1
        True

    Source: DeepSeek-V3.2 (2025), the alignment of the indexer with the main attention. The sum over
    a block is the teacher of a pooled indexer; MiniMax-M3 (2026) compares single keys instead.
    """
    args = Args("attn_dist", "q", q, "B T N D")
    call = args.call(implementation)
    q = args.array("q", q, "B T N D", FLOATS)
    kv = args.array("kv", kv, "B S G D", (q.dtype,))
    check_heads(args, "q", "kv")
    slots, used = selection(args, indices, topk_length)
    size = args.integer("block_size", block_size, 1)
    lse = args.array("lse", lse, "B T N", WIDE_FLOATS)
    heads, groups = args.sizes["N"], args.sizes["G"]
    if head_group is None:
        fits = groups == 1
        expected = f"{heads // groups}, because G={groups} KV heads have no common sum"
    else:
        head_group = args.integer("head_group", head_group, 1)
        fits = heads // groups % head_group == 0
        expected = f"a divisor of N/G={heads // groups}, or None"
    args.option("head_group", head_group, fits, expected)
    options = Options(
        scale=scale_or_default(args, scale),
        head_group=head_group,
        deterministic=args.flag("deterministic", deterministic),
    )
    ends = causal_ends(args, is_causal, query_start, key_stride)
    sinks = shared_sinks(args, sinks)
    blocks, keys = slots.shape[3], args.sizes["S"]
    if isinstance(keys, int):  # A larger block has no more keys.
        size = min(size, max(1, keys))
    operands: Any = Operands(q, kv, slots, lse, ends, used, sinks)
    if size > 1:
        tokens = Deferred(block_tokens, (slots,), (size,))
        length = None if used is None else Deferred(_keys_used, (used,), (blocks, size))
        operands = operands._replace(indices=tokens, topk_length=length)
    dist = args.restore(attn_dist_op(call, options, operands)).dist
    return dist if size == 1 else dist.reshape(*dist.shape[:-1], blocks, size).sum(-1)


def _keys_used(blocks_used: Int[Array, "B T"], blocks: int, size: int) -> Int[Array, "B T"]:
    return jnp.clip(blocks_used, 0, blocks) * size
