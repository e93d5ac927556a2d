"""How one call of an operator wants to run."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Literal, NamedTuple

_plain = contextvars.ContextVar("jax_dsa_plain_xla", default=False)


class Call(NamedTuple):
    """What an operator's passes know of the call that they belong to.

    Attributes:
        op: the public function, for messages.
        implementation: what the user chose; "plain" inside `plain_xla`.
    """

    op: str
    implementation: Literal["cuda", "xla", "plain"] | None

    @property
    def auxiliary(self) -> Call:
        """For passes beside the main one: `implementation="cuda"` refers to the main kernel only,
        auxiliary steps choose freely.
        """
        return self._replace(implementation=None) if self.implementation == "cuda" else self


@contextlib.contextmanager
def plain_xla() -> Iterator[None]:
    """Operators traced inside are plain JAX: the XLA implementation, without rules of ours for
    autodiff, vmap and meshes.

    For what those rules refuse, forward mode and gradients of gradients, and for checking them.
    JAX's own rules keep every chunk's intermediates for the backward pass, so this is for moderate
    sizes. It takes effect while tracing: a function that `jax.jit` has traced before stays as it
    is. Works as a decorator too.

    Examples:
        >>> import jax, jax.numpy as jnp, jax_dsa
        >>> def largest(x):
        ...     with jax_dsa.plain_xla():
        ...         return jax_dsa.topk(x, 1, return_values=True)[1]
        >>> jax.jvp(largest, (jnp.array([1.0, 3.0]),), (jnp.array([0.5, 2.0]),))[1]
        Array([2.], dtype=float32)
    """
    token = _plain.set(True)
    try:
        yield
    finally:
        _plain.reset(token)


def in_plain_xla() -> bool:
    """Whether `plain_xla` is in effect."""
    return _plain.get()
