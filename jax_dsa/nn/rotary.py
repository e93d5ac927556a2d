"""Rotations of queries and keys: rotary position embedding and the Hadamard transform."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal, get_args

import jax.numpy as jnp
import numpy as np

from jax_dsa.core.typing import Array, Float, Int

if TYPE_CHECKING:
    from collections.abc import Sequence

RopeLayout = Literal["half", "interleaved"]
ROPE_LAYOUTS = get_args(RopeLayout)


def rope(
    x: Float[Array, "B T *H R"],
    positions: Int[Array, "B T"],
    *,
    base: float = 10000.0,
    layout: RopeLayout = "half",
    frequencies: Sequence[float] | None = None,
    factor: float = 1.0,
) -> Float[Array, "B T *H R"]:
    """Rotates pair i of the last axis by `positions * base^(-2i/R)` radians; R is even.

    With `frequencies`, R/2 radians per position, by `positions * frequencies[i]` instead. `factor`
    multiplies what was rotated.

    Layout "half" pairs element i with i + R/2, "interleaved" pairs 2i with 2i + 1. Weights trained
    with one layout do not work with the other: a model that is loaded with the wrong one still
    runs, and no longer finds its keys.

    Source: RoFormer (Su et al., 2021). Computed in float32, returned in the dtype of `x`.
    """
    if layout not in ROPE_LAYOUTS:
        raise ValueError(f"rope: argument 'layout' is {layout!r}, want one of {ROPE_LAYOUTS}")
    width = x.shape[-1]
    if width % 2:
        raise ValueError(f"rope: argument 'x' has shape {x.shape}, want an even last axis")
    if width == 0:
        return x
    if frequencies is None:
        frequency = base ** (-np.arange(0, width, 2, dtype=np.float32) / width)
    elif len(frequencies) == width // 2:
        frequency = np.asarray(frequencies, np.float32)
    else:
        raise ValueError(
            f"rope: argument 'frequencies' has {len(frequencies)} numbers, want {width // 2}"
        )
    angle = positions[..., None].astype(jnp.float32) * frequency
    angle = angle.reshape(*positions.shape, *(1,) * (x.ndim - positions.ndim - 1), width // 2)
    cos, sin = factor * jnp.cos(angle), factor * jnp.sin(angle)
    wide = x.astype(jnp.float32)
    if layout == "half":
        a, b = jnp.split(wide, 2, axis=-1)
        rotated = jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)
    else:
        a, b = wide[..., 0::2], wide[..., 1::2]
        rotated = jnp.stack([a * cos - b * sin, a * sin + b * cos], axis=-1).reshape(x.shape)
    return rotated.astype(x.dtype)


def yarn_frequencies(
    width: int,
    *,
    base: float,
    factor: float,
    original_length: int,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    truncate: bool = True,
) -> tuple[float, ...]:
    """Frequencies for `rope` that stretch a context of `original_length` tokens by `factor`.

    A pair that turns more than `beta_fast` times within the original length keeps its frequency,
    one that turns less than `beta_slow` times has it divided by `factor`, and between them the
    share of the two goes linearly with the pair's number. `truncate` widens that range to whole
    pairs.

    Source: YaRN (Peng et al., 2023), section 3.2.
    """
    pairs = np.arange(width // 2)
    plain = float(base) ** (-2.0 * pairs / width)

    def turning(times: float) -> float:
        """The pair, not always a whole one, that turns so often within the original length."""
        return width * math.log(original_length / (2 * math.pi * times)) / (2 * math.log(base))

    first, last = turning(beta_fast), turning(beta_slow)
    if truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, width - 1)
    stretched = np.clip((pairs - first) / max(last - first, 1e-3), 0, 1)
    return tuple(map(float, plain * (1 - stretched) + plain / factor * stretched))


def hadamard(x: Float[Array, "*B C"]) -> Float[Array, "*B C"]:
    """Multiplies the last axis by the Hadamard matrix scaled by C^-1/2, which is orthogonal; C is a
    power of two.

    Applied to queries and keys alike it changes no dot product, and it spreads outliers over all C
    elements before they are quantised.
    """
    width = x.shape[-1]
    if width < 1 or width & (width - 1):
        raise ValueError(f"hadamard: argument 'x' has shape {x.shape}, want a power of two last")
    matrix = np.ones((1, 1), np.float32)
    while len(matrix) < width:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return (x.astype(jnp.float32) @ (matrix * width**-0.5)).astype(x.dtype)
