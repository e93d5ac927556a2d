"""The specification of a pass: named tuples of arrays, whose annotations describe each array.

vmap, meshes, derivatives and the result shapes all follow from these annotations.

    class Operands(NamedTuple):
        q: Float[Array, "b t (g m) d"]
        kv: Float[Array, "b s g d", SHARED]
        sinks: Float[Array, "b (g m)"] | None = None

    class Results(NamedTuple):
        out: Float[Array, "b t (g m) e", like("q"), Remat("dsa_out")]
        count: Int[Array, "b t", jnp.int32]

    class Gradients(NamedTuple):
        q: Array
        kv: Float[Array, "", accumulated("kv")]
        sinks: Array | None

The dims are a string with one token per axis. A letter is a factor of the axis; an axis in
parentheses is the product of its factors, major factor first. `{o.name}` inserts a string from the
options. Markers follow the dims.

A result has the shape that its dims give it: most factors have the size that they have in the
operands. If a result has a factor that no operand has (here "e"), the options must have a method
`result_sizes(known)`. It returns the sizes of such factors. `known` maps the operands' factors to
their sizes, and each axis in parentheses (as "g m") to its length.

The dtype of a result is one of its markers: a dtype, or a `Dtype` rule such as `like("q")`. The
rule also decides whether an optional result is present.

A gradient has the name of its operand and takes over its dims. Its dtype is that of the operand
unless a marker says otherwise; its dims are then "".
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import re
import typing
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from jax_dsa.core import compat

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

Axis = tuple[str, ...]  # The factors of one axis. An axis that no other array shares is ().
Axes = tuple[Axis, ...]


@dataclasses.dataclass(frozen=True)
class Marker:
    """A property of a field. It follows the dims in the annotation."""

    name: str


SHARED = Marker("shared")
"""Marks an operand that may have a batch axis of 1, which the implementations broadcast themselves.

It is meant for arrays that are too large to repeat. Their gradient has a batch axis of 1 too."""

CONSTANT = Marker("constant")
"""Marks a result that has no cotangent, whatever its dtype."""


@dataclasses.dataclass(frozen=True)
class Remat:
    """The name of a result for remat policies, as `jax.ad_checkpoint.checkpoint_name` takes it."""

    name: str


@dataclasses.dataclass(frozen=True)
class Dtype:
    """The dtype of a result.

    Attributes:
        rule: `(options, operands) -> dtype`, or None where the result is absent. `operands` has the
            operands as attributes; an absent one is None. Where two groups have an operand of the
            same name, it is that of the first group.
    """

    rule: Callable[[Any, Any], Any]


def like(name: str) -> Dtype:
    """Returns the rule for a result that has the dtype of an operand and is absent with it."""

    def rule(_: Any, operands: Any) -> Any:
        operand = getattr(operands, name)
        return None if operand is None else operand.dtype

    return Dtype(rule)


def accumulated(name: str) -> Dtype:
    """Returns the rule for a sum over products of an operand, in its accumulation dtype.

    The result is absent where the operand is absent or holds no floats, as FP8 records do.
    """

    def rule(_: Any, operands: Any) -> Any:
        operand = getattr(operands, name)
        if operand is None or not jnp.issubdtype(operand.dtype, jnp.floating):
            return None
        return compat.accum_dtype(operand.dtype)

    return Dtype(rule)


@dataclasses.dataclass(frozen=True)
class Field:
    """One operand or result.

    Attributes:
        dims: the dims; "" for a gradient.
        axes: the parsed dims, None where they depend on the options.
        shared, constant: whether the field is marked so.
        remat: its name for remat policies.
        dtype: the rule for its dtype, None if the annotation has none.
    """

    name: str
    dims: str
    axes: Axes | None
    shared: bool
    constant: bool
    remat: str | None
    dtype: Dtype | None

    @classmethod
    def of(cls, name: str, hint: Any) -> Field:
        """Returns the field for an annotation, which may be optional."""
        dims: str = ""
        markers: list[Any] = []
        for alternative in (hint, *typing.get_args(hint)):
            if hasattr(alternative, "__metadata__"):
                dims, *markers = alternative.__metadata__
        remat = next((m.name for m in markers if isinstance(m, Remat)), None)
        rules = [m for m in markers if m not in (SHARED, CONSTANT) and not isinstance(m, Remat)]
        rule = next((m if isinstance(m, Dtype) else _always(m) for m in rules), None)
        axes = None if "{" in dims else parse(dims)
        return cls(name, dims, axes, SHARED in markers, CONSTANT in markers, remat, rule)

    def axes_with(self, options: Any) -> Axes:
        """Returns the axes, with the strings that the options insert."""
        return parse(self.dims.format(o=options)) if self.axes is None else self.axes


def _always(dtype: Any) -> Dtype:
    fixed = jnp.dtype(dtype)
    return Dtype(lambda *_: fixed)


@functools.cache
def parse(dims: str) -> Axes:
    """Returns the axes that a string of dims describes."""
    return tuple(tuple(token.strip("()").split()) for token in re.findall(r"\([^)]*\)|\S+", dims))


@functools.cache
def fields(group: type) -> tuple[Field, ...]:
    """Returns the fields of a named tuple, in order."""
    hints = typing.get_type_hints(group, include_extras=True)
    return tuple(Field.of(name, hint) for name, hint in hints.items())


@dataclasses.dataclass(frozen=True)
class Dims:
    """The axes of the arrays that one call of a pass has. Absent arrays are left out.

    Attributes:
        operands, results: their axes.
        copied: for each result, the index of the operand whose shape it has, batch axis included:
            it is the gradient of a shared operand. None for the other results.
        options: the static options of the call.
    """

    operands: Sequence[Axes]
    results: Sequence[Axes]
    copied: Sequence[int | None]
    options: Any

    def solve(
        self, shapes: Sequence[tuple[int, ...]]
    ) -> tuple[dict[str, int], list[tuple[int, ...]]]:
        """Returns the sizes of the factors and the shapes of the results.

        Args:
            shapes: the shapes of the operands. All may have the same number of axes in front of
                those of their dims; the results then have these axes too. An axis of 1 may be
                broadcast: if an axis has several sizes, the one other than 1 counts.
        """
        rank = len(shapes[0]) - len(self.operands[0])
        sizes: dict[str, int] = {}
        products: dict[Axis, int] = {}
        for axes, shape in zip(self.operands, shapes, strict=True):
            for axis, size in zip(axes, shape[rank:], strict=True):
                if len(axis) > 1:
                    if products.get(axis, 1) == 1:
                        products[axis] = size
                elif sizes.get(axis[0], 1) == 1:
                    sizes[axis[0]] = size
        # The second iteration solves products whose other factors a later product determined.
        for axis, size in [*products.items()] * 2:
            unknown = [f for f in axis if f not in sizes]
            if len(unknown) == 1:
                for f in axis:
                    size //= max(1, sizes.get(f, 1))
                sizes[unknown[0]] = size
        if hasattr(self.options, "result_sizes"):
            for axis, size in products.items():
                sizes[" ".join(axis)] = size
            sizes.update(self.options.result_sizes(sizes))
        lead = jnp.broadcast_shapes(*[shape[:rank] for shape in shapes]) if rank else ()
        results = []
        for axes, operand in zip(self.results, self.copied, strict=True):
            if operand is not None:
                results.append((*lead, *shapes[operand][rank:]))
                continue
            shape = lead
            for axis in axes:
                known = axis in products
                shape += (products[axis] if known else math.prod(map(sizes.__getitem__, axis)),)
            results.append(shape)
        return sizes, results


class Signature(typing.NamedTuple):
    """The operands and results of a pass, read off the annotations of its XLA implementation.

    Attributes:
        groups: the named tuples of its operands.
        operands: the fields of all groups.
        results: the named tuple of its results.
        result_fields: the fields of that tuple.
        mirrors: for each result that is a gradient, the index of its operand; None for the others.
    """

    groups: tuple[Any, ...]
    operands: tuple[Field, ...]
    results: Any
    result_fields: tuple[Field, ...]
    mirrors: tuple[int | None, ...]

    @classmethod
    def of(cls, implementation: Callable[..., Any]) -> Signature:
        """Returns the signature of `implementation(options, *groups) -> results`."""
        hints = typing.get_type_hints(implementation, include_extras=True)
        _, *groups = (hints[name] for name in inspect.signature(implementation).parameters)
        operands = tuple(f for g in groups for f in fields(g))
        names = [f.name for f in operands]
        results = hints["return"]
        unknown = [f.name for f in fields(results) if not f.dims and f.name not in names]
        if unknown:
            raise TypeError(f"{results.__qualname__}: no operands are called {unknown}")
        untyped = [f.name for f in fields(results) if f.dims and f.dtype is None]
        if untyped:
            raise TypeError(f"{results.__qualname__}: the annotations of {untyped} have no dtype")
        mirrors = tuple(None if f.dims else names.index(f.name) for f in fields(results))
        return cls(tuple(groups), operands, results, fields(results), mirrors)

    def dtypes(self, options: Any, operands: Sequence[Any]) -> tuple[Any, ...]:
        """Returns the dtype of each result, None where the result is absent.

        Args:
            options: the static options of the call.
            operands: one array for each field of `operands`; None where it is absent.
        """
        named = _Named(zip(self.operands, operands, strict=True))
        dtypes: list[Any] = []
        for field, mirror in zip(self.result_fields, self.mirrors, strict=True):
            if mirror is not None and operands[mirror] is None:
                dtypes.append(None)
            elif field.dtype is not None:
                dtypes.append(field.dtype.rule(options, named))
            else:
                dtypes.append(operands[mirror].dtype)  # type: ignore[index]
        return tuple(dtypes)

    def dims(self, options: Any, operands: Sequence[bool], results: Sequence[bool]) -> Dims:
        """Returns the dims of the operands and results that are present in a call."""
        kept = [i for i, is_present in enumerate(operands) if is_present]
        axes = [self.operands[i].axes_with(options) for i in kept]
        result_axes: list[Axes] = []
        copied: list[int | None] = []
        for field, mirror, is_present in zip(
            self.result_fields, self.mirrors, results, strict=True
        ):
            if not is_present:
                continue
            index = None if mirror is None else kept.index(mirror)
            result_axes.append(field.axes_with(options) if index is None else axes[index])
            copied.append(index if mirror is not None and self.operands[mirror].shared else None)
        return Dims(axes, result_axes, copied, options)


class _Named:
    """The operands by name, for the rules of dtypes. The first operand of a name counts."""

    def __init__(self, operands: Iterable[tuple[Field, Any]]) -> None:
        for field, operand in operands:
            self.__dict__.setdefault(field.name, operand)
