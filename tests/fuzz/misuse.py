"""Makes wrong arguments from the annotations of a public function, which say what is right."""

from __future__ import annotations

import dataclasses
import inspect
import typing
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from fuzz.annotations import dims_of, kinds_of, letters_of
from fuzz.draw import Call, Draw

if TYPE_CHECKING:
    from collections.abc import Callable

# Values and the annotated types that may accept them. All other arguments have to refuse them.
POOL: tuple[tuple[Any, str], ...] = (
    (None, "NoneType"),
    (True, "bool"),
    (0, "int float"),
    (-1, "position float"),
    (2**31, "int float"),
    (2**70, "int float"),
    (10**400, "int"),
    (np.uint64(2**63), "int float"),
    (np.int8(-3), "position float"),
    (0.5, "float"),
    (float("nan"), ""),
    (float("-inf"), ""),
    (np.float64(1e39), "float"),
    ("text", ""),
    (b"xla", ""),
    ((), ""),
    ((1, 2, 3), ""),
    ((1, None), ""),
    ([0.5], ""),
    ({"a": 1}, ""),
    ({1}, ""),
    (object(), ""),
    (..., ""),
    (1 + 1j, ""),
    (slice(None), ""),
    (np.zeros(3, np.complex64), ""),
    (np.array("text"), ""),
    (np.array(None, object), ""),
    (np.datetime64("2026-01-01"), ""),
    (np.ma.masked_array([1.0, 2.0], [False, True]), ""),
)


def mistakes(call: Call, r: Draw) -> tuple[dict[str, Any], set[str], bool]:
    """Makes a mistake in one argument.

    Returns:
        The arguments, the names of which the message has to contain one, and whether the call may
        succeed all the same.
    """
    hints = typing.get_type_hints(call.fn, include_extras=True)
    parameters = inspect.signature(call.fn).parameters
    names = [n for n in parameters if n != "self"]
    name = r.one(*names)
    value = call.kwargs.get(name)
    if dataclasses.is_dataclass(value):
        return _mistake_inside(call, name, value, r)
    if isinstance(value, np.ndarray) and r.chance(0.7):
        wrong, others = _wrong_array(call, hints, name, value, r)
        return {**call.kwargs, name: wrong}, {name, *others}, False
    wrong, accepted_by = r.one(*POOL)
    if r.chance(0.05):
        wrong, accepted_by = jax.random.key(0), ""
    may_pass = (
        bool(kinds_of(hints[name]) & set(accepted_by.split()))
        or wrong is parameters[name].default
        or (isinstance(wrong, np.integer) and _may_be_scalar(hints[name]))
    )
    # An argument that was or is absent can lead to a complaint about any other argument.
    blamed = set(names) if value is None or wrong is None else {name}
    return {**call.kwargs, name: wrong}, blamed, may_pass


def _may_be_scalar(hint: Any) -> bool:
    """Returns whether an array without a batch axis has no axis at all."""
    return any(set(dims) <= {"B", "..."} for dims in dims_of(hint))


def _mistake_inside(
    call: Call, name: str, value: Any, r: Draw
) -> tuple[dict[str, Any], set[str], bool]:
    """Makes a mistake in one of the arrays of a cache or a block mask."""
    fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    inner = r.one(*[n for n, x in fields.items() if hasattr(x, "dtype")])
    wrong = r.one("text", None, *(make(np.asarray(fields[inner])) for make in _WRONG_TYPES))
    changed = dataclasses.replace(value, **{inner: wrong})
    return {**call.kwargs, name: changed}, {name, inner}, False


def _other_dtype(x: np.ndarray) -> np.ndarray:
    return np.zeros(x.shape, bool if x.dtype != bool else np.int32)


_WRONG_TYPES: tuple[Callable[[np.ndarray], Any], ...] = (
    _other_dtype,
    lambda x: np.zeros(x.shape, np.complex64),
    lambda x: np.full(x.shape, "text"),
    lambda x: np.full(x.shape, None, object),
    lambda x: jnp.zeros(x.shape, jnp.float8_e5m2),
    lambda x: jax.random.split(jax.random.key(0), x.shape),
    lambda x: np.ma.masked_array(np.asarray(x, np.float32), np.ones(x.shape, bool)),
    lambda x: x.astype(np.float32).tolist(),
)


def _wrong_array(
    call: Call, hints: dict[str, Any], name: str, x: np.ndarray, r: Draw
) -> tuple[Any, set[str]]:
    """Returns a wrong array or another object, and other arguments that the message may name."""
    bound: dict[str, dict[str, int]] = {}
    for other, value in call.kwargs.items():
        for dims in dims_of(hints.get(other)):
            if isinstance(value, np.ndarray) and len(dims) == value.ndim:
                for letter, size in zip(dims, value.shape, strict=True):
                    bound.setdefault(letter, {})[other] = size
    own = [dims for dims in dims_of(hints[name]) if len(dims) == x.ndim]
    shared = [
        i
        for dims in own
        for i, d in enumerate(dims)
        if d.isalpha()
        and len(bound[d]) > 1
        # Where there is "...", an axis of size one may be broadcast.
        and ("..." not in dims or min(bound[d].values()) > 1)
    ]
    if shared and r.chance(0.5):
        axis = r.one(*shared)
        letter = own[0][axis]
        arrays = {n for n, value in call.kwargs.items() if isinstance(value, np.ndarray)}
        return np.repeat(x, 2, axis), {n for n in arrays if letter in letters_of(hints.get(n))}
    if not any("..." in dims for dims in dims_of(hints[name])) and r.chance(0.3):
        scalar = "position" not in kinds_of(hints[name]) and r.chance()
        scalar &= not _may_be_scalar(hints[name])
        return np.zeros((), x.dtype) if scalar else x[None, None, None], set(hints)
    return r.one(*_WRONG_TYPES)(x), set()
