"""`dsa_attention`: DeepSeek Sparse Attention as one differentiable function."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jax_dsa.core.arguments import (
    check_heads,
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
from jax_dsa.ops.indexer.api import indexer_inputs, indexer_selected_op, indexer_topk_op
from jax_dsa.ops.losses import spec as losses
from jax_dsa.ops.losses.api import selected_kl
from jax_dsa.ops.sparse_mla import spec as sparse_mla
from jax_dsa.ops.sparse_mla.api import sparse_mla_op

__all__ = ["DSAAux", "dsa_attention"]


def _dsa_attention(call: Call, options: Options, x: Operands) -> tuple[Array, DSAAux]:
    """The operator without its checks."""
    x = materialize(x)
    select = indexer.Options(True, options.top_k, options.deterministic)
    logits = None
    if x.indices is None:
        assert x.indexer is not None
        wanted = indexer.Operands(*x.indexer, x.starts, x.ends)
        indices, logits = indexer_topk_op(call, select, wanted)
    else:
        seen = (x.indices >= x.starts[..., None]) & (x.indices < x.ends[..., None])
        indices = jnp.where(seen, x.indices, -1)
        if x.indexer is not None:
            selected = indexer.Selected(*x.indexer, indices)
            logits = indexer_selected_op(call.auxiliary, select, selected).logits

    # The selection is already inside [starts, ends), so nothing below needs a mask.
    groups = x.kv.shape[2]
    shared = jnp.broadcast_to(indices[:, :, None], (*indices.shape[:2], groups, indices.shape[2]))
    attend = sparse_mla.Options(options.scale, options.value_dim, options.deterministic)
    attended = sparse_mla.Operands(x.q, x.kv, shared, sinks=x.sinks)
    out, lse = sparse_mla_op(call, attend, attended)
    if logits is None:
        return out, DSAAux(indices, jnp.zeros((), lse.dtype), lse)

    teach = attn_dist.Options(options.scale, head_group=x.q.shape[2] // groups)
    q, kv, constant = jax.lax.stop_gradient((x.q, x.kv, lse))
    taught = attn_dist.Operands(q, kv, shared, constant, None, None, None)
    teacher = attn_dist_op(call, teach, taught).dist.sum(1)
    # What the loss's gradient is made of: a remat policy that keeps them spares the indexer and the
    # teacher a second run.
    logits = checkpoint_name(logits, "dsa_topk_logits")
    teacher = checkpoint_name(teacher, "dsa_teacher")
    compared = losses.Operands(logits, teacher, indices >= 0)
    # The loss in its turn: XLA's scheduler, where it hides what devices exchange, would put all
    # layers' losses off to the end of a step, and memory would hold all their queries until then.
    out, kl = jax.lax.optimization_barrier((out, selected_kl(call.auxiliary, compared)))
    return out, DSAAux(indices, kl, lse)


_dsa_attention.__name__ = "dsa_attention"  # what compiled programs and profiles call it
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
    index_k_scale: Float[Array, "B S"] | None = None,
    sinks: Float[Array, "N"] | None = None,
    deterministic: bool = False,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "B T N E"], DSAAux]:
    """Attention over the `top_k` keys that a lightning indexer selects for each query.

    `indexer_topk` selects, `sparse_mla` attends, `attn_dist` turns the attention's probabilities
    into a teacher and `indexer_kl_loss` compares the indexer with it. With `indices` the selection
    comes from elsewhere (another layer, another indexer, a replay): nothing selects here, and
    without the indexer's inputs there is no loss either. The two losses that a model makes of the
    results never meet:

    - `out` and `aux.lse` have gradients for `q`, `kv` and `sinks`, and exactly zero gradient for
      the indexer's inputs (a selection has no derivative);
    - `aux.kl` has gradients for `index_q`, `index_k` and `index_weights`, and exactly zero gradient
      for `q`, `kv` and `sinks` (the teacher is a constant).

    What lies before the arguments is the caller's: compute the indexer's inputs from
    `jax.lax.stop_gradient(x)`, as `jax_dsa.nn.DSAttention` does, or the KL reaches the layers
    below. Under `jax.jit` an unused `aux.kl` costs nothing.

    This is the sparse path whatever the length. A causal sequence shorter than about 7 times
    `top_k` tokens (14 thousand for 2048) takes fewer operations in dense multi-head form.

    Args:
        q: absorbed queries, bfloat16, float16 or float32.
        kv: latent keys, dtype of `q`; values are `kv[..., :value_dim]`. All G heads share one
            selection.
        index_q, index_k, index_weights, index_k_scale: the indexer's inputs, as in
            `indexer_logits`. Required unless there are `indices`.
        top_k: K, the keys selected per query, at least 1; a query that sees fewer attends to all of
            them. Required unless there are `indices`.
        indices: a selection from elsewhere, in any order; anything outside 0..S-1, and keys that
            the query does not see, are empty slots.
        value_dim: E, in 1..D. Default 512, or D where that is less.
        scale: of the attention scores, default D^-1/2.
        is_causal: query t sees only keys up to its own position `query_start + t`.
        query_start, starts, ends: as in `indexer_logits`.
        sinks: float32 attention sinks; they enter `out`, not `aux.lse`, and not the teacher.
        deterministic: bit-identical gradients on every run; the indexer's are then XLA's.
        implementation: None chooses per operator; "cuda" and "xla" insist.

    Returns:
        `out` in the dtype of `q`, and `DSAAux`. Without the batch axis in the arguments there is
        none in the results.

    Raises:
        ValueError, TypeError: wrong shapes, dtypes or ranges.
        NotImplementedError: `implementation="cuda"` for what the kernels do not cover.

    Examples:
        >>> import jax, jax.numpy as jnp, jax_dsa
        >>> normal = lambda i, *shape: jax.random.normal(jax.random.key(i), shape)
        >>> q, kv = normal(0, 1, 16, 8, 96), normal(1, 1, 16, 1, 96)
        >>> index = normal(2, 1, 16, 4, 32), normal(3, 1, 16, 32), normal(4, 1, 16, 4)
        >>> out, aux = jax_dsa.dsa_attention(q, kv, *index, top_k=8)
        >>> again, _ = jax_dsa.dsa_attention(q, kv, indices=aux.indices)  # the next layer reuses it
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
    starts, ends = key_ranges(args, starts, ends, is_causal, query_start)
    options = Options(
        top_k=top_k,
        value_dim=value_dim_or_default(args, value_dim),
        scale=scale_or_default(args, scale),
        deterministic=args.flag("deterministic", deterministic),
    )
    sinks = shared_sinks(args, sinks)
    operands = Operands(q, kv, inputs, starts, ends, indices, sinks)
    out, aux = dsa_attention_op(call, options, operands)
    indices, lse = args.restore((aux.indices, aux.lse))
    return args.restore(out), DSAAux(indices, aux.kl, lse)
