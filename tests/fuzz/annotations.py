"""Reads the annotations of public functions."""

from __future__ import annotations

import re
import types
import typing
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator


def atoms(hint: Any) -> Iterator[Any]:
    """Yields the members of a union, or the type itself."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        for member in typing.get_args(hint):
            yield from atoms(member)
    else:
        yield hint


def dims_of(hint: Any) -> list[list[str]]:
    """Returns the axes of every array that an annotation allows."""
    return [a.__metadata__[0].split() for a in atoms(hint) if hasattr(a, "__metadata__")]


def letters_of(hint: Any) -> set[str]:
    """Returns the letters of all axes of an annotation, such as G and N of "1|G|N"."""
    return {x for dims in dims_of(hint) for dim in dims for x in re.findall(r"[A-Za-z]+", dim)}


def kinds_of(hint: Any) -> set[str]:
    """Returns the names of the types that an annotation allows.

    "position" is among them if it allows both an int and an array.
    """
    kinds = {getattr(a, "__name__", "") for a in atoms(hint)}
    return kinds | {"position"} if "int" in kinds and dims_of(hint) else kinds
