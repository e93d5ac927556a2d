"""For tests that compile much and run little."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True, scope="module")
def compile_quickly() -> Iterator[None]:
    """Halves the time that a module's tests take: XLA optimises little. Import it to use it."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture
def compile_fully(compile_quickly: None) -> Iterator[None]:
    """For one test of such a module, where it is XLA's optimisations that might do harm."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)
