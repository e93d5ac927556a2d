"""Registration of the package's types with `jax.export`."""

from __future__ import annotations

import json
from typing import TypeVar

import jax
import jax.export

T = TypeVar("T")


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
            serialize_auxdata=lambda static: json.dumps(static).encode(),
            deserialize_auxdata=lambda stored: tuple(json.loads(stored)),
        )
    return cls
