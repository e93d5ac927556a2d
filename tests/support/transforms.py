"""Outputs, a scalar loss and gradients of a `TransformCase`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.extend.core import jaxprs_in_params

if TYPE_CHECKING:
    from collections.abc import Callable

    from support.cases import TransformCase


def outputs(case: TransformCase, *args: Any) -> tuple:
    """Returns the arrays that the case's call returns."""
    return tuple(jax.tree.leaves(case.fn(*args)))


def weighted(y: jax.Array) -> jax.Array:
    """Returns a scalar that depends on every finite element of `y` differently."""
    weights = jnp.cos(jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape)
    return jnp.sum(jnp.where(jnp.isfinite(y), y.astype(jnp.float32), 0.0) * weights)


def loss(case: TransformCase, *args: Any) -> jax.Array:
    """Returns the sum of `weighted` over the outputs that are floats."""
    floats = [y for y in outputs(case, *args) if jnp.issubdtype(y.dtype, jnp.floating)]
    return sum((weighted(y) for y in floats), start=jnp.float32(0))


def grad(case: TransformCase) -> Callable[..., Any]:
    """Returns a function that computes the loss's gradients of the arguments `case.diff`."""
    return jax.grad(lambda *args: loss(case, *args), argnums=case.diff)


def both_ways(case: TransformCase) -> Callable[..., tuple]:
    """Returns a function that computes the outputs and, if there are any, the gradients."""
    if not case.diff:
        return lambda *args: (outputs(case, *args), ())
    return lambda *args: (outputs(case, *args), grad(case)(*args))


def executions(jaxpr: Any, name: str) -> int:
    """Returns how often a program calls the pass of this name."""
    count = 0
    for eqn in jaxpr.eqns:
        if eqn.params.get("name") == name:
            count += 1
        else:
            count += sum(executions(sub, name) for sub in jaxprs_in_params(eqn.params))
    return count
