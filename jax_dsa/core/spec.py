"""What a pass takes and gives: named tuples of arrays, whose annotations say all that vmap, meshes
and derivatives want to know.

    class Operands(NamedTuple):
        q: Float[Array, "b t (g m) d"]
        kv: Float[Array, "b s g d", SHARED]
        sinks: Float[Array, "b (g m)"] | None = None

    class Results(NamedTuple):
        out: Float[Array, "b t (g m) e", Remat("dsa_out")]

    class Gradients(NamedTuple):
        q: Array
        kv: Array
        sinks: Array | None

One token of the dims is one axis. Letters are factors; an axis in parentheses is the product of its
factors, major first. `{o.name}` stands for a text that the options have. A gradient has the name of
its operand, and with that its dims.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
import typing
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

Axis = tuple[str, ...]  # the factors of one array axis; () is an axis that nothing else shares
Axes = tuple[Axis, ...]


@dataclasses.dataclass(frozen=True)
class Marker:
    """A property of a field, which stands behind its dims."""

    name: str


SHARED = Marker("shared")
"""An operand that may have a batch axis of 1, which the implementations broadcast themselves: for
arrays too large to repeat. Its gradient has that batch axis."""

CONSTANT = Marker("constant")
"""A result that has no cotangent, whatever its dtype."""


@dataclasses.dataclass(frozen=True)
class Remat:
    """The name of a result for remat policies, as `jax.ad_checkpoint.checkpoint_name` gives it."""

    name: str


@dataclasses.dataclass(frozen=True)
class Field:
    """One operand or result.

    Attributes:
        dims: "" for a gradient.
        axes: the dims parsed, None where they depend on the options.
        shared, constant: whether it is marked so.
        remat: its name for remat policies.
    """

    name: str
    dims: str
    axes: Axes | None
    shared: bool
    constant: bool
    remat: str | None

    @classmethod
    def of(cls, name: str, hint: Any) -> Field:
        """From an annotation, which may be optional."""
        dims: str = ""
        markers: list[Any] = []
        for part in (hint, *typing.get_args(hint)):
            if hasattr(part, "__metadata__"):
                dims, *markers = part.__metadata__
        remat = next((m.name for m in markers if isinstance(m, Remat)), None)
        axes = None if "{" in dims else parse(dims)
        return cls(name, dims, axes, SHARED in markers, CONSTANT in markers, remat)

    def axes_with(self, options: Any) -> Axes:
        """The axes, with what the options say."""
        return parse(self.dims.format(o=options)) if self.axes is None else self.axes


@functools.cache
def parse(dims: str) -> Axes:
    """The axes of an array."""
    return tuple(tuple(token.strip("()").split()) for token in re.findall(r"\([^)]*\)|\S+", dims))


@functools.cache
def fields(group: type) -> tuple[Field, ...]:
    """The fields of a named tuple, in order."""
    hints = typing.get_type_hints(group, include_extras=True)
    return tuple(Field.of(name, hint) for name, hint in hints.items())


class Signature(typing.NamedTuple):
    """What a pass takes and gives, read off its XLA implementation.

    Attributes:
        groups: the named tuples of its operands.
        operands: the fields of all groups.
        results: the named tuple of its results.
        mirrors: for each result that is a gradient, which operand's; None for the others.
    """

    groups: tuple[Any, ...]
    operands: tuple[Field, ...]
    results: Any
    mirrors: tuple[int | None, ...]

    @classmethod
    def of(cls, implementation: Callable[..., Any]) -> Signature:
        """Of `implementation(options, *groups) -> results`."""
        hints = typing.get_type_hints(implementation, include_extras=True)
        _, *groups = (hints[name] for name in inspect.signature(implementation).parameters)
        operands = tuple(f for g in groups for f in fields(g))
        names = [f.name for f in operands]
        results = hints["return"]
        unknown = [f.name for f in fields(results) if not f.dims and f.name not in names]
        if unknown:
            raise TypeError(f"{results.__qualname__}: no operands are called {unknown}")
        mirrors = tuple(None if f.dims else names.index(f.name) for f in fields(results))
        return cls(tuple(groups), operands, results, mirrors)
