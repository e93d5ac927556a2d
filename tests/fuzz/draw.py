"""A call with its expected results, and the random choices that make one."""

from __future__ import annotations

import dataclasses
import typing
import zlib
from typing import TYPE_CHECKING, Any

import jax
import ml_dtypes
import numpy as np

from fuzz.annotations import dims_of
from jax_dsa import FlatCache, PagedCache

if TYPE_CHECKING:
    from collections.abc import Callable

INT_MIN, INT_MAX = -(2**31), 2**31 - 1
bf16, e4m3 = np.dtype(ml_dtypes.bfloat16), np.dtype(ml_dtypes.float8_e4m3fn)
f16, f32, f64, i32 = (np.dtype(x) for x in (np.float16, np.float32, np.float64, np.int32))


@dataclasses.dataclass
class Call:
    """A call of a public function and its expected results.

    Attributes:
        fn: The function, or a wrapper with the same signature.
        kwargs: The arguments by name: NumPy arrays, caches of NumPy arrays, and options.
        want: Computes the expected results in float64, one per leaf, from `kwargs`, perhaps with
            other values and dtypes, and from what `hold` returns.
        dtypes: The dtypes of the leaves of the result.
        diff: The arguments that have a gradient.
        constant: The arguments whose gradient is zero.
        poison: The arguments that may hold NaN where they are not read.
        hold: Computes what the derivative treats as constant (a selection, a teacher), by name.
        peak: The largest magnitude of an exponent.
        low: The dtype that intermediate values are rounded to, if it is lower than the results'.
        exact: Whether no leaf is rounded.
        signs: Whether all cotangents have one magnitude, so that quantisation does not change them.
    """

    fn: Callable[..., Any]
    kwargs: dict[str, Any]
    want: Callable[..., Any]
    dtypes: tuple[np.dtype, ...]
    diff: tuple[str, ...] = ()
    constant: tuple[str, ...] = ()
    poison: tuple[str, ...] = ()
    hold: Callable[..., dict[str, Any]] | None = None
    peak: float = 1.0
    low: np.dtype | None = None
    exact: bool = False
    signs: bool = False

    @property
    def name(self) -> str:
        """The function's name in error messages."""
        if "self" in self.kwargs:
            return f"{type(self.kwargs['self']).__name__}.{self.fn.__name__}"
        return self.fn.__name__

    @property
    def x64(self) -> bool:
        """Whether an argument is float64, which JAX has to be configured for."""
        return any(x.dtype == f64 for x in jax.tree.leaves(self.arrays))

    @property
    def arrays(self) -> dict[str, Any]:
        """The arguments that `jit` traces, by name."""
        return {name: x for name, x in self.kwargs.items() if is_traced(x)}

    @property
    def options(self) -> dict[str, Any]:
        """The other arguments, by name."""
        return {name: x for name, x in self.kwargs.items() if not is_traced(x)}

    def results(self, /, held_at: dict[str, Any] | None = None, **changes: Any) -> list[np.ndarray]:
        """Computes the expected results.

        Args:
            held_at: The arguments that the constants of the derivative are computed from. Default:
                the same arguments as the results.
            **changes: Arguments that replace the drawn ones.
        """
        kwargs = {**self.kwargs, **changes}
        held = {} if self.hold is None else self.hold(**(held_at or kwargs))
        with np.errstate(all="ignore"):
            return [np.asarray(y) for y in self.want(**kwargs, **held)]

    def tolerance(self, dtype: Any, roundings: float = 4) -> float:
        """Returns the relative tolerance of a result of this dtype.

        It covers `roundings` roundings to the dtype and those of sums and exponents in float32, or
        in float64 if an argument is float64.
        """
        if self.exact or not is_float(dtype):
            return 0.0
        inner = np.finfo(f64 if self.x64 else f32).eps
        own = max(_eps(d) for d in (dtype, self.low or dtype))
        return roundings * (own + 8 * inner * (1 + self.peak))

    def gradient_tolerance(self, roundings: float = 32) -> float:
        """Returns the tolerance of gradients, which depend on results in the coarsest dtype."""
        floats = [x.dtype for x in jax.tree.leaves(self.arrays) if is_float(x.dtype)]
        return max(self.tolerance(dtype, roundings) for dtype in floats)


def _eps(dtype: Any) -> float:
    return float(ml_dtypes.finfo(dtype).eps)


def is_traced(x: Any) -> bool:
    """Returns whether an argument holds arrays."""
    return any(isinstance(leaf, np.ndarray | jax.Array) for leaf in jax.tree.leaves(x))


def is_float(dtype: Any) -> bool:
    """Returns whether a dtype of NumPy or JAX is a float."""
    return jax.dtypes.issubdtype(dtype, np.floating)


class Draw:
    """Random choices that depend only on the operator, the kind and the seeds.

    Attributes:
        gradient: The call has to be differentiable.
        edge: Axes may be empty, and options may be at the ends of their ranges.
        hostile: Arrays may hold NaN and infinities.
        kernel: The CUDA kernels have to support the call's sizes and dtypes.
    """

    def __init__(self, operator: str, kind: str, *seeds: int) -> None:
        words = [zlib.crc32(word.encode()) for word in (operator, kind)]
        self.rng = np.random.default_rng([*words, *seeds])
        self.gradient, self.edge = "gradient" in kind, kind == "edge"
        self.hostile = kind in ("value", "vmap", "kernel")
        self.kernel = kind.startswith("kernel")

    def chance(self, p: float = 0.5) -> bool:
        """Returns True with probability `p`."""
        return bool(self.rng.random() < p)

    def one(self, *choices: Any) -> Any:
        """Returns one of the choices."""
        return choices[self.rng.integers(len(choices))]

    def dims(
        self, on_kernel: dict[str, tuple[int, ...]] | None = None, **max_sizes: int
    ) -> list[int]:
        """Returns sizes from 1 to those given; at the edge up to two sizes are 0."""
        sizes = {name: int(self.rng.integers(1, high + 1)) for name, high in max_sizes.items()}
        if self.kernel:
            own = {n: choices for n, choices in (on_kernel or {}).items() if n in sizes}
            sizes |= {name: self.one(*choices) for name, choices in own.items()}
        if self.edge:
            empty = self.rng.permutation(list(sizes))[: self.one(0, 0, 0, 1, 2)]
            sizes |= dict.fromkeys(empty.tolist(), 0)
        return list(sizes.values())

    def dtype(self) -> np.dtype:
        """Returns a dtype for q, k and v."""
        return bf16 if self.kernel else self.one(f32, f32, f32, bf16, f16, f64)

    def flag(self, p: float = 0.5) -> Any:
        """Returns a bool or a NumPy bool."""
        return self.one(bool, bool, np.bool_)(self.chance(p))

    def integer(self, value: int) -> Any:
        """Returns `value` as an int or as a NumPy integer that can hold it."""
        kinds = [np.int8, np.uint8, np.int16, np.int32, np.int64, np.uint64]
        fits = [k for k in kinds if np.iinfo(k).min <= value <= np.iinfo(k).max]
        return self.one(int, int, int, *fits)(value)

    def below(self, size: int) -> int:
        """Returns an int in 1..size; 1 if the size is 0."""
        return int(self.rng.integers(1, max(1, size) + 1))

    def scale(self) -> Any:
        """Returns a scale of scores; None is the default."""
        choices = [None, None, 0.5, 1, np.float32(0.25), np.float64(0.3), np.float16(0.5)]
        choices += [] if self.kernel else [-0.5, 0.0]
        choices += [1e-300, 1e30, 1e39, 1e308, -(10**39)] if self.edge else []
        return self.one(*choices)

    def normal(self, dtype: np.dtype, *shape: int) -> np.ndarray:
        """Returns normally distributed floats."""
        return self.rng.normal(size=shape).astype(dtype)

    def floats(self, dtype: np.dtype, *shape: int) -> np.ndarray:
        """Returns normally distributed floats, with NaN in some rows of hostile calls."""
        x = self.normal(dtype, *shape)
        if self.hostile and self.chance(0.3) and len(shape) > 1:
            x[self.rng.random(shape[:-1]) < 0.1] = np.nan
        return x

    def odd(self, dtype: np.dtype, *shape: int) -> np.ndarray:
        """Returns the numbers -3, -1, 1 and 3.

        Their products and sums are exact, ties are frequent, and the sum of an odd number of them
        is not 0.
        """
        return self.rng.choice([-3, -1, 1, 3], size=shape).astype(dtype)

    def signs(self, shape: tuple[int, ...]) -> np.ndarray:
        """Returns the numbers -1 and 1."""
        return self.rng.choice([-1.0, 1.0], size=shape)

    def powers(self, dtype: np.dtype, *shape: int) -> np.ndarray:
        """Returns the numbers 1/2, 1 and 2."""
        return self.rng.choice([0.5, 1, 2], size=shape).astype(dtype)

    def limits(self, dtype: np.dtype, *shape: int) -> np.ndarray:
        """Returns logits, some of which may be infinite."""
        x = self.rng.normal(size=shape)
        if self.chance():
            x = np.where(self.rng.random(shape) < 0.3, self.rng.choice([-np.inf, np.inf], shape), x)
        return x.astype(dtype)

    def bools(self, *shape: int) -> np.ndarray:
        """Returns bools of which most, few or none are True."""
        return self.rng.random(shape) < self.one(0.8, 0.8, 0.3, 0.0)

    def positions(self, size: int, *shape: int) -> np.ndarray:
        """Returns int32 from -1 to `size`, perhaps with values near the ends of int32."""
        x = self.rng.integers(-1, size + 1, size=shape, endpoint=True)
        if self.chance():
            ends = [INT_MIN, INT_MIN, INT_MIN + 1, -1, INT_MAX - size, INT_MAX - 1, INT_MAX]
            x = np.where(self.rng.random(shape) < 0.5, self.rng.choice(ends, shape), x)
        return x.astype(i32)

    def maybe(self, draw: Callable[..., Any], *args: Any) -> Any:
        """Returns the result of `draw`, or None."""
        return draw(*args) if self.chance() else None


def without_batch(call: Call) -> Call:
    """Returns the call of the first batch entry, without the batch axis."""
    hints = typing.get_type_hints(call.fn, include_extras=True)

    def has_batch(name: str) -> bool:
        x = call.kwargs[name]
        first = {dims[0] for dims in dims_of(hints[name]) if dims}
        return isinstance(x, FlatCache | PagedCache | tuple) or bool(first & {"B", "1|B"})

    def drop(x: Any) -> Any:
        if isinstance(x, PagedCache):
            return dataclasses.replace(
                x, page_table=x.page_table[0], lengths=np.asarray(x.lengths[0])
            )
        return jax.tree.map(lambda y: np.asarray(y[0]), x)

    def add(x: Any) -> Any:
        if isinstance(x, PagedCache):
            return dataclasses.replace(x, page_table=x.page_table[None], lengths=x.lengths[None])
        return jax.tree.map(lambda y: y[None], x)

    names = [n for n, x in call.kwargs.items() if is_traced(x) and has_batch(n)]

    def batched(fn: Any) -> Any:
        def run(**kwargs: Any) -> Any:
            return fn(**{n: add(x) if n in names else x for n, x in kwargs.items()})

        return run

    want, hold = batched(call.want), call.hold and batched(call.hold)
    kwargs = {n: drop(x) if n in names else x for n, x in call.kwargs.items()}
    return dataclasses.replace(
        call,
        kwargs=kwargs,
        hold=hold,
        want=lambda **k: [y if np.ndim(y) == 0 else y[0] for y in want(**k)],
    )


def peak(scale: float | None, q: np.ndarray, k: np.ndarray) -> float:
    """Returns an upper bound of the scores' magnitude."""
    q, k = (np.nan_to_num(np.asarray(x, f64), posinf=0, neginf=0) for x in (q, k))
    scale = max(1, q.shape[-1]) ** -0.5 if scale is None else abs(float(scale))
    norms = (np.sqrt((x * x).sum(-1)).max(initial=0) for x in (q, k))
    return scale * float(np.prod(list(norms)))
