"""The benchmark case, and the inputs and counts that several cases share."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    Scale = Callable[..., "Dims"]

Dims = dict[str, int]

COPY, BF16, FP8 = "copy", "bf16-matmul", "fp8-matmul"  # names of the ceilings


@dataclasses.dataclass(frozen=True)
class Case:
    """One problem that is measured with every implementation.

    Attributes:
        operator: Name of the operator.
        step: "fwd", "bwd" or "bwd-deterministic". The CSV's column is called `pass`.
        dims: Sizes by letter, in the order of the case's name.
        dtype: Dtype of the main operands.
        make: Function of a random key that returns the arguments, a tuple of pytrees of arrays.
        call: Function `(*arguments, implementation)` that returns the outputs. For a backward pass
            it returns only differentiable outputs.
        work: The work of the case by ceiling: floating-point operations for the ceilings of matrix
            products, bytes for the copy. Empty slots of a selection do not count. The ceiling that
            takes longest bounds the case.
        diff: Positions of the arguments that have a gradient. Empty for a forward pass.
        peers: Other implementations of the same problem, by name, as functions of the arguments.
        note: A part of the case's name, for what the sizes do not say.
        all_slots: Floating-point operations if empty slots counted too, as some libraries count.
    """

    operator: str
    step: str
    dims: Dims
    dtype: str
    make: Callable[[jax.Array], tuple]
    call: Callable[..., Any]
    work: Mapping[str, float]
    diff: tuple[int, ...] = ()
    peers: dict[str, Callable[..., Any]] = dataclasses.field(default_factory=dict)
    note: str = ""
    all_slots: float | None = None

    @property
    def name(self) -> str:
        """The sizes and the note, such as "T4096-S8192-N128-D128-causal"."""
        sizes = [f"{letter}{size}" for letter, size in self.dims.items()]
        return "-".join([*sizes, *([self.note] if self.note else [])])

    @property
    def label(self) -> str:
        """A name that no other case has."""
        return f"{self.operator} {self.step} {self.name} {self.dtype}"


def shrunk(scale: int, **dims: int) -> Dims:
    """Returns `dims` with the long axes divided by `scale`, for machines without a GPU."""
    return {k: max(8, v // scale) if v >= 512 and k != "D" else v for k, v in dims.items()}


def normal(key: jax.Array, *shape: int, dtype: Any = jnp.bfloat16) -> jax.Array:
    """Returns standard normal values."""
    return jax.random.normal(key, shape, dtype)


def normal_rows(count: int, length: int, dtype: Any, key: jax.Array) -> tuple[jax.Array]:
    """Returns the arguments of an operator that takes one array [count, length]."""
    return (normal(key, count, length, dtype=dtype),)


def causal_selection(key: jax.Array, queries: int, keys: int, top_k: int) -> jax.Array:
    """Returns a random causal selection, int32 [queries, top_k].

    The last query sees all keys. The visible keys of each query are divided into `top_k` intervals,
    and one key is drawn from each, so the indices ascend. Queries that see at most `top_k` keys
    select all of them, followed by -1.
    """
    visible = keys - queries + 1 + jnp.arange(queries)[:, None]
    slots = jnp.arange(top_k)
    low, high = slots * visible // top_k, (slots + 1) * visible // top_k
    drawn = jax.random.randint(key, (queries, top_k), low, high)
    return jnp.where(visible > top_k, drawn, jnp.where(slots < visible, slots, -1))


def selected_pairs(queries: int, keys: int, top_k: int) -> int:
    """Returns the number of (query, key) pairs of a `causal_selection`.

    Early queries see fewer keys than `top_k`.
    """
    return sum(min(keys - queries + 1 + t, top_k) for t in range(queries))


def visible_pairs(queries: int, keys: int) -> int:
    """Returns the number of (query, key) pairs of a causal mask whose last query sees all keys."""
    return selected_pairs(queries, keys, keys)


def cudnn(is_causal: bool, q: jax.Array, k: jax.Array, v: jax.Array, **options: Any) -> jax.Array:
    """Calls cuDNN's attention through `jax.nn`.

    It requires values with as many dims as the keys, so the values are padded with zeros.
    """
    e = v.shape[3]
    v = jnp.pad(v, [(0, 0)] * 3 + [(0, k.shape[3] - e)])
    out = jax.nn.dot_product_attention(
        q, k, v, is_causal=is_causal, implementation="cudnn", **options
    )
    return out[..., :e]
