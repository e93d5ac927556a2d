"""Small arrays that are worked out inside an operator's own jit: called outside of one, an operator
is a single program.
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
    """The array `fun(*arrays, *static)`, in place of an operand.

    Attributes:
        fun: a function of a module, which is the same one in every call.
        arrays: its array arguments, or None.
        static: its other arguments, hashable.
    """

    fun: Callable[..., jax.Array]
    arrays: tuple[Any, ...]
    static: tuple[Any, ...]


def materialize(operands: Operands) -> Operands:
    """The operands with arrays for what was to be worked out later."""
    values = [x.fun(*x.arrays, *x.static) if isinstance(x, Deferred) else x for x in operands]
    return type(operands)(*values)
