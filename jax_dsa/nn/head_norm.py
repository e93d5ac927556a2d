"""The norm and the rotary position of queries and keys, of attention and indexer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from flax import nnx

from jax_dsa.core import compat
from jax_dsa.core.typing import Array, Float, Int
from jax_dsa.nn.scopes import Module, scoped

if TYPE_CHECKING:
    from jax_dsa.nn.grouped_config import GroupedConfig


class RotaryHeadNorm(Module):
    """RMS norm over the last axis, then rotary position, with one rounding after both.

    The norm's factor is 1 + `scale`. A new module has the factor 1.

    Args:
        config: Rotary fields, epsilon and dtype.
        dim: D, width of a head.
    """

    def __init__(self, config: GroupedConfig, dim: int) -> None:
        self.config = config
        self.scale = nnx.Param(jnp.zeros(dim))

    @scoped
    def __call__(
        self, x: Float[Array, "B T *H D"], positions: Int[Array, "B T"] | Int[Array, "3 B T"]
    ) -> Float[Array, "B T *H D"]:
        """Returns the normalised and rotated heads, in `config.dtype`."""
        return self._run(x, self.scale[...], positions)

    @scoped
    def of_pools(
        self, x: Float[Array, "B W D"], positions: Int[Array, "B W"] | Int[Array, "3 B W"]
    ) -> Float[Array, "B W D"]:
        """Returns the result of `__call__` for pooled keys, whose elements may be sharded.

        The norm reduces over the elements, so the compiler chooses their sharding.
        """
        return compat.left_to_compiler(self._run, x)(x, self.scale[...], positions)

    def _run(self, x: Array, scale: Array, positions: Array) -> Array:
        c = self.config

        # The backward pass computes the norm again. It would otherwise save float32 arrays.
        @jax.checkpoint
        def run(x: Array, scale: Array, positions: Array) -> Array:
            exact = x.astype(jnp.float32)
            squares = jnp.mean(exact * exact, axis=-1, keepdims=True)
            normed = exact * jax.lax.rsqrt(squares + c.norm_eps) * (1 + scale)
            return c.rotate(normed, positions).astype(c.dtype)

        return run(x, scale, positions)
