"""The interface between the benchmark and the functions of other libraries.

`benchmarks/peers`, which only the repository has, implements it.
"""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    import jax

    from jax_dsa.bench.case import Case

TOLERANCE = 0.02
"""The largest `ExternalCall.difference` that passes. It allows for results in bfloat16, and for
selections among equal scores."""


class DisagreementError(Exception):
    """Raised if the results of another library differ from ours."""


class ExternalCall(abc.ABC):
    """A function of another library, for one case.

    If `uses_torch` is False, it is a JAX function of the case's arguments. Otherwise it is a
    function of the tensors that `tensors` returns.
    """

    uses_torch: bool

    @abc.abstractmethod
    def __call__(self, *args: Any) -> Any:
        """Calls the function."""

    @abc.abstractmethod
    def tensors(self, case: Case, key: jax.Array) -> tuple:
        """Returns the case's arguments as PyTorch tensors, in the form that the function takes."""

    @abc.abstractmethod
    def torch_seconds(self, sets: Sequence[tuple], budget: float, rest: float) -> float:
        """Returns the seconds of one call with PyTorch tensors; see `timing.device_seconds`."""

    @abc.abstractmethod
    def difference(self, case: Case, ours: Any, theirs: Any) -> float:
        """Returns how much the function's results differ from ours; 0 if they are equal."""
