"""Checks of the arguments that the modules share, with the messages of the operators."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from jax_dsa.core.checks import FLOATS, INT32, Args
from jax_dsa.core.typing import Array, Float, Int


def check_module(op: str, config: Any, kind: type, rngs: Any) -> None:
    """Raises TypeError unless a module gets a configuration of its `kind`, and random streams."""
    check_type(op, "config", config, kind)
    check_type(op, "rngs", rngs, nnx.Rngs, "such as nnx.Rngs(0)")


def check_type(
    op: str, name: str, value: Any, kind: type | tuple[type, ...], hint: str = ""
) -> None:
    """Raises TypeError unless the argument `name` of `op` is an instance of `kind`."""
    if not isinstance(value, kind):
        kinds = kind if isinstance(kind, tuple) else (kind,)
        want = " or ".join(k.__name__ for k in kinds) + (hint and f", {hint}")
        raise TypeError(f"{op}: argument '{name}' is {type(value).__name__}, want {want}")


def hidden_states(
    op: str, x: Any, width: int, name: str = "x"
) -> tuple[Args, Float[Array, "B T M"]]:
    """Returns the checks of a module's call, and its checked hidden states of this width M.

    Raises:
        TypeError: If the argument `name` is no floating-point array.
        ValueError: If its shape is not [B, T, M].
    """
    args = Args(op, name, np.empty((0, 0, 0)), "B T M")
    args.bind("M", width, "'config.model_dim'")
    return args, args.array(name, x, "B T M", FLOATS)


def token_numbers(op: str, tokens: Any, name: str = "tokens") -> tuple[Args, Int[Array, "B T"]]:
    """Returns the checks of a model's call, and its checked tokens.

    Raises:
        TypeError: If the argument `name` is no array of integers.
        ValueError: If its shape is not [B, T].
    """
    args = Args(op, name, np.empty((0, 0)), "B T")
    return args, args.array(name, tokens, "B T", INT32)


def selected_keys(args: Args, indices: Any) -> Int[Array, "B T K"] | None:
    """Returns the checked argument 'indices', which may be None."""
    return None if indices is None else args.array("indices", indices, "B T K", INT32)


def token_counts(args: Args, counts: Any, length: int) -> Int[Array, "B"] | None:
    """Returns the checked argument 'counts', clipped to 0..length; it may be None."""
    return None if counts is None else jnp.clip(args.array("counts", counts, "B", INT32), 0, length)


def check_cache(args: Args, name: str, cache: Any, *kinds: type) -> Int[Array, "B"]:
    """Returns the lengths of a cache of one of these types with as many requests as the call."""
    check_type(args.op, name, cache, kinds)
    return args.array(f"{name}.lengths", cache.lengths, "B", INT32)
