"""Parts of softmax attention with heads in groups, as the XLA implementations share them."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_dsa.core import compat
from jax_dsa.core.typing import Array, Float


def grouped(x: Array, groups: int) -> Array:
    """[B, T, N, ...] as [B, T, G, N/G, ...]."""
    B, T, N = x.shape[:3]
    return x.reshape(B, T, groups, N // groups, *x.shape[3:])


def sink_gate(
    sinks: Float[Array, "B N"] | None, lse: Float[Array, "B T G m"]
) -> Float[Array, "B T G m"] | None:
    """1 / (1 + exp(sink - lse)), what the sink leaves to the keys; 1 where there is no key."""
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
    """`arrays` [*b] or [*b, D], 0 in rows without a key: whatever those hold must not reach a key
    or a row that others see, and 0 * NaN is NaN.
    """
    alive = lse != -jnp.inf
    return tuple(
        [jnp.where(alive if x.ndim == lse.ndim else alive[..., None], x, 0) for x in arrays]
    )


def probabilities(
    s: Float[Array, "B T G m K"], lse: Float[Array, "B T G m"]
) -> Float[Array, "B T G m K"]:
    """exp(s - lse), 0 where either is -inf (whatever the other is)."""
    lse = lse[..., None]
    empty = lse == -jnp.inf
    return jnp.where(empty | (s == -jnp.inf), 0, jnp.exp(s - jnp.where(empty, 0, lse)))


def row_products(dout: Float[Array, "*b E"], out: Float[Array, "*b E"]) -> Float[Array, "*b"]:
    """sum(dout * out, -1), of the values that these arrays hold.

    Where `dout` has just been rounded, XLA may leave that out here (`xla_allow_excess_precision`)
    but not where a kernel reads it. The two sums that are then subtracted from each other, one of
    them this, would be of different numbers; an explicit rounding stays.
    """
    acc = compat.accum_dtype(out.dtype)

    def exact(x: Array) -> Array:
        info = jnp.finfo(x.dtype)
        return jax.lax.reduce_precision(x.astype(acc), info.nexp, info.nmant)

    return jnp.sum(exact(dout) * exact(out), axis=-1)
