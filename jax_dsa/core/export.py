"""Registration of the package's types with `jax.export`."""

from __future__ import annotations

import functools
import json
from typing import TypeVar

import jax
import jax.export

T = TypeVar("T")


def _stored(name: str, static: tuple[int, ...]) -> bytes:
    """Returns the static fields of a `name` as bytes."""
    if not all(isinstance(x, int) for x in static):
        raise ValueError(
            f"{name} with the sizes {static} cannot be stored: want numbers, no symbols; export "
            f"once for each size, or make it inside the exported function"
        )
    return json.dumps(static).encode()


def exportable(cls: type[T]) -> type[T]:
    """Lets `jax.export` serialize programs that take or return `cls`. Use it as a decorator.

    A stored program contains the public name, such as "jax_dsa.nn.LayerCache", so the name of a
    type must not change.

    Args:
        cls: A named tuple, or a dataclass that is a registered pytree whose static fields are ints.
    """
    package = cls.__module__.split(".")[1]
    prefix = "jax_dsa" if package == "ops" else f"jax_dsa.{package}"
    name = f"{prefix}.{cls.__name__}"
    if issubclass(cls, tuple):
        jax.export.register_namedtuple_serialization(cls, serialized_name=name)
    else:
        jax.export.register_pytree_node_serialization(
            cls,
            serialized_name=name,
            serialize_auxdata=functools.partial(_stored, name),
            deserialize_auxdata=lambda stored: tuple(json.loads(stored)),
        )
    return cls
