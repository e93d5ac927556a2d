"""Attention sinks of masked attention and of sparse attention."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from jax_dsa.core.softmax import (
    grouped,
    of_rows_with_keys,
    row_products,
    sink_gate,
    sink_gradient,
)
from jax_dsa.core.typing import Array, Float
from jax_dsa.ops.masked_attention.spec import Results

# With a gate of 0, the gradient of the log-sum-exp would be lost. These are the smallest gates
# whose inverse is an ordinary float32 number and whose product with a probability is an ordinary
# number, also where the kernels round probabilities to 16 bits.
_MIN_GATE, _MIN_GATE_FLOAT16 = 2.0**-100, 2.0**-4


def gates(
    sinks: Float[Array, "B N"],
    max_logit: Float[Array, "B G m T 1"],
    log_sum: Float[Array, "B G m T 1"],
) -> Float[Array, "B G m T 1"]:
    """Returns the share of the softmax that the sink of each query leaves to the keys."""
    max_logit, log_sum = (jnp.moveaxis(z[..., 0], 3, 1) for z in (max_logit, log_sum))
    gate = sink_gate(sinks, max_logit, log_sum)
    assert gate is not None
    return jnp.moveaxis(gate, 1, 3)[..., None]


def without_sinks(
    x: Any, y: Results, dy: Results
) -> tuple[Results, Results, Float[Array, "B N"] | None]:
    """Returns results and cotangents of attention without sinks that has the same gradients.

    With P the probabilities without the sink, and with the gate, the share of the softmax that the
    sink leaves to the keys, the gradient of a score is

        P * (gate * (dP - sum(out * dout)) + dlse) = (P * gate) * (dP - sum(out * dout) + dlse/gate)

    and that of the values is (P * gate)^T dout. So the pass needs another `log_sum`, which makes
    each probability P * gate, and another cotangent of the log-sum-exp. Where a gate is too small
    for float16, a part of it multiplies dout instead.

    Args:
        x: The operands of either operator.
        y: The results of the forward pass.
        dy: Their cotangents.

    Returns:
        The results, the cotangents, and the gradient of the sinks, or None without sinks.
    """
    groups = x.k.shape[2]
    max_logit, log_sum = (grouped(z, groups) for z in (y.max_logit, y.log_sum))
    gate = sink_gate(x.sinks, max_logit, log_sum)
    if x.sinks is None or gate is None:
        return y, dy, None
    (dout_dot_out,) = of_rows_with_keys(y.max_logit, row_products(dy.out, y.out))
    dsinks = sink_gradient(x.sinks, max_logit, log_sum, grouped(dout_dot_out, groups))
    gate = gate.reshape(y.log_sum.shape)
    low = x.q.dtype == jnp.float16
    kept = jnp.maximum(gate, _MIN_GATE_FLOAT16 if low else _MIN_GATE)
    dout = (dy.out * (gate / kept)[..., None]).astype(dy.out.dtype) if low else dy.out
    y = y._replace(log_sum=y.log_sum - jnp.log(kept))
    return y, dy._replace(out=dout, log_sum=dy.log_sum / kept), dsinks
