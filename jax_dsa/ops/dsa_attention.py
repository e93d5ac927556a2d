"""`dsa_attention`: DeepSeek Sparse Attention as one differentiable function."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jax_dsa.core.checks import FLOAT32, FLOATS, INT32, Args
from jax_dsa.ops.attn_dist import attn_dist
from jax_dsa.ops.indexer import indexer_topk
from jax_dsa.ops.losses import indexer_kl_loss
from jax_dsa.ops.sparse_mla import sparse_mla

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int

    from jax_dsa.core.checks import Implementation


class DSAAux(NamedTuple):
    """What `dsa_attention` returns beside its output."""

    indices: Int[Array, "B T K"]
    """The selected keys of each query in ascending order, then -1."""
    kl: Float[Array, ""]
    """The indexer's loss: mean over queries of KL(attention || indexer) on the selected keys."""
    lse: Float[Array, "B T N"]
    """Natural-log sum of the exponentiated scores over the selected keys, without the sink."""


def dsa_attention(
    q: Float[Array, "B T N D"],
    kv: Float[Array, "B S G D"],
    index_q: Float[Array, "B T J C"],
    index_k: Float[Array, "B S C"],
    index_weights: Float[Array, "B T J"],
    *,
    top_k: int,
    value_dim: int = 512,
    scale: float | None = None,
    is_causal: bool = True,
    query_start: int | Int[Array, "*B"] = 0,
    starts: Int[Array, "B T"] | None = None,
    ends: Int[Array, "B T"] | None = None,
    index_k_scale: Float[Array, "B S"] | None = None,
    sinks: Float[Array, "N"] | None = None,
    deterministic: bool = False,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "B T N E"], DSAAux]:
    """Attention over the `top_k` keys that a lightning indexer selects for each query.

    `indexer_topk` selects, `sparse_mla` attends, `attn_dist` turns the attention's probabilities
    into a teacher and `indexer_kl_loss` compares the indexer with it. The two losses that a model
    makes of the results never meet:

    - `out` and `aux.lse` have gradients for `q`, `kv` and `sinks`, and exactly zero gradient for
      the indexer's inputs (a selection has no derivative);
    - `aux.kl` has gradients for `index_q`, `index_k` and `index_weights`, and exactly zero gradient
      for `q`, `kv` and `sinks` (the teacher is a constant).

    What lies before the arguments is the caller's: compute the indexer's inputs from
    `jax.lax.stop_gradient(x)`, as `jax_dsa.nn.DSAttention` does, or the KL reaches the layers
    below. Under `jax.jit` an unused `aux.kl` costs nothing.

    This is the sparse path whatever the length. A causal sequence shorter than some 7 K tokens
    takes fewer operations in dense multi-head form: `docs/ops/dsa_attention.md` has the arithmetic.

    Args:
        q: absorbed queries, bfloat16, float16 or float32.
        kv: latent keys, dtype of `q`; values are `kv[..., :value_dim]`. All G heads share one
            selection.
        index_q: indexer queries, bfloat16 or float32; float8_e4m3fn for inference.
        index_k: indexer keys, dtype of `index_q`.
        index_weights: indexer head weights, float32, with every constant factor (J^-1/2 C^-1/2, the
            scale of a quantised `index_q`) already multiplied in.
        top_k: K, the keys selected per query, at least 1; a query that sees fewer attends to all of
            them.
        value_dim: E, in 1..D.
        scale: of the attention scores, default D^-1/2.
        is_causal: query t sees only keys up to its own position `query_start + t`.
        query_start: position of the first query among the keys: an int, an int32 scalar, or int32
            [B].
        starts: first key that a query sees, int32, default 0.
        ends: one past the last key that a query sees, int32, default S; a causal query sees the
            lesser of both ends.
        index_k_scale: float32 scale of each quantised indexer key.
        sinks: float32 attention sinks; they enter `out`, not `aux.lse`, and not the teacher.
        deterministic: bit-identical gradients on every run; the indexer's are then XLA's.
        implementation: None chooses per operator; "cuda" and "xla" insist.

    Returns:
        `out` in the dtype of `q`, and `DSAAux`. Without the batch axis in the arguments there is
        none in the results.

    Raises:
        ValueError, TypeError: wrong shapes, dtypes or ranges.
        NotImplementedError: `implementation="cuda"` for what the kernels do not cover.

    Source: DeepSeek-V3.2 (2025), section 2, "DeepSeek Sparse Attention".
    """
    args = Args("dsa_attention", "q", q, "B T N D")
    q = args.array("q", q, "B T N D", FLOATS)
    kv = args.array("kv", kv, "B S G D", (q.dtype,))
    index_q = args.array("index_q", index_q, "B T J C", (*FLOATS, jnp.float8_e4m3fn))
    index_k = args.array("index_k", index_k, "B S C", (index_q.dtype,))
    index_weights = args.array("index_weights", index_weights, "B T J", FLOAT32)
    top_k = args.integer("top_k", top_k, 1)
    value_dim = args.integer("value_dim", value_dim, 1, q.shape[3])
    scale = q.shape[3] ** -0.5 if scale is None else args.real("scale", scale)
    batch, queries = q.shape[:2]
    heads, groups = q.shape[2], kv.shape[2]
    args.option("kv", groups, groups > 0 and heads % groups == 0, f"G that divides N={heads}")
    if index_k_scale is not None:
        index_k_scale = args.array("index_k_scale", index_k_scale, "B S", FLOAT32)
    if sinks is not None:
        sinks = args.array("sinks", sinks, "N", FLOAT32)
    if starts is not None:
        starts = args.array("starts", starts, "B T", INT32)
    if ends is not None:
        ends = args.array("ends", ends, "B T", INT32)
    positions = args.query_positions("query_start", query_start, batch, queries)
    if args.flag("is_causal", is_causal):
        ends = positions + 1 if ends is None else jnp.minimum(ends, positions + 1)
    deterministic = args.flag("deterministic", deterministic)
    implementation = args.implementation(implementation)

    indices, logits = indexer_topk(
        index_q,
        index_k,
        index_weights,
        top_k,
        k_scale=index_k_scale,
        starts=starts,
        ends=ends,
        deterministic=deterministic,
        implementation=implementation,
    )
    # The selection is already inside [starts, ends), so nothing below needs a mask.
    shared = jnp.broadcast_to(indices[:, :, None, :], (batch, queries, groups, top_k))
    out, lse = sparse_mla(
        q,
        kv,
        shared,
        value_dim=value_dim,
        scale=scale,
        sinks=sinks,
        deterministic=deterministic,
        return_lse=True,
        implementation=implementation,
    )
    teacher = attn_dist(
        *jax.lax.stop_gradient((q, kv, shared, lse)),
        scale=scale,
        head_group=heads // groups,
        implementation=implementation,
    )
    # The loss's residuals: a remat policy that keeps them spares the indexer and the teacher a
    # second run.
    logits = checkpoint_name(logits, "dsa_topk_logits")
    teacher = checkpoint_name(teacher.sum(1), "dsa_teacher")
    kl = indexer_kl_loss(logits, teacher, valid=indices >= 0, implementation=implementation)
    return args.restore(out), DSAAux(args.restore(indices), kl, args.restore(lse))
