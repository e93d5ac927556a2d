"""Small arrays that are computed inside an operator's own jit.

An operator that is called outside of jit is then a single program.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any, TypeVar

import jax

if TYPE_CHECKING:
    from collections.abc import Callable

Operands = TypeVar("Operands", bound=tuple)


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["arrays"], meta_fields=["fun", "static"]
)
@dataclasses.dataclass(frozen=True)
class Deferred:
    """Stands for an operand that is computed later as `fun(*arrays, *static)`.

    Attributes:
        fun: a function at module level, so that it is the same object in every call.
        arrays: its array arguments; an argument may be None.
        static: its other arguments, which are hashable.
    """

    fun: Callable[..., jax.Array]
    arrays: tuple[Any, ...]
    static: tuple[Any, ...]


def materialize(operands: Operands) -> Operands:
    """Returns the operands with every `Deferred` computed."""
    values = [x.fun(*x.arrays, *x.static) if isinstance(x, Deferred) else x for x in operands]
    return type(operands)(*values)
