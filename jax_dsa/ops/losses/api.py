"""The losses that train the indexer to select the keys that the model attends to."""

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
    kernel=Kernel(
        cuda.indexer_kl_loss_fwd, cuda.fwd_supports, limits="float32", portable=cuda.fwd_supports
    ),
)
SPARSE_BWD = Pass(
    "indexer_kl_loss_bwd",
    xla.indexer_kl_loss_bwd,
    shardable="b t",
    kernel=Kernel(
        cuda.indexer_kl_loss_bwd, cuda.bwd_supports, limits="float32", portable=cuda.bwd_supports
    ),
)
DENSE_FWD = Pass(
    "dense_indexer_kl_loss_fwd",
    xla.dense_indexer_kl_loss_fwd,
    shardable="b t",
    shard_queries_on_idle_axes=True,
    kernel=Kernel(
        cuda.dense_indexer_kl_loss_fwd,
        cuda.dense_fwd_supports,
        limits=f"block_size 1; bfloat16; D {either(cuda.DIMS)}; C {either(cuda.CHANNELS)}; "
        f"J to {cuda.MAX_INDEX_HEADS}",
        portable=cuda.dense_fwd_supports,
    ),
)


def _dense_bwd(
    call: Call, options: DenseOptions, grads: DenseGradients, dy: DenseResults
) -> DenseGradients:
    """Returns the gradients from the forward pass, times the gradient of the summed KL."""
    return jax.tree.map(lambda x: jnp.einsum("b...,b->b...", x, dy.kl), grads)


# The operators without the checks of their arguments.
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
    """Returns the mean of the KL over the rows that count, or 0 if no row counts.

    If exactly `rows` rows count, the derivative with respect to each KL is 1 / `rows` to the last
    bit. The kernel of the backward pass then has nothing to multiply.
    """
    counted = jnp.sum(counts)
    fewer = jnp.where(counted == rows, 1, rows / jnp.maximum(counted, 1).astype(kl.dtype))
    return jnp.sum(kl) * (1 / rows) * fewer


def selected_kl(call: Call, x: Operands) -> Float[Array, ""]:
    """Returns the loss over selected keys. The operands must be checked already."""
    batch, queries = x.logits.shape[:2]
    known = isinstance(batch, int) and isinstance(queries, int)  # false for symbolic sizes
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
    """Returns the indexer's loss on its selected keys: the mean of `KL(p || softmax(logits))`.

    p is the teacher, normalised over the row's valid slots. The softmax is restricted to these
    slots, too. This is the loss of the sparse stage of DeepSeek-V3.2 (DeepSeek-AI, 2025). The
    gradient, `(softmax(logits) - p) / rows`, is computed directly, together with the loss. The
    teacher gets no gradient. The batch axis may be absent from all arguments.

    Args:
        logits: The indexer's logits of the selected keys, as `indexer_topk` returns them; bfloat16,
            float16 or float32. Their scale is that of `index_weights`; see `indexer_logits`.
        teacher: The main attention's probabilities of these keys, summed over heads, as `attn_dist`
            returns them with `head_group=None`. They are >= 0 and need not be normalised.
        valid: Which slots are used; default `logits > -inf`. Values in other slots have no effect.
        implementation: None (the kernel where there is one, else XLA), "cuda" or "xla".

    Returns:
        A float32 scalar, the mean over the rows that have a valid slot and teacher mass, or 0 if no
        row has. It is inf if a valid slot has teacher mass and a logit of -inf.

    Raises:
        TypeError, ValueError: If an argument has the wrong type or shape.
        NotImplementedError: If `implementation="cuda"` and no kernel covers this call.

    Examples:
        >>> import jax.numpy as jnp, jax_dsa
        >>> teacher = jnp.array([[[1.0, 3.0]]])
        >>> bool(jax_dsa.indexer_kl_loss(jnp.log(teacher), teacher) < 1e-6)  # the same distribution
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
    index_k: Float[Array, "B S C"] | Float[Array, "B S/b C"],
    index_weights: Float[Array, "B T J"] | None,
    q: Float[Array, "B T N D"],
    kv: Float[Array, "B S G D"],
    *,
    block_size: int = 1,
    scale: float | None = None,
    is_causal: bool = True,
    query_start: int | Int[Array, "*B"] = 0,
    index_k_scale: Float[Array, "B S"] | Float[Array, "B S/b"] | None = None,
    starts: Int[Array, "B T"] | None = None,
    ends: Int[Array, "B T"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    relu: bool = True,
    implementation: Implementation | None = None,
) -> Float[Array, ""]:
    """Returns the indexer's warm-up loss: the mean over queries of `KL(p || softmax(I))`.

    The KL is over all keys that a query sees. I are the `indexer_logits`, and p are the
    probabilities of dense softmax attention of q on kv, averaged over the heads. This is the loss
    of the dense warm-up stage of DeepSeek-V3.2 (DeepSeek-AI, 2025). It is computed in chunks of
    queries, and no array of size [T, S] is kept.

    With `block_size` the indexer has one key per block of tokens, as `mean_pool` and `gated_pool`
    make them. The KL is then over the whole blocks that a query sees. The attention is over all
    tokens that it sees. The probability of a block is the sum over its tokens, and p is normalised
    over the whole blocks. Tokens after a query's last whole block do not count.

    index_q, index_k, index_weights and index_k_scale get gradients, which are computed directly
    from `softmax(I) - p`. q and kv get gradients that are exactly zero. The gradients are computed
    together with the loss, even if nothing asks for them, and are saved for the backward pass under
    the name "dsa_kl_grads" for remat policies. The batch axis may be absent from all arguments.

    Args:
        index_q: The indexer's queries, as in `indexer_logits`.
        index_k: The indexer's keys, as in `indexer_logits`; with `block_size` those of the blocks,
            [B, S // block_size, C]. Block i of a document that begins at token s has the number
            `s // block_size + i`.
        index_weights: The weights of the indexer's heads, as in `indexer_logits`. They include the
            scale of the logits, J^-1/2 C^-1/2. Without it, the loss is much too large. None means
            1.
        q: The main attention's queries; bfloat16, float16 or float32.
        kv: The main attention's keys, in the dtype of `q`; N is a multiple of G.
        block_size: Number b of tokens that share a key of the indexer.
        scale: Scale of the attention's scores; default D^-1/2.
        is_causal: Whether query t sees no key after position `query_start + t`.
        query_start: Position of the first query, as in `indexer_logits`.
        index_k_scale: Scales of the indexer's keys, as in `indexer_logits`.
        starts: First key that each query sees, as in `indexer_logits`; a token. With `block_size`
            it is the first token of the query's document, from which its blocks are counted.
        ends: Exclusive end of the keys that each query sees, as in `indexer_logits`; a token.
        segment_ids: Numbers of packed documents, as in `indexer_logits`.
        relu: Whether a ReLU is applied to the scores of the indexer's heads.
        implementation: None (the kernel where there is one, else XLA), "cuda" or "xla".

    Returns:
        A float32 scalar, the mean over the queries that see a key (a whole block, with
        `block_size`), or 0 if no query does.

    Raises:
        TypeError, ValueError: If an argument has the wrong type, shape or range.
        NotImplementedError: If `implementation="cuda"` and no kernel covers this call.

    Examples:
        >>> import jax, jax.numpy as jnp, jax_dsa
        >>> normal = lambda i, *shape: jax.random.normal(jax.random.key(i), shape)
        >>> weights = normal(2, 1, 8, 4) * (4 * 32) ** -0.5
        >>> index = normal(0, 1, 8, 4, 32), normal(1, 1, 8, 32), weights
        >>> q, kv = normal(3, 1, 8, 2, 96), normal(4, 1, 8, 1, 96)
        >>> bool(jax_dsa.dense_indexer_kl_loss(*index, q, kv) > 0)
        True

    Source: DeepSeek-V3.2 (2025). Without the ReLU, and called for one KV head at a time, this is
    the warm-up loss of the indexer of MiniMax-M3 (arXiv:2606.13392).
    """
    args = Args("dense_indexer_kl_loss", "index_q", index_q, "B T J C")
    call = args.call(implementation)
    size = args.integer("block_size", block_size, 1)
    keys = "S" if size == 1 else "W"
    inputs = indexer_inputs(args, index_q, index_k, index_weights, index_k_scale, keys)
    q = args.array("q", q, "B T N D", FLOATS)
    kv = args.array("kv", kv, "B S G D", (q.dtype,))
    check_heads(args, "q", "kv")
    if size > 1:
        blocks = f"W = S // block_size = {args.sizes['S']} // {size}"
        fits = args.sizes["W"] == args.sizes["S"] // size
        args.shape("index_k", inputs.k, fits, f"[B, W, C] with {blocks}")
    ranges = key_ranges(args, starts, ends, is_causal, query_start, segment_ids)
    options = DenseOptions(args.flag("relu", relu), scale_or_default(args, scale), size)
    attended = jax.lax.stop_gradient((q, kv))
    operands = DenseOperands(*inputs, *ranges, *attended)
    results = dense_indexer_kl_loss_op(call, options, operands)
    return mean_over_rows(results.kl, results.rows)
