"""Small calls of every operator, for the tests that every operator has to pass."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from jax.sharding import PartitionSpec


@dataclasses.dataclass(frozen=True)
class TransformCase:
    """One call of an operator.

    Attributes:
        name: shown in the test's id.
        fn: takes the arrays of `make_args` only, options closed over; returns an array or a tuple
            of them.
        make_args: arrays with a batch axis of 8 (and 8 queries and 8 heads where `specs` shards
            those).
        diff: the arguments to differentiate.
        specs: for each route ("batch", "query", "head", "keys") the arguments' specs on a mesh of
            one axis "x", of 8 devices, of 4 for the keys.
        gathers: for a route, the shapes that it may gather; nothing by default.
    """

    name: str
    fn: Callable
    make_args: Callable[[np.random.Generator], tuple]
    diff: tuple[int, ...]
    specs: dict[str, tuple[PartitionSpec, ...]]
    gathers: dict[str, set[tuple[int, ...]]] = dataclasses.field(default_factory=dict)
