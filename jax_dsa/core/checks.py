"""Argument checks: a message names the operator, the argument, what it got and what it wants."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

Implementation = Literal["cuda", "xla"]

FLOATS = (jnp.bfloat16, jnp.float16, jnp.float32, jnp.float64)
INT32 = (jnp.int32,)
FLOAT32 = (jnp.float32, jnp.float64)
BOOL = (jnp.bool_,)


def _is_array(x: Any) -> bool:
    return isinstance(x, jax.Array | np.ndarray | np.generic)


class Args:
    """Checks one call's arguments, letter by letter: the first use of a dimension's letter binds
    its size.

    `lead` is the operand that decides whether the call has a batch axis: with one axis less than
        `dims` says, the batch
    axis "B" is absent from every argument, is added to what `array` returns, and `restore` drops it
    from the results.
    """

    def __init__(self, op: str, name: str, lead: Any, dims: str) -> None:
        self.op = op
        self.sizes: dict[str, int] = {}
        self._bound_by: dict[str, str] = {}
        rank = len(dims.split())
        if not _is_array(lead):
            raise TypeError(f"{op}: argument '{name}' is {type(lead).__name__}, want an array")
        if lead.ndim not in (rank, rank - 1):
            raise ValueError(
                f"{op}: argument '{name}' has shape {lead.shape}, want {self._want(dims)} "
                f"(or without the batch axis B)"
            )
        self.batched = lead.ndim == rank

    def array(self, name: str, x: Any, dims: str, dtypes: Sequence[Any]) -> jax.Array:
        """`x` as an array whose axes are `dims` (letters or numbers), batch axis added if the call
        has none.
        """
        x = self.typed(name, x, dtypes)
        tokens = dims.split()
        if not self.batched:
            tokens = [d for d in tokens if d != "B"]
        if x.ndim != len(tokens):
            raise ValueError(
                f"{self.op}: argument '{name}' has shape {x.shape}, want "
                f"{self._want(' '.join(tokens))}"
            )
        for token, size in zip(tokens, x.shape, strict=True):
            want = int(token) if token.isdigit() else self.sizes.setdefault(token, size)
            if size != want:
                raise ValueError(
                    f"{self.op}: argument '{name}' has shape {x.shape}, want "
                    f"{self._want(' '.join(tokens))}"
                )
            self._bound_by.setdefault(token, name)
        if not self.batched and "B" in dims.split():
            x = jnp.expand_dims(x, dims.split().index("B"))
        return x

    def typed(self, name: str, x: Any, dtypes: Sequence[Any]) -> jax.Array:
        """`x` as an array of one of `dtypes`, whatever its shape."""
        names = " or ".join(jnp.dtype(d).name for d in dtypes)
        if not _is_array(x):
            raise TypeError(
                f"{self.op}: argument '{name}' is {type(x).__name__}, want an array of {names}"
            )
        dtype = x.dtype
        if np.issubdtype(dtype, np.floating):  # NumPy's float64 is float32 unless JAX runs in x64
            dtype = jax.dtypes.canonicalize_dtype(dtype)
        if dtype not in [jnp.dtype(d) for d in dtypes]:
            raise TypeError(f"{self.op}: argument '{name}' has dtype {x.dtype}, want {names}")
        return jnp.asarray(x)

    def option(self, name: str, value: Any, ok: bool, want: str) -> None:
        """Raises ValueError unless `ok`."""
        if not ok:
            raise ValueError(f"{self.op}: argument '{name}' is {value!r}, want {want}")

    def integer(self, name: str, value: Any, low: int, high: int | None = None) -> int:
        """`value` as a static int in low..high."""
        if isinstance(value, bool) or not isinstance(value, int | np.integer):
            raise TypeError(
                f"{self.op}: argument '{name}' is {value!r} ({type(value).__name__}), want an int"
            )
        number = int(value)
        want = f">= {low}" if high is None else f"in {low}..{high}"
        self.option(name, value, low <= number and (high is None or number <= high), f"int {want}")
        return number

    def flag(self, name: str, value: Any) -> bool:
        """`value` as a static bool."""
        if not isinstance(value, bool | np.bool_):
            raise TypeError(
                f"{self.op}: argument '{name}' is {value!r} ({type(value).__name__}), want a bool"
            )
        return bool(value)

    def real(self, name: str, value: Any) -> float:
        """`value` as a static finite float."""
        number = isinstance(value, int | float | np.integer | np.floating)
        if isinstance(value, bool) or not number:
            raise TypeError(
                f"{self.op}: argument '{name}' is {value!r} ({type(value).__name__}), "
                f"want a static float"
            )
        self.option(name, value, bool(np.isfinite(value)), "a finite float")
        return float(value)

    def query_positions(self, name: str, value: Any, batch: int, queries: int) -> jax.Array:
        """int32 [B, T] positions `value + t`; `value` is an int, an int32 scalar, or int32 [B]."""
        if not _is_array(value):
            value = np.int32(self.integer(name, value, -(2**31), 2**31 - 1))
        start = self.typed(name, value, INT32)
        if start.shape not in ((), (batch,)):
            raise ValueError(
                f"{self.op}: argument '{name}' has shape {start.shape}, "
                f"want an int, () or [B={batch}]"
            )
        rows = jnp.broadcast_to(start.reshape(-1, 1), (batch, 1))
        return rows + jnp.arange(queries, dtype=jnp.int32)

    def implementation(self, value: Any) -> Implementation | None:
        """`value`, or what the environment variable JAX_DSA_IMPL says where `value` is None."""
        name = "implementation"
        if value is None:
            value, name = os.environ.get("JAX_DSA_IMPL") or None, "JAX_DSA_IMPL"
        self.option(name, value, value in (None, "cuda", "xla"), "None, 'cuda' or 'xla'")
        return value

    def restore(self, *results: jax.Array) -> Any:
        """The results, without the batch axis if the call had none; a single one is not wrapped in
        a tuple.
        """
        out = results if self.batched else tuple(r[0] for r in results)
        return out[0] if len(out) == 1 else out

    def _want(self, dims: str) -> str:
        known = [
            f"{d}={self.sizes[d]} (from '{self._bound_by[d]}')"
            for d in dims.split()
            if d in self.sizes
        ]
        return f"[{', '.join(dims.split())}]" + (f" with {', '.join(known)}" if known else "")
