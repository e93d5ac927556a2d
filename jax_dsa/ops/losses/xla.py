"""The indexer's losses in plain JAX: KL(p || softmax(I)) of every query, with normalised teacher p.

The gradient is computed directly, as dL/dI = softmax(I) - p. The derivative of a logarithm would
round small gradients to zero.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jax_dsa.core import compat
from jax_dsa.core.documents import block_range
from jax_dsa.core.typing import Array, Bool, Float, Int
from jax_dsa.ops.indexer import spec as indexer
from jax_dsa.ops.indexer.xla import (
    combine,
    gradients,
    key_gradients,
    score_bytes,
    scores,
    stream_queries,
)
from jax_dsa.ops.losses.spec import (
    DenseOperands,
    DenseOptions,
    DenseResults,
    Gradients,
    Operands,
    Options,
    Results,
    Saved,
)
from jax_dsa.ops.topk.xla import visible


def indexer_kl_loss_fwd(options: Options, x: Operands) -> Results:
    """Returns each row's KL, whether the row counts, and the KL's gradient times the row weight."""
    valid = x.logits > -jnp.inf if x.valid is None else x.valid
    kl, counts, grad = _kl(x.logits, x.teacher, valid)
    return Results(kl, counts, grad * options.row_weight)


def indexer_kl_loss_bwd(options: Options, x: Saved, dy: Results) -> Gradients:
    """Returns the gradient of the logits, from that of each row's KL."""
    return Gradients(logits=x.logits * (dy.kl * options.rows)[..., None])


def dense_indexer_kl_loss_fwd(options: DenseOptions, x: DenseOperands) -> DenseResults:
    """Returns the summed KL with its gradients."""
    batch, size = x.kv.shape[:2]
    block, index_size = options.block_size, x.index_k.shape[1]
    index_options = indexer.Options(relu=options.relu)

    def body(carry: tuple[Array, ...], keys: Any, *queries: Array) -> tuple[Any, tuple[Array, ...]]:
        total, rows, f = carry
        index_k, k_scale, kv = keys
        index_q, weights, starts, ends, q = queries
        mask = visible(starts, ends, size)
        teacher = _attention(q, kv, options.scale, mask)
        if block > 1:
            teacher = _by_block(teacher, starts, block, index_size)
            mask = visible(*block_range(block, starts, ends), index_size)
        x = scores(index_q, index_k)
        logits = combine(index_options, x, weights, k_scale, mask)
        kl, counts, g = _kl(logits, teacher, mask)
        df, dq, dw = gradients(index_options, x, index_q, index_k, weights, k_scale, g)
        carry = (
            total + jnp.sum(kl, axis=1),
            rows + jnp.sum(counts, axis=1, dtype=jnp.int32),
            f + df,
        )
        return carry, (dq, dw)

    dtype = compat.accum_dtype(x.index_k.dtype)
    # Blocks need the probabilities in the order of each query's document, too.
    attention_heads = x.q.shape[2] + (block > 1)
    cost = score_bytes(attention_heads, size) + score_bytes(x.index_q.shape[2], index_size)
    (total, rows, f), (dq, dw) = stream_queries(
        body,
        (jnp.zeros(batch, dtype), jnp.zeros(batch, jnp.int32), jnp.zeros(x.index_k.shape, dtype)),
        (x.index_k, x.index_k_scale, x.kv),
        (x.index_q, x.index_weights, x.starts, x.ends, x.q),
        cost,
    )
    dk, dk_scale = key_gradients(f, x.index_k, x.index_k_scale)
    return DenseResults(total, rows, dq, dk, dw, dk_scale)


def _attention(
    q: Float[Array, "B T N D"],
    kv: Float[Array, "B S G D"],
    scale: float,
    mask: Bool[Array, "B T S"],
) -> Float[Array, "B T S"]:
    """Returns the probabilities of softmax attention, summed over the heads."""
    batch, queries, heads, width = q.shape
    groups = kv.shape[2]
    s = jnp.einsum(
        "btgmd,bsgd->btgms",
        q.reshape(batch, queries, groups, heads // groups, width),
        kv,
        preferred_element_type=compat.accum_dtype(q.dtype),
    )
    _, p = _softmax(s * scale, mask[:, :, None, None])
    return jnp.sum(p, axis=(2, 3))


def _by_block(
    mass: Float[Array, "B T S"], starts: Int[Array, "B T"], block: int, blocks: int
) -> Float[Array, "B T W"]:
    """Returns the sums of the tokens' masses over the blocks of each query's document.

    Block i of a document that begins at token s has the number s // block + i, so its tokens are
    those of the block of this number in the sequence, shifted by s % block.
    """
    if mass.shape[2] == 0:
        return jnp.zeros((*mass.shape[:2], blocks), mass.dtype)
    tokens = jnp.arange(blocks * block, dtype=jnp.int32)[None, None] + (starts % block)[..., None]
    mass = jnp.take_along_axis(mass, tokens, axis=2, mode="fill", fill_value=0)
    return jnp.sum(mass.reshape(*mass.shape[:2], blocks, block), axis=3)


def _kl(
    logits: Float[Array, "B T K"], teacher: Float[Array, "B T K"], valid: Bool[Array, "B T K"]
) -> tuple[Float[Array, "B T"], Bool[Array, "B T"], Float[Array, "B T K"]]:
    """Returns each row's KL over its valid slots, whether the row counts, and the KL's gradient.

    Rows without a valid slot or without teacher mass do not count: their KL and gradient are 0.
    """
    dtype = compat.accum_dtype(logits.dtype)
    teacher = jnp.where(valid, teacher.astype(dtype), 0)
    mass = jnp.sum(teacher, axis=-1)
    counts = ~(mass <= 0)  # not `mass > 0`: a NaN in the teacher must reach the results
    p = teacher / jnp.where(counts, mass, 1)[..., None]
    log_q, q = _softmax(logits.astype(dtype), valid)
    has_mass = ~(p <= 0)
    kl = jnp.sum(jnp.where(has_mass, p * (jnp.log(jnp.where(has_mass, p, 1)) - log_q), 0), axis=-1)
    used = valid & counts[..., None]
    return jnp.where(counts, kl, 0), counts, jnp.where(used, q - p, 0)


def _softmax(
    x: Float[Array, "... K"], valid: Bool[Array, "... K"]
) -> tuple[Float[Array, "... K"], Float[Array, "... K"]]:
    """Returns log softmax and softmax over the valid slots, and -inf and 0 in other slots."""
    x = jnp.where(valid, x, -jnp.inf)
    largest = jnp.max(x, axis=-1, keepdims=True, initial=-jnp.inf)
    x = x - jax.lax.stop_gradient(jnp.where(largest == -jnp.inf, 0, largest))
    e = jnp.exp(x)
    total = jnp.sum(e, axis=-1, keepdims=True)
    total = jnp.where(total == 0, 1, total)
    return x - jnp.log(total), e / total
