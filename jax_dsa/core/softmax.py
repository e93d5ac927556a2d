"""Steps of softmax attention with grouped heads that the XLA implementations share."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from jax_dsa.core import compat
from jax_dsa.core.typing import Array, Float


def split_scale(scale: float, dtype: Any) -> tuple[float, float]:
    """Returns two factors of the scale of a backward pass: one for before its sums, one for after.

    The sums dout . v may be too large for float32 although their products with the scale are not.
    So the first factor multiplies `dout`, of this `dtype`, before. It is a power of two, which
    costs no digits, at most 1 and about the scale. It is 1 for float16, whose sums are never too
    large, and whose smallest numbers would lose digits.
    """
    exponent = 0 if dtype == jnp.float16 or scale == 0 else math.frexp(scale)[1] - 1
    first = 2.0 ** min(0, max(exponent, -16))
    return first, scale / first


def grouped(x: Array, groups: int) -> Array:
    """Returns [B, T, N, ...] reshaped to [B, T, G, N/G, ...]."""
    B, T, N = x.shape[:3]
    return x.reshape(B, T, groups, N // groups, *x.shape[3:])


@jax.custom_jvp
def logistic(x: Float[Array, "*b"]) -> Float[Array, "*b"]:
    """Returns 1 / (1 + exp(-x)), with a derivative that is precise for large x, too.

    JAX computes the derivative of its function from the result y as y (1 - y), which has no correct
    digit where y is close to 1.
    """
    return jax.nn.sigmoid(x)


logistic.defjvp(lambda x, dx: (logistic(*x), logistic(*x) * logistic(-x[0]) * dx[0]))


def sink_gate(
    sinks: Float[Array, "B N"] | None,
    max_logit: Float[Array, "B T G m"],
    log_sum: Float[Array, "B T G m"] | float = 0.0,
) -> Float[Array, "B T G m"] | None:
    """Returns 1 / (1 + exp(sink - lse)), the share of the softmax that the sink leaves to the keys.

    It is 1 for rows without a key. The result is None if there are no sinks. For `max_logit` and
    `log_sum`, see `probabilities`.
    """
    return None if sinks is None else logistic(_above_sink(sinks, max_logit, log_sum))


def sink_share(
    sinks: Float[Array, "B N"],
    max_logit: Float[Array, "B T G m"],
    log_sum: Float[Array, "B T G m"] | float = 0.0,
) -> Float[Array, "B T G m"]:
    """Returns 1 - gate, the sink's share of the softmax; 0 for rows without a key.

    The difference of 1 and the gate would have no correct digit for a share below 6e-8.
    """
    return logistic(-_above_sink(sinks, max_logit, log_sum))


def _above_sink(
    sinks: Float[Array, "B N"],
    max_logit: Float[Array, "B T G m"],
    log_sum: Float[Array, "B T G m"] | float,
) -> Float[Array, "B T G m"]:
    """Returns lse - sink, which is infinite for rows without a key."""
    B, _, G, m = max_logit.shape
    empty = max_logit == -jnp.inf
    sinks = sinks.reshape(B, 1, G, m).astype(max_logit.dtype)
    return jnp.where(empty, jnp.inf, (jnp.where(empty, 0, max_logit) - sinks) + log_sum)


def sink_gradient(
    sinks: Float[Array, "B N"],
    max_logit: Float[Array, "B T G m"],
    log_sum: Float[Array, "B T G m"] | float,
    dout_dot_out: Float[Array, "B T G m"],
) -> Float[Array, "B N"]:
    """Returns the sinks' gradient from the row sums of dout * out."""
    share = sink_share(sinks, max_logit, log_sum)
    return -jnp.sum(share * dout_dot_out, axis=1).reshape(sinks.shape)


def of_rows_with_keys(max_logit: Float[Array, "*b"], *arrays: Array) -> tuple[Array, ...]:
    """Returns arrays [*b] or [*b, D] with zeros in rows without a key.

    The contents of such rows must not reach a key or a row that other queries see, and multiplying
    them by 0 is not enough, because 0 * NaN is NaN.
    """
    alive = max_logit != -jnp.inf
    return tuple(
        [jnp.where(alive if x.ndim == alive.ndim else alive[..., None], x, 0) for x in arrays]
    )


def log_of_sum(total: Float[Array, "*b"]) -> Float[Array, "*b"]:
    """Returns log(total), or 0 for a row without a key, whose sum is 0."""
    return jnp.log(jnp.where(total == 0, 1, total))


def probabilities(
    s: Float[Array, "B T G m K"],
    max_logit: Float[Array, "B T G m"],
    log_sum: Float[Array, "B T G m"] | float = 0.0,
) -> Float[Array, "B T G m K"]:
    """Returns exp(s - lse); 0 where either is -inf, whatever the other is.

    lse is given as the pair of the row's largest score and log(sum(exp(s - max_logit))). If all
    scores are -1e9, the float32 number lse is the largest score itself, whatever the sum is. The
    difference of a score and the largest one is exact there, and is therefore computed first.
    """
    max_logit = max_logit[..., None]
    empty = max_logit == -jnp.inf
    rest = log_sum if isinstance(log_sum, float) else log_sum[..., None]
    p = jnp.exp((s - jnp.where(empty, 0, max_logit)) - rest)
    return jnp.where(empty | (s == -jnp.inf), 0, p)


def requested(y: Any, return_lse: bool, return_max_logit: bool = False) -> Any:
    """Returns the output of `y`, or a tuple that starts with it if more is requested.

    Args:
        y: results with the fields `out`, `max_logit` and `log_sum`.
        return_lse: whether the log-sum-exp follows.
        return_max_logit: whether the largest logit follows.
    """
    results = [y.out]
    if return_lse:
        results.append(y.max_logit + y.log_sum)
    if return_max_logit:
        results.append(y.max_logit)
    return tuple(results) if len(results) > 1 else y.out


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
