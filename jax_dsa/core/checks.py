"""Argument checks.

A message names the function that the user called, the argument, its value and what is expected.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import operator
import os
import re
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

from jax_dsa.core import compat
from jax_dsa.core.axis_order import Given, exchanged, heads_divide, sizes_of
from jax_dsa.core.call import Call, in_plain_xla

if TYPE_CHECKING:
    from collections.abc import Sequence

T = TypeVar("T")

FLOATS = (jnp.bfloat16, jnp.float16, jnp.float32, jnp.float64)
WIDE_FLOATS = (jnp.float32, jnp.float64)
FP8 = jnp.float8_e4m3fn
INT32 = (jnp.int32,)
_HUGE, _TINY = (float(getattr(jnp.finfo(jnp.float32), n)) for n in ("max", "tiny"))
LARGEST = 2**31 - 1  # Limit of sizes, positions and integer options, so that int32 holds them.
BOOL = (jnp.bool_,)


def _names(dtypes: Sequence[Any]) -> str:
    return " or ".join(jnp.dtype(d).name for d in dtypes)


def _is_real(x: Any) -> bool:
    if isinstance(x, int | float):
        return True
    return jnp.issubdtype(x.dtype, jnp.integer) or jnp.issubdtype(x.dtype, jnp.floating)


def _is_array(x: Any) -> bool:
    return isinstance(x, jax.Array | np.ndarray)


def type_of(x: Any) -> str:
    """Returns the type of `x` for a message; that of an array is its dtype and shape."""
    return f"an array {x.dtype}{list(x.shape)}" if _is_array(x) else type(x).__name__


def shown(x: Any) -> str:
    """Returns `x` as text for a message; an array, a cache or a tuple of arrays by its type."""
    if isinstance(x, tuple | list) and any(map(_is_array, x)):
        return f"a {type(x).__name__} of {len(x)}"
    is_instance = dataclasses.is_dataclass(x) and not isinstance(x, type)
    return type_of(x) if _is_array(x) or is_instance else repr(x)


def _typed(x: Any) -> str:
    return f"{shown(x)} ({type(x).__name__})"


def _static(kind: str, x: Any) -> str:
    """Returns `kind`, such as "an int", for a message; with the way out if `x` is no number yet.

    A kind that names no int, bool or float is returned as it is.
    """
    static = re.sub(r"\ban? (int|bool|float)\b", r"a static \1", kind)
    if static == kind:
        return kind
    if export.is_symbolic_dim(x):
        return f"{kind}, no symbol: export once for each size"
    if not isinstance(x, jax.core.Tracer):
        return kind
    return f"{static}; under jax.jit, pass it by static_argnames or functools.partial"


def as_array(x: Any) -> jax.Array | np.ndarray | np.generic | None:
    """Returns `x` if it is an array, or what its `__jax_array__` returns; otherwise None."""
    if isinstance(x, jax.Array | np.ndarray | np.generic):
        return None if isinstance(x, np.ma.MaskedArray) else x  # JAX rejects them.
    convert = getattr(x, "__jax_array__", None)
    return None if convert is None else convert()


def _without_batch(dims: str) -> str:
    """Returns dims, or several choices of dims, without the axis B."""
    choices = (choice.split() for choice in dims.split(" or "))
    return " or ".join(" ".join(d for d in choice if d != "B") for choice in choices)


class Args:
    """Checks the arguments of one call. The first use of a dimension's letter sets its size.

    The leading operand decides whether the call has a batch axis. If it has one axis less than its
    dims, the batch axis "B" is absent from every argument. `array` then adds it, and `restore`
    removes it from the results.

    Attributes:
        op: the public function, for messages.
        sizes: the size of each letter so far.
        batched: whether the arguments have a batch axis.
    """

    def __init__(self, op: str, name: str, lead: Any, dims: str) -> None:
        """Starts the checks of a call of `op` whose leading operand is the argument `name`."""
        self.op = op
        self.sizes: dict[str, int] = {}
        self._bound_by: dict[str, str] = {}
        self._given: list[Given] = []  # the arrays so far
        self._bound: dict[str, int] = {}  # the sizes that no array determines
        self._mesh: tuple[Any, str] | None = None  # the Explicit mesh, and what determines it
        rank = len(dims.split())
        argument, lead = lead, as_array(lead)
        if lead is None:
            raise TypeError(f"{op}: argument '{name}' is {type(argument).__name__}, want an array")
        if lead.ndim not in (rank, rank - 1):
            raise ValueError(
                f"{op}: argument '{name}' has shape {lead.shape}, want {self._expected(dims)} "
                f"(or without the batch axis B)"
            )
        self.batched = lead.ndim == rank

    @property
    def batch(self) -> int:
        """The size B of the batch axis; 1 if the call has none."""
        return self.sizes["B"] if self.batched else 1

    def bind(self, letter: str, size: int, source: str) -> None:
        """Sets the size of a letter, where `source` says in messages what determines it."""
        self.sizes[letter] = self._bound[letter] = size
        self._bound_by[letter] = source

    def array(
        self,
        name: str,
        x: Any,
        dims: str,
        dtypes: Sequence[Any],
        hint: str = "",
        otherwise: str = "",
    ) -> jax.Array:
        """Returns `x` as an array whose axes match `dims` (letters or numbers).

        If the call has no batch axis, an axis of length 1 is added for "B".

        Args:
            name: the argument's name.
            x: the argument.
            dims: its dims, or several of different ranks, as "B or B T".
            dtypes: the dtypes that it may have.
            hint: the end of the message about a wrong dtype.
            otherwise: what the argument may be instead of an array, for the message about a wrong
                shape.
        """
        x = self.typed(name, x, dtypes, hint)
        own = dims if self.batched else _without_batch(dims)
        first, *others = own.split(" or ")
        tokens = first.split()
        for other in others:
            if len(axes := other.split()) == x.ndim:
                tokens = axes
        alternative = f"{otherwise} or an array " if otherwise else ""
        if x.ndim != len(tokens):
            raise ValueError(
                f"{self.op}: argument '{name}' has shape {x.shape}, want {alternative}"
                f"{self._expected(own)}{self._group_hint(name, x.shape, tokens)}"
            )
        self._given.append(Given(name, x.shape, tuple(tokens)))
        for token, size in zip(tokens, x.shape, strict=True):
            expected = int(token) if token.isdigit() else self.sizes.setdefault(token, size)
            if isinstance(size, int) and size > LARGEST:
                self.shape(name, x, False, "axes of less than 2**31")
            if size != expected:
                raise self.disagreement(
                    f"argument '{name}' has shape {x.shape}, want {alternative}"
                    f"{self._expected(own)}"
                )
            self._bound_by.setdefault(token, f"'{name}'")
        if not self.batched and "B" in (axes := dims.split()):
            x = jnp.expand_dims(x, axes.index("B"))
        return x

    def typed(self, name: str, x: Any, dtypes: Sequence[Any], hint: str = "") -> jax.Array:
        """Returns `x` as an array of one of `dtypes`, without a check of its shape.

        If int32 is expected, integers of another width are converted. A number outside int32
        becomes the nearest end of its range.
        """
        argument, x = x, as_array(x)
        if x is None:
            raise TypeError(
                f"{self.op}: argument '{name}' is {type(argument).__name__}, want an array of "
                f"{_names(dtypes)}"
            )
        dtype = x.dtype
        if dtypes is INT32 and dtype != jnp.int32 and jnp.issubdtype(dtype, jnp.integer):
            numbers: Any = np if isinstance(x, np.ndarray | np.generic) else jnp
            own, info = jnp.iinfo(dtype), jnp.iinfo(jnp.int32)
            low, high = max(info.min, own.min), min(info.max, own.max)
            x = numbers.clip(x, low, high).astype(jnp.int32)
        if isinstance(x, np.ndarray | np.generic):
            with contextlib.suppress(TypeError):  # A dtype that JAX lacks is rejected below.
                x = jnp.asarray(x)  # Without x64, float64 becomes float32.
        if x.dtype not in dtypes:
            raise TypeError(
                f"{self.op}: argument '{name}' has dtype {dtype}, want {_names(dtypes)}{hint}"
            )
        self.one_mesh(f"argument '{name}'", x)
        return x

    def one_mesh(self, what: str, x: Any) -> None:
        """Raises ValueError if `x` is on another Explicit mesh than the arrays before it.

        Args:
            what: what `x` is, for the message.
            x: an array.
        """
        mesh = compat.explicit_mesh(x)
        if mesh is None:
            return
        if self._mesh is None:
            current = jax.sharding.get_abstract_mesh()
            self._mesh = (mesh, what) if current.empty else (current, "jax.set_mesh")
        first, source = self._mesh
        # The types of axes may differ, because some are Manual inside `shard_map`.
        if mesh.shape != first.shape:
            raise ValueError(
                f"{self.op}: {what} is on the mesh {dict(mesh.shape)}, want the mesh "
                f"{dict(first.shape)} of {source}; move the arrays to one mesh with jax.device_put "
                f"or jax.reshard"
            )

    def option(self, name: str, value: Any, ok: bool, expected: str) -> None:
        """Raises ValueError unless `ok`."""
        if not ok:
            raise ValueError(f"{self.op}: argument '{name}' is {shown(value)}, want {expected}")

    def shape(self, name: str, x: Any, fits: bool, expected: str, dims: str = "") -> None:
        """Raises ValueError unless the shape of `x` `fits`.

        Args:
            name: the argument's name.
            x: the argument, an array.
            fits: whether its shape is right.
            expected: the right shape, for the message.
            dims: its dims, also with alternatives as "1|T", if they are related to other arguments.
                An absent batch axis is ignored.
        """
        tokens = tuple(dims.split()[not self.batched :])
        if dims and len(tokens) == x.ndim:
            self._given.append(Given(name, x.shape, tokens))
        if not fits:
            raise self.disagreement(f"argument '{name}' has shape {x.shape}, want {expected}")

    def disagreement(self, message: str) -> ValueError:
        """Returns the error for sizes of several arguments that do not fit each other.

        If axes of an argument are exchanged, the error names this argument. Otherwise it has the
        message, which names the last argument.
        """
        wrong = exchanged(self._given, self._bound)
        if not wrong:
            return ValueError(f"{self.op}: {message}")
        first, *others = wrong
        passed = first.other_dims
        if others:
            passed += f" (and {' and '.join(repr(x.name) for x in others)} in the same order)"
        right = sizes_of([x for x in self._given if x not in wrong])
        known = [f"{d}={right[d][0]} (from '{right[d][1]}')" for d in first.dims if d in right]
        want = f"[{', '.join(first.dims)}]" + (f" with {', '.join(known)}" if known else "")
        heads = ""
        if not heads_divide(self.sizes):
            n, g = self.sizes["N"], self.sizes["G"]
            heads = f"N={n} heads for G={g} groups are not a multiple of G; "
        return ValueError(
            f"{self.op}: argument '{first.name}' has shape {first.shape}, want "
            f"{want}; {heads}did you pass {passed}?"
        )

    def integer(self, name: str, value: Any, low: int, high: int = LARGEST, want: str = "") -> int:
        """Returns `value` as a static int in low..high; a message calls this `want` if given."""
        try:
            if isinstance(value, bool | np.bool_):
                raise TypeError
            number = operator.index(value)
        except TypeError:
            raise TypeError(
                f"{self.op}: argument '{name}' is {_typed(value)}, want "
                f"{_static(want or 'an int', value)}"
            ) from None
        self.option(name, number, low <= number <= high, want or f"int in {low}..{high}")
        return number

    def flag(self, name: str, value: Any) -> bool:
        """Returns `value` as a static bool."""
        if not isinstance(value, bool | np.bool_):
            raise TypeError(
                f"{self.op}: argument '{name}' is {_typed(value)}, want {_static('a bool', value)}"
            )
        return bool(value)

    def real(self, name: str, value: Any) -> float:
        """Returns `value` as a static float that float32 can hold without flushing it to 0."""
        x = value if isinstance(value, int | float) else as_array(value)
        known = not isinstance(value, bool) and x is not None and np.ndim(x) == 0
        if not known or isinstance(x, jax.core.Tracer) or not _is_real(x):
            raise TypeError(
                f"{self.op}: argument '{name}' is {_typed(value)}, want {_static('a float', value)}"
            )
        try:
            number = float(x)  # type: ignore[arg-type]
        except OverflowError:  # A Python int may be too large.
            number = math.inf
        held = number == 0 or _TINY <= abs(number) <= _HUGE
        self.option(name, number, held, "0 or a finite normal float32 number")
        return number

    def dtype(self, name: str, value: Any, dtypes: Sequence[Any]) -> Any:
        """Returns `value`, which may be anything that names a dtype, as one of `dtypes`."""
        try:
            if value is None:  # NumPy would take it as float64.
                raise TypeError
            dtype = jnp.dtype(value)
        except (TypeError, ValueError):
            raise TypeError(
                f"{self.op}: argument '{name}' is {shown(value)}, want {_names(dtypes)}"
            ) from None
        known = [jnp.dtype(d) for d in dtypes]
        self.option(name, dtype.name, dtype in known, _names(dtypes))
        return dtype

    def call(self, implementation: Any) -> Call:
        """Returns the call with the user's choice of an implementation.

        The environment variable JAX_DSA_IMPL decides if the user makes no choice.
        """
        name, value = "implementation", implementation
        if value is None:
            value, name = os.environ.get("JAX_DSA_IMPL") or None, "JAX_DSA_IMPL"
        known = value is None or (isinstance(value, str) and value in ("cuda", "xla"))
        self.option(name, value, known, "None, 'cuda' or 'xla'")
        return Call(self.op, "plain" if in_plain_xla() else value)

    def restore(self, results: T) -> T:
        """Returns a tuple of results, without their batch axis if the arguments have none."""
        if self.batched:
            return results
        return jax.tree.map(lambda x: jnp.squeeze(x, 0), results)

    def size(self, letter: str) -> str:
        """Returns the size of a letter and the argument that determines it, for a message."""
        return f"{letter}={self.sizes[letter]} (from {self._bound_by[letter]})"

    def _group_hint(self, name: str, shape: tuple[int, ...], tokens: list[str]) -> str:
        """Returns a question for a message, if only an axis of KV heads is missing or too many."""

        def fits(sizes: tuple[int, ...], dims: list[str]) -> bool:
            pairs = zip(sizes, dims, strict=False)
            return len(sizes) == len(dims) and all(self.sizes.get(d, n) == n for n, d in pairs)

        heads = next((i for i, d in enumerate(tokens) if d in ("G", "1")), None)
        if heads is not None and fits(shape, tokens[:heads] + tokens[heads + 1 :]):
            return f"; did you mean {name}[{':, ' * heads}None]?"
        if heads is None and shape[-2:-1] == (1,) and fits(shape[:-2] + shape[-1:], tokens):
            return f"; did you mean {name}[{':, ' * (len(shape) - 2)}0]?"
        return ""

    def _expected(self, dims: str) -> str:
        """Returns dims and the sizes of their letters that are known, for a message."""
        known = [self.size(d) for d in dict.fromkeys(dims.split()) if d in self.sizes]
        shapes = " or ".join(f"[{', '.join(choice.split())}]" for choice in dims.split(" or "))
        return shapes + (f" with {', '.join(known)}" if known else "")
