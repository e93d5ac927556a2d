"""What trains the indexer: to attend as the model does."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_dsa.core.arguments import check_heads, key_ranges, scale_or_default
from jax_dsa.core.call import Call
from jax_dsa.core.checks import BOOL, FLOATS, Args
from jax_dsa.core.ffi import Kernel, either
from jax_dsa.core.op import Pass, differentiable
from jax_dsa.core.typing import Array, Bool, Float, Implementation, Int
from jax_dsa.ops.indexer.api import indexer_inputs
from jax_dsa.ops.losses import cuda, xla
from jax_dsa.ops.losses.spec import (
    DenseGradients,
    DenseOperands,
    DenseOptions,
    DenseResults,
    Operands,
    Options,
    Saved,
)

SPARSE_FWD = Pass(
    "indexer_kl_loss_fwd",
    xla.indexer_kl_loss_fwd,
    shardable="b t",
    kernel=Kernel(cuda.indexer_kl_loss_fwd, cuda.fwd_supports, limits="float32"),
)
SPARSE_BWD = Pass(
    "indexer_kl_loss_bwd",
    xla.indexer_kl_loss_bwd,
    shardable="b t",
    kernel=Kernel(cuda.indexer_kl_loss_bwd, cuda.bwd_supports, limits="float32"),
)
DENSE_FWD = Pass(
    "dense_indexer_kl_loss_fwd",
    xla.dense_indexer_kl_loss_fwd,
    shardable="b t",
    shard_queries_on_idle_axes=True,
    kernel=Kernel(
        cuda.dense_indexer_kl_loss_fwd,
        cuda.dense_fwd_supports,
        limits=f"bfloat16; D {either(cuda.DIMS)}; C {either(cuda.CHANNELS)}; "
        f"J to {cuda.MAX_INDEX_HEADS}",
    ),
)


def _dense_bwd(
    call: Call, options: DenseOptions, grads: DenseGradients, dy: DenseResults
) -> DenseGradients:
    """The gradients that came with the loss, times the loss's own."""
    return jax.tree.map(lambda x: jnp.einsum("b...,b->b...", x, dy.kl), grads)


# The operators without their checks.
indexer_kl_loss_op = differentiable(
    "indexer_kl_loss", SPARSE_FWD, SPARSE_BWD, residuals=lambda x, y: (Saved(y.grad),)
)
dense_indexer_kl_loss_op = differentiable(
    "dense_indexer_kl_loss",
    DENSE_FWD,
    _dense_bwd,
    residuals=lambda x, y: (DenseGradients(*y[2:]),),
)


def mean_over_rows(
    kl: Float[Array, "..."], counts: Int[Array, "..."] | Bool[Array, "..."], rows: int = 1
) -> Float[Array, ""]:
    """The mean of the rows' KL over those that count; 0 if there are none.

    If so many `rows` count, its derivative is 1 / `rows` to the last bit.
    """
    counted = jnp.sum(counts)
    fewer = jnp.where(counted == rows, 1, rows / jnp.maximum(counted, 1).astype(kl.dtype))
    return jnp.sum(kl) * (1 / rows) * fewer


def selected_kl(call: Call, x: Operands) -> Float[Array, ""]:
    """The loss over selected keys, without its checks."""
    batch, queries = x.logits.shape[:2]
    known = isinstance(batch, int) and isinstance(queries, int)  # or they are symbolic
    options = Options(rows=max(batch * queries, 1) if known else 1)
    results = indexer_kl_loss_op(call, options, x)
    return mean_over_rows(results.kl, results.counts, options.rows)


def indexer_kl_loss(
    logits: Float[Array, "B T K"],
    teacher: Float[Array, "B T K"],
    valid: Bool[Array, "B T K"] | None = None,
    *,
    implementation: Implementation | None = None,
) -> Float[Array, ""]:
    """The indexer's loss on its selected keys: the mean over rows of `KL(p || softmax(logits))`.

    p is the teacher, normalised over the row's valid slots, to which the softmax is restricted too.
    The loss of the sparse stage of DeepSeek-V3.2 (DeepSeek-AI, 2025). Its gradient,
    `(softmax(logits) - p) / rows`, is formed directly, along with the loss. The teacher gets none.
    The batch axis may be absent from all arguments.

    Args:
        logits: the indexer's logits of the selected keys, as from `indexer_topk`.
        teacher: the main attention's probabilities of these keys, summed over heads, not
            normalised, >= 0, as from `attn_dist` with `head_group=None`.
        valid: which slots take part; default `logits > -inf`. Values in the others are never used.
        implementation: None (the kernel where there is one, else XLA), "cuda" or "xla".

    Returns:
        A float32 scalar, the mean over the rows that have a valid slot and teacher mass; 0 if there
        are none. It is inf if a valid slot has teacher mass and a logit of -inf.

    Raises:
        TypeError, ValueError: an argument has the wrong type or shape.
        NotImplementedError: `implementation="cuda"` cannot run this call here.

    Examples:
        >>> import jax.numpy as jnp, jax_dsa
        >>> teacher = jnp.array([[[1.0, 3.0]]])
        >>> bool(jax_dsa.indexer_kl_loss(jnp.log(teacher), teacher) < 1e-6)  # it attends as taught
        True
    """
    args = Args("indexer_kl_loss", "logits", logits, "B T K")
    call = args.call(implementation)
    logits = args.array("logits", logits, "B T K", FLOATS)
    teacher = args.array("teacher", teacher, "B T K", FLOATS)
    valid = None if valid is None else args.array("valid", valid, "B T K", BOOL)
    teacher = jax.lax.stop_gradient(teacher)
    return selected_kl(call, Operands(logits, teacher, valid))


def dense_indexer_kl_loss(
    index_q: Float[Array, "B T J C"],
    index_k: Float[Array, "B S C"],
    index_weights: Float[Array, "B T J"],
    q: Float[Array, "B T N D"],
    kv: Float[Array, "B S G D"],
    *,
    scale: float | None = None,
    is_causal: bool = True,
    query_start: int | Int[Array, "*B"] = 0,
    index_k_scale: Float[Array, "B S"] | None = None,
    starts: Int[Array, "B T"] | None = None,
    ends: Int[Array, "B T"] | None = None,
    relu: bool = True,
    implementation: Implementation | None = None,
) -> Float[Array, ""]:
    """The indexer's warm-up loss: the mean over queries of `KL(p || softmax(I))`.

    Over all keys that a query sees; I are the `indexer_logits`, and p is dense softmax attention of
    q on kv, averaged over the heads. The loss of the dense warm-up stage of DeepSeek-V3.2
    (DeepSeek-AI, 2025). Everything is computed in chunks of queries, and nothing of size [T, S] is
    kept. index_q, index_k, index_weights and index_k_scale get gradients, formed directly from
    `softmax(I) - p`; q and kv get exactly zero. The gradients are computed along with the loss,
    even if they are not asked for, and wait for the backward pass under the name "dsa_kl_grads" for
    remat policies. The batch axis may be absent from all arguments.

    Args:
        index_q, index_k, index_weights, index_k_scale, relu: the indexer's inputs, as in
            `indexer_logits`.
        q: the main attention's queries; bfloat16, float16 or float32.
        kv: its keys, of q's dtype; N is a multiple of G.
        scale: of the attention's scores; default D^-1/2.
        is_causal: query t sees no key after position `query_start + t`.
        query_start, starts, ends: as in `indexer_logits`.
        implementation: None (the kernel where there is one, else XLA), "cuda" or "xla".

    Returns:
        A float32 scalar, the mean over the queries that see a key; 0 if there are none.

    Raises:
        TypeError, ValueError: an argument has the wrong type, shape or range.
        NotImplementedError: `implementation="cuda"` cannot run this call here.

    Examples:
        >>> import jax, jax.numpy as jnp, jax_dsa
        >>> normal = lambda i, *shape: jax.random.normal(jax.random.key(i), shape)
        >>> index = normal(0, 1, 8, 4, 32), normal(1, 1, 8, 32), normal(2, 1, 8, 4)
        >>> q, kv = normal(3, 1, 8, 2, 96), normal(4, 1, 8, 1, 96)
        >>> bool(jax_dsa.dense_indexer_kl_loss(*index, q, kv) > 0)
        True
    """
    args = Args("dense_indexer_kl_loss", "index_q", index_q, "B T J C")
    call = args.call(implementation)
    inputs = indexer_inputs(args, index_q, index_k, index_weights, index_k_scale)
    q = args.array("q", q, "B T N D", FLOATS)
    kv = args.array("kv", kv, "B S G D", (q.dtype,))
    check_heads(args, "q", "kv")
    ranges = key_ranges(args, starts, ends, is_causal, query_start)
    options = DenseOptions(relu=args.flag("relu", relu), scale=scale_or_default(args, scale))
    attended = jax.lax.stop_gradient((q, kv))
    operands = DenseOperands(*inputs, *ranges, *attended)
    results = dense_indexer_kl_loss_op(call, options, operands)
    return mean_over_rows(results.kl, results.rows)
