"""Modules whose operations carry the path of the module in compiled programs and profiles.

A parent tells each child its name, and a method with the decorator `scoped` runs in a
`jax.named_scope` of that name. The scopes of nested calls form the path that the parameters have in
`nnx.state`, such as `blocks/0/attention/mla/wq_b`. Names change no result and no compiled code.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import jax
from flax import nnx

if TYPE_CHECKING:
    from collections.abc import Callable

M = TypeVar("M", bound=nnx.Module)
P = ParamSpec("P")
R = TypeVar("R")


class Module(nnx.Module):
    """An `nnx.Module` that names its children after the attributes that hold them."""

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, nnx.Module):
            value.scope = name  # type: ignore[attr-defined]
        super().__setattr__(name, value)


def scoped(method: Callable[Concatenate[M, P], R]) -> Callable[Concatenate[M, P], R]:
    """Returns the method in a scope of the module's name, by default the name of its class.

    Use it for the methods that other modules call. A method that its own module calls is already in
    the scope.
    """

    @functools.wraps(method)
    def call(self: M, *args: P.args, **kwargs: P.kwargs) -> R:
        with jax.named_scope(getattr(self, "scope", type(self).__name__)):
            return method(self, *args, **kwargs)

    return call


class Linear(nnx.Linear):
    """`nnx.Linear` with a scope."""

    __call__ = scoped(nnx.Linear.__call__)


class RMSNorm(nnx.RMSNorm):
    """`nnx.RMSNorm` with a scope."""

    __call__ = scoped(nnx.RMSNorm.__call__)


class LayerNorm(nnx.LayerNorm):
    """`nnx.LayerNorm` with a scope."""

    __call__ = scoped(nnx.LayerNorm.__call__)


class Embed(nnx.Embed):
    """`nnx.Embed` with a scope."""

    __call__ = scoped(nnx.Embed.__call__)
