"""Optional dependencies: what to install when one is missing."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def needs_extra(extra: str, module: str) -> Iterator[None]:
    """Around the imports of `module`: a missing one says which extra brings it."""
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
