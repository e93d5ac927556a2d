"""Checks of the arguments that the modules share, with the messages of the operators."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from jax_dsa.core import compat
from jax_dsa.core.checks import FLOATS, INT32, Args, type_of
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
        raise TypeError(f"{op}: argument '{name}' is {type_of(value)}, want {want}")


def hidden_states(
    op: str, module: nnx.Module, x: Any, width: int
) -> tuple[Args, Float[Array, "B T M"]]:
    """Returns the checks of a module's call, and its checked hidden states of this width M.

    Raises:
        TypeError: If the argument 'x' is no floating-point array.
        ValueError: If its shape is not [B, T, M], or the parameters are on another Explicit mesh.
    """
    args = Args(op, "x", np.empty((0, 0, 0)), "B T M")
    args.bind("M", width, "'config.model_dim'")
    x = args.array("x", x, "B T M", FLOATS)
    _check_mesh(args, module, x)
    return args, x


def token_numbers(
    op: str, module: nnx.Module | None, tokens: Any, name: str = "tokens"
) -> tuple[Args, Int[Array, "B T"]]:
    """Returns the checks of a model's call, and its checked tokens.

    Raises:
        TypeError: If the argument `name` is no array of integers.
        ValueError: If its shape is not [B, T], or the parameters are on another Explicit mesh.
    """
    args = Args(op, name, np.empty((0, 0)), "B T")
    tokens = args.array(name, tokens, "B T", INT32)
    _check_mesh(args, module, tokens)
    return args, tokens


def _check_mesh(args: Args, module: nnx.Module | None, x: Array) -> None:
    """Raises ValueError if a parameter is on another Explicit mesh than the input `x`."""
    if module is None or compat.explicit_mesh(x) is None:
        return
    for path, parameter in nnx.to_flat_state(nnx.state(module, nnx.Param)):
        args.one_mesh(f"parameter '{'.'.join(map(str, path))}'", parameter[...])


def check_policy(op: str, policy: Any) -> None:
    """Raises TypeError unless 'remat_policy' is None or a function, as `jax.checkpoint` needs.

    `jax.checkpoint` itself would complain only in the backward pass, and without a name.
    """
    if policy is not None and not callable(policy):
        name = policy if isinstance(policy, str) else "selection"
        raise TypeError(
            f"{op}: argument 'remat_policy' is {policy!r}, want None or a policy, such as "
            f'jax_dsa.training.remat_policy("{name}") or one of jax.checkpoint_policies'
        )


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


def check_presence(args: Args, name: str, value: object, want: bool) -> None:
    """Raises ValueError unless the part `name` of a cache is there, or None, as the layer needs."""
    got, expected = (("None", "given")[has] for has in (value is not None, want))
    args.option(name, got, got == expected, f"{expected} in this layer")


def check_flags(args: Args, config: Any) -> None:
    """Raises TypeError for a field that has a bool as its default, but not as its value."""
    for field in dataclasses.fields(config):
        if isinstance(field.default, bool):
            args.flag(field.name, getattr(config, field.name))


def check_rotation(args: Args, config: Any) -> None:
    """Raises unless a configuration's `rope_factor` and `rope_frequencies` are finite floats."""
    args.real("rope_factor", config.rope_factor)
    if (frequencies := config.rope_frequencies) is not None:
        known = isinstance(frequencies, tuple)
        args.option("rope_frequencies", frequencies, known, "a tuple of floats, or None")
        for frequency in frequencies:
            args.real("rope_frequencies", frequency)
