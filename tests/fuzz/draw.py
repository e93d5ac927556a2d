"""What a call is, and the random choices that make one."""

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
    """One call of a public function, and what it has to give.

    Attributes:
        fn: the function, or one around it with the same signature.
        kwargs: its arguments by name: NumPy arrays, caches of them, and options.
        want: takes `kwargs`, perhaps in other values and dtypes, and what `hold` gives; gives every
            leaf of the result in float64.
        dtypes: of the leaves of the result.
        diff: the arguments that have a gradient.
        constant: those whose gradient is zero.
        poison: those that may hold NaN where nothing reads them.
        hold: what the derivative takes for constant (a selection, a teacher), by name.
        peak: the largest magnitude in an exponent.
        low: what is rounded to this dtype on the way to wider results.
        exact: whether every leaf is free of rounding.
        signs: whether cotangents are drawn of one magnitude, which quantisation keeps.
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
        """The function, as its messages have it."""
        if "self" in self.kwargs:
            return f"{type(self.kwargs['self']).__name__}.{self.fn.__name__}"
        return self.fn.__name__

    @property
    def x64(self) -> bool:
        """Whether it takes float64, which JAX has to be told."""
        return any(x.dtype == f64 for x in jax.tree.leaves(self.arrays))

    @property
    def arrays(self) -> dict[str, Any]:
        """The arguments that `jit` traces."""
        return {name: x for name, x in self.kwargs.items() if is_traced(x)}

    @property
    def options(self) -> dict[str, Any]:
        """The other arguments."""
        return {name: x for name, x in self.kwargs.items() if not is_traced(x)}

    def results(self, /, held_at: dict[str, Any] | None = None, **changes: Any) -> list[np.ndarray]:
        """What `want` gives, with some arguments in place of the drawn ones; `held_at` are the
        arguments that its constants are of, by default the same.
        """
        kwargs = {**self.kwargs, **changes}
        held = {} if self.hold is None else self.hold(**(held_at or kwargs))
        with np.errstate(all="ignore"):
            return [np.asarray(y) for y in self.want(**kwargs, **held)]

    def tolerance(self, dtype: Any, roundings: float = 4) -> float:
        """Of a result of this dtype: so many roundings of it, and those of the float32 (or float64)
        sums and exponents behind it.
        """
        if self.exact or not is_float(dtype):
            return 0.0
        inner = np.finfo(f64 if self.x64 else f32).eps
        own = max(_eps(d) for d in (dtype, self.low or dtype))
        return roundings * (own + 8 * inner * (1 + self.peak))

    def gradient_tolerance(self, roundings: float = 32) -> float:
        """Of gradients, which read results that were rounded to the coarsest dtype."""
        floats = [x.dtype for x in jax.tree.leaves(self.arrays) if is_float(x.dtype)]
        return max(self.tolerance(dtype, roundings) for dtype in floats)


def _eps(dtype: Any) -> float:
    return float(ml_dtypes.finfo(dtype).eps)


def is_traced(x: Any) -> bool:
    """Whether an argument holds arrays."""
    return any(isinstance(leaf, np.ndarray | jax.Array) for leaf in jax.tree.leaves(x))


def is_float(dtype: Any) -> bool:
    """Whether it is a dtype of floats, of NumPy's or JAX's."""
    return jax.dtypes.issubdtype(dtype, np.floating)


class Draw:
    """Random choices, the same ones for the same key.

    Attributes:
        gradient: draw what has one.
        edge: draw empty axes, and options at the ends of their ranges.
        hostile: draw NaN and infinities where results are compared.
        kernel: draw dims and dtypes that the CUDA kernels take.
    """

    def __init__(self, operator: str, kind: str, *seeds: int) -> None:
        words = [zlib.crc32(word.encode()) for word in (operator, kind)]
        self.rng = np.random.default_rng([*words, *seeds])
        self.gradient, self.edge = "gradient" in kind, kind == "edge"
        self.hostile = kind in ("value", "vmap", "kernel")
        self.kernel = kind.startswith("kernel")

    def chance(self, p: float = 0.5) -> bool:
        """True with probability `p`."""
        return bool(self.rng.random() < p)

    def one(self, *choices: Any) -> Any:
        """One of the choices."""
        return choices[self.rng.integers(len(choices))]

    def dims(self, on_kernel: dict[str, tuple[int, ...]] | None = None, **most: int) -> list[int]:
        """Sizes from 1 to `most` each; at the edge up to two of them 0."""
        sizes = {name: int(self.rng.integers(1, high + 1)) for name, high in most.items()}
        if self.kernel:
            own = {n: choices for n, choices in (on_kernel or {}).items() if n in sizes}
            sizes |= {name: self.one(*choices) for name, choices in own.items()}
        if self.edge:
            empty = self.rng.permutation(list(sizes))[: self.one(0, 0, 0, 1, 2)]
            sizes |= dict.fromkeys(empty.tolist(), 0)
        return list(sizes.values())

    def dtype(self) -> np.dtype:
        """A dtype of q, k and v."""
        return bf16 if self.kernel else self.one(f32, f32, f32, bf16, f16, f64)

    def flag(self, p: float = 0.5) -> Any:
        """A bool, of one of the types that a bool may have."""
        return self.one(bool, bool, np.bool_)(self.chance(p))

    def integer(self, value: int) -> Any:
        """`value`, in one of the types that an int may have and that holds it."""
        kinds = [np.int8, np.uint8, np.int16, np.int32, np.int64, np.uint64]
        fits = [k for k in kinds if np.iinfo(k).min <= value <= np.iinfo(k).max]
        return self.one(int, int, int, *fits)(value)

    def below(self, size: int) -> int:
        """An int in 1..size, or 1."""
        return int(self.rng.integers(1, max(1, size) + 1))

    def scale(self) -> Any:
        """A scale of scores; None for the default."""
        choices = [None, None, 0.5, 1, np.float32(0.25), np.float64(0.3), np.float16(0.5)]
        choices += [] if self.kernel else [-0.5, 0.0]
        choices += [1e-300, 1e30, 1e39, 1e308, -(10**39)] if self.edge else []
        return self.one(*choices)

    def normal(self, dtype: np.dtype, *shape: int) -> np.ndarray:
        """Normal floats."""
        return self.rng.normal(size=shape).astype(dtype)

    def floats(self, dtype: np.dtype, *shape: int) -> np.ndarray:
        """Normal ones; hostile ones have NaN in some rows."""
        x = self.normal(dtype, *shape)
        if self.hostile and self.chance(0.3) and len(shape) > 1:
            x[self.rng.random(shape[:-1]) < 0.1] = np.nan
        return x

    def odd(self, dtype: np.dtype, *shape: int) -> np.ndarray:
        """-3, -1, 1 or 3: products and sums of them are exact, ties are many, and a sum of an odd
        number of them is not 0.
        """
        return self.rng.choice([-3, -1, 1, 3], size=shape).astype(dtype)

    def signs(self, shape: tuple[int, ...]) -> np.ndarray:
        """-1 or 1."""
        return self.rng.choice([-1.0, 1.0], size=shape)

    def powers(self, dtype: np.dtype, *shape: int) -> np.ndarray:
        """1/2, 1 or 2."""
        return self.rng.choice([0.5, 1, 2], size=shape).astype(dtype)

    def limits(self, dtype: np.dtype, *shape: int) -> np.ndarray:
        """Logits with +-inf among them."""
        x = self.rng.normal(size=shape)
        if self.chance():
            x = np.where(self.rng.random(shape) < 0.3, self.rng.choice([-np.inf, np.inf], shape), x)
        return x.astype(dtype)

    def bools(self, *shape: int) -> np.ndarray:
        """True for most, or for few, or for none."""
        return self.rng.random(shape) < self.one(0.8, 0.8, 0.3, 0.0)

    def positions(self, size: int, *shape: int) -> np.ndarray:
        """int32 from -1 to `size`, with the ends of int32 among them."""
        x = self.rng.integers(-1, size + 1, size=shape, endpoint=True)
        if self.chance():
            ends = [INT_MIN, INT_MIN, INT_MIN + 1, -1, INT_MAX - size, INT_MAX - 1, INT_MAX]
            x = np.where(self.rng.random(shape) < 0.5, self.rng.choice(ends, shape), x)
        return x.astype(i32)

    def maybe(self, draw: Callable[..., Any], *args: Any) -> Any:
        """What `draw` gives, or None."""
        return draw(*args) if self.chance() else None


def without_batch(call: Call) -> Call:
    """The call of one batch entry, without that axis."""
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
    """No score is larger than this."""
    q, k = (np.nan_to_num(np.asarray(x, f64), posinf=0, neginf=0) for x in (q, k))
    scale = max(1, q.shape[-1]) ** -0.5 if scale is None else abs(float(scale))
    norms = (np.sqrt((x * x).sum(-1)).max(initial=0) for x in (q, k))
    return scale * float(np.prod(list(norms)))
