"""Optional dependencies: the error message for a missing one says what to install."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def needs_extra(extra: str, module: str) -> Iterator[None]:
    """Wraps the imports of `module`. The error for a missing one names the extra that has it.

    Args:
        extra: the extra of this package that has the dependency.
        module: the module that needs it, for the message.

    Raises:
        ModuleNotFoundError: an import in the `with` block failed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("jax_dsa"):
            raise
        raise ModuleNotFoundError(
            f"{module} needs '{error.name}', which the extra '{extra}' brings: "
            f"pip install 'jax_dsa[{extra}]'",
            name=error.name,
        ) from error
