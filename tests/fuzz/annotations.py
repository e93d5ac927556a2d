"""What a public function takes, read off its annotations."""

from __future__ import annotations

import types
import typing
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator


def atoms(hint: Any) -> Iterator[Any]:
    """The parts of a union."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        for part in typing.get_args(hint):
            yield from atoms(part)
    else:
        yield hint


def dims_of(hint: Any) -> list[list[str]]:
    """The axes of every array that an annotation allows."""
    return [a.__metadata__[0].split() for a in atoms(hint) if hasattr(a, "__metadata__")]


def kinds_of(hint: Any) -> set[str]:
    """The names of the types that an annotation allows; "position" for an int or an array."""
    kinds = {getattr(a, "__name__", "") for a in atoms(hint)}
    return kinds | {"position"} if "int" in kinds and dims_of(hint) else kinds
