"""`dsa_attention`: DeepSeek Sparse Attention as one differentiable function."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jax_dsa.core.arguments import (
    check_heads,
    for_all_groups,
    key_ranges,
    scale_or_default,
    shared_sinks,
    value_dim_or_default,
)
from jax_dsa.core.call import Call
from jax_dsa.core.checks import FLOATS, INT32, Args
from jax_dsa.core.deferred import materialize
from jax_dsa.core.typing import Array, Float, Implementation, Int
from jax_dsa.ops.attn_dist import spec as attn_dist
from jax_dsa.ops.attn_dist.api import attn_dist_op
from jax_dsa.ops.dsa_attention.spec import DSAAux, Operands, Options
from jax_dsa.ops.indexer import spec as indexer
from jax_dsa.ops.indexer.api import (
    indexer_inputs,
    indexer_selected_op,
    indexer_topk_op,
    selected,
)
from jax_dsa.ops.losses import spec as losses
from jax_dsa.ops.losses.api import selected_kl
from jax_dsa.ops.sparse_mla import spec as sparse_mla
from jax_dsa.ops.sparse_mla.api import sparse_mla_op

__all__ = ["DSAAux", "dsa_attention"]


def _dsa_attention(call: Call, options: Options, x: Operands) -> tuple[Array, DSAAux]:
    """Runs the operator without its checks."""
    x = materialize(x)
    indices, logits = _select(call, options, x)
    # The selection lies inside [starts, ends), so nothing below needs a mask.
    groups = x.kv.shape[2]
    slots = for_all_groups(indices, groups)
    attended = sparse_mla.Operands(q=x.q, kv=x.kv, indices=slots, sinks=x.sinks)
    attend = sparse_mla.Options(
        scale=options.scale, value_dim=options.value_dim, deterministic=options.deterministic
    )
    out, max_logit, log_sum = sparse_mla_op(call, attend, attended)
    lse = max_logit + log_sum
    aux = DSAAux(indices=indices, kl=jnp.zeros((), lse.dtype), lse=lse)
    if logits is None and not options.return_teacher:
        return out, aux

    q, kv, log_sum = jax.lax.stop_gradient((x.q, x.kv, log_sum))
    taught = attn_dist.Operands(
        q=q,
        kv=kv,
        indices=slots,
        lse=max_logit,
        log_sum=log_sum,
        ends=None,
        topk_length=None,
        sinks=None,
    )
    teach = attn_dist.Options(scale=options.scale, head_group=x.q.shape[2] // groups)
    teacher = attn_dist_op(call, teach, taught).dist.sum(1)
    # The loss's gradient is computed from these two. A remat policy that keeps them spares a second
    # run of the indexer and of the teacher.
    logits = None if logits is None else checkpoint_name(logits, "dsa_topk_logits")
    teacher = checkpoint_name(teacher, "dsa_teacher")
    # The barriers make XLA compute the loss, or the teacher, here. When its scheduler hides
    # communication between devices, it would otherwise postpone the losses of all layers to the end
    # of a step, and memory would hold the queries of all layers until then.
    if options.return_teacher:
        out, teacher = jax.lax.optimization_barrier((out, teacher))
        return out, aux._replace(logits=logits, teacher=teacher)
    assert logits is not None
    compared = losses.Operands(logits=logits, teacher=teacher, valid=indices >= 0)
    out, kl = jax.lax.optimization_barrier((out, selected_kl(call.auxiliary, compared)))
    return out, aux._replace(kl=kl)


def _select(
    call: Call, options: Options, x: Operands
) -> tuple[Int[Array, "B T K"], Float[Array, "B T K"] | None]:
    """Returns the selected keys and their logits; no logits if there is no indexer."""
    select = indexer.Options(relu=True, top_k=options.top_k, deterministic=options.deterministic)
    if x.indices is None:
        assert x.indexer is not None
        wanted = indexer.Operands(**x.indexer._asdict(), starts=x.starts, ends=x.ends)
        chosen = indexer_topk_op(call, select, wanted)
        return chosen.indices, chosen.logits
    seen = (x.indices >= x.starts[..., None]) & (x.indices < x.ends[..., None])
    indices = jnp.where(seen, x.indices, -1)
    if x.indexer is None:
        return indices, None
    operands = selected(x.indexer, indices)
    return indices, indexer_selected_op(call.auxiliary, select, operands).logits


# Compiled programs and profiles call the operator by this name.
_dsa_attention.__name__ = "dsa_attention"
dsa_attention_op = jax.jit(_dsa_attention, static_argnums=(0, 1))


def dsa_attention(
    q: Float[Array, "B T N D"],
    kv: Float[Array, "B S G D"],
    index_q: Float[Array, "B T J C"] | None = None,
    index_k: Float[Array, "B S C"] | None = None,
    index_weights: Float[Array, "B T J"] | None = None,
    *,
    top_k: int | None = None,
    indices: Int[Array, "B T K"] | None = None,
    value_dim: int | None = None,
    scale: float | None = None,
    is_causal: bool = True,
    query_start: int | Int[Array, "*B"] = 0,
    starts: Int[Array, "B T"] | None = None,
    ends: Int[Array, "B T"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    index_k_scale: Float[Array, "B S"] | None = None,
    sinks: Float[Array, "N"] | None = None,
    deterministic: bool = False,
    return_teacher: bool = False,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "B T N E"], DSAAux]:
    """Returns attention over the `top_k` keys that a lightning indexer selects for each query.

    `indexer_topk` selects the keys and `sparse_mla` attends to them. `attn_dist` turns the
    attention probabilities into a teacher, and `indexer_kl_loss` compares the indexer with it. With
    `indices`, the selection comes from elsewhere (another layer, another indexer, a replay) and
    nothing is selected here. If the indexer's inputs are absent as well, there is no loss. A model
    makes two losses of the results, and their gradients do not overlap:

    - `out` and `aux.lse` have gradients for `q`, `kv` and `sinks`, and exactly zero gradient for
      the indexer's inputs (a selection has no derivative);
    - `aux.kl` has gradients for `index_q`, `index_k` and `index_weights`, and exactly zero gradient
      for `q`, `kv` and `sinks` (the teacher is a constant).

    If several layers attend to one selection, `return_teacher` returns what their common loss
    needs. Add up the teachers of all layers and call `indexer_kl_loss(logits, teacher, indices >=
    0)` with the logits of the layer that selected. The indexer then learns the mean of their
    attention.

    The caller decides what lies before the arguments. Compute the indexer's inputs from
    `jax.lax.stop_gradient(x)`, as `jax_dsa.nn.DSAttention` does; otherwise the KL reaches the
    layers below. Under `jax.jit` an unused `aux.kl` costs nothing.

    The sparse path runs for every length. A causal sequence shorter than about 7 times `top_k`
    tokens (14 thousand for 2048) needs fewer operations in dense multi-head form.

    Args:
        q: Absorbed queries; bfloat16, float16 or float32.
        kv: Latent keys of q's dtype. The values are `kv[..., :value_dim]`. All G heads share one
            selection.
        index_q, index_k, index_weights, index_k_scale: The indexer's inputs, as in
            `indexer_logits`. Required unless `indices` is given. `index_weights` include the scale
            of the logits, J^-1/2 C^-1/2. Without it, `aux.kl` is much too large.
        top_k: K, the number of keys selected per query, at least 1. A query that sees fewer keys
            attends to all of them. Required unless `indices` is given.
        indices: A selection from elsewhere, in any order. An entry outside 0..S-1, or of a key that
            the query does not see, is an empty slot.
        value_dim: E, in 1..D. Default: 512, or D if that is smaller.
        scale: Scale of the attention scores. Default: D^-1/2.
        is_causal: Whether query t sees only keys up to its own position `query_start + t`.
        query_start, starts, ends, segment_ids: As in `indexer_logits`.
        sinks: Attention sinks, float32. They affect `out`, but neither `aux.lse` nor the teacher.
        deterministic: Whether gradients are bit-identical on every run. Those of the indexer then
            come from XLA.
        return_teacher: Whether to return the indexer's logits and the teacher instead of the loss.
        implementation: None chooses for each operator; "cuda" and "xla" are enforced.

    Returns:
        `out` in the dtype of `q`, and `DSAAux`. If the arguments have no batch axis, the results
        have none either.

    Raises:
        ValueError, TypeError: An argument has the wrong shape, dtype or range.
        NotImplementedError: `implementation="cuda"` for a call that the kernels do not cover.

    Examples:
        >>> import jax, jax.numpy as jnp, jax_dsa
        >>> normal = lambda i, *shape: jax.random.normal(jax.random.key(i), shape)
        >>> q, kv = normal(0, 1, 16, 8, 96), normal(1, 1, 16, 1, 96)
        >>> weights = normal(4, 1, 16, 4) * (4 * 32) ** -0.5
        >>> index = normal(2, 1, 16, 4, 32), normal(3, 1, 16, 32), weights
        >>> out, aux = jax_dsa.dsa_attention(q, kv, *index, top_k=8)
        >>> again, _ = jax_dsa.dsa_attention(q, kv, indices=aux.indices)  # Reuse the selection.
        >>> out.shape, aux.indices.shape, bool(jnp.allclose(again, out, atol=1e-5))
        ((1, 16, 8, 96), (1, 16, 8), True)

    Source: DeepSeek-V3.2 (2025), section 2, "DeepSeek Sparse Attention".
    """
    args = Args("dsa_attention", "q", q, "B T N D")
    call = args.call(implementation)
    q = args.array("q", q, "B T N D", FLOATS)
    kv = args.array("kv", kv, "B S G D", (q.dtype,))
    check_heads(args, "q", "kv")
    given = {"index_q": index_q, "index_k": index_k, "index_weights": index_weights}
    inputs = None
    if indices is None or any(x is not None for x in (*given.values(), index_k_scale)):
        for name, x in given.items():
            args.option(name, x, x is not None, "an array, or 'indices' in place of the indexer")
        inputs = indexer_inputs(args, index_q, index_k, index_weights, index_k_scale)
    if indices is None:
        args.option("top_k", top_k, top_k is not None, "an int, or 'indices'")
        top_k = args.integer("top_k", top_k, 1)
    else:
        args.option("top_k", top_k, top_k is None, "None beside 'indices', whose last axis it is")
        indices = args.array("indices", indices, "B T K", INT32)
        top_k = args.sizes["K"]
    starts, ends = key_ranges(args, starts, ends, is_causal, query_start, segment_ids)
    options = Options(
        top_k=top_k,
        value_dim=value_dim_or_default(args, value_dim),
        scale=scale_or_default(args, scale),
        deterministic=args.flag("deterministic", deterministic),
        return_teacher=args.flag("return_teacher", return_teacher),
    )
    sinks = shared_sinks(args, sinks)
    operands = Operands(
        q=q, kv=kv, indexer=inputs, starts=starts, ends=ends, indices=indices, sinks=sinks
    )
    out, aux = dsa_attention_op(call, options, operands)
    return args.restore(out), args.restore(aux._replace(kl=None))._replace(kl=aux.kl)
