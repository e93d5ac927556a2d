"""What a benchmark case is, and the inputs and counts that cases share."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    Scale = Callable[..., "Dims"]

Dims = dict[str, int]

COPY, BF16, FP8 = "copy", "bf16-matmul", "fp8-matmul"  # ceilings


@dataclasses.dataclass(frozen=True)
class Case:
    """One row of the benchmark, for each implementation.

    Attributes:
        operator: its name.
        step: "fwd", "bwd" or "bwd-deterministic": the CSV's `pass`.
        dims: sizes by letter, in the order of the case's name.
        dtype: of the main operands.
        make: random key -> the arguments, a tuple of pytrees of arrays.
        call: `(*arguments, implementation)` -> the outputs; for a backward pass only differentiable
            ones.
        work: by ceiling what the case must do: floating-point operations of a matmul, bytes of the
            copy. Slots without a key do not count. The ceiling that takes longest is the bound.
        diff: for a backward pass the arguments that have a gradient.
        peers: other implementations of the same: name -> function of the arguments.
        note: what the sizes do not say, for the case's name.
        all_slots: the operations if every slot counted, as some peers' figures have it.
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
        """ "T4096-S8192-N128" and so on."""
        sizes = [f"{letter}{size}" for letter, size in self.dims.items()]
        return "-".join([*sizes, *([self.note] if self.note else [])])

    @property
    def label(self) -> str:
        """All that tells this case from others."""
        return f"{self.operator} {self.step} {self.name} {self.dtype}"


def shrunk(scale: int, **dims: int) -> Dims:
    """`dims` with the long axes divided by `scale`, for machines without a GPU."""
    return {k: max(8, v // scale) if v >= 512 and k != "D" else v for k, v in dims.items()}


def normal(key: jax.Array, *shape: int, dtype: Any = jnp.bfloat16) -> jax.Array:
    """Standard normal values."""
    return jax.random.normal(key, shape, dtype)


def causal_selection(key: jax.Array, queries: int, keys: int, picks: int) -> jax.Array:
    """int32 [T, K]: K random keys of those that each query sees, ascending, then -1.

    The last query sees all keys. One key is drawn from each of K parts of what is visible.
    """
    visible = keys - queries + 1 + jnp.arange(queries)[:, None]
    slots = jnp.arange(picks)
    low, high = slots * visible // picks, (slots + 1) * visible // picks
    drawn = jax.random.randint(key, (queries, picks), low, high)
    return jnp.where(visible > picks, drawn, jnp.where(slots < visible, slots, -1))


def selected_pairs(queries: int, keys: int, picks: int) -> int:
    """(query, key) pairs of a `causal_selection`: early queries see fewer keys than `picks`."""
    return sum(min(keys - queries + 1 + t, picks) for t in range(queries))


def visible_pairs(queries: int, keys: int) -> int:
    """(query, key) pairs under a causal mask whose last query sees all keys."""
    return selected_pairs(queries, keys, keys)


def cudnn(is_causal: bool, q: jax.Array, k: jax.Array, v: jax.Array, **options: Any) -> jax.Array:
    """cuDNN's attention through `jax.nn`, which wants values of the keys' dims: they are padded."""
    e = v.shape[3]
    v = jnp.pad(v, [(0, 0)] * 3 + [(0, k.shape[3] - e)])
    out = jax.nn.dot_product_attention(
        q, k, v, is_causal=is_causal, implementation="cudnn", **options
    )
    return out[..., :e]
