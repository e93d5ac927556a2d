"""Steps of softmax attention with grouped heads that the XLA implementations share."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_dsa.core import compat
from jax_dsa.core.typing import Array, Float


def grouped(x: Array, groups: int) -> Array:
    """Returns [B, T, N, ...] reshaped to [B, T, G, N/G, ...]."""
    B, T, N = x.shape[:3]
    return x.reshape(B, T, groups, N // groups, *x.shape[3:])


def sink_gate(
    sinks: Float[Array, "B N"] | None, lse: Float[Array, "B T G m"]
) -> Float[Array, "B T G m"] | None:
    """Returns 1 / (1 + exp(sink - lse)), the share of the softmax that the sink leaves to the keys.

    It is 1 for rows without a key. The result is None if there are no sinks.
    """
    if sinks is None:
        return None
    B, _, G, m = lse.shape
    empty = lse == -jnp.inf
    sinks = sinks.reshape(B, 1, G, m).astype(lse.dtype)
    return jnp.where(empty, 1, jax.nn.sigmoid(jnp.where(empty, 0, lse) - sinks))


def sink_gradient(
    gate: Float[Array, "B T ..."], dout_dot_out: Float[Array, "B T ..."]
) -> Float[Array, "B N"]:
    """Returns the sinks' gradient from `sink_gate` and the row sums of dout * out.

    Both are [B, T, G, m] or [B, T, N]. Rows without a key must have a gate of 1 or a sum of 0.
    """
    return -jnp.sum((1 - gate) * dout_dot_out, axis=1).reshape(gate.shape[0], -1)


def of_rows_with_keys(lse: Float[Array, "*b"], *arrays: Array) -> tuple[Array, ...]:
    """Returns arrays [*b] or [*b, D] with zeros in rows without a key.

    The contents of such rows must not reach a key or a row that other queries see, and multiplying
    them by 0 is not enough, because 0 * NaN is NaN.
    """
    alive = lse != -jnp.inf
    return tuple(
        [jnp.where(alive if x.ndim == lse.ndim else alive[..., None], x, 0) for x in arrays]
    )


def probabilities(
    s: Float[Array, "B T G m K"], lse: Float[Array, "B T G m"]
) -> Float[Array, "B T G m K"]:
    """Returns exp(s - lse); 0 where either is -inf, whatever the other is."""
    lse = lse[..., None]
    empty = lse == -jnp.inf
    return jnp.where(empty | (s == -jnp.inf), 0, jnp.exp(s - jnp.where(empty, 0, lse)))


def row_products(dout: Float[Array, "*b E"], out: Float[Array, "*b E"]) -> Float[Array, "*b"]:
    """Returns sum(dout * out, -1) of the rounded values that these arrays hold.

    If `dout` has just been rounded, XLA may skip the rounding here (`xla_allow_excess_precision`)
    but not where a kernel reads `dout`. The backward pass subtracts this sum from another one,
    which would then be computed from different numbers. XLA does not skip an explicit
    `reduce_precision`.
    """
    acc = compat.accum_dtype(out.dtype)

    def exact(x: Array) -> Array:
        info = jnp.finfo(x.dtype)
        return jax.lax.reduce_precision(x.astype(acc), info.nexp, info.nmant)

    return jnp.sum(exact(dout) * exact(out), axis=-1)
