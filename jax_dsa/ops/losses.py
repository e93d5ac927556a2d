"""What trains the indexer: to attend as the model does."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jax_dsa.core.checks import BOOL, FLOATS, Args
from jax_dsa.core.op import Pass, differentiable
from jax_dsa.ops.indexer import IndexerOptions, in_dtypes, index_arrays
from jax_dsa.ops.topk import key_ranges
from jax_dsa.reference import losses as reference

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int

    from jax_dsa.core.checks import Implementation


@dataclasses.dataclass(frozen=True)
class DenseOptions:
    """Static options of `dense_indexer_kl_loss`."""

    indexer: IndexerOptions
    scale: float


# The mean over rows is taken outside the passes: there it is one over all devices, and its
# derivative brings each row's share.
SPARSE_FWD = Pass(
    "indexer_kl_loss_fwd",
    "b t k, b t k, b t k -> b t, b t",
    reference.indexer_kl_loss_fwd,
    shardable="b t",
)
SPARSE_BWD = Pass(
    "indexer_kl_loss_bwd",
    "b t k, b t k, b t k, b t -> b t k",
    reference.indexer_kl_loss_bwd,
    shardable="b t",
)
_INDEX = "b t j c, b s c, b t j, b s"
DENSE_FWD = Pass(
    "dense_indexer_kl_loss_fwd",
    f"{_INDEX}, b t, b t, b t n d, b s g d -> b, b, {_INDEX}",
    reference.dense_indexer_kl_loss_fwd,
    shardable="b t",
)


def _sparse_fwd(options: None, implementation: Any, *operands: Any) -> Any:
    return SPARSE_FWD(options, *operands, implementation=implementation), operands


def _sparse_bwd(options: None, implementation: Any, operands: Any, cotangents: Any) -> Any:
    grads = SPARSE_BWD(options, *operands, cotangents[0], implementation=implementation)
    return *grads, None, None


def _dense_fwd(options: DenseOptions, implementation: Any, *operands: Any) -> Any:
    kl, rows, *grads = DENSE_FWD(options, *operands, implementation=implementation)
    return (kl, rows), (operands[:4], checkpoint_name(grads, "dsa_kl_grads"))


def _dense_bwd(options: DenseOptions, implementation: Any, residuals: Any, cotangents: Any) -> Any:
    inputs, grads = residuals
    scaled = [None if x is None else jnp.einsum("b...,b->b...", x, cotangents[0]) for x in grads]
    return *in_dtypes(scaled, inputs), None, None, None, None


_indexer_kl_loss = differentiable("indexer_kl_loss", _sparse_fwd, _sparse_bwd)
_dense_indexer_kl_loss = differentiable("dense_indexer_kl_loss", _dense_fwd, _dense_bwd)


def _mean(kl: Float[Array, "..."], rows: Int[Array, "..."]) -> Float[Array, ""]:
    return jnp.sum(kl) / jnp.maximum(jnp.sum(rows), 1)


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
    `(softmax(logits) - p) / rows`, is formed directly. The teacher gets none. The batch axis may be
    absent from all arguments.

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
    """
    args = Args("indexer_kl_loss", "logits", logits, "B T K")
    logits = args.array("logits", logits, "B T K", FLOATS)
    teacher = args.array("teacher", teacher, "B T K", FLOATS)
    valid = logits > -jnp.inf if valid is None else args.array("valid", valid, "B T K", BOOL)
    implementation = args.implementation(implementation)
    teacher = jax.lax.stop_gradient(teacher)
    return _mean(*_indexer_kl_loss(None, implementation, logits, teacher, valid))


def dense_indexer_kl_loss(
    index_q: Float[Array, "B T J C"],
    index_k: Float[Array, "B S C"],
    weights: Float[Array, "B T J"],
    q: Float[Array, "B T N D"],
    kv: Float[Array, "B S G D"],
    *,
    scale: float | None = None,
    is_causal: bool = True,
    query_start: int | Int[Array, ""] | Int[Array, "B"] = 0,
    k_scale: Float[Array, "B S"] | None = None,
    starts: Int[Array, "B T"] | None = None,
    ends: Int[Array, "B T"] | None = None,
    relu: bool = True,
    implementation: Implementation | None = None,
) -> Float[Array, ""]:
    """The indexer's warm-up loss: the mean over queries of `KL(p || softmax(I))`.

    Over all keys that a query sees; I are the `indexer_logits`, and p is dense softmax attention of
    q on kv, averaged over the heads. The loss of the dense warm-up stage of DeepSeek-V3.2
    (DeepSeek-AI, 2025). Everything is computed in chunks of queries, and nothing of size [T, S] is
    kept. index_q, index_k, weights and k_scale get gradients, formed directly from
    `softmax(I) - p`; q and kv get exactly zero. The gradients are computed along with the loss,
    even if they are not asked for, and wait for the backward pass under the name "dsa_kl_grads" for
    remat policies. The batch axis may be absent from all arguments.

    Args:
        index_q, index_k, weights, k_scale, relu: the indexer's inputs, as in `indexer_logits`.
        q: the main attention's queries; bfloat16, float16 or float32.
        kv: its keys, of q's dtype; N is a multiple of G.
        scale: of the attention's scores; default D^-1/2.
        is_causal: query t sees no key after position `query_start + t`.
        query_start: position of the first query among the keys: an int, an int32 scalar or one for
            each batch entry.
        starts: int32, each query's first key; default 0. Clipped to 0..S.
        ends: int32, one past each query's last key; default S. Clipped to 0..S.
        implementation: None (the kernel where there is one, else XLA), "cuda" or "xla".

    Returns:
        A float32 scalar, the mean over the queries that see a key; 0 if there are none.

    Raises:
        TypeError, ValueError: an argument has the wrong type, shape or range.
        NotImplementedError: `implementation="cuda"` cannot run this call here.
    """
    args = Args("dense_indexer_kl_loss", "index_q", index_q, "B T J C")
    index_q, index_k, weights, k_scale = index_arrays(
        args, ("index_q", index_q), ("index_k", index_k), weights, k_scale
    )
    q = args.array("q", q, "B T N D", FLOATS)
    kv = args.array("kv", kv, "B S G D", (q.dtype,))
    heads, groups = args.sizes["N"], args.sizes["G"]
    args.option("kv", groups, groups > 0 and heads % groups == 0, f"G that divides N={heads}")
    starts, ends = key_ranges(args, starts, ends)
    positions = args.query_positions("query_start", query_start, *q.shape[:2])
    if args.flag("is_causal", is_causal):
        ends = jnp.minimum(ends, jnp.maximum(positions + 1, 0))
    scale = q.shape[3] ** -0.5 if scale is None else args.real("scale", scale)
    options = DenseOptions(IndexerOptions(relu=args.flag("relu", relu)), scale)
    attended = jax.lax.stop_gradient((q, kv))
    operands = (index_q, index_k, weights, k_scale, starts, ends, *attended)
    return _mean(*_dense_indexer_kl_loss(options, args.implementation(implementation), *operands))
