"""The choice of an implementation for one call of an operator."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Literal, NamedTuple

_plain = contextvars.ContextVar("jax_dsa_plain_xla", default=False)


class Call(NamedTuple):
    """The call that the passes of an operator belong to.

    Attributes:
        op: the name of the public function, for messages.
        implementation: the user's choice; "plain" inside `plain_xla`.
    """

    op: str
    implementation: Literal["cuda", "xla", "plain"] | None

    @property
    def auxiliary(self) -> Call:
        """The call for passes other than the main one.

        `implementation="cuda"` refers to the main kernel only; auxiliary steps choose freely.
        """
        return self._replace(implementation=None) if self.implementation == "cuda" else self


@contextlib.contextmanager
def plain_xla() -> Iterator[None]:
    """Makes operators that are traced inside plain JAX: XLA without this package's own rules.

    The rules for autodiff, vmap and meshes are then those of JAX. Use this for what the own rules
    refuse, forward mode and gradients of gradients, and as an oracle to check them. JAX's rules
    keep the intermediates of every chunk for the backward pass, so this is meant for moderate
    sizes. It takes effect while tracing: a function that `jax.jit` has traced already does not
    change. It works as a decorator too.

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
    """Returns whether `plain_xla` is in effect."""
    return _plain.get()
